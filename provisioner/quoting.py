"""Quoting, one function for each place that a value can stand in. Pure.

Each makes a text that the reader of its place takes back as the value itself, and that can't end
the value early. The rules are those of systemd 252; tests ask its own parsers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from provisioner.errors import InputError

# Noncharacters: systemd takes a text with one for no UTF-8 and drops the line.
# Source: unichar_is_valid in systemd's src/basic/utf8.c.
_NONCHARACTERS = "\ufdd0-\ufdef" + "".join(
    f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(0, 0x110000, 0x10000)
)
_CONTROLS = r"\x00-\x1f\x7f"
_UNSAYABLE = re.compile("[\0\ud800-\udfff]")  # no process can be given these
_NO_UNIT_TEXT = re.compile(rf"[{_CONTROLS}{_NONCHARACTERS}]|\A | \Z|\\\Z")
_EXEC_SPECIAL = re.compile(rf'[{_CONTROLS}{_NONCHARACTERS}"\\%$]')
_EXEC_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_EXEC_ESCAPES = {'"': '\\"', "\\": "\\\\", "%": "%%", "$": "$$", "\n": "\\n"}
_ENV_NO_TEXT = re.compile(f"[{_NONCHARACTERS}]")
_ENV_SPECIAL = re.compile(r'[\\"$`]')
_ENV_PLAIN = re.compile(r"[A-Za-z0-9_./:,@+-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def _check_sayable(text: str) -> str:
    if _UNSAYABLE.search(text):
        raise InputError(f"{text!a} has a zero byte or half a character: expected text")
    return text


def is_unit_text(text: str) -> bool:
    """Whether a setting without quotes can say the text: one line, no space or backslash at an end."""
    return not _NO_UNIT_TEXT.search(text)


def quote_unit(value: object) -> str:
    """The value of a setting that knows specifiers and no quotes. Source: systemd.unit(5).

    Raises: InputError for what such a setting can't say.
    """
    text = _check_sayable(str(value))
    if not is_unit_text(text):
        raise InputError(
            f"{text!a} can't be a value in a unit: expected one line that neither begins nor "
            "ends with a space or a backslash"
        )
    return text.replace("%", "%%")


def quote_exec(words: Iterable[str]) -> str:
    """The value of ExecStart= for a vector of arguments. Source: systemd.service(5), Command lines."""

    def escape(match: re.Match[str]) -> str:
        char = match[0]
        return _EXEC_ESCAPES.get(char) or "".join(f"\\x{byte:02x}" for byte in char.encode())

    return " ".join(
        word
        if _EXEC_PLAIN.fullmatch(word)
        else '"' + _EXEC_SPECIAL.sub(escape, _check_sayable(word)) + '"'
        for word in words
    )


def quote_env(value: object) -> str:
    """The value of a variable, for systemd's EnvironmentFile= and a shell's `.` alike.

    Within double quotes both take all but four characters as they are, newlines too.
    Source: parse_env_file_internal in systemd's src/basic/env-file.c; POSIX 2.2.3.
    """
    text = _check_sayable(str(value))
    if _ENV_NO_TEXT.search(text):
        raise InputError(
            f"{text!a} can't be a variable's value: it has a noncharacter, which systemd refuses"
        )
    if _ENV_PLAIN.fullmatch(text):
        return text
    return '"' + _ENV_SPECIAL.sub(r"\\\g<0>", text) + '"'


def check_variable(name: str) -> str:
    """The name of a variable as it is. Raises: InputError if it is none."""
    if not _VARIABLE.fullmatch(name):
        raise InputError(f"{name!a} is no variable's name: expected letters, digits and '_'")
    return name


def quote_shell(value: object) -> str:
    """One word for a POSIX shell. Source: POSIX 2.2.2."""
    return "'" + str(value).replace("'", "'\\''") + "'"


def format_comments(lines: Iterable[str]) -> str:
    """Comment lines, each one line and printable; a backslash at its end would take in the next."""
    shown = (line if line.isprintable() else ascii(line)[1:-1] for line in lines)
    return "\n".join(f"# {line} " if line.endswith("\\") else f"# {line}" for line in shown)


def format_is_set(name: str) -> str:
    """A shell's word that is empty if the variable is not set."""
    return "${" + check_variable(name) + "+set}"
