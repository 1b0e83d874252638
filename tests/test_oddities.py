"""What is odd about a machine is said, and what is not odd is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from provisioner.discovery import discover
from provisioner.facts.values import BridgeFacts, NicFacts
from provisioner.idset import CpuSet
from provisioner.oddities import find_oddities
from provisioner.pci import PciAddress
from provisioner.topology import Machine
from tests.hosts import make_card, make_host, make_tree
from tests.trees import add_files

TWO = {0: "0-7", 1: "8-15"}


def said(machine: Machine, code: str) -> list[str]:
    """The messages of one code."""
    return [note.message for note in find_oddities(machine) if note.code == code]


def beside(
    *cards: tuple[str, int | None], nics: Sequence[NicFacts] = (), bridge: int | None = None
) -> Machine:
    """Cards below one switch, 0000:40:01.0, with the nodes that they say."""
    return make_host(
        TWO,
        card_facts=tuple(
            make_card(f"0000:40:01.0/{address}", numa_node=node) for address, node in cards
        ),
        nics=tuple(nics),
        bridges=(BridgeFacts(address=PciAddress(0, 0x40, 1, 0), numa_node=bridge),),
    )


def test_card_unlike_its_neighbours() -> None:
    """A card that names another node than all that is below its switch is named with what they say."""
    machine = beside(("0000:41:00.0", 0), ("0000:42:00.0", 0), ("0000:43:00.0", 1))
    (message,) = said(machine, "unlike_neighbours")
    assert message.startswith("Card 0000:43:00.0 names NUMA node 1, and ")
    assert "0000:41:00.0 node 0, 0000:42:00.0 node 0" in message


def test_card_unlike_its_bridge() -> None:
    """Cards that agree with each other and not with the bridge above them are each named with it."""
    machine = beside(("0000:41:00.0", 1), ("0000:42:00.0", 1), bridge=0)
    assert said(machine, "unlike_neighbours") == [
        f"Card 0000:4{number}:00.0 names NUMA node 1, and the bridge 0000:40:01.0 above it node 0."
        for number in (1, 2)
    ]


def test_card_unlike_its_network_device() -> None:
    """A network device is a neighbour too."""
    nic = NicFacts(
        path=(PciAddress(0, 0x40, 1, 0), PciAddress(0, 0x44, 0, 0)), numa_node=0, rdma=("mlx5_0",)
    )
    (message,) = said(beside(("0000:41:00.0", 1), nics=(nic,)), "unlike_neighbours")
    assert "0000:44:00.0 node 0" in message


def test_nearer_neighbours_count_alone() -> None:
    """Two switches of different nodes below one root are as they should be, and a card without a node is none."""
    machine = make_host(
        TWO,
        card_facts=tuple(
            make_card(f"0000:40:00.0/{switch}:00.0/{address}", numa_node=node)
            for switch, address, node in (
                ("0000:41", "0000:42:00.0", 0),
                ("0000:41", "0000:43:00.0", 0),
                ("0000:51", "0000:52:00.0", 1),
                ("0000:51", "0000:53:00.0", 1),
                ("0000:51", "0000:54:00.0", None),
            )
        ),
        bridges=tuple(
            BridgeFacts(address=PciAddress(0, bus, 0, 0), numa_node=None)
            for bus in (0x40, 0x41, 0x51)
        ),
    )
    assert said(machine, "unlike_neighbours") == []


def test_memory_node_is_no_place_on_the_bus() -> None:
    """A card that names its own memory's node, which has no CPUs, is unlike nobody."""
    machine = make_host(
        {0: "0-7", 1: "8-15", 2: ""},
        card_facts=(make_card("0000:40:01.0/0000:41:00.0", numa_node=2, memory_node=2),),
        bridges=(BridgeFacts(address=PciAddress(0, 0x40, 1, 0), numa_node=1),),
    )
    assert said(machine, "unlike_neighbours") == []


@pytest.mark.parametrize(
    "cards, found",
    [
        ([0, 0, 0], ["All 3 cards name NUMA node 0, of nodes 0-1."]),
        ([0, 1], []),
        ([0], []),
        ([0, None], []),
    ],
)
def test_all_cards_on_one_node(cards: list[int | None], found: list[str]) -> None:
    """Several cards that all name one of several nodes are told of."""
    assert said(make_host(TWO, cards), "all_on_one_node") == found


def test_one_node_for_all_on_a_machine_of_one() -> None:
    """On a machine of one node with CPUs that is no news."""
    assert said(make_host({0: "0-7"}, [0, 0]), "all_on_one_node") == []


def test_much_smaller_memory() -> None:
    """A node with less than two thirds of what its peers have is named with both sizes."""
    nodes = {0: "0-3", 1: "4-7", 2: "8-11", 3: "12-15"}
    (message,) = said(make_host(nodes, [0], memory={2: 32, 3: 43}), "small_memory")
    assert message == (
        "Some NUMA nodes have much less memory than the largest's 64.0 GiB: node 2 has 32.0 GiB."
    )


def test_one_large_node_makes_the_others_small() -> None:
    """Also where most nodes are small; nodes without CPUs are nobody's peers, and a little less is no news."""
    nodes = {0: "0-3", 1: "4-7", 2: "8-11", 3: ""}
    (message,) = said(make_host(nodes, [0], memory={0: 512, 3: 8}), "small_memory")
    assert message.endswith("512.0 GiB: node 1 has 64.0 GiB, node 2 has 64.0 GiB.")
    assert said(make_host(nodes, [0], memory={0: 90, 3: 999}), "small_memory") == []


def test_node_without_memory_is_small() -> None:
    """A node with CPUs and no memory has less than its peers."""
    (message,) = said(make_host(TWO, [0], memory={1: 0}), "small_memory")
    assert message.endswith("node 1 has 0.0 GiB.")


def test_smt_off_on_some_cores() -> None:
    """Cores of which a sibling is offline are counted, and the offline CPUs named."""
    machine = make_host({0: "0-7,8-15"}, [0], stride=8, offline_cpus=CpuSet([9, 11]))
    (message,) = said(machine, "mixed_smt")
    assert "2 of 8" in message
    assert "CPUs 9,11 are offline" in message


def test_smt_off_on_all_cores() -> None:
    """Cores that all have one CPU online are alike."""
    machine = make_host({0: "0-7,8-15"}, [0], stride=8, offline_cpus=CpuSet(range(8, 16)))
    assert said(machine, "mixed_smt") == []


def test_hybrid_cores() -> None:
    """Cores of one and of two CPUs, with none offline, are a hybrid processor's."""
    machine = make_host(
        {0: "0-5"}, [0], core_cpus=(CpuSet([0, 1]), CpuSet([2, 3]), CpuSet([4]), CpuSet([5]))
    )
    (message,) = said(machine, "mixed_smt")
    assert message == "Cores have 1 or 2 CPUs: 2 of 4 have fewer than 2."


def test_hybrid_cores_of_which_one_is_offline() -> None:
    """Fewer offline CPUs than cores lack are not what makes those smaller."""
    cores = (CpuSet([0, 1]), CpuSet([2, 3]), CpuSet([4]), CpuSet([5]), CpuSet([6]))
    machine = make_host({0: "0-6"}, [0], core_cpus=cores, offline_cpus=CpuSet([6]))
    assert said(machine, "mixed_smt") == ["Cores have 1 or 2 CPUs: 2 of 4 have fewer than 2."]


def test_package_that_lies_across_nodes() -> None:
    """A package and a node that are each partly in the other are what a hypervisor made up."""
    machine = make_host(TWO, [0, 1], packages=("0-3,8-11", "4-7,12-15"))
    (message,) = said(machine, "package_across_nodes")
    assert "package 0 lies on nodes 0-1, package 1 lies on nodes 0-1" in message


def test_packages_that_have_one_number() -> None:
    """Two packages that the kernel numbers alike are one by their number, and that is said."""
    tree = make_tree(TWO, [0, 1])
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id": "0\n" for cpu in range(16)
    }
    machine = discover(add_files(tree, files))
    assert {cpu.package for cpu in machine.cpus} == {0}
    assert said(machine, "machine") == [
        (
            "CPUs that package_cpus_list has in different groups have one number, by which the groups are one: "
            "0 of CPUs 0,8."
        )
    ]


@pytest.mark.parametrize(
    "nodes, packages, found",
    [
        (TWO, ("0-15",), []),  # SNC, NPS
        (TWO, ("0-7", "8-15"), []),
        ({0: "0-15"}, ("0-7", "8-15"), ["NUMA node 0 holds 2 packages"]),
        (
            TWO,
            ("0-3", "4-7", "8-11", "12-15"),
            ["NUMA nodes 0-1 hold several packages each"],
        ),
    ],
)
def test_packages_in_a_node(
    nodes: dict[int, str], packages: tuple[str, ...], found: list[str]
) -> None:
    """Several packages in a node are told of; several nodes in a package are as they should be."""
    machine = make_host(nodes, [0, 0], packages=packages)
    assert [one.partition(":")[0] for one in said(machine, "packages_in_node")] == found
    assert said(machine, "package_across_nodes") == []
