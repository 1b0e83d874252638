"""Cards of every vendor: what is one, how its runtime counts it, and what a rank is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.cardfs import parse_kfd_gpu
from provisioner.cli import options
from provisioner.discovery import discover
from provisioner.errors import ParseError, ProblemsError
from provisioner.facts import build_tree
from provisioner.facts.values import (
    CardFacts,
    HostFacts,
    NodeFacts,
    PackageFacts,
    PciFacts,
    UbFacts,
)
from provisioner.fingerprint import machine_fingerprint
from provisioner.idset import CpuSet, NodeSet
from provisioner.pci import parse_pci_address
from provisioner.plan import Plan
from provisioner.planfile import check_plan, format_plan, parse_plan
from provisioner.planner import make_plan
from provisioner.render import DEVICE_VARIABLES, rank_environment, render
from provisioner.request import PlacementRequest, ServiceRequest, WorkerRequest, check_request
from provisioner.root import MemoryRoot
from provisioner.samples import read_sample
from provisioner.topology import VENDORS, Machine
from provisioner.topology_report import card_rows, node_rows, topology_to_json
from tests.hosts import make_card, make_host, note_codes, plan_for, ranks_of

KFD_LINES = st.tuples(
    st.sampled_from(["simd_count", "cpu_cores_count", "vendor_id", "location_id", "domain", ""]),
    st.integers(-(2**40), 2**40),
).map(lambda pair: f"{pair[0]} {pair[1]}")

ONE_NODE = {0: "0-31"}
TWO_NODES = {0: "0-15", 1: "16-31"}


def made(*cards: CardFacts, **facts: Any) -> Machine:
    """A machine of two nodes with these cards."""
    return make_host(TWO_NODES, card_facts=cards, **facts)


def names(machine: Machine) -> list[tuple[str, int, str]]:
    """(vendor, index, name) of each card."""
    return [(card.vendor, card.index, card.name) for card in machine.accelerators]


def environment(plan: Plan, number: int = 0) -> Mapping[str, str]:
    """The environment of a rank of the plan's first service."""
    service = plan.services[0]
    return rank_environment(plan, service, service.ranks[number])


# What is a card ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_vendors_cards_are_found_and_planned(vendor: str) -> None:
    """Four cards of any vendor are four cards in PCI order, known from their driver, and a rank each."""
    machine = make_host(TWO_NODES, [0, 0, 1, 1], vendor=vendor)
    assert [(card.vendor, card.index) for card in machine.accelerators] == [
        (vendor, index) for index in range(4)
    ]
    assert {card.source for card in machine.accelerators} == {"driver"}
    plan = plan_for(machine)
    assert [str(rank.cpus) for rank in ranks_of(plan)] == ["0-7", "8-15", "16-23", "24-31"]
    assert {rank.vendor for rank in ranks_of(plan)} == {vendor}
    assert not note_codes(plan) - {"npu_numbers"}


@pytest.mark.parametrize("vendor", VENDORS)
def test_cards_without_a_driver_are_known_from_the_bus(vendor: str) -> None:
    """Before its driver is loaded a card is on the PCI bus, and a note says that it is all that is known."""
    machine = made(make_card("0000:17:00.0", vendor, numa_node=1, has_driver=False))
    assert [card.source for card in machine.accelerators] == ["pci"]
    notes = plan_for(machine).notes
    assert [note.code for note in notes if note.code == "driver_not_loaded"]


@pytest.mark.parametrize("vendor", VENDORS)
def test_virtual_functions_belong_to_their_card(vendor: str) -> None:
    """An SR-IOV virtual function or a vGPU is no card, whoever made it."""
    card = make_card("0000:17:00.0", vendor, numa_node=0)
    virtual = make_card("0000:17:00.4", vendor, numa_node=0, physfn=card.address, has_driver=False)
    assert names(made(card, virtual)) == [(vendor, 0, "0000:17:00.0")]


@pytest.mark.parametrize(
    "vendor_id, device, pci_class, path",
    [
        (0x1A03, 0x2000, 0x030000, "0000:02:00.0"),  # ASPEED
        (0x102B, 0x0534, 0x030000, "0000:02:00.0"),  # Matrox
        (0x1002, 0x515E, 0x030000, "0000:02:00.0"),  # Radeon ES1000
        (0x19E5, 0x1711, 0x030000, "0000:02:00.0"),  # Huawei's BMC
        (0x1002, 0x164E, 0x030000, "0000:02:00.0"),  # of a Ryzen
        (0x1002, 0x1586, 0x038000, "0000:c5:00.0"),  # of a Ryzen AI Max
        (0x1002, 0x6758, 0x030000, "0000:02:00.0"),  # a display card of 2011
        (0x8086, 0x46A6, 0x030000, "0000:00:02.0"),
        (0x8086, 0x7D45, 0x038000, "0000:00:02.0"),
        (0x8086, 0x7D1D, 0x120000, "0000:00:0b.0"),  # the NPU of a laptop
        (0x8086, 0x4940, 0x0B4000, "0000:6b:00.0"),  # QAT
        (0x10DE, 0x22A3, 0x068000, "0000:02:00.0"),  # NVSwitch
        (0x1DA3, 0x1020, 0x020000, "0000:02:00.0"),  # a network function
    ],
)
def test_what_is_no_card(vendor_id: int, device: int, pci_class: int, path: str) -> None:
    """Integrated and BMC graphics, switches and co-processors are no accelerators."""
    address = parse_pci_address(path)
    function = PciFacts(path=(address,), pci_class=pci_class, vendor=vendor_id, device=device)
    machine = make_host(ONE_NODE, functions=(function,))
    assert machine.accelerators == ()
    with pytest.raises(ProblemsError) as caught:
        plan_for(machine)
    assert [problem.code for problem in caught.value.problems] == ["no_card"]


def test_intel_card_in_the_place_of_integrated_graphics() -> None:
    """A virtual machine may have a card at 0000:00:02.0: its id tells it."""
    assert names(made(make_card("0000:00:02.0", "intel", device=0x56C0, numa_node=0))) == [
        ("intel", 0, "0000:00:02.0")
    ]


@pytest.mark.parametrize("pci_class", [0x030000, 0x030200, 0x038000, 0x120000])
def test_every_class_of_amds_cards(pci_class: int) -> None:
    """An Instinct card is a card as VGA, 3D or other display controller and as an accelerator."""
    machine = made(
        make_card("0000:17:00.0", "amd", device=0x740C, pci_class=pci_class, numa_node=0)
    )
    assert names(machine) == [("amd", 0, "0000:17:00.0")]


def test_amd_function_that_does_not_say_its_id() -> None:
    """Without a device file a display controller counts if it is no VGA controller, which a BMC's is."""
    for pci_class, count in ((0x038000, 1), (0x030000, 0)):
        card = make_card("0000:17:00.0", "amd", pci_class=pci_class, numa_node=0, has_driver=False)
        machine = made(card, absent=("*/device",))
        assert len(machine.accelerators) == count


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "hygon", "habana"])
def test_card_that_the_driver_does_not_hold(vendor: str) -> None:
    """Of two cards on the bus the one that the driver holds counts, and the other is told of."""
    machine = made(
        make_card("0000:17:00.0", vendor, numa_node=0, has_driver=False),
        make_card("0000:27:00.0", vendor, numa_node=1),
    )
    assert names(machine) == [(vendor, 0, "0000:27:00.0")]
    (sentence,) = machine.oddities
    assert "does not hold 0000:17:00.0" in sentence


# How runtimes count --------------------------------------------------------------------------------


def test_hip_counts_in_the_order_of_the_compute_topology() -> None:
    """HIP's numbers are the places in KFD's topology, and a card's index stays its place on PCI."""
    machine = made(
        make_card("0000:17:00.0", "amd", numa_node=0, minor=1),
        make_card("0000:27:00.0", "amd", numa_node=1, minor=0),
    )
    assert [(card.index, card.runtime_numbers) for card in machine.accelerators] == [
        (0, (1,)),
        (1, (0,)),
    ]
    assert environment(plan_for(machine))["HIP_VISIBLE_DEVICES"] == "1,0"


@pytest.mark.parametrize("count", [1, 3, 8])
def test_partitions_share_a_function_and_are_one_card(count: int) -> None:
    """In SPX, TPX and CPX mode a card is one, and has one, three or eight numbers."""
    machine = made(
        make_card("0000:17:00.0", "amd", numa_node=0, partitions=count),
        make_card("0000:27:00.0", "amd", numa_node=1, partitions=count),
    )
    first, second = machine.accelerators
    assert first.runtime_numbers == tuple(range(count))
    assert second.runtime_numbers == tuple(range(count, 2 * count))
    plan = plan_for(machine, visible_devices="rank")
    numbers = ",".join(str(number) for number in range(count, 2 * count))
    assert environment(plan, 1)["HIP_VISIBLE_DEVICES"] == numbers
    assert ("partitions" in note_codes(plan)) == (count > 1)


def test_partition_that_names_itself_by_its_function() -> None:
    """Linux before 6.7 put the partition's number in place of the function, which is not on the bus."""
    root = build_tree(read_sample("mi300a-4apu"))
    files = dict(root.files)
    for path, text in files.items():
        if path.endswith("/properties") and "simd_count 304" in text:
            location = int(text.split("location_id ")[1].split()[0])
            old = location & 0xFFFF | location >> 28
            files[path] = text.replace(f"location_id {location}", f"location_id {old}")
    machine = discover(MemoryRoot("old", files, root.links))
    assert [card.runtime_numbers for card in machine.accelerators] == [
        tuple(range(first, first + 6)) for first in (0, 6, 12, 18)
    ]


def test_integrated_graphics_take_a_number_of_the_runtime() -> None:
    """HIP and Level Zero count integrated graphics too, so that a card's number is not its index."""
    amd = made(
        make_card("0000:03:00.0", "amd", device=0x744C, pci_class=0x030000, numa_node=0, minor=1),
        make_card("0000:c5:00.0", "amd", device=0x1586, pci_class=0x038000, minor=0),
    )
    assert [card.runtime_numbers for card in amd.accelerators] == [(1,)]
    intel = made(
        make_card("0000:00:02.0", "intel", device=0x4680, pci_class=0x030000),
        make_card("0000:03:00.0", "intel", device=0x56A0, pci_class=0x030000, numa_node=0),
    )
    assert [card.runtime_numbers for card in intel.accelerators] == [(1,)]
    assert environment(plan_for(intel))["ZE_AFFINITY_MASK"] == "1"
    assert any("integrated graphics" in sentence for sentence in intel.oddities)


def test_node_of_an_old_apu_is_no_card() -> None:
    """One topology node for CPU cores and graphics is an APU of before 2018, and keeps its number."""
    card = make_card("0000:17:00.0", "amd", numa_node=0, minor=1)
    root = build_tree_with(
        card,
        "sys/class/kfd/kfd/topology/nodes/0/properties",
        ("cpu_cores_count 4\nsimd_count 32\nvendor_id 4098\nlocation_id 8\n"),
    )
    assert [one.runtime_numbers for one in discover(root).accelerators] == [(1,)]


def build_tree_with(card: CardFacts, path: str, text: str) -> MemoryRoot:
    """A tree with one card on one node, and one of its files changed."""
    cpus = CpuSet(range(8))
    facts = HostFacts(
        name="made",
        title="made",
        packages=(PackageFacts(cpus=cpus, id=0),),
        nodes=(NodeFacts(id=0, cpus=cpus, memory_bytes=1 << 34),),
        cards=(card,),
    )
    root = build_tree(facts)
    return MemoryRoot("made", {**root.files, path: text}, root.links)


@pytest.mark.parametrize(
    "text, found",
    [
        ("simd_count 304\nlocation_id x\nvendor_id 4098\n", "'x' is no number"),
        ("simd_count many\n", "'many' is no number"),
        ("simd_count 304\nvendor_id 4098\n", "no 'location_id'"),
        ("simd_count 304\nvendor_id 4098\nlocation_id -1\n", "expected 32 bits"),
        ("simd_count 304\nvendor_id 4098\nlocation_id 0\ndomain 99999999999\n", "expected 32 bits"),
    ],
)
def test_compute_topology_of_another_form(text: str, found: str) -> None:
    """A node of the compute topology that says no such thing is refused, and its file is named."""
    path = "sys/class/kfd/kfd/topology/nodes/1/properties"
    root = build_tree_with(make_card("0000:17:00.0", "amd", numa_node=0), path, text)
    with pytest.raises(ParseError, match=f"nodes/1/properties.*{found}"):
        discover(root)


def test_functions_of_nobody_known() -> None:
    """A display controller without a vendor file is no card, and is told of."""
    machine = made(
        make_card("0000:17:00.0", numa_node=0, has_driver=False), absent=("*/0000:17:00.0/vendor",)
    )
    assert machine.accelerators == ()
    assert "0000:17:00.0 are of classes that cards have" in machine.oddities[0]


def test_compute_topology_of_another_bus() -> None:
    """A GPU that the compute driver names and the PCI bus does not show is told of, and is no card."""
    path = "sys/class/kfd/kfd/topology/nodes/2/properties"
    text = "simd_count 304\nvendor_id 4098\nlocation_id 39168\ndomain 0\n"
    root = build_tree_with(make_card("0000:17:00.0", "amd", numa_node=0), path, text)
    machine = discover(root)
    assert names(machine) == [("amd", 0, "0000:17:00.0")]
    assert "names 0000:99:00.0, which the PCI bus does not show" in machine.oddities[0]


def test_amd_cards_without_a_pci_bus() -> None:
    """Where a container hides the PCI bus the compute topology names the cards; their node is asked for."""
    root = build_tree(read_sample("mi300a-4apu"))
    trimmed = MemoryRoot(
        "trimmed", root.files, {k: v for k, v in root.links.items() if "/bus/pci/" not in k}
    )
    machine = discover(trimmed)
    assert [card.name for card in machine.accelerators] == [
        f"{domain:04x}:01:00.0" for domain in range(4)
    ]
    with pytest.raises(ProblemsError, match="it has no entry on the PCI bus"):
        make_plan(machine, PlacementRequest())
    stated = {f"{domain:04x}:01:00.0": domain for domain in range(4)}
    (service,) = make_plan(machine, PlacementRequest(locality=stated)).services
    assert [rank.cpu_nodes.first for rank in service.ranks] == [0, 1, 2, 3]


def test_gaudi_by_the_class_of_older_drivers() -> None:
    """Before the accel class Gaudi cards were hlN of the class habanalabs."""
    root = build_tree(read_sample("gaudi-8card"))
    links = {
        path.replace("class/accel/accel", "class/habanalabs/hl"): target
        for path, target in root.links.items()
    }
    machine = discover(MemoryRoot("old", root.files, links))
    assert [card.runtime_numbers[0] for card in machine.accelerators] == [1, 0, 3, 2, 4, 5, 6, 7]


# Ascend --------------------------------------------------------------------------------------------


def ub_host(*devices: UbFacts, nodes: int = 4, **facts: Any) -> Machine:
    """A machine of nodes of eight cores, two a package, with devices on the unified bus."""
    cpus = {node: f"{8 * node}-{8 * node + 7}" for node in range(nodes)}
    packages = [f"{16 * number}-{16 * number + 15}" for number in range(nodes // 2)]
    return make_host(cpus, packages=packages, ub_devices=devices, **facts)


def test_npus_of_the_unified_bus() -> None:
    """Devices with entities are NPUs in the order of their numbers, and fold the group's node."""
    machine = ub_host(
        UbFacts(name="udma10", numa=2),
        UbFacts(name="udma2", numa=0),
        UbFacts(name="udma1", numa=0),
        UbFacts(name="udma11", numa=2),
        UbFacts(name="udma3", numa=0, entities=0),
        UbFacts(name="rxe0", numa=0),
    )
    assert names(machine) == [("ascend", index, f"ascend{index}") for index in range(4)]
    plan = plan_for(machine)
    assert [rank.cpu_nodes.first for rank in ranks_of(plan)] == [0, 1, 2, 3]
    assert {rank.node_sources for rank in ranks_of(plan)} == {("driver",)}
    assert note_codes(plan) == set()
    assert environment(plan)["ASCEND_RT_VISIBLE_DEVICES"] == "0,1,2,3"


def test_npus_named_by_controller_die_and_entity() -> None:
    """Names of the longer form sort by controller, then die, then entity."""
    machine = ub_host(
        UbFacts(name="udmaC1d0e0", numa=2),
        UbFacts(name="udmaC0d1e10", numa=0),
        UbFacts(name="udmaC0d1e9", numa=0),
    )
    assert [card.numa_node for card in machine.accelerators] == [0, 1, 2]


def test_npu_on_a_node_that_is_not_there() -> None:
    """A folded node that does not exist gives way to the raw one; where that is not there either, none is known."""
    (card,) = make_host(
        {0: "0-7", 2: "8-15"}, ub_devices=(UbFacts(name="udma0", numa=3),)
    ).accelerators
    assert card.numa_node == 2
    machine = make_host(TWO_NODES, ub_devices=(UbFacts(name="udma0", numa=8),))
    assert machine.accelerators[0].numa_node is None
    assert "udma0 says NUMA node 8" in machine.oddities[0]
    with pytest.raises(ProblemsError, match="NPU ascend0"):
        plan_for(machine)
    assert ranks_of(plan_for(machine, locality={"ascend0": 1}))[0].cpu_nodes.first == 1


def test_npus_from_device_nodes_alone() -> None:
    """Without a bus /dev/davinciN names the NPUs by number; davinci_manager is none."""
    root = build_tree(read_sample("ascend-8npu"))
    files = {path: text for path, text in root.files.items() if "/pci" not in path}
    files |= {"dev/davinci_manager": "", "dev/davinci12": ""}
    machine = discover(MemoryRoot("trimmed", files))
    assert [card.runtime_numbers[0] for card in machine.accelerators] == [*range(8), 12]
    assert {card.source for card in machine.accelerators} == {"dev"}


def test_npus_on_pci_have_no_numbers_of_their_own() -> None:
    """Nothing in /sys says an NPU's number, and a plan says so instead of passing over it."""
    plan = make_plan(discover(build_tree(read_sample("ascend-8npu"))), PlacementRequest())
    (note,) = [note for note in plan.notes if note.code == "npu_numbers"]
    assert "ASCEND_RT_VISIBLE_DEVICES" in note.message
    assert "--npu-smi" in note.hint


# What a rank is told -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "vendor, variables",
    [
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ("amd", {"HIP_VISIBLE_DEVICES": "0,1"}),
        ("hygon", {"HIP_VISIBLE_DEVICES": "0,1"}),
        (
            "intel",
            {
                "ZE_AFFINITY_MASK": "0,1",
                "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1",
                "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
            },
        ),
        ("habana", {"HABANA_VISIBLE_DEVICES": "0,1"}),
        ("ascend", {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}),
    ],
)
def test_visible_devices_of_each_vendor(vendor: str, variables: Mapping[str, str]) -> None:
    """A rank's environment lists its service's cards in its vendor's own variables and in no other's."""
    told = environment(plan_for(make_host(TWO_NODES, [0, 1], vendor=vendor)), 1)
    assert variables.items() <= told.items()
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("1", "2")
    of_others = {one.visible for one in DEVICE_VARIABLES.values()} - set(variables)
    assert of_others.isdisjoint(told)


def test_gaudi_is_told_by_number_and_by_module() -> None:
    """Container runtimes count accelN, and the process itself counts places on the board."""
    machine = discover(build_tree(read_sample("gaudi-8card")))
    plan = make_plan(machine, PlacementRequest((ServiceRequest(devices=("0", "1")),)))
    told = environment(plan)
    assert told["HABANA_VISIBLE_DEVICES"] == "1,0"
    assert told["HABANA_VISIBLE_MODULES"] == "3,2"


def test_two_filters_of_rocm_never_meet() -> None:
    """ROCR_VISIBLE_DEVICES would count anew below HIP's: it is set nowhere, and taken away from callers."""
    plan = plan_for(make_host(TWO_NODES, [0, 1], vendor="amd"))
    text = format_plan(plan)
    files = render(plan, text)
    assert "ROCR_VISIBLE_DEVICES" not in environment(plan)
    assert "\nunset ROCR_VISIBLE_DEVICES\n" in files["provision-run"].text


def test_every_vendor_has_its_variables_and_its_option() -> None:
    """No vendor is known to discovery alone."""
    assert set(DEVICE_VARIABLES) == set(VENDORS) == set(options._VENDORS)


# Several vendors on one host -----------------------------------------------------------------------


def mixed_host() -> Machine:
    """Two cards of NVIDIA's and two of AMD's, one of each on either node, in turn."""
    return made(
        make_card("0000:17:00.0", "amd", numa_node=0),
        make_card("0000:27:00.0", "nvidia", numa_node=0),
        make_card("0000:97:00.0", "nvidia", numa_node=1),
        make_card("0000:a7:00.0", "amd", numa_node=1),
    )


def test_mixed_host_plans_each_vendors_cards() -> None:
    """All cards are ranks, numbered within their vendor, and share their node's cores with the other's."""
    plan = plan_for(mixed_host())
    assert [(rank.vendor, rank.device_indexes, str(rank.cpus)) for rank in ranks_of(plan)] == [
        ("nvidia", (0,), "8-15"),
        ("nvidia", (1,), "16-23"),
        ("amd", (0,), "0-7"),
        ("amd", (1,), "24-31"),
    ]
    assert "mixed_vendors" in note_codes(plan)
    third = environment(plan, 2)
    assert (third["LOCAL_RANK"], third["LOCAL_WORLD_SIZE"]) == ("0", "2")
    assert third["HIP_VISIBLE_DEVICES"] == "0,1"
    assert "CUDA_VISIBLE_DEVICES" not in third


def test_wrapper_of_a_mixed_service_wants_a_number() -> None:
    """LOCAL_RANK counts one vendor's ranks, so that it can't say which rank of a mixed service is meant."""
    plan = plan_for(mixed_host())
    mixed = render(plan, format_plan(plan))["provision-run"].text
    assert "${LOCAL_RANK-}" not in mixed
    plan = plan_for(mixed_host(), vendor="amd")
    assert "${LOCAL_RANK-}" in render(plan, format_plan(plan))["provision-run"].text


@pytest.mark.parametrize(
    "vendor, shares", [("nvidia", ["8-15", "16-23"]), ("amd", ["0-7", "24-31"])]
)
def test_vendor_picks_one_vendors_cards(vendor: str, shares: list[str]) -> None:
    """The others' shares stay theirs, so that plans made apart do not overlap."""
    plan = plan_for(mixed_host(), vendor=vendor)
    assert [str(rank.cpus) for rank in ranks_of(plan)] == shares
    assert "cards_without_rank" in note_codes(plan)
    assert "mixed_vendors" not in note_codes(plan)


def test_a_service_for_each_vendor() -> None:
    """Services that name their vendor need not list their cards, and never overlap."""
    services = (ServiceRequest("cuda", vendor="nvidia"), ServiceRequest("hip", vendor="amd"))
    cuda, hip = plan_for(mixed_host(), services=services).services
    assert {rank.vendor for rank in cuda.ranks} == {"nvidia"}
    assert {rank.vendor for rank in hip.ranks} == {"amd"}
    assert cuda.cpus.isdisjoint(hip.cpus)


def test_numbers_count_within_a_vendor() -> None:
    """A card number on a mixed host is refused unless the vendor is named; an address never is."""
    machine = mixed_host()
    with pytest.raises(ProblemsError) as caught:
        plan_for(machine, devices=("0",))
    (problem,) = caught.value.problems
    assert problem.code == "ambiguous_card"
    assert "0000:27:00.0 of nvidia and 0000:17:00.0 of amd" in problem.message
    (rank,) = ranks_of(plan_for(machine, devices=("1",), vendor="amd"))
    assert rank.devices == ("0000:a7:00.0",)
    (rank,) = ranks_of(plan_for(machine, devices=("0000:17:00.0",)))
    assert rank.vendor == "amd"


def test_vendor_that_the_host_does_not_have() -> None:
    """A vendor without a card is refused, naming those that are there; so is another vendor's address."""
    with pytest.raises(ProblemsError) as caught:
        plan_for(mixed_host(), vendor="intel")
    assert [problem.code for problem in caught.value.problems] == ["no_card"]
    assert "the cards here are of amd, nvidia" in caught.value.problems[0].message
    with pytest.raises(ProblemsError, match=r"no card of nvidia: the cards are 0 to 1"):
        plan_for(mixed_host(), vendor="nvidia", devices=("0000:17:00.0",))


def test_ranks_of_several_cards_are_of_one_vendor() -> None:
    """A rank can't have cards of two vendors."""
    with pytest.raises(ProblemsError, match="its cards are of amd and nvidia") as caught:
        plan_for(mixed_host(), devices_per_rank=2)
    assert "Set vendor=" in caught.value.problems[0].hint
    (rank,) = ranks_of(plan_for(mixed_host(), devices_per_rank=2, vendor="amd"))
    assert rank.device_indexes == (0, 1)


def test_services_without_cards_or_vendor_are_refused() -> None:
    """With several services each lists its cards or names its vendor."""
    services = (ServiceRequest("a", vendor="amd"), ServiceRequest("b"))
    problems = check_request(PlacementRequest(services))
    assert [problem.code for problem in problems] == ["devices_missing"]
    twice = (ServiceRequest("a", vendor="amd"), ServiceRequest("b", vendor="amd"))
    with pytest.raises(ProblemsError, match="is also in service 'a'"):
        plan_for(mixed_host(), services=twice)


# Plans and fingerprints ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample", ["mi300a-4apu", "gaudi-8card", "max-6gpu", "ascend-8npu", "mi300x-8gpu"]
)
def test_plan_file_is_read_back(sample: str) -> None:
    """A plan of any vendor's cards survives its file, and fits its machine."""
    machine = discover(build_tree(read_sample(sample)))
    plan = make_plan(machine, PlacementRequest())
    again = parse_plan(format_plan(plan), "plan.json")
    assert again == plan
    check_plan(again, machine, "plan.json")


def test_plan_file_with_another_cards_numbers() -> None:
    """Numbers that are not the cards' own are refused: they would send a rank to other cards."""
    machine = discover(build_tree(read_sample("gaudi-8card")))
    text = format_plan(make_plan(machine, PlacementRequest()))
    for old, new in (
        ('"runtime_numbers": [\n      1\n', '"runtime_numbers": [\n      5\n'),
        ('"device_modules": [\n      3\n', '"device_modules": [\n      6\n'),
    ):
        assert old in text
        with pytest.raises(ProblemsError, match="runtime_numbers and device_modules"):
            check_plan(parse_plan(text.replace(old, new), "plan.json"), machine, "plan.json")


def test_fingerprint_knows_the_numbers_of_cards() -> None:
    """Another partition mode, another order or another module is another machine to a plan."""

    def of(**facts: Any) -> str:
        cards = (
            make_card("0000:17:00.0", "amd", numa_node=0, **facts),
            make_card("0000:27:00.0", "amd", numa_node=1),
        )
        return machine_fingerprint(made(*cards))

    assert len({of(), of(partitions=3), of(minor=2)}) == 3
    modules = {
        machine_fingerprint(made(make_card("0000:17:00.0", "habana", module=one, numa_node=0)))
        for one in (None, 0, 1)
    }
    assert len(modules) == 3
    folded = {
        machine_fingerprint(ub_host(UbFacts(name="udma0", numa=numa))) for numa in (None, 0, 2)
    }
    assert len(folded) == 3


def test_fingerprint_of_nvidia_machines_is_what_it_was() -> None:
    """Plans made before other vendors were known stay valid."""
    machine = discover(build_tree(read_sample("nps4-8gpu")))
    assert machine_fingerprint(machine) == (
        "sha256:5281fdebef2d6198d5b1c67498bb0fa7517cf99fb74c2316df9a4a594570bf64"
    )


# Captures that contradict themselves -----------------------------------------------------------------


def test_cards_on_nodes_that_are_not_there() -> None:
    """A card on a node that does not exist is refused, and its file is named; stating its node settles it."""
    path = "sys/devices/pci0000:17/0000:17:00.0/numa_node"
    root = build_tree_with(make_card("0000:17:00.0", numa_node=0), path, "9\n")
    machine = discover(root)
    (sentence,) = machine.oddities
    assert "by their numa_node that are not there: 0000:17:00.0 says 9" in sentence
    with pytest.raises(ProblemsError) as caught:
        make_plan(machine, PlacementRequest())
    (problem,) = caught.value.problems
    assert problem.code == "no_such_node"
    assert "its numa_node is 9, and there is no such node: the machine has 0" in problem.message
    (service,) = make_plan(machine, PlacementRequest(locality={"0000:17:00.0": 0})).services
    assert service.ranks[0].cpu_nodes.first == 0


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.lists(KFD_LINES).map("\n".join))
def test_compute_topology_of_any_form(text: str) -> None:
    """Whatever a node's file holds, it is a GPU, none, or refused as no such file."""
    with suppress(ParseError):
        gpu = parse_kfd_gpu(text)
        assert gpu is None or 0 <= gpu.address.device < 32


@pytest.mark.parametrize("text", ["", "zero\n", "0x0\n", "1 2\n", "-\n"])
def test_numa_node_that_is_no_number(text: str) -> None:
    """What stands in a card's numa_node is a number, or its file is named in the refusal."""
    path = "sys/devices/pci0000:17/0000:17:00.0/numa_node"
    root = build_tree_with(make_card("0000:17:00.0", numa_node=0), path, text)
    with pytest.raises(ParseError, match=r"0000:17:00\.0/numa_node: .* is no number"):
        discover(root)


def test_module_that_is_no_number() -> None:
    """A Gaudi's module_id of another form is refused, and its file is named."""
    path = "sys/devices/pci0000:17/0000:17:00.0/module_id"
    root = build_tree_with(make_card("0000:17:00.0", "habana", numa_node=0), path, "none\n")
    with pytest.raises(ParseError, match=r"accel0/device/module_id: 'none' is no number"):
        discover(root)


# Grace -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus, instances, extra", [(1, 7, 0), (4, 7, 0), (4, 7, 2)])
def test_grace_hosts_of_9_34_and_36_nodes(gpus: int, instances: int, extra: int) -> None:
    """GH200, GB200 and GB300: GPU memory and empty nodes take no part, and cards get their Grace's cores."""
    graces = max(1, gpus // 2)
    nodes = {node: f"{72 * node}-{72 * node + 71}" for node in range(graces)}
    first = [graces + gpu * (instances + 1) for gpu in range(gpus)]
    count = graces + gpus * (instances + 1) + extra
    nodes |= dict.fromkeys(range(graces, count), "")
    sizes = dict.fromkeys(range(graces, count), 0) | dict.fromkeys(first, 96)
    cards = tuple(
        make_card(
            f"{8 + gpu:04x}:01:00.0",
            numa_node=gpu * graces // gpus,
            memory_node=node,
            device=0x2941,
        )
        for gpu, node in enumerate(first)
    )
    machine = make_host(nodes, card_facts=cards, memory=sizes)
    assert len(machine.nodes) == {(1, 0): 9, (4, 0): 34, (4, 2): 36}[gpus, extra]
    ranks = ranks_of(plan_for(machine))
    assert [rank.memory_nodes.first for rank in ranks] == [
        gpu * graces // gpus for gpu in range(gpus)
    ]
    each = 72 * graces // gpus
    assert [str(rank.cpus) for rank in ranks] == [
        f"{each * gpu}-{each * gpu + each - 1}" for gpu in range(gpus)
    ]
    (first_rank, *_) = ranks_of(plan_for(machine, memory_kinds=("dram", "gpu")))
    assert first_rank.memory_nodes == NodeSet([0, first[0]])


def test_deepops_1214_mig_instances_belong_to_their_card() -> None:
    """deepops#1214: a card in MIG mode is one card, whatever instances its driver lists."""
    card = make_card("0000:17:00.0", numa_node=0)
    root = build_tree_with(card, "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "\n")
    machine = discover(
        MemoryRoot(
            "mig",
            {
                **root.files,
                "dev/nvidia-caps/nvidia-cap12": "",
                "proc/driver/nvidia/capabilities/gpu0/mig/gi2/ci0/access": "\n",
            },
            root.links,
        )
    )
    assert names(machine) == [("nvidia", 0, "0000:17:00.0")]


def test_locality_of_a_card_is_the_operators_word_first() -> None:
    """A stated node wins over what the driver of an NPU says."""
    machine = ub_host(UbFacts(name="udma0", numa=2))
    plan = plan_for(machine, locality={"ascend0": 3})
    (rank,) = ranks_of(plan)
    assert (rank.cpu_nodes.first, rank.node_sources) == (3, ("locality",))


def test_tables_tell_cards_of_several_vendors_apart() -> None:
    """On a mixed host a number alone is no card's name in a table."""
    machine = mixed_host()
    assert [row[0] for row in card_rows(machine)] == ["nvidia0", "nvidia1", "amd0", "amd1"]
    assert [row[7] for row in node_rows(machine)] == ["nvidia0,amd0", "nvidia1,amd1"]
    plain = make_host(TWO_NODES, [0, 1], vendor="amd")
    assert [row[0] for row in card_rows(plain)] == ["0", "1"]


def test_topology_json_has_the_numbers() -> None:
    """A program learns the vendor, the runtime's numbers and the place on the board of each card."""
    value = topology_to_json(discover(build_tree(read_sample("gaudi-8card"))))
    first = value["accelerators"][0]
    assert (first["vendor"], first["runtime_numbers"], first["module"]) == ("habana", [1], 3)
    assert [nic["rdma_ports"] for nic in value["nics"]] == [[[1]], [[1]]]


@pytest.mark.parametrize(
    "given, right",
    [
        ({}, ["NCCL_IGNORE_CPU_AFFINITY", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"]),
        (
            {"ROCR_VISIBLE_DEVICES": "0"},
            ["NCCL_IGNORE_CPU_AFFINITY", "GPU_DEVICE_ORDINAL"],
        ),
    ],
)
def test_unit_takes_filters_away_unless_the_operator_sets_them(
    given: Mapping[str, str], right: list[str]
) -> None:
    """UnsetEnvironment= undoes what the environment file says too, and so leaves out what it sets."""
    worker = WorkerRequest(("/bin/engine",), environment=given)
    plan = plan_for(make_host(TWO_NODES, [0, 1], vendor="amd"), worker=worker)
    unit = render(plan, format_plan(plan))["provision@.service"].text
    lines = [line for line in unit.splitlines() if line.startswith("UnsetEnvironment=")]
    assert lines == [f"UnsetEnvironment={name}" for name in right]
