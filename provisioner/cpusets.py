"""The cpusets of live cgroups and the processes in them, as the kernel's files say.

Source: Documentation/admin-guide/cgroup-v2.rst (cpuset interface files, cgroup.procs,
cgroup.controllers). Only the unified hierarchy: systemd enforces AllowedCPUs= nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from provisioner.cgroup import find_hierarchies
from provisioner.idset import CpuSet, NodeSet
from provisioner.root import Root, read_parsed
from provisioner.sysfs import parse_int


class Cpuset(NamedTuple):
    """One cgroup's cpuset. A set of None: the controller is not enabled there."""

    path: str  # below the mount, '/' for the root
    cpus: CpuSet | None  # cpuset.cpus: what it was told; empty: its parent's
    nodes: NodeSet | None  # cpuset.mems
    effective_cpus: CpuSet | None  # cpuset.cpus.effective: what it grants
    effective_nodes: NodeSet | None  # cpuset.mems.effective
    partition: str | None  # cpuset.cpus.partition: member, root, isolated, or '… invalid (why)'


class Unified(NamedTuple):
    """The mounted cgroup v2 hierarchy."""

    mount: str  # relative to the root
    has_cpuset: bool  # whether cpuset is among its root's controllers


def find_unified(root: Root) -> Unified | None:
    """The cgroup v2 hierarchy; None if none is mounted."""
    for hierarchy in find_hierarchies(root):
        if hierarchy.version == 2 and root.list(hierarchy.mount):
            controllers = (root.read(f"{hierarchy.mount}/cgroup.controllers") or "").split()
            return Unified(hierarchy.mount, "cpuset" in controllers)
    return None


def read_cpuset(root: Root, mount: str, path: str) -> Cpuset | None:
    """The cpuset of a cgroup; None if there is no such cgroup."""
    folder = mount + path.rstrip("/")
    if root.resolve(folder) is None:
        return None
    partition = root.read(f"{folder}/cpuset.cpus.partition")
    return Cpuset(
        path,
        read_parsed(root, f"{folder}/cpuset.cpus", CpuSet.parse_list),
        read_parsed(root, f"{folder}/cpuset.mems", NodeSet.parse_list),
        read_parsed(root, f"{folder}/cpuset.cpus.effective", CpuSet.parse_list),
        read_parsed(root, f"{folder}/cpuset.mems.effective", NodeSet.parse_list),
        None if partition is None else partition.strip(),
    )


def list_child_cgroups(root: Root, mount: str, path: str) -> tuple[str, ...]:
    """The cgroups right below a cgroup, by name; none if it is gone."""
    folder = mount + path.rstrip("/")
    return tuple(
        f"{path.rstrip('/')}/{name}"
        for name in root.list(folder)
        if root.resolve(f"{folder}/{name}/cgroup.procs") is not None
    )


def walk_cgroups(root: Root, mount: str, path: str = "/") -> Iterator[str]:
    """A cgroup and every one below it, parents first."""
    yield path
    for child in list_child_cgroups(root, mount, path):
        yield from walk_cgroups(root, mount, child)


def list_cgroup_processes(root: Root, mount: str, path: str) -> tuple[int, ...]:
    """The processes in a cgroup itself, ascending; none if it is gone."""
    text = root.read(f"{mount}{path.rstrip('/')}/cgroup.procs") or ""
    return tuple(sorted({parse_int(line) for line in text.split()} - {0}))
