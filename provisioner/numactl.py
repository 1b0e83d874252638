"""What `numactl --hardware` prints, held against a machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from provisioner.comparison import Comparison
from provisioner.errors import InputError, ParseError, shorten
from provisioner.idset import CpuSet, NodeSet
from provisioner.plan import Note
from provisioner.topology import Machine, NumaNode

_CPUS = re.compile(r"node +([0-9]{1,5}) +cpus:(.*)", re.ASCII)
_SIZE = re.compile(r"node +([0-9]{1,5}) +size: +([0-9]{1,12}) +MB", re.ASCII)
_FIRST = re.compile(r"available: [0-9]+ nodes? \(([0-9,-]+)\)", re.ASCII)
_HEAD = re.compile(r"node((?: +[0-9]{1,5})+)", re.ASCII)
_ROW = re.compile(r"([0-9]{1,5}):((?: +[0-9]{1,5})+)", re.ASCII)
_READER = "numactl -H"


class NumactlNodes(NamedTuple):
    """What the text says, by node; a node that it does not name is in none of them."""

    cpus: Mapping[int, CpuSet]
    sizes_mib: Mapping[int, int]  # whole MiB, rounded down
    distances: Mapping[int, Mapping[int, int]]


def parse_numactl(text: str) -> NumactlNodes:
    """The nodes of `numactl --hardware`.

    Raises ParseError if the text names no node's CPUs, a node twice, fewer nodes than its first line,
    or has a row of distances of another length than their head.
    """
    cpus: dict[int, CpuSet] = {}
    sizes: dict[int, int] = {}
    distances: dict[int, dict[int, int]] = {}
    head: list[int] = []
    promised = NodeSet()
    for line in (one.strip() for one in text.removeprefix("\ufeff").splitlines()):
        if match := _FIRST.fullmatch(line):
            promised = NodeSet.parse_list(match[1])
        elif match := _CPUS.fullmatch(line):
            node = int(match[1])
            if node in cpus:
                raise ParseError(f"node {node} is there twice")
            cpus[node] = CpuSet.parse_list(",".join(match[2].split()))
        elif cpus and not sizes and re.fullmatch(r"[0-9][0-9 ]*", line, re.ASCII):
            raise ParseError(
                f"is wrapped: the line '{shorten(line)}' has CPUs and no node",
                "Send what it prints into a file, and give that",
            )
        elif match := _SIZE.fullmatch(line):
            sizes[int(match[1])] = int(match[2])
        elif match := _HEAD.fullmatch(line):
            head = [int(one) for one in match[1].split()]
        elif head and (match := _ROW.fullmatch(line)):
            row = [int(one) for one in match[2].split()]
            if len(row) != len(head):
                raise ParseError(
                    f"the distances of node {match[1]} are {len(row)}: expected {len(head)}"
                )
            distances[int(match[1])] = dict(zip(head, row, strict=True))
    if "No NUMA support available" in text:
        raise ParseError(
            "says that the system has no NUMA support: there is nothing to compare",
            "Leave the option out",
        )
    if not cpus:
        raise ParseError("has no line 'node N cpus: ...': expected what 'numactl -H' prints")
    if not promised <= NodeSet(cpus):
        raise ParseError(
            f"is cut: its first line has nodes {promised}, and CPUs of nodes {NodeSet(cpus)} follow",
            "Give the whole of what 'numactl -H' prints",
        )
    return NumactlNodes(cpus, sizes, distances)


def compare_numactl(machine: Machine, text: str, place: str) -> Comparison:
    """What `numactl -H` says otherwise than the machine.

    numactl may show a process less than there is, but nothing else: fewer CPUs of a node are
    explained by a cpuset, any other difference is not.

    Raises InputError if the text is not numactl's.
    """
    try:
        theirs = parse_numactl(text)
    except ParseError as error:
        raise InputError(f"{place}: {error.message}", error.hint) from error
    differences: list[Note] = []
    explained: list[str] = []
    facts = 1
    named = NodeSet(theirs.cpus)
    if named != machine.node_ids:
        differences.append(
            _differs("numactl_nodes", f"{place} has NUMA nodes {named}", f"{machine.node_ids}")
        )
    narrow: list[int] = []
    for node in machine.nodes:
        for code, said, ours, equal in _facts(node, theirs):
            facts += 1
            if equal:
                continue
            own = theirs.cpus[node.id] if code == "numactl_cpus" else CpuSet()
            if own and own < node.cpus:
                narrow.append(node.id)
            else:
                differences.append(_differs(code, f"{place}: {said}", ours))
    if narrow:
        explained.append(
            f"it shows a part of the CPUs of nodes {NodeSet(narrow)}: those of its caller's cpuset"
        )
    unsaid = []
    for what, nodes in (
        ("memory sizes", NodeSet(theirs.sizes_mib)),
        ("distances", NodeSet(theirs.distances)),
    ):
        mute = NodeSet(theirs.cpus) - nodes
        if mute:
            unsaid.append(f"{what} of NUMA nodes {mute} (they are not in {place})")
    agreed = facts - len(narrow) - len(differences)
    return Comparison(
        _READER, place, facts, agreed, tuple(explained), tuple(unsaid), tuple(differences)
    )


def _facts(node: NumaNode, theirs: NumactlNodes) -> Iterator[tuple[str, str, str, bool]]:
    """(code, what they say, what the machine says, whether it is the same) of all that both say."""
    number = node.id
    cpus = theirs.cpus.get(number)
    if cpus is not None:
        yield (
            "numactl_cpus",
            f"node {number} has CPUs {cpus or 'none'}",
            str(node.cpus) or "none",
            cpus == node.cpus,
        )
    size = theirs.sizes_mib.get(number)
    if size is not None and node.memory_bytes is not None:
        ours = node.memory_bytes >> 20
        yield ("numactl_memory", f"node {number} has {size} MiB", f"{ours} MiB", size == ours)
    for other, gap in theirs.distances.get(number, {}).items():
        known = None if node.distances is None else node.distances.get(other)
        if known is not None:
            said = f"the distance from node {number} to {other} is {gap}"
            yield ("numactl_distance", said, str(known), gap == known)


def _differs(code: str, theirs: str, ours: str) -> Note:
    return Note(
        code,
        f"{theirs}, and the kernel's files here say {ours}.",
        "Take both of the same machine, at the same time: memory and CPUs may have been taken off- or online",
    )
