"""What is read of every recorded machine is held against its right values.

The values come from the machine's source or from hwloc (`expected.json`). Where ours differ, the
reason why the data, or the other reader, is at fault stands in a table below.
"""

from __future__ import annotations

from collections import defaultdict
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
from tests.machines import machine_names, read_expected, read_machine, require_machines

NAMES = machine_names() or ["none"]

# Recordings that describe no machine, and what their refusal has to say.
REFUSED = {
    # Only a cgroup and a process, for a topology made elsewhere.
    "test1.fsroot": "expected the folders sys and proc",
    # One PCI device and no CPU.
    "nri-topology_testdata": "no CPU is online",
    # Made by hand: CPUs 20 to 23 lie on two nodes, which no kernel does.
    "fakeheterocpunuma": "CPU 20 is on node",
}

# hwloc drops or renumbers what it can't place; the files themselves say what we say.
PACKAGES_DIFFER = {
    "16ia64-8n2s": "hwloc keeps one of the two packages of a node that it merges; the files name both",
    "2ps3-2t": "the files name no package, and hwloc then has none",
    "ppc-qemu": "physical_package_id is -1, unknown; hwloc takes -1 for a number",
    "ppc64-POWER7": "physical_package_id is -1, unknown; hwloc takes -1 for a number",
    "rv64-linux": "physical_package_id is -1, unknown; hwloc takes -1 for a number",
    "s390-kvm": "physical_package_id is -1, unknown; hwloc takes -1 for a number",
    "s390-zvm": "physical_package_id is -1, unknown; hwloc takes -1 for a number",
}
_ZEROS = (
    "the third level's shared_cpu_map is all zeros, so nothing says who shares it; hwloc guesses"
)
CACHES_DIFFER = {"8ia64-2n2s2c": _ZEROS, "8ia64-2s2c2t": _ZEROS}
CORES_DIFFER = {
    "4fake-4gr1nu1pu": "no file names SMT siblings: each CPU is a core here, and hwloc has no cores",
}
NODES_DIFFER = {
    "fakeheteromemtiers": "nodes without CPUs of their own: hwloc shows the CPUs near to them",
}
# hwloc 2.9 writes 0 where nothing tells a node's memory; None is the honest word. One capture lacks
# nodeN/meminfo, and a machine of one node has the memory that /proc/meminfo says.
ONE_NODE_MEMORY = "linux-amd64-61797caf7c0b6bca1725ad7975ed4773"

# Network interfaces that the source names and the tree, written from it, does not have.
NET_NAMES_MISSING = {"p9-32core-4v100-gpumem": {"prov", "nfs", "pub"}}

# Cards of the sources that are none here.
CARDS_LEFT_OUT = {
    "hwlocxml-x3950m2-pci": {"0000:01:00.0": "a Radeon ES1000, the graphics of a BMC"},
    "rccl-8gpu-mi200-90a": {
        f"0000:{bus}:00.0": "the source does not say whose it is: there is no vendor file"
        for bus in ("c1", "c5", "c9", "cd", "d1", "d5", "d9", "dd")
    },
}
VENDOR_IDS = {"0x10de": "nvidia", "0x1002": "amd", "0x1da3": "habana"}

# The kinds of memory by hwloc's names.
KINDS = {"DRAM": "dram", "HBM": "hbm", "MCDRAM": "hbm", "NVM": "cxl", "GPUMemory": "gpu"}


def machine_of(name: str, within: str = "root") -> Machine:
    """The machine, or a skip for the few recordings that describe none."""
    require_machines()
    if name in REFUSED:
        pytest.skip("describes no machine; its refusal has a test of its own")
    return discover(read_machine(name), within)


def expected_of(name: str) -> dict[str, Any]:
    """The right values, or a skip where the recording has none."""
    expected = read_expected(name)
    if expected is None:
        pytest.skip("the recording has no right values")
    return expected


@pytest.mark.parametrize("name", NAMES)
def test_cpus_and_cores(name: str) -> None:
    """Online CPUs, and cores by their SMT siblings, are the recorded machine's."""
    machine = machine_of(name)
    expected = expected_of(name)
    if expected["origin"] == "capture":
        full = expected["disallowed"]
        cores = [core["pus"] for core in full["cores"]]
        online = full["online_cpus"]
    else:
        cores = [str(CpuSet.parse_list(text)) for text in expected["thread_siblings"]]
        online = expected["online_cpus"]
    assert str(machine.online_cpus) == online
    if name in CORES_DIFFER:
        assert cores == []
        assert len(machine.cores) == len(machine.cpus)
    else:
        assert sorted(str(core.cpus) for core in machine.cores) == sorted(cores)


@pytest.mark.parametrize("name", NAMES)
def test_nodes(name: str) -> None:
    """Each NUMA node's CPUs, memory, distances and kind are the recorded machine's."""
    machine = machine_of(name)
    expected = expected_of(name)
    is_capture = expected["origin"] == "capture"
    nodes = expected["disallowed"]["numa"] if is_capture else expected["nodes"]
    assert {str(node.id) for node in machine.nodes} == set(nodes)
    for node in machine.nodes:
        right = nodes[str(node.id)]
        if name in NODES_DIFFER and not node.cpus:
            assert CpuSet.parse_list(right["cpus"])
        else:
            assert str(node.cpus) == right["cpus"]
        if is_capture and right["mem_bytes"] == 0:
            assert node.memory_bytes in ((33564585984,) if name == ONE_NODE_MEMORY else (None, 0))
        elif right["mem_bytes"] is not None:
            assert node.memory_bytes == right["mem_bytes"]
        if right.get("subtype"):
            assert node.kind == KINDS[right["subtype"]]
        if not is_capture:
            assert (not node.cpus) == (node.id in expected["cpuless_nodes"])
            assert (node.kind == "none") == (node.id in expected["memoryless_nodes"])
    if is_capture and "distances" in expected["disallowed"]:
        table = expected["disallowed"]["distances"]
        for node_id, row in zip(table["nodes"], table["rows"], strict=True):
            assert machine.node(node_id).distances == dict(zip(table["nodes"], row, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_packages_and_caches(name: str) -> None:
    """Packages and last-level caches are those that hwloc reads from the same capture."""
    machine = machine_of(name)
    expected = expected_of(name)
    if expected["origin"] != "capture":
        pytest.skip("the source of a described machine names neither")
    full = expected["disallowed"]
    packages: dict[int | None, list[int]] = defaultdict(list)
    caches: dict[int | None, list[int]] = defaultdict(list)
    for cpu in machine.cpus:
        packages[cpu.package].append(cpu.id)
        caches[cpu.llc].append(cpu.id)
    ours = {number: str(CpuSet(cpus)) for number, cpus in packages.items()}
    theirs = {package["id"]: package["cpus"] for package in full["packages"]}
    assert (ours != theirs) == (name in PACKAGES_DIFFER)
    if name in CACHES_DIFFER:
        assert set(caches) == {None}
    elif full[
        "l3"
    ]:  # hwloc lists third-level caches alone, ours is the last one, whatever its level
        assert sorted(
            str(CpuSet(cpus)) for llc, cpus in caches.items() if llc is not None
        ) == sorted(full["l3"])


@pytest.mark.parametrize("name", NAMES)
def test_ceiling(name: str) -> None:
    """The recorded process's cpuset is the ceiling within self, and the whole machine within root."""
    machine = machine_of(name, "self")
    expected = expected_of(name)
    if expected["origin"] != "capture":
        assert machine.allowed_cpus == machine.online_cpus
        return
    assert str(machine.ceiling_cpus) == expected["default"]["allowed_cpus"]
    assert str(machine.allowed_nodes) == expected["default"]["allowed_nodes"]
    assert discover(read_machine(name), "root").ceiling_cpus == machine.online_cpus


@pytest.mark.parametrize("name", NAMES)
def test_cards(name: str) -> None:
    """Every vendor's cards, in PCI order, with the NUMA node and the CPUs of each, are the source's."""
    machine = machine_of(name)
    expected = expected_of(name)
    if expected["origin"] == "capture":
        # None has a card: display controllers are a BMC's, a processor's or too old for any runtime.
        assert machine.accelerators == ()
        return
    right: dict[str, list[tuple[str, int, str]]] = defaultdict(list)
    left_out = CARDS_LEFT_OUT.get(name, {})
    for card in sorted(expected["gpus"], key=lambda card: parse_pci_address(card["bdf"])):
        if card["bdf"] not in left_out:
            facts = (card["bdf"], card["numa_node"], card["local_cpulist"])
            right[VENDOR_IDS[card["vendor"]]].append(facts)
    ours: dict[str, list[tuple[str, int | None, str]]] = defaultdict(list)
    for one in machine.accelerators:
        assert one.index == len(ours[one.vendor])
        cpus = machine.pci_path(one.address)[0].local_cpus
        ours[one.vendor].append((one.name, node_of(machine, one), str(cpus)))
    assert ours == right
    assert set(left_out) <= {card["bdf"] for card in expected["gpus"]}


@pytest.mark.parametrize("name", NAMES)
def test_network_devices(name: str) -> None:
    """The network devices on the PCI bus, their names and NUMA nodes, are the source's."""
    machine = machine_of(name)
    expected = expected_of(name)
    if expected["origin"] == "capture":
        pytest.skip("hwloc tells them by their names alone")
    right = {nic["bdf"]: nic for nic in expected["nics"]}
    assert {str(nic.address) for nic in machine.nics} == set(right)
    for nic in machine.nics:
        source = right[str(nic.address)]
        names = set(source.get("osdev", ())) - NET_NAMES_MISSING.get(name, set())
        assert set(nic.rdma_names + nic.net_names) == names
        locality = find_locality(machine, nic.address)
        if isinstance(locality, Locality) and locality.source == "numa_node":
            assert locality.nodes == NodeSet([source["numa_node"]])


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
