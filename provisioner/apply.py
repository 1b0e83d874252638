"""Brings a plan into force, and goes back if that fails.

`prepare` looks and changes nothing; `carry_out` acts, in these steps:

1. The record (applied.json) is written and says that it is not complete: who finds it so, with nobody
   at work, knows that an apply was interrupted.
2. The files are written, each whole, and those that are no longer of the plan are removed.
3. Systemd reloads, slices start, and where a running cgroup did not follow it is set once more.
4. What is in force is read back and compared. Only then is the record complete.

A failure on the way restores the files, has systemd read them, and sets the cgroups as they were.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from provisioner.applied import Applied, Before, format_applied
from provisioner.bus import Bus
from provisioner.cpusets import find_unified, read_cpuset
from provisioner.data import find_data
from provisioner.enforce import (
    Holder,
    Wanted,
    control_drop_ins,
    enforce,
    find_holder,
    is_as_wanted,
    release,
    remove_control_folders,
)
from provisioner.errors import Problem, ProblemsError, ProvisionError
from provisioner.filestore import (
    NOTHING,
    Entry,
    digest,
    file_entry,
    link_entry,
    look,
    put,
    remove_folders,
    remove_leftovers,
    same,
)
from provisioner.idset import CpuSet, NodeSet
from provisioner.layout import CHECKED_FILE, Layout, sort_slices, unit_cgroup
from provisioner.observe import Observed, observe, plan_slices
from provisioner.plan import Note, Plan
from provisioner.planfile import format_plan
from provisioner.preflight import Permissions, preflight
from provisioner.render import CONFINED, RenderedFile, render, render_program
from provisioner.root import Root
from provisioner.verify import Report, verify

Tell = Callable[[str], None]

CHECK_SERVICE = "provision-check.service"
VERIFY_SERVICE = "provision-verify.service"
VERIFY_TIMER = "provision-verify.timer"
EXTRAS = (VERIFY_TIMER, VERIFY_SERVICE, CHECK_SERVICE)

# What is found with workers that run already, and with strangers: no apply changes it.
_NOT_OURS_TO_CHANGE = {"process_cpus", "process_nodes", "pages", "overlap"}


class InterruptedApplyError(ProvisionError):
    """An apply was interrupted, and could not go back whole."""

    code = "interrupted"


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Extras:
    """The static units that are installed beside a plan; None: as it is now."""

    boot_check: bool | None = None
    verify_timer: bool | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """All that an apply would do, found before anything is changed."""

    plan: Plan
    layout: Layout
    entries: Mapping[str, Entry]  # all that is to be written, by absolute path
    stale: tuple[str, ...]  # files of ours that are no longer rendered
    old: Mapping[
        str, Entry
    ]  # what is now at all paths that an apply may touch, the record's included
    folders: tuple[str, ...]  # that have to be made, outermost first
    wanted: tuple[Wanted, ...]  # what each cgroup is to be told, parents first
    old_wanted: tuple[Wanted, ...]  # what the cgroups that are there have been told
    released: Mapping[str, Wanted]  # units that were confined and are no longer
    stale_slices: tuple[str, ...]  # slices of ours that are no longer planned, innermost first
    started: frozenset[str]  # slices and static units that are active already
    seen: Observed
    report: Report  # of what is in force now
    notes: tuple[Note, ...]

    @property
    def changed_paths(self) -> tuple[str, ...]:
        """The paths at which something is to change, sorted."""
        changed = [path for path, entry in self.entries.items() if not same(self.old[path], entry)]
        return tuple(sorted([*changed, *self.stale]))

    @property
    def is_done(self) -> bool:
        """Whether the plan is in force already, to the last file."""
        return not (
            self.changed_paths or self.stale_slices or self.released or find_faults(self.report)
        )


def find_faults(report: Report) -> tuple[Problem, ...]:
    """What an apply would have to mend, of all that was found."""
    return tuple(
        Problem(one.code, one.message, one.hint)
        for one in report.findings
        if one.code not in _NOT_OURS_TO_CHANGE
    )


def prepare(
    plan: Plan,
    layout: Layout,
    bus: Bus,
    root: Root,
    *,
    applied: Applied | None,
    fingerprint: str,
    extras: Extras,
    allowed: Permissions,
    program: str,
) -> Job:
    """What an apply would do.

    Args:
        plan: the plan, made for this machine.
        layout: where it is to lie.
        bus: systemd.
        root: the running system's root.
        applied: the record of what was applied before.
        fingerprint: the machine's.
        extras: the static units wanted.
        allowed: what the operator has allowed.
        program: the path of the provision command, for units that run it.

    Raises:
        ProblemsError: something speaks against it; everything that does is named.
        BusError: systemd can't be asked.
    """
    rendered = render(plan, format_plan(plan), layout.folder)
    known = frozenset(applied.paths if applied else ())
    entries = {
        layout.place(name): file_entry(file)
        for name, file in rendered.items()
        if layout.mode != "transient" or not layout.is_unit(name)
    }
    entries |= _static_entries(plan, layout, extras, known, program)
    seen = observe(plan, bus, root, fingerprint=fingerprint, applied=applied)
    objections = preflight(plan, layout, entries, seen, bus, root, allowed)
    stale = tuple(
        sorted(
            path
            for path in known - entries.keys()
            if (found := look(path)).is_ours or found.kind == stat.S_IFLNK
        )
    )
    stale_slices = _find_stale_slices(plan, applied)
    problems = (*objections.problems, *_check_stale(stale_slices, bus))
    if problems:
        raise ProblemsError(problems, subject="apply")
    slices = (*plan_slices(plan), *stale_slices)
    wanted = _wanted(plan)
    released = {} if plan.confine or applied is None else remembered(applied)
    touched = {
        *(*entries, *stale, layout.applied_path),
        *(path for one in (*wanted, *released.values()) for path in control_drop_ins(one.unit)),
    }
    return Job(
        plan=plan,
        layout=layout,
        entries=entries,
        stale=stale,
        old={path: look(path) for path in sorted(touched)},
        folders=_missing_folders((*entries, layout.applied_path)),
        wanted=wanted,
        old_wanted=_find_told((*slices, *(name for name, _ in CONFINED)), root),
        released=released,
        stale_slices=stale_slices,
        started=frozenset(
            name for name in (*slices, *EXTRAS) if bus.unit(name).active_state == "active"
        ),
        seen=seen,
        report=verify(plan, seen),
        notes=objections.notes,
    )


def carry_out(
    job: Job, bus: Bus, root: Root, tell: Tell, before_going_back: Callable[[], None] = _nothing
) -> Report:
    """Does what was prepared, and returns what is in force then.

    Args:
        job: what `prepare` found.
        bus: systemd.
        root: the running system's root.
        tell: is told each step before it is done.
        before_going_back: is called first when it has failed.

    Raises:
        ProblemsError: it failed; what was before is in force again, or what isn't is named.
    """
    try:
        return _carry_out(job, bus, root, tell)
    except BaseException as error:
        before_going_back()
        left = go_back(job, bus, root, tell)
        if not isinstance(error, ProvisionError):
            if not left:
                raise
            error = InterruptedApplyError(f"apply was interrupted: {type(error).__name__}")
        end = (
            Problem(
                "not_gone_back",
                "not all that was before could be restored",
                "Mend what failed, then take the plan back: provision undo",
            )
            if left
            else Problem("gone_back", "nothing is changed: what was before is in force again")
        )
        raise ProblemsError([*error.problems, *left, end], subject="apply") from error


def go_back(job: Job, bus: Bus, root: Root, tell: Tell) -> tuple[Problem, ...]:
    """Restores what was before an apply, however far it got.

    Returns: what could not be restored.
    """
    left: list[Problem] = []

    def attempt(what: str, action: Callable[[], object]) -> None:
        tell(f"go back: {what}")
        try:
            action()
        except ProvisionError as error:
            left.extend(error.problems)

    record = job.layout.applied_path
    reloads = job.layout.mode != "transient"
    holder = find_holder(bus, root)
    for name in EXTRAS:
        if name not in job.started and f"{job.layout.units}/{name}" in job.entries:
            attempt(name, lambda name=name: stop_extra(name, bus))  # type: ignore[misc]
    attempt("files", lambda: put({path: one for path, one in job.old.items() if path != record}))
    remove_leftovers(job.old)
    for one in job.wanted:
        remove_control_folders(one.unit)
    if reloads:
        attempt("reload", bus.reload)
    for name in reversed(plan_slices(job.plan)):
        if name not in job.started:
            attempt(name, lambda name=name: _stop_if_empty(name, bus))  # type: ignore[misc]
    for name in job.stale_slices:
        if name in job.started:
            attempt(name, lambda name=name: bus.start(name))  # type: ignore[misc]
    attempt("cgroups", lambda: enforce(job.old_wanted, holder, keep=not reloads))
    if reloads:  # to forget the drop-ins by which cgroups were set, here or before
        attempt("reload", bus.reload)
    left += [
        Problem(
            "not_restored", f"{one.unit} is not as it was", "provision verify says what differs"
        )
        for one in job.old_wanted
        if not is_as_wanted(one, holder)
    ]
    if not left:
        attempt("record", lambda: put({record: job.old[record]}))
        remove_folders(job.folders)
    return tuple(left)


def _carry_out(job: Job, bus: Bus, root: Root, tell: Tell) -> Report:
    layout = job.layout
    reloads = layout.mode != "transient"
    holder = find_holder(bus, root)
    remove_leftovers(job.old)
    tell("record what was before")
    record = _make_record(job)
    _put_record(record, layout)
    if reloads and job.seen.applied is not None and not job.seen.applied.complete:
        # Killed between setting a property and removing the drop-in that this leaves.
        for one in job.wanted:
            put(dict.fromkeys(control_drop_ins(one.unit), NOTHING))
            remove_control_folders(one.unit)
    for name in EXTRAS:
        if f"{layout.units}/{name}" in job.stale:
            tell(f"stop {name}")
            stop_extra(name, bus)
    for path in job.changed_paths:
        entry = job.entries.get(path, NOTHING)
        tell(f"{'write' if entry.kind else 'remove'} {path}")
        put({path: entry})
    if reloads:
        tell("reload systemd")
        bus.reload()
    for name in job.stale_slices:
        tell(f"stop {name}")
        _stop_if_empty(name, bus)
    slices = plan_slices(job.plan)
    for one in job.wanted:
        if one.unit in slices:
            tell(f"start {one.unit}")
            _start(one, job, bus)
    tell("have the cgroups follow")
    present = [one for one in job.wanted if one.unit in slices or _has_cgroup(one.unit, holder)]
    forced = enforce(present, holder, keep=not reloads)
    if not reloads and job.plan.confine:
        _confine_until_boot(job, bus)
    forced += release(job.released, holder, was_reloaded=reloads)
    if not reloads:
        for name in job.released:
            put(dict.fromkeys(control_drop_ins(name), NOTHING))
            remove_control_folders(name)
    if forced and reloads:
        # The drop-ins by which they were set are gone again, which systemd is to know.
        tell(f"reload systemd, after {', '.join(forced)} had to be set once more")
        bus.reload()
    if f"{layout.units}/{VERIFY_TIMER}" in job.entries:
        tell(f"start {VERIFY_TIMER}")
        bus.restart(VERIFY_TIMER)
    tell("read back what is in force")
    kept = record.before if job.plan.confine else {}
    complete = replace(
        record,
        complete=True,
        before=kept,
        slices=slices,
        files={path: one for path, one in record.files.items() if path not in job.stale},
    )
    seen = observe(
        job.plan,
        bus,
        root,
        fingerprint=job.seen.fingerprint,
        applied=complete,
    )
    report = verify(job.plan, seen)
    faults = find_faults(report)
    if faults:
        raise ProblemsError(faults, subject="apply")
    tell("complete the record")
    _put_record(complete, layout)
    stale_folders = {str(Path(path).parent) for path in job.stale} & {*record.folders}
    remove_folders(stale_folders)
    return report


def _confine_until_boot(job: Job, bus: Bus) -> None:
    """Has systemd keep the confinement without a file, for units that are yet to come too."""
    for name, _ in CONFINED:
        if not any(os.path.exists(path) for path in control_drop_ins(name)):
            bus.set_cpuset(name, job.plan.system_cpus, None)


def stop_extra(name: str, bus: Bus) -> None:
    """Stops a static unit, and takes away the mark that slices assert."""
    bus.stop(name)
    if name == CHECK_SERVICE:
        put({CHECKED_FILE: NOTHING})
        remove_folders([os.path.dirname(CHECKED_FILE)])


def _start(one: Wanted, job: Job, bus: Bus) -> None:
    if job.layout.mode != "transient":
        bus.start(one.unit)
        return
    state = bus.unit(one.unit)
    if state.active_state == "active" and state.fragment_path:
        return  # a transient one of ours, which `enforce` sets
    properties: dict[str, object] = {
        "Description": f"{one.unit.removesuffix('.slice')}, set by provision until the next boot",
        "AllowedCPUs": one.cpus,
    }
    if one.nodes is not None:
        properties["AllowedMemoryNodes"] = one.nodes
    bus.start_transient(one.unit, properties)


def _stop_if_empty(name: str, bus: Bus) -> None:
    """Stops a slice that nothing runs in: stopping one kills its workers."""
    if not bus.list_processes(name):
        bus.stop(name)


def _has_cgroup(unit: str, holder: Holder) -> bool:
    """Whether a unit is there to be set: machine.slice is not before the first machine is."""
    path = unit_cgroup(unit)
    return path is not None and read_cpuset(holder.root, holder.mount, path) is not None


def _wanted(plan: Plan) -> tuple[Wanted, ...]:
    """What each cgroup is to be told, each after the one that it lies in."""
    wanted: list[Wanted] = []
    for service in plan.services:
        walled = service.memory == "bind"
        wanted.append(Wanted(service.slice, service.cpus, service.memory_nodes if walled else None))
        wanted += [
            Wanted(rank.slice, rank.cpus, rank.memory_nodes if walled else None)
            for rank in service.ranks
        ]
    if plan.confine:
        wanted += [Wanted(name, plan.system_cpus, None, keep_nodes=True) for name, _ in CONFINED]
    return tuple(wanted)


def remembered(applied: Applied) -> dict[str, Wanted]:
    """What the units that were confined had been told before; None where nothing."""
    return {
        name: Wanted(name, before.cpus or None, before.nodes or None, keep_nodes=True)
        for name, before in applied.before.items()
    }


def _find_told(names: tuple[str, ...], root: Root) -> tuple[Wanted, ...]:
    """What the cgroups of these units have been told; nothing is said of those that are not there."""
    unified = find_unified(root)
    found: list[Wanted] = []
    for name in names:
        path = unit_cgroup(name)
        cpuset = read_cpuset(root, unified.mount, path) if unified and path else None
        if cpuset is not None:
            system = any(name == one for one, _ in CONFINED)
            told = Wanted(name, cpuset.cpus or None, cpuset.nodes or None, keep_nodes=system)
            found.append(told)
    return tuple(found)


def _make_record(job: Job) -> Applied:
    """The record of this apply; what was before the first one stays known."""
    earlier = job.seen.applied
    before = dict(earlier.before) if earlier else {}
    files = {path: digest(entry) for path, entry in job.entries.items()}
    files |= dict.fromkeys(job.stale, "")
    if job.plan.confine:
        for name, _ in CONFINED:
            cpuset = job.seen.units[name].cpuset
            before.setdefault(
                name,
                Before(
                    cpus=(cpuset.cpus if cpuset else None) or CpuSet(),
                    nodes=(cpuset.nodes if cpuset else None) or NodeSet(),
                ),
            )
            if job.layout.mode == "transient":
                files |= dict.fromkeys(control_drop_ins(name), "")
    return Applied(
        mode=job.layout.mode,
        complete=False,
        files=dict(sorted(files.items())),
        folders=tuple(sorted({*job.folders, *(earlier.folders if earlier else ())})),
        # Those that are to go stay known until they are gone.
        slices=(*plan_slices(job.plan), *job.stale_slices),
        before=before,
    )


def _put_record(record: Applied, layout: Layout) -> None:
    put({layout.applied_path: file_entry(RenderedFile(format_applied(record)))})


def _missing_folders(paths: tuple[str, ...]) -> tuple[str, ...]:
    folders = {str(folder) for path in paths for folder in Path(path).parents}
    return tuple(sorted(folder for folder in folders if not os.path.isdir(folder)))


def _find_stale_slices(plan: Plan, applied: Applied | None) -> tuple[str, ...]:
    """Slices that an earlier apply made and this plan has not, innermost first."""
    names = {*(applied.slices if applied else ())} - {*plan_slices(plan)}
    return sort_slices(names)[::-1]


def _check_stale(names: tuple[str, ...], bus: Bus) -> list[Problem]:
    problems: list[Problem] = []
    for name in names:
        processes = bus.list_processes(name)
        if processes:
            problems.append(
                Problem(
                    "still_running",
                    f"{name} is not in the new plan, and {len(processes)} processes run in it: "
                    f"{', '.join(str(pid) for pid in processes[:8])}",
                    f"Stop them first: systemctl stop {name}",
                )
            )
    return problems


def _static_entries(
    plan: Plan, layout: Layout, extras: Extras, known: frozenset[str], program: str
) -> dict[str, Entry]:
    """The static units that are wanted, and what ties them to the plan and to this program."""
    if layout.mode == "transient":
        return {}
    units = find_data("units")
    entries: dict[str, Entry] = {}
    if layout.is_lasting:
        # At each boot, so that a slice holds whatever is started in it, and is seen to.
        for name in plan_slices(plan):
            link = f"{layout.units}/multi-user.target.wants/{name}"
            entries[link] = link_entry(f"{layout.units}/{name}")

    def is_wanted(asked: bool | None, name: str) -> bool:
        return f"{layout.units}/{name}" in known if asked is None else asked

    def add(name: str, place: str = "") -> None:
        text = (units / name).read_text("utf-8")
        entries[f"{layout.units}/{place or name}"] = file_entry(RenderedFile(text))

    def add_program(name: str, *options: str) -> None:
        file = render_program(name, (program, "verify", *options))
        entries[f"{layout.units}/{name}.d/10-provision-program.conf"] = file_entry(file)

    if is_wanted(extras.boot_check, CHECK_SERVICE):
        add(CHECK_SERVICE)
        add_program(CHECK_SERVICE, "--boot")
        for service in plan.services:
            add("provision-check.conf", f"{service.slice}.d/20-provision-check.conf")
    if is_wanted(extras.verify_timer, VERIFY_TIMER):
        add(VERIFY_SERVICE)
        add_program(VERIFY_SERVICE, "--log")
        add(VERIFY_TIMER)
        link = f"{layout.units}/timers.target.wants/{VERIFY_TIMER}"
        entries[link] = link_entry(f"{layout.units}/{VERIFY_TIMER}")
    return entries
