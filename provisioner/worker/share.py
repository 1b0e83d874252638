"""A rank's share of the machine, where no plan says: by the host half's own code.

Every physical card is counted, the hidden ones too, so that two services that each see half the cards
get disjoint cores without knowing of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from provisioner.errors import InputError, Problem, ProblemsError, ProvisionError
from provisioner.idset import CpuSet
from provisioner.plan import Rank
from provisioner.planner import make_plan
from provisioner.request import MemoryMode, PlacementRequest, ServiceRequest
from provisioner.topology import Accelerator, Ceiling, Machine
from provisioner.worker.machine import OwnMachine, find_machine
from provisioner.worker.procfs import has_pci_bus
from provisioner.worker.target import DISCOVERY, Asked, Target
from provisioner.worker.visible import RankError, card_of_rank, resolve_visible

_SERVICE = "worker"

# What a worker can do, where the planner speaks of files and options that it does not have.
_LOCALITY_HINT = 'State it by bind_local_rank(locality={"CARD": NODE}), or in the plan'
_HINTS = {
    "no_locality": _LOCALITY_HINT,
    "no_such_node": _LOCALITY_HINT,
    "no_cpu_node": _LOCALITY_HINT,
    "no_local_cpu": "Give this process a cpuset with CPUs of the card's NUMA node",
    "too_few_cores": "Give this process a cpuset with a core for each of the node's cards",
    "no_memory_node": 'Widen the cpuset\'s memory nodes, or bind CPUs alone by memory="off"',
}


class NoAcceleratorError(InputError):
    """The machine has no accelerator, or shows none here."""

    code = "no_accelerator"


def find_share(asked: Asked) -> Target:
    """The target of a rank by discovery.

    1. The rank's cards among those that its runtime shows.
    2. Their share of the whole machine. A cpuset inside it, or that of the rank's own slice, is the
       rank's already, and is not divided a second time.
    3. Else their share of what the cpuset allows.

    Raises:
        InputError: the rank has no card, or the machine can't be read.
        ProblemsError: it has, and no share of cores and memory can be right.
    """
    own = _find_own(asked)
    cards = _choose_cards(asked, own, asked.devices_per_rank or 1)
    machine = own.machine
    allowed = machine.ceiling_cpus
    holding = None
    if allowed != machine.online_cpus:
        holding = _find_holding_rank(asked, machine, cards)
    rank = holding or plan_share(machine, cards, memory=_mode(asked), locality=asked.locality)
    cpus = allowed if holding is not None else rank.cpus
    is_known = asked.local_rank is not None
    return Target(
        asked.local_rank if is_known else 0,
        asked.rank_source if is_known else "the only visible device",
        DISCOVERY,
        cpus,
        cpus,
        CpuSet(),
        rank.memory_nodes,
        _mode(asked),
        rank.devices,
        rank.cpu_nodes,
        notes=tuple(note.message for note in rank.notes),
    )


def find_cards(asked: Asked, count: int) -> tuple[Accelerator, ...]:
    """The physical cards of a rank, by what its runtime shows.

    Args:
        asked: the rank.
        count: how many devices a rank has.

    Raises:
        InputError: the rank has no card, nothing says which it is, or the machine can't be read.
    """
    return _choose_cards(asked, _find_own(asked), count)


def plan_share(
    machine: Machine,
    cards: Sequence[Accelerator],
    *,
    memory: str = "bind",
    locality: Mapping[str, int] | None = None,
) -> Rank:
    """The place of one rank that has these cards.

    Raises:
        ProblemsError: no place can be right, with every reason.
    """
    mode: MemoryMode = "bind" if memory == "bind" else "prefer" if memory == "prefer" else "off"
    names = tuple(str(card.index) if card.address is None else card.name for card in cards)
    service = ServiceRequest(_SERVICE, names, len(cards), memory=mode)
    try:
        plan = make_plan(machine, PlacementRequest((service,), locality=locality or {}))
    except ProblemsError as error:
        raise ProblemsError(
            Problem(one.code, one.message, _HINTS.get(one.code, one.hint)) for one in error.problems
        ) from error
    rank = plan.services[0].ranks[0]
    if rank.devices != tuple(card.name for card in cards):
        # A number alone may name another vendor's card too.
        raise InputError(
            f"cards {', '.join(card.name for card in cards)} can't be told from {', '.join(rank.devices)}",
            "Make /sys/bus/pci visible here",
        )
    return rank


def _find_own(asked: Asked) -> OwnMachine:
    own = find_machine(asked.root, asked.allowed_cpus, asked.allowed_nodes)
    if not own.usable:
        hidden = own.machine.accelerators
        why = (
            f"{len(hidden)} are there, and none can be opened here"
            if hidden
            else "neither a driver, nor the PCI bus, nor /dev names one"
            if has_pci_bus(asked.root)
            else "no driver and no device names one, and the PCI bus is not to be seen here"
        )
        raise NoAcceleratorError(
            f"no accelerator was found: {why}",
            "Give the container its devices and /sys, or start the worker where the cards are",
        )
    return own


def _choose_cards(asked: Asked, own: OwnMachine, count: int) -> tuple[Accelerator, ...]:
    visible = resolve_visible(own.usable, asked.environ, tiled=own.tiled)
    rank = asked.local_rank
    if rank is None:
        if len(visible.devices) != count:
            raise RankError(
                f"the local rank is not known: LOCAL_RANK is not set, no unit of systemd says it, and "
                f"{len(visible.devices)} devices are visible",
                "Start the worker by its launcher, or give bind_local_rank() the rank",
            )
        rank = 0
    cards = [card_of_rank(visible, rank * count + position) for position in range(count)]
    return tuple(dict.fromkeys(cards))


def _mode(asked: Asked) -> str:
    return asked.memory or "bind"


def _find_holding_rank(asked: Asked, machine: Machine, cards: Sequence[Accelerator]) -> Rank | None:
    """The rank's place on the whole machine, if the cpuset is this rank's own; else None."""
    nodes = (
        machine.ceiling.nodes
    )  # what memory there is to bind to does not say whose the cores are
    whole = replace(machine, ceiling=Ceiling("root", None, nodes, "the whole machine"))
    try:
        rank = plan_share(whole, cards, memory=_mode(asked), locality=asked.locality)
    except ProvisionError:
        return None  # what keeps the whole machine from being divided says nothing of the cpuset
    allowed = machine.ceiling_cpus
    is_own_slice = asked.unit is not None and asked.unit.is_slice
    local = machine.cpus_on(rank.cpu_nodes)
    return rank if allowed <= rank.cpus or (is_own_slice and allowed <= local) else None
