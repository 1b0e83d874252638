"""Sizes in bytes as people write them. Pure."""

from __future__ import annotations

import re

from provisioner.errors import ParseError, shorten

SIZE_FORM = "a size such as '200GiB', '1.5TiB' or '200GB', or a number of bytes"

_BINARY_UNITS = {"PiB": 1 << 50, "TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_DECIMAL_UNITS = {"PB": 10**15, "TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}
_UNITS = {name.lower(): size for name, size in (_BINARY_UNITS | _DECIMAL_UNITS).items()}
# 20 digits are past 64 bits, and int() refuses over 4300 digits with an error of its own.
_SIZE = re.compile(r"([0-9]{1,20})(?:(?:\.([0-9]{1,20}))?\s*([A-Za-z]+))?", re.ASCII)


def parse_size(text: str) -> int:
    """The number of bytes that a size such as ``200GiB``, ``1.5 TiB``, ``200GB`` or ``4096`` names.

    A fraction of a byte is rounded up, as a size says what is needed.

    Raises:
        ParseError: the text is no such size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get((match[3] or "B").lower()) if match is not None else None
    if match is None or unit is None:
        raise ParseError(f"'{shorten(text)}' is no size: expected {SIZE_FORM}")
    fraction = match[2] or ""
    scale: int = 10 ** len(fraction)
    return -(-int(match[1] + fraction) * unit // scale)


def format_size(size: int) -> str:
    """The size in the largest binary unit that divides it, which `parse_size` reads back."""
    for name, unit in _BINARY_UNITS.items():
        if size and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)
