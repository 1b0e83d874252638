"""Small machines for tests, said in one call: nodes by their CPUs, cards by their node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from provisioner.discovery import discover
from provisioner.facts import build_tree
from provisioner.facts.toml_form import parse_pci_path
from provisioner.facts.values import CardFacts, DistanceFacts, HostFacts, NodeFacts, PackageFacts
from provisioner.idset import CpuSet, NodeSet, union_cpus
from provisioner.pci import PciAddress, parse_pci_address
from provisioner.plan import Plan, Rank
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest, ServiceRequest
from provisioner.root import MemoryRoot
from provisioner.topology import Machine
from tests.trees import CARD_IDS

GIB = 1 << 30


def make_host(
    nodes: Mapping[int, str],
    cards: Sequence[int | tuple[str, int | None] | None] = (),
    *,
    packages: Sequence[str] | None = None,
    stride: int = 0,
    memory: Mapping[int, int] | None = None,
    distances: Mapping[tuple[int, int], int] | None = None,
    within: str = "root",
    vendor: str = "nvidia",
    **facts: Any,
) -> Machine:
    """A machine, read from `make_tree`'s files; `within` is the ceiling that is read."""
    tree = make_tree(
        nodes,
        cards,
        packages=packages,
        stride=stride,
        memory=memory,
        distances=distances,
        vendor=vendor,
        **facts,
    )
    return discover(tree, within)


def make_tree(
    nodes: Mapping[int, str],
    cards: Sequence[int | tuple[str, int | None] | None] = (),
    *,
    packages: Sequence[str] | None = None,
    stride: int = 0,
    memory: Mapping[int, int] | None = None,
    distances: Mapping[tuple[int, int], int] | None = None,
    vendor: str = "nvidia",
    **facts: Any,
) -> MemoryRoot:
    """The files of a machine.

    Args:
        nodes: node -> its CPUs as a list, empty for a node without.
        cards: for each card its node (None: it does not say), or (address, node).
        packages: CPUs of each package; one for each node with CPUs if left out.
        stride: the distance of SMT siblings; 0 without SMT.
        memory: node -> GiB; 64 for each node that is left out.
        distances: (node, node) -> distance, both ways.
        vendor: whose the cards are.
        facts: what else the host's facts say.
    """
    sizes = memory or {}
    cpu_sets = [CpuSet.parse_list(text) for text in nodes.values() if text]
    if packages is not None:
        cpu_sets = [CpuSet.parse_list(text) for text in packages]
    elif not cpu_sets:
        cpu_sets = [CpuSet()]
    host = HostFacts(
        name="made",
        title="made for a test",
        packages=tuple(PackageFacts(cpus=cpus, id=number) for number, cpus in enumerate(cpu_sets)),
        nodes=tuple(
            NodeFacts(id=node, cpus=CpuSet.parse_list(text), memory_bytes=sizes.get(node, 64) * GIB)
            for node, text in nodes.items()
        ),
        threads=2 if stride else 1,
        sibling_stride=stride,
        distances=tuple(
            DistanceFacts(from_nodes=NodeSet([a]), to_nodes=NodeSet([b]), value=value)
            for (a, b), value in (distances or {}).items()
        ),
        cards=facts.pop("card_facts", ())
        or tuple(_card(number, card, vendor) for number, card in enumerate(cards)),
        **facts,
    )
    return build_tree(host)


def make_card(path: str, vendor: str = "nvidia", **facts: Any) -> CardFacts:
    """A card of a vendor at the end of a path such as '0000:16:01.0/17:00.0'."""
    vendor_id, device, pci_class = CARD_IDS[vendor]
    said = {"vendor": vendor_id, "device": device, "pci_class": pci_class, "model": "made"}
    return CardFacts(path=parse_pci_path(path), **{**said, **facts})


def _card(
    number: int, card: int | tuple[str, int | None] | None, vendor: str = "nvidia"
) -> CardFacts:
    if isinstance(card, tuple):
        address, node = parse_pci_address(card[0]), card[1]
    else:
        address, node = PciAddress(0, 0x10 + 8 * number, 0, 0), card
    bridge = PciAddress(address.domain, address.bus - 1 if address.bus else 0, 1, 0)
    return make_card(f"{bridge}/{address}", vendor, numa_node=node)


def plan_for(machine: Machine, **request: Any) -> Plan:
    """The plan of a machine; keys of a service's request are given to the one service."""
    service_keys = {
        key: request.pop(key) for key in list(request) if key in ServiceRequest.__slots__
    }
    if service_keys:
        request["services"] = (ServiceRequest(**service_keys),)
    return make_plan(machine, PlacementRequest(**request))


def ranks_of(plan: Plan) -> tuple[Rank, ...]:
    """The ranks of every service."""
    return tuple(rank for service in plan.services for rank in service.ranks)


def cpus_of(plan: Plan) -> list[str]:
    """Each rank's CPUs."""
    return [str(rank.cpus) for rank in ranks_of(plan)]


def note_codes(plan: Plan) -> set[str]:
    """The codes of every note, the ranks' included."""
    notes = [*plan.notes, *(note for rank in ranks_of(plan) for note in rank.notes)]
    return {note.code for note in notes}


def union_of(plan: Plan) -> CpuSet:
    """All ranks' CPUs."""
    return union_cpus(rank.cpus for rank in ranks_of(plan))
