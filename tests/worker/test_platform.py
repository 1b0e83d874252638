"""What each platform's runtime is told, and what is left alone."""

from __future__ import annotations

import pytest

from provisioner.errors import InputError
from provisioner.idset import CpuSet
from provisioner.worker import configure_worker_environment, get_platform
from provisioner.worker.platform import THREAD_VARIABLES
from provisioner.worker.target import Target
from tests.hosts import make_tree
from tests.worker.children import run_child
from tests.worker.test_binding import environment

# CPU 0 of the running machine: what is counted is its cores.
TARGET = Target(0, "argument", "made", CpuSet((0,)), CpuSet((0,)))
COMMON = {
    **dict.fromkeys(THREAD_VARIABLES, "1"),
    "TLLM_NUMA_AWARE_WORKER_AFFINITY": "0",
    "SGLANG_SET_CPU_AFFINITY": "0",
}
ASCEND = {
    "TASK_QUEUE_ENABLE": "0",
    "HCCL_BUFFSIZE": "16",
    "HCCL_CONNECT_TIMEOUT": "240",
    "HCCL_EXEC_TIMEOUT": "200",
}


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("nvidia", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ("amd", {}),
        ("intel", {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}),
        ("ascend", ASCEND),
        ("cpu", {}),
    ],
)
def test_platform_is_told_what_it_needs(kind: str, expected: dict[str, str]) -> None:
    """Each kind has its variables set, the thread pools their counts, and the result is what was set."""
    environ = {"PATH": "/bin"}
    done = configure_worker_environment(environ, kind=kind, target=TARGET)
    assert done == {**COMMON, **expected}
    assert environ == {"PATH": "/bin", **done}
    assert configure_worker_environment(environ, kind=kind, target=TARGET) == {}


def test_what_the_operator_has_set_is_left_alone() -> None:
    """A variable that is set, an empty one too, keeps its value and is not among what was set."""
    before = {"OMP_NUM_THREADS": "3", "HCCL_EXEC_TIMEOUT": "", "TASK_QUEUE_ENABLE": "2"}
    environ = dict(before)
    done = configure_worker_environment(environ, kind="ascend", target=TARGET)
    assert not before.keys() & done.keys()
    assert before.items() <= environ.items()


@pytest.mark.parametrize("name", ["ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_ascends_two_variables_agree(name: str) -> None:
    """Where one of the two that choose NPUs is set the other gets its value; two that are set stay."""
    environ = {name: "4,5"}
    configure_worker_environment(environ, kind="ascend", target=TARGET)
    assert environ["ASCEND_RT_VISIBLE_DEVICES"] == environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    both = {"ASCEND_RT_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}
    assert not configure_worker_environment(
        both, kind="ascend", target=TARGET
    ).keys() & both.keys() - {*COMMON, *ASCEND}
    assert (both["ASCEND_RT_VISIBLE_DEVICES"], both["CUDA_VISIBLE_DEVICES"]) == ("1", "2")
    none: dict[str, str] = {}
    configure_worker_environment(none, kind="ascend", target=TARGET)
    assert "CUDA_VISIBLE_DEVICES" not in none


def test_platform_is_the_machines() -> None:
    """The platform is that of the machine's accelerators, and a machine without has that of its CPUs."""
    assert get_platform(make_tree({0: "0-3"}, [0])).kind == "nvidia"
    assert get_platform(make_tree({0: "0-3"})).kind == "cpu"


def test_unknown_kind_is_named() -> None:
    """A kind that there is not is an error that lists those that there are."""
    with pytest.raises(InputError, match="'tpu': expected nvidia, amd, intel, ascend, cpu"):
        configure_worker_environment({}, kind="tpu")


def test_threads_are_counted_by_the_share(two_cpus: tuple[int, int]) -> None:
    """Thread counts are the cores of the rank's main CPUs, and not the machine's."""
    code = """
        from provisioner.worker import bind_local_rank, configure_worker_environment
        unbound = configure_worker_environment({}, kind="cpu")["OMP_NUM_THREADS"]
        bind_local_rank()
        answer([unbound, configure_worker_environment({}, kind="cpu")["OMP_NUM_THREADS"]])
    """
    found = run_child(code, environ=environment(two_cpus[1]))
    assert found[1] == "1"
