"""The cards of every vendor."""

from __future__ import annotations

from provisioner.discovery.nvidia import find_nvidia_cards
from provisioner.discovery.pcibus import AMD, ASCEND, CARD_CLASSES, HABANA, HYGON, INTEL, PciBus
from provisioner.root import Root
from provisioner.sysfs import has_unified_bus
from provisioner.topology import Accelerator


def find_cards(root: Root, bus: PciBus, oddities: list[str]) -> tuple[Accelerator, ...]:
    """Every card, by vendor and then in PCI order.

    Integrated and BMC graphics are none, and a part of a card (MIG, a partition, a virtual
    function) belongs to its card. A vendor's module is loaded where the bus shows something of it,
    or shows nothing at all.
    """
    cards = [*find_nvidia_cards(root, bus, oddities)]
    vendors = bus.card_vendors()
    is_blind = not bus.classes
    if is_blind or AMD in vendors:
        from provisioner.discovery.amd import find_amd_cards

        cards += find_amd_cards(root, bus, oddities)
    if is_blind or HYGON in vendors:
        from provisioner.discovery.amd import find_hygon_cards

        cards += find_hygon_cards(root, bus, oddities)
    if INTEL in vendors:
        from provisioner.discovery.intel import find_intel_cards

        cards += find_intel_cards(root, bus, oddities)
    if HABANA in vendors:
        from provisioner.discovery.habana import find_habana_cards

        cards += find_habana_cards(root, bus, oddities)
    if not cards or ASCEND in vendors or has_unified_bus(root):
        from provisioner.discovery.ascend import find_ascend_cards

        cards += find_ascend_cards(root, bus, oddities)
    if None in vendors:
        nobodys = ", ".join(str(address) for address in bus.of_vendor(None, *CARD_CLASSES))
        oddities.append(
            f"PCI functions {nobodys} are of classes that cards have and do not say their vendor: "
            "not planned for."
        )
    return tuple(cards)
