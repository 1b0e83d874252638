"""Checks of the worker half in processes of this machine: see test_worker.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from .guest import check, equal, note, run

_MIB = 1 << 20
_OUT = "/run/worker-units"

_PRELUDE = """
import json, mmap, os, sys
from provisioner.worker import *
from provisioner.worker.mempolicy import get_policy

def take(megabytes=48):
    # Private: shared memory counts as a file's.
    memory = mmap.mmap(-1, megabytes << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(memory), 4096):
        memory[at] = 1
    return memory

def look():
    with open("/proc/thread-self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    policy = get_policy()
    return {"cpus": status["Cpus_allowed_list"].strip(), "mems": status["Mems_allowed_list"].strip(),
            "mode": policy.mode, "nodes": str(policy.nodes),
            "anonymous": {node: size >> 20 for node, size in page_placement().anonymous.items()}}

def summary(result):
    return {"cpus": str(result.cpus), "cpus_by": result.cpus_by, "memory_by": result.memory_by,
            "step": result.memory_step, "nodes": str(result.memory_nodes), "full": result.is_full,
            "source": result.target.source, "codes": [one.code for one in result.problems],
            "refused": [one.errno for one in result.refused], "notes": result.notes}
"""


def _worker(code: str, *launcher: str, env: dict[str, str] | None = None) -> Any:
    """What a Python process prints as JSON, started by a launcher."""
    done = run(*launcher, "python3", "-W", "error", "-c", _PRELUDE + code, env=env, timeout=110)
    return json.loads(done.stdout)


def _scope(cpus: str, nodes: str = "") -> tuple[str, ...]:
    """A launcher that runs a command in a cgroup of these CPUs and memory nodes."""
    limits = [f"--property=AllowedCPUs={cpus}"]
    limits += [f"--property=AllowedMemoryNodes={nodes}"] if nodes else []
    return ("systemd-run", "--scope", "--quiet", "--collect", *limits)


def _planned() -> list[dict[str, Any]]:
    plan = json.loads(run("provision", "plan", "--json").stdout)
    ranks: list[dict[str, Any]] = plan["services"][0]["ranks"]
    return ranks


@check
def shares_are_the_plans() -> None:
    """Without a plan each rank's share is what the host half plans."""
    for rank in _planned():
        text = run("python3", "-m", "provisioner.worker", f"--rank={rank['rank']}", "--json").stdout
        found = json.loads(text)
        equal(
            (found["source"], found["cpus"], found["memory_nodes"], found["devices"]),
            ("discovery", rank["cpus"], rank["memory_nodes"], rank["devices"]),
        )


@check
def bound_pages_lie_on_the_cards_node() -> None:
    """After bind_local_rank() the process is on its card's cores, and what it allocates on its card's node."""
    for rank, cpus, node in ((0, "0-3", "0"), (1, "4-7", "0"), (2, "10-17", "1")):
        result, before, after, share = _worker(
            f"result = bind_local_rank({rank}, required=True); before = look(); kept = take(); "
            "print(json.dumps([summary(result), before, look(), page_placement().planned_share]))"
        )
        equal(
            (result["cpus_by"], result["memory_by"], result["step"]), ("syscall", "syscall", "bind")
        )
        equal((after["cpus"], after["mode"], after["nodes"]), (cpus, "bind", node))
        grown = after["anonymous"].get(node, 0) - before["anonymous"].get(node, 0)
        assert grown >= 47, (rank, before, after)
        # What Python itself had before lies where it started.
        note("local share", rank=rank, share=share)


@check
def preference_spills_where_a_wall_would_kill() -> None:
    """With memory = prefer a rank fills its node first and then others, and lives."""
    result, mode, placed = _worker(
        "from provisioner.idset import CpuSet, NodeSet\n"
        "from provisioner.worker.binding import bind_target\n"
        "nodes = NodeSet((3,))\n"
        "target = Target(0, 'argument', 'made', CpuSet(range(10)), memory_nodes=nodes, memory='prefer')\n"
        "result = bind_target(target, None, None)\n"
        "kept = take(200)\n"
        "print(json.dumps([summary(result), look()['mode'], look()['anonymous']]))"
    )
    equal((result["step"], mode), ("preferred_many", "preferred_many"))
    assert placed.get("3", 0) >= 60, placed
    assert sum(placed.values()) - placed.get("3", 0) >= 60, placed


@check
def pages_move_with_migrate() -> None:
    """With migrate=True pages that lay on node 0 lie on node 1, and those that stayed are counted."""
    for call in ("bind_numa(1, migrate=True)", "bind_local_rank(2, migrate=True)"):
        before, after, unmoved = _worker(
            f"kept = take(); before = look(); unmoved = {call}.unmoved_pages; "
            "print(json.dumps([before, look(), unmoved]))",
            "numactl",
            "--cpunodebind=0",
            "--membind=0",
        )
        assert before["anonymous"]["0"] >= 48, before
        assert after["anonymous"].get("1", 0) >= 48, after
        assert after["anonymous"].get("0", 0) <= 4, after
        assert unmoved is not None, call
        assert unmoved * 4096 < 8 * _MIB, unmoved
        equal((after["cpus"], after["mode"], after["nodes"]), ("10-17", "bind", "1"))


@check
def pages_stay_without_migrate() -> None:
    """A late bind leaves pages where they are, and the placement says so."""
    before, after = _worker(
        "kept = take(); before = look(); bind_numa(1); print(json.dumps([before, look()]))",
        "numactl",
        "--cpunodebind=0",
        "--membind=0",
    )
    assert after["anonymous"]["0"] >= before["anonymous"]["0"] - 1, (before, after)


@check
def renumbered_cpuset_bounds_the_shares() -> None:
    """In a container's cpuset the shares are cores of it, of the card's own node, and apart from each other."""
    launcher = _scope("4-9,14-17", "0-1")
    found = [
        _worker(f"print(json.dumps([summary(bind_local_rank({rank})), look()]))", *launcher)
        for rank in range(3)
    ]
    equal([look["cpus"] for _, look in found], ["4-5", "6-7", "14-17"])
    equal([result["full"] for result, _ in found], [True] * 3)
    # cores of the machine // cards, cut by card number: as engines do it.
    old = [list(range(rank * 3, rank * 3 + 3)) for rank in range(3)]
    note("card number times cores a card", cpus=old)
    assert old[0][0] == 0, "the formula's CPU 0 is not in the cpuset"


@check
def cpuset_without_the_cards_cpus_is_named() -> None:
    """In a cpuset of the other node nothing is bound, and the result names the reason; the process lives."""
    result, seen = _worker(
        "print(json.dumps([summary(bind_local_rank(2)), look()]))", *_scope("0-9", "0")
    )
    equal((result["codes"], result["cpus_by"], result["full"]), (["no_local_cpu"], "none", False))
    equal((seen["cpus"], seen["mode"]), ("0-9", "default"))


@check
def cgroup_that_holds_is_only_checked() -> None:
    """In a cgroup with the rank's CPUs and memory nothing is set, and the result says who holds it."""
    result, seen = _worker(
        "print(json.dumps([summary(bind_local_rank(1, required=True)), look()]))",
        *_scope("4-7", "0"),
    )
    equal((result["cpus_by"], result["memory_by"], result["cpus"]), ("cgroup", "cgroup", "4-7"))
    equal((seen["cpus"], seen["mode"]), ("4-7", "default"))


@check
def pinned_caller_gets_its_whole_cgroup() -> None:
    """A launcher that was pinned to one CPU does not narrow the rank, in its cgroup or without one."""
    code = "print(json.dumps([summary(bind_local_rank(1)), look()['cpus']]))"
    result, cpus = _worker(code, *_scope("4-7", "0"), "taskset", "-c", "5")
    equal((result["cpus_by"], cpus), ("cgroup", "4-7"))
    result, cpus = _worker(code, "taskset", "-c", "0")
    equal((result["cpus_by"], cpus), ("syscall", "4-7"))


@check
def rendered_environment_is_checked_in_its_slice() -> None:
    """Behind NAME-run the environment is the plan, and its slice holds it; outside the slice it is bound."""
    run("provision", "render", "--output", _OUT)
    for path in Path(_OUT).glob("*.slice"):
        shutil.copy(path, "/etc/systemd/system")
    shutil.copytree(f"{_OUT}/provision", "/etc/provision/provision", dirs_exist_ok=True)
    shutil.copy(f"{_OUT}/plan.json", "/etc/provision/plan.json")
    run("systemctl", "daemon-reload")
    code = "print(json.dumps([summary(bind_local_rank(required=True)), look()]))"
    result, seen = _worker(code, f"{_OUT}/provision-run", "2")
    equal(
        (result["source"], result["cpus_by"], result["memory_by"]),
        ("environment", "cgroup", "cgroup"),
    )
    equal((seen["cpus"], seen["mems"], seen["mode"]), ("10-17", "1", "default"))
    order = {"CUDA_VISIBLE_DEVICES": "2,1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "LOCAL_RANK": "1"}
    result, seen = _worker(code, env=order)
    equal((result["source"], result["cpus_by"]), ("/etc/provision/plan.json", "syscall"))
    equal((seen["cpus"], seen["nodes"]), ("4-7", "0"))


@check
def memory_that_the_cgroup_lacks_is_refused_by_steps() -> None:
    """A planned memory node that the cgroup lacks is EINVAL for each step; the CPUs are bound."""
    planned = {
        "PROVISION_RANK": "0",
        "PROVISION_CPUS": "10-13",
        "PROVISION_MEMORY": "bind",
        "PROVISION_MEMORY_NODES": "1",
    }
    result, seen = _worker(
        "print(json.dumps([summary(bind_local_rank(0)), look()]))",
        *_scope("10-17", "0"),
        env=planned,
    )
    equal((result["refused"], result["step"], result["full"]), ([22, 22, 22], "none", False))
    equal((seen["cpus"], seen["mode"]), ("10-13", "default"))


@check
def nodes_without_memory_or_cpus_are_told() -> None:
    """bind_numa() of a node without memory binds its CPUs and reports EINVAL; one without CPUs is an error."""
    codes, step, seen, words = _worker(
        "result = bind_numa(2)\n"
        "try:\n    bind_numa(3)\nexcept Exception as error:\n    words = str(error)\n"
        "print(json.dumps([[one.errno for one in result.memory.refused], result.memory.step, look(), words]))"
    )
    equal((codes, step, seen["cpus"], seen["mode"]), ([22, 22, 22], "none", "18-19", "default"))
    equal(words, "NUMA node 3: it has no CPUs")


@check
def numactl_sees_what_was_bound() -> None:
    """Numactl, by libnuma, says of a bound process what the raw system calls set, and the other way round."""
    shown = _worker(
        "import subprocess; bind_numa(1); "
        "print(json.dumps(subprocess.run(['numactl', '--show'], capture_output=True, text=True).stdout))"
    )
    lines = dict(line.split(":", 1) for line in shown.splitlines())
    equal(lines["policy"].strip(), "bind")
    equal(lines["membind"].split(), ["1"])
    equal(lines["physcpubind"].split(), [str(cpu) for cpu in range(10, 18)])
    seen = _worker("print(json.dumps(look()))", "numactl", "--cpunodebind=1", "--membind=0,1")
    equal((seen["cpus"], seen["mode"], seen["nodes"]), ("10-17", "bind", "0-1"))


@check
def libnuma_agrees_on_nodes() -> None:
    """What libnuma says of each node's CPUs is what bind_numa() binds."""
    found = _worker(
        "import ctypes\n"
        "numa = ctypes.CDLL('libnuma.so.1'); assert numa.numa_available() >= 0\n"
        "numa.numa_allocate_cpumask.restype = ctypes.c_void_p\n"
        "def cpus_of(node):\n"
        "    mask = ctypes.c_void_p(numa.numa_allocate_cpumask())\n"
        "    assert numa.numa_node_to_cpus(node, mask) == 0\n"
        "    return [cpu for cpu in range(20) if numa.numa_bitmask_isbitset(mask, cpu)]\n"
        "print(json.dumps([[cpus_of(node), list(bind_numa(node).affinity.cpus)] for node in (0, 1)]))"
    )
    for theirs, mine in found:
        equal(mine, theirs)


@check
def cards_share_is_bound_by_its_number() -> None:
    """bind_cpu() of a physical card binds the process to the card's share; its idle CPUs are cores at its end."""
    for card, cpus, idle in ((0, "0-3", "2-3"), (1, "4-7", "6-7"), (2, "10-17", "16-17")):
        found = _worker(
            f"print(json.dumps([str(get_idle_cpus({card}, 2)), str(bind_cpu({card}).cpus), look()['cpus'], "
            f"str(set_cpu_affinity(range(20)).cpus)]))"
        )
        equal(found, [idle, cpus, cpus, cpus])


@check
def two_services_are_apart() -> None:
    """Two services that see one card of node 0 each bind to disjoint cores of it."""
    code = "print(json.dumps([summary(bind_local_rank(0)), look()['cpus']]))"
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    Path("/etc/provision/plan.json").unlink(missing_ok=True)
    found = [
        _worker(code, *_scope("0-19"), env={**order, "CUDA_VISIBLE_DEVICES": str(card)})
        for card in (0, 1)
    ]
    equal([cpus for _, cpus in found], ["0-3", "4-7"])
    equal([result["source"] for result, _ in found], ["discovery"] * 2)


@check
def threads_that_exist_are_told() -> None:
    """A thread from before has the CPUs and not the memory policy, which the result says; a later one has both."""
    result, without, early, late = _worker(
        "import threading\n"
        "go, found = threading.Event(), []\n"
        "def wait():\n    go.wait(); found.append(look())\n"
        "first = threading.Thread(target=wait); first.start()\n"
        "result = bind_local_rank(2); go.set(); first.join()\n"
        "second = threading.Thread(target=wait); second.start(); second.join()\n"
        "print(json.dumps([summary(result), len(result.without_policy), *found]))"
    )
    equal((result["full"], without), (False, 1))
    equal(
        [(one["cpus"], one["mode"]) for one in (early, late)],
        [("10-17", "default"), ("10-17", "bind")],
    )


@check
def rank_outside_is_named() -> None:
    """A rank past the visible cards binds nothing and is named; required=True makes it an error."""
    result, words = _worker(
        "result = bind_local_rank(3)\n"
        "try:\n    bind_local_rank(3, required=True)\nexcept BindError as error:\n    words = str(error)\n"
        "print(json.dumps([summary(result), words]))"
    )
    equal((result["codes"], result["cpus_by"]), (["no_device_for_rank"], "none"))
    assert "local rank 3 has no device" in words, words
