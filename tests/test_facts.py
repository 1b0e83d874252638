"""Machines from facts: the kernel's files say what the facts say, and wrong facts are refused."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

import provisioner.facts
from provisioner.discovery import discover
from provisioner.errors import InputError
from provisioner.facts import FactsError, HostFacts, build_tree, check_facts, read_facts
from provisioner.facts.values import (
    BridgeFacts,
    CardFacts,
    CgroupFacts,
    DistanceFacts,
    NicFacts,
    NodeFacts,
    PackageFacts,
    PciFacts,
    UbFacts,
)
from provisioner.idset import CpuSet, NodeSet
from provisioner.pci import parse_pci_address
from provisioner.root import MemoryRoot
from provisioner.topology import VENDORS
from tests.trees import CARD_IDS, host_facts, made_host

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
SLOW = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))

# Two packages of two cores with SMT, a node each, and a card on the second.
SMALL = """\
title = "small"
threads = 2
sibling_stride = 4
packages = [{ id = 0, cpus = "0-1,4-5" }, { id = 1, cpus = "2-3,6-7" }]
nodes = [
  { id = 0, cpus = "0-1,4-5", memory = "1 GiB" },
  { id = 1, cpus = "2-3,6-7", memory = "2 GiB" },
]
cards = [{ path = "0000:16:01.0/17:00.0", node = 1, vendor = 0x10de, device = 0x2330, class = 0x030200 }]
"""


def small(**changes: object) -> HostFacts:
    """The small machine with some facts changed."""
    return replace(read_facts(SMALL, "small"), **changes)  # type: ignore[arg-type]


def refusals(text: str) -> list[str]:
    """The messages by which a fact file is refused."""
    with pytest.raises(FactsError) as caught:
        read_facts(text, "file")
    assert caught.value.exit_status == 2
    return [problem.message for problem in caught.value.problems]


def lists_of(root: MemoryRoot, leaf: str) -> dict[int, CpuSet]:
    """CPU -> the set in its file of that name."""
    return {
        int(path.split("/")[4][3:]): CpuSet.parse_list(text)
        for path, text in root.files.items()
        if path.startswith(f"{CPU}/cpu") and path.endswith(f"/{leaf}")
    }


# Trees ---------------------------------------------------------------------------------------------


@given(host_facts())
@SLOW
def test_drawn_machines_are_possible(facts: HostFacts) -> None:
    """No machine that the strategy draws has a fault."""
    assert check_facts(facts) == []


@given(host_facts())
@SLOW
def test_discovery_finds_the_facts(facts: HostFacts) -> None:
    """Discovery reads from the tree what the facts state, online CPUs alone."""
    machine = discover(build_tree(facts))
    online = facts.online_cpus
    assert machine.online_cpus == online
    assert machine.offline_cpus >= facts.offline_cpus
    assert machine.isolated_cpus & online == facts.isolated_cpus & online
    assert machine.ceiling_cpus == next((one.cpus for one in facts.cgroups), online)
    assert {core.cpus for core in machine.cores} == {
        core & online for core in facts.cores() if core & online
    }
    for cpu in machine.cpus:
        package = next(one for one in facts.packages if cpu.id in one.cpus)
        assert cpu.package == package.id
        llc = next(one for one in facts.last_level_caches() if cpu.id in one)
        assert cpu.llc == (llc & online).first
    rows = facts.distance_rows()
    assert [node.id for node in machine.nodes] == sorted(facts.node_ids)
    for stated in facts.nodes:
        found = machine.node(stated.id)
        assert found.cpus == stated.cpus & online
        assert found.memory_bytes == stated.memory_bytes
        assert found.distances == dict(zip(sorted(facts.node_ids), rows[stated.id], strict=True))
    vendors = {ids[0]: name for name, ids in CARD_IDS.items()}
    for vendor in VENDORS:
        cards = [card for card in machine.accelerators if card.vendor == vendor]
        right = [card for card in facts.cards if vendors[card.vendor] == vendor]
        assert [card.address for card in cards] == sorted(card.address for card in right)
        assert [card.index for card in cards] == list(range(len(right)))
    assert len(machine.accelerators) == len(facts.cards)
    for function in (*facts.cards, *facts.nics):
        found_function, *above = machine.pci_path(function.address)
        assert found_function.numa_node == function.numa_node
        assert [one.address for one in above] == list(reversed(function.bridges))
    assert [nic.rdma_names for nic in machine.nics] == [
        nic.rdma for nic in sorted(facts.nics, key=lambda nic: nic.address)
    ]


@given(host_facts())
@SLOW
def test_sibling_lists_are_mutual(facts: HostFacts) -> None:
    """Each CPU that a group's list names has the same list, itself in it, and is online."""
    root = build_tree(facts)
    for leaf in (
        "topology/core_cpus_list",
        "topology/thread_siblings_list",
        "topology/package_cpus_list",
        "topology/core_siblings_list",
        "topology/die_cpus_list",
        "cache/index0/shared_cpu_list",
        "cache/index2/shared_cpu_list",
        "cache/index3/shared_cpu_list",
    ):
        groups = lists_of(root, leaf)
        assert groups.keys() == set(facts.online_cpus)
        for cpu, members in groups.items():
            assert cpu in members
            assert all(groups[member] == members for member in members)


@given(host_facts())
@SLOW
def test_masks_say_what_lists_say(facts: HostFacts) -> None:
    """With masks each CPU list has a twin that names the same CPUs, and nothing else is added."""
    plain = build_tree(facts).files
    masked = build_tree(facts, with_masks=True).files
    twins = {
        path.replace("shared_cpu_list", "shared_cpu_map")
        .replace("local_cpulist", "local_cpus")
        .removesuffix("_list"): text
        for path, text in plain.items()
        if path.endswith(("cpus_list", "siblings_list", "shared_cpu_list", "local_cpulist"))
    }
    assert masked.keys() - plain.keys() == twins.keys()
    for path, text in twins.items():
        assert CpuSet.parse_mask(masked[path]) == CpuSet.parse_list(text)
    for node in facts.nodes:
        folder = f"{NODE}/node{node.id}"
        assert (
            str(CpuSet.parse_mask(plain[f"{folder}/cpumap"])) == plain[f"{folder}/cpulist"].strip()
        )


@given(host_facts())
@SLOW
def test_files_are_whole_and_links_lead_somewhere(facts: HostFacts) -> None:
    """Every file but a device node ends with a newline, and every link leads into the tree."""
    root = build_tree(facts)
    for path, text in root.files.items():
        assert text.endswith("\n") or path.startswith("dev/")
    for path in root.links:
        assert root.resolve(path) is not None
    for function in facts.pci_functions:
        real = root.resolve(f"sys/bus/pci/devices/{function.address}")
        assert real is not None
        assert real.split("/")[3:] == [str(one) for one in function.path]
    for nic in facts.nics:
        for name in nic.rdma:
            device = root.resolve(f"sys/class/infiniband/{name}/device")
            assert device == root.resolve(f"sys/bus/pci/devices/{nic.address}")


def test_mask_has_as_many_bits_as_the_kernel_has_cpus() -> None:
    """A mask has one digit for each four possible CPUs, in groups of 32 bits."""
    assert build_tree(small()).files[f"{NODE}/node1/cpumap"] == "cc\n"
    wide = small(possible_cpus=CpuSet(range(68)))
    assert build_tree(wide).files[f"{NODE}/node1/cpumap"] == "0,00000000,000000cc\n"


def test_offline_cpu_is_in_no_list() -> None:
    """An offline CPU has a folder and no topology, and its sibling is alone."""
    root = build_tree(small(offline_cpus=CpuSet([4]), possible_cpus=CpuSet(range(10))))
    assert root.list(f"{CPU}/cpu4") == ["online"]
    assert root.read(f"{CPU}/cpu4/online") == "0\n"
    assert root.read(f"{CPU}/cpu0/topology/core_cpus_list") == "0\n"
    assert root.read(f"{CPU}/cpu0/topology/package_cpus_list") == "0-1,5\n"
    assert root.read(f"{NODE}/node0/cpulist") == "0-1,5\n"
    assert root.read(f"{CPU}/online") == "0-3,5-7\n"
    assert root.read(f"{CPU}/offline") == "4,8-9\n"
    assert root.read(f"{CPU}/present") == "0-7\n"
    assert root.read(f"{CPU}/possible") == "0-9\n"


def test_core_and_die_ids_repeat_across_packages() -> None:
    """Core and die ids start from 0 in each package, as the kernel's do."""
    dies = (CpuSet([2, 6]), CpuSet([3, 7]))
    packages = (small().packages[0], replace(small().packages[1], dies=dies))
    root = build_tree(small(packages=packages))
    ids = [
        [root.read(f"{CPU}/cpu{cpu}/topology/{leaf}") for leaf in ("core_id", "die_id")]
        for cpu in range(4)
    ]
    assert ids == [["0\n", "0\n"], ["1\n", "0\n"], ["0\n", "0\n"], ["1\n", "1\n"]]
    assert root.read(f"{CPU}/cpu7/topology/die_cpus_list") == "3,7\n"


def test_aarch64_has_neither_dies_nor_cache_ids() -> None:
    """Only x86 describes dies and numbers its caches."""
    files = build_tree(small(arch="aarch64")).files
    assert not [
        path for path in files if "/die_" in path or path.endswith(("index0/id", "index3/id"))
    ]
    assert f"{CPU}/cpu0/cache/index3/shared_cpu_list" in files


def test_unknown_package_is_minus_one() -> None:
    """A package without an id is the kernel's -1, which discovery takes for unknown."""
    packages = tuple(replace(package, id=None) for package in small().packages)
    root = build_tree(small(packages=packages))
    assert root.read(f"{CPU}/cpu0/topology/physical_package_id") == "-1\n"
    assert {cpu.package for cpu in discover(root).cpus} == {None}


def test_kernel_without_numa() -> None:
    """Without nodes there is no node folder and no numa_node file, and memory is the machine's."""
    cards = tuple(replace(card, numa_node=None) for card in small().cards)
    root = build_tree(small(nodes=(), cards=cards, memory_bytes=3 << 30))
    assert root.list(NODE) == []
    assert not [path for path in root.files if path.endswith("numa_node")]
    machine = discover(root)
    assert [(node.id, node.memory_bytes) for node in machine.nodes] == [(0, 3 << 30)]


def test_card_memory_is_movable() -> None:
    """A card's memory node has memory, no CPUs, and no normal memory, and the driver names it."""
    facts = small(
        nodes=(*small().nodes, NodeFacts(id=5, memory_bytes=1 << 30)),
        cards=(replace(small().cards[0], memory_node=5),),
    )
    root = build_tree(facts)
    assert root.read(f"{NODE}/has_memory") == "0-1,5\n"
    assert root.read(f"{NODE}/has_normal_memory") == "0-1\n"
    assert root.read(f"{NODE}/has_cpu") == "0-1\n"
    assert root.read(f"{NODE}/possible") == "0-5\n"
    assert [node.kind for node in discover(root).nodes] == ["dram", "dram", "gpu"]


def test_fast_memory_is_hbm() -> None:
    """A node's bandwidth reaches discovery, which takes much faster memory for HBM."""
    nodes = (
        *(replace(node, read_bandwidth=200_000) for node in small().nodes),
        NodeFacts(id=2, memory_bytes=1 << 30, read_bandwidth=900_000),
        NodeFacts(id=3, memory_bytes=1 << 30, read_bandwidth=50_000),
    )
    kinds = [node.kind for node in discover(build_tree(small(nodes=nodes))).nodes]
    assert kinds == ["dram", "dram", "hbm", "cxl"]


def test_bridges_node() -> None:
    """A bridge has its own node where one is stated, else that on which all below it agree."""
    root_port, card, nic = (parse_pci_address(f"16:0{n}.0") for n in range(3))
    below = [parse_pci_address(f"17:0{n}.0") for n in range(2)]
    cards = (CardFacts(path=(root_port, below[0]), device=1, numa_node=None),)
    stated = small(cards=cards, bridges=(BridgeFacts(address=root_port, numa_node=1),))
    assert discover(build_tree(stated)).pci[root_port].numa_node == 1
    for other, wanted in ((0, 0), (1, None)):
        agreed = small(
            cards=(replace(cards[0], numa_node=0),),
            nics=(NicFacts(path=(root_port, below[1]), numa_node=other),),
        )
        assert discover(build_tree(agreed)).pci[root_port].numa_node == wanted
    assert card != nic


def test_local_cpus_of_a_card_without_a_node() -> None:
    """A card without a node lists every online CPU, unless the facts state others."""
    card = replace(small().cards[0], numa_node=None)
    local = f"sys/bus/pci/devices/{card.address}/local_cpulist"
    facts = small(cards=(card,), offline_cpus=CpuSet([7]))
    assert build_tree(facts).read(local) == "0-6\n"
    told = replace(facts, cards=(replace(card, local_cpus=CpuSet([2, 3])),))
    assert build_tree(told).read(local) == "2-3\n"


def test_domain_of_32_bits() -> None:
    """A PCI domain may have 32 bits, and a path's first domain holds for all of it."""
    text = SMALL.replace("0000:16:01.0", "deadbeef:16:01.0")
    root = build_tree(read_facts(text, "wide"))
    assert root.resolve("sys/bus/pci/devices/deadbeef:17:00.0") == (
        "sys/devices/pcideadbeef:16/deadbeef:16:01.0/deadbeef:17:00.0"
    )
    assert root.read("proc/driver/nvidia/gpus/deadbeef:17:00.0/information") is not None


def test_cards_without_a_driver_are_only_on_the_bus() -> None:
    """A card that no driver holds has no file but its PCI function's, whoever made it."""
    card = small().cards[0]
    for vendor in (0x10DE, 0x1002, 0x1D94, 0x8086, 0x1DA3, 0x19E5, 0x1A03):
        other = replace(card, vendor=vendor, has_driver=False)
        root = build_tree(small(cards=(other,)))
        assert root.list("proc/driver") == root.list("dev") == root.list("sys/class") == []
        assert root.resolve(f"sys/bus/pci/devices/{card.address}/driver") is None
        assert root.read(f"sys/bus/pci/devices/{card.address}/vendor") == f"0x{vendor:04x}\n"


def test_held_cards_have_their_drivers_files() -> None:
    """Each vendor's driver shows its cards where that vendor's runtime looks for them."""
    card = replace(small().cards[0], minor=5, model="made")
    at = f"sys/bus/pci/devices/{card.address}"

    def tree(**changes: object) -> MemoryRoot:
        return build_tree(small(cards=(replace(card, **changes),)))  # type: ignore[arg-type]

    amd = tree(vendor=0x1002, partitions=2)
    nodes = "sys/class/kfd/kfd/topology/nodes"
    assert amd.list(nodes) == ["0", "1", "2", "3"]  # two with CPUs, two partitions
    assert "simd_count 0\n" in (amd.read(f"{nodes}/1/properties") or "")
    assert f"location_id {0x17 << 8 | 1 << 28}\n" in (amd.read(f"{nodes}/3/properties") or "")
    assert amd.read(f"{at}/product_name") == "made\n"
    gaudi = tree(vendor=0x1DA3, module=3)
    assert gaudi.resolve("sys/class/accel/accel5/device") == gaudi.resolve(at)
    assert gaudi.read("sys/class/accel/accel5/device/module_id") == "3\n"
    assert tree(vendor=0x19E5).list("dev") == ["davinci5"]
    for vendor, driver in ((0x8086, "xe"), (0x19E5, "devdrv_device_driver")):
        assert tree(vendor=vendor).resolve(f"{at}/driver") == f"sys/bus/pci/drivers/{driver}"
    ub = build_tree(small(cards=(), ub_devices=(UbFacts(name="udma0", numa=1, entities=2),)))
    assert ub.read("sys/class/ubcore/udma0/device/ub_totalues") == "2\n"
    assert ub.read("sys/class/ubcore/udma0/device/numa") == "1\n"


def test_virtual_function_links_to_its_physical_one() -> None:
    """A virtual function has a link to its physical one, and is no card."""
    card = small().cards[0]
    virtual = replace(card, path=(card.path[0], parse_pci_address("17:00.4")), physfn=card.address)
    root = build_tree(small(cards=(card, replace(virtual, has_driver=False))))
    assert root.resolve(f"sys/bus/pci/devices/{virtual.address}/physfn") == root.resolve(
        f"sys/bus/pci/devices/{card.address}"
    )
    assert [one.address for one in discover(root).accelerators] == [card.address]


def test_made_cards_differ() -> None:
    """No two cards have one UUID, and minors follow the PCI order unless stated."""
    machine = discover(build_tree(made_host(64, 2, 8)))
    assert len({card.uuid for card in machine.accelerators}) == 8
    assert [card.minor for card in machine.accelerators] == list(range(8))
    assert (
        discover(build_tree(small(cards=(replace(small().cards[0], minor=7),))))
        .accelerators[0]
        .minor
        == 7
    )


def test_cgroups() -> None:
    """Each cgroup has its effective cpuset, one that states none has the machine's."""
    facts = small(
        cgroups=(
            CgroupFacts(path="/", cpus=CpuSet(range(6))),
            CgroupFacts(path="/job.slice/a", cpus=CpuSet([1, 5]), nodes=NodeSet([0])),
        ),
        own_cgroup="/job.slice/a",
    )
    root = build_tree(facts)
    whole, own = discover(root).ceiling, discover(root, "self").ceiling
    assert (str(whole.cpus), str(whole.nodes)) == ("0-5", "0-1")
    assert (str(own.cpus), str(own.nodes)) == ("1,5", "0")
    assert root.read("proc/mounts") == root.read("proc/self/mounts")


def test_own_cgroup_without_cpuset() -> None:
    """A process's cgroup that states nothing has no cpuset, and the root's holds."""
    root = build_tree(small(own_cgroup="/user.slice"))
    assert "cpuset" not in (root.read("sys/fs/cgroup/user.slice/cgroup.controllers") or "cpuset")
    assert str(discover(root, "self").ceiling.cpus) == "0-7"


def test_absent_files() -> None:
    """Files that match a pattern of absent= are not there, and the others are."""
    facts = small(absent=("*/topology/core_cpus_list", "*/node/*", "sys/bus/pci/devices/*"))
    root = build_tree(facts)
    assert root.read(f"{CPU}/cpu0/topology/core_cpus_list") is None
    assert root.read(f"{CPU}/cpu0/topology/thread_siblings_list") == "0,4\n"
    assert root.list(NODE) == root.list("sys/bus/pci/devices") == []


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_large_machine(threads: int) -> None:
    """4,096 CPUs on 128 nodes are described in full."""
    facts = made_host(4096, 128, 16, threads)
    assert check_facts(facts) == []
    machine = discover(build_tree(facts))
    assert len(machine.cpus) == 4096
    assert len(machine.cores) == 4096 // threads
    assert [len(node.cpus) for node in machine.nodes] == [32] * 128
    assert len(machine.accelerators) == len(machine.nics) == 16


# Fact files ----------------------------------------------------------------------------------------


def test_example_of_the_documentation() -> None:
    """The fact file in the package's documentation is right, and means what its comments say."""
    text = (provisioner.facts.__doc__ or "").split("TOML:\n")[1].split("\nFurther keys")[0]
    facts = read_facts(textwrap.dedent(text), "example")
    machine = discover(build_tree(facts))
    assert [str(core.cpus) for core in machine.cores][:2] == ["0,16", "1,17"]
    assert len(facts.last_level_caches()) == 4
    assert [node.kind for node in machine.nodes] == ["dram"] * 3 + ["none"] * 7
    assert [machine.distance(0, node) for node in (0, 1, 2, 3)] == [10, 12, 32, 20]
    first, second = machine.accelerators
    assert (first.model, machine.pci_path(first.address)[0].numa_node) == (
        "NVIDIA H100 80GB HBM3",
        0,
    )
    assert [one.numa_node for one in machine.pci_path(second.address)] == [None, 2]
    assert [nic.name for nic in machine.nics] == ["mlx5_0"]


@pytest.mark.parametrize(
    "cpus,smt,cores",
    [
        ("0-7", "threads = 2\nsibling_stride = 4", "0,4 1,5 2,6 3,7"),
        ("0-7", "threads = 2\nsibling_stride = 1", "0-1 2-3 4-5 6-7"),
        ("0-7", "threads = 2\nsibling_stride = 2", "0,2 1,3 4,6 5,7"),
        ("0-7", "threads = 4\nsibling_stride = 1", "0-3 4-7"),
        ("0-7", "threads = 4\nsibling_stride = 2", "0,2,4,6 1,3,5,7"),
        ("0-3", "", "0 1 2 3"),
        ("8-9,24-25", "threads = 2\nsibling_stride = 16", "8,24 9,25"),
        ("0-6:1/2", "threads = 2\nsibling_stride = 2", "0,2 4,6"),
        ("0-5", 'cores = ["0-1", "2-3"]', "0-1 2-3 4 5"),
        ("0-5", 'threads = 2\nsibling_stride = 1\ncores = ["0", "5"]', "0 1-2 3-4 5"),
        ("0-3", 'cores = ["0,3", "1-2"]', "0,3 1-2"),
    ],
)
def test_cores(cpus: str, smt: str, cores: str) -> None:
    """Cores follow the rule of threads and stride, and those stated apart go before it."""
    facts = read_facts(f'title = "x"\n{smt}\npackages = [{{ cpus = "{cpus}" }}]', "x")
    found = [str(core) for core in facts.cores()]
    assert sorted(found) == sorted(cores.split())
    assert {str(core.cpus) for core in discover(build_tree(facts)).cores} == set(found)


@pytest.mark.parametrize(
    "rule,caches",
    [
        ("", "0-1,4-5 2-3,6-7"),
        ("cores_per_llc = 1", "0,4 1,5 2,6 3,7"),
        ("cores_per_llc = 3", "0-1,4-5 2-3,6-7"),
        ('llcs = ["0,4", "2-3,6-7"]', "0,4 2-3,6-7"),
    ],
)
def test_last_level_caches(rule: str, caches: str) -> None:
    """Caches are a package's, or so many cores of a node, or stated, not necessarily for all CPUs."""
    facts = read_facts(f"{rule}\n{SMALL}", "x")
    assert [str(llc) for llc in facts.last_level_caches()] == caches.split()


def test_vendors_keys_are_read() -> None:
    """What only some vendors' cards and buses have is stated by keys of its own."""
    text = SMALL.replace("class = 0x030200", "class = 0x030200, minor = 3, module = 2")
    text = text.replace("0x10de", "0x1002").replace("minor = 3", "minor = 3, partitions = 8")
    text += """
        ub_devices = [{ name = "udma0", numa = 1, entities = 3 }, { name = "udma1" }]
        nics = [{ path = "0000:20:00.0", rdma = ["mlx4_0"], ports = 2 }]
    """
    facts = read_facts(text, "x")
    (card,), (nic,) = facts.cards, facts.nics
    assert (card.minor, card.module, card.partitions) == (3, 2, 8)
    assert facts.ub_devices == (UbFacts(name="udma0", numa=1, entities=3), UbFacts(name="udma1"))
    assert discover(build_tree(facts)).nics[0].ports == ((1, 2),)
    assert nic.ports == 2


def test_several_nodes_at_once() -> None:
    """A node entry with ids= stands for each of them."""
    text = SMALL.replace("nodes = [", 'nodes = [\n  { ids = "8-9,12", memory = "0" },')
    facts = read_facts(text, "x")
    assert str(facts.node_ids) == "0-1,8-9,12"
    assert [node.id for node in discover(build_tree(facts)).nodes] == [0, 1, 8, 9, 12]


def test_distances_both_ways_and_the_last_wins() -> None:
    """A distance holds both ways, a later one wins, and a node is always 10 from itself."""
    rules = (
        DistanceFacts(from_nodes=NodeSet([0, 1]), to_nodes=NodeSet([0, 1]), value=30),
        DistanceFacts(from_nodes=NodeSet([1]), to_nodes=NodeSet([0]), value=21),
    )
    assert small(distances=rules).distance_rows() == {0: [10, 21], 1: [21, 10]}
    assert small().distance_rows() == {0: [10, 20], 1: [20, 10]}


def test_no_toml() -> None:
    """A text that is no TOML is one clear error with its place."""
    with pytest.raises(InputError, match=r"^host\.toml: is no TOML: .*line 2"):
        read_facts('title = "x"\npackages = oops', "host.toml")


def test_every_wrong_value_at_once() -> None:
    """Wrong types, wrong texts, unknown and missing keys are all reported, each with its place."""
    found = refusals(
        """
        title = 1
        threads = true
        sibling_strid = 4
        packages = [{ cpus = "3-1" }, { id = 0, cores = "0" }, 7]
        nodes = [{ id = 0, cpus = "0", memory = "lots" }, { memory = "1GiB" }, { id = 1, ids = "2", memory = "0" }]
        distances = [{ from = "0", to = "x" }]
        cards = [{ path = "0000:16:01.0/17:zz.0", node = "0" }]
        cores = ["0", 1]
        own_cgroup = ["/"]
        """
    )
    for wanted in (
        "file: title= is 1: expected a text",
        "file: threads= is True: expected a whole number",
        "file: sibling_strid= is unknown",
        "file: packages[0]: cpus= '3-1' is no CPU list: range '3-1' runs backwards",
        "file: packages[1]: cpus= is missing",
        "file: packages[1]: cores= is unknown",
        "file: packages[2] is 7: expected a table",
        "file: nodes[0]: memory= 'lots' is no size",
        "file: nodes[1]: id= and ids= are both there or both missing",
        "file: nodes[2]: id= and ids= are both there or both missing",
        "file: distances[0]: value= is missing",
        "file: distances[0]: to= 'x' is no node list",
        "file: cards[0]: path= '0:17:zz.0' is no PCI address",
        "file: cards[0]: node= is '0': expected a whole number",
        "file: cards[0]: device= is missing",
        "file: cores= holds 1: expected texts",
        "file: own_cgroup= is ['/']: expected a text",
    ):
        assert [one for one in found if one.startswith(wanted)], (wanted, found)


def test_unknown_key_has_a_near_one() -> None:
    """An unknown key's hint is the known one that is nearest."""
    with pytest.raises(FactsError) as caught:
        read_facts(SMALL.replace("sibling_stride", "sibling_strides"), "file")
    assert caught.value.problems[0].hint == "Did you mean sibling_stride=?"


def test_every_contradiction_at_once() -> None:
    """Facts that are each of the right form and contradict each other are all reported."""
    found = refusals(
        """
        title = "x"
        packages = [{ id = 0, cpus = "0-3" }, { id = 0, cpus = "3-5" }]
        nodes = [{ id = 0, cpus = "0-3", memory = "0" }, { id = 0, memory = "0" }]
        offline = "0-9"
        distances = [{ from = "0", to = "4", value = 300 }]
        own_cgroup = "x"
        """
    )
    for wanted in (
        "packages= name CPUs 3 twice",
        "packages= id= 0 is there twice",
        "nodes= hold CPUs '0-3': expected those of packages=, 0-5",
        "offline= names CPUs 6-9, which are in no package",
        "offline= names every CPU",
        "nodes= id= 0 is there twice",
        "nodes= have no memory",
        "distances= to= names nodes 4, which nodes= lacks",
        "distances= value= is 300: expected 10 to 255",
        "cgroup 'x' is no path",
    ):
        assert [one for one in found if wanted in one], (wanted, found)


ROOT_PORT, CARD, OTHER = (parse_pci_address(one) for one in ("16:01.0", "17:00.0", "18:00.0"))


@pytest.mark.parametrize(
    "changes,wanted",
    [
        ({"title": "two\nlines"}, "expected one line of text"),
        ({"packages": ()}, "packages= name no CPU"),
        ({"threads": 0}, "threads= is 0"),
        ({"sibling_stride": 0}, "sibling_stride= is 0"),
        ({"sibling_stride": 3}, "CPU 6 finds siblings 6 at sibling_stride= 3: expected 2 CPUs"),
        ({"sibling_stride": 2}, "core 0,2 lies in several packages"),
        ({"sibling_stride": 2}, "core 0,2 lies in several nodes"),
        ({"core_cpus": (CpuSet([0, 4]), CpuSet([4]))}, "cores= name CPUs 4 twice"),
        ({"core_cpus": (CpuSet(),)}, "cores= has an empty set"),
        ({"core_cpus": (CpuSet([99]),)}, "cores= names CPUs 99, which are in no package"),
        ({"llcs": (CpuSet([0]),)}, "llcs= 0 cuts a core in two"),
        ({"llcs": (CpuSet([0, 2, 4, 6]),)}, "llcs= 0,2,4,6 lies in several packages"),
        (
            {"llcs": (CpuSet([0, 4]),), "cores_per_llc": 1},
            "llcs= and cores_per_llc= are both there",
        ),
        ({"cores_per_llc": -1}, "cores_per_llc= is -1"),
        (
            {"packages": (PackageFacts(cpus=CpuSet(range(8)), dies=(CpuSet([0]),)),)},
            "dies= hold CPUs 0",
        ),
        ({"possible_cpus": CpuSet(range(6))}, "possible_cpus= lacks CPUs 6-7"),
        ({"possible_nodes": NodeSet([0])}, "possible_nodes= lacks nodes 1"),
        ({"isolated_cpus": CpuSet([8])}, "isolated= names CPUs 8"),
        ({"kernel_max": 6}, "kernel_max= is 6"),
        ({"memory_bytes": 1024}, "memory= is there beside nodes="),
        ({"numa_balancing": 9}, "numa_balancing= is 9"),
        ({"cards": (CardFacts(path=(), device=1),)}, "path= is empty"),
        ({"cards": (CardFacts(path=(CARD,), device=1, numa_node=9),)}, "node= is 9"),
        (
            {"cards": (CardFacts(path=(CARD,), device=1 << 16),)},
            "device= is 0x10000: expected 16 bits",
        ),
        ({"cards": (CardFacts(path=(CARD,), device=1, pci_class=1 << 24),)}, "expected 24 bits"),
        ({"cards": (CardFacts(path=(CARD,), device=1),) * 2}, "0000:17:00.0 is there twice"),
        ({"cards": (CardFacts(path=(CARD, ROOT_PORT), device=1),)}, "expected a higher bus"),
        (
            {"cards": (CardFacts(path=(ROOT_PORT, CARD._replace(domain=1)), device=1),)},
            "expected one domain",
        ),
        ({"nics": (NicFacts(path=(CARD, OTHER)),)}, "0000:17:00.0 has others below it"),
        (
            {"nics": (NicFacts(path=(parse_pci_address("15:00.0"), ROOT_PORT, OTHER)),)},
            "0000:16:01.0 is in two places",
        ),
        ({"functions": (PciFacts(path=(CARD,), pci_class=0, vendor=1, device=1),)}, "there twice"),
        ({"bridges": (BridgeFacts(address=OTHER),)}, "bridges= 0000:18:00.0 is in no path="),
        ({"nics": (NicFacts(path=(OTHER,), physfn=ROOT_PORT),)}, "which is no other function here"),
        ({"nics": (NicFacts(path=(OTHER,), local_cpus=CpuSet([8])),)}, "local_cpus= is 8"),
        ({"nics": (NicFacts(path=(OTHER,), rdma=("../x",)),)}, "expected a device's name"),
        ({"nics": (NicFacts(path=(OTHER,), net=("a", "a")),)}, "nics= net= a is there twice"),
        ({"cards": (CardFacts(path=(CARD,), device=1, memory_node=0),)}, "memory_node= is 0"),
        (
            {"cards": (CardFacts(path=(CARD,), device=1, model="a\nb"),)},
            "expected one line of text",
        ),
        ({"cards": (CardFacts(path=(CARD,), device=1, minor=-1),)}, "minor= is -1"),
        ({"cards": (CardFacts(path=(CARD,), device=1, module=-1),)}, "module= is -1"),
        ({"cards": (CardFacts(path=(CARD,), device=1, partitions=2),)}, "partitions= is 2"),
        (
            {"cards": (CardFacts(path=(CARD,), vendor=0x1002, device=1, partitions=0),)},
            "partitions= is 0",
        ),
        ({"nics": (NicFacts(path=(CARD,), ports=-1),)}, "nics= ports= is -1"),
        ({"ub_devices": (UbFacts(name="a/b"),)}, "ub_devices= name= is 'a/b'"),
        ({"ub_devices": (UbFacts(name="udma0"),) * 2}, "ub_devices= name= "),
        ({"ub_devices": (UbFacts(name="udma0", entities=-1),)}, "entities= is -1"),
        ({"cgroups": (CgroupFacts(path="/a/../b"),)}, "cgroup '/a/../b' is no path"),
        (
            {"cgroups": (CgroupFacts(path="/a", cpus=CpuSet([8])),)},
            "cpus= is '8': expected online CPUs",
        ),
        ({"cgroups": (CgroupFacts(path="/a", nodes=NodeSet([7])),)}, "nodes= is '7'"),
        ({"cgroups": (CgroupFacts(path="/a"),) * 2}, "cgroups= path= /a is there twice"),
    ],
)
def test_impossible_machine(changes: dict[str, object], wanted: str) -> None:
    """A machine that can't be has a problem that names the thing, and the machine in front."""
    found = check_facts(small(**changes))
    assert [one for one in found if wanted in one.message], found
    assert all(one.message.startswith("small: ") for one in found)
