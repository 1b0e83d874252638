"""The CPU affinity of the threads of this process.

Source: sched_setaffinity(2), kernel/sched/syscalls.c. A mask belongs to one thread: it holds for that
one and for those it starts later, so every thread that exists already has to be set by itself. The
kernel intersects a mask with the cpuset, and refuses one that has no CPU of it (EINVAL). Since Linux
6.2 it remembers the mask asked for, and intersects anew whenever the cpuset changes.
"""

from __future__ import annotations

import errno
import os
from _thread import get_native_id  # as threading has it, which costs more to import

from provisioner.idset import CpuSet
from provisioner.record import Record
from provisioner.worker.child import raise_if_deadly
from provisioner.worker.procfs import list_threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class UnreachedThread(Record):
    """A thread whose affinity could not be set."""

    tid: int
    errno: int  # EINVAL: the kernel lets nobody set this thread's, as for io_uring's workers

    def __str__(self) -> str:
        return f"thread {self.tid}: {os.strerror(self.errno)} (errno {self.errno})"


class AffinityResult(Record):
    """What became of setting the affinity of threads."""

    cpus: CpuSet  # what the first thread may run on now: those asked for, within the cpuset
    bound: tuple[int, ...]  # ids of the threads that were set, ascending
    unreached: tuple[UnreachedThread, ...]  # by id; those that ended meanwhile are left out


def set_thread_affinity(cpus: CpuSet, tids: Iterable[int] | None = None) -> AffinityResult:
    """Sets the affinity of threads, and says of which.

    1. The calling thread goes first (with `tids`, the first of them): if it can't be set nothing is.
    2. Then every other thread that exists. One that is started meanwhile has the mask of its
       starter, which may have been the old one, so the list is read again until it has no thread
       that still needs setting.

    Args:
        cpus: the CPUs.
        tids: ids of the threads to set; None is every thread of this process.

    Raises:
        OSError: the first thread can't be set, and none was. EINVAL: none of the CPUs is in the
            cpuset and online; EPERM: seccomp; ESRCH: it has ended. Or there is no /proc.
        DeadlyCallError: a seccomp filter kills who makes the call.
    """
    chosen = None if tids is None else tuple(tids)
    first, *rest = [get_native_id(), *list_threads()] if chosen is None else chosen or [0]
    raise_if_deadly(_describe(cpus, first), _set, 0, cpus.bits)
    _set(first, cpus.bits)
    effective = CpuSet(os.sched_getaffinity(first))
    bound = {first}
    unreached: dict[int, int] = {}
    todo = [tid for tid in rest if tid != first]
    while todo:
        for tid in todo:
            try:
                _set(tid, cpus.bits)
                bound.add(tid)
            except ProcessLookupError:
                continue  # it ended since it was listed
            except OSError as error:
                unreached[tid] = error.errno or errno.EINVAL
        known = bound | unreached.keys()
        # A thread that has the mask by inheritance is right, and so will those be that it starts.
        todo = [] if chosen is not None else [t for t in _find_wrong(effective) if t not in known]
    return AffinityResult(
        effective,
        tuple(sorted(bound)),
        tuple(UnreachedThread(tid, unreached[tid]) for tid in sorted(unreached)),
    )


def thread_masks() -> dict[int, CpuSet]:
    """The CPUs that each thread of this process may run on, by thread id.

    Raises:
        OSError: there is no /proc, or seccomp refuses the question.
    """
    masks: dict[int, CpuSet] = {}
    for tid in list_threads():
        try:
            masks[tid] = CpuSet(os.sched_getaffinity(tid))
        except ProcessLookupError:
            continue
    return masks


def _find_wrong(cpus: CpuSet) -> list[int]:
    return [tid for tid, mask in thread_masks().items() if mask != cpus]


def _set(tid: int, bits: int) -> None:
    cpus = CpuSet.from_bits(bits)
    try:
        os.sched_setaffinity(tid, cpus)
    except OSError as error:
        code = error.errno or errno.EINVAL
        raise OSError(code, f"{_describe(cpus, tid)}: {os.strerror(code)}") from error


def _describe(cpus: CpuSet, tid: int) -> str:
    return f"sched_setaffinity(thread {tid or 'of the caller'}, CPUs {cpus or 'none'})"
