"""What is odd about a host and costs its ranks something, each with what to do. Pure.

A check has found something, or found nothing, or could not be made: what a recording lacks is never
taken for fine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from provisioner.comparison import Comparison
from provisioner.errors import Problem
from provisioner.fingerprint import machine_fingerprint
from provisioner.interrupts import find_stray_interrupts, named_ranks, note_irqbalance
from provisioner.oddities import find_oddities
from provisioner.plan import Note, Plan
from provisioner.request import PlacementRequest
from provisioner.setting_notes import note_huge_pages, note_manager, note_services, note_variable
from provisioner.settings import HostSettings
from provisioner.topology import Machine
from provisioner.usable import find_usable_cores

DOCTOR_SCHEMA = "provision.doctor/1"

State = Literal["found", "fine", "unknown"]


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str  # stable, one word
    state: State
    why: str  # what was seen, or why nothing could be
    notes: tuple[Note, ...] = ()  # of a check that found something


class Diagnosis(NamedTuple):
    """A host, looked at."""

    fingerprint: str
    is_this_system: bool
    ranks: int | None  # of the plan that it was judged by; None: there is none
    checks: tuple[Check, ...]

    @property
    def contradicted(self) -> bool:
        """Whether another reader's text says otherwise than the machine."""
        return any(check.state == "found" for check in self.checks if check.name in _READERS)


# Which check a note of the planner's or of the machine's belongs to; all others are of the placement.
_CODES: dict[str, tuple[str, ...]] = {
    "data": ("machine",),
    "cards": ("driver_not_loaded", "cards_from_dev", "npu_numbers"),
    "locality": ("contradicting_locality", "unlike_neighbours", "all_on_one_node"),
    "cores": ("isolated_cpus", "partial_cores", "no_node_cpus", "mixed_smt"),
    "packages": ("package_across_nodes", "packages_in_node"),
    "memory": ("small_memory",),
    "ceiling": ("ceiling", "memory_ceiling"),
    "balancing": ("numa_balancing",),
}
_CHECK_OF = {code: check for check, codes in _CODES.items() for code in codes}
# Those that a plan adds to the machine's own.
_OF_REQUEST = ("npu_numbers", "isolated_cpus", "partial_cores", "no_node_cpus")
_READERS = ("nvidia-smi", "numactl")


def examine(
    machine: Machine,
    settings: HostSettings,
    plan: Plan | Sequence[Problem],
    comparisons: Sequence[Comparison] = (),
) -> Diagnosis:
    """Everything that is odd about a host.

    Args:
        machine: the host.
        settings: what it is set to.
        plan: the plan that it is judged by, or why there is none.
        comparisons: what other readers said of it.
    """
    found = plan if isinstance(plan, Plan) else None
    notes: dict[str, list[Note]] = {}
    for note in _collect(machine, found):
        notes.setdefault(_CHECK_OF.get(note.code, "placement"), []).append(note)
    if not isinstance(plan, Plan):
        notes["placement"] = [Note(one.code, one.message, one.hint) for one in plan]
    context = _Context(machine, settings, found)
    checks: list[Check] = []
    for name, look in _CHECKS:
        state, why, more = look(context)
        listed = (*notes.pop(name, ()), *more)
        checks.append(Check(name, "found" if listed else state, why, listed))
    checks += [_check_reader(one) for one in comparisons]
    return Diagnosis(
        machine_fingerprint(machine),
        machine.is_this_system,
        None if found is None else sum(len(service.ranks) for service in found.services),
        tuple(checks),
    )


def _collect(machine: Machine, plan: Plan | None) -> Iterator[Note]:
    """The machine's notes, as it is now, and those that the plan adds."""
    yield from find_oddities(machine)
    if plan is None:
        yield from find_usable_cores(machine, PlacementRequest()).notes
        return
    own = _CHECK_OF.keys() - set(_OF_REQUEST)
    yield from (note for note in plan.notes if note.code not in own)
    for label, rank in named_ranks(plan):
        for note in rank.notes:
            yield Note(note.code, f"{label[0].upper()}{label[1:]}: {note.message}", note.hint)


class _Context(NamedTuple):
    """What each check may look at."""

    machine: Machine
    settings: HostSettings
    plan: Plan | None


_Look = Callable[[_Context], tuple[State, str, Sequence[Note]]]


# The machine -----------------------------------------------------------------------------------


def _look_at_data(context: _Context) -> tuple[State, str, Sequence[Note]]:
    return "fine", "the machine's files do not contradict each other", ()


def _look_at_cards(context: _Context) -> tuple[State, str, Sequence[Note]]:
    cards = context.machine.accelerators
    if not cards:
        return "unknown", "there is no card", ()
    vendors = Counter(card.vendor for card in cards)
    return "fine", ", ".join(f"{count} of {vendor}" for vendor, count in vendors.items()), ()


def _look_at_locality(context: _Context) -> tuple[State, str, Sequence[Note]]:
    if not context.machine.accelerators:
        return "unknown", "there is no card", ()
    return "fine", "nothing on the PCI bus contradicts what the cards say", ()


def _look_at_cores(context: _Context) -> tuple[State, str, Sequence[Note]]:
    cores = context.machine.cores
    each = len(cores[0].cpus)
    smt = context.settings.smt_control
    said = "" if smt is None else f"; SMT is {smt}"
    return (
        "fine",
        f"{len(cores)} cores of {each} {'CPU' if each == 1 else 'CPUs'}, all whole{said}",
        (),
    )


def _look_at_packages(context: _Context) -> tuple[State, str, Sequence[Note]]:
    known = {core.package for core in context.machine.cores} - {None}
    if context.settings.is_virtual:
        note = Note(
            "virtual_machine",
            "This is a virtual machine: its packages, NUMA nodes, cores and buses are what the hypervisor says.",
            "Have its host pin each virtual CPU and pass the NUMA nodes on; else no placement here means anything",
        )
        return "found", "", (note,)
    if not known:
        return "unknown", "no CPU says which package it is in", ()
    nodes = len(context.machine.cpu_nodes)
    return "fine", f"{len(known)} packages and {nodes} NUMA nodes with CPUs fit together", ()


def _look_at_memory(context: _Context) -> tuple[State, str, Sequence[Note]]:
    machine = context.machine
    notes = list(note_huge_pages(machine, context.settings.huge_pages))
    unknown = [node.id for node in machine.nodes if node.cpus and node.memory_bytes is None]
    if unknown and not notes:
        return "unknown", f"the memory of NUMA nodes {', '.join(map(str, unknown))} is not said", ()
    return "fine", "nodes with CPUs have about as much memory as their peers", notes


def _look_at_ceiling(context: _Context) -> tuple[State, str, Sequence[Note]]:
    ceiling = context.machine.ceiling
    if ceiling.cpus is None:
        return "unknown", ceiling.source, ()
    return "fine", f"every CPU may be used ({ceiling.source})", ()


def _look_at_balancing(context: _Context) -> tuple[State, str, Sequence[Note]]:
    machine = context.machine
    if len(machine.cpu_nodes) < 2:
        return "fine", "there is one NUMA node with CPUs", ()
    if machine.numa_balancing is None:
        return "unknown", "proc/sys/kernel/numa_balancing is not there", ()
    return "fine", "kernel.numa_balancing is off", ()


def _look_at_placement(context: _Context) -> tuple[State, str, Sequence[Note]]:
    return "fine", "every rank has whole cores and memory of its card's node", ()


# What the host is set to --------------------------------------------------------------------------


def _look_at_interrupts(context: _Context) -> tuple[State, str, Sequence[Note]]:
    settings, plan = context.settings, context.plan
    if plan is None:
        return "unknown", "there is no plan to judge them by", ()
    notes: list[Note] = []
    if settings.irqbalance is not None:
        notes += note_irqbalance(context.machine, settings.irqbalance, plan)
    if settings.interrupts is None:
        return "unknown", "no card or network device here says where its interrupts land", notes
    count = sum(len(one) for one in settings.interrupts.values())
    notes += find_stray_interrupts(context.machine, settings.interrupts, plan)
    return (
        "fine",
        f"{count} interrupts of cards and network devices land on no other rank's cores",
        notes,
    )


def _look_at_environment(context: _Context) -> tuple[State, str, Sequence[Note]]:
    settings = context.settings.environment
    if settings is None:
        return "unknown", "there is no /etc here", ()
    notes = [note for one in settings if (note := note_variable(one)) is not None]
    fine = [f"{one.name}={one.value}" for one in settings]
    return (
        "fine",
        f"the system sets {', '.join(fine) or 'nothing that chooses cards or CPUs'}",
        notes,
    )


def _look_at_systemd(context: _Context) -> tuple[State, str, Sequence[Note]]:
    settings = context.settings
    notes: list[Note] = []
    if settings.cgroup_version == 1:
        notes.append(
            Note(
                "cgroup_v1",
                "The cpuset controller is on a cgroup v1 hierarchy, where systemd enforces no AllowedCPUs=.",
                "Boot with systemd.unified_cgroup_hierarchy=1",
            )
        )
    notes += note_manager(settings.manager or (), settings.kernel)
    notes += note_services(settings.services or frozenset())
    unknown = [
        what
        for what, value in (
            ("where the cpuset controller is", settings.cgroup_version),
            ("system.conf", settings.manager),
            ("which services run", settings.services),
        )
        if value is None
    ]
    if unknown and not notes:
        return "unknown", f"not said: {', '.join(unknown)}", ()
    return "fine", "cgroup v2 has the cpuset controller, and nothing else gives CPUs away", notes


# Other readers ---------------------------------------------------------------------------------


def _check_reader(comparison: Comparison) -> Check:
    """A text that another reader printed."""
    name = next(one for one in _READERS if comparison.reader.startswith(one))
    agreed = comparison.facts - len(comparison.differences)
    why = f"{comparison.place}: {agreed} of {comparison.facts} facts agree"
    if comparison.explained:
        why += "; " + "; ".join(comparison.explained)
    return Check(name, "found" if comparison.differences else "fine", why, comparison.differences)


_CHECKS: tuple[tuple[str, _Look], ...] = (
    ("data", _look_at_data),
    ("cards", _look_at_cards),
    ("locality", _look_at_locality),
    ("cores", _look_at_cores),
    ("packages", _look_at_packages),
    ("memory", _look_at_memory),
    ("ceiling", _look_at_ceiling),
    ("balancing", _look_at_balancing),
    ("interrupts", _look_at_interrupts),
    ("environment", _look_at_environment),
    ("systemd", _look_at_systemd),
    ("placement", _look_at_placement),
)


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The object that `provision doctor --json` prints."""
    return {
        "schema": DOCTOR_SCHEMA,
        "fingerprint": diagnosis.fingerprint,
        "is_this_system": diagnosis.is_this_system,
        "ranks": diagnosis.ranks,
        "checks": [
            {
                "name": check.name,
                "state": check.state,
                "why": check.why,
                "notes": [
                    {"code": note.code, "message": note.message, "hint": note.hint}
                    for note in check.notes
                ],
            }
            for check in diagnosis.checks
        ],
    }
