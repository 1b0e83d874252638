"""How the cores of each NUMA node are divided among the cards local to it. Pure.

The worker's half divides by this same code, so that two services that see only their own cards
still get disjoint cores: every physical card of the host is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import NamedTuple

from provisioner.errors import Problem
from provisioner.idset import CpuSet, NodeSet, union_cpus
from provisioner.locality import Locality, find_card_locality, find_cpu_nodes, nearest
from provisioner.plan import Note
from provisioner.request import PlacementRequest
from provisioner.topology import Accelerator, Core, Machine
from provisioner.usable import UsableCores


class Place(NamedTuple):
    """Where a card is."""

    card: Accelerator
    locality: Locality
    cpu_nodes: NodeSet  # the nodes whose CPUs serve it


class Shares(NamedTuple):
    """Each card's CPUs by name, and what the division has to say."""

    cpus: Mapping[str, CpuSet]
    lent_nodes: Mapping[str, NodeSet]  # nodes without a card that lent to the card
    notes: tuple[Note, ...]
    problems: tuple[Problem, ...]


class _Work:
    """What a division has found so far."""

    __slots__ = ("cpus", "lent_nodes", "notes", "problems")

    def __init__(self) -> None:
        self.cpus: dict[str, CpuSet] = {}
        self.lent_nodes: dict[str, NodeSet] = {}
        self.notes: list[Note] = []
        self.problems: list[Problem] = []

    def give(self, name: str, cores: Sequence[Core]) -> None:
        self.cpus[name] = self.cpus.get(name, CpuSet()) | union_cpus(core.cpus for core in cores)


def find_places(machine: Machine, stated: Mapping[str, int]) -> tuple[list[Place], list[Problem]]:
    """Where each card is, in PCI order, and the reasons why some are nowhere.

    Args:
        machine: the machine.
        stated: card name -> node, as the operator's [locality] says.
    """
    places: list[Place] = []
    problems: list[Problem] = []
    for card in cards_in_order(machine):
        reason = _find_place(machine, card, stated.get(card.name))
        if isinstance(reason, Place):
            places.append(reason)
            continue
        problems.append(
            Problem(
                reason.code,
                f"{card.noun} {card.name}: {reason.message}",
                f'State it in provision.toml: [locality] "{card.name}" = NODE, the id of its NUMA node',
            )
        )
    return places, problems


def _find_place(machine: Machine, card: Accelerator, stated: int | None) -> Place | Problem:
    locality = find_card_locality(machine, card, stated)
    if isinstance(locality, Problem):
        return locality
    nodes = find_cpu_nodes(machine, card, locality)
    return nodes if isinstance(nodes, Problem) else Place(card, locality, nodes)


def cards_in_order(machine: Machine) -> list[Accelerator]:
    """Every card in PCI order; those without an address last."""
    return sorted(
        machine.accelerators,
        key=lambda card: (
            card.address is None,
            card.address or (0, 0, 0, 0),
            card.vendor,
            card.index,
        ),
    )


def divide_cores(
    machine: Machine,
    request: PlacementRequest,
    places: Sequence[Place],
    usable: UsableCores,
    owners: Mapping[str, str],
) -> Shares:
    """Each card's CPUs by the request's policy, before `smt` takes its part.

    Args:
        machine: the machine.
        request: policy, reach and remainder.
        places: every physical card, in PCI order, hidden ones included.
        usable: the cores to hand out.
        owners: card name -> the service whose rank has it.
    """
    work = _Work()
    if request.policy == "card-range":
        _divide_by_card_number(machine, places, usable, work)
    else:
        for node, cores in usable.free.items():
            local = [place for place in places if node in place.cpu_nodes]
            if local:
                _divide_node(machine, request, node, cores, local, owners, work)
        if request.reach == "package":
            _lend(machine, usable, places, work)
    return Shares(work.cpus, work.lent_nodes, tuple(work.notes), tuple(work.problems))


def _divide_node(
    machine: Machine,
    request: PlacementRequest,
    node: int,
    cores: tuple[Core, ...],
    local: list[Place],
    owners: Mapping[str, str],
    work: _Work,
) -> None:
    """Hands out the cores of one node to the cards local to it.

    1. a card counts for one over the number of nodes that it draws on, so that all cards end up
       with equal shares;
    2. a unit is a core, or under `llc` the cores of one last-level cache where they go round;
    3. each claimant gets the whole number of units that its count is worth, in PCI order, as a run;
       what is left goes one unit each to the first ones (`spread`) or to nobody.

    Under `node` the cards of one service claim together and share all that they get.
    """
    groups: list[tuple[str, list[Place]]]
    if request.policy == "node":
        together: dict[str, list[Place]] = {}
        for place in local:
            owner = owners.get(place.card.name)
            if owner is not None:
                together.setdefault(owner, []).append(place)
        groups = list(together.items())
    else:
        groups = [(place.card.name, [place]) for place in local]
    if not groups:
        return
    scale = lcm(*(len(place.cpu_nodes) for _, members in groups for place in members))
    weights = [sum(scale // len(place.cpu_nodes) for place in members) for _, members in groups]
    total = sum(weights)
    units = _units(machine, request, node, cores, weights, work)
    counts = [len(units) * weight // total for weight in weights]
    left = len(units) - sum(counts)
    if request.remainder == "spread":
        counts = [count + (position < left) for position, count in enumerate(counts)]
        left = 0
    wanting = [members for (_, members), count in zip(groups, counts, strict=True) if count == 0]
    if any(place.card.name in owners for members in wanting for place in members):
        work.problems.append(_too_few(machine, node, cores, local))
        return
    start = 0
    for (_, members), count in zip(groups, counts, strict=True):
        share = [core for unit in units[start : start + count] for core in unit]
        start += count
        for place in members:
            work.give(place.card.name, share)
    if left:
        unassigned = union_cpus(core.cpus for unit in units[start:] for core in unit)
        work.notes.append(
            Note(
                "remainder",
                f"On NUMA node {node}, {len(cores)} cores do not divide evenly among {len(groups)} "
                f"{'services' if request.policy == 'node' else 'cards'}: CPUs {unassigned} stay unassigned.",
                'Set remainder = "spread" to hand them out, or reserve them for the system',
            )
        )


def _units(
    machine: Machine,
    request: PlacementRequest,
    node: int,
    cores: tuple[Core, ...],
    weights: list[int],
    work: _Work,
) -> list[tuple[Core, ...]]:
    """The cores of a node in the pieces that its policy hands out."""
    single: list[tuple[Core, ...]] = [(core,) for core in cores]
    if request.policy != "llc":
        return single
    if any(core.llc is None for core in cores):
        work.notes.append(
            Note(
                "llc_unknown",
                f"NUMA node {node} has cores whose last-level cache the machine does not say; "
                "shares there are cut by core.",
                'Take policy "exclusive", or record the cache folders of /sys too',
            )
        )
        return single
    by_llc: dict[int | None, list[Core]] = {}
    for core in cores:
        by_llc.setdefault(core.llc, []).append(core)
    groups = [tuple(members) for members in by_llc.values()]
    if any(len(groups) * weight // sum(weights) == 0 for weight in weights):
        work.notes.append(
            Note(
                "llc_too_few",
                f"NUMA node {node} has {len(groups)} last-level caches for {len(weights)} cards; "
                "shares there are cut by core.",
                'Take policy "exclusive", which gives the same shares here',
            )
        )
        return single
    if len({len(members) for members in groups}) > 1:
        work.notes.append(
            Note(
                "llc_uneven",
                f"The last-level caches of NUMA node {node} have different numbers of free "
                "cores; shares made of whole ones are uneven.",
                'Reserve the same number of cores of each cache, or take policy "exclusive"',
            )
        )
    return groups


def _too_few(machine: Machine, node: int, cores: tuple[Core, ...], local: list[Place]) -> Problem:
    found = union_cpus(core.cpus for core in cores)
    if not cores:
        names = ", ".join(place.card.name for place in local)
        return Problem(
            "no_local_cpu",
            f"{local[0].card.noun} {names}: no local CPU is allowed: NUMA node {node} has CPUs "
            f"{machine.node(node).cpus}, none of which is free and whole (the ceiling is "
            f"{machine.ceiling_cpus or 'empty'})",
            "List the other cards in devices=, lower reserve_cores=, or widen the cpuset of the slices' parent",
        )
    return Problem(
        "too_few_cores",
        f"Cannot give {len(local)} cards a core each on NUMA node {node}: {len(cores)} "
        f"{'core is' if len(cores) == 1 else 'cores are'} allowed there ({found})",
        f"Lower reserve_cores=, or widen the cpuset of the slices' parent, now {machine.ceiling_cpus}",
    )


def _lend(machine: Machine, usable: UsableCores, places: Sequence[Place], work: _Work) -> None:
    """Lets each node without a card lend its cores to the cards of the nearest nodes of its package."""
    with_cards = NodeSet(node for place in places for node in place.cpu_nodes)
    for node, cores in usable.free.items():
        if node in with_cards or not cores:
            continue
        packages = machine.node_packages(node)
        candidates = NodeSet(one for one in with_cards if machine.node_packages(one) & packages)
        near = nearest(machine, node, candidates) if candidates else candidates
        takers = [place for place in places if place.cpu_nodes & near]
        each = len(cores) // len(takers) if takers else 0
        if not each:
            why = (
                f"{len(cores)} cores for {len(takers)} cards"
                if takers
                else "its package has no card"
            )
            work.notes.append(
                Note(
                    "not_lent",
                    f"NUMA node {node} lends nothing: {why}.",
                    "Reserve its cores for the system",
                )
            )
            continue
        for position, place in enumerate(takers):
            name = place.card.name
            work.give(name, cores[position * each : (position + 1) * each])
            work.lent_nodes[name] = work.lent_nodes.get(name, NodeSet()) | NodeSet((node,))


def _divide_by_card_number(
    machine: Machine, places: Sequence[Place], usable: UsableCores, work: _Work
) -> None:
    """The widespread heuristic: cores divided by cards, CPU ids cut by card number, whatever the node."""
    each = len(machine.cores) // len(places)
    free = union_cpus(core.cpus for cores in usable.free.values() for core in cores)
    for number, place in enumerate(places):
        cut = CpuSet(range(number * each, (number + 1) * each))
        work.cpus[place.card.name] = cut & free
        if not cut & free:
            work.problems.append(
                Problem(
                    "card_range_empty",
                    f"{place.card.noun} {place.card.name}: policy 'card-range' cuts CPUs {cut or 'none'} for card "
                    f"{number}, none of which is free (free are {free or 'none'})",
                    'Take policy "exclusive"',
                )
            )
