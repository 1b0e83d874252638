"""The rules of the plan, one by one, on machines made for the purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from provisioner.discovery import discover
from provisioner.errors import ProblemsError, TopologyError
from provisioner.facts.values import BridgeFacts, CardFacts, NicFacts
from provisioner.fingerprint import machine_fingerprint
from provisioner.idset import CpuSet
from provisioner.pci import PciAddress
from provisioner.planfile import check_plan, format_plan, parse_plan
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest, ServiceRequest
from provisioner.root import MemoryRoot
from tests.hosts import cpus_of, make_card, make_host, note_codes, plan_for, ranks_of

TWO_NODES = {0: "0-7,16-23", 1: "8-15,24-31"}


def problems_of(machine: object, **request: object) -> list[str]:
    """The codes of the problems of a plan that must be refused."""
    with pytest.raises(ProblemsError) as caught:
        plan_for(machine, **request)  # type: ignore[arg-type]
    assert all(one.message for one in caught.value.problems)
    return [one.code for one in caught.value.problems]


# 1 Locality ---------------------------------------------------------------------------------------


def test_stated_locality_wins() -> None:
    """The operator's word goes before the card's own numa_node."""
    machine = make_host(TWO_NODES, [0, 1], stride=16)
    first = machine.accelerators[0].name
    plan = plan_for(machine, locality={first: 1})
    assert [str(rank.cpu_nodes) for rank in ranks_of(plan)] == ["1", "1"]
    assert "by_locality" in note_codes(plan)


def test_bridge_lends_its_node() -> None:
    """A card with numa_node -1 is on the node of the nearest bridge above it that knows one."""
    far, near, card = PciAddress(0, 1, 0, 0), PciAddress(0, 2, 0, 0), PciAddress(0, 3, 0, 0)
    machine = make_host(
        TWO_NODES,
        stride=16,
        card_facts=(CardFacts(path=(far, near, card), device=1),),
        bridges=(BridgeFacts(address=far, numa_node=0), BridgeFacts(address=near, numa_node=1)),
    )
    (rank,) = ranks_of(plan_for(machine))
    assert str(rank.cpus) == "8-15,24-31"
    assert [note.code for note in rank.notes] == ["by_bridge"]


def test_local_cpulist_of_part_of_the_machine() -> None:
    """Without node and bridge, a local_cpulist that is a proper subset of the CPUs says the node."""
    card = CardFacts(path=(PciAddress(0, 3, 0, 0),), device=1, local_cpus=CpuSet.parse_list("8-15"))
    (rank,) = ranks_of(plan_for(make_host(TWO_NODES, stride=16, card_facts=(card,))))
    assert str(rank.cpu_nodes) == "1"
    assert [note.code for note in rank.notes] == ["by_local_cpulist"]


def test_card_over_several_nodes_draws_on_each() -> None:
    """A local_cpulist over several nodes makes the card local to all, and it draws on each evenly."""
    nodes = {0: "0-3", 1: "4-7", 2: "8-11", 3: "12-15"}
    cards = tuple(
        CardFacts(path=(PciAddress(0, bus, 0, 0),), device=1, local_cpus=CpuSet.parse_list(cpus))
        for bus, cpus in ((1, "0-7"), (2, "0-7"), (3, "8-15"))
    )
    plan = plan_for(make_host(nodes, card_facts=cards))
    assert cpus_of(plan) == ["0-1,4-5", "2-3,6-7", "8-15"]
    assert "several_nodes" in note_codes(plan)


def test_shares_of_mixed_width_are_equal() -> None:
    """A card on two nodes counts half on each, so that it ends with as much as its neighbours."""
    cards = tuple(
        CardFacts(path=(PciAddress(0, bus, 0, 0),), device=1, numa_node=node, local_cpus=local)
        for bus, node, local in (
            (1, 0, None),
            (2, None, CpuSet(range(24))),
            (3, 1, None),
        )
    )
    plan = plan_for(make_host({0: "0-11", 1: "12-23", 2: "24-25"}, card_facts=cards))
    assert [len(rank.cpus) for rank in ranks_of(plan)] == [8, 8, 8]


def test_one_node_needs_no_evidence() -> None:
    """On a machine with one node with CPUs a card that says nothing is on that node."""
    (rank,) = ranks_of(plan_for(make_host({0: "0-7"}, [None])))
    assert str(rank.cpus) == "0-7"
    assert [note.code for note in rank.notes] == ["by_one_node"]


def test_unknown_locality_is_refused() -> None:
    """Where nothing says a card's node among several, the plan is refused and names the entry to write."""
    machine = make_host(TWO_NODES, [None, 1], stride=16)
    with pytest.raises(ProblemsError) as caught:
        plan_for(machine)
    (problem,) = caught.value.problems
    assert problem.code == "no_locality"
    assert "0000:10:00.0" in problem.message
    assert "numa_node is -1" in problem.message
    assert '[locality] "0000:10:00.0" = ' in problem.hint


def test_all_reasons_at_once() -> None:
    """Every reason why there is no plan is given together."""
    machine = make_host(TWO_NODES, [None, None], stride=16)
    assert problems_of(
        machine, locality={"0000:99:00.0": 1}, devices=("7",), reserve_cpus=CpuSet([99])
    ) == [
        "no_such_card",
        "no_such_card",
        "no_such_cpu",
        "no_locality",
        "no_locality",
    ]


def test_node_that_does_not_exist() -> None:
    """A numa_node that the machine does not have is never used."""
    assert problems_of(make_host(TWO_NODES, [5, 1], stride=16)) == ["no_such_node"]


def test_plan_records_what_said_each_node() -> None:
    """For each card of a rank the plan records which evidence spoke for its NUMA node."""
    machine = make_host(TWO_NODES, [0, 1, 1, 0], stride=16)
    stated = machine.accelerators[2].name
    plan = plan_for(machine, devices_per_rank=2, locality={stated: 0})
    assert [rank.node_sources for rank in ranks_of(plan)] == [
        ("numa_node", "numa_node"),
        ("locality", "numa_node"),
    ]
    assert parse_plan(format_plan(plan), "plan.json") == plan


# 2 CPU node and 3 memory nodes --------------------------------------------------------------------


def test_nearest_cpus_of_a_node_without() -> None:
    """A card on a node without CPUs is served by the nearest node with CPUs, and memory of that node."""
    machine = make_host(
        {0: "0-3", 1: "4-7", 2: ""}, [2], distances={(2, 0): 40, (2, 1): 20, (0, 1): 30}
    )
    (rank,) = ranks_of(plan_for(machine))
    assert (str(rank.cpus), str(rank.memory_nodes)) == ("4-7", "1")
    assert "node_without_cpus" in {note.code for note in rank.notes}


def test_equally_near_nodes_are_refused() -> None:
    """Where two nodes with CPUs are equally near and nothing else tells, the plan is refused."""
    machine = make_host({0: "0-3", 1: "4-7", 2: ""}, [2])
    assert problems_of(machine) == ["no_cpu_node"]


def test_memory_of_the_nearest_node() -> None:
    """A CPU node without memory takes that of the nearest node, and says so."""
    machine = make_host(
        {0: "0-3", 1: "4-7", 2: "8-11"},
        [1],
        memory={1: 0},
        distances={(1, 0): 20, (1, 2): 12, (0, 2): 30},
    )
    (rank,) = ranks_of(plan_for(machine))
    assert (str(rank.cpu_nodes), str(rank.memory_nodes), rank.alignment.distance) == ("1", "2", 12)
    assert "remote_memory" in {note.code for note in rank.notes}


def test_other_kinds_only_when_asked_for() -> None:
    """GPU memory, HBM and CXL are never memory nodes unless asked for by kind, and then the nearest."""
    machine = make_host(
        {0: "0-3", 1: "4-7", 2: "", 3: ""},
        [0, 1],
        distances={(0, 2): 14, (1, 2): 24, (0, 3): 24, (1, 3): 14},
    )
    assert [machine.node(node).kind for node in (2, 3)] == ["cxl", "cxl"]
    assert [str(rank.memory_nodes) for rank in ranks_of(plan_for(machine))] == ["0", "1"]
    asked = plan_for(machine, memory_kinds=("dram", "cxl"))
    assert [str(rank.memory_nodes) for rank in ranks_of(asked)] == ["0,2", "1,3"]


def test_memory_under_the_ceiling() -> None:
    """A node that the ceiling's memory nodes leave out is not used."""
    from provisioner.facts.values import CgroupFacts
    from provisioner.idset import NodeSet

    machine = make_host(
        TWO_NODES, [0, 1], stride=16, cgroups=(CgroupFacts(path="/", nodes=NodeSet([0])),)
    )
    plan = plan_for(machine)
    assert [str(rank.memory_nodes) for rank in ranks_of(plan)] == ["0", "0"]
    assert {"memory_ceiling", "remote_memory"} <= note_codes(plan)


# 4 Shares -----------------------------------------------------------------------------------------


def test_equal_contiguous_shares() -> None:
    """A node's cores are cut into equal runs in PCI order; what does not divide stays unassigned."""
    machine = make_host({0: "0-6,14-20", 1: "7-13,21-27"}, [0, 0, 0, 1], stride=14)
    plan = plan_for(machine)
    assert cpus_of(plan) == ["0-1,14-15", "2-3,16-17", "4-5,18-19", "7-13,21-27"]
    assert str(plan.unassigned_cpus) == "6,20"
    assert {"remainder", "uneven_shares"} <= note_codes(plan)


def test_spread_hands_out_the_rest() -> None:
    """With remainder = spread the first cards get one core more each, still as runs."""
    machine = make_host({0: "0-7"}, [0, 0, 0])
    plan = plan_for(machine, remainder="spread")
    assert cpus_of(plan) == ["0-2", "3-5", "6-7"]
    assert not plan.unassigned_cpus


def test_hidden_cards_count() -> None:
    """A service with some of the cards gets their shares alone, so that another's are disjoint."""
    machine = make_host({0: "0-7"}, [0, 0, 0, 0])
    halves = [plan_for(machine, devices=devices) for devices in (("0", "1"), ("2", "3"))]
    assert [cpus_of(plan) for plan in halves] == [["0-1", "2-3"], ["4-5", "6-7"]]
    assert str(halves[0].unassigned_cpus) == "4-7"
    assert "cards_without_rank" in note_codes(halves[0])


def test_too_few_cores() -> None:
    """More cards than cores on a node is refused with the count, the cores and the ceiling."""
    with pytest.raises(ProblemsError) as caught:
        plan_for(make_host({0: "0-3", 1: "4-7"}, [0, 1, 1, 1, 1, 1]))
    (problem,) = caught.value.problems
    assert problem.message == (
        "Cannot give 5 cards a core each on NUMA node 1: 4 cores are allowed there (4-7)"
    )
    assert "now 0-7" in problem.hint


# 5 Policies ---------------------------------------------------------------------------------------


def test_policy_node_shares_all() -> None:
    """Under policy node the cards of a node share every core of it."""
    machine = make_host({0: "0-6", 1: "7-13"}, [0, 0, 1])
    plan = plan_for(machine, policy="node")
    assert cpus_of(plan) == ["0-6", "0-6", "7-13"]
    assert "shared_cores" in note_codes(plan)


def test_policy_node_keeps_services_apart() -> None:
    """Two services on one node share it by their numbers of cards, and never overlap."""
    machine = make_host({0: "0-7"}, [0, 0, 0, 0])
    services = (ServiceRequest("a", ("0",)), ServiceRequest("b", ("1", "2", "3")))
    plan = plan_for(machine, policy="node", services=services)
    assert cpus_of(plan) == ["0-1", "2-7", "2-7", "2-7"]


def test_policy_llc_gives_whole_caches() -> None:
    """Under policy llc a share is made of whole last-level caches; one left over is unassigned."""
    machine = make_host({0: "0-19"}, [0, 0], cores_per_llc=4)
    plan = plan_for(machine, policy="llc")
    assert cpus_of(plan) == ["0-7", "8-15"]
    assert str(plan.unassigned_cpus) == "16-19"
    assert all(rank.alignment.llc is False for rank in ranks_of(plan))


def test_policy_llc_where_they_do_not_go_round() -> None:
    """With fewer caches than cards, shares are cut by core and a note says so."""
    plan = plan_for(make_host({0: "0-15"}, [0, 0, 0, 0], cores_per_llc=8), policy="llc")
    assert cpus_of(plan) == ["0-3", "4-7", "8-11", "12-15"]
    assert "llc_too_few" in note_codes(plan)


def test_card_range_marks_each_rank_off_its_node() -> None:
    """The heuristic by card number is planned for comparison, and each rank off its node is marked."""
    machine = make_host({0: "0-7", 1: "8-15"}, [0, 0, 0, 0, 0, 1, 1, 1])
    plan = plan_for(machine, policy="card-range")
    assert cpus_of(plan) == [f"{start}-{start + 1}" for start in range(0, 16, 2)]
    off = [rank.rank for rank in ranks_of(plan) if not rank.alignment.local]
    assert off == [4]
    assert [
        rank.rank for rank in ranks_of(plan) if "off_node" in {n.code for n in rank.notes}
    ] == off


# 6 SMT and reach ----------------------------------------------------------------------------------


def test_smt_first_leaves_siblings_idle() -> None:
    """With smt = first one CPU of each core is used, and its sibling is given to nobody."""
    plan = plan_for(make_host({0: "0-15"}, [0, 0], stride=8), smt="first")
    assert cpus_of(plan) == ["0-3", "4-7"]
    assert not plan.unassigned_cpus
    assert "idle_siblings" in note_codes(plan)
    assert not any(rank.alignment.whole_cores for rank in ranks_of(plan))


def test_reach_package_borrows_from_nodes_without_card() -> None:
    """With reach = package a node without a card lends cores and memory to the cards of its package."""
    machine = make_host(
        {0: "0-3", 1: "4-7", 2: "8-11", 3: "12-15"}, [0, 0, 3], packages=("0-7", "8-15")
    )
    near = plan_for(machine)
    assert cpus_of(near) == ["0-1", "2-3", "12-15"]
    assert "idle_nodes" in note_codes(near)
    assert any("8 cores (4-11) and 128.0 GiB" in note.message for note in near.notes)
    wide = plan_for(machine, reach="package")
    assert cpus_of(wide) == ["0-1,4-5", "2-3,6-7", "8-15"]
    assert [str(rank.memory_nodes) for rank in ranks_of(wide)] == ["0-1", "0-1", "2-3"]
    assert {"lent_nodes"} <= note_codes(wide)
    assert not any(rank.alignment.local for rank in ranks_of(wide))


# 7 Ranks, 8 reserve -------------------------------------------------------------------------------


def test_several_cards_a_rank() -> None:
    """A rank over several cards has the union of their shares and memory nodes."""
    machine = make_host({0: "0-7", 1: "8-15"}, [0, 0, 1, 1])
    plan = plan_for(machine, devices_per_rank=2, devices=("0", "2", "1", "3"))
    assert cpus_of(plan) == ["0-3,8-11", "4-7,12-15"]
    assert [str(rank.memory_nodes) for rank in ranks_of(plan)] == ["0-1", "0-1"]
    assert [rank.device_indexes for rank in ranks_of(plan)] == [(0, 2), (1, 3)]
    assert "several_cards" in note_codes(plan)
    assert problems_of(machine, devices_per_rank=3) == ["uneven_ranks"]


def test_reserve_whole_cores() -> None:
    """Reserved are the first cores of each node, whole, and shares come from the rest."""
    plan = plan_for(make_host(TWO_NODES, [0, 1], stride=16), reserve_cores=2)
    assert str(plan.reserved_cpus) == "0-1,8-9,16-17,24-25"
    assert cpus_of(plan) == ["2-7,18-23", "10-15,26-31"]


def test_reserved_list_is_rounded_up() -> None:
    """A reserved cpulist that cuts a core takes the whole core, with a note."""
    plan = plan_for(make_host({0: "0-15"}, [0], stride=8), reserve_cpus=CpuSet([0, 9]))
    assert str(plan.reserved_cpus) == "0-1,8-9"
    assert cpus_of(plan) == ["2-7,10-15"]
    assert "reserve_rounded" in note_codes(plan)


def test_confine_needs_room() -> None:
    """Confinement without a core to confine to is refused."""
    machine = make_host({0: "0-7"}, [0])
    assert problems_of(machine, confine=True) == ["nothing_to_confine_to"]
    assert str(plan_for(machine, confine=True, reserve_cores=1).system_cpus) == "0"


# 9 Compile budget, 10 memory ----------------------------------------------------------------------


def test_compile_cores_are_set_aside() -> None:
    """The compile budget is cut from the end of each share, disjoint from the main threads' cores."""
    plan = plan_for(make_host({0: "0-15"}, [0, 0], stride=8), compile_cores=1)
    assert [(str(r.main_cpus), str(r.compile_cpus)) for r in ranks_of(plan)] == [
        ("0-2,8-10", "3,11"),
        ("4-6,12-14", "7,15"),
    ]
    assert problems_of(make_host({0: "0-7"}, [0, 0]), compile_cores=4) == ["share_too_small"] * 2


def test_memory_need_counts_all_ranks_of_a_node() -> None:
    """What cannot fit beside the other ranks of the node is refused, with the sizes."""
    machine = make_host({0: "0-7", 1: "8-15"}, [0, 0, 1], memory={0: 64, 1: 64})
    assert cpus_of(plan_for(machine, memory_need_bytes=32 << 30)) == ["0-3", "4-7", "8-15"]
    with pytest.raises(ProblemsError) as caught:
        plan_for(machine, memory_need_bytes=33 << 30)
    (problem,) = caught.value.problems
    assert problem.code == "memory_too_small"
    assert "66.0 GiB" in problem.message
    assert "64.0 GiB" in problem.message
    assert problems_of(machine, memory_need_bytes=33 << 30, memory="prefer") == ["memory_too_small"]


def test_memory_off_names_no_node() -> None:
    """With memory = off no rank has memory nodes."""
    (rank,) = ranks_of(plan_for(make_host({0: "0-7"}, [0]), memory="off"))
    assert not rank.memory_nodes
    assert rank.alignment.distance is None


def test_unknown_memory_is_no_memory_node() -> None:
    """A node of which nothing says that it has memory is not bound to; planning CPUs alone works."""
    machine = make_host(
        TWO_NODES, [0, 1], stride=16, absent=("*/meminfo", "*/has_memory", "*/has_normal_memory")
    )
    assert [node.kind for node in machine.nodes] == [None, None]
    assert problems_of(machine) == ["no_memory_node"] * 2
    assert cpus_of(plan_for(machine, memory="off")) == ["0-7,16-23", "8-15,24-31"]


# 11 NICs ------------------------------------------------------------------------------------------


def test_nearest_rdma_devices() -> None:
    """The same switch goes before the same root, and that before the same node; nothing beyond."""

    def at(bus: int, device: int = 0) -> PciAddress:
        return PciAddress(0, bus, device, 0)

    switch, port_a, port_b = at(1), at(2, 0), at(2, 1)
    cards = (
        CardFacts(path=(switch, port_a, at(3)), device=1, numa_node=0),
        CardFacts(path=(at(0x40), at(0x41)), device=1, numa_node=0),
        CardFacts(path=(at(0x80), at(0x81)), device=1, numa_node=1),
    )
    nics = (
        NicFacts(path=(switch, port_b, at(4)), numa_node=0, rdma=("mlx5_10",)),
        NicFacts(path=(switch, port_b, at(5)), numa_node=0, rdma=("mlx5_2",), net=("eth0",)),
        NicFacts(path=(at(0x20), at(0x21)), numa_node=0, rdma=("bnxt_re0",)),
        NicFacts(path=(at(0x22), at(0x23)), numa_node=0, net=("eth1",)),
    )
    machine = make_host({0: "0-7", 1: "8-15"}, card_facts=cards, nics=nics)
    assert [rank.nics for rank in ranks_of(plan_for(machine))] == [
        ("mlx5_2", "mlx5_10"),
        ("bnxt_re0", "mlx5_2", "mlx5_10"),
        (),
    ]


# 13 Several services ------------------------------------------------------------------------------


def test_services_never_overlap() -> None:
    """Services planned together have disjoint cores, and a card in two of them is refused."""
    machine = make_host({0: "0-7", 1: "8-15"}, [0, 0, 1, 1])
    services = (
        ServiceRequest("chat", ("0", "2")),
        ServiceRequest("batch", ("1", "3"), compile_cores=1),
    )
    plan = plan_for(machine, services=services)
    assert [str(service.cpus) for service in plan.services] == ["0-3,8-11", "4-7,12-15"]
    twice = (ServiceRequest("chat", ("0",)), ServiceRequest("batch", ("0000:10:00.0",)))
    assert problems_of(machine, services=twice) == ["shared_card"]


# The plan as a value and as a file ------------------------------------------------------------------


def test_same_input_same_bytes() -> None:
    """The same machine and request give the same bytes, and a plan file is read back as the plan."""
    machine = make_host(TWO_NODES, [0, 1], stride=16)
    texts = {format_plan(make_plan(machine, PlacementRequest(reserve_cores=1))) for _ in range(2)}
    (text,) = texts
    assert parse_plan(text, "plan.json") == make_plan(machine, PlacementRequest(reserve_cores=1))


@pytest.mark.parametrize(
    "old, new, found",
    [
        ("{", "[", "no JSON"),
        ("provision.plan/1", "provision.plan/9", "no plan"),
        ('"cpus": "0-7,16-23"', '"cpus": "7-0"', "runs backwards"),
        ('"cpus": "0-7,16-23"', '"cpus": 3', "expected a list"),
        ('"rank": 0', '"rank": "0"', "int"),
        ('"slice": "provision-rank0.slice"', '"slice": "../x.slice"', "expected rank 0"),
        ('"name": "provision"', '"name": "a\\nb"', "no service name"),
        ('"main_cpus": "0-7,16-23"', '"main_cpus": "0-6"', "no partition"),
        ('"reserved_cpus": ""', '"reserved_cpus": "0"', "no CPU twice"),
    ],
)
def test_broken_plan_file(old: str, new: str, found: str) -> None:
    """A plan file that is broken or was edited into nonsense is refused, naming file and value."""
    text = format_plan(plan_for(make_host(TWO_NODES, [0, 1], stride=16)))
    assert old in text
    with pytest.raises(Exception, match=r"^plan\.json: ") as caught:
        parse_plan(text.replace(old, new, 1), "plan.json")
    assert any(found in one.message for one in caught.value.problems)  # type: ignore[attr-defined]


def test_later_schema_may_add_keys() -> None:
    """Keys that a later version adds to a plan file are ignored."""
    plan = plan_for(make_host(TWO_NODES, [0, 1], stride=16))
    text = format_plan(plan).replace('"rank": 0', '"rank": 0, "later": [1]')
    assert parse_plan(text, "plan.json") == plan


def test_fingerprint_survives_a_reboot() -> None:
    """Interface names, memory sizes and NUMA balancing do not change a machine's fingerprint."""
    nic = NicFacts(path=(PciAddress(0, 9, 0, 0),), numa_node=0, net=("eth0",))
    before = make_host(TWO_NODES, [0, 1], stride=16, nics=(nic,), numa_balancing=0)
    after = make_host(
        TWO_NODES,
        [0, 1],
        stride=16,
        nics=(replace(nic, net=("enp9s0",)),),
        numa_balancing=1,
        memory={0: 63},
    )
    assert machine_fingerprint(before) == machine_fingerprint(after)


@pytest.mark.parametrize("change", ["moved", "smt", "offline", "nodes", "ceiling", "isolated"])
def test_fingerprint_does_not_survive_a_change(change: str) -> None:
    """A moved card, a BIOS setting, an offlined core and another ceiling change the fingerprint."""
    from provisioner.facts.values import CgroupFacts

    before = make_host(TWO_NODES, [0, 1], stride=16)
    after = {
        "moved": lambda: make_host(TWO_NODES, [0, 0], stride=16),
        "smt": lambda: make_host({0: "0-7", 1: "8-15"}, [0, 1]),
        "offline": lambda: make_host(TWO_NODES, [0, 1], stride=16, offline_cpus=CpuSet([7, 23])),
        "nodes": lambda: make_host({0: "0-15,16-31"}, [0, 0], stride=16),
        "ceiling": lambda: make_host(
            TWO_NODES, [0, 1], stride=16, cgroups=(CgroupFacts(path="/", cpus=CpuSet(range(31))),)
        ),
        "isolated": lambda: make_host(TWO_NODES, [0, 1], stride=16, isolated_cpus=CpuSet([1])),
    }[change]()
    assert machine_fingerprint(before) != machine_fingerprint(after)


@pytest.mark.parametrize(
    "old, new, found",
    [
        ('pus": "0-7,16-23"', 'pus": "500-510"', "expected CPUs of 0-31"),
        ('"memory_nodes": "0"', '"memory_nodes": "9"', "memory_nodes is 9"),
        ('"cpu_nodes": "0"', '"cpu_nodes": "9"', "cpu_nodes is 9"),
        ('"main_cores": 8', '"main_cores": -5', "main_cores is -5"),
        ('"device_indexes": [\n      0', '"device_indexes": [\n      7', "do not name cards"),
        ('"vendor": "nvidia"', '"vendor": "evil"', "do not name cards"),
        ('"confine": false', '"confine": true', "confine is set"),
        ('"0000:18:00.0"', '"0000:10:00.0"', "in another rank too"),
        ('"reserved_cpus": ""', '"reserved_cpus": "900"', "reserved_cpus is 900"),
    ],
)
def test_plan_that_its_machine_can_not_have(old: str, new: str, found: str) -> None:
    """A plan edited into what its machine does not have is refused, each fault named."""
    machine = make_host(TWO_NODES, [0, 1], stride=16)
    text = format_plan(plan_for(machine))
    assert old in text
    check_plan(parse_plan(text, "plan.json"), machine, "plan.json")
    edited = parse_plan(text.replace(old, new), "plan.json")
    with pytest.raises(ProblemsError, match=r"^plan\.json: ") as caught:
        check_plan(edited, machine, "plan.json")
    assert any(found in problem.message for problem in caught.value.problems)


def test_core_on_two_nodes_is_a_contradiction() -> None:
    """SMT siblings on different NUMA nodes are no machine's, and nothing is planned on them."""
    machine_files = {
        "sys/devices/system/cpu/online": "0-1",
        "sys/devices/system/node/node0/cpulist": "0",
        "sys/devices/system/node/node1/cpulist": "1",
    }
    machine_files |= {
        f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": "0-1" for cpu in (0, 1)
    }
    with pytest.raises(TopologyError, match="its SMT sibling 0 on NUMA node 0"):
        discover(MemoryRoot("made", machine_files))


def test_hint_on_idle_nodes() -> None:
    """Lending is proposed only where a card's package has the idle nodes."""
    same = make_host({0: "0-7", 1: "8-15"}, [0, 0], packages=("0-15",))
    other = make_host({0: "0-7", 1: "8-15"}, [0, 0])
    hints = []
    for machine in (same, other):
        (note,) = [note for note in plan_for(machine).notes if note.code == "idle_nodes"]
        assert note.message.startswith("NUMA node 1 has no card: ")
        hints.append(note.hint)
    assert 'reach = "package"' in hints[0]
    assert hints[1] == "Keep the system there: no card is in their package"


def test_memory_of_a_kind_that_is_elsewhere_is_no_fault() -> None:
    """Where the node's own memory is not of the kind that was asked for, no cpuset is blamed."""
    machine = make_host(
        {0: "0-7", 1: ""},
        card_facts=(make_card("0000:40:01.0/0000:41:00.0", numa_node=0, memory_node=1),),
    )
    (rank,) = ranks_of(plan_for(machine, memory_kinds=("gpu",)))
    (note,) = [note for note in rank.notes if note.code == "remote_memory"]
    assert note.message == (
        "Node 0 has no memory of the kind asked for (gpu); memory comes from node 1."
    )
    assert note.hint == ""
