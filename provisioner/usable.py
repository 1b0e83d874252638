"""Which cores may be handed out: allowed, whole, and not reserved. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from provisioner.idset import CpuSet, union_cpus
from provisioner.plan import Note
from provisioner.request import PlacementRequest
from provisioner.topology import Core, Machine


class UsableCores(NamedTuple):
    """The cores that may be handed out, and those that may not."""

    free: Mapping[int, tuple[Core, ...]]  # node -> whole allowed cores less the reserved, in order
    reserved: tuple[Core, ...]
    partial_cpus: CpuSet  # allowed CPUs of cores of which a sibling is not allowed
    homeless_cpus: CpuSet  # allowed whole cores that are on no node
    notes: tuple[Note, ...]


def find_usable_cores(machine: Machine, request: PlacementRequest) -> UsableCores:
    """The whole allowed cores of each node, less the reserved.

    1. allowed: under the ceiling, not excluded, not isolated unless the request uses those;
    2. a core of which only some siblings are allowed is left out;
    3. reserved: every core that reserve_cpus= touches, then the first of each node until it has
       reserve_cores= of them.
    """
    allowed = machine.ceiling_cpus - request.exclude_cpus
    isolated = machine.isolated_cpus & allowed
    if not request.use_isolated:
        allowed -= isolated
    by_node: dict[int, list[Core]] = {node: [] for node in machine.cpu_nodes}
    partial, homeless = CpuSet(), CpuSet()
    for core in machine.cores:
        cut = core.cpus.bits & ~allowed.bits
        if cut:
            if cut != core.cpus.bits:
                partial |= core.cpus & allowed
        elif core.node is None:
            homeless |= core.cpus
        else:
            by_node[core.node].append(core)
    reserved: list[Core] = []
    free: dict[int, tuple[Core, ...]] = {}
    for node, cores in by_node.items():
        cores.sort(key=lambda core: core.sort_key)
        kept = [core for core in cores if core.cpus.bits & request.reserve_cpus.bits]
        rest = [core for core in cores if not core.cpus.bits & request.reserve_cpus.bits]
        more = max(0, request.reserve_cores - len(kept))
        reserved += kept + rest[:more]
        free[node] = tuple(rest[more:])
    notes = _core_notes(machine, request, isolated, partial, reserved, homeless)
    return UsableCores(free, tuple(reserved), partial, homeless, notes)


def _core_notes(
    machine: Machine,
    request: PlacementRequest,
    isolated: CpuSet,
    partial: CpuSet,
    reserved: Sequence[Core],
    homeless: CpuSet,
) -> tuple[Note, ...]:
    notes: list[Note] = []
    if isolated and not request.use_isolated:
        notes.append(
            Note(
                "isolated_cpus",
                f"CPUs {isolated} are isolated from the scheduler and left out: threads would pile up there.",
                "Set use_isolated = true only for workers that bind each thread themselves",
            )
        )
    elif isolated:
        notes.append(
            Note(
                "isolated_cpus",
                f"CPUs {isolated} are isolated and used as asked: the kernel balances no load there.",
                "Have the workers bind each of their threads",
            )
        )
    if partial:
        notes.append(
            Note(
                "partial_cores",
                f"CPUs {partial} belong to cores of which another SMT sibling is not allowed; "
                "those cores are left out.",
                f"Widen the cpuset or exclude_cpus= to whole cores (the ceiling is {machine.ceiling_cpus})",
            )
        )
    if homeless:
        notes.append(
            Note(
                "no_node_cpus",
                f"CPUs {homeless} are on no NUMA node and left out.",
                "Record the tree again, whole",
            )
        )
    taken = union_cpus(core.cpus for core in reserved)
    rounded = (
        (taken - request.reserve_cpus)
        if request.reserve_cpus and not request.reserve_cores
        else CpuSet()
    )
    if rounded:
        notes.append(
            Note(
                "reserve_rounded",
                f"reserve_cpus= {request.reserve_cpus} is rounded up to whole cores: {taken}.",
                f'Write reserve_cpus = "{taken}" to say so',
            )
        )
    return tuple(notes)
