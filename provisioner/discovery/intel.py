"""Intel's GPUs: cards of the i915 and xe drivers.

Level Zero counts them in PCI order with ZE_ENABLE_PCI_ID_DEVICE_ORDER=1, integrated graphics
included.
"""

from __future__ import annotations

from provisioner.cardfs import read_pci_driver
from provisioner.discovery.pcibus import INTEL, PciBus
from provisioner.pci import PciAddress
from provisioner.root import Root
from provisioner.sysfs import read_pci_device
from provisioner.topology import Accelerator

# VGA, 3D and other display controllers. The NPU of a client processor is a processing accelerator
# (0x1200) and no card. Source: include/linux/pci_ids.h.
_CLASSES = (0x0300, 0x0302, 0x0380)
_DRIVERS = ("i915", "xe")
# Integrated graphics are device 2 of bus 0 on every Intel processor. A card can be there too, where
# a virtual machine was given one: by its id. Source: include/drm/intel/pciids.h, the platforms with
# memory of their own: XeHP SDV, PVC, DG1, DG2 and ATS-M, CRI, BMG.
_CARD_IDS = (
    range(0x0201, 0x0211),
    range(0x0B69, 0x0B6F),
    range(0x0BD0, 0x0BE6),
    range(0x4905, 0x490A),
    range(0x5690, 0x56C3),
    range(0x674C, 0x674D),
    range(0xE200, 0xE300),
)


def find_intel_cards(root: Root, bus: PciBus, oddities: list[str]) -> tuple[Accelerator, ...]:
    """The cards on the PCI bus, without integrated graphics."""
    found: list[Accelerator] = []
    counted = 0  # GPUs that Level Zero counts before this one
    for address in bus.of_vendor(INTEL, *_CLASSES):
        is_held = read_pci_driver(root, address) in _DRIVERS
        if _is_integrated(root, address):
            counted += is_held
            continue
        index = len(found)
        found.append(
            Accelerator(
                "intel",
                index,
                bus.take(address).address,
                "driver" if is_held else "pci",
                numbers=() if counted == index else (counted,),
            )
        )
        counted += 1
    if found and counted > len(found):
        oddities.append(
            "Level Zero counts the integrated graphics too: numbers in ZE_AFFINITY_MASK are not card numbers."
        )
    return tuple(found)


def _is_integrated(root: Root, address: PciAddress) -> bool:
    if address[:3] != (0, 0, 2):
        return False
    device = read_pci_device(root, address)
    return device is None or not any(device in ids for ids in _CARD_IDS)
