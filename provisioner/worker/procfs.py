"""What /proc says of this very process, or of another one that runs: never of a recording.

Binding acts on the running kernel, so these paths take no root.
"""

from __future__ import annotations

import os

from provisioner.errors import ReadError
from provisioner.worker.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

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


def read_numa_maps(pid: int | None = None) -> Iterator[str]:
    """The lines of a running process's numa_maps, one at a time; None is this process.

    Source: proc_pid_numa_maps(5).

    Raises:
        ReadError: there is no such process, the kernel has no NUMA, or the file may not be read.
    """
    path = f"/proc/{'self' if pid is None else pid}/numa_maps"
    try:
        # The kernel escapes blanks and newlines in a file's name, and leaves its other bytes alone.
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            yield from file
    except OSError as error:
        raise ReadError(f"{path}: can't be read: {error.strerror}", _hint(error)) from error


def _hint(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "Read it as the process's own user, or with CAP_SYS_PTRACE"
    if isinstance(error, (FileNotFoundError, ProcessLookupError)):
        return "Check that the process runs, and that the kernel knows NUMA (CONFIG_NUMA)"
    return ""
