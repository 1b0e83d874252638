"""Network devices: which are nearest to a rank's cards, how ties are shared, and what a rank is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from provisioner.discovery import discover
from provisioner.facts import build_tree
from provisioner.facts.toml_form import parse_pci_path
from provisioner.facts.values import CardFacts, NicFacts
from provisioner.nearness import nearest_nics, rdma_names
from provisioner.pci import parse_pci_address
from provisioner.plan import Plan
from provisioner.planfile import format_plan, parse_plan
from provisioner.render import rank_environment
from provisioner.request import ServiceRequest
from provisioner.root import MemoryRoot
from provisioner.samples import read_sample
from provisioner.topology import Machine
from tests.hosts import make_card, make_host, make_tree, note_codes, plan_for, ranks_of
from tests.trees import add_files

NODES = {0: "0-15", 1: "16-31"}


def nic(path: str, *rdma: str, **facts: Any) -> NicFacts:
    """A network function on node 0 at the end of a path."""
    return NicFacts(path=parse_pci_path(path), rdma=rdma, **{"numa_node": 0, **facts})


def card(path: str, node: int | None = 0) -> CardFacts:
    """A card at the end of a path."""
    return make_card(path, numa_node=node)


def host(cards: Sequence[CardFacts], nics: Sequence[NicFacts]) -> Machine:
    """A machine of two nodes."""
    return make_host(NODES, card_facts=tuple(cards), nics=tuple(nics))


def shared(machine: Machine, **request: Any) -> list[str]:
    """The RDMA devices of each rank."""
    return [",".join(rank.nics) for rank in ranks_of(plan_for(machine, **request))]


def told(plan: Plan, number: int = 0) -> Mapping[str, str]:
    """The environment of a rank."""
    service = plan.services[0]
    return rank_environment(plan, service, service.ranks[number])


def on_switch(cards: int, adapters: Sequence[Sequence[str]]) -> Machine:
    """Cards and adapters below one switch; an adapter has a function for each of its names."""
    return host(
        [card(f"0000:01:00.0/02:00.0/03:{at:02x}.0/{0x10 + at:02x}:00.0") for at in range(cards)],
        [
            nic(f"0000:01:00.0/02:00.0/03:{0x10 + at:02x}.0/{0x30 + at:02x}:00.{port}", name)
            for at, names in enumerate(adapters)
            for port, name in enumerate(names)
        ],
    )


# Nearness -------------------------------------------------------------------------------------------


def test_same_switch_then_same_root_then_same_node() -> None:
    """The nearest level that has a device counts, and levels beyond the node do not."""
    switch, root_port = "0000:01:00.0/02:00.0/03", "0000:01:01.0"
    levels = [
        nic(f"{switch}:01.0/11:00.0", "switch"),
        nic(f"{root_port}/21:00.0", "root"),
        nic("0001:01:00.0/02:00.0", "node"),
        nic("0002:01:00.0/02:00.0", "far", numa_node=1),
    ]
    one = card(f"{switch}:00.0/10:00.0")
    assert shared(host([one], levels)) == ["switch"]
    assert shared(host([one], levels[1:])) == ["root"]
    assert shared(host([one], levels[2:])) == ["node"]
    assert shared(host([one], levels[3:])) == [""]


def test_deeper_common_bridge_is_nearer() -> None:
    """Below one switch the device that shares the lower of its parts is the nearer one."""
    machine = host(
        [card("0000:01:00.0/02:00.0/03:00.0/04:00.0/05:00.0/06:00.0")],
        [
            nic("0000:01:00.0/02:00.0/03:01.0/08:00.0", "above"),
            nic("0000:01:00.0/02:00.0/03:00.0/04:00.0/05:01.0/07:00.0", "beside"),
        ],
    )
    assert shared(machine) == ["beside"]


def test_stated_node_counts_for_nearness() -> None:
    """A card that does not say its node is near to the devices of the node that the operator states."""
    cards = [card("0000:01:00.0/02:00.0", None), card("0000:01:00.0/03:00.0", 1)]
    machine = make_host(
        NODES,
        card_facts=tuple(cards),
        nics=(
            nic("0001:01:00.0/02:00.0", "a"),
            nic("0002:01:00.0/02:00.0", "b", numa_node=1),
        ),
    )
    # The bridge above both says nothing, as its two cards do not agree.
    stated = {"0000:02:00.0": 0}
    assert shared(machine, locality=stated) == ["a", "b"]


def test_every_drivers_names() -> None:
    """RDMA devices of any driver count by the names that the kernel gives them; others do not."""
    names = (
        "mlx5_bond_0",
        "bnxt_re3",
        "irdma1",
        "hns_2",
        "rdmap16s27",
        "hfi1_0",
        "rocep59s0f1",
        "mlx4_0",
    )
    functions = [nic(f"0000:{0x20 + at:02x}:00.0", name) for at, name in enumerate(names)]
    ethernet = nic("0000:40:00.0", net=("eth0",))
    machine = host([card("0000:50:00.0")], [*functions, ethernet])
    assert sorted(shared(machine)[0].split(",")) == sorted(names)


# Ties -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cards, adapters, right",
    [
        (1, [["a"], ["b"]], ["a,b"]),
        (2, [["a"], ["b"]], ["a", "b"]),
        (2, [["a"], ["b"], ["c"], ["d"]], ["a,c", "b,d"]),
        (2, [["a"], ["b"], ["c"]], ["a,c", "b"]),
        (2, [["a"]], ["a", "a"]),
        (4, [["a"], ["b"]], ["a", "a", "b", "b"]),
        (3, [["a"], ["b"]], ["a", "a", "b"]),
        # Ports: an adapter each first, then the ports of one.
        (2, [["a0", "a1"], ["b0", "b1"]], ["a0,a1", "b0,b1"]),
        (2, [["a0", "a1"]], ["a0", "a1"]),
        (4, [["a0", "a1"], ["b0", "b1"]], ["a0", "b0", "a1", "b1"]),
        (3, [["a0", "a1"], ["b0", "b1"]], ["a0,b1", "b0", "a1"]),
    ],
)
def test_ties_are_shared_evenly(
    cards: int, adapters: Sequence[Sequence[str]], right: Sequence[str]
) -> None:
    """Equally near devices are dealt to the cards, whole adapters before ports."""
    assert shared(on_switch(cards, adapters)) == right


def test_no_card_takes_more_than_one_above_another() -> None:
    """Whatever the numbers, shares differ by one at most, and every device is used."""
    for cards in range(1, 9):
        for count in range(1, 12):
            names = [[f"d{at}"] for at in range(count)]
            lists = [one.split(",") for one in shared(on_switch(cards, names))]
            sizes = [len(one) for one in lists]
            assert max(sizes) - min(sizes) <= 1
            users = [sum(name in one for one in lists) for (name,) in names]
            assert min(users) >= 1
            assert max(users) - min(users) <= 1


def test_topology_shows_all_that_are_near() -> None:
    """What is nearest to a card does not depend on who else is near to it."""
    machine = on_switch(2, [["a"], ["b"]])
    for one in machine.accelerators:
        near = nearest_nics(machine, one, machine.cpu_nodes)
        assert rdma_names(near) == ("a", "b")


def test_services_do_not_use_each_others_devices() -> None:
    """All the host's cards count in a tie, so that plans made apart use different devices."""
    machine = on_switch(2, [["a"], ["b"]])
    assert shared(machine, devices=("0",)) == ["a"]
    assert shared(machine, devices=("1",)) == ["b"]
    services = (ServiceRequest("x", ("1",)), ServiceRequest("y", ("0",)))
    assert shared(machine, services=services) == ["b", "a"]


def test_rank_of_several_cards_has_their_devices_once() -> None:
    """A rank's cards may share a device, which it names once."""
    assert shared(on_switch(4, [["mlx5_10"], ["mlx5_9"]]), devices_per_rank=2) == [
        "mlx5_10",
        "mlx5_9",
    ]
    assert shared(on_switch(2, [["mlx5_10"], ["mlx5_9"]]), devices_per_rank=2) == ["mlx5_9,mlx5_10"]


def test_dgx_a100_pairs() -> None:
    """Two cards and two adapters below each switch: a rank each (DCGM#149)."""
    machine = discover(build_tree(read_sample("nps4-8gpu")))
    assert shared(machine) == [f"mlx5_{number}" for number in (0, 1, 2, 3, 6, 7, 8, 9)]


# Virtual functions ----------------------------------------------------------------------------------


def test_virtual_functions_only_if_asked() -> None:
    """A virtual function of the host is nobody's nearest device unless the request says so."""
    physical = parse_pci_address("0000:30:00.0")
    machine = host(
        [card("0000:20:00.0")],
        [nic("0000:30:00.0", "mlx5_0"), nic("0000:30:00.2", "mlx5_1", physfn=physical)],
    )
    assert shared(machine) == ["mlx5_0"]
    assert shared(machine, virtual_nics=True) == ["mlx5_0,mlx5_1"]


def test_virtual_function_given_to_a_machine_is_a_device() -> None:
    """Inside a virtual machine nothing says that a function is virtual, and it counts."""
    machine = host([card("0000:20:00.0")], [nic("0000:30:00.2", "mlx5_0")])
    assert shared(machine) == ["mlx5_0"]


def test_device_on_a_node_that_is_not_there() -> None:
    """A network device that names a node which does not exist is near to no card by it, and is told of."""
    machine = host([card("0000:20:00.0")], [nic("0001:30:00.0", "mlx5_0", numa_node=7)])
    assert shared(machine) == [""]
    assert "0001:30:00.0 says 7" in machine.oddities[0]


# The environment -------------------------------------------------------------------------------------


def test_names_for_nccl_and_ucx_only_if_asked() -> None:
    """NCCL_IB_HCA and UCX_NET_DEVICES are rendered for nic_environment, and not without."""
    machine = on_switch(2, [["mlx5_1"], ["mlx5_10"]])
    assert {"NCCL_IB_HCA", "UCX_NET_DEVICES"}.isdisjoint(told(plan_for(machine)))
    plan = plan_for(machine, nic_environment=True)
    # A name without '=' is a prefix to NCCL: mlx5_1 would be mlx5_10 too.
    assert told(plan)["NCCL_IB_HCA"] == "=mlx5_1"
    assert told(plan)["UCX_NET_DEVICES"] == "mlx5_1:1"
    assert told(plan, 1)["NCCL_IB_HCA"] == "=mlx5_10"
    assert parse_plan(format_plan(plan), "plan.json") == plan


def test_ports_of_one_function() -> None:
    """A device with two ports (mlx4) is named once to NCCL, and by port to UCX."""
    machine = host(
        [card("0000:20:00.0")],
        [nic("0000:30:00.0", "mlx4_0", ports=2), nic("0000:31:00.0", "mlx5_0")],
    )
    plan = plan_for(machine, nic_environment=True)
    assert told(plan)["NCCL_IB_HCA"] == "=mlx4_0,mlx5_0"
    assert told(plan)["UCX_NET_DEVICES"] == "mlx4_0:1,mlx4_0:2,mlx5_0:1"


def test_ports_that_nobody_says() -> None:
    """Where a recording has no ports UCX is told nothing, and a note says why."""
    machine = host([card("0000:20:00.0")], [nic("0000:30:00.0", "mlx5_0", ports=0)])
    plan = plan_for(machine, nic_environment=True)
    assert told(plan)["NCCL_IB_HCA"] == "=mlx5_0"
    assert "UCX_NET_DEVICES" not in told(plan)
    assert "ports_unknown" in note_codes(plan)
    assert "ports_unknown" not in note_codes(plan_for(machine))


def test_rank_without_a_device_is_told_nothing() -> None:
    """An empty list would keep NCCL off every device; a rank that is near to none has no line."""
    machine = host([card("0000:20:00.0", 1)], [nic("0001:30:00.0", "mlx5_0")])
    plan = plan_for(machine, nic_environment=True)
    assert {"NCCL_IB_HCA", "UCX_NET_DEVICES"}.isdisjoint(told(plan))
    assert told(plan)["PROVISION_NICS"] == ""


def test_operators_word_wins() -> None:
    """Variables of the worker stand behind the rendered ones."""
    from provisioner.request import WorkerRequest

    worker = WorkerRequest(("/bin/engine",), environment={"NCCL_IB_HCA": "mlx5_7"})
    plan = plan_for(on_switch(1, [["mlx5_0"]]), nic_environment=True, worker=worker)
    assert told(plan)["NCCL_IB_HCA"] == "mlx5_7"


# What captures lack -------------------------------------------------------------------------------


def test_interface_whose_link_is_missing() -> None:
    """Where /sys/class/net/NAME/device was not copied, the function's own folder still names the interface."""
    ethernet = nic("0000:02:00.0", net=("enp2s0",))
    tree = make_tree(NODES, card_facts=(card("0000:50:00.0"),), nics=(ethernet,))
    lacking = "sys/devices/pci0000:02/0000:02:00.0/net/enp2s0"
    links = {path: to for path, to in tree.links.items() if path != f"{lacking}/device"}
    assert len(links) == len(tree.links) - 1
    files = {**tree.files, f"{lacking}/operstate": "up\n"}
    machine = discover(MemoryRoot("lacking", files, links))
    assert [one.net_names for one in machine.nics] == [("enp2s0",)]


def test_device_that_is_a_bridge_too() -> None:
    """A network device with a card below it keeps its own ids and local CPUs."""
    above = parse_pci_address("0000:02:00.0")
    both = nic("0000:02:00.0", "mlx5_0")
    machine = host([card("0000:02:00.0/50:00.0")], [both])
    function = machine.pci[above]
    assert (function.vendor, function.device) == (both.vendor, both.device)
    assert function.local_cpus == machine.node(0).cpus


def test_virtio_names() -> None:
    """A virtio interface hangs below its function, and is that function's."""
    nic = "sys/devices/pci0000:00/0000:00:03.0"
    tree = add_files(
        make_tree({0: "0-3"}, [0]),
        {
            f"{nic}/class": "0x020000\n",
            f"{nic}/vendor": "0x1af4\n",
            f"{nic}/numa_node": "-1\n",
            f"{nic}/virtio2/net/eth0/mtu": "1500\n",
        },
        links={
            "sys/bus/pci/devices/0000:00:03.0": "../../../devices/pci0000:00/0000:00:03.0",
            "sys/class/net/eth0": "../../devices/pci0000:00/0000:00:03.0/virtio2/net/eth0",
            f"{nic}/virtio2/net/eth0/device": "../../../virtio2",
        },
    )
    (found,) = discover(tree).nics
    assert (str(found.address), found.net_names) == ("0000:00:03.0", ("eth0",))
