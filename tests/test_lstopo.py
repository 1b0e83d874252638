"""What is read of every recorded machine and every sample is held against lstopo, fact by fact.

Both read the same files. Its XML is read here by a reader of its own and not by `provisioner.hwloc`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from provisioner.discovery import discover
from provisioner.facts import build_tree
from provisioner.idset import CpuSet, NodeSet, union_cpus
from provisioner.locality import Locality, find_card_locality, find_locality
from provisioner.pci import PciAddress, parse_pci_address
from provisioner.root import MemoryRoot
from provisioner.samples import list_samples, read_sample
from provisioner.topology import Machine
from tests.agreement import Fact, Reason, Record, hold
from tests.machines import machine_names, read_machine, require_machines
from tests.test_agreement import (
    CPU_REASONS,
    KINDS,
    MEMORY_REASONS,
    NAMES,
    REFUSED,
    by_first,
    grouped,
)
from tests.trees import write_tree

LSTOPO = shutil.which("lstopo-no-graphics")
SAMPLES = [sample.name for sample in list_samples()]


# Lstopo's word ------------------------------------------------------------------------------------


class Function(NamedTuple):
    """A PCI function in lstopo's tree."""

    pci_class: int  # base class and subclass
    vendor: int
    device: int
    cpus: CpuSet  # those of the nearest object above it that is none of I/O
    bridges: tuple[PciAddress, ...]  # nearest first; only those whose config space it could read
    names: frozenset[str]  # network and RDMA devices that it has


class Node(NamedTuple):
    """A NUMA node in lstopo's tree."""

    cpus: CpuSet
    memory_bytes: int
    kind: str | None  # None: it does not say


class Topology(NamedTuple):
    """What lstopo's XML says."""

    cpus: CpuSet
    offline_cpus: CpuSet
    allowed_cpus: CpuSet
    allowed_nodes: NodeSet
    cores: list[CpuSet]
    packages: list[tuple[int, CpuSet]]  # (the kernel's number, CPUs)
    dies: list[CpuSet]
    last_caches: dict[int, CpuSet]  # CPU -> who shares its largest cache
    nodes: dict[int, Node]
    distances: dict[tuple[int, int], int]
    pci: dict[PciAddress, Function]


def run_lstopo(folder: Path) -> str:
    """The XML that lstopo writes of a tree, with all I/O and with what its recorder could not use."""
    if LSTOPO is None:
        pytest.skip("no lstopo here: Debian and Ubuntu have it in hwloc-nox")
    environment = {
        **os.environ,
        "HWLOC_FSROOT": str(folder),
        "HWLOC_THISSYSTEM": "0",
        # It asks this host's processor for what a recorded one does not say otherwise.
        "HWLOC_COMPONENTS": "linux,stop",
        # It leaves these nodes out otherwise, as no place for the CPUs' memory.
        "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1",
    }
    done = subprocess.run(
        [LSTOPO, "--of", "xml", "--disallowed", "--whole-io"],
        env=environment,
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return done.stdout.decode("utf-8", "replace")


def parse_bits(text: str) -> int:
    """A set as hwloc writes it: groups of 32 bits with 0x, empty ones for 0."""
    bits = 0
    for group in text.split(","):
        bits = bits << 32 | int(group or "0", 16)
    return bits


def cpus_of(one: ET.Element, key: str = "cpuset") -> CpuSet:
    """A set of CPUs in an object's attribute."""
    return CpuSet.from_bits(parse_bits(one.attrib[key]))


def parse_xml(text: str) -> Topology:
    """The facts of lstopo's XML."""
    root = ET.fromstring(text)
    machine = root.find("object")
    assert machine is not None
    found = Topology(
        cpus_of(machine),
        cpus_of(machine, "complete_cpuset") - cpus_of(machine),
        cpus_of(machine, "allowed_cpuset"),
        NodeSet.from_bits(parse_bits(machine.attrib["allowed_nodeset"])),
        [],
        [],
        [],
        {},
        {},
        parse_distances(root),
        {},
    )
    walk(machine, CpuSet(), None, (), found)
    return found


def walk(
    one: ET.Element,
    cpus: CpuSet,
    cache: CpuSet | None,
    bridges: tuple[PciAddress, ...],
    found: Topology,
) -> None:
    """Adds what an object and those in it say."""
    kind = one.attrib["type"]
    cpus = cpus_of(one) if "cpuset" in one.attrib else cpus
    number = int(one.get("os_index", "-1"))
    if kind == "Core":
        found.cores.append(cpus)
    elif kind == "Package":
        found.packages.append((number, cpus))
    elif kind == "Die":
        found.dies.append(cpus)
    elif kind == "NUMANode":
        found.nodes[number] = Node(cpus, int(one.get("local_memory", "0")), one.get("subtype"))
    elif kind == "PU" and cache is not None:
        found.last_caches[number] = cache
    elif re.fullmatch(r"L\dCache", kind) and cache is None:
        cache = cpus
    elif "pci_busid" in one.attrib:
        address = parse_pci_address(one.attrib["pci_busid"])
        numbers = re.match(r"(\w{4}) \[(\w{4}):(\w{4})\]", one.attrib["pci_type"])
        assert numbers is not None
        pci_class, vendor, device = (int(digits, 16) for digits in numbers.groups())
        names = frozenset(
            inner.attrib["name"]
            for inner in one.findall("object")
            if inner.get("osdev_type") in {"2", "3"}
        )
        found.pci[address] = Function(pci_class, vendor, device, cpus, bridges, names)
        bridges = (address, *bridges)
    for inner in one.findall("object"):
        walk(inner, cpus, cache, bridges, found)


def parse_distances(root: ET.Element) -> dict[tuple[int, int], int]:
    """(from, to) -> the latency between two NUMA nodes; empty where it has no matrix."""
    for matrix in root.iter("distances2"):
        if matrix.get("type") == "NUMANode" and matrix.get("name") == "NUMALatency":
            ids, values = (
                [int(word) for part in matrix.iter(tag) for word in (part.text or "").split()]
                for tag in ("indexes", "u64values")
            )
            return {
                (a, b): values[row * len(ids) + column]
                for row, a in enumerate(ids)
                for column, b in enumerate(ids)
            }
    return {}


# Facts --------------------------------------------------------------------------------------------


def cpu_facts(ours: Machine, theirs: Topology) -> Iterator[Fact]:
    """Online CPUs, cores, packages, dies and last-level caches."""
    for cpu in ours.online_cpus | theirs.cpus:
        yield Fact("online CPUs", cpu, cpu in ours.online_cpus, cpu in theirs.cpus)
    yield Fact("sets of offline CPUs", "all", ours.offline_cpus, theirs.offline_cpus)
    packages = grouped((cpu.id, cpu.package) for cpu in ours.cpus)
    numbers = {row.id: row.package for row in ours.cpus}
    dies = grouped(
        (cpu.id, None if cpu.die is None else (cpu.package, cpu.die)) for cpu in ours.cpus
    )
    # Where each package is one die lstopo has no object for it.
    if not theirs.dies and sorted(map(str, dies)) == sorted(map(str, packages)):
        dies = []
    for kind, left, right in (
        ("cores", by_first(core.cpus for core in ours.cores), by_first(theirs.cores)),
        ("dies", by_first(dies), by_first(theirs.dies)),
        (
            "last-level caches",
            by_first(grouped((cpu.id, cpu.llc) for cpu in ours.cpus)),
            by_first(theirs.last_caches.values()),
        ),
        ("packages", by_first(packages), by_first(cpus for _, cpus in theirs.packages)),
    ):
        for first in left.keys() | right.keys():
            yield Fact(kind, first, left.get(first), right.get(first))
    for number, cpus in theirs.packages:
        yield Fact("package numbers", number, numbers.get(cpus.first), number)


def node_facts(ours: Machine, theirs: Topology) -> Iterator[Fact]:
    """Each node's CPUs, memory and distances."""
    for number in ours.node_ids | NodeSet(theirs.nodes):
        left, right = ours.find_node(number), theirs.nodes.get(number)
        yield Fact("nodes", number, left is not None, right is not None)
        if left is not None and right is not None:
            yield Fact("node CPUs", number, left.cpus, right.cpus)
            yield Fact("node memory", number, left.memory_bytes, right.memory_bytes)
            if right.kind is not None:
                yield Fact("kinds of memory", number, left.kind, KINDS[right.kind])
    for cpu in ours.cpus:
        # It puts a node without CPUs beside one that has them, so that a CPU may be on several there.
        near = {number for number, node in theirs.nodes.items() if cpu.id in node.cpus}
        yield Fact("nodes of CPUs", cpu.id, cpu.node in near, True)
    rows = {
        (node.id, other): value
        for node in ours.nodes
        for other, value in (node.distances or {}).items()
    }
    for pair in rows.keys() | theirs.distances.keys():
        yield Fact("distances", pair, rows.get(pair), theirs.distances.get(pair))


def pci_facts(ours: Machine, theirs: Topology) -> Iterator[Fact]:
    """Cards and network devices: which there are, their ids, names, bridges and local CPUs."""
    nics = {nic.address: nic for nic in ours.nics}
    cards = {card.address: card for card in ours.accelerators if card.address is not None}
    network = {at for at, one in theirs.pci.items() if one.pci_class >> 8 == 2 or one.names}
    for address in nics.keys() | network:
        yield Fact("network devices", address, address in nics, address in network)
    processing = {
        at
        for at, one in theirs.pci.items()
        if one.pci_class in (0x0300, 0x0302, 0x0380, 0x0B40, 0x1200)
    }
    for address in sorted(cards.keys() | processing):
        there = theirs.pci.get(address)
        about = (
            f"{address} {there.pci_class:04x} {there.vendor:04x}:{there.device:04x}"
            if there
            else address
        )
        yield Fact("accelerators", about, address in cards, address in processing)
    for address in sorted(nics.keys() | cards.keys()):
        path = ours.pci_path(address)
        there = theirs.pci.get(address)
        if there is None:
            yield Fact("PCI functions", address, True, False)
            continue
        yield Fact("PCI ids", f"vendor of {address}", path[0].vendor, there.vendor)
        yield Fact("PCI ids", f"device of {address}", path[0].device, there.device)
        for bridge in path[1:]:
            yield Fact("PCI bridges", bridge.address, True, bridge.address in theirs.pci)
        if there.bridges:
            above = tuple(bridge.address for bridge in path[1:])
            yield Fact("PCI paths", address, above, there.bridges)
        if address in nics:
            names = frozenset(nics[address].rdma_names + nics[address].net_names)
            yield Fact("names of network devices", address, names, there.names)
        card = cards.get(address)
        locality = find_locality(ours, address) if card is None else find_card_locality(ours, card)
        # Lstopo puts what it does not know the place of below the machine.
        local = ours.online_cpus
        if isinstance(locality, Locality):
            local = union_cpus(ours.node(node).cpus for node in locality.nodes)
        yield Fact("PCI local CPUs", address, local, there.cpus)


def all_facts(tree: MemoryRoot, folder: Path) -> Iterator[Fact]:
    """Every fact of a tree that both say."""
    write_tree(tree, folder)
    theirs = parse_xml(run_lstopo(folder))
    ours = discover(tree, "self")
    yield from cpu_facts(ours, theirs)
    yield from node_facts(ours, theirs)
    yield from pci_facts(ours, theirs)
    yield Fact("allowed sets", "CPUs", ours.ceiling_cpus, theirs.allowed_cpus)
    yield Fact("allowed sets", "nodes", ours.allowed_nodes, theirs.allowed_nodes)


def is_no_card(ids: str) -> Callable[[Fact], bool]:
    """Whether a fact is that a function of some class and ids is no card."""
    pattern = re.compile(f".* ({ids})")
    return lambda fact: (
        fact.kind == "accelerators"
        and fact.theirs is True
        and pattern.fullmatch(str(fact.about)) is not None
    )


# Where lstopo says something else, and why it is not right, or not about the same.
REASONS = (
    *CPU_REASONS,
    *MEMORY_REASONS,
    Reason(
        # Each CPU is on a node by us, which is one of lstopo's for it: that is a fact of its own.
        "a node without CPUs: lstopo shows those that it is near to",
        frozenset(
            {
                "fakeheteromemtiers",
                "gb200-34nodes",
                "gh200-1x-9nodes",
                "grace-4gpu",
                "max-6gpu",
                "nri-policy_sysfs-server",
            }
        ),
        lambda fact: fact.kind == "node CPUs" and fact.ours == CpuSet(),
    ),
    Reason(
        "offline CPUs without a folder, which the file offline names: lstopo reads folders",
        frozenset(
            {
                "2i386-2t-hugepagesizecount",
                "32amd64-4s2n4c-cgroup",
                "32intel64-2p8co2t+8ve",
                "8em64t-2s2ca2c",
                "8em64t-2s4c-heterogeneous",
                "lassen-p9-4v100",
                "lassen-p9-4v100-gpumem-hwloc1",
                "ppc64-POWER7",
                "s390-kvm",
                "s390-lpar-drawer",
                "s390-zvm",
                "x86_64-dell_e4310",
            }
        ),
        lambda fact: fact.kind == "sets of offline CPUs" and fact.theirs == CpuSet(),
    ),
    Reason(
        "lstopo writes no matrix of one node",
        frozenset(
            {
                "16em64t-4s2c2t",
                "16em64t-4s2c2t-offlines",
                "8em64t-2s2ca2c",
                "8em64t-2s4c-heterogeneous",
                "8ia64-2s2c2t",
                "fsroot",
                "linux-amd64-415ee03b8c4d1c4f07ae2e9d8b3d3d6d",
                "linux-amd64-61797caf7c0b6bca1725ad7975ed4773",
                "linux-amd64-accel",
                "linux-amd64-offlineCPUs",
                "linux-arm64-c288e0776090cd558ef793b2a4e61939",
                "nri-policy_sysfs-desktop",
                "nri-sysfs_sample1-sample1",
                "nvidia-dgx-gb10",
                "vbox-win",
            }
        ),
        lambda fact: fact.kind == "distances" and fact.about == (0, 0) and fact.theirs is None,
    ),
    Reason(
        "the source does not say an id, which lstopo writes as 0",
        frozenset(
            {
                "azure-ndv2-8v100",
                "azure-ndv5-8h100",
                "oci-bm-gpu4-8-a100-nps4-odd-nodes",
                "rccl-4gpu-skylake-2n",
                "rccl-8gpu-8p6l-6nic",
                "rccl-8gpu-mi200-90a",
                "rccl-8gpu-rome-nps2-uneven",
                "rccl-8gpu-rome-nps4-uneven",
                "rccl-8gpu-rome-pcie-smtoff",
                "rccl-8gpu-skylake-all-on-node0",
            }
        ),
        lambda fact: fact.kind == "PCI ids" and fact.ours is None and fact.theirs == 0,
    ),
    Reason(
        "the PCI bus does not list a bridge, which the path of the function below it names",
        frozenset({"32intel64-2p8co2t+8ve"}),
        lambda fact: (
            (fact.kind == "PCI bridges" and str(fact.about) == "0000:5f:03.0")
            or (fact.kind == "PCI paths" and str(fact.about)[:-2] == "0000:60:00")
        ),
    ),
    Reason(
        "no card: the graphics of a BMC",
        frozenset(
            {
                "corona-fluxcore-8mi50",
                "corona-naples-4mi50",
                "corona-rome-8mi50",
                "epyc7551-nps4-nogpu",
                "hwlocxml-sgi-uv-24n",
                "hwlocxml-snb-3fermi-1amd",
                "hwlocxml-x3950m2-pci",
                "knl-quad-flat",
                "lassen-p9-4v100",
                "lassen-p9-4v100-gpumem-hwloc1",
                "p9-32core-4v100-gpumem",
                "pascal-bdw-2p100",
                "turin-nps4-4h200-distro",
                "turin-nps4-4h200-nvml",
            }
        ),
        # ASPEED's, Matrox's, and a Radeon ES1000.
        is_no_card("0300 (1a03:2000|102b:05..|1002:515e)"),
    ),
    Reason(
        "no card: the graphics of a processor, a virtual machine, or a desktop of 2011",
        frozenset(
            {
                "linux-amd64-415ee03b8c4d1c4f07ae2e9d8b3d3d6d",
                "linux-amd64-61797caf7c0b6bca1725ad7975ed4773",
                "linux-amd64-accel",
            }
        ),
        is_no_card("0300 (8086:46a6|1af4:1050|1002:6758)"),
    ),
    Reason(
        "no card: a vendor whose cards are not supported (NEC's vector engines, QEMU's test device)",
        frozenset({"32intel64-2p8co2t+8ve", "linux-amd64-accel"}),
        is_no_card("(0b40 1bcf:001c|1200 1b36:0005)"),
    ),
    Reason(
        "no card: the source does not say whose it is",
        frozenset({"rccl-8gpu-mi200-90a"}),
        is_no_card("0380 0000:0000"),
    ),
)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_machine(name: str, tree_path: Path, record_property: Record) -> None:
    """Lstopo reads the same machine from a recorded tree."""
    require_machines()
    hold(record_property, "lstopo", name, all_facts(read_machine(name), tree_path), REASONS)


@pytest.mark.parametrize("name", SAMPLES)
def test_sample(name: str, tree_path: Path, record_property: Record) -> None:
    """Lstopo reads the same machine from a sample's tree."""
    tree = build_tree(read_sample(name), with_masks=True)
    hold(record_property, "lstopo", name, all_facts(tree, tree_path), REASONS)


def test_reasons_are_of_machines_that_are_compared() -> None:
    """A reason names machines that a test compares, so that none of its names is idle."""
    require_machines()
    assert frozenset().union(*(reason.names for reason in REASONS)) <= {*NAMES, *SAMPLES}
    assert {*NAMES, *REFUSED} == set(machine_names())
