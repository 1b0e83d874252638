"""Takes back what `apply` did: files and live cgroups as before, and no worker killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from provisioner.applied import Applied, format_applied
from provisioner.apply import EXTRAS, remembered, stop_extra
from provisioner.bus import Bus
from provisioner.enforce import (
    Wanted,
    control_drop_ins,
    find_holder,
    is_as_wanted,
    release,
    remove_control_folders,
)
from provisioner.errors import Problem, ProblemsError
from provisioner.filestore import (
    NOTHING,
    file_entry,
    look,
    put,
    remove_folders,
    remove_leftovers,
)
from provisioner.layout import Layout, sort_slices
from provisioner.render import RenderedFile
from provisioner.root import Root

_CONTROL = ("/run/systemd/system.control/", "/run/systemd/transient/")


@dataclass(frozen=True, slots=True)
class Undone:
    """What undo did."""

    removed: tuple[str, ...]  # files
    kept_files: tuple[str, ...]  # that are no longer ours: someone has written there since
    stopped: tuple[str, ...]  # slices
    released: tuple[str, ...]  # slices that still hold processes, which may now run anywhere
    kept_folders: tuple[str, ...]  # that apply made and others have put something into


def undo(
    applied: Applied, layout: Layout, bus: Bus, root: Root, tell: Callable[[str], None]
) -> Undone:
    """Takes a plan back. Done anew after it was interrupted, it goes on.

    1. The record says that it is not complete, so that verify and the boot-time check know.
    2. Our files go; what someone has put in a file's place stays.
    3. Empty slices stop, innermost first; systemd reloads.
    4. What was confined gets back what it had, and slices with processes get all that there is.
    5. The record goes.

    Raises: BusError, WriteError, ProblemsError; a second undo goes on from there.
    """
    reloads = applied.mode != "transient"
    holder = find_holder(bus, root)
    tell("record that it is being undone")
    record = file_entry(RenderedFile(format_applied(replace(applied, complete=False))))
    put({layout.applied_path: record})
    remove_leftovers((*applied.paths, layout.applied_path))
    for name in EXTRAS:
        if f"{layout.units}/{name}" in applied.files:
            tell(f"stop {name}")
            stop_extra(name, bus)
    # Those that apply had systemd write, and those that it was killed before it could remove.
    control = {path for path in applied.files if path.startswith(_CONTROL)}
    if not applied.complete:
        names = (*applied.slices, *applied.before)
        control |= {path for name in names for path in control_drop_ins(name)}
    removed: list[str] = []
    kept: list[str] = []
    for path in sorted({*applied.files, *control}):
        found = look(path)
        if found.kind == 0:
            continue
        own_link = os.fsdecode(found.data).startswith(layout.units + "/")
        if found.is_ours or path in control or own_link:
            tell(f"remove {path}")
            put({path: NOTHING})
            removed.append(path)
        else:
            kept.append(path)
    stopped: list[str] = []
    full: list[str] = []
    for name in reversed(sort_slices(applied.slices)):
        if bus.list_processes(name):
            full.append(name)
            continue
        tell(f"stop {name}")
        bus.stop(name)
        stopped.append(name)
    if reloads:
        tell("reload systemd")
        bus.reload()
    tell("give back CPUs and memory nodes")
    outermost = sort_slices(full)
    units = {name: Wanted(name, None, None) for name in outermost} | remembered(applied)
    for name in (*applied.slices, *applied.before):
        remove_control_folders(name)
    release(units, holder, was_reloaded=reloads)
    if reloads:
        tell("reload systemd")
        bus.reload()
    problems = [
        Problem(
            "still_confined",
            f"{name} could not be given back all CPUs",
            "Run provision undo again; if it stays, the next boot does it",
        )
        for name, before in units.items()
        if not is_as_wanted(before, holder) and not bus.unit(name).allowed_cpus
    ]
    if problems:
        raise ProblemsError(problems, subject="undo")
    tell("remove the record")
    put({layout.applied_path: NOTHING})
    return Undone(
        tuple(removed),
        tuple(kept),
        tuple(stopped),
        outermost,
        remove_folders(applied.folders),
    )
