"""bind_local_rank() on the running kernel: each test binds a process of its own.

What the kernel holds is read back through /proc/self/task/*/status and get_mempolicy.
"""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.worker.binding import BindError, BindResult, bind_target
from provisioner.worker.target import Target
from tests.worker.children import ROOT, needs_numbers, run_child

BIND = """
import threading
from provisioner.worker import BindError, bind_local_rank, last_result
from provisioner.worker.mempolicy import get_policy

def masks():
    return sorted({read_status(tid)["Cpus_allowed_list"] for tid in os.listdir("/proc/self/task")})

def summary(result):
    return {"cpus": str(result.cpus), "cpus_by": result.cpus_by, "nodes": str(result.memory_nodes),
            "memory_by": result.memory_by, "step": result.memory_step, "full": result.is_full,
            "codes": [one.code for one in result.problems],
            "refused": [[one.call.partition("(")[0], one.errno, one.signal] for one in result.refused]}
"""

# As above, with a target that is made: on machines of one node the cpuset's memory is the rank's
# whatever is set, so what a policy does is to be seen only where nothing says what the cpuset has.
TARGET = """
from provisioner.worker.affinity import allowed_cpus
from provisioner.worker.binding import bind_target
from provisioner.worker.target import Target
"""


def environment(cpus: object, nodes: object = 0, **others: str) -> dict[str, str]:
    """A rendered environment of these CPUs and this memory node."""
    return {
        "PROVISION_SERVICE": "x",
        "PROVISION_RANK": "0",
        "PROVISION_LOCAL_RANK": "0",
        "LOCAL_RANK": "0",
        "PROVISION_CPUS": str(cpus),
        "PROVISION_COMPILE_CPUS": "",
        "PROVISION_MEMORY": "bind",
        "PROVISION_MEMORY_NODES": str(nodes),
        **others,
    }


def test_environment_is_bound(two_cpus: tuple[int, int], memory_node: int) -> None:
    """Every thread is on the planned CPUs, and the result says what holds them."""
    found = run_child(
        BIND,
        """
        result = bind_local_rank()
        answer([summary(result), masks(), result.describe(), last_result() is result])
        """,
        environ=environment(two_cpus[1], memory_node),
    )
    result, masks, text, is_last = found
    assert (result["cpus"], result["cpus_by"], masks) == (
        str(two_cpus[1]),
        "syscall",
        [str(two_cpus[1])],
    )
    assert (result["step"], result["full"], result["codes"]) == ("bind", True, [])
    assert "planned by environment" in text
    assert is_last


def test_every_thread_is_bound_and_told(two_cpus: tuple[int, int], memory_node: int) -> None:
    """Threads that exist get the CPUs; that their memory policy can't be set is in the result, by their ids."""
    found = run_child(
        BIND,
        TARGET,
        f"""
        stop = threading.Event()
        for _ in range(3):
            threading.Thread(target=stop.wait).start()
        target = Target(0, "argument", "made", CpuSet(({two_cpus[1]},)), memory_nodes=NodeSet(({memory_node},)))
        result = bind_target(target, allowed_cpus(), None)
        others = sorted(int(tid) for tid in os.listdir("/proc/self/task") if int(tid) != os.getpid())
        answer([summary(result), masks(), list(result.without_policy) == others, len(others)])
        stop.set()
        """,
    )
    result, masks, told, count = found
    assert masks == [str(two_cpus[1])]
    assert (told, count) == (True, 3)
    assert (result["memory_by"], result["step"], result["full"]) == ("syscall", "bind", False)


def test_memory_policy_is_in_force(two_cpus: tuple[int, int], memory_node: int) -> None:
    """The policy that the result says is the kernel's."""
    found = run_child(
        BIND,
        TARGET,
        f"""
        target = Target(0, "argument", "made", CpuSet(({two_cpus[1]},)), memory_nodes=NodeSet(({memory_node},)))
        result = bind_target(target, allowed_cpus(), None)
        policy = get_policy()
        answer([summary(result), policy.mode, str(policy.nodes)])
        """,
    )
    result, mode, nodes = found
    assert (mode, nodes) == ("bind", str(memory_node))
    assert (result["nodes"], result["memory_by"], result["full"]) == (nodes, "syscall", True)


def test_preferred_is_not_bound_harder(memory_node: int) -> None:
    """A plan that prefers memory gets a preference, which is full, and no wall."""
    found = run_child(
        BIND,
        TARGET,
        f"""
        cpus = allowed_cpus()
        target = Target(0, "argument", "made", cpus, memory_nodes=NodeSet(({memory_node},)), memory="prefer")
        answer([summary(bind_target(target, None, None)), get_policy().mode])
        """,
    )
    result, mode = found
    assert mode in ("preferred_many", "preferred")
    assert result["full"] == (mode == "preferred_many")


def test_held_cpuset_is_only_checked(memory_node: int) -> None:
    """Where the cpuset is the rank's already, nothing is set: the cgroup holds both, for every thread."""
    cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
    found = run_child(
        BIND,
        """
        from provisioner.worker.affinity import allowed_cpus
        stop = threading.Event()
        threading.Thread(target=stop.wait).start()
        os.environ["PROVISION_CPUS"] = str(allowed_cpus())
        result = bind_local_rank(required=True)
        answer([summary(result), get_policy().mode, list(result.without_policy)])
        stop.set()
        """,
        environ=environment(cpus, memory_node),
    )
    result, mode, without = found
    assert (result["cpus_by"], result["memory_by"], result["full"]) == ("cgroup", "cgroup", True)
    assert (mode, without) == ("default", [])


def test_callers_mask_is_not_taken_for_the_cpuset(
    two_cpus: tuple[int, int], memory_node: int
) -> None:
    """vllm-ascend#11307: libgomp's OMP_PROC_BIND pinned the caller to one CPU; the rank gets its own."""
    found = run_child(
        BIND,
        f"""
        os.sched_setaffinity(0, ({two_cpus[0]},))
        answer([summary(bind_local_rank()), masks()])
        """,
        environ=environment(two_cpus[1], memory_node),
    )
    result, masks = found
    assert (masks, result["full"]) == ([str(two_cpus[1])], True)


def test_pinned_caller_is_widened_in_its_own_cpuset(memory_node: int) -> None:
    """In a cpuset that is the rank's, a caller that a library pinned to a part of it gets all of it, and it is told."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process may run on one CPU alone")
    found = run_child(
        BIND,
        """
        from provisioner.worker.affinity import allowed_cpus
        every = allowed_cpus()
        os.environ["PROVISION_CPUS"] = str(every)
        os.sched_setaffinity(0, (every.first,))
        result = bind_local_rank()
        answer([summary(result), masks() == [str(every)], result.notes])
        """,
        environ=environment(0, memory_node),
    )
    result, widened, notes = found
    assert widened
    assert (result["cpus_by"], result["full"]) == ("cgroup", True)
    assert "pinned to CPUs" in notes[0]


def test_discovered_share_is_bound(two_cpus: tuple[int, int], memory_node: int) -> None:
    """By discovery, on a made machine of this one's CPUs, the rank is on its card's CPUs and on no other."""
    first, second = two_cpus
    found = run_child(
        BIND,
        TARGET,
        f"""
        from tests.hosts import make_tree
        from provisioner.worker import find_target
        tree = make_tree({{0: "{first}", 1: "{second}"}}, [0, 1])
        allowed = allowed_cpus()
        target = find_target(1, environ={{}}, root=tree, allowed_cpus=allowed, plan_paths=())
        answer([summary(bind_target(target, allowed, None)), masks()])
        """,
    )
    result, masks = found
    assert masks == [str(second)]
    assert (result["cpus"], result["cpus_by"]) == (str(second), "syscall")


def test_unknown_place_binds_nothing() -> None:
    """Without a card nothing is bound, no whole machine either, and the result says so; the process lives."""
    found = run_child(
        BIND,
        """
        before = masks()
        result = bind_local_rank(0, locality={})
        answer([summary(result), masks() == before, get_policy().mode, result.describe()])
        """,
        environ={"PROVISION_PLAN": "/nonexistent"},
    )
    result, unchanged, mode, text = found
    if result["codes"] == []:
        pytest.skip("this machine has an accelerator")
    assert unchanged
    assert (result["cpus_by"], result["memory_by"], mode, result["full"]) == (
        "none",
        "none",
        "default",
        False,
    )
    assert "full     no" in text


def test_required_bind_is_an_error_with_the_result(two_cpus: tuple[int, int]) -> None:
    """required=True makes an error of what is less than full; the error has the result and survives pickle."""
    found = run_child(
        BIND,
        """
        import pickle
        try:
            bind_local_rank(required=True)
        except BindError as error:
            again = pickle.loads(pickle.dumps(error))
            answer([summary(error.result), str(error), error.exit_status, again.result == error.result])
        """,
        environ=environment(f"{two_cpus[0]},4000"),
    )
    result, message, status, same = found
    assert result["codes"] == ["cpus_missing"]
    assert (result["cpus"], result["cpus_by"]) == (str(two_cpus[0]), "syscall")
    assert "4000" in message
    assert (status, same) == (1, True)


# What seccomp refuses -------------------------------------------------------------------------------


@needs_numbers
@pytest.mark.parametrize("action", ["fail_with()", "KILL_PROCESS", "KILL_THREAD"])
def test_refused_memory_keeps_the_cpus(
    two_cpus: tuple[int, int], memory_node: int, action: str
) -> None:
    """REPORTS.md case 2, sglang#27368: set_mempolicy is refused or kills; CPUs are bound, and the process lives."""
    found = run_child(
        BIND,
        TARGET,
        f"""
        filter_calls({action}, "set_mempolicy")
        target = Target(0, "argument", "made", CpuSet(({two_cpus[1]},)), memory_nodes=NodeSet(({memory_node},)))
        result = bind_target(target, allowed_cpus(), None)
        answer([summary(result), masks(), result.describe()])
        """,
    )
    result, masks, text = found
    assert masks == [str(two_cpus[1])]
    assert (result["cpus_by"], result["memory_by"], result["step"], result["full"]) == (
        "syscall",
        "none",
        "none",
        False,
    )
    assert result["codes"] == ["memory_refused"]
    names = {call for call, _, _ in result["refused"]}
    assert names == {"set_mempolicy"}
    if action == "fail_with()":
        assert [code for _, code, _ in result["refused"]] == [errno.EPERM] * 3
    else:
        assert {number for _, _, number in result["refused"]} == {signal.SIGSYS}
        assert "would kill this process" in text


@needs_numbers
@pytest.mark.parametrize("action", ["fail_with()", "KILL_PROCESS"])
def test_refused_affinity_is_told(two_cpus: tuple[int, int], memory_node: int, action: str) -> None:
    """Where sched_setaffinity is refused or kills, the result says so, and the process lives on its old CPUs."""
    found = run_child(
        BIND,
        f"""
        before = masks()
        filter_calls({action}, "sched_setaffinity")
        result = bind_local_rank()
        answer([summary(result), masks() == before])
        """,
        environ=environment(two_cpus[1], memory_node),
    )
    result, unchanged = found
    assert unchanged
    assert (result["cpus_by"], result["full"]) == ("none", False)
    assert "sched_setaffinity" in {call for call, _, _ in result["refused"]}


@needs_numbers
def test_deadly_question_is_not_asked(two_cpus: tuple[int, int], memory_node: int) -> None:
    """Where get_mempolicy itself kills, the process lives, with its CPUs bound and the rest told."""
    found = run_child(
        BIND,
        """
        filter_calls(KILL_PROCESS, "get_mempolicy", "set_mempolicy")
        answer([summary(bind_local_rank()), masks()])
        """,
        environ=environment(two_cpus[1], memory_node),
    )
    result, masks = found
    assert masks == [str(two_cpus[1])]
    assert (result["cpus_by"], result["memory_by"]) == ("syscall", "none")
    assert "get_mempolicy" in {call for call, _, _ in result["refused"]}


@needs_numbers
def test_harmless_filter_changes_nothing(two_cpus: tuple[int, int], memory_node: int) -> None:
    """Under a filter that lets the calls pass everything is bound as without one."""
    found = run_child(
        BIND,
        """
        filter_calls(fail_with(), "migrate_pages")
        answer([summary(bind_local_rank()), masks()])
        """,
        environ=environment(two_cpus[1], memory_node),
    )
    result, masks = found
    assert (masks, result["full"], result["refused"]) == ([str(two_cpus[1])], True, [])


def test_memory_that_the_cpuset_lacks_is_told(two_cpus: tuple[int, int], memory_node: int) -> None:
    """A planned node that the cpuset's memory lacks is refused by the kernel, step by step, with EINVAL."""
    found = run_child(
        BIND,
        "answer([summary(bind_local_rank()), masks()])",
        environ=environment(two_cpus[1], memory_node + 900),
    )
    result, masks = found
    assert masks == [str(two_cpus[1])]
    assert (result["step"], result["codes"]) == ("none", ["memory_refused"])
    assert {code for _, code, _ in result["refused"]} == {errno.EINVAL}


# What is there already --------------------------------------------------------------------------------


def test_pages_are_moved_and_counted(two_cpus: tuple[int, int], memory_node: int) -> None:
    """With migrate=True the result says how many pages stayed: none, where all lie right."""
    found = run_child(
        BIND,
        """
        result = bind_local_rank(migrate=True)
        answer([summary(result), result.unmoved_pages, bind_local_rank().unmoved_pages])
        """,
        environ=environment(two_cpus[1], memory_node),
    )
    result, unmoved, without = found
    if result["codes"]:
        pytest.skip("this kernel shows no numa_maps")
    assert unmoved == 0
    assert without is None


def test_loaded_runtime_is_told(two_cpus: tuple[int, int], tmp_path: Path) -> None:
    """An accelerator runtime that is loaded already is named, since what it holds stays where it is."""
    source = tmp_path / "empty.c"
    source.write_text("int nothing;")
    library = tmp_path / "libcudart.so.12"
    try:
        subprocess.run(["gcc", "-shared", "-o", library, source], check=True)
    except OSError:
        pytest.skip("there is no C compiler to make a library with")
    found = run_child(
        BIND,
        f"""
        import ctypes
        before = bind_local_rank().runtimes
        ctypes.CDLL({str(library)!r})
        result = bind_local_rank()
        answer([before, result.runtimes, result.notes])
        """,
        environ=environment(two_cpus[1]),
    )
    before, after, notes = found
    assert (before, after) == ([], ["libcudart.so.12"])
    assert "loaded already" in notes[-1]


def test_bind_twice_is_bind_once(two_cpus: tuple[int, int], memory_node: int) -> None:
    """A second call comes to the same as the first."""
    found = run_child(
        BIND,
        "answer([summary(bind_local_rank()), summary(bind_local_rank()), masks()])",
        environ=environment(two_cpus[1], memory_node),
    )
    assert found[0] == found[1]
    assert found[2] == [str(two_cpus[1])]


# What it costs ----------------------------------------------------------------------------------------


def test_binding_imports_next_to_nothing(two_cpus: tuple[int, int]) -> None:
    """With an environment at hand neither typing, dataclasses, re nor json is loaded, nor discovery."""
    code = (
        "import sys; from provisioner.worker import bind_local_rank; bind_local_rank(); "
        "print(sorted({'typing', 'dataclasses', 're', 'json', 'enum', 'threading', 'subprocess', "
        "'provisioner.discovery', 'provisioner.topology', 'provisioner.root'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}",
        ],
        env={**os.environ, **environment(two_cpus[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_result_travels_between_processes() -> None:
    """A result survives pickle, so that a worker can send it to its driver."""
    result = bind_target(Target(0, "argument", "none", memory="off"), None, None)
    assert isinstance(result, BindResult)
    assert pickle.loads(pickle.dumps(result)) == result
    assert str(pickle.loads(pickle.dumps(BindError(result)))) == str(BindError(result))
