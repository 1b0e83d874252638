"""What is in force on the running system, as systemd and the kernel say it, read once and frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from provisioner.applied import Applied
from provisioner.bus import Bus, UnitState
from provisioner.cpusets import (
    Cpuset,
    Unified,
    find_unified,
    list_cgroup_processes,
    list_child_cgroups,
    read_cpuset,
    walk_cgroups,
)
from provisioner.errors import WriteError
from provisioner.filestore import digest, look
from provisioner.idset import CpuSet, NodeSet
from provisioner.layout import drop_in_folders, slice_cgroup, unit_cgroup
from provisioner.numa_maps import PagePlacement
from provisioner.plan import Plan, Rank, Service
from provisioner.processes import Process, read_pages, read_process
from provisioner.render import CONFINED, is_ours
from provisioner.root import Root


@dataclass(frozen=True, slots=True)
class Worker:
    """A process in a slice of ours, or below it."""

    process: Process
    cgroup: str
    pages: PagePlacement | None  # None: not asked for, or not to be had


@dataclass(frozen=True, slots=True)
class DropIn:
    """A file that merges into a unit of ours."""

    path: str
    is_ours: bool
    settings: tuple[str, ...]  # those of its lines that say what a cpuset may be


@dataclass(frozen=True, slots=True)
class ObservedUnit:
    """A slice of the plan, or a unit of the system's own that the plan confines."""

    state: UnitState
    cpuset: Cpuset | None  # None: there is no such cgroup
    drop_ins: tuple[DropIn, ...]
    fragment_is_ours: bool


@dataclass(frozen=True, slots=True)
class Observed:
    """All that verifying looks at."""

    unified: Unified | None
    fingerprint: str
    online_cpus: CpuSet  # what the root cgroup grants
    memory_nodes: NodeSet  # likewise
    units: Mapping[str, ObservedUnit]  # by unit name
    workers: Mapping[str, tuple[Worker, ...]]  # by slice: those in its own cgroup and units in it
    other_cpusets: tuple[Cpuset, ...]  # cgroups that are not ours and were told their CPUs
    elsewhere: Mapping[str, str]  # cgroup of each unit that starts a rank and is not in its slice
    unconfined: tuple[str, ...]  # top-level cgroups with processes that confinement does not reach
    files: Mapping[
        str, str
    ]  # digest of each file of the record by path; empty: missing, unreadable
    applied: Applied | None
    pages_asked: bool = field(default=True)


# What a drop-in can say about a cpuset. Source: systemd.resource-control(5).
_CPUSET_KEYS = (
    "AllowedCPUs",
    "AllowedMemoryNodes",
    "StartupAllowedCPUs",
    "StartupAllowedMemoryNodes",
    "CPUSetPartition",
    "DisableControllers",
    "Slice",
)


def observe(
    plan: Plan,
    bus: Bus,
    root: Root,
    *,
    fingerprint: str,
    applied: Applied | None,
    pages: bool = True,
) -> Observed:
    """What is in force of a plan.

    Args:
        plan: the plan.
        bus: systemd.
        root: the running system's root.
        fingerprint: the machine's, as it is now.
        applied: the record of what was applied.
        pages: whether to ask where each process's pages lie, which takes a moment for a large one.
    """
    unified = find_unified(root)
    mount = unified.mount if unified is not None else ""
    names = plan_units(plan)
    units = {name: observe_unit(name, bus, root, unified) for name in names}
    top = None if unified is None else read_cpuset(root, mount, "/")
    return Observed(
        unified=unified,
        fingerprint=fingerprint,
        online_cpus=(top.effective_cpus if top else None) or CpuSet(),
        memory_nodes=(top.effective_nodes if top else None) or NodeSet(),
        units=units,
        workers={} if unified is None else _find_workers(plan, root, mount, pages),
        other_cpusets=() if unified is None else _find_others(plan, root, mount),
        elsewhere=_find_elsewhere(plan, bus),
        unconfined=() if unified is None else _find_unconfined(plan, root, mount),
        files=_read_digests(applied),
        applied=applied,
        pages_asked=pages,
    )


def plan_slices(plan: Plan) -> tuple[str, ...]:
    """The slices of a plan, each after the one that it lies in."""
    return tuple(
        name
        for service in plan.services
        for name in (service.slice, *(rank.slice for rank in service.ranks))
    )


def plan_units(plan: Plan) -> tuple[str, ...]:
    """The slices of a plan and, where it confines them, the system's own units."""
    confined = tuple(name for name, _ in CONFINED) if plan.confine else ()
    return plan_slices(plan) + confined


def observe_unit(name: str, bus: Bus, root: Root, unified: Unified | None) -> ObservedUnit:
    """A unit and its cgroup."""
    state = bus.unit(name)
    path = unit_cgroup(name) or state.control_group
    cpuset = None
    if unified is not None and path:
        cpuset = read_cpuset(root, unified.mount, path)
    return ObservedUnit(
        state=state,
        cpuset=cpuset,
        drop_ins=tuple(read_drop_in(path) for path in state.drop_in_paths),
        fragment_is_ours=is_ours(_read(state.fragment_path) or "")
        if state.fragment_path
        else False,
    )


def find_drop_ins(unit: str, folders: Iterable[str]) -> tuple[DropIn, ...]:
    """The drop-ins in some folders that would merge into a unit, read by systemd or not yet."""
    found: dict[str, DropIn] = {}
    for folder in folders:
        for name in drop_in_folders(unit):
            place = Path(folder, name)
            try:
                entries = sorted(place.glob("*.conf"))
            except OSError:
                continue
            for path in entries:
                real = str(path.resolve())
                found.setdefault(real, read_drop_in(str(path)))
    return tuple(found.values())


def read_drop_in(path: str) -> DropIn:
    """What a drop-in says about a cpuset; one that can't be read may say anything."""
    text = _read(path)
    if text is None:
        return DropIn(path, False, ("unreadable",))
    lines = (line.strip() for line in text.splitlines())
    settings = tuple(line for line in lines if line.partition("=")[0].strip() in _CPUSET_KEYS)
    return DropIn(path, is_ours(text), settings)


def _find_workers(plan: Plan, root: Root, mount: str, pages: bool) -> dict[str, tuple[Worker, ...]]:
    """The processes of each slice; those of a rank are the rank's and not the service's."""
    found: dict[str, tuple[Worker, ...]] = {}
    for service in plan.services:
        ranks = {slice_cgroup(rank.slice): rank.slice for rank in service.ranks}
        own: list[Worker] = []
        by_rank: dict[str, list[Worker]] = {name: [] for name in ranks.values()}
        for path in walk_cgroups(root, mount, slice_cgroup(service.slice)):
            below = next(
                (name for top, name in ranks.items() if path == top or path.startswith(top + "/")),
                None,
            )
            workers = own if below is None else by_rank[below]
            for pid in list_cgroup_processes(root, mount, path):
                process = read_process(root, pid)
                if process is not None:
                    placement = read_pages(root, pid) if pages else None
                    workers.append(Worker(process, path, placement))
        found[service.slice] = tuple(own)
        found |= {name: tuple(workers) for name, workers in by_rank.items()}
    return found


def _find_others(plan: Plan, root: Root, mount: str) -> tuple[Cpuset, ...]:
    """The cgroups outside of ours, the root and the system's own aside, that were told CPUs."""
    ours = tuple(slice_cgroup(service.slice) for service in plan.services)
    system = {unit_cgroup(name) for name, _ in CONFINED}
    found: list[Cpuset] = []
    for path in walk_cgroups(root, mount):
        if path == "/" or path in system:
            continue
        if any(path == top or path.startswith(top + "/") for top in ours):
            continue
        cpuset = read_cpuset(root, mount, path)
        if cpuset is not None and cpuset.cpus:
            found.append(cpuset)
    return tuple(found)


def _find_elsewhere(plan: Plan, bus: Bus) -> dict[str, str]:
    """The units of ranks that run, and not in the rank's slice: someone has moved them."""
    found: dict[str, str] = {}
    for service in plan.services:
        for rank in service.ranks:
            names = rank_units(service, rank)
            for one in bus.list_units(*names):
                if one.active_state not in {"active", "activating"}:
                    continue
                group = bus.unit(one.name).control_group
                if group and not group.startswith(slice_cgroup(rank.slice) + "/"):
                    found[one.name] = group
    return found


def rank_units(service: Service, rank: Rank) -> tuple[str, ...]:
    """Patterns of the names of the units that run a rank: by systemctl, launch, run and the wrapper."""
    name = f"{service.name}-rank{rank.rank}"
    return (
        f"{service.name}@{rank.rank}.service",
        f"{name}.service",
        f"{name}-*.service",
        f"{name}-*.scope",
    )


def _read_digests(applied: Applied | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in applied.files if applied else ():
        try:
            found[path] = digest(look(path))
        except WriteError:
            found[path] = ""
    return found


def _find_unconfined(plan: Plan, root: Root, mount: str) -> tuple[str, ...]:
    known = {unit_cgroup(name) for name, _ in CONFINED}
    known |= {slice_cgroup(service.slice) for service in plan.services}
    return tuple(
        path
        for path in list_child_cgroups(root, mount, "/")
        if path not in known
        and any(list_cgroup_processes(root, mount, one) for one in walk_cgroups(root, mount, path))
    )


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text("utf-8", "surrogateescape")
    except OSError:
        return None
