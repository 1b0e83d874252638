"""Makes the running cgroups follow what systemd was told, where systemd itself does not.

A reload alone leaves running cgroups as they were on some versions (257), and an empty setting can't
be written into a cgroup that holds processes on kernels before 7. What works everywhere is to set the
property once more, explicitly. That leaves a drop-in that would win over the unit's file ever after,
so it is removed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from provisioner.bus import Bus
from provisioner.cpusets import Cpuset, find_unified, read_cpuset
from provisioner.filestore import look, put
from provisioner.idset import CpuSet, NodeSet
from provisioner.layout import CONTROL_FOLDERS, TRANSIENT_FOLDER, unit_cgroup
from provisioner.root import Root

# How long systemd may take to write what a reload or a property has changed; setting once more what
# would have followed a moment later does no harm.
SETTLE_SECONDS = 0.5
_POLL_SECONDS = 0.05


class Wanted(NamedTuple):
    """What a unit's cgroup is to be told."""

    unit: str
    cpus: CpuSet | None  # None: all that its parent has
    nodes: NodeSet | None  # likewise
    keep_nodes: bool = False  # the memory nodes are left as they are, whatever they are


class Holder(NamedTuple):
    """Where the cgroups are, and who sets them."""

    bus: Bus
    root: Root
    mount: str


def find_holder(bus: Bus, root: Root) -> Holder:
    """The cgroups of a system, set by its systemd."""
    unified = find_unified(root)
    return Holder(bus, root, unified.mount if unified else "")


def enforce(wanted: Iterable[Wanted], holder: Holder, *, keep: bool = False) -> tuple[str, ...]:
    """Makes each unit's cgroup be as wanted, in the order given: what lies in another after it.

    Args:
        wanted: what each is to be told.
        holder: where, and by whom.
        keep: leave the drop-ins: there is no unit file behind them that says the same.

    Returns: the units that had to be set once more, for which systemd should read its files again.
    Raises: BusError.
    """
    left = list(wanted)
    _settle(left, holder)
    forced: list[str] = []
    for one in left:
        if not _is_off(one, holder):
            continue
        cpus, nodes = _explicit(one, holder)
        # Nodes are left alone where nothing is to be changed: setting them would move pages.
        found = _find(one.unit, holder)
        same_nodes = found is not None and found.effective_nodes == nodes and one.nodes is None
        same_nodes |= one.keep_nodes
        there = {path: look(path) for path in control_drop_ins(one.unit)}
        try:
            holder.bus.set_cpuset(one.unit, cpus, None if same_nodes else nodes)
            forced.append(one.unit)
        finally:
            if not keep:  # as it was: someone else's drop-in is not ours to remove
                put(there)
                remove_control_folders(one.unit)
        _settle([one], holder)
    return tuple(forced)


def release(
    units: Mapping[str, Wanted], holder: Holder, *, was_reloaded: bool = True
) -> tuple[str, ...]:
    """Gives units back what they had, once no file of ours speaks of them.

    What the operator's own files say wins over what is remembered, and where neither says anything a
    unit gets all that its parent has, explicitly: an empty setting would be refused.

    Args:
        units: what each had been told.
        holder: where, and by whom.
        was_reloaded: systemd has read its files since; else it still says what we told it.

    Returns: as `enforce`.
    """
    there = [one for one in units.values() if _find(one.unit, holder) is not None]
    if was_reloaded:
        there = [_or_configured(one, holder) for one in there]
    return enforce(there, holder)


def is_as_wanted(one: Wanted, holder: Holder) -> bool:
    """Whether a unit's cgroup is as wanted; one that is not there is."""
    return _find(one.unit, holder) is None or not _is_off(one, holder)


def _or_configured(before: Wanted, holder: Holder) -> Wanted:
    state = holder.bus.unit(before.unit)
    cpus, nodes = state.allowed_cpus or before.cpus, state.allowed_nodes or before.nodes
    return before._replace(cpus=cpus, nodes=nodes)


def control_drop_ins(unit: str) -> tuple[str, ...]:
    """The drop-ins that setting a cpuset's properties until the next boot leaves."""
    return tuple(
        f"{folder}/{unit}.d/50-{name}.conf"
        for folder in _control_folders(unit)
        for name in ("AllowedCPUs", "AllowedMemoryNodes")
    )


def remove_control_folders(unit: str) -> None:
    """Removes the folders of such drop-ins where they are empty."""
    for top in _control_folders(unit):
        for folder in (f"{top}/{unit}.d", top):
            with suppress(OSError):  # it holds something else, or is not there
                os.rmdir(folder)


def _control_folders(unit: str) -> tuple[str, ...]:
    # A scope is a transient unit to systemd, init.scope too, and has its drop-ins there. Those of a
    # transient slice are all that says its sets, and are never removed here.
    return (
        (CONTROL_FOLDERS[1], TRANSIENT_FOLDER) if unit.endswith(".scope") else CONTROL_FOLDERS[1:]
    )


def _settle(wanted: list[Wanted], holder: Holder) -> None:
    """Returns when all are as wanted, or after the time that systemd may take."""
    end = time.monotonic() + SETTLE_SECONDS
    while any(_is_off(one, holder) for one in wanted) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def _is_off(one: Wanted, holder: Holder) -> bool:
    """Whether a unit's cgroup is not as wanted."""
    found = _find(one.unit, holder)
    above = _parent(one.unit, holder)
    if found is None or found.cpus is None:  # nothing limits it there but what is above it
        return one.cpus is not None and (above is None or above.effective_cpus != one.cpus)
    if one.cpus is not None and found.cpus != one.cpus:
        return True
    if one.nodes is not None and found.nodes != one.nodes and not one.keep_nodes:
        return True
    cpus, nodes = _explicit(one, holder)
    return bool(
        above
        and (
            (above.effective_cpus and found.effective_cpus != cpus & above.effective_cpus)
            or (
                not one.keep_nodes
                and above.effective_nodes
                and found.effective_nodes != nodes & above.effective_nodes
            )
        )
    )


def _explicit(one: Wanted, holder: Holder) -> tuple[CpuSet, NodeSet]:
    """The sets as wanted, with what the parent has in place of None."""
    above = _parent(one.unit, holder)
    cpus, nodes = one.cpus, one.nodes
    if cpus is None:
        cpus = (above.effective_cpus if above else None) or CpuSet()
    if nodes is None:
        nodes = (above.effective_nodes if above else None) or NodeSet()
    return cpus, nodes


def _find(unit: str, holder: Holder) -> Cpuset | None:
    path = unit_cgroup(unit)
    return None if path is None else read_cpuset(holder.root, holder.mount, path)


def _parent(unit: str, holder: Holder) -> Cpuset | None:
    path = (unit_cgroup(unit) or "/").rpartition("/")[0] or "/"
    return read_cpuset(holder.root, holder.mount, path)
