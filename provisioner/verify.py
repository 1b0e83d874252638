"""Whether a plan is in force: (Plan, Observed) -> Report. Pure.

"Started" proves nothing: systemd calls a slice active whose constraint the kernel has refused. So each
rank is compared from the plan to the pages: planned, configured in systemd, told to the kernel, granted
by it, allowed to each thread, and where the memory lies.

1. The system: cgroup v2 with the cpuset controller, the machine the plan's, apply not interrupted, the
   files as they were written.
2. Each slice: its file and drop-ins ours, read by systemd and as planned there, in the kernel as
   configured, granted as planned less what is offline, its partition valid.
3. Each process and thread in it; with a wall, its anonymous pages.
4. What else was given its CPUs. Confined units are where they were confined to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from provisioner.cpusets import Cpuset
from provisioner.idset import CpuSet, NodeSet, union_cpus
from provisioner.layout import TRANSIENT_FOLDER
from provisioner.numa_maps import add_bytes, share_on
from provisioner.observe import Observed, ObservedUnit, Worker
from provisioner.plan import Plan, Rank, Service
from provisioner.planfile import to_json
from provisioner.render import CONFINED

SCHEMA = "provision.verify/1"


@dataclass(frozen=True, slots=True)
class Finding:
    """One way in which the system is not as planned."""

    code: str  # stable, snake_case
    subject: str  # a unit, a file or 'system'
    message: str  # planned, found
    hint: str = ""  # an action


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank from the plan to the pages. A set of None: systemd or the kernel does not say."""

    service: str
    rank: int
    slice: str
    planned_cpus: CpuSet
    configured_cpus: CpuSet  # of systemd; empty: not set
    effective_cpus: CpuSet | None  # of the kernel
    planned_nodes: NodeSet  # empty: no wall
    configured_nodes: NodeSet
    effective_nodes: NodeSet | None
    processes: int
    threads: int
    anonymous_bytes: dict[int, int] | None  # by node; None: not asked for or not to be had
    file_bytes: dict[int, int] | None
    local_share: (
        float | None
    )  # of anonymous bytes, on the planned nodes, 0 to 1; None: none, unknown
    ok: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The word of honour: what is in force, and everything that is not as planned."""

    ranks: tuple[RankReport, ...]
    findings: tuple[Finding, ...]  # each is a mismatch
    notes: tuple[Finding, ...]  # what should be known and is none

    @property
    def ok(self) -> bool:
        """Whether everything is as planned."""
        return not self.findings


def report_to_json(report: Report) -> dict[str, Any]:
    """The object that `provision verify --json` prints."""
    return {"schema": SCHEMA, "ok": report.ok, **to_json(report)}


def verify(plan: Plan, seen: Observed) -> Report:
    """Everything that is not as planned.

    Args:
        plan: the plan.
        seen: what is in force.
    """
    findings = [*_check_system(plan, seen), *_check_files(seen), *_check_units(seen)]
    notes: list[Finding] = []
    ranks: list[RankReport] = []
    for service in plan.services:
        walled = service.memory == "bind"
        findings += _check_slice(
            service.slice, service.cpus, service.memory_nodes if walled else NodeSet(), seen
        )
        findings += _check_workers(
            service.slice,
            service.cpus,
            service.memory_nodes if walled else NodeSet(),
            seen,
            notes,
        )
        for rank in service.ranks:
            nodes = rank.memory_nodes if walled else NodeSet()
            own = [
                *_check_slice(rank.slice, rank.cpus, nodes, seen),
                *_check_workers(rank.slice, rank.cpus, nodes, seen, notes),
                *_check_overlap(rank, plan, seen),
            ]
            findings += own
            ranks.append(_report_rank(service, rank, nodes, seen, ok=not own))
    notes += _note_pages(seen)
    if plan.confine:
        findings += _check_confined(plan, seen)
        notes += _note_unconfined(seen)
    return Report(tuple(ranks), tuple(findings), tuple(notes))


def expected_cpus(planned: CpuSet, seen: Observed) -> CpuSet:
    """What the kernel can grant of the planned CPUs: those online."""
    return planned & seen.online_cpus


def _check_system(plan: Plan, seen: Observed) -> Iterator[Finding]:
    if seen.unified is None:
        yield Finding(
            "no_cgroup_v2",
            "system",
            "no cgroup v2 hierarchy is mounted: expected one at /sys/fs/cgroup",
            "Boot with systemd.unified_cgroup_hierarchy=1",
        )
    elif not seen.unified.has_cpuset:
        yield Finding(
            "no_cpuset",
            "system",
            "the cpuset controller is not in the root's cgroup.controllers: no AllowedCPUs= has an effect",
            "Unmount the cgroup v1 cpuset hierarchy, or boot without cgroup_disable=cpuset",
        )
    if seen.applied is None:
        yield Finding(
            "not_applied",
            "system",
            "there is no record of an apply: the plan was not brought into force by provision",
            "Bring it into force: provision apply",
        )
    elif not seen.applied.complete:
        yield Finding(
            "interrupted",
            "system",
            "an apply or undo did not come to its end: files and cgroups may be of two plans",
            "Finish it: provision apply, or go back: provision undo",
        )
    if seen.fingerprint != plan.fingerprint:
        missing = plan.assigned_cpus - seen.online_cpus
        offline = f"; CPUs {missing} of the plan are offline" if missing else ""
        yield Finding(
            "machine_changed",
            "system",
            f"this machine is not the plan's: its fingerprint is {seen.fingerprint}, "
            f"planned {plan.fingerprint}{offline}",
            "Undo what changed (CPUs offline, firmware settings, moved cards), or plan and apply again",
        )


def _check_files(seen: Observed) -> Iterator[Finding]:
    """Whether each file is as apply wrote it, by the record: a newer provision may render others."""
    for path, written in seen.applied.files.items() if seen.applied else ():
        found = seen.files.get(path, "")
        if not written:
            continue
        if not found:
            yield Finding(
                "file_missing", path, f"{path} is missing or can't be read", "provision apply"
            )
        elif found != written:
            yield Finding(
                "file_changed",
                path,
                f"{path} is not what apply wrote",
                "Put it back: provision apply; changes belong into provision.toml",
            )


def _check_units(seen: Observed) -> Iterator[Finding]:
    for unit, group in seen.elsewhere.items():
        yield Finding(
            "elsewhere",
            unit,
            f"{unit} runs in the cgroup {group}: expected the slice of its rank",
            f"Look at systemctl cat {unit} for a Slice=, and start it again",
        )


def _check_slice(name: str, cpus: CpuSet, nodes: NodeSet, seen: Observed) -> Iterator[Finding]:
    unit = seen.units[name]
    yield from _check_unit(name, unit, seen)
    state = unit.state
    if state.active_state != "active":
        yield Finding(
            "not_active",
            name,
            f"{name} is {state.active_state}: expected active; nothing holds its workers",
            f"systemctl start {name}",
        )
    if state.allowed_cpus != cpus:
        yield Finding(
            "configured_cpus",
            name,
            f"{name}: AllowedCPUs= is {state.allowed_cpus or 'not set'}: planned {cpus}",
            "Look at systemctl cat for who says so, then provision apply",
        )
    if state.allowed_nodes != nodes:
        yield Finding(
            "configured_nodes",
            name,
            f"{name}: AllowedMemoryNodes= is {state.allowed_nodes or 'not set'}: "
            f"planned {nodes or 'not set'}",
            "Look at systemctl cat for who says so, then provision apply",
        )
    yield from _check_cpuset(name, unit.cpuset, cpus, nodes, seen)


def _check_unit(name: str, unit: ObservedUnit, seen: Observed) -> Iterator[Finding]:
    """Whose file a slice has, whether systemd has read it, and what merges into it."""
    state = unit.state
    is_transient = seen.applied is not None and seen.applied.mode == "transient"
    if is_transient:
        if state.fragment_path and not state.fragment_path.startswith(TRANSIENT_FOLDER + "/"):
            yield Finding(
                "foreign_file",
                name,
                f"{name} has the file {state.fragment_path}: expected none but a transient one",
                "Remove the file, then provision apply --transient",
            )
    elif not state.fragment_path:
        # A slice without a file is 'loaded' all the same, and holds nothing.
        yield Finding(
            "no_unit_file",
            name,
            f"{name} has no unit file that systemd knows of (it is {state.load_state})",
            "provision apply",
        )
    elif not unit.fragment_is_ours:
        yield Finding(
            "foreign_file",
            name,
            f"{name} has the file {state.fragment_path}, which provision did not make",
            "Move it away, then provision apply",
        )
    for drop_in in unit.drop_ins:
        # What a transient unit was given lies in drop-ins beside it.
        own = drop_in.is_ours or drop_in.path.startswith(TRANSIENT_FOLDER + "/")
        if drop_in.settings and not own:
            yield Finding(
                "foreign_drop_in",
                name,
                f"{name}: {drop_in.path} merges into it: {'; '.join(drop_in.settings)}",
                f"Remove it, by hand or with systemctl revert {name}, then provision apply",
            )
    if state.need_daemon_reload and not is_transient:
        yield Finding(
            "needs_reload",
            name,
            f"{name}: its files have changed since systemd read them",
            "systemctl daemon-reload, then provision verify again",
        )


def _check_cpuset(
    name: str, cpuset: Cpuset | None, cpus: CpuSet, nodes: NodeSet, seen: Observed
) -> Iterator[Finding]:
    """What the kernel was told and what it grants."""
    if cpuset is None:
        yield Finding(
            "no_cgroup",
            name,
            f"{name} has no cgroup: nothing limits its workers",
            f"systemctl start {name}",
        )
        return
    if cpuset.cpus is None or cpuset.effective_cpus is None:
        yield Finding(
            "no_controller",
            name,
            f"{name}: the cpuset controller is not enabled for its cgroup {cpuset.path}",
            "Look for DisableControllers=cpuset on the slices above it",
        )
        return
    if cpuset.cpus != cpus:
        yield Finding(
            "kernel_cpus",
            name,
            f"{name}: the kernel has cpuset.cpus {_said(cpuset.cpus)}: planned {cpus}",
            "provision apply",
        )
    if nodes and cpuset.nodes != nodes:
        yield Finding(
            "kernel_nodes",
            name,
            f"{name}: the kernel has cpuset.mems {_said(cpuset.nodes)}: planned {nodes}",
            "provision apply",
        )
    offline = cpus - seen.online_cpus
    if offline:
        yield Finding(
            "offline_cpus",
            name,
            f"{name}: CPUs {offline} are offline: planned {cpus}",
            "Bring them online (echo 1 into each one's online file), or plan and apply again",
        )
    if cpuset.effective_cpus != expected_cpus(cpus, seen):
        yield Finding(
            "effective_cpus",
            name,
            f"{name}: the kernel grants CPUs {_said(cpuset.effective_cpus)}: planned {cpus}",
            "provision apply; if that does not help, look at the slices above it",
        )
    # Without a wall: everything that there is.
    wanted = (nodes or seen.memory_nodes) & seen.memory_nodes
    if cpuset.effective_nodes != wanted:
        yield Finding(
            "effective_nodes",
            name,
            f"{name}: the kernel grants memory nodes {_said(cpuset.effective_nodes)}: "
            f"planned {nodes or f'all, {seen.memory_nodes}'}",
            "provision apply; if that does not help, look at the slices above it",
        )
    if cpuset.partition is not None and "invalid" in cpuset.partition:
        yield Finding(
            "partition",
            name,
            f"{name}: its cpuset partition is '{cpuset.partition}'",
            "Remove CPUSetPartition= from it, then provision apply",
        )


def _check_workers(
    name: str, cpus: CpuSet, nodes: NodeSet, seen: Observed, notes: list[Finding]
) -> Iterator[Finding]:
    """What each process and thread in a slice may use, and where its pages lie."""
    online = expected_cpus(cpus, seen)
    for worker in seen.workers.get(name, ()):
        process = worker.process
        who = f"{name}: process {process.id} ({process.name})"
        outside = [task for task in process.tasks if not task.cpus <= online]
        if outside:
            yield Finding(
                "process_cpus",
                name,
                f"{who}: {_threads(len(outside), len(process.tasks))} may run on CPUs "
                f"{union_cpus(task.cpus for task in outside)}: planned {cpus}",
                "provision apply; a thread follows its cgroup",
            )
        if nodes:
            strange = [task for task in process.tasks if not task.nodes <= nodes]
            if strange:
                found = NodeSet(node for task in strange for node in task.nodes)
                yield Finding(
                    "process_nodes",
                    name,
                    f"{who}: {_threads(len(strange), len(process.tasks))} may take memory from nodes "
                    f"{found}: planned {nodes}",
                    "provision apply",
                )
            yield from _check_pages(name, who, worker, nodes)
        used = union_cpus(task.cpus for task in process.tasks)
        if not outside and used < online:
            notes.append(
                Finding(
                    "narrowed",
                    name,
                    f"{who}: its threads leave CPUs {online - used} of {cpus} unused: they were bound to {used}",
                    "If it was not the worker itself, start it by provision run, which resets affinity",
                )
            )


def _check_pages(name: str, who: str, worker: Worker, nodes: NodeSet) -> Iterator[Finding]:
    if worker.pages is None:
        return  # a note says so
    astray = {
        node: size for node, size in worker.pages.anonymous.items() if node not in nodes and size
    }
    if astray:
        total = sum(worker.pages.anonymous.values())
        where = ", ".join(f"{_size(size)} on node {node}" for node, size in sorted(astray.items()))
        share = 100 * (1 - sum(astray.values()) / total)
        yield Finding(
            "pages",
            name,
            f"{who}: {share:.1f} % of its anonymous memory lies on nodes {nodes}: {where}",
            "It was allocated before the worker was in its slice: start the worker again",
        )


def _check_overlap(rank: Rank, plan: Plan, seen: Observed) -> Iterator[Finding]:
    """Who else was given a rank's CPUs: slices of the plan that should not have them, and strangers."""
    for other_service in plan.services:
        for other in other_service.ranks:
            if other.slice == rank.slice or not rank.cpus.isdisjoint(other.cpus):
                continue
            cpuset = seen.units[other.slice].cpuset
            both = (cpuset.effective_cpus if cpuset else None) or CpuSet()
            if not rank.cpus.isdisjoint(both):
                yield Finding(
                    "overlap",
                    rank.slice,
                    f"{rank.slice}: {other.slice} has CPUs {both & rank.cpus} of it too",
                    "provision apply",
                )
    for cpuset in seen.other_cpusets:
        granted = (cpuset.effective_cpus or CpuSet()) & rank.cpus
        if granted:
            yield Finding(
                "overlap",
                rank.slice,
                f"{rank.slice}: the cgroup {cpuset.path} was given CPUs {granted} of it too",
                "Take them from it, or plan around it: exclude_cpus",
            )


def _check_confined(plan: Plan, seen: Observed) -> Iterator[Finding]:
    expected = expected_cpus(plan.system_cpus, seen)
    for name, _ in CONFINED:
        unit = seen.units[name]
        if unit.cpuset is None and unit.state.active_state != "active":
            continue  # machine.slice is not there before the first machine is
        found = unit.cpuset.effective_cpus if unit.cpuset is not None else None
        if found != expected:
            yield Finding(
                "not_confined",
                name,
                f"{name}: the kernel grants CPUs {_said(found)}: planned {plan.system_cpus}",
                "provision apply",
            )
        if unit.state.allowed_cpus == plan.system_cpus:
            continue  # other drop-ins may say something; ours has the last word
        for drop_in in unit.drop_ins:
            own = seen.applied is not None and drop_in.path in seen.applied.paths
            if drop_in.settings and not drop_in.is_ours and not own:
                yield Finding(
                    "foreign_drop_in",
                    name,
                    f"{name}: {drop_in.path} merges into it: {'; '.join(drop_in.settings)}",
                    "Remove it, or plan without confine",
                )


def _note_pages(seen: Observed) -> Iterator[Finding]:
    workers = [worker for workers in seen.workers.values() for worker in workers]
    unseen = sum(1 for worker in workers if worker.pages is None)
    if unseen:
        why = "may not be read" if seen.pages_asked else "was not looked at"
        yield Finding(
            "pages_unknown",
            "system",
            f"where the memory of {unseen} of {len(workers)} processes lies {why}",
            "Run it as root, and without --no-pages",
        )


def _note_unconfined(seen: Observed) -> Iterator[Finding]:
    for path in seen.unconfined:
        yield Finding(
            "unconfined",
            path,
            f"{path} holds processes and is not confined: they may run on the ranks' cores",
            "Set AllowedCPUs= on it too",
        )


def _report_rank(
    service: Service, rank: Rank, nodes: NodeSet, seen: Observed, *, ok: bool
) -> RankReport:
    unit = seen.units[rank.slice]
    workers = seen.workers.get(rank.slice, ())
    placements = [worker.pages for worker in workers]
    anonymous: dict[int, int] | None = None
    files: dict[int, int] | None = None
    if seen.pages_asked and all(one is not None for one in placements):
        anonymous, files = {}, {}
        for one in placements:
            if one is not None:
                add_bytes(anonymous, one.anonymous)
                add_bytes(files, one.file)
    return RankReport(
        service=service.name,
        rank=rank.rank,
        slice=rank.slice,
        planned_cpus=rank.cpus,
        configured_cpus=unit.state.allowed_cpus,
        effective_cpus=unit.cpuset.effective_cpus if unit.cpuset else None,
        planned_nodes=nodes,
        configured_nodes=unit.state.allowed_nodes,
        effective_nodes=unit.cpuset.effective_nodes if unit.cpuset else None,
        processes=len(workers),
        threads=sum(len(worker.process.tasks) for worker in workers),
        anonymous_bytes=anonymous,
        file_bytes=files,
        local_share=share_on(anonymous, rank.memory_nodes)
        if anonymous and rank.memory_nodes
        else None,
        ok=ok,
    )


def _said(ids: CpuSet | NodeSet | None) -> str:
    return "unknown" if ids is None else str(ids) or "none of its own"


def _threads(some: int, all_of_them: int) -> str:
    return f"all {some} threads" if some == all_of_them else f"{some} of {all_of_them} threads"


def _size(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
