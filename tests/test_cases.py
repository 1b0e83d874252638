"""Public reports of wrong placement, each as a machine with its facts and the plan that is right.

A name says the thread; the machines are built from the facts in it.
"""

from __future__ import annotations

import ast
import re
import time
from pathlib import Path

import pytest

from provisioner.discovery import discover
from provisioner.errors import ProblemsError
from provisioner.facts import build_tree
from provisioner.facts.values import BridgeFacts, CardFacts, CgroupFacts, NicFacts
from provisioner.idset import CpuSet
from provisioner.pci import PciAddress, parse_pci_address
from provisioner.plan import Plan
from provisioner.planfile import format_plan
from provisioner.planner import make_plan
from provisioner.render import render
from provisioner.request import PlacementRequest, ServiceRequest
from provisioner.samples import read_sample
from provisioner.worker.target import find_target
from provisioner.worker.visible import (
    RankError,
    UnknownDeviceError,
    card_of_rank,
    resolve_visible,
)
from tests.hosts import (
    cpus_of,
    make_card,
    make_host,
    make_tree,
    note_codes,
    plan_for,
    ranks_of,
    union_of,
)
from tests.machines import FOLDER, read_machine


def slices_of(plan: Plan) -> list[str]:
    """The text of each rank's slice."""
    files = render(plan, format_plan(plan))
    return [files[rank.slice].text for rank in ranks_of(plan)]


def values_of(text: str, key: str) -> list[str]:
    """The values that a unit assigns to a key, in order."""
    return re.findall(f"^{key}=(.*)$", text, re.MULTILINE)


def test_sglang_20077_only_the_allowed_cpus() -> None:
    """sglang#20077, #39552, aiter#5365: with a cpuset of 6-25, shares are of 6-25 and never of 0..N."""
    machine = make_host(
        {0: "0-31"}, [0, 0, 0, 0], cgroups=(CgroupFacts(path="/", cpus=CpuSet(range(6, 26))),)
    )
    plan = plan_for(machine)
    assert cpus_of(plan) == ["6-10", "11-15", "16-20", "21-25"]
    assert "ceiling" in note_codes(plan)


def test_aiter_5365_only_the_allowed_cpus_of_each_node() -> None:
    """sglang#20077, aiter#5365: where the cpuset of 6-25 crosses two nodes, a share is of its node's part of it."""
    machine = make_host(
        {0: "0-15", 1: "16-31"},
        [0, 0, 1, 1],
        cgroups=(CgroupFacts(path="/", cpus=CpuSet(range(6, 26))),),
    )
    plan = plan_for(machine)
    assert cpus_of(plan) == ["6-10", "11-15", "16-20", "21-25"]
    assert union_of(plan) | plan.unassigned_cpus == CpuSet(range(6, 26))


SGLANG_24766 = {"CUDA_VISIBLE_DEVICES": "3,6,5,4,0,7,1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize("rank, card", tuple(enumerate((3, 6, 5, 4, 0, 7, 1, 2))))
def test_sglang_24766_rank_is_the_entry(rank: int, card: int) -> None:
    """sglang#24766: by CUDA_VISIBLE_DEVICES=3,6,5,4,0,7,1,2 rank r has the PCI function and cores of entry r."""
    tree = make_tree({0: "0-31", 1: "32-63"}, [0, 0, 0, 0, 1, 1, 1, 1])
    cards = discover(tree).accelerators
    shown = resolve_visible(cards, SGLANG_24766)
    assert card_of_rank(shown, rank).address == cards[card].address
    target = find_target(rank, environ=SGLANG_24766, root=tree, plan_paths=())
    assert target.devices == (cards[card].name,)
    assert str(target.cpus) == f"{8 * card}-{8 * card + 7}"


def test_vllm_39361_gpu_memory_nodes() -> None:
    """vllm#39361: the HBM nodes of a GB200 host are in no AllowedMemoryNodes=, and CPUs are node 0's and 1's."""
    machine = discover(build_tree(read_sample("grace-4gpu")))
    assert [node.id for node in machine.nodes if node.kind == "gpu"] == [2, 10, 18, 26]
    ranks = ranks_of(make_plan(machine, PlacementRequest()))
    assert [str(rank.memory_nodes) for rank in ranks] == ["0", "0", "1", "1"]
    assert [str(rank.cpu_nodes) for rank in ranks] == ["0", "0", "1", "1"]
    slices = slices_of(make_plan(machine, PlacementRequest()))
    assert {value for text in slices for value in values_of(text, "AllowedMemoryNodes")} == {
        "",
        "0",
        "1",
    }


def test_kubernetes_135541_many_nodes() -> None:
    """kubernetes#135541: 34 nodes, 2 of them with CPUs, are planned at once and not in exponential time."""
    machine = discover(read_machine("gb200-34nodes"))
    start = time.process_time()
    plan = make_plan(machine, PlacementRequest())
    # No figure of speed: an exponential walk over 34 nodes would take hours.
    assert time.process_time() - start < 5
    assert cpus_of(plan) == ["0-35", "36-71", "72-107", "108-143"]
    assert [str(rank.memory_nodes) for rank in ranks_of(plan)] == ["0", "0", "1", "1"]


@pytest.mark.parametrize("stated", [0, 1])
def test_nvbandwidth_23_grace_hopper(stated: int) -> None:
    """nvbandwidth#23, xpu-perf#129: a GH200's card gets CPUs 0-71 and memory 0, also if it names its own node 1."""
    nodes = {0: "0-71", **dict.fromkeys(range(1, 9), "")}
    sizes = dict.fromkeys(range(2, 9), 0)
    card = CardFacts(
        path=(parse_pci_address("0009:01:00.0"),), device=0x2342, numa_node=stated, memory_node=1
    )
    machine = make_host(nodes, card_facts=(card,), memory={0: 480, 1: 96, **sizes})
    (rank,) = ranks_of(plan_for(machine))
    assert (str(rank.cpus), str(rank.memory_nodes)) == ("0-71", "0")


def test_nccl_1505_dgx_a100_nps4() -> None:
    """nccl#1505, #1435, dask-cuda#1358: cards on nodes 3,3,1,1,7,7,5,5 get 8 cores each; the rest is named."""
    machine = discover(build_tree(read_sample("nps4-8gpu")))
    plan = make_plan(machine, PlacementRequest())
    ranks = ranks_of(plan)
    assert [rank.cpu_nodes.first for rank in ranks] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert cpus_of(plan)[:2] == ["48-55,176-183", "56-63,184-191"]
    assert {len(rank.cpus) for rank in ranks} == {16}
    assert next(n.message for n in plan.notes if n.code == "idle_nodes").startswith(
        "NUMA nodes 0,2,4,6 have no card: 64 cores"
    )
    wide = make_plan(machine, PlacementRequest(reach="package"))
    assert {len(rank.cpus) for rank in ranks_of(wide)} == {32}
    assert "idle_nodes" not in note_codes(wide)


def test_nccl_1435_dgx_a100_of_64_cores() -> None:
    """nccl#1435: the same host of 64 cores (24-31,88-95 on node 3) gives 4 cores a card, 8 with the idle nodes'."""
    nodes = {
        node: f"{8 * node}-{8 * node + 7},{64 + 8 * node}-{71 + 8 * node}" for node in range(8)
    }
    assert nodes[3] == "24-31,88-95"
    machine = make_host(
        nodes, [3, 3, 1, 1, 7, 7, 5, 5], stride=64, packages=("0-31,64-95", "32-63,96-127")
    )
    plan = plan_for(machine)
    assert [rank.cpu_nodes.first for rank in ranks_of(plan)] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert cpus_of(plan)[:4] == ["24-27,88-91", "28-31,92-95", "8-11,72-75", "12-15,76-79"]
    assert next(note.message for note in plan.notes if note.code == "idle_nodes").startswith(
        "NUMA nodes 0,2,4,6 have no card: 32 cores"
    )
    assert str(plan.unassigned_cpus) == "0-7,16-23,32-39,48-55,64-71,80-87,96-103,112-119"
    wide = plan_for(machine, reach="package")
    assert {len(rank.cpus) for rank in ranks_of(wide)} == {16}
    assert "idle_nodes" not in note_codes(wide)


def test_ompi_11357_reverse_order_and_balancing() -> None:
    """ompi#11357: cards in reverse order of their nodes keep their nodes, and NUMA balancing is warned of."""
    nodes = {node: f"{8 * node}-{8 * node + 7}" for node in range(8)}
    machine = make_host(nodes, [7, 7, 5, 5, 3, 3, 1, 1], numa_balancing=1)
    plan = plan_for(machine)
    assert [rank.cpu_nodes.first for rank in ranks_of(plan)] == [7, 7, 5, 5, 3, 3, 1, 1]
    assert cpus_of(plan)[0] == "56-59"
    assert "numa_balancing" in note_codes(plan)


def test_srt_slurm_332_eight_nodes() -> None:
    """srt-slurm#332: on two EPYC 9575F in eight nodes each of eight ranks has a slice of a node of its own.

    The thread's factor of 5 needs its hardware; that a rank without a slice may run anywhere is what
    `workers_bound_otherwise_measured` of tests/vm measures.
    """
    nodes = {
        node: f"{16 * node}-{16 * node + 15},{128 + 16 * node}-{143 + 16 * node}"
        for node in range(8)
    }
    machine = make_host(
        nodes, list(range(8)), stride=128, packages=("0-63,128-191", "64-127,192-255")
    )
    plan = plan_for(machine)
    assert cpus_of(plan) == list(nodes.values())
    for node, text in enumerate(slices_of(plan)):
        assert values_of(text, "AllowedCPUs") == ["", nodes[node]]
        assert values_of(text, "AllowedMemoryNodes") == ["", str(node)]


def test_club_3090_46_one_and_four() -> None:
    """club-3090#46: one card on node 1 gets 8 cores, four on node 0 get 2 each, all of them whole."""
    machine = make_host({0: "0-7,16-23", 1: "8-15,24-31"}, [1, 0, 0, 0, 0], stride=16)
    plan = plan_for(machine)
    assert cpus_of(plan) == ["8-15,24-31", "0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23"]
    assert "uneven_shares" in note_codes(plan)


def test_primus_554_seven_and_one() -> None:
    """Primus#554: seven cards on one socket and one on the other is planned, and the imbalance is a note."""
    plan = plan_for(make_host({0: "0-27", 1: "28-55"}, [0] * 7 + [1]))
    assert [len(rank.cpus) for rank in ranks_of(plan)] == [4] * 7 + [28]
    assert "uneven_shares" in note_codes(plan)


def test_geopm_3593_remainder() -> None:
    """geopm#3593: 52 cores among three of Intel's cards are 17 each, and one is left over and named."""
    nodes = {0: "0-51,104-155", 1: "52-103,156-207"}
    machine = make_host(nodes, [0, 0, 0, 1, 1, 1], stride=104, vendor="intel")
    plan = plan_for(machine)
    assert {rank.vendor for rank in ranks_of(plan)} == {"intel"}
    assert {len(rank.cpus) for rank in ranks_of(plan)} == {34}
    assert str(plan.unassigned_cpus) == "51,103,155,207"
    assert "remainder" in note_codes(plan)


def test_dask_cuda_1381_job_on_one_socket() -> None:
    """dask-cuda#1381: in a cpuset of socket 0, cards of socket 1 have no local CPU allowed, in these words."""
    machine = make_host(
        {0: "0-27,56-83", 1: "28-55,84-111"},
        [0, 0, 0, 0, 1, 1, 1, 1],
        stride=56,
        cgroups=(CgroupFacts(path="/job", cpus=CpuSet.parse_list("0-15,56-71")),),
        own_cgroup="/job",
        within="self",
    )
    with pytest.raises(ProblemsError) as caught:
        plan_for(machine)
    (problem,) = caught.value.problems
    assert problem.code == "no_local_cpu"
    assert "no local CPU is allowed" in problem.message
    assert all(card.name in problem.message for card in machine.accelerators[4:])
    plan = plan_for(machine, devices=("0", "1", "2", "3"))
    assert cpus_of(plan) == ["0-3,56-59", "4-7,60-63", "8-11,64-67", "12-15,68-71"]


def test_cucascade_119_firmware_says_minus_one() -> None:
    """cuCascade#119, tensorflow#58428, katalyst-core#1196: -1 is climbed from, and never taken for node 0."""
    bridge, card = PciAddress(0, 0x80, 1, 0), PciAddress(0, 0x81, 0, 0)
    climbing = make_host(
        {0: "0-7", 1: "8-15"},
        card_facts=(CardFacts(path=(bridge, card), device=1),),
        bridges=(BridgeFacts(address=bridge, numa_node=1),),
    )
    assert cpus_of(plan_for(climbing)) == ["8-15"]
    listed = make_host(
        {0: "0-7", 1: "8-15"},
        card_facts=(CardFacts(path=(card,), device=1, local_cpus=CpuSet(range(8, 16))),),
    )
    assert cpus_of(plan_for(listed)) == ["8-15"]
    assert cpus_of(plan_for(make_host({0: "0-7"}, [None]))) == ["0-7"]
    unknown = make_host({0: "0-7", 1: "8-15"}, [("0000:81:00.0", None)])
    with pytest.raises(ProblemsError, match="no NUMA node") as caught:
        plan_for(unknown)
    assert '[locality] "0000:81:00.0" = NODE' in caught.value.problems[0].hint
    assert cpus_of(plan_for(unknown, locality={"0000:81:00.0": 1})) == ["8-15"]


def test_dra_driver_nvidia_gpu_1165_sysfs_is_right() -> None:
    """dra-driver-nvidia-gpu#1165: eight L4 get their nodes from sysfs, where NVML says Not Supported."""
    buses = ("9f", "a1", "a3", "a5", "ae", "b0", "b2", "b4")
    cards = [(f"0000:{bus}:00.0", 0 if bus < "ae" else 1) for bus in buses]
    plan = plan_for(make_host({0: "0-47", 1: "48-95"}, cards))
    assert [rank.cpu_nodes.first for rank in ranks_of(plan)] == [0] * 4 + [1] * 4
    assert {rank.node_sources for rank in ranks_of(plan)} == {("numa_node",)}


def test_hami_99_single_node() -> None:
    """HAMi#99: one card on a machine whose tools say N/A for its node is planned on the only node."""
    (rank,) = ranks_of(plan_for(make_host({0: "0-7"}, [None])))
    assert (str(rank.cpus), str(rank.memory_nodes)) == ("0-7", "0")


def test_numactl_127_cpus_on_a_node_without_memory() -> None:
    """numactl#127: CPUs only on node 2, which has no memory, take memory of the nearest nodes."""
    machine = make_host({0: "", 1: "", 2: "0-15", 3: ""}, [2], memory={2: 0}, packages=("0-15",))
    plan = plan_for(machine)
    (rank,) = ranks_of(plan)
    assert (str(rank.cpus), str(rank.memory_nodes)) == ("0-15", "0-1,3")
    assert "remote_memory" in note_codes(plan)


def test_numactl_67_empty_node_and_interleaved_ids() -> None:
    """numactl#67: node 1 has no memory and odd CPU ids; its card takes memory of node 0, lists stay exact."""
    machine = make_host({0: "0,2,4,6", 1: "1,3,5,7"}, [0, 1], memory={1: 0})
    plan = plan_for(machine)
    assert cpus_of(plan) == ["0,2,4,6", "1,3,5,7"]
    assert [str(rank.memory_nodes) for rank in ranks_of(plan)] == ["0", "0"]
    assert [values_of(text, "AllowedCPUs") for text in slices_of(plan)] == [
        ["", "0,2,4,6"],
        ["", "1,3,5,7"],
    ]


def test_1cat_vllm_678_siblings_from_the_kernel() -> None:
    """1Cat-vLLM#678: with even CPUs on node 0 and odd on node 1, shares follow the sibling lists."""
    even = ",".join(str(cpu) for cpu in range(0, 80, 2))
    odd = ",".join(str(cpu) for cpu in range(1, 80, 2))
    cards = [("0000:18:00.0", 0), ("0000:3b:00.0", 0), ("0000:86:00.0", 1), ("0000:af:00.0", 1)]
    plan = plan_for(make_host({0: even, 1: odd}, cards, stride=40))
    assert cpus_of(plan)[0] == ",".join(str(cpu) for cpu in (*range(0, 20, 2), *range(40, 60, 2)))
    assert all(rank.alignment.whole_cores and rank.alignment.local for rank in ranks_of(plan))
    assert all(rank.alignment.contiguous for rank in ranks_of(plan))


def test_vllm_43240_one_instance_a_half() -> None:
    """vllm#43240: two instances on the halves of a host of 2 x 60 cores are two disjoint services."""
    machine = make_host({0: "0-59,120-179", 1: "60-119,180-239"}, [0, 0, 1, 1], stride=120)
    services = (ServiceRequest("left", ("0", "1")), ServiceRequest("right", ("2", "3")))
    left, right = plan_for(machine, services=services).services
    assert (str(left.cpus), str(right.cpus)) == ("0-59,120-179", "60-119,180-239")


def test_vllm_ascend_8600_independent_services() -> None:
    """vllm-ascend#8600: services planned apart on cards that share 144-167 are disjoint: all cards count."""
    machine = make_host({0: "0-143", 1: "144-167"}, [1, 1], vendor="ascend")
    plans = [plan_for(machine, devices=(card,)) for card in ("0", "1")]
    assert [cpus_of(plan) for plan in plans] == [["144-155"], ["156-167"]]
    assert union_of(plans[0]).isdisjoint(union_of(plans[1]))


def test_kubernetes_140730_reserved_half_cores() -> None:
    """kubernetes#140730: reserved CPUs that are half cores become whole cores, and it is said."""
    plan = plan_for(make_host({0: "0-7,8-15"}, [0, 0], stride=8), reserve_cpus=CpuSet([0]))
    assert str(plan.reserved_cpus) == "0,8"
    assert "reserve_rounded" in note_codes(plan)
    assert all(rank.alignment.whole_cores for rank in ranks_of(plan))


@pytest.mark.parametrize("offline", ["1,3,5,7", "6-7", "0"])
def test_seastar_3279_offline_cpus(offline: str) -> None:
    """seastar#3279, firedancer#4428, #10430, nsjail#200: only online CPUs are given, short sibling lists are cores."""
    off = CpuSet.parse_list(offline)
    machine = make_host({0: "0-7"}, [0, 0], stride=1, offline_cpus=off)
    plan = plan_for(machine)
    assert union_of(plan).isdisjoint(off)
    assert union_of(plan) | plan.unassigned_cpus == machine.online_cpus
    assert all(rank.alignment.whole_cores for rank in ranks_of(plan))


def test_polaris_order_against_cores() -> None:
    """GettingStarted#13, user-guides#119: cards in reverse order of the cores are mapped by their PCI place."""
    nodes = {0: "0-7,32-39", 1: "8-15,40-47", 2: "16-23,48-55", 3: "24-31,56-63"}
    plan = plan_for(make_host(nodes, [3, 2, 1, 0], stride=32))
    assert cpus_of(plan) == ["24-31,56-63", "16-23,48-55", "8-15,40-47", "0-7,32-39"]


def test_go_gpuallocator_17_eight_4090() -> None:
    """go-gpuallocator#17: eight cards on 0-55,112-167 and 56-111,168-223 get 14 whole cores each."""
    machine = make_host({0: "0-55,112-167", 1: "56-111,168-223"}, [0] * 4 + [1] * 4, stride=112)
    plan = plan_for(machine)
    assert cpus_of(plan)[0] == "0-13,112-125"
    assert cpus_of(plan)[7] == "98-111,210-223"


def test_warpx_4205_first_core_of_each_cache_reserved() -> None:
    """warpx#4205: with the first core of every L3 kept out by the ceiling, the rest is shared equally."""
    cores = 64
    kept = CpuSet(cpu for core in range(0, cores, 8) for cpu in (core, core + cores))
    everything = CpuSet(range(2 * cores))
    nodes = {
        node: f"{16 * node}-{16 * node + 15},{64 + 16 * node}-{79 + 16 * node}" for node in range(4)
    }
    machine = make_host(
        nodes,
        [3, 3, 1, 1, 0, 0, 2, 2],
        stride=cores,
        cores_per_llc=8,
        packages=(f"0-{2 * cores - 1}",),
        cgroups=(CgroupFacts(path="/", cpus=everything - kept),),
    )
    plan = plan_for(machine, policy="llc")
    assert {len(rank.cpus) for rank in ranks_of(plan)} == {14}
    assert all(rank.alignment.llc for rank in ranks_of(plan))
    assert union_of(plan).isdisjoint(kept)


def test_dynamo_8623_long_domains() -> None:
    """dynamo#8623, beta9#984, hwloc#354: eight-digit and non-zero PCI domains are addresses like any other."""
    machine = make_host({0: "0-3", 1: "4-7"}, [("10000:01:00.0", 0), ("deadbeef:01:00.0", 1)])
    plan = plan_for(machine, devices=("DEADBEEF:01:00.0", "00010000:01:00.0"))
    assert [rank.devices for rank in ranks_of(plan)] == [("deadbeef:01:00.0",), ("10000:01:00.0",)]


def test_mpibind_45_classes() -> None:
    """mpibind#45, Dynamo's 0x0300: 3D controllers and MI300A's 0x1200 are cards; NVSwitches and audio are none."""

    def card(bus: int, kind: int, vendor: str = "nvidia") -> CardFacts:
        return make_card(
            f"0000:{bus:02x}:00.0", vendor, numa_node=0, pci_class=kind, has_driver=False
        )

    kinds = (0x030000, 0x030200, 0x038000, 0x068000, 0x040300)
    cards = [card(bus, kind) for bus, kind in enumerate(kinds, 1)]
    machine = make_host({0: "0-7"}, card_facts=(*cards, card(9, 0x120000, "amd")))
    assert [str(one.address) for one in machine.accelerators] == [
        "0000:01:00.0",
        "0000:02:00.0",
        "0000:03:00.0",
        "0000:09:00.0",
    ]
    assert "driver_not_loaded" in note_codes(plan_for(machine))


def find_no_parent(_uuid: str) -> None:
    """Stands for a machine without NVML."""


MIG = "MIG-d9a47cfb-d1f2-d08c-b40e-0812b597ae69"
FORMS = {
    "index": "2",
    "UUID": "{uuid}",
    "short UUID": "{short}",
    "MIG by card": "MIG-{uuid}/1/0",
    "MIG UUID": MIG,
}


@pytest.mark.parametrize("form", FORMS)
def test_deepops_1214_every_form_is_a_pci_function(form: str) -> None:
    """deepops#1214, dask-cuda#671, vllm#6582, #41850, TensorRT-LLM#12985: each form names the card's PCI function."""
    cards = make_host({0: "0-15", 1: "16-31"}, [0, 0, 1, 1]).accelerators
    uuid = str(cards[2].uuid)
    short = next(
        uuid[:length]
        for length in range(5, len(uuid))
        if [card for card in cards if str(card.uuid).startswith(uuid[:length])] == [cards[2]]
    )
    entry = FORMS[form].format(uuid=uuid, short=short)
    environ = {"CUDA_VISIBLE_DEVICES": entry, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # NVML is asked for the card of a MIG instance that has a UUID of its own.
    shown = resolve_visible(cards, environ, find_mig_parent={MIG: uuid}.get)
    assert card_of_rank(shown, 0).address == cards[2].address


@pytest.mark.parametrize(
    "entry, error, words",
    [
        ("9", RankError, "'9' is out of range"),
        ("GPU-ffffffff-0000-4000-8000-000000000000", RankError, "no card's UUID begins so"),
        ("GPU-", RankError, "is ambiguous"),
        (MIG, UnknownDeviceError, "does not say which of 4 cards it is on, nor does NVML"),
    ],
)
def test_tensorrt_llm_12985_what_names_no_card_is_named(
    entry: str, error: type[Exception], words: str
) -> None:
    """TensorRT-LLM#12985, vllm#41850: an entry that no card answers to is an error that names it."""
    cards = make_host({0: "0-15", 1: "16-31"}, [0, 0, 1, 1]).accelerators
    environ = {"CUDA_VISIBLE_DEVICES": entry, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    shown = resolve_visible(cards, environ, find_mig_parent=find_no_parent)
    with pytest.raises(error, match=re.escape(words)) as caught:
        card_of_rank(shown, 0)
    assert entry in str(caught.value)


def test_virtual_functions_are_no_cards() -> None:
    """An SR-IOV virtual function of a card is no card, and one of a network device is nobody's nearest."""
    physical, virtual = PciAddress(0, 1, 0, 0), PciAddress(0, 1, 0, 4)
    nic, nic_vf = PciAddress(0, 2, 0, 0), PciAddress(0, 2, 0, 1)
    machine = make_host(
        {0: "0-7"},
        card_facts=(
            CardFacts(path=(physical,), device=1, numa_node=0),
            CardFacts(path=(virtual,), device=1, numa_node=0, physfn=physical, has_driver=False),
        ),
        nics=(
            NicFacts(path=(nic,), numa_node=0, rdma=("mlx5_0",)),
            NicFacts(path=(nic_vf,), numa_node=0, rdma=("mlx5_1",), physfn=nic),
        ),
    )
    (rank,) = ranks_of(plan_for(machine))
    assert rank.devices == (str(physical),)
    assert rank.nics == ("mlx5_0",)


# Each row of the table of public cases, "Replayable public cases" in REPORTS.md, by its number. The tests
# that need a real kernel, a simulated systemd or a booted machine are elsewhere.
TESTS_OF_CASES = {
    1: (
        "test_cases.py::test_sglang_20077_only_the_allowed_cpus",
        "test_cases.py::test_aiter_5365_only_the_allowed_cpus_of_each_node",
    ),
    2: (
        "worker/test_dropin.py::test_refused_memory_is_in_the_result",
        "worker/test_binding.py::test_refused_memory_keeps_the_cpus",
        "worker/test_binding.py::test_memory_that_the_cpuset_lacks_is_told",
        "vm/guest_worker.py::memory_that_the_cgroup_lacks_is_refused_by_steps",
    ),
    4: ("test_cases.py::test_sglang_24766_rank_is_the_entry",),
    5: ("test_cases.py::test_vllm_39361_gpu_memory_nodes",),
    6: ("test_cases.py::test_kubernetes_135541_many_nodes",),
    7: ("test_cases.py::test_nvbandwidth_23_grace_hopper",),
    9: (
        "test_cases.py::test_nccl_1505_dgx_a100_nps4",
        "test_cases.py::test_nccl_1435_dgx_a100_of_64_cores",
    ),
    11: ("test_cases.py::test_ompi_11357_reverse_order_and_balancing",),
    12: (
        "test_cases.py::test_srt_slurm_332_eight_nodes",
        "vm/guest_apply.py::workers_bound_otherwise_measured",
    ),
    14: ("test_cases.py::test_club_3090_46_one_and_four",),
    15: ("test_cases.py::test_primus_554_seven_and_one",),
    17: ("test_cases.py::test_geopm_3593_remainder",),
    18: ("test_cases.py::test_dask_cuda_1381_job_on_one_socket",),
    19: ("test_cases.py::test_cucascade_119_firmware_says_minus_one",),
    20: ("test_cases.py::test_dra_driver_nvidia_gpu_1165_sysfs_is_right",),
    21: ("test_cases.py::test_hami_99_single_node",),
    23: ("test_cases.py::test_numactl_127_cpus_on_a_node_without_memory",),
    24: ("test_cases.py::test_numactl_67_empty_node_and_interleaved_ids",),
    25: ("test_cases.py::test_1cat_vllm_678_siblings_from_the_kernel",),
    27: ("test_cases.py::test_vllm_43240_one_instance_a_half",),
    28: ("test_cases.py::test_vllm_ascend_8600_independent_services",),
    30: ("test_cases.py::test_kubernetes_140730_reserved_half_cores",),
    32: ("test_cases.py::test_seastar_3279_offline_cpus",),
    34: (
        "test_apply.py::test_slice_without_the_controller_is_found",
        "test_apply.py::test_each_difference_is_found",
        "test_apply.py::test_where_a_reload_does_not_reach_cgroups_they_are_set_once_more",
        "test_apply.py::test_undo_releases_workers_and_stops_none",
        "vm/guest_drift.py::disabled_controller",
        "vm/guest_drift.py::unset_does_not_lift",
        "vm/guest_apply.py::undo_takes_everything_back",
    ),
    35: (
        "test_cases.py::test_polaris_order_against_cores",
        "test_cases.py::test_go_gpuallocator_17_eight_4090",
    ),
    37: ("test_cases.py::test_warpx_4205_first_core_of_each_cache_reserved",),
    38: (
        "test_cases.py::test_deepops_1214_every_form_is_a_pci_function",
        "test_cases.py::test_tensorrt_llm_12985_what_names_no_card_is_named",
    ),
}


def test_no_case_is_left_out() -> None:
    """Each row of the table has tests, which exist and name each of the row's threads."""
    path = FOLDER.parent / "REPORTS.md"
    if not path.is_file():
        pytest.skip(f"no table of public cases: {path} is not there")
    section = re.search(
        r"^## \d+\. Replayable public cases$.*?(?=^## )", path.read_text(), re.MULTILINE | re.DOTALL
    )
    assert section is not None
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", section[0], re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(TESTS_OF_CASES)
    for number, threads in rows:
        told = " ".join(map(docstring_of, TESTS_OF_CASES[int(number)]))
        missing = {one for one in re.findall(r"#\d+", threads) if not re.search(rf"{one}\b", told)}
        assert missing == set(), f"case {number}: no test names them"


def docstring_of(test: str) -> str:
    """The docstring of 'FILE::FUNCTION', which a test file below this folder has."""
    name, _, function = test.partition("::")
    tree = ast.parse((Path(__file__).parent / name).read_text())
    (found,) = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    return ast.get_docstring(found) or ""
