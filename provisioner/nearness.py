"""Which RDMA devices are nearest to a card, by the way through the PCI bus, and who gets which. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from provisioner.idset import NodeSet
from provisioner.locality import Locality, find_locality
from provisioner.topology import Accelerator, Machine, Nic, PciFunction, count_common_bridges

# How near a card's nearest functions are, as `_nearness` says it, and they themselves.
_Nearest = tuple[tuple[int, int], tuple[Nic, ...]]


def nearest_nics(
    machine: Machine, card: Accelerator, card_nodes: NodeSet, *, with_virtual: bool = False
) -> tuple[Nic, ...]:
    """The RDMA functions nearest to a card, in PCI order; several where they are equally near.

    1. the deeper the lowest common bridge, the nearer: the same PCI switch;
    2. then the same host bridge: the same root;
    3. then the same NUMA node; beyond it nothing counts as near.

    Functions without an RDMA name are left out, and virtual ones unless they are asked for.
    """
    return _nearest(machine, card, card_nodes, with_virtual)[1]


def _nearest(
    machine: Machine, card: Accelerator, card_nodes: NodeSet, with_virtual: bool
) -> _Nearest:
    path = machine.pci_path(card.address)
    best: tuple[int, int] = (0, 0)
    found: list[Nic] = []
    for nic in machine.nics:
        if not nic.rdma_names or (nic.is_virtual and not with_virtual):
            continue
        rank = _nearness(machine, path, card_nodes, nic)
        if rank > best:
            best, found = rank, []
        if rank == best and rank > (0, 0):
            found.append(nic)
    return best, tuple(found)


def share_nics(
    machine: Machine, cards: Iterable[tuple[Accelerator, NodeSet]], *, with_virtual: bool = False
) -> Mapping[str, tuple[Nic, ...]]:
    """Card name -> the RDMA functions that its rank is to use.

    1. Cards that are equally near to the same functions share them evenly, in PCI order.
    2. Where there are as many functions as cards or more, they are dealt out one by one: first
       each adapter's first port, then the second ports. So cards get adapters of their own before
       they get ports of one, and what is left over goes out too.
    3. Where there are fewer, cards that follow each other have one together.

    Every physical card counts, so that services which each have some of them do not use the same
    functions.

    Args:
        machine: the machine.
        cards: every card and the nodes that it is near to.
        with_virtual: whether virtual functions count.
    """
    sharers: dict[_Nearest, list[str]] = {}
    for card, nodes in cards:
        nearest = _nearest(machine, card, nodes, with_virtual)
        sharers.setdefault(nearest, []).append(card.name)
    found: dict[str, tuple[Nic, ...]] = {}
    for (_, nics), names in sharers.items():
        dealt = _by_port(nics)
        for position, name in enumerate(names):
            if len(dealt) >= len(names):
                found[name] = tuple(dealt[position :: len(names)])
            else:
                start = position * len(dealt) // len(names)
                found[name] = tuple(dealt[start : start + 1])
    return found


def rdma_names(nics: Iterable[Nic]) -> tuple[str, ...]:
    """The names of RDMA functions, sorted: mlx5_2 before mlx5_10."""
    return tuple(sorted((name for nic in nics for name in nic.rdma_names), key=_natural))


def _by_port(nics: Iterable[Nic]) -> list[Nic]:
    """The functions by their place on their adapter, then in PCI order."""
    seen: dict[tuple[int, int, int], int] = {}
    places: list[tuple[int, Nic]] = []
    for nic in nics:
        adapter = nic.address[:3]
        seen[adapter] = seen.get(adapter, -1) + 1
        places.append((seen[adapter], nic))
    return [nic for _, nic in sorted(places, key=lambda place: (place[0], place[1].address))]


def _nearness(
    machine: Machine, card_path: tuple[PciFunction, ...], card_nodes: NodeSet, nic: Nic
) -> tuple[int, int]:
    """(kind, depth): 3 same switch with the depth of the common bridge, 2 same root, 1 same node, 0 far."""
    common = count_common_bridges(card_path, machine.pci_path(nic.address))
    if common is not None:
        return (3, common) if common else (2, 0)
    locality = find_locality(machine, nic.address)
    if isinstance(locality, Locality) and not locality.nodes.isdisjoint(card_nodes):
        return (1, 0)
    return (0, 0)


def _natural(name: str) -> tuple[str, int, str]:
    """mlx5_2 before mlx5_10."""
    stem = name.rstrip("0123456789")
    return (stem, int(name[len(stem) :] or 0), name)
