"""The cpuset ceiling: which CPUs and memory nodes a cgroup may use at all.

Source: Documentation/admin-guide/cgroup-v2.rst (cpuset interface files: ``.effective`` is what the
kernel really grants), cgroup-v1/cpusets.rst, proc_pid_cgroup(5), proc_pid_mounts(5), cpuset(7).
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import NamedTuple

from provisioner.errors import InputError
from provisioner.idset import CpuSet, NodeSet
from provisioner.root import Root, read_parsed
from provisioner.topology import Ceiling

WITHIN_ROOT = "root"
WITHIN_SELF = "self"


class Hierarchy(NamedTuple):
    """One mounted cgroup hierarchy that has cpusets."""

    version: int  # 1 or 2
    mount: str  # path relative to the root
    cpus: tuple[str, ...]  # files with the CPUs, the best first
    nodes: tuple[str, ...]


_V2_FILES = (("cpuset.cpus.effective",), ("cpuset.mems.effective",))
_V1_FILES = (("cpuset.effective_cpus", "cpuset.cpus"), ("cpuset.effective_mems", "cpuset.mems"))
# The cpuset file system of before cgroups, and cgroup v1 mounted with noprefix.
_BARE_FILES = (("effective_cpus", "cpus"), ("effective_mems", "mems"))


def find_ceiling(
    root: Root, hierarchies: Sequence[Hierarchy], within: str = WITHIN_ROOT
) -> Ceiling:
    """The effective cpuset of a cgroup; nothing in it where no cpuset says anything.

    Args:
        root: the machine.
        hierarchies: where its cgroups are mounted.
        within: ``root``, ``self`` (the cgroup of this process, or of the process that recorded the
            tree), or a cgroup's path below the mount point.

    Raises:
        InputError: a path was given and there is no such cgroup.
        ReadError, ParseError: a cpuset file is there but unreadable or no list.
    """
    if within == WITHIN_ROOT:
        paths = ["/"]
    elif within == WITHIN_SELF:
        paths = []
    else:
        wanted = posixpath.normpath("/" + within.strip("/"))
        if wanted == "/" or ".." in within.split("/"):
            raise InputError(
                f"--within '{within}' is no cgroup: expected root, self or a path such as workload.slice"
            )
        paths = [wanted]
        if not any(root.resolve(hierarchy.mount + wanted) for hierarchy in hierarchies):
            mounts = (
                ", ".join(root.describe(hierarchy.mount) for hierarchy in hierarchies)
                or "no mounted cgroup"
            )
            raise InputError(
                f"--within '{within}': there is no such cgroup below {mounts}",
                "List the cgroups with systemd-cgls, or start the slice first",
            )
    for hierarchy in hierarchies:
        for path in paths or [find_own_path(root, hierarchy)]:
            found = _read_ceiling(root, hierarchy, path, within)
            if found is not None:
                return found
    return Ceiling(within, None, None, "no cpuset file says anything")


def read_isolated_partition(root: Root, hierarchies: Sequence[Hierarchy]) -> CpuSet:
    """The CPUs in isolated cpuset partitions; empty if the kernel has no such file."""
    for hierarchy in hierarchies:
        if hierarchy.version == 2:
            path = f"{hierarchy.mount}/cpuset.cpus.isolated"
            return read_parsed(root, path, CpuSet.parse_list) or CpuSet()
    return CpuSet()


def _read_ceiling(root: Root, hierarchy: Hierarchy, path: str, within: str) -> Ceiling | None:
    """The nearest answer from `path` upwards: where the controller is off, the ancestor's set holds."""
    while True:
        folder = hierarchy.mount + path.rstrip("/")
        for cpu_file, node_file in zip(hierarchy.cpus, hierarchy.nodes, strict=True):
            cpus = read_parsed(root, f"{folder}/{cpu_file}", CpuSet.parse_list)
            if cpus is not None:
                nodes = read_parsed(root, f"{folder}/{node_file}", NodeSet.parse_list)
                return Ceiling(within, cpus, nodes, root.describe(f"{folder}/{cpu_file}"))
        if path in ("", "/"):
            return None
        path = posixpath.dirname(path)


def find_hierarchies(root: Root) -> list[Hierarchy]:
    """The hierarchies that may have cpusets: one that owns the controller first, v2 before v1."""
    text = root.read("proc/self/mounts") or root.read("proc/mounts") or ""
    found: list[Hierarchy] = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        mount, kind, options = _unescape(fields[1]).strip("/"), fields[2], fields[3].split(",")
        if kind == "cgroup2":
            found.append(Hierarchy(2, mount, *_V2_FILES))
        elif kind == "cgroup" and "cpuset" in options:
            found.append(
                Hierarchy(1, mount, *(_BARE_FILES if "noprefix" in options else _V1_FILES))
            )
        elif kind == "cpuset":
            found.append(Hierarchy(1, mount, *_BARE_FILES))
    if not found:  # a recorded tree may lack the list of mounts
        found.append(Hierarchy(2, "sys/fs/cgroup", *_V2_FILES))
        found.append(Hierarchy(1, "sys/fs/cgroup/cpuset", *_V1_FILES))

    def owns(hierarchy: Hierarchy) -> bool:
        if hierarchy.version == 1:
            return True
        return "cpuset" in (root.read(f"{hierarchy.mount}/cgroup.controllers") or "").split()

    return sorted(found, key=lambda hierarchy: (not owns(hierarchy), -hierarchy.version))


def find_own_path(root: Root, hierarchy: Hierarchy) -> str:
    """The cgroup of the process in a hierarchy, as a path from its mount; '/' if nothing says."""
    for line in (root.read("proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (hierarchy.version == 2 and number == "0" and not controllers) or (
            hierarchy.version == 1 and "cpuset" in controllers.split(",")
        ):
            return _inside(path)
    return _inside((root.read("proc/self/cpuset") or "").strip())


def format_mounts(hierarchies: Sequence[Hierarchy]) -> str:
    """The text of a list of mounts that says just these hierarchies, in their order."""
    kinds = {_V2_FILES: "cgroup2 rw", _V1_FILES: "cgroup rw,cpuset", _BARE_FILES: "cpuset rw"}
    return "".join(f"none /{one.mount} {kinds[one.cpus, one.nodes]} 0 0\n" for one in hierarchies)


def format_own_paths(paths: Sequence[tuple[Hierarchy, str]]) -> str:
    """The text of a process's list of cgroups that says its path in each of these hierarchies."""
    lines = {f"{'0:' if one.version == 2 else '1:cpuset'}:{path}\n" for one, path in paths}
    return "".join(sorted(lines))


def _inside(path: str) -> str:
    # A process outside its cgroup namespace is shown as /../..; the mount's root is all it can see.
    path = posixpath.normpath("/" + path.strip().lstrip("/"))
    return "/" if path.startswith("/..") else path


def _unescape(field: str) -> str:
    """A mount point as it is, from its octal escapes. Source: proc_pid_mounts(5), getmntent(3)."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field
