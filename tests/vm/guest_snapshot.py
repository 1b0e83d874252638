"""Checks of snapshots that are taken on this machine: see test_snapshot.py."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
from pathlib import Path
from typing import Any

from .guest import check, equal, read, run

_OUT = "/run/snapshots"
_UNKNOWN = "10000:01:00.0"
_LOCALITY = ("--locality", f"{_UNKNOWN}=1")


def _take(name: str, *arguments: str, before: tuple[str, ...] = ()) -> str:
    """The path of a snapshot that is taken of this machine."""
    Path(_OUT).mkdir(exist_ok=True)
    Path(_OUT).chmod(0o777)
    path = f"{_OUT}/{name}"
    run(*before, "provision", "snapshot", *arguments, "--output", path)
    return path


def _plan(*arguments: str, before: tuple[str, ...] = ()) -> str:
    return run(*before, "provision", "plan", *_LOCALITY, *arguments).stdout


@check
def plan_is_the_machines() -> None:
    """The plan from a snapshot is this machine's, byte for byte: as JSON, for people, and refused."""
    path = _take("first")
    for form in (("--json",), (), ("--reach", "package", "--json")):
        equal(_plan("--snapshot", path, *form), _plan(*form), f"plan {' '.join(form)}")
    live = run("provision", "plan", status=1).stderr
    equal(run("provision", "plan", "--snapshot", path, status=1).stderr, live, "the refusal")


@check(needs=["plan_is_the_machines"])
def units_are_the_machines() -> None:
    """What is rendered of a snapshot is what is rendered of this machine."""
    run("provision", "render", *_LOCALITY, "--output", f"{_OUT}/units")
    run(
        "provision", "render", *_LOCALITY, "--snapshot", f"{_OUT}/first", "--check", f"{_OUT}/units"
    )


@check(needs=["plan_is_the_machines"])
def topology_is_the_machines_and_foreign() -> None:
    """Only whether it is this system differs between a machine and its snapshot."""
    live: dict[str, Any] = json.loads(run("provision", "topology", "--json").stdout)
    replayed: dict[str, Any] = json.loads(
        run("provision", "topology", "--snapshot", f"{_OUT}/first", "--json").stdout
    )
    equal((live.pop("is_this_system"), replayed.pop("is_this_system")), (True, False))
    equal(replayed, live, "topology")


@check(needs=["plan_is_the_machines"])
def doctor_finds_the_same() -> None:
    """What doctor finds, finds fine and does not know is the same of this machine and of its snapshot."""
    environment = Path("/etc/environment")
    before = environment.read_text() if environment.exists() else None
    environment.write_text("CUDA_DEVICE_ORDER=FASTEST_FIRST\n")
    try:
        path = _take("settings")
        live = json.loads(run("provision", "doctor", *_LOCALITY, "--json").stdout)
    finally:
        if before is None:
            environment.unlink()
        else:
            environment.write_text(before)
    replayed = json.loads(
        run("provision", "doctor", *_LOCALITY, "--snapshot", path, "--json").stdout
    )
    equal((live.pop("is_this_system"), replayed.pop("is_this_system")), (True, False))
    for value in (live, replayed):
        for one in value["checks"]:
            one["why"] = one["why"].replace(f"{path}:/", "/")
    equal(replayed, live, "doctor")
    states = {one["name"]: one["state"] for one in live["checks"]}
    unknown = {name for name, state in states.items() if state == "unknown"}
    equal(unknown, {"locality", "packages", "interrupts"}, "what is not known")
    found = {note["code"] for one in live["checks"] for note in one["notes"]}
    missing = {"cuda_device_order", "isolated_cpus", "small_memory"} - found
    equal(missing, set(), f"what doctor did not find among {found}")


@check(needs=["plan_is_the_machines"])
def same_machine_same_bytes() -> None:
    """A second snapshot, and one of the first, are the first."""
    first = Path(f"{_OUT}/first").read_bytes()
    equal(Path(_take("second")).read_bytes() == first, True, "whether the second is the first")
    again = _take("again", "--snapshot", f"{_OUT}/first")
    equal(Path(again).read_bytes() == first, True, "whether one of it is it")


@check(needs=["plan_is_the_machines"])
def unpacked_it_is_a_root() -> None:
    """Unpacked by tar, a snapshot is read by --root as the machine."""
    with tarfile.open(f"{_OUT}/first") as archive:
        archive.extractall(f"{_OUT}/tree")
    equal(_plan("--root", f"{_OUT}/tree", "--json"), _plan("--json"))


@check(needs=["plan_is_the_machines"])
def it_tells_nothing_of_this_host() -> None:
    """No MAC address, machine id, boot id, host name or card's UUID of this machine is in it."""
    text = gzip.decompress(Path(f"{_OUT}/first").read_bytes()).decode()
    told = [
        read("/proc/sys/kernel/hostname"),
        read("/proc/sys/kernel/random/boot_id"),
        read("/etc/machine-id"),
        *(read(str(path)) for path in Path("/sys/class/net").glob("*/address")),
    ]
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        told += re.findall(r"UUID:\s*(\S+)", path.read_text())
    zeros = "00:00:00:00:00:00"  # the loopback device's
    equal([one for one in told if one and one != zeros and one in text], [])


@check
def own_cgroup_is_the_ceiling() -> None:
    """Taken within a slice, its cpuset is the ceiling within self, by a name that is not the slice's."""
    scope = (
        *("systemd-run", "--scope", "--quiet", "--collect", "--slice=private.slice"),
        *("-p", "AllowedCPUs=0-5", "-p", "AllowedMemoryNodes=0", "--"),
    )
    within = ("--within", "self", "--devices", "0", "--json")
    path = _take("within", before=scope)
    equal(_plan("--snapshot", path, *within), _plan(*within, before=scope))
    assert b"private" not in gzip.decompress(Path(path).read_bytes())


@check
def ordinary_user_can_take_one() -> None:
    """An unprivileged user's snapshot gives the same plan."""
    path = _take("users", before=("runuser", "-u", "worker", "--"))
    equal(_plan("--snapshot", path, "--json"), _plan("--json"))


@check(needs=["plan_is_the_machines"])
def machine_changes_and_its_snapshot_does_not() -> None:
    """After a core goes offline the old snapshot is another machine's, and a new one is this one's."""
    before = _plan("--json")
    online = Path("/sys/devices/system/cpu/cpu7/online")
    online.write_text("0")
    try:
        equal(_plan("--snapshot", f"{_OUT}/first", "--json"), before)
        path = _take("offline")
        equal(_plan("--snapshot", path, "--json"), _plan("--json"))
        assert _plan("--json") != before
    finally:
        online.write_text("1")
