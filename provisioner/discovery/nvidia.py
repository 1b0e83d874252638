"""NVIDIA cards.

Their order is the PCI order, which is the driver's own enumeration and CUDA's with
CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

from provisioner.discovery.pcibus import NVIDIA, PciBus
from provisioner.idset import NodeSet
from provisioner.pci import PciAddress
from provisioner.root import Root
from provisioner.sysfs import (
    is_virtual_function,
    list_nvidia_driver,
    list_nvidia_nodes,
    read_nvidia_information,
    read_nvidia_memory_node,
)
from provisioner.topology import Accelerator

VENDOR = "nvidia"
# VGA, 3D and other display controllers. An NVSwitch is a bridge (0x0680) and an audio function
# multimedia (0x0403), so neither is among them. Source: include/linux/pci_ids.h.
_CLASSES = (0x0300, 0x0302, 0x0380)


def find_nvidia_cards(root: Root, bus: PciBus, oddities: list[str]) -> tuple[Accelerator, ...]:
    """The cards that the driver holds; without it those on the PCI bus; else the device nodes.

    A virtual function (vGPU, SR-IOV) belongs to its card and is none itself.
    """
    on_bus = bus.of_vendor(NVIDIA, *_CLASSES)
    held = [
        address for address in list_nvidia_driver(root) if not is_virtual_function(root, address)
    ]
    if held:
        unheld = [str(address) for address in on_bus if address not in held]
        if unheld:
            oddities.append(
                f"NVIDIA's driver does not hold {', '.join(unheld)}, which the PCI bus shows: "
                "not planned for, and not counted."
            )
        return tuple(_held_card(root, bus, index, address) for index, address in enumerate(held))
    if on_bus:
        for address in on_bus:
            bus.take(address)
        return tuple(
            Accelerator(VENDOR, index, address, "pci") for index, address in enumerate(on_bus)
        )
    return tuple(
        Accelerator(VENDOR, index, None, "dev", minor=minor)
        for index, minor in enumerate(list_nvidia_nodes(root))
    )


def _held_card(root: Root, bus: PciBus, index: int, address: PciAddress) -> Accelerator:
    if address in bus.classes:
        bus.take(address)
    information = read_nvidia_information(root, address)
    memory_node = read_nvidia_memory_node(root, address)
    return Accelerator(
        VENDOR,
        index,
        address,
        "driver",
        information.model,
        information.uuid,
        information.minor,
        NodeSet() if memory_node is None else NodeSet((memory_node,)),
    )
