"""What is read of every recorded machine is held against its right values.

The values come from the machine's source or from hwloc (`expected.json`). Where ours differ, the
reason why the data, or the other reader, is at fault stands in a table below. How much was compared
is said at the end of the tests' output.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from provisioner.discovery import discover
from provisioner.errors import InputError, ProblemsError, TopologyError
from provisioner.idset import CpuSet, NodeSet
from provisioner.locality import Locality, find_locality
from provisioner.pci import parse_pci_address
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.topology import Accelerator, Machine
from tests.agreement import Fact, Reason, Record, hold, summarise
from tests.machines import machine_names, read_expected, read_machine, require_machines

READER = "expected.json"

# Recordings that describe no machine, and what their refusal has to say.
REFUSED = {
    # Only a cgroup and a process, for a topology made elsewhere.
    "test1.fsroot": "expected the folders sys and proc",
    # One PCI device and no CPU.
    "nri-topology_testdata": "no CPU is online",
    # Made by hand: CPUs 20 to 23 lie on two nodes, which no kernel does.
    "fakeheterocpunuma": "CPU 20 is on node",
}

# Recordings without right values: their source knows of no other reader. Lstopo reads them too.
WITHOUT_VALUES = frozenset(
    {
        "nri-cpuallocator_sysfs-2-socket-4-node-40-core",
        "nri-policy_sysfs-desktop",
        "nri-policy_sysfs-server",
        "nri-sysfs_sample1-sample1",
    }
)
NAMES = [name for name in machine_names() if name not in REFUSED] or ["none"]
COMPARED = [name for name in NAMES if name not in WITHOUT_VALUES]

# Where the right values say something else, and why they are not right, or not about the same.
MEMORY_REASONS = (
    Reason(
        "no file tells a node's memory, which hwloc writes as 0",
        frozenset(
            {
                "2ps3-2t",
                "armv7",
                "loongarch-loongson_3a5000_hv",
                "ppc-qemu",
                "ppc64-POWER7",
                "rv64-linux",
                "rv64-visionfive2",
                "s390-kvm",
                "s390-lpar-drawer",
                "s390-zvm",
                "x86_64-64cpu-linux6.2",
                "x86_64-dell_e4310",
                "x86_64-epyc_7451",
            }
        ),
        lambda fact: fact.kind == "node memory" and fact.ours is None and fact.theirs == 0,
    ),
    Reason(
        "nodeN/meminfo is missing; the memory of a machine of one node is that of /proc/meminfo",
        frozenset({"linux-amd64-61797caf7c0b6bca1725ad7975ed4773"}),
        lambda fact: fact.kind == "node memory" and (fact.ours, fact.theirs) == (33564585984, 0),
    ),
)
NODE_REASONS = (
    Reason(
        "a node without CPUs: hwloc shows those that it is near to",
        frozenset({"fakeheteromemtiers"}),
        lambda fact: (
            fact.kind == "node CPUs" and fact.ours == CpuSet() and fact.about in (4, 6, 8, 9)
        ),
    ),
    *MEMORY_REASONS,
)
CPU_REASONS = (
    Reason(
        "no file names SMT siblings: each CPU is a core to us, and hwloc has no cores",
        frozenset({"4fake-4gr1nu1pu"}),
        lambda fact: fact.kind == "cores" and fact.theirs is None,
    ),
    Reason(
        "physical_package_id is -1, which is unknown; hwloc takes it for a number",
        frozenset({"ppc-qemu", "ppc64-POWER7", "rv64-linux", "s390-kvm", "s390-zvm"}),
        lambda fact: (
            (fact.kind == "packages" and fact.ours is None)
            or (fact.kind == "package numbers" and (fact.ours, fact.theirs) == (None, -1))
        ),
    ),
    Reason(
        "two packages of a node have one physical_package_id, by which they are one to us",
        frozenset({"16ia64-8n2s"}),
        lambda fact: (
            fact.kind == "packages" and isinstance(fact.theirs, CpuSet) and len(fact.theirs) == 1
        ),
    ),
    Reason(
        "the third level's shared_cpu_map is all zeros, so nothing says who shares it; hwloc guesses",
        frozenset({"8ia64-2n2s2c", "8ia64-2s2c2t"}),
        lambda fact: fact.kind == "last-level caches" and fact.ours is None,
    ),
)

PCI_REASONS = (
    Reason(
        "network interfaces that the source names and the tree, written from it, does not have",
        frozenset({"p9-32core-4v100-gpumem"}),
        lambda fact: (
            isinstance(fact.ours, frozenset)
            and isinstance(fact.theirs, frozenset)
            and fact.ours < fact.theirs
            and fact.theirs - fact.ours <= {"prov", "nfs", "pub"}
        ),
    ),
    Reason(
        "no card: a Radeon ES1000, the graphics of a BMC",
        frozenset({"hwlocxml-x3950m2-pci"}),
        lambda fact: fact.kind == "cards" and not fact.ours,
    ),
    Reason(
        "no card: the source does not say whose it is",
        frozenset({"rccl-8gpu-mi200-90a"}),
        lambda fact: fact.kind == "cards" and not fact.ours,
    ),
)
VENDOR_IDS = {"0x10de": "nvidia", "0x1002": "amd", "0x1da3": "habana"}

# The kinds of memory by hwloc's names.
KINDS = {"DRAM": "dram", "HBM": "hbm", "MCDRAM": "hbm", "NVM": "cxl", "GPUMemory": "gpu"}


def machine_of(name: str, within: str = "root") -> Machine:
    """The machine of a recording that describes one."""
    require_machines()
    return discover(read_machine(name), within)


def expected_of(name: str) -> dict[str, Any]:
    """The right values of a recording that has some."""
    expected = read_expected(name)
    assert expected is not None
    return expected


def by_first(sets: Iterable[CpuSet]) -> dict[int, CpuSet]:
    """The sets by their lowest CPU."""
    return {one.first: one for one in sets if one}


def grouped(groups: Iterable[tuple[int, object]]) -> list[CpuSet]:
    """The sets of CPUs that are in one group; those in None are left out."""
    members: dict[object, list[int]] = defaultdict(list)
    for cpu, group in groups:
        if group is not None:
            members[group].append(cpu)
    return [CpuSet(cpus) for cpus in members.values()]


def cpu_facts(machine: Machine, expected: dict[str, Any]) -> Iterator[Fact]:
    """Online CPUs and cores; of a capture packages and caches too, which no other source names."""
    full = expected.get("disallowed", expected)
    is_capture = expected["origin"] == "capture"
    right = CpuSet.parse_list(full["online_cpus"])
    for cpu in machine.online_cpus | right:
        yield Fact("online CPUs", cpu, cpu in machine.online_cpus, cpu in right)
    cores = [core["pus"] for core in full["cores"]] if is_capture else full["thread_siblings"]
    sets = [("cores", [core.cpus for core in machine.cores], cores)]
    if is_capture:
        packages = grouped((cpu.id, cpu.package) for cpu in machine.cpus)
        sets.append(("packages", packages, [package["cpus"] for package in full["packages"]]))
        numbers = {cpu.id: cpu.package for cpu in machine.cpus}
        for package in full["packages"]:
            number = package["id"]
            ours = numbers[CpuSet.parse_list(package["cpus"]).first]
            yield Fact("package numbers", package["cpus"], ours, number)
    # It lists third-level caches alone; ours is the last one, whatever its level.
    if is_capture and full["l3"]:
        caches = grouped((cpu.id, cpu.llc) for cpu in machine.cpus)
        sets.append(("last-level caches", caches, full["l3"]))
    for kind, found, lists in sets:
        ours_of, theirs_of = by_first(found), by_first(map(CpuSet.parse_list, lists))
        for first in ours_of.keys() | theirs_of.keys():
            yield Fact(kind, first, ours_of.get(first), theirs_of.get(first))


@pytest.mark.parametrize("name", COMPARED)
def test_cpus(name: str, record_property: Record) -> None:
    """Online CPUs, cores by their SMT siblings, packages and caches are the recorded machine's."""
    machine, expected = machine_of(name), expected_of(name)
    hold(record_property, READER, name, cpu_facts(machine, expected), CPU_REASONS)


def node_facts(machine: Machine, expected: dict[str, Any]) -> Iterator[Fact]:
    """Each NUMA node's CPUs, memory, kind and distances."""
    is_capture = expected["origin"] == "capture"
    full = expected.get("disallowed", expected)
    nodes = {int(number): node for number, node in full["numa" if is_capture else "nodes"].items()}
    for number in machine.node_ids | NodeSet(nodes):
        node, right = machine.find_node(number), nodes.get(number)
        yield Fact("nodes", number, node is not None, right is not None)
        if node is None or right is None:
            continue
        yield Fact("node CPUs", number, node.cpus, CpuSet.parse_list(right["cpus"]))
        if right["mem_bytes"] is not None:
            yield Fact("node memory", number, node.memory_bytes, right["mem_bytes"])
        if right.get("subtype"):
            yield Fact("kinds of memory", number, node.kind, KINDS[right["subtype"]])
        if not is_capture:
            empty = number in expected["memoryless_nodes"]
            yield Fact("kinds of memory", number, node.kind == "none", empty)
            yield Fact("node CPUs", number, not node.cpus, number in expected["cpuless_nodes"])
    table = full.get("distances") if is_capture else None
    if table is not None:
        for number, row in zip(table["nodes"], table["rows"], strict=True):
            for other, value in zip(table["nodes"], row, strict=True):
                yield Fact("distances", (number, other), machine.distance(number, other), value)


@pytest.mark.parametrize("name", COMPARED)
def test_nodes(name: str, record_property: Record) -> None:
    """Each NUMA node's CPUs, memory, distances and kind are the recorded machine's."""
    machine, expected = machine_of(name), expected_of(name)
    hold(record_property, READER, name, node_facts(machine, expected), NODE_REASONS)


def ceiling_facts(name: str, expected: dict[str, Any]) -> Iterator[Fact]:
    """What the recorded process may use within self, and everything within root."""
    machine, whole = machine_of(name, "self"), machine_of(name, "root")
    if expected["origin"] == "capture":
        said = expected["default"]
        right = CpuSet.parse_list(said["allowed_cpus"])
        nodes = NodeSet.parse_list(said["allowed_nodes"])
        yield Fact("allowed sets", "CPUs", machine.ceiling_cpus, right)
        yield Fact("allowed sets", "nodes", machine.allowed_nodes, nodes)
        full = CpuSet.parse_list(expected["disallowed"]["online_cpus"])
        yield Fact("allowed sets", "all CPUs", whole.ceiling_cpus, full)
    else:
        right = CpuSet.parse_list(expected["online_cpus"])
        yield Fact("allowed sets", "CPUs", machine.allowed_cpus, right)


@pytest.mark.parametrize("name", COMPARED)
def test_ceiling(name: str, record_property: Record) -> None:
    """The recorded process's cpuset is the ceiling within self, and the whole machine within root."""
    require_machines()
    hold(record_property, READER, name, ceiling_facts(name, expected_of(name)))


def pci_facts(machine: Machine, expected: dict[str, Any]) -> Iterator[Fact]:
    """Every vendor's cards, in PCI order, and the network devices, with what the source says of each."""
    if expected["origin"] == "capture":
        # None has a card: display controllers are a BMC's, a processor's or too old for any runtime.
        yield Fact("cards", "how many", len(machine.accelerators), 0)
        return
    right = {card["bdf"]: card for card in expected["gpus"]}
    ours = {card.name: card for card in machine.accelerators}
    yield Fact("cards", "whether there are any", bool(ours), bool(right))
    numbers: Counter[str] = Counter()
    for address in sorted({*right, *ours}, key=parse_pci_address):
        card, source = ours.get(address), right.get(address)
        yield Fact("cards", address, card is not None, source is not None)
        if card is None or source is None:
            continue
        yield Fact("vendors of cards", address, card.vendor, VENDOR_IDS[source["vendor"]])
        yield Fact("physical numbers", address, card.index, numbers[card.vendor])
        numbers[card.vendor] += 1
        local = CpuSet.parse_list(source["local_cpulist"])
        yield Fact("nodes of cards", address, node_of(machine, card), source["numa_node"])
        yield Fact("local CPUs", address, machine.pci_path(card.address)[0].local_cpus, local)
    nics = {nic["bdf"]: nic for nic in expected["nics"]}
    found = {str(nic.address): nic for nic in machine.nics}
    for address in sorted({*nics, *found}):
        nic, source = found.get(address), nics.get(address)
        yield Fact("network devices", address, nic is not None, source is not None)
        if nic is None or source is None:
            continue
        names = frozenset(nic.rdma_names + nic.net_names)
        yield Fact("names of network devices", address, names, frozenset(source.get("osdev", ())))
        locality = find_locality(machine, nic.address)
        if isinstance(locality, Locality) and locality.source == "numa_node":
            node = NodeSet([source["numa_node"]])
            yield Fact("nodes of network devices", address, locality.nodes, node)


@pytest.mark.parametrize("name", COMPARED)
def test_cards_and_network_devices(name: str, record_property: Record) -> None:
    """Cards and network devices, with the NUMA node, the CPUs and the names of each, are the source's."""
    machine, expected = machine_of(name), expected_of(name)
    hold(record_property, READER, name, pci_facts(machine, expected), PCI_REASONS)


def node_of(machine: Machine, card: Accelerator) -> int | None:
    """The only node that a card is local to."""
    locality = find_locality(machine, card.address)
    assert isinstance(locality, Locality)
    return locality.nodes.first if len(locality.nodes) == 1 else None


@pytest.mark.parametrize("name", NAMES)
def test_plan_or_reason(name: str) -> None:
    """Every recorded machine is planned, or refused for a reason that is right."""
    machine = machine_of(name)
    if not machine.accelerators:
        with pytest.raises(ProblemsError) as caught:
            make_plan(machine, PlacementRequest())
        assert [problem.code for problem in caught.value.problems] == ["no_card"]
        return
    plan = make_plan(machine, PlacementRequest())
    (service,) = plan.services
    assert [rank.devices for rank in service.ranks] == [
        (card.name,) for card in machine.accelerators
    ]
    for rank, card in zip(service.ranks, machine.accelerators, strict=True):
        assert rank.cpu_nodes.first == node_of(machine, card)
        assert rank.cpus <= machine.node(rank.cpu_nodes.first).cpus
        assert rank.memory_nodes == rank.cpu_nodes
        assert rank.alignment.whole_cores
        assert rank.alignment.local
        assert rank.alignment.contiguous


def test_no_machine_is_left_out() -> None:
    """Each recording is held against its right values, or is named as one that is none or has none."""
    require_machines()
    with_values = {name for name in machine_names() if read_expected(name) is not None}
    assert {*COMPARED, *REFUSED, *WITHOUT_VALUES} == set(machine_names())
    assert set(COMPARED) == with_values - REFUSED.keys()
    reasons = (*CPU_REASONS, *NODE_REASONS, *PCI_REASONS)
    assert frozenset().union(*(reason.names for reason in reasons)) <= set(COMPARED)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_no_machine(name: str, tmp_path: Any) -> None:
    """A recording that describes no machine is refused, naming what is wrong with it."""
    require_machines()
    from provisioner.root import DirectoryRoot
    from tests.machines import unpack_machine

    with pytest.raises((InputError, TopologyError), match=REFUSED[name]):
        discover(DirectoryRoot(unpack_machine(name, tmp_path)))


@pytest.mark.parametrize("name", ["oci-bm-gpu-h100-8", "gb200-34nodes", "32intel64-2p8co2t+8ve"])
def test_folder_and_memory_agree(name: str, tmp_path: Any) -> None:
    """The same tree in a folder and in memory is the same machine."""
    require_machines()
    from provisioner.root import DirectoryRoot
    from tests.machines import unpack_machine

    on_disk = discover(DirectoryRoot(unpack_machine(name, tmp_path)))
    in_memory = discover(read_machine(name))
    for field in ("cpus", "nodes", "accelerators", "nics", "pci", "offline_cpus"):
        assert getattr(on_disk, field) == getattr(in_memory, field)


def test_what_fails_and_what_is_said() -> None:
    """A difference without a reason fails, and so does a reason without a difference; the rest is counted."""
    reason = Reason("the other guesses", frozenset({"m"}), lambda fact: fact.about == 1)
    same, differs = Fact("cores", 0, "a", "a"), Fact("cores", 1, "a", "b")
    said: list[tuple[str, object]] = []

    def record(key: str, value: object) -> None:
        said.append((key, value))

    with pytest.raises(AssertionError, match="m: 1 facts differ from x's"):
        hold(record, "x", "m", [same, differs])
    with pytest.raises(AssertionError, match="no difference has these reasons any more"):
        hold(record, "x", "m", [same], [reason])
    with pytest.raises(AssertionError, match="m: 1 facts differ"):
        hold(record, "x", "m", [same, differs, Fact("cores", 2, "a", "b")], [reason])
    with pytest.raises(AssertionError, match="no fact was compared"):
        hold(record, "x", "m", [])
    said.clear()
    hold(record, "x", "m", [same, differs], [reason])
    hold(record, "x", "other", [same], [reason])
    assert summarise([said]) == [
        "x: 2 machines, 3 facts compared, 1 differences explained",
        "       3 cores",
        "       1 differ: the other guesses",
    ]
