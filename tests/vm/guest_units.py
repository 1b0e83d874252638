"""Checks of what is rendered on this machine and for it: see test_units.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .guest import check, equal, machine, read, run, until

_CGROUPS = Path("/sys/fs/cgroup")
_UNITS = Path("/etc/systemd/system")
_OUT = "/run/units"
_UNKNOWN = "10000:01:00.0"
_LOCALITY = ("--locality", f"{_UNKNOWN}=1")
_CONFIG = """\
[locality]
"10000:01:00.0" = 1
[worker]
command = ["/bin/sh", "-c", "echo $PROVISION_RANK $CUDA_VISIBLE_DEVICES >/run/said; exec sleep 600"]
[worker.environment]
GREETING = "50% of $HOME"
"""


def _json(*arguments: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run("provision", *arguments, "--json").stdout)
    return value


def _ranks() -> Iterator[dict[str, Any]]:
    """The ranks of the plan that was rendered."""
    plan = json.loads(Path(f"{_OUT}/plan.json").read_text())
    for service in plan["services"]:
        yield from service["ranks"]


def _allowed(text: str) -> tuple[str, str]:
    """The CPUs and memory nodes in the text of a process's status."""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return lines["Cpus_allowed_list"].strip(), lines["Mems_allowed_list"].strip()


@check
def topology_is_this_machines() -> None:
    """Topology reads this system: its nodes by kind, its cards with their nodes, and one unknown."""
    found, asked = _json("topology"), machine()
    equal(found["is_this_system"], True)
    equal([node["cpus"] for node in found["nodes"]], [node["cpus"] for node in asked["nodes"]])
    equal([node["kind"] for node in found["nodes"]], ["dram", "dram", "none", "cxl"])
    equal(found["nodes"][2]["distances"], {"0": 12, "1": 31, "2": 10, "3": 28})
    cards = {card["pci"]: card["numa_node"] for card in found["accelerators"]}
    nodes = {card["address"]: card["node"] for card in asked["cards"]}
    equal(cards, nodes | {_UNKNOWN: None})
    equal(list(cards), sorted(cards, key=lambda address: int(address.split(":")[0], 16)))
    equal(found["cpus"][11]["core"], 10, "core of CPU 11")


@check
def card_without_node_is_refused() -> None:
    """A card that nothing says the node of is named, with the entry that would settle it."""
    done = run("provision", "plan", status=1)
    equal(done.stdout, "")
    assert f"GPU {_UNKNOWN} has no NUMA node" in done.stderr or _UNKNOWN in done.stderr, done.stderr
    assert f'[locality] "{_UNKNOWN}" = ' in done.stderr, done.stderr


@check
def shares_are_whole_local_cores() -> None:
    """Each card of the 5 + 3 gets a whole core of its own node, the one stated too."""
    plan = _json("plan", *_LOCALITY)
    ranks = plan["services"][0]["ranks"]
    equal(
        [(rank["cpus"], rank["memory_nodes"]) for rank in ranks],
        [(f"{first}-{first + 1}", "0") for first in range(0, 10, 2)]
        + [(f"{first}-{first + 1}", "1") for first in range(10, 18, 2)],
    )
    assert all(rank["alignment"]["whole_cores"] and rank["alignment"]["local"] for rank in ranks)


@check(needs=["shares_are_whole_local_cores"])
def units_pass_systemds_parser() -> None:
    """The rendered units pass this systemd's verify without a word."""
    Path("/run/provision.toml").write_text(_CONFIG)
    run("provision", "render", "--config", "/run/provision.toml", "--output", _OUT)
    names = [path.name for path in Path(_OUT).glob("*.slice")] + ["provision@0.service"]
    done = run(
        *("systemd-analyze", "verify", "--man=no", *names),
        env={"SYSTEMD_UNIT_PATH": f"{_OUT}:"},
        status=None,
    )
    equal(done.stdout + done.stderr, "", "words of systemd-analyze verify")
    run("provision", "render", "--config", "/run/provision.toml", "--check", _OUT)


@check(needs=["units_pass_systemds_parser"])
def slices_are_in_force() -> None:
    """Started, each slice's effective CPUs and memory nodes are the plan's."""
    for path in (*Path(_OUT).glob("*.slice"), *Path(_OUT).glob("*.service")):
        shutil.copy(path, _UNITS)
    shutil.copytree(f"{_OUT}/provision", "/etc/provision/provision")
    run("systemctl", "daemon-reload")
    for rank in _ranks():
        run("systemctl", "start", rank["slice"])
        group = _CGROUPS / "provision.slice" / rank["slice"]
        until((group / "cpuset.cpus.effective").exists, f"the cgroup of {rank['slice']}")
        equal(read(f"{group}/cpuset.cpus.effective"), rank["cpus"], f"CPUs of {rank['slice']}")
        equal(read(f"{group}/cpuset.mems.effective"), rank["memory_nodes"], "memory nodes")


@check(needs=["slices_are_in_force"])
def wrapper_runs_in_the_ranks_slice() -> None:
    """A command run by the wrapper has the rank's CPUs and memory nodes from its first instruction."""
    ranks = list(_ranks())
    for rank, words in ((3, ["3"]), (6, [])):
        done = run(
            *(f"{_OUT}/provision-run", *words, "cat", "/proc/self/status"),
            env={} if words else {"LOCAL_RANK": str(rank)},
        )
        equal(_allowed(done.stdout), (ranks[rank]["cpus"], ranks[rank]["memory_nodes"]))


@check(needs=["slices_are_in_force"])
def wrapper_resets_inherited_affinity() -> None:
    """A launcher that is pinned elsewhere or in part does not narrow the rank."""
    rank = list(_ranks())[4]
    for pinned in ("0", rank["cpus"].split("-")[0]):
        done = run(
            "taskset", "-c", pinned, f"{_OUT}/provision-run", "4", "cat", "/proc/self/status"
        )
        equal(_allowed(done.stdout)[0], rank["cpus"], f"CPUs of a command pinned to {pinned}")


@check(needs=["slices_are_in_force"])
def wrapper_is_the_command() -> None:
    """Exit status, arguments and environment are the command's own."""
    run(f"{_OUT}/provision-run", "2", "sh", "-c", "exit 7", status=7)
    done = run(f"{_OUT}/provision-run", "2", "printf", "%s|", "a b", "$HOME", "x\ny", "%i")
    equal(done.stdout, "a b|$HOME|x\ny|%i|")
    done = run(f"{_OUT}/provision-run", "2", "env")
    for line in ("PROVISION_RANK=2", "LOCAL_RANK=2", "GREETING=50% of $HOME", "OMP_NUM_THREADS=1"):
        assert line in done.stdout.splitlines(), line


@check(needs=["slices_are_in_force"])
def service_starts_in_the_ranks_slice() -> None:
    """Systemctl start NAME@N runs the worker in rank N's slice, with its environment."""
    run("systemctl", "start", "provision@5.service")
    shown = run("systemctl", "show", "--value", "--property=MainPID", "provision@5.service").stdout
    rank = list(_ranks())[5]
    status = Path(f"/proc/{shown.strip()}/status").read_text()
    equal(_allowed(status), (rank["cpus"], rank["memory_nodes"]))
    until(lambda: Path("/run/said").exists() and read("/run/said"), "what the worker says")
    equal(read("/run/said"), "5 0,1,2,3,4,5,6,7,8")
    run("systemctl", "stop", "provision@5.service")


@check
def preference_is_one_of_the_service() -> None:
    """With memory = prefer the service's policy is preferred, and its slice walls nothing in."""
    out = "/run/soft"
    config = _CONFIG.replace(
        "[worker]", '[placement]\nname = "soft"\nmemory = "prefer"\n[worker]', 1
    )
    Path("/run/soft.toml").write_text(config)
    run("provision", "render", "--config", "/run/soft.toml", "--output", out)
    for path in (*Path(out).glob("*.slice"), *Path(out).glob("soft@*")):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, _UNITS / path.name)
    shutil.copytree(f"{out}/soft", "/etc/provision/soft")
    run("systemctl", "daemon-reload")
    run("systemctl", "start", "soft@6.service")
    shown = run("systemctl", "show", "--value", "--property=MainPID", "soft@6.service").stdout
    pid = shown.strip()
    cpus, nodes = _allowed(Path(f"/proc/{pid}/status").read_text())
    equal(cpus, "12-13")
    equal(nodes, "0-1,3", "memory nodes without a wall")
    assert "prefer:1" in Path(f"/proc/{pid}/numa_maps").read_text()
    run("systemctl", "stop", "soft@6.service")


@check
def ordinary_user_can_look() -> None:
    """An unprivileged user gets full answers from the reading commands."""
    user = ("runuser", "-u", "worker", "--")
    mine = json.loads(run("provision", "topology", "--json").stdout)
    equal(json.loads(run(*user, "provision", "topology", "--json").stdout), mine)
    run(*user, "provision", "plan", *_LOCALITY)


@check(needs=["units_pass_systemds_parser"])
def plan_is_refused_after_a_core_goes_offline() -> None:
    """A plan holds for the machine that it was made for: not with a core less, and again with it."""
    show = ("provision", "plan", "--plan", f"{_OUT}/plan.json")
    run(*show)
    online = Path("/sys/devices/system/cpu/cpu19/online")
    online.write_text("0")
    done = run(*show, status=1)
    assert "is for another machine" in done.stderr, done.stderr
    online.write_text("1")
    run(*show)
