"""What /proc says of this process and its threads, and of the pages of any process.

Binding acts on the running kernel, so what it reads takes no root; where pages lie can be recorded.
"""

from __future__ import annotations

import os

from provisioner.errors import ReadError
from provisioner.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from provisioner.root import Root

_TASKS = "/proc/self/task"
_STATUS = "/proc/thread-self/status"


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


def _numa_maps_path(pid: int | None) -> str:
    return f"proc/{'self' if pid is None else pid}/numa_maps"


def _hint(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "Read it as the process's own user, or with CAP_SYS_PTRACE"
    if isinstance(error, (FileNotFoundError, ProcessLookupError)):
        return "Check that the process runs, and that the kernel knows NUMA (CONFIG_NUMA)"
    return ""
