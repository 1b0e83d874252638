"""The machines that ship with provision, and what they are known for."""

from __future__ import annotations

import pytest

from provisioner.discovery import discover
from provisioner.errors import InputError
from provisioner.facts import build_tree, check_facts
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.samples import list_samples, read_sample
from provisioner.topology import Machine

NAMES = [sample.name for sample in list_samples()]


def machine_of(name: str) -> Machine:
    """The machine that discovery finds in a sample."""
    return discover(build_tree(read_sample(name)))


def card_nodes(machine: Machine) -> list[int | None]:
    """Each card's node, in PCI order."""
    return [machine.pci_path(card.address)[0].numa_node for card in machine.accelerators]


def test_names() -> None:
    """The samples are these, in the order of their names."""
    assert NAMES == [
        "ascend-8npu",
        "gaudi-8card",
        "grace-4gpu",
        "max-6gpu",
        "mi300a-4apu",
        "mi300x-8gpu",
        "nps4-8gpu",
        "two-socket-8gpu",
        "uneven-5-3",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_sample_is_a_possible_machine(name: str) -> None:
    """A sample has no fault, a text for people, and nothing odd in its own files."""
    facts = read_sample(name)
    assert check_facts(facts) == []
    assert facts.name == name
    assert facts.description
    assert machine_of(name).oddities == ()


def test_list_counts() -> None:
    """The list's numbers are those that discovery finds."""
    for sample in list_samples():
        machine = machine_of(sample.name)
        assert sample.title
        assert sample.cpus == len(machine.cpus)
        assert sample.nodes == len(machine.nodes)
        assert sample.packages == len({cpu.package for cpu in machine.cpus})
        assert sample.nics == len(machine.nics)
        assert sample.cards == len(machine.accelerators)


@pytest.mark.parametrize(
    "name,hint",
    [
        ("two-socket-8gpus", "Did you mean two-socket-8gpu?"),
        ("nps4", "Did you mean nps4-8gpu?"),
        ("../sample_facts/nps4-8gpu", "List them"),
        ("", "List them"),
        ("a\x1b[2Jb", "List them"),
    ],
)
def test_unknown_sample(name: str, hint: str) -> None:
    """An unknown name is refused with every name, and the nearest as the hint."""
    with pytest.raises(InputError) as caught:
        read_sample(name)
    assert all(known in caught.value.message for known in NAMES)
    assert hint in caught.value.hint
    assert caught.value.message.isprintable()


def test_two_socket_8gpu() -> None:
    """Each card has an RDMA device below its own switch, and its NVSwitches are no cards."""
    machine = machine_of("two-socket-8gpu")
    assert card_nodes(machine) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert str(machine.cores[0].cpus) == "0,112"
    assert [str(node.cpus) for node in machine.nodes] == ["0-55,112-167", "56-111,168-223"]
    assert {cpu.llc for cpu in machine.cpus} == {0, 56}
    for card in machine.accelerators:
        switch = machine.pci_path(card.address)[2].address
        beside = [
            nic.name
            for nic in machine.nics
            if len(path := machine.pci_path(nic.address)) > 2 and path[2].address == switch
        ]
        assert len(beside) == 1


def test_nps4_8gpu() -> None:
    """The cards sit on the odd nodes in the order for which such hosts are known."""
    machine = machine_of("nps4-8gpu")
    assert card_nodes(machine) == [3, 3, 1, 1, 7, 7, 5, 5]
    assert [machine.distance(3, node) for node in range(8)] == [12, 12, 12, 10, 32, 32, 32, 32]
    llcs = {core.llc for core in machine.cores}
    assert len(llcs) == 32
    assert all(sum(core.llc == llc for core in machine.cores) == 4 for llc in llcs)


def test_uneven_5_3() -> None:
    """Five cards are on node 0, three on node 1, and the cards' audio functions are none."""
    assert card_nodes(machine_of("uneven-5-3")) == [0, 0, 0, 0, 0, 1, 1, 1]


def test_grace_4gpu() -> None:
    """Nodes 2, 10, 18 and 26 are the cards' memory; of 34 nodes only 0 and 1 have CPUs."""
    machine = machine_of("grace-4gpu")
    assert card_nodes(machine) == [0, 0, 1, 1]
    assert [str(card.memory_nodes) for card in machine.accelerators] == ["2", "10", "18", "26"]
    kinds = {node.id: node.kind for node in machine.nodes}
    assert len(kinds) == 34
    assert {node for node, kind in kinds.items() if kind == "dram"} == {0, 1}
    assert {node for node, kind in kinds.items() if kind == "gpu"} == {2, 10, 18, 26}
    assert str(machine.cpu_nodes) == "0-1"
    assert [machine.distance(18, node) for node in (0, 1, 10, 18, 19)] == [120, 80, 40, 10, 11]


def test_ascend_8npu() -> None:
    """The NPUs are in pairs on the even nodes, and numbered by their driver in an order of its own."""
    facts = read_sample("ascend-8npu")
    assert [card.minor for card in facts.cards] == [1, 3, 5, 7, 4, 6, 0, 2]
    machine = machine_of("ascend-8npu")
    assert card_nodes(machine) == [0, 0, 2, 2, 4, 4, 6, 6]
    assert {card.vendor for card in machine.accelerators} == {"ascend"}
    assert [len(node.cpus) for node in machine.nodes] == [24] * 8
    assert len(machine.cores) == 192


def test_mi300a_4apu() -> None:
    """Each of the four cards is six devices to its runtime, counted through."""
    machine = machine_of("mi300a-4apu")
    assert [card.runtime_numbers for card in machine.accelerators] == [
        tuple(range(first, first + 6)) for first in (0, 6, 12, 18)
    ]
    assert card_nodes(machine) == [0, 1, 2, 3]


def test_mi300x_8gpu() -> None:
    """Each card is one device to its runtime, in PCI order, and known by its name."""
    machine = machine_of("mi300x-8gpu")
    assert [card.runtime_numbers for card in machine.accelerators] == [(at,) for at in range(8)]
    assert {card.model for card in machine.accelerators} == {"AMD Instinct MI300X OAM"}


def test_gaudi_8card() -> None:
    """The driver's numbers and the places on the board are read, and differ from the PCI order."""
    machine = machine_of("gaudi-8card")
    assert [card.runtime_numbers for card in machine.accelerators] == [
        (number,) for number in (1, 0, 3, 2, 4, 5, 6, 7)
    ]
    assert [card.module for card in machine.accelerators] == [3, 2, 1, 0, 5, 4, 7, 6]


def test_max_6gpu() -> None:
    """Three cards a package, and the processors' high-bandwidth memory is nobody's by default."""
    machine = machine_of("max-6gpu")
    assert card_nodes(machine) == [0, 0, 0, 1, 1, 1]
    assert [node.kind for node in machine.nodes] == ["dram", "dram", "hbm", "hbm"]


@pytest.mark.parametrize("name", NAMES)
def test_sample_can_be_planned(name: str) -> None:
    """A sample is planned without a request: each card is a rank on its own node's cores."""
    machine = machine_of(name)
    (service,) = make_plan(machine, PlacementRequest()).services
    assert [str(rank.cpu_nodes) for rank in service.ranks] == [
        str(node) for node in card_nodes(machine)
    ]
    assert all(rank.cpus and rank.memory_nodes for rank in service.ranks)
