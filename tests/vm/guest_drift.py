"""Checks of what systemd accepts and does not enforce, of drift and of its repair: see test_drift.py.

Each puts a wrong value in, sees systemd call the slice active, sees verify exit with status 3 and name
what is wrong, and mends it.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .guest import check, equal, machine, read, run, until
from .guest_live import (
    CGROUPS,
    UNITS,
    apply,
    changes,
    codes,
    files,
    granted,
    group,
    provision,
    ranks,
    system_sets,
    verify,
    write_inputs,
)

_SLICE = "provision-rank1.slice"
_CONFIG = """\
[placement]
confine = true
[worker]
command = ["/usr/bin/python3", "/run/hold.py"]
"""
_before: dict[str, object] = {}


def _drifts(expected: str, *, subject: str = _SLICE, active: bool = True) -> dict[str, Any]:
    """That verify exits with status 3 and names what is wrong, while systemd calls the slice active."""
    state = run("systemctl", "is-active", _SLICE, status=None).stdout.strip()
    equal(state == "active", active, f"systemd's word on {_SLICE}: {state}")
    report = verify(status=3)
    found = {(one["code"], one["subject"]) for one in report["findings"]}
    assert (expected, subject) in found, (expected, found)
    return report


def _mends(*options: str) -> None:
    """That apply puts it right, by its own read-back and by the kernel's files."""
    said = apply(*options).stdout
    assert "read back from the kernel" in said or "is in force already" in said, said
    for rank in ranks():
        equal(granted(rank["slice"]), (rank["cpus"], rank["memory_nodes"]), rank["slice"])


@contextmanager
def _drop_in(text: str, unit: str = _SLICE, name: str = "60-foreign.conf") -> Iterator[Path]:
    """A drop-in of someone else's, which systemd has read and the slice has been restarted with."""
    path = UNITS / f"{unit}.d" / name
    made = not path.parent.exists()
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    try:
        run("systemctl", "daemon-reload")
        run("systemctl", "restart", _SLICE)
        yield path
    finally:
        path.unlink()
        if made:
            path.parent.rmdir()


def _set(*values: str, unit: str = _SLICE, lasting: bool = False) -> None:
    run("systemctl", "set-property", *(() if lasting else ("--runtime",)), unit, *values)


def _revert(unit: str = _SLICE) -> None:
    """Removes what set-property left, and nothing of ours: systemctl revert would take that too."""
    for top in ("/etc", "/run"):
        folder = Path(top, "systemd/system.control", f"{unit}.d")
        for path in folder.glob("*.conf"):
            path.unlink()
        if folder.exists():
            folder.rmdir()
        if folder.parent.exists() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


@check(seconds=240)
def in_force() -> None:
    """A plan is in force to begin with."""
    write_inputs(_CONFIG)
    _before["files"], _before["sets"] = files(), system_sets()
    apply("--boot-check", "--verify-timer")
    equal(codes(verify()), set())


def _trap(value: str, expected: str, *more: str) -> None:
    """A wrong value by a drop-in that merges, as an operator's file would."""
    with _drop_in(f"[Slice]\n{value}\n"):
        report = _drifts(expected)
        for code in more:
            assert code in codes(report), (code, codes(report))
        assert "foreign_drop_in" in codes(report)
        # And apply does not write over it, nor around it, but names it.
        done = apply(status=1)
        assert "60-foreign.conf would merge" in done.stderr, done.stderr
    _mends()


@check(needs=["in_force"], seconds=300)
def cpu_beyond_the_machine() -> None:
    """A CPU that the kernel can't have makes it reject the whole set: active, and unrestricted."""
    _trap("AllowedCPUs=4000", "configured_cpus", "kernel_cpus")


@check(needs=["in_force"], seconds=300)
def index_too_large() -> None:
    """From 8192 on systemd drops the whole assignment."""
    _trap("AllowedCPUs=\nAllowedCPUs=9000", "configured_cpus", "effective_cpus")


@check(needs=["in_force"], seconds=300)
def reversed_and_half_written() -> None:
    """A reversed range and a half-written one count as unset: active, and unrestricted."""
    for value in ("3-1", "0-"):
        _trap(f"AllowedCPUs=\nAllowedCPUs={value}", "configured_cpus", "effective_cpus")


@check(needs=["in_force"], seconds=300)
def merged_assignments() -> None:
    """Assignments of two files merge, so that a drop-in adds CPUs."""
    _trap("AllowedCPUs=6-7", "configured_cpus", "effective_cpus")


@check(needs=["in_force"], seconds=300)
def memory_node_beyond_the_machine() -> None:
    """A memory node that can't be is rejected by the kernel: no wall."""
    _trap("AllowedMemoryNodes=60", "configured_nodes")


@check(needs=["in_force"], seconds=300)
def memory_node_without_memory() -> None:
    """A node without memory as the only one falls back to all nodes."""
    _trap("AllowedMemoryNodes=\nAllowedMemoryNodes=2", "effective_nodes", "configured_nodes")


@check(needs=["in_force"], seconds=300)
def prefix_drop_in() -> None:
    """A drop-in for all of a prefix merges into every rank."""
    with _drop_in("[Slice]\nAllowedCPUs=6-7\n", unit="provision-.slice"):
        _drifts("foreign_drop_in")
        done = apply(status=1)
        assert "provision-.slice.d/60-foreign.conf would merge" in done.stderr, done.stderr
    _mends()


@check(needs=["in_force"], seconds=300)
def disabled_controller() -> None:
    """DisableControllers=cpuset on the slice above leaves the ranks unrestricted without a word."""
    with _drop_in("[Slice]\nDisableControllers=cpuset\n", unit="provision.slice"):
        run("systemctl", "stop", "provision.slice")
        run("systemctl", "start", _SLICE)
        _drifts("no_controller")
        done = apply(status=1)
        assert "DisableControllers=cpuset" in done.stderr, done.stderr
    run("systemctl", "daemon-reload")
    run("systemctl", "stop", "provision.slice")
    _mends()


@check(needs=["in_force"], seconds=300)
def set_property_by_someone() -> None:
    """Set-property of someone else is named, until the next boot or for good, and apply names it too."""
    for lasting in (False, True):
        _set("AllowedCPUs=6-7", lasting=lasting)
        report = _drifts("foreign_drop_in")
        assert {"configured_cpus", "effective_cpus"} <= codes(report), codes(report)
        done = apply(status=1)
        assert "system.control" in done.stderr, done.stderr
        _revert()
        _mends()


@check(needs=["in_force"], seconds=300)
def unset_does_not_lift() -> None:
    """An unset property on a slice with a worker in it: whatever the kernel kept, verify names it."""
    worker = subprocess.Popen(["provision", "run", "--rank", "1", "--", "sleep", "600"])
    until(lambda: read(str(group(_SLICE) / "cgroup.events")).startswith("populated 1"), "worker")
    _set("AllowedCPUs=")
    _drifts("configured_cpus")
    _revert()
    _mends()
    equal(worker.poll(), None)
    worker.terminate()
    worker.wait(30)


@check(needs=["in_force"], seconds=300)
def disjoint_from_the_parent() -> None:
    """A parent that has none of a rank's CPUs hands it the whole of its own, silently."""
    _set("AllowedCPUs=6-7", unit="provision.slice")
    report = _drifts("effective_cpus")
    assert "foreign_drop_in" in codes(report)
    _revert("provision.slice")
    _mends()


@check(needs=["in_force"], seconds=300)
def edited_file() -> None:
    """An edited unit file is named, whether or not a reload has brought it into force."""
    path = UNITS / _SLICE
    path.write_text(path.read_text().replace("AllowedCPUs=2-3", "AllowedCPUs=0-3"))
    report = _drifts("file_changed", subject=str(path))
    assert "needs_reload" in codes(report), codes(report)
    run("systemctl", "daemon-reload")
    time.sleep(1)
    report = _drifts("file_changed", subject=str(path))
    assert "configured_cpus" in codes(report), codes(report)
    _mends()


@check(needs=["in_force"], seconds=300)
def removed_file() -> None:
    """A unit file that is gone leaves the slice active and loaded: verify names the file."""
    path = UNITS / _SLICE
    path.unlink()
    run("systemctl", "daemon-reload")
    _drifts("file_missing", subject=str(path))
    _mends()


@check(needs=["in_force"], seconds=300)
def stopped_slice() -> None:
    """A slice that was stopped has no cgroup and holds nothing."""
    run("systemctl", "stop", _SLICE)
    report = _drifts("not_active", active=False)
    assert "no_cgroup" in codes(report), codes(report)
    _mends()


@check(needs=["in_force"], seconds=300)
def written_by_hand() -> None:
    """What someone writes into the cgroup itself is named, though systemd shows the plan's value."""
    (group(_SLICE) / "cpuset.cpus").write_text("6-7")
    report = _drifts("kernel_cpus")
    assert "configured_cpus" not in codes(report), codes(report)
    _mends()


@check(needs=["in_force"], seconds=300)
def invalid_partition() -> None:
    """A partition that is not valid is named by the kernel's reason."""
    (group(_SLICE) / "cpuset.cpus.partition").write_text("isolated")
    report = _drifts("partition")
    assert any("invalid" in one["message"] for one in report["findings"]), report
    (group(_SLICE) / "cpuset.cpus.partition").write_text("member")
    _mends()


@check(needs=["in_force"], seconds=300)
def overlapping_slice() -> None:
    """Another slice that was given a rank's CPUs is named; siblings may overlap silently."""
    run("systemd-run", "--slice=other.slice", "--unit=other-worker", "sleep", "600")
    _set("AllowedCPUs=0-3", unit="other.slice")
    report = _drifts("overlap")
    assert any("/other.slice" in one["message"] for one in report["findings"]), report
    assert any(one["code"] == "unconfined" for one in report["notes"]), report
    run("systemctl", "stop", "other-worker", "other.slice")
    _revert("other.slice")
    run("systemctl", "daemon-reload")
    _mends()


@check(needs=["in_force"], seconds=300)
def unplugged_cpu() -> None:
    """A CPU that went offline is named, partly offline and wholly, where the kernel hands out its parent's."""
    online = [Path(f"/sys/devices/system/cpu/cpu{number}/online") for number in (2, 3)]
    online[1].write_text("0")
    _drifts("offline_cpus")
    shown = provision("verify", status=3).stdout
    assert "offline_cpus: provision-rank1.slice: CPUs 3 are offline: planned 2-3" in shown, shown
    assert "DIFFERS" in shown, shown
    done = apply("--plan", "/etc/provision/plan.json", status=None)
    equal(done.returncode, 2)  # --plan and --config exclude each other
    done = provision("apply", "--yes", "--plan", "/etc/provision/plan.json", status=1)
    assert "is for another machine" in done.stderr, done.stderr
    online[0].write_text("0")
    report = _drifts("effective_cpus")
    assert "machine_changed" in codes(report), codes(report)
    for path in online:
        path.write_text("1")
    _mends()


@check(needs=["in_force"], seconds=300)
def process_from_elsewhere() -> None:
    """A process that was moved in has its earlier memory elsewhere, and a pinned one is noted."""
    holder = subprocess.Popen(
        [
            *("systemd-run", "--quiet", "--scope", "--slice=other.slice", "numactl", "--membind=1"),
            *("taskset", "-c", "6", "python3", "/run/hold.py"),
        ],
        env={"PATH": "/usr/bin:/bin", "HOLD_NAME": "moved"},
    )
    until(Path("/run/held-moved").exists, "the process", 60)
    inside = subprocess.Popen(["provision", "run", "--rank", "1", "--", "sleep", "600"])
    until(lambda: list(group(_SLICE).glob("*.scope/cgroup.procs")), "the scope")
    scope = next(group(_SLICE).glob("*.scope"))
    # As a container runtime moves processes, and since the move the nodes are those of the slice.
    Path(scope, "cgroup.procs").write_text(str(holder.pid))
    time.sleep(0.5)
    report = verify(status=None)
    print(report["findings"], report["notes"])
    own = report["ranks"][1]
    equal(own["processes"], 2)
    run("taskset", "-pc", "2", str(inside.pid))
    report = verify(status=None)
    narrowed = [one for one in report["notes"] if one["code"] == "narrowed"]
    assert any(str(inside.pid) in one["message"] for one in narrowed), report["notes"]
    for process in (holder, inside):
        process.terminate()
        process.wait(30)
    run("systemctl", "stop", "other.slice")
    _mends()


@check(needs=["in_force"], seconds=300)
def unconfined_system() -> None:
    """A system slice that someone let out is named."""
    _set("AllowedCPUs=0-9", unit="system.slice")
    report = _drifts("not_confined", subject="system.slice")
    assert "foreign_drop_in" in codes(report), codes(report)
    _revert("system.slice")
    _mends()


@check(needs=["in_force"], seconds=300)
def nothing_runs_in_the_wrong_place() -> None:
    """Wrapper and run refuse to start where the kernel does not grant what is planned."""
    _set("AllowedCPUs=6-7")
    for command in (
        ("provision", "run", "--rank", "1", "--"),
        ("provision", "run", "--rank", "1", "--service", "--"),
        ("provision-run", "1"),
    ):
        done = run(*command, "true", status=125)
        assert "provision verify" in done.stderr, done.stderr
        assert "6-7" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
    provision("launch", "--ranks", "1", "--", "sleep", "600", status=125)
    _revert()
    _mends()


@check(needs=["in_force"], seconds=300)
def boot_check_keeps_workers_away() -> None:
    """With the boot-time check no slice starts on a machine that is not the plan's, and the journal says why."""
    run("systemctl", "is-active", "provision-check.service")
    run("systemctl", "stop", "provision.slice", "provision-check.service")
    online = Path("/sys/devices/system/cpu/cpu3/online")
    # In the first minutes of a boot the drivers are waited for.
    until(lambda: float(read("/proc/uptime").split()[0]) > 180, "the machine to be up", 200)
    online.write_text("0")
    done = run("systemctl", "start", "provision@1.service", status=None)
    assert done.returncode, "it started"
    done = run("provision-run", "0", "true", status=None)
    assert done.returncode, "it started"
    log = run("journalctl", "-b", "-u", "provision-check", "-o", "cat", "--no-pager").stdout
    assert "this machine is not the one that the plan was made for" in log, log
    online.write_text("1")
    run("systemctl", "start", "provision@1.service")
    run("systemctl", "stop", "provision@1.service")
    _mends()


@check(needs=["in_force"], seconds=300)
def timer_logs_drift() -> None:
    """The timed verify fails on drift, and its lines are in the journal."""
    run("systemctl", "is-active", "provision-verify.timer")
    run("systemctl", "start", "provision-verify.service")
    (group(_SLICE) / "cpuset.cpus").write_text("6-7")
    done = run("systemctl", "start", "provision-verify.service", status=None)
    assert done.returncode, "verify passed"
    log = run(
        *("journalctl", "-b", "-u", "provision-verify", "-o", "cat", "--no-pager", "-p", "warning")
    ).stdout
    assert "kernel_cpus: provision-rank1.slice" in log, log
    run("systemctl", "reset-failed", "provision-verify.service")
    _mends()


@check(needs=["in_force"], seconds=300)
def what_speaks_against_it() -> None:
    """Everything that speaks against an apply is named at once, and nothing is changed."""
    before = files()
    foreign = UNITS / "other.slice"
    foreign.write_text("[Slice]\n")
    Path("/etc/systemd/system/other-rank0.slice").symlink_to("/dev/null")
    # All of the node but a little is needed, and more than that is taken, wherever the system's own pages lie.
    total = re.search(r"MemTotal: *([0-9]+) kB", read("/sys/devices/system/node/node0/meminfo"))
    assert total is not None
    need = int(total[1]) * 1024 - (32 << 20)
    Path("/run/other.toml").write_text(
        f'[placement]\nname = "other"\nmemory_need = {need // 3}\ndevices = [0, 1, 2]\n'
    )
    taken = "import time; taken = b'x' * (96 << 20); print('taken', flush=True); time.sleep(600)"
    with subprocess.Popen(
        ["numactl", "--membind=0", "python3", "-c", taken], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        equal(holder.stdout.readline(), "taken\n")
        done = provision("apply", "--yes", "--config", "/run/other.toml", status=1)
        holder.kill()
    for words in (
        "/etc/systemd/system/other.slice: was not made by provision",
        "/etc/systemd/system/other-rank0.slice: is a link to '/dev/null'",
        "its ranks need",
    ):
        assert words in done.stderr, (words, done.stderr)
    foreign.unlink()
    Path("/etc/systemd/system/other-rank0.slice").unlink()
    equal(changes(before), [])


@check(needs=["in_force"], seconds=300)
def containers_keep_their_gpus() -> None:
    """While containers would lose their GPUs by a reload, apply refuses, and transient or force go on."""
    provision("undo")
    run("systemd-run", "--slice=system.slice", "--unit=docker-0123abcd.scope", "--scope", "true")
    holder = subprocess.Popen(
        ["systemd-run", "--scope", "--unit=docker-4567abcd.scope", "sleep", "600"]
    )
    until(
        lambda: run("systemctl", "is-active", "docker-4567abcd.scope", status=None).returncode == 0,
        "the container",
    )
    device = Path("/dev/nvidia0")
    had = device.exists()
    if not had:
        run("mknod", str(device), "c", "195", "0")
    try:
        done = apply(status=1)
        assert "a reload may take the GPUs from them" in done.stderr, done.stderr
        apply("--transient")
        provision("undo")
        apply("--force", "--boot-check")
    finally:
        if not had:
            device.unlink()
        holder.terminate()
        holder.wait(30)
    _mends()


@check(needs=["in_force"], seconds=300)
def other_managers_are_named() -> None:
    """A kubelet with the static CPU manager stops apply, one without is noted."""
    Path("/run/systemd/system/kubelet.service").write_text("[Service]\nExecStart=/bin/sleep 600\n")
    run("systemctl", "daemon-reload")
    run("systemctl", "start", "kubelet.service")
    done = apply("--dry-run")
    assert "kubelet.service runs" in done.stdout, done.stdout
    state = Path("/var/lib/kubelet/cpu_manager_state")
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_text('{"policyName":"static","defaultCpuSet":"0-9"}')
    done = apply("--dry-run", status=1)
    assert "static CPU manager" in done.stderr, done.stderr
    state.unlink()
    state.parent.rmdir()
    run("systemctl", "stop", "kubelet.service")
    Path("/run/systemd/system/kubelet.service").unlink()
    run("systemctl", "daemon-reload")


@check(needs=["in_force"], seconds=300)
def slow_reload_is_waited_for() -> None:
    """A reload that takes longer than a caller's patience is waited for, and apply still proves its work."""
    generators = Path("/etc/systemd/system-generators")
    had = generators.exists()
    generators.mkdir(exist_ok=True)
    slow = generators / "slow"
    slow.write_text("#!/bin/sh\nsleep 6\n")
    slow.chmod(0o755)
    try:
        path = UNITS / _SLICE
        path.write_text(path.read_text() + "# edited\n")
        provision(
            *("apply", "--yes", "--config", "/run/provision.toml"),
            env={"SYSTEMD_BUS_TIMEOUT": "2s"},
        )
        equal(codes(verify()), set())
    finally:
        slow.unlink()
        if not had:
            generators.rmdir()


@check(needs=["in_force"], seconds=300)
def failing_apply_goes_back() -> None:
    """An apply that fails half way restores files and cgroups, and says why and that it did."""
    before, sets = files(), system_sets()
    # systemd is not told by a file that it can't open: the wrapper's folder is read-only.
    run("mount", "--bind", "-o", "ro", "/usr/local/bin", "/usr/local/bin")
    run("mount", "-o", "remount,ro,bind", "/usr/local/bin")
    try:
        text = Path("/run/provision.toml").read_text()
        write_inputs(text.replace("confine = true", 'confine = true\nname = "second"'))
        done = apply(status=1)
        assert "-run: can't be written: Read-only file system" in done.stderr, done.stderr
        assert "what was before is in force again" in done.stderr, done.stderr
        write_inputs(text)
    finally:
        run("umount", "/usr/local/bin")
    equal(changes(before), [])
    equal(system_sets(), sets)
    equal(codes(verify()), set())


@check(needs=["in_force"], seconds=300)
def undo_after_all_of_it() -> None:
    """After all the drift and repair undo leaves files and effective sets as they were at first."""
    Path("/etc/systemd/system/provision.slice.d").mkdir(exist_ok=True)
    own = Path("/etc/systemd/system/provision.slice.d/90-mine.conf")
    own.write_text("[Slice]\nMemoryHigh=90%\n")
    run("systemctl", "daemon-reload")
    equal(codes(verify()), set())  # it says nothing about a cpuset
    provision("undo")
    equal(own.read_text(), "[Slice]\nMemoryHigh=90%\n")
    own.unlink()
    own.parent.rmdir()
    equal(changes(_before["files"]), [])
    equal(system_sets(), _before["sets"])
    assert machine()["suite"]
    assert (CGROUPS / "system.slice").exists()
