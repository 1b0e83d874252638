"""A machine as JSON and as rows of tables. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from provisioner.fingerprint import machine_fingerprint
from provisioner.idset import NodeSet
from provisioner.locality import Locality, find_card_locality, find_locality
from provisioner.nearness import nearest_nics, rdma_names
from provisioner.oddities import find_oddities
from provisioner.pci import PciAddress
from provisioner.plan import Note, Plan
from provisioner.topology import Machine

TOPOLOGY_SCHEMA = "provision.topology/1"


def topology_to_json(machine: Machine) -> dict[str, Any]:
    """The object that `provision topology --json` prints."""
    allowed = machine.allowed_cpus
    cards = []
    for card in machine.accelerators:
        locality = find_card_locality(machine, card)
        found = locality if isinstance(locality, Locality) else None
        function = machine.pci.get(card.address) if card.address is not None else None
        cards.append(
            {
                "pci": None if card.address is None else str(card.address),
                "vendor": card.vendor,
                "index": card.index,
                "numa_node": found.nodes.first
                if found is not None and len(found.nodes) == 1
                else None,
                "node_source": None if found is None else found.source,
                "local_cpus": None
                if function is None or function.local_cpus is None
                else str(function.local_cpus),
                "local_nodes": None if found is None else str(found.nodes),
                "memory_nodes": str(card.memory_nodes),
                "model": card.model,
                "known_by": card.source,
                "runtime_numbers": list(card.runtime_numbers),
                "module": card.module,
            }
        )
    return {
        "schema": TOPOLOGY_SCHEMA,
        "fingerprint": machine_fingerprint(machine),
        "is_this_system": machine.is_this_system,
        "cpus": [{**cpu._asdict(), "allowed": cpu.id in allowed} for cpu in machine.cpus],
        "offline_cpus": str(machine.offline_cpus),
        "isolated_cpus": str(machine.isolated_cpus),
        "possible_cpus": None if machine.possible_cpus is None else str(machine.possible_cpus),
        "allowed_cpus": str(allowed),
        "allowed_nodes": str(machine.allowed_nodes),
        "within": machine.ceiling.within,
        "nodes": [
            {
                "id": node.id,
                "cpus": str(node.cpus),
                "memory_bytes": node.memory_bytes,
                "kind": node.kind,
                "distances": None
                if node.distances is None
                else {str(to): gap for to, gap in node.distances.items()},
            }
            for node in machine.nodes
        ],
        "accelerators": cards,
        "nics": [
            {
                "pci": str(nic.address),
                "name": nic.name,
                "numa_node": _one_node(machine, nic.address),
                "rdma_names": list(nic.rdma_names),
                "net_names": list(nic.net_names),
                "is_virtual": nic.is_virtual,
                "rdma_ports": [list(ports) for ports in nic.ports],
            }
            for nic in machine.nics
        ],
        "oddities": [asdict(note) for note in topology_notes(machine)],
    }


def card_label(machine: Machine, vendor: str, index: int) -> str:
    """A card's number, with its vendor in front where the machine has cards of several."""
    is_mixed = any(card.vendor != vendor for card in machine.accelerators)
    return f"{vendor}{index}" if is_mixed else str(index)


class RankLabel(NamedTuple):
    """What a plan's table shows of a rank and the plan does not say."""

    cards: str  # the cards' numbers, see card_label
    cores: int  # how many


def rank_labels(machine: Machine, plan: Plan) -> tuple[tuple[RankLabel, ...], ...]:
    """The label of each rank of each service."""
    return tuple(
        tuple(
            RankLabel(
                ",".join(card_label(machine, rank.vendor, index) for index in rank.device_indexes),
                len(machine.cores_of(rank.cpus)),
            )
            for rank in service.ranks
        )
        for service in plan.services
    )


def node_rows(machine: Machine) -> Iterator[list[str]]:
    """A row for each NUMA node: id, kind, memory, packages, cores, CPUs, LLCs, cards, distances."""
    cards: dict[int, list[str]] = {}
    for card in machine.accelerators:
        locality = find_card_locality(machine, card)
        for node_id in locality.nodes if isinstance(locality, Locality) else ():
            cards.setdefault(node_id, []).append(card_label(machine, card.vendor, card.index))
        for node_id in card.memory_nodes:
            label = card_label(machine, card.vendor, card.index)
            cards.setdefault(node_id, []).append(f"memory of {label}")
    for node in machine.nodes:
        cores = machine.node_cores(node.id)
        caches = {core.llc for core in cores}
        distances = (
            "?" if node.distances is None else ",".join(str(gap) for gap in node.distances.values())
        )
        yield [
            str(node.id),
            node.kind or "?",
            format_bytes(node.memory_bytes),
            ",".join(str(one) for one in sorted(machine.node_packages(node.id)))
            or ("?" if cores else ""),
            str(len(cores)),
            str(node.cpus),
            "" if not cores else "?" if None in caches else str(len(caches)),
            ",".join(cards.get(node.id, ())),
            distances,
        ]


def card_rows(machine: Machine) -> Iterator[list[str]]:
    """A row for each card: number, address, model, node, what said so, its CPUs, bridges above, RDMA."""
    for card in machine.accelerators:
        locality = find_card_locality(machine, card)
        found = locality if isinstance(locality, Locality) else None
        function = machine.pci.get(card.address) if card.address is not None else None
        yield [
            card_label(machine, card.vendor, card.index),
            "?" if card.address is None else str(card.address),
            card.model or card.vendor,
            "?" if found is None else str(found.nodes),
            "nothing" if found is None else found.source,
            "?" if function is None or function.local_cpus is None else str(function.local_cpus),
            _below(machine, card.address),
            ",".join(
                rdma_names(nearest_nics(machine, card, NodeSet() if found is None else found.nodes))
            ),
        ]


def nic_rows(machine: Machine) -> Iterator[list[str]]:
    """A row for each network device: names, address, node, what said so, bridges above."""
    for nic in machine.nics:
        locality = find_locality(machine, nic.address)
        known = isinstance(locality, Locality)
        yield [
            ",".join((*nic.rdma_names, *nic.net_names)) + (" (virtual)" if nic.is_virtual else ""),
            str(nic.address),
            str(locality.nodes) if isinstance(locality, Locality) else "?",
            locality.source if isinstance(locality, Locality) and known else "nothing",
            _below(machine, nic.address),
        ]


def topology_notes(machine: Machine) -> tuple[Note, ...]:
    """What is odd about a machine, whatever is planned on it."""
    notes = list(find_oddities(machine))
    for card in machine.accelerators:
        locality = find_card_locality(machine, card)
        if not isinstance(locality, Locality):
            notes.append(
                Note(
                    locality.code,
                    f"Card {card.name}: {locality.message}.",
                    f'State it in provision.toml: [locality] "{card.name}" = NODE',
                )
            )
        elif locality.source not in {"numa_node", "driver"}:
            notes.append(
                Note(
                    f"by_{locality.source}",
                    f"Card {card.name} does not say its NUMA node; it is taken for {locality.nodes}: "
                    f"{locality.evidence}.",
                )
            )
    if machine.isolated_cpus & machine.online_cpus:
        notes.append(
            Note(
                "isolated_cpus",
                f"CPUs {machine.isolated_cpus & machine.online_cpus} are isolated from the scheduler.",
            )
        )
    cut = [
        core
        for core in machine.cores
        if core.cpus & machine.ceiling_cpus and not core.cpus <= machine.ceiling_cpus
    ]
    if cut:
        names = ", ".join(str(core.cpus) for core in cut[:8]) + (
            " and more" if len(cut) > 8 else ""
        )
        notes.append(
            Note(
                "partial_cores",
                f"The ceiling cuts cores in half: {names}.",
                "Widen it to whole cores",
            )
        )
    return tuple(notes)


def format_bytes(size: int | None) -> str:
    """A size in GiB or MiB with one digit after the point; '?' if it is not known."""
    if size is None:
        return "?"
    if size == 0:
        return "0"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _one_node(machine: Machine, address: PciAddress) -> int | None:
    locality = find_locality(machine, address)
    return (
        locality.nodes.first
        if isinstance(locality, Locality) and len(locality.nodes) == 1
        else None
    )


def _below(machine: Machine, address: PciAddress | None) -> str:
    """The way down to a function: host bridge, then the bridges above it."""
    path = machine.pci_path(address)
    if not path or path[0].host_bridge is None:
        return ""
    return ",".join((path[0].host_bridge, *(str(one.address) for one in reversed(path[1:]))))
