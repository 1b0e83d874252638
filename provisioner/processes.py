"""What a live process may use and where its pages lie, by its files below /proc.

Source: proc_pid_status(5), proc_pid_task(5), proc_pid_numa_maps(5).
"""

from __future__ import annotations

from typing import NamedTuple

from provisioner.errors import ParseError, ReadError
from provisioner.idset import CpuSet, NodeSet
from provisioner.numa_maps import PagePlacement, parse_numa_maps
from provisioner.root import Root, read_parsed


class Task(NamedTuple):
    """One thread."""

    id: int
    cpus: CpuSet  # Cpus_allowed_list
    nodes: NodeSet  # Mems_allowed_list


class Process(NamedTuple):
    """One process with the threads that it had when it was read."""

    id: int
    name: str  # the name of its first thread, 15 bytes at most
    tasks: tuple[Task, ...]


class _Status(NamedTuple):
    name: str
    cpus: CpuSet
    nodes: NodeSet


def read_process(root: Root, pid: int) -> Process | None:
    """A process; None if it has ended."""
    tasks: list[Task] = []
    name = ""
    for entry in root.list(f"proc/{pid}/task"):
        status = read_parsed(root, f"proc/{pid}/task/{entry}/status", _parse_status, lossy=True)
        if status is None:
            continue  # the thread has ended
        tasks.append(Task(int(entry), status.cpus, status.nodes))
        if int(entry) == pid:
            name = status.name
    return Process(pid, name, tuple(tasks)) if tasks else None


def read_pages(root: Root, pid: int) -> PagePlacement | None:
    """Where a process's pages lie; None if it has ended or may not be asked (CAP_SYS_PTRACE)."""
    try:
        return read_parsed(root, f"proc/{pid}/numa_maps", _parse_pages, lossy=True)
    except ReadError:
        return None


def read_own_limits(root: Root) -> Task | None:
    """What this process may use; None if nothing says."""
    status = read_parsed(root, "proc/self/status", _parse_status, lossy=True)
    return None if status is None else Task(0, status.cpus, status.nodes)


def read_own_cgroup(root: Root) -> str | None:
    """The cgroup of this process in the unified hierarchy; None if nothing says."""
    for line in (root.read("proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            return line[3:]
    return None


def _parse_pages(text: str) -> PagePlacement:
    return parse_numa_maps(text.split("\n"))


def _parse_status(text: str) -> _Status:
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    missing = [key for key in ("Cpus_allowed_list", "Mems_allowed_list") if key not in lines]
    if missing:
        raise ParseError(f"has no line {' and no line '.join(missing)}")
    return _Status(
        lines.get("Name", "").strip(),
        CpuSet.parse_list(lines["Cpus_allowed_list"].strip()),
        NodeSet.parse_list(lines["Mems_allowed_list"].strip()),
    )
