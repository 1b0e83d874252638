"""Public reports of real machines: each one's facts as a machine, and the plan that is right for it.

The facts are read from the reports beside the recorded machines. What a report leaves out (SMT
siblings, nodes without a card, the bridges above a card) stands here, with the plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest

from provisioner.errors import ProblemsError
from provisioner.facts.values import CardFacts, CgroupFacts, NicFacts
from provisioner.idset import CpuSet
from provisioner.pci import PciAddress, parse_pci_address
from provisioner.plan import Plan
from provisioner.topology import Machine
from tests.hosts import make_host, note_codes, plan_for, ranks_of
from tests.machines import FOLDER, require_machines
from tests.trees import CARD_IDS

# Reports that say too little of a machine to build one.
NOT_ENOUGH = {
    "49-gb200-distances": "distances alone, of an emulated machine",
    "50-gh200-vllm-lscpu": "the excerpt has no row of the topology",
}

Adapters = tuple[tuple[str, ...], ...]


class Group(NamedTuple):
    """Cards and adapters that hang together: below one switch, or only below one host bridge."""

    cards: tuple[int, ...]
    adapters: Adapters = ()  # the RDMA names of each adapter's functions
    is_switch: bool = True
    node: int | None = None  # of adapters without a card


class Case(NamedTuple):
    """What a report leaves out, and the plan that is right."""

    shares: tuple[str, ...]  # each rank's CPUs
    stride: int = 0  # the distance of SMT siblings; 0: no SMT
    nodes: Mapping[int, str] = {}  # nodes that the report's rows do not name, or cut short
    groups: tuple[Group, ...] = ()
    nics: tuple[str, ...] = ()  # each rank's RDMA devices
    vendor: str = "nvidia"
    notes: frozenset[str] = frozenset()  # codes of the plan's notes
    facts: Mapping[str, Any] = {}


@cache
def reports() -> Mapping[str, Mapping[str, Any]]:
    """Every report by its id; none where the folder is missing."""
    file = FOLDER / "reports.json"
    return {one["id"]: one for one in json.loads(file.read_text())} if file.is_file() else {}


def pairs(first: int, last: int, each: int, gap: int) -> tuple[str, ...]:
    """Shares of `each` cores from `first` to `last`, with the siblings `gap` CPUs on, if any."""
    return tuple(
        f"{at}-{at + each - 1}" + (f",{at + gap}-{at + gap + each - 1}" if gap else "")
        for at in range(first, last + 1, each)
    )


NPS4 = {
    node: f"{16 * node}-{16 * node + 15},{128 + 16 * node}-{143 + 16 * node}" for node in range(8)
}
EVEN = ",".join(str(cpu) for cpu in range(0, 80, 2))
ODD = ",".join(str(cpu) for cpu in range(1, 80, 2))

CASES: Mapping[str, Case] = {
    "01-dgx-a100-nps4": Case(
        (*pairs(48, 63, 8, 128), *pairs(16, 31, 8, 128), *pairs(112, 127, 8, 128)),
        128,
        NPS4,
        (
            Group((0, 1), (("mlx5_0",), ("mlx5_1",))),
            Group((2, 3), (("mlx5_2",), ("mlx5_3",))),
            Group((4, 5), (("mlx5_4",), ("mlx5_5",))),
        ),
        ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5"),
        notes=frozenset({"idle_nodes"}),
    ),
    "02-dgx-a100-epyc7742-lscpu": Case(
        (
            *pairs(48, 63, 8, 128),
            *pairs(16, 31, 8, 128),
            *pairs(112, 127, 8, 128),
            *pairs(80, 95, 8, 128),
        ),
        128,
        groups=(
            Group((0, 1), (("mlx5_0",), ("mlx5_1",))),
            Group((2, 3), (("mlx5_2",), ("mlx5_3",))),
            Group((4, 5), (("mlx5_4",), ("mlx5_5",))),
            Group((6, 7), (("mlx5_6",), ("mlx5_7",))),
            Group((), (("mlx5_8", "mlx5_9"),), node=2),
        ),
        nics=tuple(f"mlx5_{number}" for number in range(8)),
        notes=frozenset({"idle_nodes"}),
    ),
    "03-dgx-a100-wiki": Case(
        (
            *pairs(48, 63, 8, 128),
            *pairs(16, 31, 8, 128),
            *pairs(112, 127, 8, 128),
            *pairs(80, 95, 8, 128),
        ),
        128,
        NPS4,
        (
            Group((0, 1), (("mlx5_0",), ("mlx5_1",))),
            Group((2, 3), (("mlx5_2",), ("mlx5_3",))),
            Group((4, 5), (("mlx5_6",), ("mlx5_7",))),
            Group((6, 7), (("mlx5_8",), ("mlx5_9",))),
            Group((), (("mlx5_4", "mlx5_5"),), node=2),
            Group((), (("mlx5_10", "mlx5_11"),), node=6),
        ),
        tuple(f"mlx5_{number}" for number in (0, 1, 2, 3, 6, 7, 8, 9)),
        notes=frozenset({"idle_nodes"}),
    ),
    # The other six cards of the host are hidden from the job that wrote the report.
    "05-slurm-2of8-a100": Case(
        pairs(48, 63, 8, 128), 128, NPS4, notes=frozenset({"idle_nodes", "all_on_one_node"})
    ),
    "06-dgx-h100": Case(
        (*pairs(0, 55, 14, 112), *pairs(56, 111, 14, 112)),
        112,
        groups=(
            *(
                Group((card,), ((f"mlx5_{number}",),))
                for card, number in enumerate((0, 3, 4, 5, 6, 9, 10, 11))
            ),
            Group((), (("mlx5_1", "mlx5_2"),), node=0),
            Group((), (("mlx5_7", "mlx5_8"),), node=1),
        ),
        nics=tuple(f"mlx5_{number}" for number in (0, 3, 4, 5, 6, 9, 10, 11)),
    ),
    "07-h100-96c": Case((*pairs(0, 47, 12, 96), *pairs(48, 95, 12, 96)), 96),
    # Below GPU 6's host bridge sit both adapters, so that it has both; its neighbours on the node share them.
    "11-rtx4090-8x-112c": Case(
        (*pairs(0, 55, 14, 112), *pairs(56, 111, 14, 112)),
        112,
        groups=(
            *(Group((card,)) for card in range(6)),
            Group((6,), (("mlx5_0",), ("mlx5_1",)), is_switch=False),
            Group((7,)),
        ),
        nics=("", "", "", "", "mlx5_0", "mlx5_0", "mlx5_0,mlx5_1", "mlx5_1"),
    ),
    # CPU 255 is offline: core 127 has one CPU, and is a whole core all the same.
    "13-a100-8x-2n-cpu255-missing": Case(
        (*pairs(0, 63, 16, 128), "64-84,192-212", "85-105,213-233", "106-126,234-254"),
        128,
        notes=frozenset({"mixed_smt", "remainder", "uneven_shares"}),
    ),
    "15-pcie-8gpu-pix-48c": Case(
        (*pairs(0, 23, 6, 48), *pairs(24, 47, 6, 48)),
        48,
        groups=tuple(Group((first, first + 1)) for first in (0, 2, 4, 6)),
    ),
    "16-pcie-8gpu-64cpu": Case((*pairs(0, 15, 4, 32), *pairs(16, 31, 4, 32)), 32),
    "18-h200-8x-vm-1node": Case(pairs(0, 127, 16, 0)),
    "21-interleaved-2gpu-80cpu": Case((EVEN, ODD), 40),
    # `nvidia-smi topo -m` cuts lists after six numbers; the lists are those of such a host.
    "22-interleaved-2gpu-sglang": Case((EVEN, ODD), 40, {0: EVEN, 1: ODD}),
    "23-h20-8x-192c": Case(
        (*pairs(0, 95, 24, 192), *pairs(96, 191, 32, 192)), 192, notes=frozenset({"uneven_shares"})
    ),
    # Every second card has an adapter of two ports beside it; the others share those of the node.
    "25-sglang-8x-16nic": Case(
        (*pairs(0, 47, 12, 96), "48-95,144-191"),
        96,
        groups=(
            Group((0,), (("mlx5_0", "mlx5_1"),)),
            Group((1,)),
            Group((2,), (("mlx5_2", "mlx5_3"),)),
            Group((3,)),
            Group((4,), (("mlx5_4", "mlx5_5"),)),
        ),
        nics=(
            "mlx5_0,mlx5_1",
            "mlx5_0,mlx5_1",
            "mlx5_2,mlx5_3",
            "mlx5_2,mlx5_3",
            "mlx5_4,mlx5_5",
        ),
        notes=frozenset({"uneven_shares"}),
    ),
    "26-b200-dgx": Case(
        pairs(0, 55, 28, 112),
        112,
        {1: "56-111,168-223"},
        notes=frozenset({"idle_nodes", "all_on_one_node"}),
    ),
    "28-b200-snc2": Case(
        (*pairs(0, 27, 14, 112), *pairs(28, 55, 14, 112)),
        112,
        {2: "56-83,168-195", 3: "84-111,196-223"},
        notes=frozenset({"idle_nodes"}),
    ),
    # numa_node is -1 and the machine has one node: the cards are on it, and it is said.
    "34-numa-na-2gpu": Case(pairs(0, 11, 6, 0), 0, {0: "0-11"}, notes=frozenset({"by_one_node"})),
    "35-v100-8x-nvlink-mesh": Case(
        (*pairs(0, 23, 6, 48), *pairs(24, 47, 6, 48)),
        48,
        groups=(
            Group((0,)),
            Group((1,)),
            Group((2, 3), (("mlx5_0",),)),
            Group((4,)),
            Group((5,)),
            Group((6, 7), (("mlx5_1",),)),
        ),
        nics=("mlx5_0",) * 4 + ("mlx5_1",) * 4,
    ),
    "39-two-gpu-4nic-128cpu": Case(
        ("0-31,64-95", "32-63,96-127"),
        64,
        groups=(
            Group((0,), (("mlx5_0",), ("mlx5_1",))),
            Group((1,), (("mlx5_2",), ("mlx5_3",))),
        ),
        nics=("mlx5_0,mlx5_1", "mlx5_2,mlx5_3"),
    ),
    "40-bdw-2gpu-4nic": Case(
        ("0-13,28-41", "14-27,42-55"),
        28,
        groups=(
            Group((0,), (("rocep3s0f0", "rocep3s0f1"),), is_switch=False),
            Group((1,), (("rocep129s0f0", "rocep129s0f1"),), is_switch=False),
        ),
        nics=("rocep3s0f0,rocep3s0f1", "rocep129s0f0,rocep129s0f1"),
    ),
    "47-gb200-gpu-binding": Case(
        ("0-35", "36-71", "72-107", "108-143"), 0, {0: "0-71", 1: "72-143"}
    ),
    "51-rocm-8gpu-2n": Case(pairs(0, 95, 12, 0), 0, {0: "0-47", 1: "48-95"}, vendor="amd"),
    "54-gpurun-mi300a": Case(
        ("0-23,96-119",),
        96,
        {1: "24-47,120-143", 2: "48-71,144-167", 3: "72-95,168-191"},
        vendor="amd",
        notes=frozenset({"idle_nodes"}),
    ),
    "55-gpurun-8gpu": Case((*pairs(0, 31, 8, 64), *pairs(32, 63, 8, 64)), 64, vendor="amd"),
    "59-gaudi-8x": Case((*pairs(0, 39, 10, 80), *pairs(40, 79, 10, 80)), 80, vendor="habana"),
    # The excerpt ends after the third card: two more nodes are its processors' own memory.
    "64-aurora-pvc-6gpu": Case(
        pairs(0, 50, 17, 104),
        104,
        {1: "52-103,156-207"},
        vendor="intel",
        notes=frozenset({"idle_nodes", "remainder", "all_on_one_node"}),
    ),
}


def build(report_id: str, case: Case) -> Machine:
    """The machine of a report's facts and what the case adds to them."""
    report = reports()[report_id]
    nodes: dict[int, str] = {}
    for gpu in report["gpus"]:
        node, cpus = gpu.get("numa_affinity"), gpu.get("cpu_affinity", "")
        if isinstance(node, int) and "TRUNCATED" not in cpus:
            nodes[node] = cpus.replace(" ", "")
    nodes |= {int(node): cpus for node, cpus in report.get("numa_cpus", {}).items()}
    nodes = dict(sorted((nodes | dict(case.nodes)).items()))
    cards, nics = place(report["gpus"], case)
    return make_host(nodes, card_facts=cards, nics=nics, stride=case.stride, **dict(case.facts))


def place(
    gpus: Sequence[Mapping[str, Any]], case: Case
) -> tuple[tuple[CardFacts, ...], tuple[NicFacts, ...]]:
    """The cards and adapters on a PCI bus: each group in a domain of its own, in card order."""
    groups = case.groups or tuple(Group((number,)) for number in range(len(gpus)))
    cards: list[CardFacts] = []
    nics: list[NicFacts] = []
    vendor_id, device, pci_class = CARD_IDS[case.vendor]
    for domain, group in enumerate(groups):
        below = 0

        node = group.node
        for number in group.cards:
            said = gpus[number].get("numa_affinity")
            node = said if isinstance(said, int) else None
            cards.append(
                CardFacts(
                    path=find_path(domain, below, group),
                    vendor=vendor_id,
                    device=device,
                    pci_class=pci_class,
                    numa_node=node,
                    model="reported",
                )
            )
            below += 1
        for names in group.adapters:
            for function, name in enumerate(names):
                nics.append(
                    NicFacts(
                        path=find_path(domain, below, group, function), numa_node=node, rdma=(name,)
                    )
                )
            below += 1
    return tuple(cards), tuple(nics)


def find_path(domain: int, below: int, group: Group, function: int = 0) -> tuple[PciAddress, ...]:
    """The way to the function that is the group's `below`-th device."""
    leaf = PciAddress(domain, 0x10 + below, 0, function)
    if not group.is_switch:
        return (PciAddress(domain, 0, below, 0), leaf)
    port = PciAddress(domain, 2, below, 0)
    return (PciAddress(domain, 0, 1, 0), PciAddress(domain, 1, 0, 0), port, leaf)


def check(plan: Plan, case: Case) -> None:
    """Holds a plan against the one that is right."""
    ranks = ranks_of(plan)
    assert [str(rank.cpus) for rank in ranks] == [
        str(CpuSet.parse_list(one)) for one in case.shares
    ]
    if case.nics:
        assert [",".join(rank.nics) for rank in ranks] == list(case.nics)
    assert note_codes(plan) - {"numa_balancing"} == case.notes
    assert {rank.vendor for rank in ranks} == {case.vendor}
    for rank in ranks:
        assert rank.alignment.whole_cores
        assert rank.alignment.local
        assert rank.memory_nodes == rank.cpu_nodes


@pytest.mark.parametrize("report_id", CASES)
def test_report(report_id: str) -> None:
    """The machine of each report gets the plan that is right for it."""
    require_machines()
    case = CASES[report_id]
    check(plan_for(build(report_id, case)), case)


def test_32_b200_cpuset_16() -> None:
    """In a cpuset of CPUs 0-15 the affinity that was printed is the cpuset's: the ceiling says so."""
    require_machines()
    report = reports()["32-b200-cpuset-16"]
    allowed = report["gpus"][0]["cpu_affinity"]
    machine = make_host(
        {0: "0-55,112-167", 1: "56-111,168-223"},
        [0, 0, 0, 0, 1, 1, 1, 1],
        stride=112,
        cgroups=(CgroupFacts(path="/", cpus=CpuSet.parse_list(allowed)),),
    )
    # The siblings 112-127 are outside, so that no core is whole.
    with pytest.raises(ProblemsError) as caught:
        plan_for(machine)
    assert {problem.code for problem in caught.value.problems} == {"no_local_cpu"}


def test_37_k8s_2017_8gpu() -> None:
    """Without NUMA columns the cards' CPU lists tell their nodes, as a local_cpulist does."""
    require_machines()
    gpus = reports()["37-k8s-2017-8gpu"]["gpus"]
    lists = [gpu["cpu_affinity"] for gpu in gpus]
    cards = tuple(
        CardFacts(
            path=(PciAddress(0, 0x10 + at, 0, 0),),
            device=0x1DB1,
            local_cpus=CpuSet.parse_list(cpus),
        )
        for at, cpus in enumerate(lists)
    )
    machine = make_host({0: lists[0], 1: lists[-1]}, card_facts=cards, stride=20)
    plan = plan_for(machine)
    assert [rank.cpu_nodes.first for rank in ranks_of(plan)] == [0, 0, 0, 0, 1]
    assert [len(rank.cpus) for rank in ranks_of(plan)] == [4, 4, 4, 4, 20]
    assert {"by_local_cpulist", "remainder"} <= note_codes(plan)


def test_42_talos_h100_numa_broken() -> None:
    """A kernel that lists no NUMA node: the machine is one node, which is said, and is planned so."""
    require_machines()
    report = reports()["42-talos-h100-numa-broken"]
    cards = tuple(
        CardFacts(path=(parse_pci_address(gpu["bdf"]),), device=0x2330) for gpu in report["gpus"]
    )
    half = report["lscpu"]["cpus"] // 2
    machine = make_host(
        {}, packages=(f"0-{2 * half - 1}",), card_facts=cards, stride=half, memory_bytes=1 << 40
    )
    plan = plan_for(machine)
    assert [str(rank.cpus) for rank in ranks_of(plan)] == list(pairs(0, 55, 14, 56))
    assert {"machine", "by_one_node"} <= note_codes(plan)


@pytest.mark.parametrize("report_id", ["43-gh200-1x-9nodes", "46-gb200-34nodes"])
def test_43_46_grace(report_id: str) -> None:
    """Nodes without CPUs are no rank's, whether they are cards' memory or empty."""
    require_machines()
    report = reports()[report_id]
    count = report["lscpu"]["nodes"]
    cpus = {int(node): text for node, text in report["numa_cpus"].items() if text}
    nodes = {node: cpus.get(node, "") for node in range(count)}
    memory = [node for node in range(count) if node in (1, 2, 10, 18, 26) and not nodes[node]]
    memory = memory[: 1 if count == 9 else 4]
    per_card = len(memory) // len(cpus)
    cards = tuple(
        CardFacts(
            path=(PciAddress(8 + at, 1, 0, 0),),
            device=0x2941,
            numa_node=at // per_card,
            memory_node=node,
        )
        for at, node in enumerate(memory)
    )
    sizes = {node: 0 for node in nodes if not nodes[node]} | dict.fromkeys(memory, 184)
    ranks = ranks_of(plan_for(make_host(nodes, card_facts=cards, memory=sizes)))
    assert [rank.memory_nodes.first for rank in ranks] == [
        at // per_card for at in range(len(memory))
    ]
    assert sum(len(rank.cpus) for rank in ranks) == 72 * len(cpus)


def test_63_ascend_a3_16x() -> None:
    """Sixteen NPUs on eight nodes of 80 cores: forty cores each."""
    require_machines()
    lscpu = reports()["63-ascend-a3-16x"]["lscpu"]
    each = lscpu["cpus"] // lscpu["nodes"]
    nodes = {node: f"{each * node}-{each * node + each - 1}" for node in range(lscpu["nodes"])}
    machine = make_host(nodes, [at // 2 for at in range(16)], vendor="ascend")
    assert [str(rank.cpus) for rank in ranks_of(plan_for(machine))] == list(pairs(0, 639, 40, 0))


def test_65_aurora_spr_hbm_flat() -> None:
    """The processors' high-bandwidth memory is nodes of its own, and is used if it is asked for."""
    require_machines()
    report = reports()["65-aurora-spr-hbm-flat"]
    nodes = {int(node): cpus for node, cpus in report["numa_cpus"].items()}
    rows = report["distances"]
    machine = make_host(
        nodes,
        [0, 0, 0, 1, 1, 1],
        stride=104,
        memory={0: 512, 1: 512, 2: 64, 3: 64},
        distances={(a, b): rows[a][b] for a in range(4) for b in range(a + 1, 4)},
        vendor="intel",
    )
    assert {str(rank.memory_nodes) for rank in ranks_of(plan_for(machine))} == {"0", "1"}
    wide = ranks_of(plan_for(machine, memory_kinds=("dram", "cxl", "hbm")))
    assert [str(rank.memory_nodes) for rank in wide] == ["0,2"] * 3 + ["1,3"] * 3


@pytest.mark.parametrize(
    "report_id, with_memory",
    [("68-epyc7551-memoryless", 2), ("69-threadripper-half-memoryless", 2)],
)
def test_68_69_nodes_without_memory(report_id: str, with_memory: int) -> None:
    """A card on a node without memory gets that of the nearest node that has some, and it is said."""
    require_machines()
    count = reports()[report_id].get("lscpu", {}).get("nodes", 4)
    nodes = {node: f"{6 * node}-{6 * node + 5}" for node in range(count)}
    full = [0, count // 2][:with_memory]
    distances = {
        (a, b): 16 if (a < count // 2) == (b < count // 2) else 32
        for a in range(count)
        for b in range(a + 1, count)
    }
    machine = make_host(
        nodes,
        [1, count - 1],
        packages=(f"0-{3 * count - 1}", f"{3 * count}-{6 * count - 1}"),
        memory={node: 0 for node in nodes if node not in full},
        distances=distances,
    )
    plan = plan_for(machine)
    assert [rank.memory_nodes.first for rank in ranks_of(plan)] == full
    assert "remote_memory" in note_codes(plan)


@pytest.mark.parametrize("report_id", ["71-epyc9375f-smt-off", "72-spr-snc4-lstopo"])
def test_71_72_hosts_without_a_card(report_id: str) -> None:
    """A host without a card has no plan, for that reason; its cores are read right all the same."""
    require_machines()
    report = reports()[report_id]
    lscpu = report.get("lscpu", {})
    if "numa_cpus" in report:
        nodes = {int(node): cpus for node, cpus in report["numa_cpus"].items()}
        stride = 0
    else:
        half = lscpu["cpus"] // 2
        each = half // lscpu["nodes"]
        nodes = dict(
            enumerate(
                f"{at}-{at + each - 1},{at + half}-{at + half + each - 1}"
                for at in range(0, half, each)
            )
        )
        stride = half
    machine = make_host(nodes, stride=stride)
    assert {len(core.cpus) for core in machine.cores} == {2 if stride else 1}
    with pytest.raises(ProblemsError) as caught:
        plan_for(machine)
    assert [problem.code for problem in caught.value.problems] == ["no_card"]


def test_no_report_is_left_out() -> None:
    """Each report has a test here, or a reason why it can have none."""
    require_machines()
    with_own_test = (
        "32-b200-cpuset-16",
        "37-k8s-2017-8gpu",
        "42-talos-h100-numa-broken",
        "43-gh200-1x-9nodes",
        "46-gb200-34nodes",
        "63-ascend-a3-16x",
        "65-aurora-spr-hbm-flat",
        "68-epyc7551-memoryless",
        "69-threadripper-half-memoryless",
        "71-epyc9375f-smt-off",
        "72-spr-snc4-lstopo",
    )
    assert sorted((*CASES, *with_own_test, *NOT_ENOUGH)) == sorted(reports())
