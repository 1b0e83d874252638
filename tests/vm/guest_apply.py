"""Checks of apply, the ways to start a worker, verify and undo: see test_apply.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from .guest import check, equal, note, run, until
from .guest_live import (
    UNITS,
    allowed,
    apply,
    changes,
    codes,
    files,
    forget,
    granted,
    held,
    provision,
    ranks,
    system_sets,
    verify,
    write_inputs,
)

_before: dict[str, object] = {}
_NUMACTL = ("numactl", "--membind=0")
_USER = ("runuser", "-u", "worker", "--")


@check
def nothing_is_in_force_at_first() -> None:
    """Without an apply the reading commands say so and undo has nothing to do."""
    write_inputs()
    _before["files"] = files()
    _before["sets"] = system_sets()
    done = provision("verify", status=2)
    assert "no plan is in force" in done.stderr, done.stderr
    assert "provision apply" in done.stderr, done.stderr
    done = run("provision", "run", "--rank", "0", "--", "true", status=125)
    assert "no plan is in force" in done.stderr, done.stderr
    equal(provision("undo").stdout, "No plan is in force: nothing to take back.\n")
    equal(changes(_before["files"]), [])


@check
def ordinary_user_is_refused() -> None:
    """An unprivileged user gets a clear refusal from what acts, and nothing is changed."""
    for words in (["apply", "--yes"], ["undo"], ["launch", "--", "true"]):
        done = run(*_USER, "provision", *words, status=1)
        assert "expected root, found user" in done.stderr, done.stderr
        assert "sudo" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
    equal(changes(_before["files"]), [])


@check
def dry_run_changes_nothing() -> None:
    """A dry run shows the files and the cgroups, and leaves the system as it was."""
    done = apply("--dry-run")
    assert "+ /etc/systemd/system/provision-rank0.slice" in done.stdout, done.stdout
    assert "+AllowedCPUs=0-1" in done.stdout, done.stdout
    assert "provision-rank8.slice: CPUs any -> 16-17, memory nodes any -> 1" in done.stdout
    assert "Nothing was changed" in done.stdout
    equal(changes(_before["files"]), [])
    equal(system_sets(), _before["sets"])


@check
def without_a_terminal_it_asks_for_yes() -> None:
    """Where nobody can be asked, apply needs --yes."""
    done = provision("apply", "--config", "/run/provision.toml", status=2)
    assert "--yes" in done.stderr, done.stderr
    equal(changes(_before["files"]), [])


@check(seconds=240)
def apply_brings_the_plan_into_force() -> None:
    """After apply each slice has its planned CPUs and memory nodes, and the system's own are confined."""
    done = run(
        *("provision", "apply", "--config", "/run/provision.toml", "--yes", "--verbose"),
        timeout=200,
    )
    assert "read back from the kernel" in done.stdout, done.stdout
    for rank in ranks():
        equal(granted(rank["slice"]), (rank["cpus"], rank["memory_nodes"]), rank["slice"])
    for name, (cpus, nodes) in system_sets(there=True).items():
        equal(cpus, "18-19", f"CPUs of {name}")
        equal(nodes, "0-1,3", f"memory nodes of {name}")
    report = verify()
    equal(report["ok"], True)
    equal([one["ok"] for one in report["ranks"]], [True] * 9)
    # So that they hold after a boot, whatever is started in them.
    wants = run("systemctl", "show", "--property=Wants", "multi-user.target").stdout
    assert "provision-rank8.slice" in wants, wants
    run(*_USER, "provision", "verify")


@check(needs=["apply_brings_the_plan_into_force"])
def doctor_judges_by_the_plan_in_force() -> None:
    """Without another plan, doctor looks at how the host sits with the one in force; with options, at a new one."""
    done = run(*_USER, "provision", "doctor")
    assert "Judged by the plan in force: 9 ranks" in done.stdout, done.stdout
    done = provision("doctor", "--config", "/run/provision.toml")
    assert "Judged by the plan that provision plan makes: 9 ranks" in done.stdout, done.stdout


@check(needs=["apply_brings_the_plan_into_force"])
def second_apply_changes_nothing() -> None:
    """A second apply says that the plan is in force already and writes no file."""
    before = {path: path.stat().st_mtime_ns for path in UNITS.rglob("*")}
    done = apply()
    assert "in force already (9 ranks): nothing changed" in done.stdout, done.stdout
    equal({path: path.stat().st_mtime_ns for path in UNITS.rglob("*")}, before)


def _await(name: str) -> list[str]:
    """What a worker says, once it holds its memory."""
    until(lambda: held(name), f"what worker {name} says", 90)
    said = held(name)
    assert said is not None
    forget(name)
    return said


def _hold(*command: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, "python3", "/run/hold.py"],
        env=os.environ | {"HOLD_NAME": "way"} | more,
        text=True,
        start_new_session=True,
    )


def _check_way(way: str, rank: dict[str, Any], holder: str = "way") -> int:
    """That a worker started in its slice, and has all of its memory there by verify's word."""
    said = _await(holder)
    equal(said[1:3], [rank["cpus"], rank["memory_nodes"]], f"first instruction by {way}")
    report = verify()
    own = report["ranks"][rank["rank"]]
    equal(own["local_share"], 1.0, f"local share by {way}: {own['anonymous_bytes']}")
    equal(list(own["anonymous_bytes"]), [rank["memory_nodes"]], f"nodes by {way}")
    assert own["anonymous_bytes"][rank["memory_nodes"]] > 24 << 20, own
    note("way", way=way, local=own["local_share"], bytes=own["anonymous_bytes"])
    return int(said[0])


@check(needs=["apply_brings_the_plan_into_force"], seconds=300)
def each_way_starts_in_the_slice() -> None:
    """By wrapper, run, run --service, launch and systemctl a worker starts on its CPUs and all its memory is local."""
    by_rank = ranks()
    for way, number, command in (
        ("wrapper", 1, ("provision-run", "1")),
        ("run", 6, ("provision", "run", "--rank", "6", "--")),
        (
            "run under numactl",
            5,
            ("numactl", "--membind=0", "provision", "run", "--rank", "5", "--"),
        ),
        ("run --service", 7, ("provision", "run", "--rank", "7", "--service", "--")),
    ):
        worker = _hold(*command)
        pid = _check_way(way, by_rank[number])
        if "service" not in way:
            equal(pid, worker.pid, f"process id by {way}")
        worker.terminate()
        equal(worker.wait(30), -signal.SIGTERM if "service" not in way else 143, f"end by {way}")
    run("systemctl", "start", "provision@3.service")
    _check_way("systemctl start provision@3", by_rank[3], "3")
    run("systemctl", "stop", "provision@3.service")


@check(needs=["apply_brings_the_plan_into_force"], seconds=300)
def launch_starts_every_rank() -> None:
    """Launch starts one service a rank, status shows them, and a second launch is refused."""
    done = provision("launch", "-E", "HOLD_MIB=8", "--", "python3", "/run/hold.py")
    equal(done.stdout.count("runs on CPUs"), 9)
    for rank in ranks():
        said = _await(str(rank["rank"]))
        equal(said[1:4], [rank["cpus"], rank["memory_nodes"], "0,1,2,3,4,5,6,7,8"])
        equal(said[4], str(rank["rank"]), "LOCAL_RANK")
    report = verify()
    equal([one["processes"] for one in report["ranks"]], [1] * 9)
    equal([one["local_share"] for one in report["ranks"]], [1.0] * 9)
    status = json.loads(provision("status", "--json").stdout)
    equal(
        [one["units"] for one in status["ranks"]][2],
        [{"name": "provision-rank2.service", "state": "active", "sub_state": "running"}],
    )
    print(provision("status").stdout)
    done = provision("launch", "--", "true", status=2)
    assert "at work already" in done.stderr, done.stderr
    run("systemctl", "stop", "provision-rank*.service")


@check(needs=["apply_brings_the_plan_into_force"], seconds=300)
def launcher_that_forks_its_ranks() -> None:
    """A launcher that forks ranks as torchrun does puts each into its own slice, by wrapper and by run."""
    program = """
import os, subprocess, sys
ways = {0: ["provision-run"], 5: ["provision", "run", "--"]}
workers = []
for rank, way in ways.items():
    env = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "9", "OMP_NUM_THREADS": "1",
                        "HOLD_NAME": f"fork{rank}"}
    workers.append(subprocess.Popen([*way, "python3", "/run/hold.py"], env=env))
for worker in workers:
    worker.wait()
"""
    launcher = subprocess.Popen(["python3", "-c", program], start_new_session=True)
    by_rank = ranks()
    for number in (0, 5):
        said = _await(f"fork{number}")
        equal(said[1:3], [by_rank[number]["cpus"], by_rank[number]["memory_nodes"]])
    report = verify()
    equal([report["ranks"][number]["local_share"] for number in (0, 5)], [1.0, 1.0])
    os.killpg(launcher.pid, signal.SIGTERM)
    launcher.wait(30)


@check(needs=["apply_brings_the_plan_into_force"], seconds=200)
def run_is_the_command() -> None:
    """Exit status, signals, arguments, environment and working directory are the command's own, both ways."""
    for way in ((), ("--service",)):
        start = ("provision", "run", "--rank", "2", *way, "--")
        run(*start, "sh", "-c", "exit 7", status=7)
        done = run(*start, "printf", "%s|", "a b", "$HOME", "x\ny", "%i", "${X}", "%%")
        equal(done.stdout, "a b|$HOME|x\ny|%i|${X}|%%|")
        done = run(*start, "sh", "-c", "cat; pwd; echo err >&2", stdin="in\n")
        equal((done.stdout, done.stderr), (f"in\n{os.getcwd()}\n", "err\n"))
        done = run(*start, "sh", "-c", "kill -9 $$", status=None)
        equal(done.returncode, 137 if way else -9)
        run(*start, "/nonexistent/program", status=127)
        run(*start, "/etc/passwd", status=126)
    mine = run("provision", "run", "--rank", "2", "--", "env", env={"X": "y"}).stdout.splitlines()
    theirs = run("provision-run", "2", "env", env={"X": "y"}).stdout.splitlines()

    def without(lines: list[str]) -> set[str]:
        # What the shell and systemd-run set by themselves.
        return {
            line
            for line in lines
            if not line.startswith(("_=", "INVOCATION_ID=", "PWD=", "OLDPWD=", "SHLVL="))
        }

    equal(without(mine), without(theirs), "environment by run and by the wrapper")
    assert "X=y" in mine
    done = run("provision", "run", "--rank", "9", "--", "true", status=125)
    assert "expected 0 to 8" in done.stderr, done.stderr
    done = run("provision", "run", "--", "true", status=125)
    assert "neither --rank nor LOCAL_RANK" in done.stderr, done.stderr
    done = run(
        "taskset", "-c", "18", "provision", "run", "--rank", "6", "--", "cat", "/proc/self/status"
    )
    assert "Cpus_allowed_list:\t12-13\n" in done.stdout, done.stdout


@check(needs=["apply_brings_the_plan_into_force"])
def ordinary_user_cannot_run() -> None:
    """An unprivileged user's run is refused by systemd, and told so without a traceback."""
    done = run(*_USER, "provision", "run", "--rank", "0", "--", "true", status=125)
    assert "root" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    done = run(*_USER, "provision", "status")
    assert "provision-rank" in done.stdout or "active" in done.stdout, done.stdout


@check(needs=["apply_brings_the_plan_into_force"], seconds=300)
def workers_bound_otherwise_measured() -> None:
    """Beside the slice's 100 %: the share of local memory of workers bound late, by numactl, and unbound."""
    rank = ranks()[6]
    shares: dict[str, float] = {}
    late = (
        "import os, ctypes; early = bytearray(16 << 20); early[::4096] = b'x' * (len(early) // 4096)\n"
        "os.sched_setaffinity(0, {12, 13}); mask = ctypes.c_ulong(2)\n"
        "assert ctypes.CDLL(None).syscall(238, 2, ctypes.byref(mask), 3) == 0\n"
        "exec(open('/run/hold.py').read())"
    )
    # From a shell that runs on node 0, as an operator's may.
    shell = ("systemd-run", "--quiet", "--scope", "--slice=other.slice")
    for way, command in (
        ("provision run", ("provision", "run", "--rank", "6", "--", "python3", "/run/hold.py")),
        ("bound late in process", ("python3", "-c", late)),
        ("numactl", ("numactl", "--physcpubind=12,13", "--membind=1", "python3", "/run/hold.py")),
        ("unbound", ("python3", "/run/hold.py")),
    ):
        # numactl takes what it may use itself for all that there is, and refuses the rest.
        start = () if way == "numactl" else ("taskset", "-c", "0")
        worker = subprocess.Popen(
            [*shell, *start, *command],
            env=os.environ | {"HOLD_NAME": "measured"},
            start_new_session=True,
        )
        said = _await("measured")
        counts = _anonymous(int(said[0]))
        shares[way] = 100 * counts.get(1, 0) / sum(counts.values())
        note("pages", way=way, kib_by_node=counts, local=round(shares[way], 1))
        print(f"{way:24} {shares[way]:5.1f} % local, KiB by node: {counts}", flush=True)
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(30)
    equal(shares["provision run"], 100.0)
    assert shares["bound late in process"] < 90, shares
    assert shares["unbound"] < 10, shares
    assert rank["memory_nodes"] == "1"


def _anonymous(pid: int) -> dict[int, int]:
    """KiB of anonymous memory by node, counted here and not by the project's own parser."""
    found: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        words = line.split()
        if any(word.startswith("file=") for word in words):
            continue
        size = next((int(w.split("=")[1]) for w in words if w.startswith("kernelpagesize_kB=")), 4)
        for word in words:
            if word[0] == "N" and word[1:2].isdigit():
                node, count = word[1:].split("=")
                found[int(node)] = found.get(int(node), 0) + int(count) * size
    return found


@check(needs=["apply_brings_the_plan_into_force"], seconds=300)
def running_workers_keep_their_ids() -> None:
    """A second apply with other CPUs moves running workers and kills none."""
    workers = [
        _hold("provision", "run", "--rank", str(rank), "--", HOLD_NAME=f"keep{rank}")
        for rank in (1, 6)
    ]
    for number in (1, 6):
        _await(f"keep{number}")
    other = (
        Path("/run/provision.toml")
        .read_text()
        .replace("confine = true", 'confine = true\nsmt = "first"')
    )
    write_inputs(other)
    done = apply()
    print(done.stdout)
    for number, worker in zip((1, 6), workers, strict=True):
        equal(worker.poll(), None, f"worker of rank {number}")
        rank = ranks()[number]
        equal(rank["cpus"], str(2 * number), "the new plan's CPUs")
        equal(allowed(worker.pid), (rank["cpus"], rank["memory_nodes"]))
    write_inputs()
    apply()
    verify()
    for worker in workers:
        equal(allowed(worker.pid)[0].count("-"), 1)
        worker.terminate()
        worker.wait(30)


@check(needs=["apply_brings_the_plan_into_force"], seconds=200)
def memory_of_running_workers_stays() -> None:
    """Other memory nodes for a slice with a worker are refused, with the whole of it named, until told."""
    worker = _hold("provision", "run", "--rank", "2", "--", HOLD_NAME="stay")
    _await("stay")
    text = Path("/run/provision.toml").read_text()
    swapped = '[locality]\n"0000:a3:00.0" = 1\n"0001:05:00.0" = 0'
    write_inputs(text.replace("[locality]", swapped))
    before = files()
    done = apply(status=1)
    assert "provision-rank" in done.stderr, done.stderr
    assert "--migrate-memory" in done.stderr, done.stderr
    equal(changes(before), [])
    equal(allowed(worker.pid), ("4-5", "0"))
    write_inputs(text)
    apply()
    worker.terminate()
    worker.wait(30)


@check(needs=["apply_brings_the_plan_into_force"], seconds=200)
def prometheus_text_is_whole() -> None:
    """The gauges go into a file whole, and say what verify says."""
    provision("verify", "--prometheus", "--output", "/run/textfile/provision.prom")
    text = Path("/run/textfile/provision.prom").read_text()
    assert "\nprovision_verify_ok 1\n" in text, text
    assert 'provision_rank_effective_cpus{service="provision",rank="8"} 2\n' in text, text
    equal(os.listdir("/run/textfile"), ["provision.prom"])


@check(needs=["apply_brings_the_plan_into_force"], seconds=240)
def undo_takes_everything_back() -> None:
    """After undo the files are byte for byte as before, and so are the system's effective sets."""
    worker = _hold("provision", "run", "--rank", "4", "--", HOLD_NAME="left")
    _await("left")
    done = provision("undo", "--verbose")
    assert "still holds processes" in done.stdout, done.stdout
    equal(changes(_before["files"]), [])
    equal(system_sets(), _before["sets"])
    equal(worker.poll(), None, "the worker that ran")
    equal(allowed(worker.pid), ("0-19", "0-1,3"), "what it may use now")
    worker.terminate()
    worker.wait(30)
    equal(provision("undo").stdout, "No plan is in force: nothing to take back.\n")
    # And it stays so when systemd reads everything again.
    run("systemctl", "daemon-reload")
    time.sleep(1)
    equal(system_sets(), _before["sets"])


@check(needs=["undo_takes_everything_back"], seconds=300)
def runtime_and_transient_leave_nothing_behind() -> None:
    """Runtime and transient applies hold as the lasting one does, and undo leaves nothing of them."""
    reloads = _reloads()
    for mode in ("--transient", "--runtime"):
        before = files()
        apply(mode, "--verbose")
        if mode == "--transient":
            equal(_reloads(), reloads, "reloads by a transient apply")
        equal(
            {p for p in files() if p.startswith("/etc")},
            {p for p in before if p.startswith("/etc")},
        )
        for rank in ranks("/run/provision/plan.json"):
            equal(granted(rank["slice"]), (rank["cpus"], rank["memory_nodes"]), rank["slice"])
        equal({sets[0] for sets in system_sets(there=True).values()}, {"18-19"})
        equal(codes(verify()), set())
        done = run("provision", "run", "--rank", "7", "--", "cat", "/proc/self/status")
        assert "Cpus_allowed_list:\t14-15\n" in done.stdout, done.stdout
        done = run("sh", "/run/provision/provision-run", "7", "env")
        assert "PROVISION_PLAN=/run/provision/plan.json" in done.stdout, done.stdout
        assert "in force already" in apply(mode).stdout
        done = apply(status=1)
        assert "provision undo" in done.stderr, done.stderr
        provision("undo", "--verbose")
        equal(changes(before), [], f"files after undo of {mode}")
        equal(system_sets(), _before["sets"], f"sets after undo of {mode}")


def _reloads() -> int:
    done = run(
        "journalctl", "-b", "--no-pager", "-o", "cat", "_PID=1", "--grep=^Reloading", status=None
    )
    return len(done.stdout.splitlines())
