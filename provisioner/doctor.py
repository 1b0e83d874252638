"""What is odd about a host and costs its ranks something, each with what to do. Pure.

A check has found something, or found nothing, or could not be made: what a recording lacks is never
taken for fine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

from provisioner.comparison import Comparison
from provisioner.errors import Problem
from provisioner.fingerprint import machine_fingerprint
from provisioner.idset import NodeSet
from provisioner.interrupts import find_devices, find_stray_interrupts, note_irqbalance
from provisioner.oddities import find_oddities
from provisioner.plan import Note, Plan, Rank
from provisioner.request import PlacementRequest
from provisioner.sentences import count, name_some, named_ranks
from provisioner.setting_notes import (
    note_huge_pages,
    note_manager,
    note_running,
    note_services,
    note_variables,
)
from provisioner.settings import HostSettings
from provisioner.topology import Machine
from provisioner.usable import find_usable_cores

DOCTOR_SCHEMA = "provision.doctor/1"

State = Literal["found", "fine", "unknown"]


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str  # stable
    state: State  # found wins over unknown, and unknown over fine
    why: str  # what was seen, where it is fine; of another reader's text always
    unknown: tuple[str, ...] = ()  # what could not be looked at
    notes: tuple[Note, ...] = ()  # what was found


class _Seen(NamedTuple):
    """What a check saw."""

    fine: str = ""
    unknown: tuple[str, ...] = ()
    notes: Sequence[Note] = ()


class Diagnosis(NamedTuple):
    """A host, looked at."""

    fingerprint: str
    is_this_system: bool
    ranks: int | None  # of the plan that it was judged by; None: there is none
    checks: tuple[Check, ...]

    @property
    def contradicted(self) -> bool:
        """Whether another reader's text says otherwise than the machine."""
        return any(check.state == "found" for check in self.checks if check.name in READERS)


# Which check a note of the planner's or of the machine's belongs to; all others are of the placement.
_CODES: dict[str, tuple[str, ...]] = {
    "data": ("machine",),
    "cards": ("no_card", "driver_not_loaded", "cards_from_dev", "npu_numbers"),
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
# What was asked for, or is the only answer there is.
_AS_ASKED = (
    *("by_locality", "by_one_node", "shared_cores", "several_cards", "partitions"),
    *("idle_siblings", "cards_without_rank"),
)
# The checks that hold another reader's text against the machine.
READERS = ("nvidia-smi", "numactl")


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
    reasons = () if isinstance(plan, Plan) else plan
    notes: dict[str, list[Note]] = {}
    for note in (
        *_collect(machine, found),
        *(Note(one.code, one.message, one.hint) for one in reasons),
    ):
        notes.setdefault(_CHECK_OF.get(note.code, "placement"), []).append(note)
    context = _Context(machine, settings, found)
    checks: list[Check] = []
    for name, look in _CHECKS:
        seen = look(context)
        unknown = (*seen.unknown, *_name_unreadable(settings.unreadable.get(name, ())))
        listed = (*notes.get(name, ()), *seen.notes)
        state: State = "found" if listed else "unknown" if unknown else "fine"
        why = seen.fine if state == "fine" else ""
        checks.append(Check(name, state, why, unknown, listed))
    checks += [_check_reader(one) for one in comparisons]
    return Diagnosis(
        machine_fingerprint(machine),
        machine.is_this_system,
        None if found is None else sum(len(service.ranks) for service in found.services),
        tuple(checks),
    )


def _name_unreadable(paths: Sequence[str]) -> Iterator[str]:
    """What of a check can't be known for files that can't be read."""
    if paths:
        yield f"what is in {name_some(paths, 3)}: can't be read, or is of another form"


def _collect(machine: Machine, plan: Plan | None) -> Iterator[Note]:
    """The machine's notes, as it is now, and those that the plan adds."""
    stated = {
        device
        for _, rank in (named_ranks(plan) if plan is not None else ())
        for device, source in zip(rank.devices, rank.node_sources, strict=False)
        if source == "locality"
    }
    # What is never said is no finding, and stands with what is not known.
    yield from (note for note in find_oddities(machine, stated) if note.code != "unsaid")
    if plan is None:
        yield from find_usable_cores(machine, PlacementRequest()).notes
        return
    own = (_CHECK_OF.keys() | {"unsaid", *_AS_ASKED}) - set(_OF_REQUEST)
    yield from (note for note in plan.notes if note.code not in own)
    cores_of_llc = Counter(core.llc for core in machine.cores)
    alike: dict[str, list[tuple[str, Note]]] = {}
    for label, rank in named_ranks(plan):
        for note in (*rank.notes, *_note_alignment(machine, cores_of_llc, rank)):
            if note.code not in _AS_ASKED:
                alike.setdefault(note.code, []).append((label, note))
    for code, listed in alike.items():
        # One sentence for all: they mostly have one cause.
        label, first = listed[0]
        more = f" (so too {name_some([one for one, _ in listed[1:]])})" if len(listed) > 1 else ""
        yield Note(code, f"{label[0].upper()}{label[1:]}{more}: {first.message}", first.hint)


def _note_alignment(
    machine: Machine, cores_of_llc: Mapping[int | None, int], rank: Rank
) -> Iterator[Note]:
    """What could be better about a rank and no note of the plan says."""
    cores = machine.cores_of(rank.main_cpus)
    caches = {core.llc for core in cores} - {None}
    room = min((cores_of_llc[llc] for llc in caches), default=0)
    # As few as hold so many cores are no fault.
    if caches and len(caches) > -(-len(cores) // room):
        yield Note(
            "several_llcs",
            f"its CPUs {rank.main_cpus} are spread over {len(caches)} last-level caches of {room} cores.",
            'Policy "llc" makes shares of whole last-level caches, where they go round',
        )
    if not rank.alignment.contiguous:
        yield Note("scattered", f"its CPUs {rank.main_cpus} are no run of cores.")


class _Context(NamedTuple):
    """What each check may look at."""

    machine: Machine
    settings: HostSettings
    plan: Plan | None


# The machine -----------------------------------------------------------------------------------


def _look_at_data(context: _Context) -> _Seen:
    return _Seen("the machine's files do not contradict each other", context.machine.unsaid)


def _look_at_cards(context: _Context) -> _Seen:
    vendors = Counter(card.vendor for card in context.machine.accelerators)
    return _Seen(", ".join(f"{number} of {vendor}" for vendor, number in vendors.items()))


def _look_at_locality(context: _Context) -> _Seen:
    machine = context.machine
    if not machine.accelerators:
        return _Seen("there is no card")
    mute = [card.name for card in machine.accelerators if machine.said_node(card) is None]
    if mute and len(machine.cpu_nodes) > 1:
        return _Seen(unknown=(f"{name_some(mute, 4)} do not say their NUMA node themselves",))
    return _Seen("nothing on the PCI bus contradicts what the cards say")


def _look_at_cores(context: _Context) -> _Seen:
    cores = context.machine.cores
    return _Seen(f"{len(cores)} cores of {count(len(cores[0].cpus), 'CPU')} each, all whole")


def _look_at_packages(context: _Context) -> _Seen:
    packages = {core.package for core in context.machine.cores}
    is_virtual = context.settings.is_virtual
    unknown = ("which package each CPU is in",) if None in packages else ()
    if is_virtual is None:
        unknown = (*unknown, "whether a hypervisor is below")
    elif is_virtual:
        unknown = (
            *unknown,
            "where the CPUs really are: this is a virtual machine, whose host has to pin them",
        )
    nodes = len(context.machine.cpu_nodes)
    return _Seen(
        f"{count(len(packages), 'package')} and {count(nodes, 'NUMA node')} with CPUs fit together",
        unknown,
    )


def _look_at_memory(context: _Context) -> _Seen:
    machine, pages = context.machine, context.settings.huge_pages
    with_cpus = NodeSet(node.id for node in machine.nodes if node.cpus)
    mute = NodeSet(node.id for node in machine.nodes if node.cpus and node.memory_bytes is None)
    unknown = (f"how much memory NUMA nodes {mute} have",) if mute else ()
    said = [NodeSet(one.by_node) for one in pages or ()]
    if pages is None or any(not with_cpus <= nodes for nodes in said):
        unknown = (*unknown, "how many huge pages are set aside on each node")
    return _Seen(
        "nodes with CPUs have about as much memory, and huge pages, as their peers",
        unknown,
        list(note_huge_pages(machine, pages or ())),
    )


def _look_at_ceiling(context: _Context) -> _Seen:
    ceiling = context.machine.ceiling
    if ceiling.cpus is None:
        return _Seen(unknown=(ceiling.source,))
    return _Seen(f"every CPU may be used ({ceiling.source})")


def _look_at_balancing(context: _Context) -> _Seen:
    machine = context.machine
    if len(machine.cpu_nodes) < 2:
        return _Seen("there is one NUMA node with CPUs")
    if machine.numa_balancing is None:
        return _Seen(unknown=("kernel.numa_balancing",))
    return _Seen("kernel.numa_balancing is off")


def _look_at_placement(context: _Context) -> _Seen:
    if context.plan is None:
        return _Seen(unknown=("how ranks would be placed, as there is no plan",))
    with_memory = all(service.memory != "off" for service in context.plan.services)
    memory = " and memory" if with_memory else ""
    return _Seen(f"every rank has whole cores{memory} of its card's node")


# What the host is set to -----------------------------------------------------------------------


def _look_at_interrupts(context: _Context) -> _Seen:
    machine, settings, plan = context.machine, context.settings, context.plan
    if not machine.accelerators:
        return _Seen("there is no rank that they could disturb")
    if plan is None:
        return _Seen(unknown=("whose cores interrupts land on, as there is no plan",))
    notes: list[Note] = []
    unknown: tuple[str, ...] = ()
    daemon = settings.irqbalance
    if daemon is not None:
        notes += note_irqbalance(machine, daemon, plan)
        if not daemon.is_known:
            unknown = (*unknown, f"what irqbalance, which runs, is told in {daemon.settings}")
    elif settings.services is None:
        unknown = (*unknown, "whether irqbalance runs")
    interrupts = settings.interrupts or {}
    devices = find_devices(machine, plan)
    notes += find_stray_interrupts(
        machine, interrupts, plan, devices, is_balanced=daemon is not None
    )
    silent = [
        device.label
        for address, device in devices.items()
        if device.ranks and address not in interrupts
    ]
    if silent:
        unknown = (*unknown, f"where the interrupts of {name_some(silent, 3)} land")
    number = sum(len(one) for one in interrupts.values())
    return _Seen(
        f"{count(number, 'interrupt')} of cards and network devices on no other rank's cores",
        unknown,
        notes,
    )


def _look_at_environment(context: _Context) -> _Seen:
    settings = context.settings.environment
    if settings is None:
        return _Seen(unknown=("what the system sets for every process: its /etc is not here",))
    notes = list(note_variables(settings))
    said = ", ".join(dict.fromkeys(f"{one.name}={one.value}" for one in settings))
    return _Seen(f"the system sets {said or 'nothing that chooses cards or CPUs'}", (), notes)


def _look_at_systemd(context: _Context) -> _Seen:
    settings = context.settings
    notes = [
        *note_running(settings),
        *note_manager(settings.manager or (), settings.kernel),
        *note_services(settings.services or frozenset()),
    ]
    unknown = tuple(
        what
        for what, value in (
            ("whether systemd runs", settings.has_systemd),
            ("which hierarchy has the cpuset controller", settings.cgroup_version),
            ("what system.conf sets", settings.manager),
            ("which services run", settings.services),
        )
        if value is None
    )
    return _Seen(
        "cgroup v2 has the cpuset controller, and nothing else gives CPUs away", unknown, notes
    )


# Other readers ---------------------------------------------------------------------------------


def _check_reader(comparison: Comparison) -> Check:
    """A text that another reader printed."""
    name = next(one for one in READERS if comparison.reader.startswith(one))
    why = f"{comparison.place}: {comparison.agreed} of {comparison.facts} facts agree"
    if comparison.explained:
        why += "; " + "; ".join(comparison.explained)
    state: State = "found" if comparison.differences else "fine"
    return Check(name, state, why, comparison.unsaid, comparison.differences)


_CHECKS: tuple[tuple[str, Callable[[_Context], _Seen]], ...] = (
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
                "unknown": list(check.unknown),
                "notes": [asdict(note) for note in check.notes],
            }
            for check in diagnosis.checks
        ],
    }
