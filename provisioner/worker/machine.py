"""The machine as this process may use it: discovered, with the cards that a container hides.

A share is right only if every physical card is counted. Container tools show a process its own cards
in the driver's folder or in /dev, and leave the PCI bus as it is, so the others are still found there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from provisioner.cgroup import WITHIN_SELF
from provisioner.discovery import discover
from provisioner.discovery.pcibus import PciBus
from provisioner.errors import InputError
from provisioner.idset import CpuSet, NodeSet
from provisioner.root import DirectoryRoot, Root
from provisioner.sysfs import (
    is_virtual_function,
    list_nvidia_nodes,
    list_pci_driver,
    read_pci_class,
)
from provisioner.topology import Accelerator, Ceiling, Machine
from provisioner.worker.visible_rules import kind_of

# VGA, 3D and other display controllers. Source: include/linux/pci_ids.h.
_DISPLAY_CLASSES = (0x0300, 0x0302, 0x0380)
# Intel's cards of several tiles, each of which Level Zero may count for a device: Data Center GPU Max
# 1450 and 1550. Source: i915's and xe's pci ids (include/drm/intel/pciids.h).
_TILED = range(0x0BD4, 0x0BDA)


class OwnMachine(NamedTuple):
    """A machine, and the part of it that this process's accelerator runtime sees."""

    machine: Machine  # with every physical card, and this process's cpuset for a ceiling
    usable: tuple[Accelerator, ...]  # of its cards, those that can be opened here
    tiled: frozenset[str]  # names of the cards that may be several devices


_kinds: dict[Root | None, str] = {}


def find_machine(
    root: Root | None = None,
    allowed_cpus: CpuSet | None = None,
    allowed_nodes: NodeSet | None = None,
) -> OwnMachine:
    """The machine as this process may use it.

    Args:
        root: a recorded machine; None is the running one.
        allowed_cpus: what the cpuset allows, if that is known better than a container's files say.
        allowed_nodes: likewise.

    Raises:
        InputError: the files describe no machine, or can't be read.
    """
    tree: Root = DirectoryRoot() if root is None else root
    machine = discover(tree, WITHIN_SELF)
    usable = machine.accelerators
    if any(card.vendor == "nvidia" and card.source == "driver" for card in usable):
        machine, usable = _add_hidden(tree, machine)
    if allowed_cpus is not None or allowed_nodes is not None:
        ceiling = machine.ceiling
        machine = replace(
            machine,
            ceiling=Ceiling(
                WITHIN_SELF,
                ceiling.cpus if allowed_cpus is None else allowed_cpus,
                ceiling.nodes if allowed_nodes is None else allowed_nodes,
                "the kernel's answer to this process",
            ),
        )
    tiled = frozenset(
        card.name
        for card in usable
        if card.vendor == "intel"
        and card.address is not None
        and machine.pci[card.address].device in _TILED
    )
    return OwnMachine(machine, usable, tiled)


def accelerator_kind(root: Root | None = None) -> str:
    """Whose accelerators the machine has: ascend, nvidia, amd, intel, or cpu where there is none.

    The answer is kept, one for each root.

    Raises:
        InputError: the files describe no machine, or can't be read.
    """
    if root not in _kinds:
        tree: Root = DirectoryRoot() if root is None else root
        _kinds[root] = kind_of(discover(tree).accelerators)
    return _kinds[root]


def card_of(machine: Machine, number: int, kind: str | None = None) -> Accelerator:
    """The card of a physical number.

    Raises:
        InputError: there is no such card.
    """
    kind = kind_of(machine.accelerators) if kind is None else kind
    cards = {card.index: card for card in machine.accelerators if card.vendor == kind}
    if number not in cards:
        raise InputError(
            f"card {number}: there is none: the machine has {len(cards)} of kind '{kind}'",
            "Take the number from: python -m provisioner.worker",
        )
    return cards[number]


def _add_hidden(root: Root, machine: Machine) -> tuple[Machine, tuple[Accelerator, ...]]:
    """The machine with the NVIDIA cards that the driver holds and its folder does not show, and the others.

    Their numbers become those that the host has, which counts them all.
    """
    shown = {card.address for card in machine.accelerators}
    # One folder lists them; to look through the whole bus again would cost more than the rest.
    hidden = [
        address
        for address in list_pci_driver(root, "nvidia")
        if address not in shown
        and (read_pci_class(root, address) or 0) >> 8 in _DISPLAY_CLASSES
        and not is_virtual_function(root, address)
    ]
    nvidia = [card for card in machine.accelerators if card.vendor == "nvidia"]
    nvidia += [Accelerator("nvidia", 0, address, "pci") for address in hidden]
    nvidia.sort(key=lambda card: (card.address is None, card.address or (0, 0, 0, 0), card.index))
    nvidia = [replace(card, index=number) for number, card in enumerate(nvidia)]
    others = [card for card in machine.accelerators if card.vendor != "nvidia"]
    cards = tuple(sorted([*nvidia, *others], key=lambda card: (card.vendor, card.index)))
    minors = set(list_nvidia_nodes(root))
    usable = tuple(
        card
        for card in cards
        if card.address in shown
        # A container may have the driver's whole folder, and only some of the devices.
        and (card.vendor != "nvidia" or not minors or card.minor is None or card.minor in minors)
    )
    if not hidden:
        return machine, usable
    bus = PciBus(root)
    for address in hidden:
        bus.take(address)
    whole = replace(machine, accelerators=cards, pci={**machine.pci, **bus.functions()})
    return whole, usable
