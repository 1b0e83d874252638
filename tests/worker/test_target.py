"""What a rank is bound to: by its environment, a plan, or the machine; and what each bad input comes to."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from provisioner.discovery import discover
from provisioner.errors import InputError
from provisioner.facts.values import CgroupFacts
from provisioner.idset import CpuSet, NodeSet
from provisioner.planner import make_plan
from provisioner.render import rank_environment
from provisioner.request import PlacementRequest, ServiceRequest
from provisioner.root import MemoryRoot, Root
from provisioner.worker.target import Target, find_target
from tests.hosts import make_tree
from tests.worker.trees import show_cards, with_drivers, without, write_plan

NODES = {0: "0-15,32-47", 1: "16-31,48-63"}
EIGHT = make_tree(NODES, [0, 0, 0, 0, 1, 1, 1, 1], stride=32)
FIVE_AND_THREE = make_tree(NODES, [0, 0, 0, 0, 0, 1, 1, 1], stride=32)
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def target_of(
    root: Root | None,
    local_rank: int | None = None,
    environ: dict[str, str] | None = None,
    *paths: str,
    **options: Any,
) -> Target:
    """The target of a rank; no plan but those named is looked at."""
    return find_target(local_rank, environ=environ or {}, root=root, plan_paths=paths, **options)


def environment_of(root: Root, rank: int, **request: Any) -> dict[str, str]:
    """The environment that is rendered for a rank of one service."""
    plan = make_plan(discover(root), PlacementRequest((ServiceRequest(**request),)))
    return rank_environment(plan, plan.services[0], plan.services[0].ranks[rank])


def codes(target: Target) -> list[str]:
    """The codes of a target's problems."""
    return [one.code for one in target.problems]


def in_cgroup(path: str, cpus: str, tree: dict[str, Any] | None = None) -> MemoryRoot:
    """The machine of eight cards, the process in a cgroup of these CPUs."""
    return make_tree(
        NODES,
        [0, 0, 0, 0, 1, 1, 1, 1],
        stride=32,
        cgroups=(CgroupFacts(path=path, cpus=CpuSet.parse_list(cpus)),),
        own_cgroup=path,
        **(tree or {}),
    )


# By discovery --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(8))
def test_share_is_the_plans(rank: int) -> None:
    """Without a plan a rank gets what the host half would plan for it."""
    planned = make_plan(discover(FIVE_AND_THREE), PlacementRequest()).services[0].ranks[rank]
    target = target_of(FIVE_AND_THREE, rank)
    assert (target.cpus, target.memory_nodes, target.devices) == (
        planned.cpus,
        planned.memory_nodes,
        planned.devices,
    )
    assert (target.source, target.rank_source, target.problems) == ("discovery", "argument", ())


def test_rank_is_translated_to_its_card() -> None:
    """With CUDA_VISIBLE_DEVICES=4,5 local rank 0 has card 4's cores."""
    target = target_of(EIGHT, 0, {"CUDA_VISIBLE_DEVICES": "4,5", **ORDER})
    assert target.cpus == target_of(EIGHT, 4).cpus
    assert str(target.cpus) == "16-19,48-51"


def test_two_services_are_disjoint() -> None:
    """Two services that each see half of the cards of a node bind to disjoint cores."""
    halves = ("0,1", "2,3")
    found = [
        [target_of(EIGHT, rank, {"CUDA_VISIBLE_DEVICES": half, **ORDER}).cpus for rank in (0, 1)]
        for half in halves
    ]
    sets = [cpus for service in found for cpus in service if cpus is not None]
    assert len(sets) == 4
    assert (
        sum(len(cpus) for cpus in sets) == len(CpuSet(one for cpus in sets for one in cpus)) == 32
    )


@pytest.mark.parametrize("is_cdi", [False, True])
def test_two_containers_are_disjoint(is_cdi: bool) -> None:
    """Two containers that are each shown half of the cards bind to disjoint cores.

    Container tools hide the others in the driver's folder, or in /dev alone.
    """
    cards = [card.name for card in discover(EIGHT).accelerators]
    found = []
    for numbers in ((0, 2), (1, 3)):
        others = [f"dev/nvidia{number}" for number in range(8) if number not in numbers]
        shown = without(with_drivers(EIGHT), *others)
        if not is_cdi:
            shown = show_cards(shown, *(cards[number] for number in numbers))
        for rank, number in enumerate(numbers):
            target = target_of(shown, rank)
            assert (target.devices, target.problems) == ((cards[number],), ())
            found.append(target.cpus)
    assert [str(cpus) for cpus in found] == ["0-3,32-35", "8-11,40-43", "4-7,36-39", "12-15,44-47"]


def test_share_lies_within_the_cpuset() -> None:
    """A container's cpuset bounds the share, and the cores in it are divided among all cards of the node."""
    target = target_of(in_cgroup("/docker/box", "0-7,32-39"), 1)
    assert (str(target.cpus), target.problems) == ("2-3,34-35", ())


def test_kernels_word_on_the_cpuset_goes_before_files() -> None:
    """What the kernel lets this process run on bounds the share, whatever a container's files say."""
    target = target_of(EIGHT, 0, allowed_cpus=CpuSet.parse_list("8-15,40-47"))
    assert str(target.cpus) == "8-9,40-41"


@pytest.mark.parametrize("cpus", ["4-7,36-39", "5-7,37-39"])
def test_cpuset_that_is_the_ranks_is_not_divided(cpus: str) -> None:
    """A cpuset inside the rank's share is the rank's already, and is not cut a second time."""
    assert str(target_of(in_cgroup("/box", cpus), 1).cpus) == cpus


def test_memory_stays_within_the_cpuset() -> None:
    """In a cpuset that is the rank's, memory is of the nodes that the cpuset has, the card's own or not."""
    limits = CgroupFacts(path="/box", cpus=CpuSet.parse_list("4-7,36-39"), nodes=NodeSet((1,)))
    tree = make_tree(
        NODES, [0, 0, 0, 0, 1, 1, 1, 1], stride=32, cgroups=(limits,), own_cgroup="/box"
    )
    target = target_of(tree, 1)
    assert (str(target.cpus), str(target.memory_nodes)) == ("4-7,36-39", "1")


def test_ranks_own_slice_is_not_divided() -> None:
    """The slice of a plan that is not to be seen here holds the rank, whatever it reserved."""
    own = in_cgroup("/chat.slice/chat-rank1.slice/run.scope", "3-5,35-37")
    target = target_of(own, 1)
    assert (str(target.cpus), target.problems) == ("3-5,35-37", ())
    foreign = in_cgroup("/chat.slice/run.scope", "3-5,35-37")
    assert str(target_of(foreign, 1).cpus) != "3-5,35-37"


def test_slice_on_another_node_is_not_the_ranks() -> None:
    """A rank's slice on the cores of another node than the card's is told, and nothing is bound to it."""
    target = target_of(in_cgroup("/chat.slice/chat-rank1.slice", "16-19,48-51"), 1)
    assert (target.cpus, codes(target)) == (None, ["no_local_cpu"])


def test_several_devices_of_a_rank() -> None:
    """A rank of two devices has the shares of both."""
    target = target_of(EIGHT, 1, devices_per_rank=2)
    assert str(target.cpus) == "8-15,40-47"
    assert len(target.devices) == 2


def test_stated_locality_settles_a_card() -> None:
    """A card that does not know its node is bound by the caller's word."""
    tree = make_tree({0: "0-7", 1: "8-15"}, [None, 1])
    name = discover(tree).accelerators[0].name
    assert codes(target_of(tree, 0)) == ["no_locality"]
    assert str(target_of(tree, 0, locality={name: 1}).cpus) == "8-11"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_collector_is_left_as_it_was(is_enabled: bool) -> None:
    """Discovery stops the collector while it works, and leaves it as it was, also where it fails."""
    assert gc.isenabled()
    try:
        if not is_enabled:
            gc.disable()
        for rank in (0, 99):
            target_of(EIGHT, rank)
            assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


# Whose rank it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, environ, cgroup, expected",
    [
        (2, {"LOCAL_RANK": "1"}, "/x@3.service", (2, "argument")),
        (None, {"LOCAL_RANK": "1"}, "/x@3.service", (1, "LOCAL_RANK")),
        (None, {}, "/system.slice/x@3.service", (3, "unit x@3.service")),
        (None, {}, "/x.slice/x-rank2.slice/x@3.service", (2, "unit x-rank2.slice")),
        (None, {}, "/user.slice/user@1000.service/app.slice", (None, "none")),
        (None, {"CUDA_VISIBLE_DEVICES": "6"}, "/", (0, "the only visible device")),
    ],
)
def test_rank_is_found(
    given: int | None, environ: dict[str, str], cgroup: str, expected: tuple[int | None, str]
) -> None:
    """The rank is the argument, else LOCAL_RANK, else the unit's instance, else that of the only device."""
    tree = make_tree(NODES, [0, 0, 0, 0, 1, 1, 1, 1], stride=32, own_cgroup=cgroup)
    target = target_of(tree, given, {**environ, **ORDER})
    assert (target.local_rank, target.rank_source) == expected
    assert (target.cpus is None) == (expected[0] is None)


@pytest.mark.parametrize("text", ["", "-1", "one", "1.0", "9" * 12])
def test_bad_rank_binds_nothing(text: str) -> None:
    """A LOCAL_RANK that is no rank is named, and nobody's cores are taken."""
    target = target_of(EIGHT, None, {"LOCAL_RANK": text, "PROVISION_CPUS": "0-3"})
    assert (target.cpus, target.source, codes(target)) == (None, "none", ["bad_rank"])
    assert "LOCAL_RANK" in target.problems[0].message


@pytest.mark.parametrize(
    "environ, rank, words",
    [
        ({}, 8, "local rank 8 has no device"),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, 2, "visible by CUDA_VISIBLE_DEVICES: 4,5"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, "it is empty"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0, "ends the list"),
        ({"CUDA_VISIBLE_DEVICES": "3,3"}, 0, "repeated"),
        ({"CUDA_VISIBLE_DEVICES": "0,11,1"}, 1, "out of range"),
        ({}, None, "LOCAL_RANK is not set"),
    ],
)
def test_rank_without_a_device_is_named(
    environ: dict[str, str], rank: int | None, words: str
) -> None:
    """A rank outside the visible devices is a named problem, with what is visible, and binds nothing."""
    target = target_of(EIGHT, rank, environ)
    assert (target.cpus, codes(target)) == (None, ["no_device_for_rank"])
    assert words in target.problems[0].message


# Where discovery can't answer ------------------------------------------------------------------------


def test_no_accelerator_is_named() -> None:
    """A machine without accelerators is said to have none, and a hidden PCI bus is said to be hidden."""
    bare = target_of(make_tree({0: "0-3"}), 0)
    hidden = target_of(without(make_tree({0: "0-3"}), "sys/bus/pci", "sys/devices/pci"), 0)
    assert codes(bare) == codes(hidden) == ["no_accelerator"]
    assert "PCI bus is not to be seen here" in hidden.problems[0].message
    assert bare.cpus is hidden.cpus is None


def test_card_without_a_node_is_refused_on_several() -> None:
    """numa_node -1 on a machine of two nodes is a named problem with what would settle it; on one it is no matter."""
    target = target_of(make_tree({0: "0-3", 1: "4-7"}, [None]), 0)
    assert (target.cpus, codes(target)) == (None, ["no_locality"])
    assert "numa_node is -1" in target.problems[0].message
    assert str(target_of(make_tree({0: "0-3"}, [None]), 0).cpus) == "0-3"


def test_hidden_pci_bus_leaves_the_node_unknown() -> None:
    """In a container without /sys/bus/pci a card's node is unknown: named on two nodes, no matter on one."""
    paths = ("sys/bus/pci", "sys/devices/pci")
    two = target_of(without(make_tree({0: "0-3", 1: "4-7"}, [0]), *paths), 0)
    one = target_of(without(make_tree({0: "0-3"}, [0]), *paths), 0)
    assert (two.cpus, codes(two)) == (None, ["no_locality"])
    assert "no entry on the PCI bus" in two.problems[0].message
    assert str(one.cpus) == "0-3"


def test_cpuset_without_the_cards_cpus_is_named() -> None:
    """dask-cuda#1381 in process: a cpuset of socket 0 holds none of card 4's CPUs, and nothing is bound."""
    target = target_of(in_cgroup("/job", "0-7,32-39"), 4)
    assert (target.cpus, codes(target)) == (None, ["no_local_cpu"])


def test_node_without_memory_gets_the_nearest() -> None:
    """numactl#127 in process: a card on a node without memory is given the nearest node's."""
    tree = make_tree({0: "0-7", 1: "8-15"}, [1], memory={1: 0})
    assert target_of(tree, 0).memory_nodes == NodeSet((0,))


def test_wrong_options_are_errors() -> None:
    """An option that is none is an error of the caller's, not a line in a result."""
    with pytest.raises(InputError, match="expected bind, prefer, off"):
        target_of(EIGHT, 0, memory="hard")
    with pytest.raises(InputError, match="devices_per_rank 0"):
        target_of(EIGHT, 0, devices_per_rank=0)


# By the environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("memory", ["bind", "prefer", "off"])
def test_rendered_environment_is_taken(rank: int, memory: str) -> None:
    """What render writes for a rank is the rank's target, without a look at the machine."""
    environ = environment_of(FIVE_AND_THREE, rank, memory=memory, compile_cores=1)
    planned = (
        make_plan(
            discover(FIVE_AND_THREE),
            PlacementRequest((ServiceRequest(memory=memory, compile_cores=1),)),  # type: ignore[arg-type]
        )
        .services[0]
        .ranks[rank]
    )
    target = target_of(MemoryRoot("nothing", {}), None, environ)
    assert (target.source, target.problems) == ("environment", ())
    assert (target.cpus, target.main_cpus, target.compile_cpus) == (
        planned.cpus,
        planned.main_cpus,
        planned.compile_cpus,
    )
    assert (target.memory, target.memory_nodes) == (memory, planned.memory_nodes)


def test_inherited_environment_is_not_another_ranks() -> None:
    """A launcher started as rank 0 hands its environment to ranks 0 to 7: each is bound to its own cores."""
    environ = environment_of(EIGHT, 0)
    found = [target_of(EIGHT, None, {**environ, "LOCAL_RANK": str(rank)}) for rank in range(8)]
    assert [one.source for one in found] == ["environment"] + ["discovery"] * 7
    assert [one.cpus for one in found] == [target_of(EIGHT, rank).cpus for rank in range(8)]
    assert "inherited" in found[1].notes[0]


def test_slice_says_whose_environment_it_is() -> None:
    """Behind NAME-run a launcher may count its own cards alone: the slice says that the environment is the rank's."""
    environ = {**environment_of(EIGHT, 3), "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}
    inside = in_cgroup("/provision.slice/provision-rank3.slice/run.scope", "12-15,44-47")
    target = target_of(inside, None, environ)
    assert (target.source, str(target.cpus)) == ("environment", "12-15,44-47")


@pytest.mark.parametrize(
    "wrong",
    [
        {"PROVISION_CPUS": "0-"},
        {"PROVISION_CPUS": "all"},
        {"PROVISION_MEMORY_NODES": "x"},
        {"PROVISION_MEMORY": "hard"},
        {"PROVISION_MEMORY_NODES": ""},
    ],
)
def test_broken_environment_is_named(wrong: dict[str, str]) -> None:
    """A broken variable is a problem, and the machine is asked instead."""
    target = target_of(EIGHT, None, {**environment_of(EIGHT, 1), **wrong})
    assert (target.source, codes(target)) == ("discovery", ["bad_environment"])
    assert target.cpus == target_of(EIGHT, 1).cpus


def test_environment_of_a_larger_machine_is_refused() -> None:
    """Another machine's environment, whose CPUs this process may not use, is named and not bound."""
    target = target_of(
        make_tree({0: "0-3"}, [0]), None, environment_of(EIGHT, 7), allowed_cpus=CpuSet(range(4))
    )
    assert codes(target)[0] == "cpus_not_allowed"
    assert target.source != "environment"


def test_environment_of_another_machine_is_refused() -> None:
    """An environment whose CPUs are none of the card's node here is another machine's, and is not bound."""
    turned = make_tree(NODES, [1, 1, 1, 1, 0, 0, 0, 0], stride=32)
    environ = environment_of(EIGHT, 7)
    target = target_of(turned, None, environ)
    assert codes(target) == ["foreign_environment"]
    assert (target.source, target.cpus) == ("discovery", target_of(turned, 7).cpus)
    held = target_of(turned, None, environ, allowed_cpus=CpuSet.parse_list("28-31,60-63"))
    assert (held.source, held.problems) == ("environment", ())
    pairs = environment_of(EIGHT, 3, devices_per_rank=2)
    assert target_of(EIGHT, None, pairs).source == "environment"
    assert codes(target_of(turned, None, pairs)) == ["foreign_environment"]


def test_part_of_the_planned_cpus_is_taken_and_said() -> None:
    """Where the cpuset has a part of the planned CPUs that part is the target, and what is missing a problem."""
    target = target_of(EIGHT, None, environment_of(EIGHT, 0), allowed_cpus=CpuSet(range(2)))
    assert (str(target.cpus), codes(target)) == ("0-1", ["cpus_missing"])
    assert "2-3,32-35" in target.problems[0].message


# By a plan -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", **ORDER},
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
        {},
    ],
)
def test_plan_is_found_by_the_card(tmp_path: Path, environ: dict[str, str]) -> None:
    """A plan in /etc is taken by the rank's card, with or without discovery on the way."""
    request = PlacementRequest(reserve_cores=2)
    path = write_plan(EIGHT, tmp_path, request)
    planned = make_plan(discover(EIGHT), request).services[0].ranks
    for rank in (0, 7):
        target = target_of(EIGHT, rank, environ, path)
        assert (target.source, target.cpus) == (path, planned[rank].cpus)
        assert target.devices == planned[rank].devices


def test_plan_is_found_by_the_card_and_not_by_the_rank(tmp_path: Path) -> None:
    """With CUDA_VISIBLE_DEVICES=5,2 local rank 0 is the plan's rank 5."""
    path = write_plan(EIGHT, tmp_path)
    target = target_of(EIGHT, 0, {"CUDA_VISIBLE_DEVICES": "5,2", **ORDER}, path)
    assert (target.source, str(target.cpus)) == (path, "20-23,52-55")


def test_plan_is_found_by_the_unit(tmp_path: Path) -> None:
    """In a rank's slice the plan's rank is that of the slice, of its service."""
    services = (
        ServiceRequest("a", devices=("4", "5"), memory="prefer"),
        ServiceRequest("b", devices=("0", "1", "2", "3"), compile_cores=1),
    )
    path = write_plan(EIGHT, tmp_path, PlacementRequest(services))
    target = target_of(
        in_cgroup("/a.slice/a-rank1.slice", "20-23,52-55"), None, {"LOCAL_RANK": "0"}, path
    )
    assert (str(target.cpus), target.memory) == ("20-23,52-55", "prefer")
    target = target_of(in_cgroup("/b@2.service", "0-63"), None, {}, path)
    assert (str(target.main_cpus), str(target.compile_cpus)) == ("8-10,40-42", "11,43")


def test_plan_says_how_many_devices_a_rank_has(tmp_path: Path) -> None:
    """In a plan of two cards a rank, local rank 1 has cards 2 and 3, as render lists them."""
    request = PlacementRequest((ServiceRequest(devices_per_rank=2),))
    path = write_plan(EIGHT, tmp_path, request)
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", **ORDER}
    assert str(target_of(EIGHT, 1, environ, path).cpus) == "8-15,40-47"
    assert str(target_of(EIGHT, 1, {}, path).cpus) == "8-15,40-47"


def test_plan_without_the_card_is_passed_over(tmp_path: Path) -> None:
    """A card that the plan does not have gets its share of the machine, and a note says so."""
    request = PlacementRequest((ServiceRequest(devices=("0", "1")),))
    path = write_plan(EIGHT, tmp_path, request)
    target = target_of(EIGHT, 4, {}, path)
    assert (target.source, target.problems) == ("discovery", ())
    assert "has no rank with this one's cards" in target.notes[0]


@pytest.mark.parametrize(
    "other",
    [
        make_tree({0: "0-31", 1: "32-63"}, [0, 0, 0, 0, 1, 1, 1, 1]),
        make_tree(NODES, [1, 1, 1, 1, 0, 0, 0, 0], stride=32),
        make_tree({0: "0-15,32-47"}, [0, 0, 0, 0, 0, 0, 0, 0], stride=32),
    ],
    ids=["other CPUs", "other card nodes", "fewer nodes"],
)
def test_another_machines_plan_is_refused(tmp_path: Path, other: MemoryRoot) -> None:
    """A plan whose CPUs or cards lie otherwise here is another machine's: named, and not bound."""
    path = write_plan(EIGHT, tmp_path)
    target = target_of(other, 7, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", **ORDER}, path)
    assert codes(target) == ["foreign_plan"]
    assert target.source == "discovery"
    assert target.cpus == target_of(other, 7).cpus


@pytest.mark.parametrize("text", ["", "{", '{"schema": "provision.plan/2"}', "[]", "{} x"])
def test_broken_plan_is_named(tmp_path: Path, text: str) -> None:
    """A file that is no plan is a problem with its path, and the machine is asked instead."""
    path = tmp_path / "plan.json"
    path.write_text(text)
    target = target_of(EIGHT, 0, {}, str(path))
    assert (target.source, codes(target)) == ("discovery", ["bad_input"])
    assert str(path) in target.problems[0].message


def test_environment_names_the_plan(tmp_path: Path) -> None:
    """PROVISION_PLAN goes before the usual places."""
    path = write_plan(EIGHT, tmp_path, PlacementRequest(reserve_cores=1))
    target = target_of(EIGHT, 0, {"PROVISION_PLAN": path}, str(tmp_path / "none.json"))
    assert target.source == path
