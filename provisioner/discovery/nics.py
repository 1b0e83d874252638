"""Network and RDMA devices on the PCI bus."""

from __future__ import annotations

from collections import defaultdict

from provisioner.discovery.pcibus import PciBus
from provisioner.pci import PciAddress
from provisioner.root import Root
from provisioner.sysfs import (
    is_virtual_function,
    list_class_devices,
    list_function_devices,
    list_rdma_ports,
)
from provisioner.topology import Nic

# The base class of network controllers: Ethernet, InfiniBand, fabrics. Source: include/linux/pci_ids.h.
_BASE_CLASS = 0x02


def find_nics(root: Root, bus: PciBus) -> tuple[Nic, ...]:
    """Every PCI function of a network class, or that an RDMA or network device sits on, in PCI order.

    Devices without PCI (loopback, bridges, soft RDMA such as rxe) are none.
    """
    rdma: dict[PciAddress, list[str]] = defaultdict(list)
    net: dict[PciAddress, list[str]] = defaultdict(list)
    on_bus = bus.of_base_class(_BASE_CLASS)
    for kind, names in (("infiniband", rdma), ("net", net)):
        for name, address in list_class_devices(root, kind):
            names[address].append(name)
        for address in on_bus:
            # Some captures lack a device's link to its function; the function holds it all the same.
            if address not in names and (held := list_function_devices(root, address, kind)):
                names[address] = held
    addresses = sorted({*on_bus, *rdma, *net})
    for address in addresses:
        bus.take(address)
    return tuple(
        Nic(
            address,
            tuple(sorted(rdma.get(address, ()))),
            tuple(sorted(net.get(address, ()))),
            is_virtual_function(root, address),
            tuple(list_rdma_ports(root, name) for name in sorted(rdma.get(address, ()))),
        )
        for address in addresses
    )
