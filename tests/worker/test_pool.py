"""The compile pool on the running kernel: each test has a process of its own, and that two CPUs."""

from __future__ import annotations

import pytest

from provisioner.errors import InputError
from provisioner.idset import CpuSet
from provisioner.worker.pool import choose_compile_cpus
from tests.hosts import make_tree
from tests.worker.children import run_child
from tests.worker.test_binding import environment

POOL = """
import threading
from provisioner.errors import ProvisionError
from provisioner.worker import bind_local_rank, compile_pool, set_cpu_affinity
def mask():
    return ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
"""


def planned(main: int, compiling: int) -> dict[str, str]:
    """A rendered environment with a CPU for compilation."""
    cpus = f"{min(main, compiling)},{max(main, compiling)}"
    return environment(cpus, PROVISION_COMPILE_CPUS=str(compiling))


def test_threads_of_the_pool_are_apart(two_cpus: tuple[int, int]) -> None:
    """Pool threads run on the plan's compile CPUs, each pinned by itself, and every other thread leaves them."""
    main, compiling = two_cpus
    found = run_child(
        POOL,
        """
        bind_local_rank()
        stop = threading.Event()
        threading.Thread(target=stop.wait).start()
        before = mask()
        pool = compile_pool()
        inside = {pool.submit(mask).result() for _ in range(3)}
        others = {read_status(tid)["Cpus_allowed_list"] for tid in os.listdir("/proc/self/task")
                  if read_status(tid)["Name"] and int(tid) not in {t.native_id for t in pool._threads}}
        late = []
        thread = threading.Thread(target=lambda: late.append(mask()))
        thread.start(); thread.join()
        answer([before, sorted(inside), sorted(others), late, mask(), str(pool.cpus), str(pool.main_cpus),
                pool._max_workers, list(pool.unreached), compile_pool() is pool])
        stop.set()
        """,
        environ=planned(main, compiling),
    )
    both = f"{main},{compiling}"
    assert found == [
        both,
        [str(compiling)],
        [str(main)],
        [str(main)],
        str(main),
        str(compiling),
        str(main),
        1,
        [],
        True,
    ]


def test_share_is_split_without_a_plan(two_cpus: tuple[int, int]) -> None:
    """Without a compile budget the last cores of the share are the pool's, as many as the variable says."""
    found = run_child(
        POOL,
        """
        from tests.worker.children import ROOT
        bind_local_rank()
        try:
            compile_pool()
        except ProvisionError as error:
            first = str(error)
        os.environ["DEEPINFER_SO_BUILDER_CPUS"] = "1"
        pool = compile_pool()
        answer([first, pool.submit(mask).result(), mask()])
        """,
        environ=environment(f"{two_cpus[0]},{two_cpus[1]}", DEEPINFER_SO_BUILDER_CPUS="2"),
    )
    message, inside, outside = found
    assert "2 CPUs are wanted for compilation" in message
    assert (inside, outside) == (str(two_cpus[1]), str(two_cpus[0]))


def test_pool_survives_a_later_bind(two_cpus: tuple[int, int]) -> None:
    """A bind that comes after the pool leaves the pool's threads where they are."""
    found = run_child(
        POOL,
        """
        pool = compile_pool()
        pool.submit(mask).result()
        bind_local_rank()
        answer([pool.submit(mask).result()])
        """,
        environ=planned(*two_cpus),
    )
    assert found == [str(two_cpus[1])]


def test_threads_that_a_compilation_starts_stay_in_the_pool(two_cpus: tuple[int, int]) -> None:
    """XGrammar starts threads of its own: they inherit the pool's CPUs."""
    found = run_child(
        POOL,
        """
        def compile():
            found = []
            thread = threading.Thread(target=lambda: found.append(mask()))
            thread.start(); thread.join()
            return found
        answer(compile_pool().submit(compile).result())
        """,
        environ=planned(*two_cpus),
    )
    assert found == [str(two_cpus[1])]


def test_pool_is_made_anew(two_cpus: tuple[int, int]) -> None:
    """After shutdown, and in a forked process, compile_pool() makes another pool that works."""
    found = run_child(
        POOL,
        """
        first = compile_pool()
        first.submit(mask).result()
        first.shutdown()
        second = compile_pool()
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.write(write, compile_pool().submit(mask).result().encode())
            os._exit(0)
        os.waitpid(child, 0)
        answer([second is first, second.submit(mask).result(), os.read(read, 9).decode()])
        """,
        environ=planned(*two_cpus),
    )
    assert found == [False, str(two_cpus[1]), str(two_cpus[1])]


def test_importing_the_pool_does_nothing() -> None:
    """Nothing is pinned and no thread started by the import; the error comes when the pool is made."""
    found = run_child(
        """
        def look():
            return [len(os.listdir("/proc/self/task")), read_status()["Cpus_allowed_list"]]
        before = look()
        from provisioner.worker import compile_pool
        after = look()
        try:
            compile_pool()
        except Exception as error:
            answer([before == after, type(error).__name__, look() == before])
        else:
            answer(None)
        """,
        environ={"DEEPINFER_SO_BUILDER_CPUS": "0", "PROVISION_CPUS": "0"},
    )
    assert found == [True, "InputError", True]


def test_stated_cpus_are_split() -> None:
    """A process without a card can say its CPUs itself."""
    found = run_child(
        POOL,
        """
        from provisioner.errors import InputError
        from provisioner.idset import CpuSet
        try:
            compile_pool(CpuSet((0,)))
        except InputError as error:
            answer(str(error))
        """,
    )
    assert "expected a core for the main threads" in found


def test_compile_cpus_are_whole_cores() -> None:
    """A core's siblings are not torn between the pool and the main threads."""
    tree = make_tree({0: "0-15"}, stride=8)
    share = CpuSet.parse_list("0-3,8-11")
    assert str(choose_compile_cpus(share, 3, {}, tree)) == "2-3,10-11"
    assert str(choose_compile_cpus(share, 1, {}, tree)) == "3,11"
    with pytest.raises(InputError, match="8 CPUs on 4 cores"):
        choose_compile_cpus(share, 7, {}, tree)
    with pytest.raises(InputError, match="expected at least 1"):
        choose_compile_cpus(share, 0, {}, tree)
