"""The CPU affinity of the threads of this process.

Source: sched_setaffinity(2), kernel/sched/syscalls.c. A mask belongs to one thread: it holds for that
one and for those it starts later, so every thread that exists already has to be set by itself. The
kernel intersects a mask with the cpuset, and refuses one that has no CPU of it (EINVAL). Since Linux
6.2 it remembers the mask asked for, and intersects anew whenever the cpuset changes.
"""

from __future__ import annotations

import errno
import os

# As threading has them, which costs more to import.
from _thread import allocate_lock, get_native_id, start_new_thread

from provisioner.idset import CpuSet
from provisioner.record import Record
from provisioner.worker.child import raise_if_deadly
from provisioner.worker.procfs import has_thread, list_threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


# The kernel has no more CPUs (NR_CPUS of arch/x86/Kconfig), and cuts a mask to its own length.
_MOST_CPUS = 8192

# The threads that `keep_thread` named, by the process that they are in: a fork has none of them.
_kept: dict[int, set[int]] = {}


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
        tids: ids of the threads to set; None is every thread of this process, less those that
            `keep_thread` named.

    Raises:
        OSError: the first thread can't be set, and none was. EINVAL: none of the CPUs is in the
            cpuset and online; EPERM: seccomp; ESRCH: it has ended. Or there is no /proc.
        DeadlyCallError: a seccomp filter kills who makes the call.
    """
    chosen = None if tids is None else tuple(tids)
    first, *rest = [get_native_id(), *_list_free()] if chosen is None else chosen or [0]
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


def allowed_cpus() -> CpuSet:
    """The CPUs that the cpuset of this process lets it run on, whatever masks its threads have.

    A thread of its own asks for all CPUs, and the kernel trims that to the cpuset's. So no file of a
    cgroup is needed, which a container may not show, and no other thread's mask is touched.

    Raises:
        OSError: seccomp refuses the call, or no thread can be started (EAGAIN).
        DeadlyCallError: a seccomp filter kills who makes the call.
    """
    raise_if_deadly("sched_setaffinity(a thread of its own, all CPUs)", ask_for_all)
    found: list[CpuSet | OSError] = []
    tids: list[int] = []
    is_done = allocate_lock()
    is_done.acquire()

    def ask() -> None:
        tids.append(get_native_id())
        try:
            ask_for_all()
            found.append(CpuSet(os.sched_getaffinity(0)))
        except OSError as error:
            found.append(error)
        finally:
            is_done.release()

    try:
        start_new_thread(ask, ())
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, "no thread can be started to ask for the cpuset") from error
    is_done.acquire()
    while has_thread(tids[0]):  # a fork is safe with one thread alone, and who asks next may fork
        os.sched_yield()
    answer = found[0]
    if isinstance(answer, OSError):
        raise answer
    return answer


def leave_cpus(cpus: CpuSet, instead: CpuSet) -> tuple[UnreachedThread, ...]:
    """Moves every thread off some CPUs; those that could not be.

    A thread keeps what it has besides; one that has nothing besides gets other CPUs.

    Args:
        cpus: the CPUs to leave.
        instead: what a thread gets that has no others.

    Raises:
        OSError: there is no /proc, or the calling thread can't be moved.
        DeadlyCallError: a seccomp filter kills who makes the call.
    """
    mine = get_native_id()
    raise_if_deadly(_describe(instead, mine), _set, 0, instead.bits)
    unreached: dict[int, int] = {}
    kept = _kept.get(os.getpid(), set())
    while True:
        todo = {
            tid: mask - cpus or instead
            for tid, mask in thread_masks().items()
            if not mask.isdisjoint(cpus) and tid not in kept and tid not in unreached
        }
        if not todo:
            break
        for tid, mask in todo.items():
            try:
                _set(tid, mask.bits)
            except ProcessLookupError:
                continue
            except OSError as error:
                if tid == mine:
                    raise
                unreached[tid] = error.errno or errno.EINVAL
    return tuple(UnreachedThread(tid, unreached[tid]) for tid in sorted(unreached))


def own_thread() -> int:
    """The id of the calling thread."""
    return get_native_id()


def keep_thread() -> None:
    """Leaves the mask of the calling thread alone from now on when all threads are bound."""
    mine = _kept.setdefault(os.getpid(), set())
    # An id is given anew once its thread has ended. Others may add theirs meanwhile.
    mine.difference_update([tid for tid in tuple(mine) if not has_thread(tid)])
    mine.add(get_native_id())


def _list_free() -> list[int]:
    kept = _kept.get(os.getpid(), ())
    return [tid for tid in list_threads() if tid not in kept]


def _find_wrong(cpus: CpuSet) -> list[int]:
    kept = _kept.get(os.getpid(), ())
    return [tid for tid, mask in thread_masks().items() if mask != cpus and tid not in kept]


def ask_for_all() -> None:
    """Lets the calling thread run on all CPUs, of which the kernel takes those of the cpuset.

    Raises:
        OSError: seccomp refuses the call.
    """
    os.sched_setaffinity(0, range(_MOST_CPUS))


def _set(tid: int, bits: int) -> None:
    cpus = CpuSet.from_bits(bits)
    try:
        os.sched_setaffinity(tid, cpus)
    except OSError as error:
        code = error.errno or errno.EINVAL
        raise OSError(code, f"{_describe(cpus, tid)}: {os.strerror(code)}") from error


def _describe(cpus: CpuSet, tid: int) -> str:
    return f"sched_setaffinity(thread {tid or 'of the caller'}, CPUs {cpus or 'none'})"
