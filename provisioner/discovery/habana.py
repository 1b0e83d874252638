"""Habana's (Intel's) Gaudi cards."""

from __future__ import annotations

from provisioner.cardfs import read_gaudi_cards
from provisioner.discovery.pcibus import HABANA, PciBus
from provisioner.root import Root
from provisioner.topology import Accelerator

# Processing accelerators. Source: include/linux/pci_ids.h; drivers/accel/habanalabs.
_CLASSES = (0x1200,)


def find_habana_cards(root: Root, bus: PciBus, oddities: list[str]) -> tuple[Accelerator, ...]:
    """The cards on the PCI bus, with the number and the module that their driver says."""
    on_bus = bus.of_vendor(HABANA, *_CLASSES)
    held = read_gaudi_cards(root) if on_bus else {}
    unheld = [str(address) for address in on_bus if address not in held]
    if len(unheld) < len(on_bus):  # the driver is loaded
        if unheld:
            oddities.append(
                f"Gaudi's driver does not hold {', '.join(unheld)}, which the PCI bus shows: "
                "not planned for, and not counted."
            )
        on_bus = [address for address in on_bus if address in held]
    cards = []
    for index, address in enumerate(on_bus):
        known = held.get(address)
        cards.append(
            Accelerator(
                "habana",
                index,
                bus.take(address).address,
                "pci" if known is None else "driver",
                minor=None if known is None else known.number,
                numbers=() if known is None or known.number == index else (known.number,),
                module=None if known is None else known.module,
            )
        )
    return tuple(cards)
