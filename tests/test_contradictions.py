"""Captures that contradict themselves: an error that names the file, or a note; never silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from provisioner.discovery import discover
from provisioner.errors import ProblemsError, TopologyError
from provisioner.facts import build_tree
from provisioner.facts.values import HostFacts
from provisioner.oddities import find_oddities
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.root import MemoryRoot
from provisioner.samples import read_sample
from provisioner.topology import Machine
from tests.hosts import note_codes
from tests.machines import machine_names, read_machine
from tests.test_agreement import REFUSED

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
# Two packages of 32 cores, whose SMT siblings are 64 apart.
FACTS = read_sample("uneven-5-3")


def changed(files: Mapping[str, str], facts: HostFacts = FACTS) -> MemoryRoot:
    """The sample with other texts in some files."""
    tree = build_tree(facts)
    assert files.keys() <= tree.files.keys()
    return MemoryRoot("made", {**tree.files, **files}, tree.links)


def card_file(name: str) -> str:
    """The path of a file of the first card."""
    tree = build_tree(FACTS)
    address = discover(tree).accelerators[0].name
    real = tree.resolve(f"sys/bus/pci/devices/{address}")
    return f"{real}/{name}"


@pytest.mark.parametrize(
    "files, named, found",
    [
        (
            {f"{NODE}/node1/cpulist": "31-63,96-127\n"},
            f"{NODE}/node1/cpulist",
            "CPU 31 is on node 1 and on node 0",
        ),
        (
            {f"{CPU}/cpu64/topology/core_cpus_list": "64\n"},
            f"{CPU}/cpu64/topology",
            "core_cpus_list is '64', and that of CPU 0 is '0,64'",
        ),
        (
            {f"{CPU}/cpu64/topology/core_cpus_list": "1,64\n"},
            f"{CPU}/cpu64/topology",
            "core_cpus_list is '1,64', and that of CPU 0 is '0,64'",
        ),
        (
            {f"{CPU}/cpu1/topology/core_cpus_list": "0-1,64\n"},
            f"{CPU}/cpu1/topology",
            "CPU 0 is also in the group of CPU 0",
        ),
        (
            {f"{CPU}/cpu95/topology/package_cpus_list": "0-95\n"},
            f"{CPU}/cpu95/topology",
            "package_cpus_list is '0-95', and that of CPU 0 is '0-31,64-95'",
        ),
        (
            {f"{CPU}/cpu95/topology/physical_package_id": "1\n"},
            f"{CPU}/cpu95/topology",
            "the number of its group in package_cpus_list is 1, and that of CPU 0 in the same group is 0",
        ),
        (
            {f"{NODE}/node0/distance": "10\n"},
            f"{NODE}/node0/distance",
            "has 1 numbers: expected 2",
        ),
        (
            {f"{CPU}/offline": "5\n"},
            f"{CPU}/offline",
            "CPUs 5 are in it and in online",
        ),
        (
            {f"{CPU}/possible": "0-126\n"},
            f"{CPU}/possible",
            "CPUs 127 are online and not in it",
        ),
        (
            {f"{NODE}/node0/cpulist": "0-31,64-94\n", f"{NODE}/node1/cpulist": "32-63,95-127\n"},
            f"{CPU}/cpu95",
            "CPU 95 is on NUMA node 1 and its SMT sibling 31 on NUMA node 0",
        ),
    ],
)
def test_refused(files: Mapping[str, str], named: str, found: str) -> None:
    """A contradiction that a plan would rest on is refused, with the file and what else was said."""
    with pytest.raises(TopologyError) as caught:
        discover(changed(files))
    assert caught.value.message.startswith(f"made:/{named}")
    assert found in caught.value.message


def test_last_level_cache_that_is_not_mutual() -> None:
    """The last CPU below a cache has to name the same CPUs as the first."""
    llc = {row.id: row.llc for row in discover(build_tree(FACTS)).cpus}
    last = max(cpu for cpu, first in llc.items() if first == 0)
    path = f"{CPU}/cpu{last}/cache/index3/shared_cpu_list"
    with pytest.raises(TopologyError, match=rf"cpu{last}/topology: cache/\*/shared_cpu_list is"):
        discover(changed({path: f"{last}\n"}))


def test_siblings_in_two_packages() -> None:
    """SMT siblings of which each is in a package of its own are refused."""
    one, other = FACTS.packages
    files = {}
    for package, number, cpus in ((one, 0, "0-63"), (other, 1, "64-127")):
        for cpu in range(64 * number, 64 * number + 64):
            files[f"{CPU}/cpu{cpu}/topology/package_cpus_list"] = f"{cpus}\n"
            files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = f"{package.id}\n"
    with pytest.raises(
        TopologyError, match="CPU 64 is in package 1 and its SMT sibling 0 in package 0"
    ):
        discover(changed(files))


def test_card_on_a_node_that_is_not_there() -> None:
    """A card on a node that does not exist has no place: the plan is refused and names card and nodes."""
    machine = discover(changed({card_file("numa_node"): "7\n"}))
    with pytest.raises(ProblemsError) as caught:
        make_plan(machine, PlacementRequest())
    assert [one.code for one in caught.value.problems] == ["no_such_node"]
    assert "its numa_node is 7, and there is no such node: the machine has 0-1" in str(caught.value)


def oddity_of(machine: Machine, text: str) -> None:
    """Checks that one of the machine's notes, and so of its plan's, has a text."""
    assert [note for note in find_oddities(machine) if text in note.message] != []
    assert "machine" in note_codes(make_plan(machine, PlacementRequest()))


def test_card_memory_on_a_node_that_is_not_there() -> None:
    """A driver's memory node that is not online is told."""
    first, *rest = FACTS.cards
    tree = build_tree(replace(FACTS, cards=(replace(first, model="made"), *rest)))
    folder = f"proc/driver/nvidia/gpus/{first.address}"
    files = {**tree.files, f"{folder}/numa_status": "Node: 9\nStatus: online\n"}
    oddity_of(
        discover(MemoryRoot("made", files, tree.links)),
        "says that NUMA nodes 9 are its cards' memory, and there are none",
    )


@pytest.mark.parametrize(
    "files, found",
    [
        ({f"{NODE}/has_memory": "0\n"}, "and no memory by the nodes' has_memory"),
        (
            {f"{NODE}/node1/meminfo": "Node 1 MemTotal: 0 kB\n"},
            "NUMA node 1 has 0 bytes by its meminfo, and some memory",
        ),
    ],
)
def test_memory_that_two_files_say_differently(files: Mapping[str, str], found: str) -> None:
    """Which file is believed about a node's memory is told."""
    oddity_of(discover(changed(files)), found)


def test_node_and_local_cpus_that_differ() -> None:
    """A card whose numa_node and local_cpulist are of different nodes is told, with what would settle it."""
    machine = discover(changed({card_file("local_cpulist"): "32-63,96-127\n"}))
    (note,) = [one for one in find_oddities(machine) if one.code == "contradicting_locality"]
    assert "says NUMA node 0 by its numa_node and CPUs 32-63,96-127" in note.message
    assert "[locality]" in note.hint
    assert "contradicting_locality" in note_codes(make_plan(machine, PlacementRequest()))


def test_card_twice_in_the_drivers_folder() -> None:
    """A card that the driver's folder names with four and with eight digits is one card."""
    tree = build_tree(FACTS)
    address = FACTS.cards[0].address
    path = f"proc/driver/nvidia/gpus/{address}/information"
    files = {**tree.files, path.replace("gpus/", "gpus/0000"): tree.files[path]}
    assert len(discover(MemoryRoot("made", files, tree.links)).accelerators) == len(FACTS.cards)


@pytest.mark.parametrize("name", [one for one in machine_names() if one not in REFUSED] or ["none"])
def test_recorded_machines_contradict_nothing(name: str) -> None:
    """No real machine is told of a contradiction."""
    notes = find_oddities(discover(read_machine(name)))
    told = [
        note for note in notes if "believed" in note.message or "there are none" in note.message
    ]
    assert told == []


def test_silence_is_no_contradiction() -> None:
    """A CPU without files of its own, as in what an older version recorded, is where others say it is."""
    tree = build_tree(FACTS)
    files = {
        path: text
        for path, text in tree.files.items()
        if not path.startswith((f"{CPU}/cpu95/topology/", f"{CPU}/cpu95/cache/"))
    }
    assert len(files) < len(tree.files)
    assert discover(MemoryRoot("made", files, tree.links)).cpus == discover(tree).cpus
