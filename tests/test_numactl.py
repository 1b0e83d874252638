"""What `numactl -H` prints, held against the machine."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.comparison import Comparison
from provisioner.errors import InputError, ParseError
from provisioner.idset import CpuSet
from provisioner.numactl import compare_numactl, parse_numactl
from provisioner.topology import Machine
from tests.hosts import make_host

MACHINE = make_host(
    {0: "0-3,8-11", 1: "4-7,12-15", 2: ""},
    [0, 1],
    stride=8,
    memory={0: 64, 1: 64, 2: 16},
    distances={(0, 1): 21, (0, 2): 17, (1, 2): 28},
)


def numactl(machine: Machine, **changed: str) -> str:
    """What numactl prints of a machine, with lines replaced: {'node 1 size': '1 MB'} by a key 'node_1_size'."""
    lines = [f"available: {len(machine.nodes)} nodes ({machine.node_ids})"]
    for node in machine.nodes:
        mib = (node.memory_bytes or 0) >> 20
        cpus = " ".join(str(cpu) for cpu in node.cpus)
        lines += [
            f"node {node.id} cpus: {changed.get(f'node_{node.id}_cpus', cpus)}",
            f"node {node.id} size: {changed.get(f'node_{node.id}_size', f'{mib} MB')}",
            f"node {node.id} free: {mib // 2} MB",
        ]
    lines += ["node distances:", "node   " + "   ".join(str(node.id) for node in machine.nodes)]
    for node in machine.nodes:
        row = "  ".join(str(gap) for gap in (node.distances or {}).values())
        lines.append(f"  {node.id}:  {changed.get(f'row_{node.id}', row)} ")
    return "\n".join(lines) + "\n"


def compare(text: str) -> Comparison:
    """The comparison with MACHINE."""
    return compare_numactl(MACHINE, text, "numactl.txt")


def test_the_same_machine_agrees() -> None:
    """Every fact is counted: the nodes, and of each its CPUs, its size and its distances."""
    found = compare(numactl(MACHINE))
    assert (found.facts, found.agreed) == (1 + 3 * (1 + 1 + 3),) * 2
    assert (found.explained, found.unsaid, found.differences) == ((), (), ())


@pytest.mark.parametrize(
    "changed, code, message",
    [
        (
            {"node_1_cpus": "4 5 6 7 12 13 14 16"},
            "numactl_cpus",
            "numactl.txt: node 1 has CPUs 4-7,12-14,16, and the kernel's files here say 4-7,12-15.",
        ),
        (
            {"node_2_size": "8192 MB"},
            "numactl_memory",
            "numactl.txt: node 2 has 8192 MiB, and the kernel's files here say 16384 MiB.",
        ),
        (
            {"row_0": "10 31 17"},
            "numactl_distance",
            "numactl.txt: the distance from node 0 to 1 is 31, and the kernel's files here say 21.",
        ),
    ],
)
def test_a_difference_is_named(changed: dict[str, str], code: str, message: str) -> None:
    """What they say and what the machine says stand in one sentence."""
    (note,) = compare(numactl(MACHINE, **changed)).differences
    assert (note.code, note.message) == (code, message)


def test_other_nodes_are_a_difference() -> None:
    """A node more or fewer is one."""
    smaller = make_host({0: "0-3,8-11", 1: "4-7,12-15"}, [0], stride=8, distances={(0, 1): 21})
    (note,) = compare(numactl(smaller)).differences
    assert (note.code, note.message[:33]) == ("numactl_nodes", "numactl.txt has NUMA nodes 0-1, a")


def test_fewer_cpus_are_the_callers_cpuset() -> None:
    """A part of a node's CPUs is explained, and is no difference."""
    found = compare(numactl(MACHINE, node_0_cpus="0 1"))
    assert found.differences == ()
    assert found.agreed == found.facts - 1
    assert found.explained == (
        "it shows a part of the CPUs of nodes 0: those of its caller's cpuset",
    )


def test_a_node_that_lost_all_its_cpus_is_a_difference() -> None:
    """No cpuset takes all of a node's CPUs from what numactl prints."""
    (note,) = compare(numactl(MACHINE, node_0_cpus="")).differences
    assert note.code == "numactl_cpus"


def test_what_is_partly_missing_is_told() -> None:
    """A size or a row of distances that is not there was not compared, and that is said."""
    text = numactl(MACHINE, node_1_size="<not available>").replace("  0:  10", "  x:  10")
    found = compare(text)
    assert found.unsaid == (
        "memory sizes of NUMA nodes 1 (they are not in numactl.txt)",
        "distances of NUMA nodes 0 (they are not in numactl.txt)",
    )


def test_a_node_without_cpus() -> None:
    """An empty list is a node without CPUs, and ranges are read as well."""
    theirs = parse_numactl("node 0 cpus: 0-3 8-11\nnode 1 cpus:\n")
    assert theirs.cpus == {0: CpuSet.parse_list("0-3,8-11"), 1: CpuSet()}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no line 'node N cpus: ...'"),
        ("No NUMA support available on this system.\n", "says that the system has no NUMA support"),
        ("node 0 cpus: 0 1 2\n3 4\nnode 0 size: 9 MB\n", "is wrapped: the line '3 4' has CPUs"),
        ("available: 2 nodes (0-1)\nnode 0 cpus: 0\n", "is cut: its first line has nodes 0-1"),
        ("node 0 cpus: 0 1\nnode 0 cpus: 2\n", "node 0 is there twice"),
        ("node 0 cpus: 0 x\n", "'0,x' is no CPU list"),
        ("node 0 cpus: 0\nnode   0   1\n  0:  10\n", "the distances of node 0 are 1: expected 2"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    """A text that is not numactl's is named with what is wrong about it."""
    with pytest.raises(InputError) as caught:
        compare(text)
    assert caught.value.message.startswith("numactl.txt: ")
    assert message in caught.value.message


@given(st.text(alphabet="node cpus:size0123456789-, MB\n\t", max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text makes the parser fail otherwise than by saying that it is not its form."""
    with suppress(ParseError):
        parse_numactl(text)
