"""What a rank is to be bound to, and who says so: its environment, a plan, or discovery.

1. The environment that provision rendered for the rank, if it is this rank's.
2. A plan file, by the rank's unit or by its card.
3. Else the machine: the card's share by the rules of the host half (`share`).

What refuses one of them is kept as a problem, and the next is asked: a wrong plan must not bind a
worker, nor must it keep it from its share. Nothing here changes the process.
"""

from __future__ import annotations

import os

from provisioner.errors import InputError, ParseError, Problem, ProvisionError, shorten
from provisioner.idset import CpuSet, NodeSet, union_cpus
from provisioner.record import Record
from provisioner.worker.procfs import (
    list_usable_nvidia_cards,
    read_cgroup_paths,
    read_device_node,
    read_node_cpus,
)
from provisioner.worker.unit import find_unit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from provisioner.root import Root
    from provisioner.worker.planned import PlannedRank
    from provisioner.worker.unit import Unit

PLAN_PATHS = ("/etc/provision/plan.json", "/run/provision/plan.json")
ENVIRONMENT = "environment"
DISCOVERY = "discovery"
NOTHING = "none"
MEMORY_MODES = ("bind", "prefer", "off")


class Target(Record):
    """What a rank is to be bound to."""

    local_rank: int | None  # position among the visible devices; None: not known, or not needed
    rank_source: str  # argument, LOCAL_RANK, unit NAME, the only visible device, or none
    source: str  # environment, a plan's path, discovery, or none
    cpus: CpuSet | None = None  # within what the cpuset allows; None: nothing is known to be right
    main_cpus: CpuSet = CpuSet()  # of them, those of the main threads
    compile_cpus: CpuSet = CpuSet()  # of them, those set aside for background compilation
    memory_nodes: NodeSet = NodeSet()  # empty where memory is off, or nothing is known
    memory: str = "bind"  # bind, prefer or off
    devices: tuple[
        str, ...
    ] = ()  # the rank's cards by PCI address; empty: their names aren't needed
    cpu_nodes: NodeSet = NodeSet()  # those whose CPUs serve the cards; empty: not needed
    problems: tuple[Problem, ...] = ()  # why something is not as it should be
    notes: tuple[str, ...] = ()  # what a person may want to know besides


class Asked(Record):
    """What a search for a target goes by."""

    local_rank: int | None
    rank_source: str
    unit: Unit | None
    environ: Mapping[str, str]
    root: Root | None  # None: the running system
    allowed_cpus: CpuSet | None  # of the cpuset; None: not known
    allowed_nodes: NodeSet | None
    devices_per_rank: int | None  # None: as the plan says, else 1
    memory: str | None  # None: as the plan says, else bind
    locality: Mapping[str, int]  # card -> node, stated by the caller


def find_target(
    local_rank: int | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    root: Root | None = None,
    allowed_cpus: CpuSet | None = None,
    allowed_nodes: NodeSet | None = None,
    devices_per_rank: int | None = None,
    memory: str | None = None,
    locality: Mapping[str, int] | None = None,
    plan_paths: Sequence[str] = PLAN_PATHS,
) -> Target:
    """What a rank is to be bound to; whatever is wrong is in the result.

    Args:
        local_rank: the rank's position among the visible devices; None asks LOCAL_RANK, then the
            unit that systemd started this process in.
        environ: the environment; None is this process's.
        root: a recorded machine; None is the running one.
        allowed_cpus: what the cpuset allows; None takes it from the files of the cgroup.
        allowed_nodes: likewise.
        devices_per_rank: how many devices a rank has; None is as many as the plan says, else one.
        memory: bind, prefer or off; None is the plan's, else bind.
        locality: NUMA node by card, for cards that do not know theirs.
        plan_paths: where a plan is looked for that the environment does not name.

    Raises:
        InputError: `memory` is no mode, or `devices_per_rank` is below 1.
    """
    if memory is not None and memory not in MEMORY_MODES:
        raise InputError(f"memory '{shorten(memory)}': expected {', '.join(MEMORY_MODES)}")
    if devices_per_rank is not None and devices_per_rank < 1:
        raise InputError(f"devices_per_rank {devices_per_rank}: expected 1 or more")
    environ = os.environ if environ is None else environ
    problems: list[Problem] = []
    unit = find_unit(read_cgroup_paths(root))
    number, source = _find_rank(local_rank, environ, unit, problems)
    asked = Asked(
        number,
        source,
        unit,
        environ,
        root,
        allowed_cpus,
        allowed_nodes,
        devices_per_rank,
        memory,
        locality or {},
    )
    notes: list[str] = []
    target = None
    # A rank that was given and is none must not become another rank's.
    if not problems:
        target = _find_in_environment(asked, problems, notes)
        if target is None:
            target = _find_in_plans(asked, plan_paths, problems, notes)
        if target is None:
            target = _find_by_discovery(asked, problems)
    if target is None:
        target = Target(number, source, NOTHING, memory=memory or "bind")
    fields = dict(vars(target))
    fields["problems"] = (*problems, *target.problems)
    fields["notes"] = (*notes, *target.notes)
    return Target(**fields)


def read_plan(environ: Mapping[str, str], paths: Sequence[str]) -> tuple[PlannedRank, ...]:
    """The ranks of the plan that the environment names, else of the first of the paths; empty without one.

    Raises:
        OSError: it can't be read.
        InputError: it is no plan.
    """
    named = environ.get("PROVISION_PLAN")
    places = dict.fromkeys((named, *paths) if named else paths)
    found = next((path for path in places if os.path.exists(path)), None)
    if found is None:
        return ()
    from provisioner.worker.planned import read_ranks

    return read_ranks(found)


def problems_of(error: ProvisionError | OSError) -> tuple[Problem, ...]:
    """The reasons that an error carries; an OSError's has its number."""
    if isinstance(error, ProvisionError):
        return error.problems
    return (Problem("system_call", f"{error.strerror or error} (errno {error.errno})"),)


def parse_rank(text: str, name: str) -> int:
    """The rank that a text says.

    Raises:
        ParseError: it is no number from 0 on.
    """
    stripped = text.strip()
    if not (stripped.isascii() and stripped.isdigit() and len(stripped) <= 9):
        raise ParseError(f"{name} is '{shorten(text)}': expected a rank, 0 or more")
    return int(stripped)


def _find_rank(
    given: int | None, environ: Mapping[str, str], unit: Unit | None, problems: list[Problem]
) -> tuple[int | None, str]:
    """The local rank and what said it; where that is wrong, a problem."""
    try:
        if given is not None:
            return parse_rank(str(given), "the local rank"), "argument"
        if "LOCAL_RANK" in environ:
            return parse_rank(environ["LOCAL_RANK"], "LOCAL_RANK"), "LOCAL_RANK"
    except ParseError as error:
        hint = "Start the worker by its launcher, or give bind_local_rank() the rank"
        problems.append(Problem("bad_rank", error.message, hint))
        return None, NOTHING
    return (None, NOTHING) if unit is None else (unit.rank, f"unit {unit.name}")


def _find_in_environment(asked: Asked, problems: list[Problem], notes: list[str]) -> Target | None:
    """The target that the rendered environment says, if it is this rank's and fits this system."""
    environ = asked.environ
    if "PROVISION_CPUS" not in environ:
        return None
    if not _is_own_environment(asked):
        notes.append(
            f"the environment is that of rank {shorten(environ.get('PROVISION_RANK', 'unknown'))} "
            f"of the plan, and this is local rank {asked.local_rank}: it was inherited, and is passed over"
        )
        return None
    try:
        cpus = CpuSet.parse_list(environ["PROVISION_CPUS"])
        compiling = CpuSet.parse_list(environ.get("PROVISION_COMPILE_CPUS", "")) & cpus
        nodes = NodeSet.parse_list(environ.get("PROVISION_MEMORY_NODES", ""))
        memory = environ.get("PROVISION_MEMORY", "bind" if nodes else "off")
        if memory not in MEMORY_MODES or (memory != "off" and not nodes):
            raise ParseError(f"memory is '{shorten(memory)}' on nodes '{nodes}'")
    except ParseError as error:
        problems.append(
            Problem(
                "bad_environment",
                f"the environment's PROVISION_CPUS, PROVISION_COMPILE_CPUS, PROVISION_MEMORY and "
                f"PROVISION_MEMORY_NODES: {error.message}",
                "Render the plan again, and start the worker from its environment file",
            )
        )
        return None
    foreign = _find_card_elsewhere(asked, cpus)
    if foreign:
        problems.append(
            Problem(
                "foreign_environment",
                f"PROVISION_CPUS are {cpus}, and {foreign}: the environment is another machine's",
                "Start the worker from an environment file that was rendered on this machine",
            )
        )
        return None
    return _fit(asked, ENVIRONMENT, cpus, compiling, nodes, memory, None, problems)


def _is_own_environment(asked: Asked) -> bool:
    """Whether the rendered environment is this rank's, and not one that a launcher's ranks inherited."""
    environ, rank, unit = asked.environ, asked.local_rank, asked.unit
    if unit is not None and (unit.service, str(unit.rank)) == (
        environ.get("PROVISION_SERVICE"),
        environ.get("PROVISION_RANK"),
    ):
        return True
    return rank is None or environ.get("PROVISION_LOCAL_RANK", str(rank)) == str(rank)


def _find_card_elsewhere(asked: Asked, cpus: CpuSet) -> str:
    """Which of the rank's cards is on a NUMA node with none of the CPUs; empty if none is, or nothing says.

    A cgroup that holds the rank was made on this machine, and may be off the node on purpose.
    """
    if asked.allowed_cpus is not None and asked.allowed_cpus <= cpus:
        return ""
    entries = asked.environ.get("CUDA_VISIBLE_DEVICES", "").count(",") + 1
    mates = asked.environ.get("LOCAL_WORLD_SIZE", "")
    if not (mates.isascii() and mates.isdigit() and int(mates[:6])) or entries % int(mates[:6]):
        return ""
    for name in sorted(_read_card_names(asked, entries // int(mates[:6])) or ()):
        node = read_device_node(name, asked.root)
        there = read_node_cpus(node, asked.root) if node is not None and node >= 0 else None
        if there and there.isdisjoint(cpus):
            return f"card {name} is on NUMA node {node} with CPUs {there}"
    return ""


def _find_in_plans(
    asked: Asked, paths: Sequence[str], problems: list[Problem], notes: list[str]
) -> Target | None:
    """The target that a plan file says, if it has this rank and fits this system."""
    try:
        ranks = read_plan(asked.environ, paths)
    except (InputError, OSError) as error:
        problems += problems_of(error)
        return None
    try:
        planned = _choose_rank(asked, ranks) if ranks else None
    except (ProvisionError, OSError):
        return None  # which cards are the rank's: discovery asks the same, and says why not
    if planned is None:
        if ranks:
            notes.append(f"{ranks[0].path} has no rank with this one's cards")
        return None
    foreign = _find_mismatch(planned, asked.root)
    if foreign:
        problems.append(
            Problem(
                "foreign_plan",
                f"{planned.path} is another machine's plan: {foreign}",
                "Remove it here, or make a plan on this machine",
            )
        )
        return None
    return _fit(
        asked,
        planned.path,
        planned.cpus,
        planned.compile_cpus,
        planned.memory_nodes,
        planned.memory,
        planned,
        problems,
    )


def _choose_rank(asked: Asked, ranks: Sequence[PlannedRank]) -> PlannedRank | None:
    """This rank in a plan: by the unit that systemd put it in, else by its cards.

    Raises:
        InputError: the rank has no card, nothing says which it is, or the machine can't be read.
    """
    unit = asked.unit
    if unit is not None:
        for one in ranks:
            if (one.service, one.rank) == (unit.service, unit.rank):
                return one
    sizes = {len(one.devices) for one in ranks}
    count = asked.devices_per_rank or (sizes.pop() if len(sizes) == 1 else 1)
    names = None
    if {one.vendor for one in ranks} == {"nvidia"}:
        names = _read_card_names(asked, count)
    if names is None:
        from provisioner.worker.share import find_cards

        names = {card.name for card in find_cards(asked, count)}
    return next((one for one in ranks if names <= set(one.devices)), None)


def _read_card_names(asked: Asked, count: int) -> set[str] | None:
    """The PCI addresses of the rank's cards, where they can be had without discovery.

    So it is where NVIDIA's cards are listed by number and in PCI order, as `render` writes them.
    """
    environ, rank = asked.environ, asked.local_rank
    entries = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if (
        rank is None
        or environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        or not all(entry.isascii() and entry.isdigit() and len(entry) <= 4 for entry in entries)
        or len(set(entries)) < len(entries)
    ):
        return None
    cards = list_usable_nvidia_cards(asked.root)
    mine = [int(entry) for entry in entries[rank * count : (rank + 1) * count]]
    if cards is None or len(mine) < count or max(map(int, entries)) >= len(cards):
        return None
    return {cards[number] for number in mine}


def _find_mismatch(planned: PlannedRank, root: Root | None) -> str:
    """What this machine has otherwise than the plan says; empty if nothing.

    Not the fingerprint: a container can't see all that goes into it. What the rank depends on can be
    read here: its CPUs are its NUMA nodes', and its cards are on those nodes.
    """
    found: list[CpuSet] = []
    for node in planned.cpu_nodes:
        cpus = read_node_cpus(node, root)
        if cpus is None:
            return f"it has a NUMA node {node}, and there is none here"
        found.append(cpus)
    known = union_cpus(found)
    if planned.is_local and not planned.cpus <= known:
        return (
            f"it has CPUs {planned.cpus} on NUMA node {planned.cpu_nodes}, "
            f"whose CPUs here are {known or 'none'}"
        )
    for device, source in zip(planned.devices, planned.node_sources, strict=False):
        on = read_device_node(device, root)
        # The PCI bus may be hidden here; and a node without CPUs is served by another's.
        if source != "numa_node" or on is None or on in planned.cpu_nodes:
            continue
        if on < 0 or read_node_cpus(on, root):
            return f"it has card {device} on NUMA node {planned.cpu_nodes}, which is on {on} here"
    return ""


def _fit(
    asked: Asked,
    source: str,
    cpus: CpuSet,
    compile_cpus: CpuSet,
    memory_nodes: NodeSet,
    memory: str,
    planned: PlannedRank | None,
    problems: list[Problem],
) -> Target | None:
    """A planned place within what the cpuset allows; None, with a problem, where that is nothing."""
    allowed = cpus if asked.allowed_cpus is None else cpus & asked.allowed_cpus
    where = f"{source}: the rank's CPUs are {cpus or 'none'}"
    if not allowed:
        problems.append(
            Problem(
                "cpus_not_allowed",
                f"{where}, and this process may run on {asked.allowed_cpus or 'none'} alone",
                "Widen the cpuset, or make a plan for what it allows",
            )
        )
        return None
    lacking: tuple[Problem, ...] = ()
    if allowed != cpus:
        lacking = (
            Problem(
                "cpus_missing",
                f"{where}, of which {cpus - allowed} are offline or not in the cpuset",
                "Widen the cpuset, or make the plan again",
            ),
        )
    mode = asked.memory or memory
    compiling = compile_cpus & allowed
    return Target(
        asked.local_rank,
        asked.rank_source,
        source,
        allowed,
        allowed - compiling,
        compiling,
        memory_nodes if mode != "off" else NodeSet(),
        mode,
        planned.devices if planned is not None else (),
        planned.cpu_nodes if planned is not None else NodeSet(),
        problems=lacking,
    )


def _find_by_discovery(asked: Asked, problems: list[Problem]) -> Target | None:
    import gc

    # Modules and a machine are made here, and next to no garbage: looking for it takes a tenth of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        from provisioner.worker.share import find_share

        return find_share(asked)
    except (ProvisionError, OSError) as error:
        problems += problems_of(error)
        return None
    finally:
        if was_enabled:
            gc.enable()
