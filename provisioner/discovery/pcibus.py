"""The PCI bus: classes read once for every function, the rest only for those that matter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping

from provisioner.pci import PciAddress
from provisioner.root import Root
from provisioner.sysfs import (
    is_virtual_function,
    list_pci,
    read_pci_class,
    read_pci_device,
    read_pci_local_cpus,
    read_pci_numa_node,
    read_pci_path,
    read_pci_vendor,
)
from provisioner.topology import PciFunction

# Vendor ids. Source: include/linux/pci_ids.h, and the PCI ID repository for Habana's.
NVIDIA, AMD, HYGON = 0x10DE, 0x1002, 0x1D94
INTEL, HABANA, ASCEND = 0x8086, 0x1DA3, 0x19E5

# Every class that some vendor's cards have: VGA, 3D and other display controllers, co-processors,
# processing accelerators. Source: include/linux/pci_ids.h.
CARD_CLASSES = (0x0300, 0x0302, 0x0380, 0x0B40, 0x1200)


class PciBus:
    """The functions of a root, and those that discovery has taken up so far."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._taken: dict[PciAddress, PciFunction] = {}
        # Taken as such: without what only devices are asked for.
        self._bridges: set[PciAddress] = set()
        self._vendors: dict[PciAddress, int | None] = {}
        self._by_vendor: dict[int | None, list[PciAddress]] | None = None
        # A function without a class file can't be told from any other; it is no card and no NIC.
        self.classes: dict[PciAddress, int] = {
            address: kind
            for address in list_pci(root)
            if (kind := read_pci_class(root, address)) is not None
        }

    def of_class(self, *classes: int) -> list[PciAddress]:
        """The functions whose base class and subclass (16 bits) is one of these, in PCI order."""
        return [address for address, kind in self.classes.items() if kind >> 8 in classes]

    def of_vendor(self, vendor: int | None, *classes: int) -> list[PciAddress]:
        """A vendor's functions of these classes, in PCI order, without virtual ones; None: of nobody known.

        The classes are among those that some vendor's cards have. A virtual function (vGPU, SR-IOV)
        belongs to its card and is none itself.
        """
        return [
            address
            for address in self._grouped().get(vendor, ())
            if self.classes[address] >> 8 in classes
            and not is_virtual_function(self._root, address)
        ]

    def card_vendors(self) -> Container[int | None]:
        """The vendors that have a function of a class that cards have, graphics included."""
        return self._grouped()

    def _grouped(self) -> Mapping[int | None, list[PciAddress]]:
        if self._by_vendor is None:
            self._by_vendor = defaultdict(list)
            for address in self.of_class(*CARD_CLASSES):
                self._by_vendor[self.vendor(address)].append(address)
        return self._by_vendor

    def of_base_class(self, base: int) -> list[PciAddress]:
        """The functions whose base class (8 bits) is this, in PCI order."""
        return [address for address, kind in self.classes.items() if kind >> 16 == base]

    def vendor(self, address: PciAddress) -> int | None:
        """The function's vendor id."""
        if address not in self._vendors:
            self._vendors[address] = read_pci_vendor(self._root, address)
        return self._vendors[address]

    def take(self, address: PciAddress) -> PciFunction:
        """The function, kept for the machine together with every bridge above it."""
        known = self._taken.get(address)
        if known is not None and address not in self._bridges:
            return known
        host_bridge, bridges = read_pci_path(self._root, address)
        parent: PciAddress | None = None
        for bridge in bridges:
            if bridge not in self._taken:
                self._bridges.add(bridge)
                self._taken[bridge] = PciFunction(
                    bridge, parent, host_bridge, read_pci_numa_node(self._root, bridge), None
                )
            parent = bridge
        function = PciFunction(
            address,
            parent,
            host_bridge,
            read_pci_numa_node(self._root, address),
            read_pci_local_cpus(self._root, address),
            self.vendor(address),
            read_pci_device(self._root, address),
        )
        self._taken[address] = function
        self._bridges.discard(address)
        return function

    def functions(self) -> dict[PciAddress, PciFunction]:
        """Every function that was taken, and the bridges above them, in PCI order."""
        return dict(sorted(self._taken.items()))
