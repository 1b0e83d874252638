"""Huawei's Ascend NPUs: on the unified bus (ubcore), on PCI, or known from /dev alone.

Nothing in /sys tells which number the driver gave to a PCI function, and it does not count in PCI
order: NPU 0 of an 8 x 910B host is 0000:c1:00.0. `npu_smi` reads what says it.
"""

from __future__ import annotations

import re

from provisioner.cardfs import list_davinci_nodes, list_ub_devices, read_pci_driver
from provisioner.discovery.pcibus import ASCEND, PciBus
from provisioner.root import Root
from provisioner.sysfs import list_nodes
from provisioner.topology import Accelerator

# Processing accelerators; Huawei's NICs, BMC graphics (0x1711) and SSDs are of other classes.
# Source: include/linux/pci_ids.h.
_CLASSES = (0x1200,)
_UB_NAME = re.compile(r"udma(?:([0-9]+)|[cC]([0-9]+)d([0-9]+)e([0-9]+))", re.ASCII)


def find_ascend_cards(root: Root, bus: PciBus, oddities: list[str]) -> tuple[Accelerator, ...]:
    """The NPUs of the unified bus; without one those on the PCI bus; else the device nodes."""
    on_ub = _find_ub_cards(root, oddities)
    if on_ub:
        return on_ub
    on_bus = bus.of_vendor(ASCEND, *_CLASSES)
    if on_bus:
        return tuple(
            Accelerator(
                "ascend",
                index,
                bus.take(address).address,
                "pci" if read_pci_driver(root, address) is None else "driver",
            )
            for index, address in enumerate(on_bus)
        )
    numbers = list_davinci_nodes(root)
    return tuple(
        Accelerator(
            "ascend",
            index,
            None,
            "dev",
            minor=number,
            numbers=() if number == index else (number,),
        )
        for index, number in enumerate(numbers)
    )


def _find_ub_cards(root: Root, oddities: list[str]) -> tuple[Accelerator, ...]:
    """The devices ``udmaN`` or ``udmaC<controller>d<die>e<entity>`` that have entities.

    Their ``device/numa`` is coarse: it names the first node of a group of two, whose NPUs take the
    nodes of the group in turn. So NPU 0 and 1 with 0 and 0 are on nodes 0 and 1.
    """
    devices = [(_parse_ub_name(one.name), one) for one in list_ub_devices(root)]
    known = sorted(
        ((name, one) for name, one in devices if name is not None and one.entities),
        key=lambda pair: pair[0],
    )
    if not known:
        return ()
    nodes = list_nodes(root)
    cards: list[Accelerator] = []
    for index, (_, one) in enumerate(known):
        node = None if one.numa is None else one.numa // 2 * 2 + index % 2
        if node is not None and node not in nodes:
            if one.numa not in nodes:
                oddities.append(f"{one.name} says NUMA node {one.numa}, which is not there.")
            node = one.numa if one.numa in nodes else None
        cards.append(Accelerator("ascend", index, None, "ubcore", numa_node=node))
    return tuple(cards)


def _parse_ub_name(name: str) -> tuple[int, int, int] | None:
    """(number or controller, die, entity), the order in which NPUs are counted; None if it is no NPU's."""
    match = _UB_NAME.fullmatch(name)
    if match is None:
        return None
    number, controller, die, entity = match.groups("0")
    return int(number) or int(controller), int(die), int(entity)
