"""The kernel's files that a bind with a plan at hand has to read, and those of processes.

`sysfs` and `root` cost more to import than such a bind may take. Binding acts on the running kernel,
so what is read of this process takes no root.
"""

from __future__ import annotations

import os

from provisioner.errors import ReadError
from provisioner.idset import CpuSet
from provisioner.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from provisioner.root import Root

_TASKS = "/proc/self/task"
_STATUS = "/proc/thread-self/status"
# Libraries by which an accelerator's runtime talks to its driver; a file name begins so.
_RUNTIMES = (
    "libcuda.so",
    "libcudart.so",
    "libhsa-runtime64.so",
    "libamdhip64.so",
    "libze_intel_gpu.so",
    "libascendcl.so",
)


class ThreadStatus(Record):
    """What the calling thread's status file says. Source: proc_pid_status(5)."""

    threads: int | None  # Threads: how many the process has; None: not said
    seccomp: int | None  # Seccomp: 0 none, 1 strict, 2 filter; None: not said


def list_threads() -> list[int]:
    """The ids of the threads that exist in this process.

    Source: /proc/self/task, proc_pid_task(5).

    Raises:
        OSError: there is no /proc, or it can't be read.
    """
    return sorted(int(name) for name in os.listdir(_TASKS))


def read_thread_status() -> ThreadStatus:
    """The status of the calling thread; None in every field where there is no /proc."""
    try:
        with open(_STATUS, "rb") as file:
            return parse_thread_status(file.read())
    except OSError:
        return ThreadStatus(None, None)


def parse_thread_status(text: bytes) -> ThreadStatus:
    """The fields of a status file that bear on a system call's fate.

    Absent: None. A kernel without seccomp has no such line, and no filter either, but neither has a
    /proc that only resembles Linux's.
    """
    found: dict[bytes, int] = {}
    for line in text.splitlines():
        key, _, value = line.partition(b":")
        if key in (b"Threads", b"Seccomp") and value.strip().isdigit():
            found[key] = int(value)
    return ThreadStatus(found.get(b"Threads"), found.get(b"Seccomp"))


def has_thread(tid: int) -> bool:
    """Whether a thread of this process still exists."""
    return os.path.exists(f"{_TASKS}/{tid}")


def read_cgroup_paths(root: Root | None = None) -> list[str]:
    """The paths of this process's cgroups, that of the unified hierarchy first; empty if nothing says.

    Source: proc_pid_cgroup(5).
    """
    lines = (_read("proc/self/cgroup", root) or "").splitlines()
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [path for _, controllers, path in sorted(fields, key=lambda one: bool(one[1]))]


def find_runtimes() -> tuple[str, ...]:
    """The libraries of accelerator runtimes that this process has loaded, by file name.

    Source: proc_pid_maps(5).
    Absent: empty.
    """
    try:
        with open("/proc/self/maps", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return ()
    names = {os.fsdecode(line.rpartition(b"/")[2]) for line in lines if b".so" in line}
    return tuple(sorted(name for name in names if name.startswith(_RUNTIMES)))


def read_environment(pid: int) -> dict[str, str] | None:
    """The environment that a process was started with; None if it may not be read.

    Source: proc_pid_environ(5).
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def read_node_cpus(node: int, root: Root | None = None) -> CpuSet | None:
    """The CPUs of a NUMA node, from its cpulist; None if there is no such node.

    Raises:
        ParseError: the file is no list.
    """
    text = _read(f"sys/devices/system/node/node{node}/cpulist", root)
    return None if text is None else CpuSet.parse_list(text)


def read_device_node(address: str, root: Root | None = None) -> int | None:
    """The numa_node of a PCI function, -1 where it does not know one; None if it is not on the bus."""
    text = _read(f"sys/bus/pci/devices/{address}/numa_node", root)
    try:
        return None if text is None else int(text)
    except ValueError:
        return -1


def list_usable_nvidia_cards(root: Root | None = None) -> list[str] | None:
    """The PCI addresses of the cards that CUDA can open here, in PCI order.

    Absent: None where the driver is not loaded, or a container shows only some of the devices in
    /dev, which alone does not say which cards those are.
    """
    gpus = "proc/driver/nvidia/gpus"
    names = _list(gpus, root)
    devices = [name for name in _list("dev", root) if name[:6] == "nvidia" and name[6:].isdigit()]
    if not names or (devices and len(devices) != len(names)):
        return None
    found = []
    for name in names:
        domain, _, rest = name.partition(":")
        try:
            found.append((int(domain, 16), rest.lower()))
        except ValueError:
            return None
    return [f"{domain:04x}:{rest}" for domain, rest in sorted(found)]


def has_pci_bus(root: Root | None = None) -> bool:
    """Whether the machine shows its PCI bus, which some containers do not."""
    path = "sys/bus/pci/devices"
    return os.path.isdir(f"/{path}") if root is None else bool(root.list(path))


def read_siblings(cpu: int, root: Root | None = None) -> CpuSet:
    """The CPUs of a CPU's core; itself alone where nothing says.

    Raises:
        ParseError: the file is no list.
    """
    folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        text = _read(f"{folder}/{name}", root)
        if text is not None and (siblings := CpuSet.parse_list(text)):
            return siblings
    return CpuSet((cpu,))


def describe_numa_maps(pid: int | None = None, root: Root | None = None) -> str:
    """The path of a process's numa_maps, for messages."""
    path = _numa_maps_path(pid)
    return f"/{path}" if root is None else root.describe(path)


def read_numa_maps(pid: int | None = None, root: Root | None = None) -> Iterator[str]:
    """The lines of a process's numa_maps; those of the running machine are read one at a time.

    Source: proc_pid_numa_maps(5).

    Raises:
        ReadError: there is no such process, the kernel has no NUMA, or the file may not be read.
    """
    path = describe_numa_maps(pid, root)
    if root is not None:
        text = root.read(_numa_maps_path(pid))
        if text is None:
            raise ReadError(f"{path}: is not in the recording")
        yield from text.splitlines()
        return
    try:
        # The kernel escapes blanks and newlines in a file's name, and leaves its other bytes alone.
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            yield from file
    except OSError as error:
        raise ReadError(f"{path}: can't be read: {error.strerror}", _hint(error)) from error


def _read(path: str, root: Root | None) -> str | None:
    if root is not None:
        return root.read(path)
    try:
        with open(f"/{path}", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return None


def _list(path: str, root: Root | None) -> list[str]:
    if root is not None:
        return root.list(path)
    try:
        return os.listdir(f"/{path}")
    except OSError:
        return []


def _numa_maps_path(pid: int | None) -> str:
    return f"proc/{'self' if pid is None else pid}/numa_maps"


def _hint(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "Read it as the process's own user, or with CAP_SYS_PTRACE"
    if isinstance(error, (FileNotFoundError, ProcessLookupError)):
        return "Check that the process runs, and that the kernel knows NUMA (CONFIG_NUMA)"
    return ""
