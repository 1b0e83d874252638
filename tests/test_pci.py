"""PCI addresses."""

from __future__ import annotations

import pytest

from provisioner.errors import ParseError
from provisioner.pci import PciAddress, find_pci_address, is_pci_root, parse_pci_address


@pytest.mark.parametrize(
    "text, formatted",
    [
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("1b:00.0", "0000:1b:00.0"),
        ("10000:00:02.1", "10000:00:02.1"),
        ("DEADBEEF:00:1f.7", "deadbeef:00:1f.7"),
    ],
)
def test_forms(text: str, formatted: str) -> None:
    """An address is read in every form that tools write, and written as the kernel does."""
    assert str(parse_pci_address(text)) == formatted


@pytest.mark.parametrize(
    "text", ["", "0000:1b:00", "0000:1b:20.0", "123456789:1b:00.0", "0000:1b:00.0/x", "x:00.0"]
)
def test_refused(text: str) -> None:
    """Text that is no address is refused with the form that is expected."""
    assert find_pci_address(text) is None
    with pytest.raises(ParseError, match="expected the form"):
        parse_pci_address(text)


def test_order() -> None:
    """Addresses sort by number, so a five-digit domain comes after every four-digit one."""
    texts = ["10000:00:00.0", "ffff:00:00.0", "0000:0a:00.0", "0000:09:1f.1", "0000:09:1f.0"]
    assert sorted(parse_pci_address(text) for text in texts) == [
        PciAddress(0, 9, 0x1F, 0),
        PciAddress(0, 9, 0x1F, 1),
        PciAddress(0, 10, 0, 0),
        PciAddress(0xFFFF, 0, 0, 0),
        PciAddress(0x10000, 0, 0, 0),
    ]


def test_root() -> None:
    """A host bridge is told from a function by its folder's name."""
    assert is_pci_root("pci0000:00")
    assert is_pci_root("pci10000:e0")
    assert not is_pci_root("0000:00:01.0")
