"""CPU affinity on the running kernel: each test changes a process of its own."""

from __future__ import annotations

import errno
import signal

import pytest

from tests.worker.children import needs_numbers, run_child

AFFINITY = """
import threading
from provisioner.worker.affinity import set_thread_affinity, thread_masks

def read_masks():
    return {tid: read_status(tid)["Cpus_allowed_list"] for tid in os.listdir("/proc/self/task")}

stop = threading.Event()
def start(count=1, run=stop.wait):
    for _ in range(count):
        threading.Thread(target=run).start()
"""


def test_every_existing_thread_is_bound(two_cpus: tuple[int, int]) -> None:
    """Threads that exist already are bound too, by the status files of every one."""
    found = run_child(
        AFFINITY,
        f"""
        start(4)
        result = set_thread_affinity(CpuSet(({two_cpus[1]},)))
        start(1)
        answer([str(result.cpus), len(result.bound), len(result.unreached), read_masks(),
                {{str(mask) for mask in thread_masks().values()}} == {{"{two_cpus[1]}"}}])
        stop.set()
        """,
    )
    cpus, bound, unreached, masks, same = found
    assert (cpus, bound, unreached, same) == (str(two_cpus[1]), 5, 0, True)
    assert set(masks.values()) == {str(two_cpus[1])}
    assert len(masks) == 6


def test_old_way_leaves_the_other_threads(two_cpus: tuple[int, int]) -> None:
    """ENGINE.md, bind_numa(node): by getpid() one thread is bound of two; here both are."""
    found = run_child(
        AFFINITY,
        f"""
        start()
        os.sched_setaffinity(os.getpid(), ({two_cpus[1]},))
        old = sorted(set(read_masks().values()))
        set_thread_affinity(CpuSet(({two_cpus[1]},)))
        answer([old, sorted(set(read_masks().values()))])
        stop.set()
        """,
    )
    old, new = found
    assert len(old) == 2
    assert new == [str(two_cpus[1])]


def test_threads_started_meanwhile_are_bound(two_cpus: tuple[int, int]) -> None:
    """Threads that come and go while they are bound do not escape, and do not keep the call busy."""
    found = run_child(
        AFFINITY,
        f"""
        def breed():
            while not stop.is_set():
                thread = threading.Thread(target=stop.wait, args=(0.002,))
                thread.start()
                thread.join(0.001)
        start(4, breed)
        result = set_thread_affinity(CpuSet(({two_cpus[0]},)))
        masks = {{str(mask) for mask in thread_masks().values()}}
        answer([sorted(masks), len(result.unreached)])
        stop.set()
        """,
    )
    assert found == [[str(two_cpus[0])], 0]


def test_kernel_intersects_with_the_cpuset(two_cpus: tuple[int, int]) -> None:
    """CPUs that are not there fall away from a set, and the result says what is left."""
    found = run_child(
        AFFINITY,
        f"answer(str(set_thread_affinity(CpuSet(({two_cpus[0]}, 4000))).cpus))",
    )
    assert found == str(two_cpus[0])


def test_unusable_cpus_change_nothing() -> None:
    """A set without a usable CPU is EINVAL with the CPUs in its message, and no thread is changed."""
    found = run_child(
        AFFINITY,
        """
        start()
        before = read_masks()
        codes = []
        for cpus in (CpuSet((4000,)), CpuSet()):
            try:
                set_thread_affinity(cpus)
            except OSError as error:
                codes.append([error.errno, str(error)])
        answer([codes, before == read_masks()])
        stop.set()
        """,
    )
    (absent, empty), unchanged = found
    assert absent[0] == empty[0] == errno.EINVAL
    assert "CPUs 4000" in absent[1]
    assert "CPUs none" in empty[1]
    assert unchanged


def test_only_the_threads_asked_for(two_cpus: tuple[int, int]) -> None:
    """With thread ids given, those are set and the caller is not."""
    found = run_child(
        AFFINITY,
        f"""
        start()
        other = next(tid for tid in thread_masks() if tid != threading.get_native_id())
        before = read_masks()[str(os.getpid())]
        result = set_thread_affinity(CpuSet(({two_cpus[1]},)), [other, 2**22 + 1])
        answer([before, read_masks()[str(os.getpid())], read_masks()[str(other)],
                list(result.bound) == [other], len(result.unreached)])
        stop.set()
        """,
    )
    before, caller, other, bound, unreached = found
    assert caller == before
    assert (other, bound, unreached) == (str(two_cpus[1]), True, 0)


def test_ended_thread_is_esrch(two_cpus: tuple[int, int]) -> None:
    """A thread that has ended is ESRCH where it is the one asked for."""
    found = run_child(
        AFFINITY,
        f"""
        try:
            set_thread_affinity(CpuSet(({two_cpus[0]},)), [2**22 + 1])
        except ProcessLookupError as error:
            answer(error.errno)
        """,
    )
    assert found == errno.ESRCH


@needs_numbers
def test_thread_that_is_refused_is_told(two_cpus: tuple[int, int]) -> None:
    """A thread that the kernel lets nobody bind is in the result with its errno; the rest is bound."""
    found = run_child(
        AFFINITY,
        f"""
        start(2)
        other = max(thread_masks())
        filter_calls(fail_with(), "sched_setaffinity", first_argument=other)
        result = set_thread_affinity(CpuSet(({two_cpus[1]},)))
        masks = read_masks()
        answer([[one.tid == other, one.errno] for one in result.unreached]
               + [len(result.bound), masks[str(other)] == "{two_cpus[1]}"])
        stop.set()
        """,
    )
    assert found == [[True, errno.EPERM], 2, False]


@needs_numbers
def test_seccomp_refusal_is_a_permission_error(two_cpus: tuple[int, int]) -> None:
    """Where a filter refuses the call, it is an OSError with EPERM."""
    found = run_child(
        AFFINITY,
        f"""
        filter_calls(fail_with(), "sched_setaffinity")
        try:
            set_thread_affinity(CpuSet(({two_cpus[0]},)))
        except PermissionError as error:
            answer(error.errno)
        """,
    )
    assert found == errno.EPERM


@needs_numbers
@pytest.mark.parametrize("threads", [0, 2])
def test_deadly_filter_is_an_error(two_cpus: tuple[int, int], threads: int) -> None:
    """Where a filter kills who makes the call, it is an error with a name, and the process lives."""
    found = run_child(
        AFFINITY,
        f"""
        from provisioner.worker.child import DeadlyCallError
        start({threads})
        before = read_masks()
        filter_calls(KILL_PROCESS, "sched_setaffinity")
        try:
            set_thread_affinity(CpuSet(({two_cpus[0]},)))
        except DeadlyCallError as error:
            answer([error.refusal.signal, before == read_masks()])
        stop.set()
        """,
    )
    assert found == [signal.SIGSYS, True]
