"""PCI addresses: parse, order, format.

Source: Documentation/ABI/testing/sysfs-bus-pci, drivers/pci/probe.c (``%04x:%02x:%02x.%d``).
The domain is an integer of up to 32 bits (VMD and Hyper-V number past 0xffff), the function one
hexadecimal digit here because ARI functions past 7 are written by some tools as ``.a``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from provisioner.errors import ParseError, shorten

# The domain may be left out, as lspci does on machines with one. NVIDIA's tools write it with 8 digits.
_ADDRESS = re.compile(
    r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-9a-fA-F])", re.ASCII
)
_ROOT = re.compile(r"pci([0-9a-f]{4,8}):([0-9a-f]{2})", re.ASCII)


class PciAddress(NamedTuple):
    """One PCI function's address; sorts in PCI order (domain, bus, device, function)."""

    domain: int  # 0 to 0xffffffff
    bus: int  # 0 to 0xff
    device: int  # 0 to 0x1f
    function: int  # 0 to 0xf

    def __str__(self) -> str:
        """The kernel's form, e.g. ``0000:1b:00.0``; the domain has at least four digits."""
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function:x}"


def find_pci_address(text: str) -> PciAddress | None:
    """The address that the whole text is, or None if it is none."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    if int(device, 16) > 0x1F:
        return None
    return PciAddress(int(domain or "0", 16), int(bus, 16), int(device, 16), int(function, 16))


def parse_pci_address(text: str) -> PciAddress:
    """The address that the text names; case and the number of domain digits do not matter.

    Raises ParseError if it names none.
    """
    address = find_pci_address(text.strip())
    if address is None:
        raise ParseError(f"'{shorten(text)}' is no PCI address: expected the form '0000:1b:00.0'")
    return address


def is_pci_root(component: str) -> bool:
    """Whether a component of a sysfs path is a host bridge's, e.g. ``pci0000:00``."""
    return _ROOT.fullmatch(component) is not None
