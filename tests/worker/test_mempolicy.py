"""Memory policies on the running kernel: each test changes a process of its own."""

from __future__ import annotations

import errno
import platform
import signal

import pytest

from provisioner.errors import InputError
from provisioner.idset import NodeSet
from provisioner.worker.mempolicy import bind_memory, set_policy
from tests.worker.children import needs_numbers, run_child

pytestmark = needs_numbers

BIND = """
from provisioner.worker.mempolicy import *

def tell(result):
    return {
        "step": result.step,
        "mode": result.policy and result.policy.mode,
        "nodes": result.policy and str(result.policy.nodes),
        "refused": [[one.call, one.errno, one.signal, one.fault] for one in result.refused],
    }
"""


def test_bind_is_what_the_kernel_has(memory_node: int) -> None:
    """After bind_memory, get_mempolicy and the mappings' lines in numa_maps both say bind and the node."""
    found = run_child(
        BIND,
        f"""
        result = bind_memory(NodeSet(({memory_node},)))
        with open("/proc/self/numa_maps") as file:
            policies = sorted({{line.split()[1] for line in file}})
        answer([tell(result), str(get_policy().nodes), policies])
        """,
    )
    expected = {"step": "bind", "mode": "bind", "nodes": str(memory_node), "refused": []}
    assert found == [expected, str(memory_node), [f"bind:{memory_node}"]]


def test_allowed_nodes_are_the_status_files(memory_node: int) -> None:
    """allowed_nodes() says what Mems_allowed_list says."""
    found = run_child(BIND, 'answer([str(allowed_nodes()), read_status()["Mems_allowed_list"]])')
    assert found[0] == found[1]
    assert memory_node in NodeSet.parse_list(found[0])


def test_policy_is_the_threads_own(memory_node: int) -> None:
    """A policy reaches the calling thread and those it starts later, and no thread that exists."""
    found = run_child(
        BIND,
        f"""
        import threading
        modes, go = {{}}, threading.Event()
        def look(name):
            modes[name] = get_policy().mode
        old = threading.Thread(target=lambda: (go.wait(), look("old")))
        old.start()
        bind_memory(NodeSet(({memory_node},)))
        new = threading.Thread(target=look, args=("new",))
        new.start(); new.join(); go.set(); old.join()
        answer(modes)
        """,
    )
    assert found == {"new": "bind", "old": "default"}


def test_every_bit_of_the_mask_arrives(memory_node: int) -> None:
    """No node of a set is lost at the end of a word, where maxnode is off by one for many.

    With relative nodes the kernel keeps the mask as it was given, also of nodes that are not there;
    it gives back the words that hold its possible nodes.
    """
    found = run_child(
        BIND,
        """
        with open("/sys/devices/system/node/possible") as file:
            known = (NodeSet.parse_list(file.read()).last // 64 + 1) * 64
        width = len(read_status()["Mems_allowed"].replace(",", "")) * 4
        results = []
        for nodes in ({0}, {1}, {62}, {63}, {0, 63}, {0, 64}, {0, 63, 64, 128}, {0, width - 1}):
            if max(nodes) < width:
                set_policy("bind", NodeSet(nodes), FLAG_RELATIVE_NODES)
                policy = get_policy()
                expected = sorted(one for one in nodes if one < known)
                results.append([expected, list(policy.nodes), policy.mode, policy.flags])
        answer(results)
        """,
    )
    assert len(found) >= 2
    for expected, kept, mode, flags in found:
        assert (kept, mode, flags) == (expected, "bind", 1 << 14)


def test_libnuma_sees_the_same(memory_node: int) -> None:
    """Where libnuma is installed, its numa_get_membind names the nodes that bind_memory bound."""
    found = run_child(
        BIND,
        f"""
        import ctypes
        try:
            numa = ctypes.CDLL("libnuma.so.1")
        except OSError as error:
            answer(str(error))
        else:
            bind_memory(NodeSet(({memory_node},)))
            numa.numa_get_membind.restype = ctypes.c_void_p
            mask = ctypes.c_void_p(numa.numa_get_membind())
            answer([n for n in range(64) if numa.numa_bitmask_isbitset(mask, n)])
        """,
    )
    if isinstance(found, str):
        pytest.skip(f"libnuma is not there: {found}")
    assert found == [memory_node]


def test_node_without_memory_is_einval(memory_node: int) -> None:
    """A node that is not there is an OSError with EINVAL that names mode and nodes, or a refused step."""
    assert memory_node != 61
    with pytest.raises(
        OSError, match=r"set_mempolicy\(bind, nodes 61\): Invalid argument"
    ) as caught:
        set_policy("bind", NodeSet((61,)))
    assert caught.value.errno == errno.EINVAL
    found = run_child(BIND, "answer(tell(bind_memory(NodeSet((61,)))))")
    assert found["step"] == "none"
    assert [(call, code) for call, code, _, _ in found["refused"]] == [
        (f"set_mempolicy({step}, nodes 61)", errno.EINVAL)
        for step in ("bind", "preferred_many", "preferred")
    ]


def test_empty_set_is_refused() -> None:
    """An empty set is an error, since the kernel takes an empty 'preferred' for 'local' and succeeds."""
    with pytest.raises(InputError, match="the set is empty"):
        bind_memory(NodeSet())


def test_unknown_mode_is_refused() -> None:
    """A mode that no kernel has never becomes a system call."""
    with pytest.raises(ValueError, match="stripe"):
        set_policy("stripe", NodeSet((0,)))


@pytest.mark.parametrize(
    "refused_modes, step, mode",
    [
        ([2], "preferred_many", "preferred_many"),
        ([2, 5], "preferred", "preferred"),
        ([2, 5, 1], "none", "default"),
    ],
)
def test_steps_go_down_one_by_one(
    memory_node: int, refused_modes: list[int], step: str, mode: str
) -> None:
    """What a filter refuses by mode is a refused step with EPERM, and the next softer one is tried."""
    found = run_child(
        BIND,
        f"""
        for mode in {refused_modes}:
            filter_calls(fail_with(), "set_mempolicy", first_argument=mode)
        answer(tell(bind_memory(NodeSet(({memory_node},)))))
        """,
    )
    assert (found["step"], found["mode"]) == (step, mode)
    assert [code for _, code, _, _ in found["refused"]] == [errno.EPERM] * len(refused_modes)


def test_eperm_leaves_the_policy_alone() -> None:
    """Under a filter like Docker's, every step is refused with EPERM and the thread goes on."""
    found = run_child(
        BIND,
        """
        filter_calls(fail_with(), "set_mempolicy", "get_mempolicy")
        result = tell(bind_memory(NodeSet((0,))))
        try:
            set_policy("bind", NodeSet((0,)))
        except PermissionError as error:
            answer([result, error.errno, str(error)])
        """,
    )
    result, code, message = found
    assert (result["step"], result["mode"]) == ("none", None)
    assert [one[1:3] for one in result["refused"]] == [[errno.EPERM, None]] * 3
    assert code == errno.EPERM
    assert "set_mempolicy(bind, nodes 0): Operation not permitted" in message


THREADS = """
import threading
stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(3)]
for thread in threads:
    thread.start()
"""


@pytest.mark.parametrize("action", ["KILL_PROCESS", "KILL_THREAD"])
@pytest.mark.parametrize("threads", ["", THREADS], ids=["one_thread", "several_threads"])
def test_deadly_filter_kills_a_child_alone(action: str, threads: str) -> None:
    """A filter that kills is found out by a child, with one thread or several, with no warning even."""
    found = run_child(
        BIND,
        threads,
        f"""
        filter_calls({action}, "set_mempolicy", "get_mempolicy")
        answer(tell(bind_memory(NodeSet((0,)))))
        {"stop.set()" if threads else ""}
        """,
    )
    assert (found["step"], found["mode"]) == ("none", None)
    assert [one[1:3] for one in found["refused"]] == [[None, signal.SIGSYS]] * 3


@pytest.mark.parametrize("threads", ["", THREADS], ids=["one_thread", "several_threads"])
def test_filter_that_lets_it_pass_costs_nothing(memory_node: int, threads: str) -> None:
    """Under a filter for other calls, memory is bound as without one."""
    found = run_child(
        BIND,
        threads,
        f"""
        filter_calls(KILL_PROCESS, "migrate_pages")
        answer(tell(bind_memory(NodeSet(({memory_node},)))))
        {"stop.set()" if threads else ""}
        """,
    )
    assert (found["step"], found["mode"], found["refused"]) == ("bind", "bind", [])


@pytest.mark.parametrize("action", ["KILL_PROCESS", "fail_with()"])
def test_ignored_sigchld_hides_no_answer(action: str) -> None:
    """Where SIGCHLD is ignored, so that no child's status is kept, a refusal is still one."""
    found = run_child(
        BIND,
        f"""
        import signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        filter_calls({action}, "set_mempolicy")
        answer(tell(bind_memory(NodeSet((0,)))))
        """,
    )
    expected = (
        [None, None, "the child ended without an answer"]
        if action == "KILL_PROCESS"
        else [errno.EPERM, None, ""]
    )
    assert found["step"] == "none"
    assert [one[1:] for one in found["refused"]] == [expected] * 3


def test_no_child_without_a_filter(memory_node: int) -> None:
    """Where no filter is in force nothing can kill, and no child is made."""
    found = run_child(
        BIND,
        f"""
        forks = []
        os.register_at_fork(before=lambda: forks.append(1))
        bind_memory(NodeSet(({memory_node},)))
        answer([read_status().get("Seccomp"), len(forks)])
        """,
    )
    if found[0] != "0":
        pytest.skip(f"this sandbox has a filter of its own: Seccomp is {found[0]}")
    assert found[1] == 0


def test_embedding_program_is_not_spawned() -> None:
    """Where sys.executable is no Python, as in a program that embeds it, nothing is run and a fault told."""
    found = run_child(
        BIND,
        THREADS,
        """
        sys.executable = "/usr/bin/true"
        filter_calls(KILL_PROCESS, "set_mempolicy")
        answer(tell(bind_memory(NodeSet((0,)))))
        stop.set()
        """,
    )
    assert found["step"] == "none"
    assert found["refused"][0][3] == "no child: '/usr/bin/true' is no Python interpreter"


def test_migration_says_what_stayed(memory_node: int) -> None:
    """migrate_pages gives a number of pages; a node that is not there is EINVAL, EPERM for who may not know."""
    found = run_child(
        BIND,
        f"""
        here = NodeSet(({memory_node},))
        left = migrate_pages(0, here, here)
        try:
            migrate_pages(0, here, NodeSet((61,)))
        except OSError as error:
            may_know = int(read_status()["CapEff"], 16) >> 23 & 1  # CAP_SYS_NICE
            answer([left, error.errno, may_know, str(error)])
        """,
    )
    left, code, may_know, message = found
    assert left >= 0
    assert code == (errno.EINVAL if may_know else errno.EPERM)
    assert f"migrate_pages(this process, from nodes {memory_node} to nodes 61)" in message


def test_deadly_migration_is_not_made() -> None:
    """Where a filter kills who migrates pages, it is an error with a name and the process lives."""
    found = run_child(
        BIND,
        """
        from provisioner.worker.child import DeadlyCallError
        filter_calls(KILL_PROCESS, "migrate_pages")
        try:
            migrate_pages(0, NodeSet((0,)), NodeSet((0,)))
        except DeadlyCallError as error:
            answer([error.refusal.signal, error.message])
        """,
    )
    assert found[0] == signal.SIGSYS
    assert "would kill this process" in found[1]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="setarch names another machine here")
def test_unknown_architecture_has_a_name() -> None:
    """A program whose system calls are numbered in a way not known here gets an error that says so."""
    found = run_child(
        BIND,
        """
        import ctypes
        ctypes.CDLL(None).personality(8)  # PER_LINUX32: uname says i686
        try:
            get_policy()
        except UnsupportedMachineError as error:
            answer(error.message)
        """,
    )
    assert "'i686'" in found
    assert "x86_64" in found


def test_import_is_light() -> None:
    """Importing what a bind needs loads neither ctypes nor another module that costs milliseconds."""
    found = run_child(
        """
        import subprocess
        code = (
            "import provisioner.worker.affinity, provisioner.worker.mempolicy, "
            "provisioner.worker.pages, provisioner.worker.visible, provisioner.worker.nvml, sys;"
            "print([m for m in ('ctypes', 'dataclasses', 'inspect', 'json', 'subprocess', 'threading')"
            " if m in sys.modules])"
        )
        answer(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
        """
    )
    assert found == "[]"
