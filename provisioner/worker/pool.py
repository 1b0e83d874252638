"""The pool for background compilation, on cores that the main threads do not use.

XGrammar compiles a grammar on the CPU for as long as a hundred decoding steps. Where its threads share
cores with those that launch kernels, each compilation shows in the tail of the step time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from provisioner.errors import InputError, Problem, ProblemsError
from provisioner.idset import CpuSet
from provisioner.root import Root
from provisioner.worker.affinity import (
    UnreachedThread,
    allowed_cpus,
    keep_thread,
    leave_cpus,
)
from provisioner.worker.binding import last_result
from provisioner.worker.procfs import read_siblings
from provisioner.worker.target import find_target

COUNT_VARIABLE = "DEEPINFER_SO_BUILDER_CPUS"
DEFAULT_COUNT = 4

_lock = threading.Lock()
_pools: dict[int, CompilePool] = {}


class CompilePool(ThreadPoolExecutor):
    """A thread pool whose threads run on CPUs of their own.

    Each thread is pinned to the whole set and not to one CPU of it: XGrammar starts threads itself,
    which inherit the mask, and would pile up on the one.
    """

    cpus: CpuSet  # of the pool's threads
    main_cpus: CpuSet  # of all other threads of the rank
    unreached: tuple[UnreachedThread, ...]  # threads that could not be moved off `cpus`

    def __init__(self, cpus: CpuSet, main_cpus: CpuSet) -> None:
        """Moves the threads that exist off the CPUs.

        Raises:
            OSError: seccomp refuses to set an affinity.
            DeadlyCallError: a seccomp filter kills who does.
        """
        self.cpus, self.main_cpus, self.is_shut = cpus, main_cpus, False
        self.unreached = leave_cpus(cpus, main_cpus)
        super().__init__(
            max_workers=len(cpus),
            thread_name_prefix="provision-compile",
            initializer=_enter,
            initargs=(cpus,),
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As ThreadPoolExecutor has it; `compile_pool` makes another pool then."""
        self.is_shut = True
        super().shutdown(wait, cancel_futures=cancel_futures)


def compile_pool(cpus: CpuSet | None = None) -> CompilePool:
    """The pool for background compilation of this process; made at the first call, the same from then on.

    Its CPUs are those that the plan sets aside; without a plan, or where it sets none aside, whole
    cores from the end of the rank's share: as many CPUs as DEEPINFER_SO_BUILDER_CPUS says, else 4.

    Args:
        cpus: the rank's CPUs, for a process that no plan and no card says them of.

    Raises:
        InputError: the share is too small for a pool beside the main threads.
        ProblemsError: nothing says what the rank's CPUs are.
        OSError: the CPUs can't be had.
    """
    with _lock:
        pool = _pools.get(os.getpid())
        if pool is None or pool.is_shut:
            main, compiling = _split(cpus)
            pool = CompilePool(compiling, main)
            _pools.clear()  # a pool that a fork has copied has no threads
            _pools[os.getpid()] = pool
        return pool


def choose_compile_cpus(
    share: CpuSet,
    count: int | None = None,
    environ: Mapping[str, str] | None = None,
    root: Root | None = None,
) -> CpuSet:
    """The whole cores at the end of a share that have so many CPUs at least.

    Args:
        share: the rank's CPUs.
        count: how many CPUs; None is DEEPINFER_SO_BUILDER_CPUS, else 4.
        environ: the environment; None is this process's.
        root: a recorded machine; None is the running one.

    Raises:
        InputError: no core would be left for the main threads, or the number is none.
    """
    wanted = _read_count(os.environ if environ is None else environ) if count is None else count
    if wanted < 1:
        raise InputError(f"{wanted} CPUs for compilation: expected at least 1")
    cores = sorted({read_siblings(cpu, root) & share for cpu in share}, key=lambda core: core.first)
    chosen = CpuSet()
    left = list(cores)
    while left and len(chosen) < wanted:
        chosen |= left.pop()
    if not left:
        raise InputError(
            f"the share has {len(share)} CPUs on {len(cores)} cores ({share or 'none'}), and {wanted} CPUs "
            "are wanted for compilation: expected a core for the main threads beside them",
            f"Lower {COUNT_VARIABLE} or compile_cores=, or give the rank a larger share",
        )
    return chosen


def _split(cpus: CpuSet | None) -> tuple[CpuSet, CpuSet]:
    """(CPUs of the main threads, CPUs of the pool), within what the cpuset allows."""
    allowed = allowed_cpus()
    if cpus is None:
        bound = last_result()
        target = find_target(allowed_cpus=allowed) if bound is None else bound.target
        if target.cpus is None:
            raise ProblemsError(
                target.problems
                or (Problem("no_share", "nothing says what this process's CPUs are"),)
            )
        if target.compile_cpus:
            return target.main_cpus, target.compile_cpus
        cpus = target.cpus
    compiling = choose_compile_cpus(cpus & allowed)
    return (cpus & allowed) - compiling, compiling


def _read_count(environ: Mapping[str, str]) -> int:
    text = environ.get(COUNT_VARIABLE, "").strip()
    if not text:
        return DEFAULT_COUNT
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) <= 9999):
        raise InputError(f"{COUNT_VARIABLE} is '{text[:60]}': expected a number of CPUs, 1 or more")
    return int(text)


def _enter(cpus: CpuSet) -> None:
    """Pins the calling thread, one of the pool's: 0 is the thread, where psutil's Process() is the main one."""
    keep_thread()
    os.sched_setaffinity(0, cpus)
