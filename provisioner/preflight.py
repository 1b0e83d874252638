"""What speaks against bringing a plan into force now, found before anything is changed.

Refusals come back as problems, what should be known as notes. FACTS behind them: repeated assignments
merge across drop-ins; a controller that an ancestor disables leaves slices unrestricted without a word;
a reload re-applies device rules, which takes GPUs from containers whose runtime named them by number;
changing the memory nodes of a cgroup moves its pages.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from provisioner.applied import Applied
from provisioner.bus import Bus
from provisioner.cpusets import Unified
from provisioner.enforce import control_drop_ins
from provisioner.errors import Problem
from provisioner.filestore import Entry, look
from provisioner.hostfs import parse_kernel, read_manager_settings
from provisioner.idset import CpuSet
from provisioner.layout import CONTROL_FOLDERS, TRANSIENT_FOLDER, UNIT_FOLDERS, Layout, slice_cgroup
from provisioner.observe import Observed, find_drop_ins, plan_slices, plan_units
from provisioner.plan import Note, Plan
from provisioner.render import CONFINED
from provisioner.root import Root
from provisioner.setting_notes import note_manager
from provisioner.settings import CONTAINER_ENGINES
from provisioner.sysfs import read_node_available

# systemd refuses a reload with less than this free in /run. Source: manager_serialize, RELOAD_DISK_SPACE_MIN.
_RUN_BYTES = 16 << 20
# Containers of Docker, containerd, CRI-O and Podman under systemd's cgroup driver.
_CONTAINERS = ("docker-*.scope", "cri-containerd-*.scope", "crio-*.scope", "libpod-*.scope")
_NVIDIA_MAJOR = "195"  # Documentation/admin-guide/devices.txt
# Units that set cpusets themselves.
_MANAGERS = ("kubelet.service", "k3s*.service", "rke2-*.service", "slurmd.service")
_KUBELET_STATE = "/var/lib/kubelet/cpu_manager_state"


class Permissions(NamedTuple):
    """What the operator has allowed beyond the ordinary."""

    force: bool = False  # reload although containers or a manager of cpusets may suffer
    migrate_memory: bool = False  # change the memory nodes of slices that hold processes


class Objections(NamedTuple):
    """What preflight found."""

    problems: tuple[Problem, ...]
    notes: tuple[Note, ...]


def preflight(
    plan: Plan,
    layout: Layout,
    entries: Mapping[str, Entry],
    seen: Observed,
    bus: Bus,
    root: Root,
    allowed: Permissions,
) -> Objections:
    """Everything that speaks against it.

    Args:
        plan: the plan, made for this machine.
        layout: where it is to lie.
        entries: what it would write, by path.
        seen: what is in force now.
        bus: systemd.
        root: the running system's root.
        allowed: what the operator has allowed.
    """
    problems: list[Problem] = []
    notes: list[Note] = []
    problems += _check_cgroups(seen.unified, bus, root, plan)
    problems += _check_mode(seen.applied, layout)
    problems += _check_ceiling(plan)
    problems += _check_places(entries)
    problems += _check_drop_ins(plan, seen.applied)
    problems += _check_memory(plan, seen, root)
    problems += _check_running(plan, seen, allowed)
    reloads = layout.mode != "transient"
    if reloads:
        problems += check_reload(bus, root, force=allowed.force)
    if not layout.is_lasting:
        notes += _note_wrapper(plan, layout)
    problems += _check_managers(bus, allowed, notes)
    if plan.confine:
        notes += _note_containers(bus)
    notes += _note_affinity(root)
    notes += _note_neighbours(plan, seen)
    return Objections(tuple(problems), tuple(notes))


def _check_cgroups(unified: Unified | None, bus: Bus, root: Root, plan: Plan) -> Iterator[Problem]:
    if unified is None:
        yield Problem(
            "no_cgroup_v2",
            "no cgroup v2 hierarchy is mounted: systemd enforces AllowedCPUs= nowhere else",
            "Boot with systemd.unified_cgroup_hierarchy=1",
        )
        return
    if not unified.has_cpuset:
        yield Problem(
            "no_cpuset",
            f"{root.describe(unified.mount)}/cgroup.controllers has no cpuset: AllowedCPUs= would have no effect",
            "Unmount the cgroup v1 cpuset hierarchy, or boot without cgroup_disable=cpuset",
        )
    for name in ("-.slice", *(service.slice for service in plan.services)):
        if "cpuset" in bus.unit(name).disabled_controllers:
            yield Problem(
                "controller_disabled",
                f"{name} has DisableControllers=cpuset: the slices below it would be unrestricted without a word",
                f"Take the setting out of {name}: systemctl cat {name} shows where it is",
            )


def _check_mode(applied: Applied | None, layout: Layout) -> Iterator[Problem]:
    if applied is not None and applied.mode != layout.mode:
        yield Problem(
            "other_mode",
            f"a plan is in force that was applied as {applied.mode}, and this one is to be {layout.mode}",
            "Take it back first: provision undo",
        )


def _check_ceiling(plan: Plan) -> Iterator[Problem]:
    if plan.within == "self":
        yield Problem(
            "within_self",
            "the plan was made --within self: what your own session may use is not what the slices may",
            "Plan with --within root, or with the cgroup's path",
        )


def _check_places(entries: Mapping[str, Entry]) -> Iterator[Problem]:
    """What is in the way: nothing of the operator's is written over."""
    for path, entry in entries.items():
        found = look(path)
        if found.kind == 0 or found.is_ours or (found.kind, found.data) == (entry.kind, entry.data):
            continue
        if found.data and found.kind != entry.kind:
            what = f"is a link to '{os.fsdecode(found.data)}'"
        else:
            what = "was not made by provision"
        yield Problem(
            "foreign_file",
            f"{path}: {what}: expected nothing there",
            "Move it away, or name the service otherwise",
        )


def _check_drop_ins(plan: Plan, applied: Applied | None) -> Iterator[Problem]:
    """Foreign drop-ins that say something about the cpuset of a unit of ours."""
    # Those that apply itself had systemd write, or was killed before it could remove.
    own = {*(applied.paths if applied else ())}
    if applied is not None and not applied.complete:
        own.update(path for unit in plan_units(plan) for path in control_drop_ins(unit))
    for unit in plan_slices(plan):
        for drop_in in find_drop_ins(unit, UNIT_FOLDERS):
            is_ours = drop_in.is_ours or drop_in.path in own
            is_ours |= drop_in.path.startswith(TRANSIENT_FOLDER + "/")
            if drop_in.settings and not is_ours:
                yield Problem(
                    "foreign_drop_in",
                    f"{drop_in.path} would merge into {unit}: {'; '.join(drop_in.settings)}",
                    "Remove it, then reload: systemctl daemon-reload",
                )
    if not plan.confine:
        return
    ours = "50-provision-confine.conf"
    for unit, _ in CONFINED:
        for drop_in in find_drop_ins(unit, UNIT_FOLDERS):
            name = drop_in.path.rpartition("/")[2]
            wins = name > ours or drop_in.path.startswith(CONTROL_FOLDERS)
            if drop_in.settings and not drop_in.is_ours and wins and drop_in.path not in own:
                yield Problem(
                    "foreign_drop_in",
                    f"{drop_in.path} would win over the confinement of {unit}: {'; '.join(drop_in.settings)}",
                    "Remove it, or plan without confine",
                )


def _check_memory(plan: Plan, seen: Observed, root: Root) -> Iterator[Problem]:
    """Whether each node can give now what the ranks that are not running yet need from it."""
    needs = [
        (rank.memory_nodes, service.memory_need_bytes)
        for service in plan.services
        if service.memory_need_bytes
        for rank in service.ranks
        if not seen.workers.get(rank.slice)
    ]
    for nodes in sorted({nodes for nodes, _ in needs if nodes}, key=str):
        need = sum(size for within, size in needs if within and within <= nodes)
        free = [read_node_available(root, node) for node in nodes]
        room = sum(size for size in free if size is not None)
        if None not in free and room < need:
            yield Problem(
                "memory_taken",
                f"NUMA node {nodes} has {room >> 20} MiB free or reclaimable: its ranks need {need >> 20} MiB",
                "Stop what uses it (numastat -p shows who), or lower memory_need=",
            )


def _check_running(plan: Plan, seen: Observed, allowed: Permissions) -> Iterator[Problem]:
    """Workers that run now: none is killed, and no memory is moved unless that is wanted."""
    for service in plan.services:
        walled = service.memory == "bind"
        places = [(service.slice, service.memory_nodes)]
        places += [(rank.slice, rank.memory_nodes) for rank in service.ranks]
        for name, planned in places:
            # Those in slices of ranks that are no longer planned are not the service's own.
            ranks = f"{slice_cgroup(service.slice)}/{service.name}-rank"
            workers = seen.workers.get(name, ())
            if name == service.slice:
                workers = tuple(one for one in workers if not one.cgroup.startswith(ranks))
            count = len(workers)
            cpuset = seen.units[name].cpuset
            nodes = planned if walled else seen.memory_nodes
            found = cpuset.effective_nodes if cpuset is not None else None
            if count and found is not None and found != nodes and not allowed.migrate_memory:
                yield Problem(
                    "memory_would_move",
                    f"{name} holds {count} processes on memory nodes {found}, planned {nodes}: "
                    "the kernel would move their pages, and can't move those pinned for a card",
                    "Stop the workers first, or give --migrate-memory",
                )


def check_reload(bus: Bus, root: Root, *, force: bool) -> Iterator[Problem]:
    """What speaks against having systemd read all its files again."""
    try:
        space = os.statvfs("/run")
        free = space.f_bavail * space.f_frsize
    except OSError:
        free = _RUN_BYTES
    if free < _RUN_BYTES:
        yield Problem(
            "run_full",
            f"/run has {free >> 20} MiB free: systemd refuses to reload with less than {_RUN_BYTES >> 20} MiB",
            "Free space in /run, or apply --transient, which needs no reload",
        )
    containers = [one.name for one in bus.list_units(*_CONTAINERS) if one.active_state == "active"]
    numbers = root.list("dev/char")
    if (
        containers
        and any(name.startswith("nvidia") for name in root.list("dev"))
        and not any(number.startswith(f"{_NVIDIA_MAJOR}:") for number in numbers)
        and not force
    ):
        yield Problem(
            "containers_would_lose_gpus",
            f"{len(containers)} containers run ({containers[0]}, …) and /dev/char has no {_NVIDIA_MAJOR}:* links: "
            "a reload may take the GPUs from them",
            "Make the links: nvidia-ctk system create-dev-char-symlinks --create-all; "
            "or apply --transient, which needs no reload; or give --force",
        )


def _check_managers(bus: Bus, allowed: Permissions, notes: list[Note]) -> Iterator[Problem]:
    """Who else sets cpusets on this system."""
    running = [one.name for one in bus.list_units(*_MANAGERS) if one.active_state == "active"]
    for name in running:
        if name == "slurmd.service":
            notes.append(
                Note(
                    "other_manager",
                    "slurmd runs and may set cpusets of its jobs itself (ConstrainCores= in cgroup.conf).",
                    "Keep its cores apart: CpuSpecList= in slurm.conf, exclude_cpus here",
                )
            )
        elif re.search(r'"policyName"\s*:\s*"static"', _read(_KUBELET_STATE)):
            if not allowed.force:
                yield Problem(
                    "kubelet_static",
                    f"{name} runs with the static CPU manager ({_KUBELET_STATE}), which gives cores away itself",
                    "Keep its cores apart (reservedSystemCPUs, exclude_cpus here) and give --force",
                )
        else:
            notes.append(
                Note(
                    "other_manager",
                    f"{name} runs: its pods may use the ranks' cores.",
                    "Confine them: reservedSystemCPUs, or a kubepods.slice with AllowedCPUs=",
                )
            )


def _note_wrapper(plan: Plan, layout: Layout) -> Iterator[Note]:
    """Debian and Ubuntu mount /run without the right to execute."""
    try:
        flags = os.statvfs("/run").f_flag
    except OSError:
        return
    if flags & os.ST_NOEXEC:
        name = plan.services[0].name
        yield Note(
            "run_noexec",
            f"/run is mounted noexec: {layout.programs}/{name}-run can't be executed by its name.",
            f"Use provision run, or sh {layout.programs}/{name}-run",
        )


def _note_containers(bus: Bus) -> Iterator[Note]:
    running = [
        one.name for one in bus.list_units(*CONTAINER_ENGINES) if one.active_state == "active"
    ]
    if running:
        yield Note(
            "containers_confined",
            f"{running[0]} runs: containers in system.slice are confined with it, and one whose own cpuset "
            "has none of those CPUs gets all of them.",
            "Give containers a slice of their own (cgroup-parent), or plan without confine",
        )


def _note_affinity(root: Root) -> Iterator[Note]:
    """Enabling cpuset resets CPUAffinity= of system.conf before Linux 6.2 (commit da019032819a)."""
    kernel = parse_kernel(platform.release())
    if kernel is not None and kernel < (6, 2):
        yield from note_manager(
            [one for one in read_manager_settings(root) if one.name == "CPUAffinity"], kernel
        )


def _note_neighbours(plan: Plan, seen: Observed) -> Iterator[Note]:
    """Cgroups that were told CPUs of a rank, and top-level slices that no confinement reaches."""
    for cpuset in seen.other_cpusets:
        both = (cpuset.effective_cpus or CpuSet()) & plan.assigned_cpus
        if both:
            yield Note(
                "overlap",
                f"The cgroup {cpuset.path} was given CPUs {both} that ranks have too.",
                "Take them from it, or leave them out: exclude_cpus",
            )
    if plan.confine and seen.unconfined:
        yield Note(
            "unconfined",
            f"confine does not reach {', '.join(seen.unconfined)}, which may run on the ranks' cores.",
            "Set AllowedCPUs= on them too",
        )


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""
