"""Many snapshots planned by one command: groups, what is refused among them, and the bar."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.cli import run_command
from provisioner.errors import ProvisionError
from provisioner.facts import build_tree
from provisioner.fleet import Fleet, plan_hosts
from provisioner.request import PlacementRequest
from provisioner.samples import read_sample
from provisioner.snapshot import take_snapshot
from tests.trees import CARD_IDS, write_tree

Capture = pytest.CaptureFixture[str]
PROVISION = (sys.executable, "-c", "from provisioner.cli import main; main()")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty snapshots: thirty of one kind with memory of different sizes, ten of another."""
    folder = tmp_path_factory.mktemp("hosts")
    kinds = []
    for number in range(3):
        facts = read_sample("uneven-5-3")
        nodes = [
            replace(one, memory_bytes=one.memory_bytes - (number << 20)) for one in facts.nodes
        ]
        kinds.append(take_snapshot(build_tree(replace(facts, nodes=tuple(nodes)))).data)
    kinds.append(take_snapshot(build_tree(read_sample("grace-4gpu"))).data)
    assert len(set(kinds)) == 4
    for number in range(40):
        (folder / f"host{number:02}.tar.gz").write_bytes(kinds[number % 4])
    return folder


def call(capsys: Capture, *arguments: str | Path) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of one command line."""
    status = run_command([str(one) for one in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_hosts_of_one_fingerprint_are_shown_together(capsys: Capture, hosts: Path) -> None:
    """Hosts that differ in memory alone are one group; each group's plan is shown once, as one host's is."""
    status, out, err = call(capsys, "plan", "--snapshot", *sorted(hosts.iterdir()))
    assert (status, err) == (0, "")
    assert out.startswith("40 of 40 hosts planned, in 2 groups of equal fingerprints\n")
    assert "Group 1: 30 hosts, sha256:" in out
    assert (
        f"  {hosts}/host00.tar.gz, {hosts}/host01.tar.gz, {hosts}/host02.tar.gz and 27 more\n"
        in out
    )
    assert "Group 2: 10 hosts, sha256:" in out
    _, alone, _ = call(capsys, "plan", "--snapshot", hosts / "host03.tar.gz")
    assert out.endswith(alone)
    assert "Service provision: 4 ranks" in alone


def test_folder_is_its_files(capsys: Capture, hosts: Path) -> None:
    """A folder stands for the files in it, with the options that one host has."""
    listed = call(capsys, "plan", "--snapshot", *sorted(hosts.iterdir()), "--reserve-cores", "2")
    assert call(capsys, "plan", "--snapshot", hosts, "--reserve-cores", "2") == listed
    assert "Reserved for the system: 0-1," in listed[1]


def test_json_names_every_host(capsys: Capture, hosts: Path) -> None:
    """The JSON has each group with its plan, and each host with its group, in the order of the files."""
    status, out, _ = call(capsys, "plan", "--snapshot", hosts, "--json")
    value = json.loads(out)
    assert (status, value["schema"]) == (0, "provision.fleet/1")
    assert [(one["group"], one["hosts"]) for one in value["groups"]] == [(1, 30), (2, 10)]
    _, alone, _ = call(capsys, "plan", "--snapshot", hosts / "host00.tar.gz", "--json")
    assert value["groups"][0]["plan"] == json.loads(alone)
    assert value["groups"][0]["fingerprint"] == json.loads(alone)["fingerprint"]
    assert [one["file"] for one in value["hosts"]] == [
        str(path) for path in sorted(hosts.iterdir())
    ]
    assert [one["group"] for one in value["hosts"]] == [1, 1, 1, 2] * 10


def test_hosts_with_cards_of_several_vendors(capsys: Capture, tmp_path: Path) -> None:
    """A group's table tells the cards of its vendors apart, as that of one host does."""
    facts = read_sample("uneven-5-3")
    vendor, device, pci_class = CARD_IDS["amd"]
    cards = (
        *facts.cards[:4],
        *(
            replace(card, vendor=vendor, device=device, pci_class=pci_class)
            for card in facts.cards[4:]
        ),
    )
    data = take_snapshot(build_tree(replace(facts, cards=cards))).data
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(data)
    _, out, _ = call(capsys, "plan", "--snapshot", tmp_path / "a", tmp_path / "b")
    _, alone, _ = call(capsys, "plan", "--snapshot", tmp_path / "b")
    assert out.endswith(alone)
    assert "nvidia3" in alone
    assert "amd3" in alone


@pytest.fixture
def with_bad(hosts: Path, tmp_path: Path) -> Path:
    """The same, with five files among them that can't be planned."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for path in hosts.iterdir():
        (folder / path.name).hardlink_to(path)
    (folder / "host05a").write_bytes((hosts / "host05.tar.gz").read_bytes()[:-40])
    (folder / "host05b").write_text("no snapshot\n")
    (folder / "host05c").write_bytes(b"")
    without = replace(read_sample("uneven-5-3"), cards=())
    (folder / "host05d").write_bytes(take_snapshot(build_tree(without)).data)
    (folder / "host05e").symlink_to(folder / "nowhere")
    return folder


def test_bad_files_do_not_stop_the_others(capsys: Capture, with_bad: Path) -> None:
    """What can't be planned is reported by its file, the others are planned, and the status is 1."""
    files = [f"{with_bad}/{name}" for name in sorted(os.listdir(with_bad))]
    status, out, err = call(capsys, "plan", "--snapshot", *files)
    assert status == 1
    assert out.startswith("40 of 45 hosts planned, in 2 groups")
    assert [line for line in err.splitlines() if line.startswith("Error: ")] == [
        f"Error: {with_bad}/host05a: is cut short: it ends within the compressed data",
        f"Error: {with_bad}/host05b: is no snapshot: it is not compressed by gzip",
        f"Error: {with_bad}/host05c: is empty",
        (
            f"Error: {with_bad}/host05d: no accelerator was found: neither a vendor's driver, nor the PCI "
            "bus, nor /dev names one"
        ),
        f"Error: {with_bad}/host05e: can't be read: No such file or directory",
    ]
    status, out, err = call(capsys, "plan", "--snapshot", *files, "--json")
    refused = [one for one in json.loads(out)["hosts"] if one["group"] is None]
    assert (status, err) == (1, "")
    assert [Path(one["file"]).name for one in refused] == [f"host05{letter}" for letter in "abcde"]
    assert [one["problems"][0]["code"] for one in refused] == [
        "unreadable",
        "unreadable",
        "unreadable",
        "no_card",
        "unreadable",
    ]


def test_processes_change_nothing(with_bad: Path) -> None:
    """Three processes give what one gives, in the order of the files."""
    files = [str(path) for path in sorted(with_bad.iterdir())]
    one, three = (
        list(plan_hosts(files, PlacementRequest(), "root", processes=count)) for count in (1, 3)
    )
    assert [host.file for host in one] == files
    assert three == one


def test_stopping_early_ends_the_processes(hosts: Path) -> None:
    """Whoever needs no more of the hosts is left with no process of ours."""
    files = [str(path) for path in sorted(hosts.iterdir())] * 20
    results: Iterator[object] = plan_hosts(files, PlacementRequest(), "root", processes=2)
    next(results)
    assert len(children()) >= 2
    results.close()  # type: ignore[attr-defined]  # a generator
    assert children() == []


def test_killed_process_is_told(hosts: Path) -> None:
    """When the system kills a process, as for memory, that is said, and nothing hangs or stays."""
    files = [str(path) for path in sorted(hosts.iterdir())] * 20
    results = plan_hosts(files, PlacementRequest(), "root", processes=2)
    next(results)
    for child in children():
        os.kill(int(child), signal.SIGKILL)
    with pytest.raises(ProvisionError, match="a process that plans was ended by something else"):
        list(results)
    assert children() == []


def children() -> list[str]:
    """The processes that this one started."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_no_host_at_all(capsys: Capture, tmp_path: Path) -> None:
    """A folder without files, and one that a snapshot was unpacked into, are no folders of snapshots."""
    status, out, err = call(capsys, "plan", "--snapshot", tmp_path)
    assert (status, out) == (2, "")
    assert f"{tmp_path}: is no folder of snapshots: there are no files in it" in err
    write_tree(build_tree(read_sample("uneven-5-3")), tmp_path)
    (tmp_path / "provision-snapshot").touch()
    status, out, err = call(capsys, "plan", "--snapshot", tmp_path)
    assert (status, out) == (2, "")
    assert "there is a machine in it" in err
    assert "--root" in err


def test_groups_are_read_more_than_once(hosts: Path) -> None:
    """What was put aside on disk can be read again, and added to in between."""
    with Fleet() as fleet:
        for host in plan_hosts([f"{hosts}/host00.tar.gz"], PlacementRequest(), "root"):
            fleet.add(host)
        assert len(list(fleet.plans())) == len(list(fleet.plans())) == 1
        for host in plan_hosts([f"{hosts}/host03.tar.gz"], PlacementRequest(), "root"):
            fleet.add(host)
        assert [host.group for host in fleet.hosts()] == [1, 2]
        assert [len(plan.services[0].ranks) for _, plan, _ in fleet.plans()] == [8, 4]


@pytest.mark.parametrize(
    "arguments, found",
    [
        (("plan", "a", "b"), "'a' follows no --snapshot: expected --snapshot FILE FILE..."),
        (("plan", "--root", "/", "a"), "'a' follows no --snapshot"),
        (("plan", "--snapshot", "a", "b", "--plan", "c"), "--plan goes with one machine"),
        (("plan", "--snapshot", "a", "b", "--npu-smi", "c"), "--npu-smi goes with one machine"),
        (
            ("plan", "--snapshot", "a", "b", "--root", "/"),
            "--root and --snapshot exclude each other",
        ),
    ],
)
def test_wrong_usage(capsys: Capture, arguments: tuple[str, ...], found: str) -> None:
    """Wrong usage ends in status 2, before any file is read."""
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert found in err


def test_bar_is_on_a_terminal_alone(hosts: Path) -> None:
    """A terminal shows how far the planning is, on standard error alone; a pipe gets nothing of it."""
    command = (*PROVISION, "plan", "--snapshot", str(hosts))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    ours, theirs = pty.openpty()
    shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, check=True)
    os.close(theirs)
    bar = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert shown.stdout == done.stdout
    assert "Planning" in bar
    assert "100%" in bar
