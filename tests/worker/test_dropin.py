"""The single pieces on made machines, and on the running kernel in child processes."""

from __future__ import annotations

import errno

import pytest

from provisioner.errors import InputError, ProblemsError
from provisioner.facts.values import NicFacts
from provisioner.idset import CpuSet
from provisioner.pci import PciAddress, parse_pci_address
from provisioner.root import MemoryRoot
from provisioner.worker import (
    device_numa_node,
    get_idle_cpus,
    physical_core_cpus_by_numa,
    set_cpu_affinity,
    which_numa,
)
from provisioner.worker.dropin import share_of_card
from tests.hosts import make_tree
from tests.worker.children import needs_numbers, run_child
from tests.worker.test_binding import environment

NODES = {0: "0-15,32-47", 1: "16-31,48-63"}
DROPIN = """
from provisioner.worker import *
from provisioner.worker.mempolicy import get_policy
def masks():
    return sorted({read_status(tid)["Cpus_allowed_list"] for tid in os.listdir("/proc/self/task")})
"""


def nic(address: str, node: int | None, *names: str, net: tuple[str, ...] = ()) -> NicFacts:
    """A network device behind a bridge of its own."""
    found = parse_pci_address(address)
    bridge = PciAddress(found.domain, found.bus - 1, 1, 0)
    return NicFacts(path=(bridge, found), numa_node=node, rdma=names, net=net)


def with_soft_rdma(root: MemoryRoot, name: str, interface: str) -> MemoryRoot:
    """The tree with a soft RDMA device on a network interface."""
    path = f"sys/class/infiniband/{name}/parent"
    return MemoryRoot(root.name, {**root.files, path: f"{interface}\n"}, root.links)


RDMA = with_soft_rdma(
    make_tree(
        NODES,
        [0, 1],
        stride=32,
        nics=(
            nic("0000:40:00.0", 0, "mlx5_0"),
            nic("0000:42:00.0", 1, "mlx5_bond_1"),
            nic("0000:44:00.0", 1, "bnxt_re2"),
            nic("0000:46:00.0", 0, "irdma3"),
            nic("0000:48:00.0", 1, "hns_3"),
            nic("0000:4a:00.0", None, "efa_4"),
            nic("0000:4c:00.0", 1, "bnxt_re0", net=("eth7",)),
        ),
    ),
    "rxe5",
    "eth7",
)


@pytest.mark.parametrize(
    "device, node",
    [
        ("mlx5_0", 0),
        (0, 0),  # mlx5_0, though bnxt_re0 ends so too
        ("0", 0),
        ("mlx5_bond_1", 1),
        (1, 1),
        (2, 1),
        ("irdma3", 0),
        ("hns_3", 1),
        ("rxe5", 1),
        (5, 1),
    ],
)
def test_rdma_devices_of_every_name(device: int | str, node: int) -> None:
    """An RDMA device is found by its name or number whoever makes it, a soft one by its interface."""
    assert which_numa(i_ib=device, root=RDMA) == node


@pytest.mark.parametrize(
    "device, words",
    [(3, "irdma3, hns_3|hns_3, irdma3"), (9, "there is none"), ("mlx5_9", "there is none")],
)
def test_rdma_device_that_is_not_one_is_named(device: int | str, words: str) -> None:
    """A number that several devices have, and a device that is not there, are errors with the devices' names."""
    with pytest.raises(InputError, match=words):
        which_numa(i_ib=device, root=RDMA)


def test_rdma_device_without_a_node_is_refused() -> None:
    """An RDMA device that nothing says the node of is an error on a machine of several."""
    with pytest.raises(InputError, match="efa_4: it has no NUMA node"):
        which_numa(i_ib=4, root=RDMA)


def test_one_of_two_devices_is_asked_for() -> None:
    """which_numa() is asked for a card or for an RDMA device, not for both or neither."""
    for asked in ({}, {"i_gpu": 0, "i_ib": 0}):
        with pytest.raises(InputError, match="either i_gpu or i_ib"):
            which_numa(root=RDMA, **asked)  # type: ignore[arg-type]


def test_card_without_a_node_is_refused() -> None:
    """numa_node -1 on two nodes is an error that names the card; it never becomes node 0 or -1."""
    tree = make_tree(NODES, [None, 1], stride=32)
    with pytest.raises(ProblemsError, match="numa_node is -1"):
        device_numa_node(0, root=tree)
    assert device_numa_node(1, root=tree) == 1
    with pytest.raises(InputError, match="card 2: there is none"):
        device_numa_node(2, root=tree)


@pytest.mark.parametrize("text", ["-1", "GPU-1234", "", "one"])
def test_text_that_is_no_card_number_is_named(text: str) -> None:
    """What is no physical number is an error of this project's, and not int()'s."""
    with pytest.raises(InputError, match="is no physical card's number"):
        device_numa_node(text, root=RDMA)


def test_idle_cpus_are_whole_cores_at_the_shares_end() -> None:
    """Four CPUs are two cores of two siblings; their number is an argument, a variable, or 4."""
    tree = make_tree(NODES, [0, 0, 1, 1], stride=32)
    share = share_of_card(1, root=tree)
    assert str(share) == "8-15,40-47"
    assert str(get_idle_cpus(1, root=tree, environ={})) == "14-15,46-47"
    assert str(get_idle_cpus(1, 3, root=tree, environ={})) == "14-15,46-47"
    assert (
        str(get_idle_cpus(1, root=tree, environ={"DEEPINFER_SO_BUILDER_CPUS": "6"}))
        == "13-15,45-47"
    )


@pytest.mark.parametrize("text", ["x", "0", "-4", "4.0"])
def test_idle_cpus_of_no_number_are_named(text: str) -> None:
    """A DEEPINFER_SO_BUILDER_CPUS that is no number of CPUs is an error with its value."""
    with pytest.raises(InputError, match=f"DEEPINFER_SO_BUILDER_CPUS is '{text}'"):
        get_idle_cpus(0, root=RDMA, environ={"DEEPINFER_SO_BUILDER_CPUS": text})


def test_core_cpus_by_node() -> None:
    """Each core is one CPU, the lowest of its siblings."""
    assert physical_core_cpus_by_numa(root=RDMA) == {0: [*range(16)], 1: [*range(16, 32)]}


# On the running kernel --------------------------------------------------------------------------------


def test_numa_node_is_bound(memory_node: int) -> None:
    """bind_numa() binds every thread's CPUs and the caller's memory, and says whose policy stays."""
    found = run_child(
        DROPIN,
        f"""
        import threading
        stop = threading.Event()
        threading.Thread(target=stop.wait).start()
        result = bind_numa({memory_node}, migrate=True)
        answer([masks(), str(result.affinity.cpus), get_policy().mode, str(get_policy().nodes),
                len(result.without_policy), result.unmoved_pages, str(result.migration_refused)])
        stop.set()
        """,
    )
    masks, cpus, mode, nodes, without, unmoved, refusal = found
    assert masks == [cpus]
    assert (mode, nodes, without) == ("bind", str(memory_node), 1)
    assert unmoved == 0 or refusal != "None"


@pytest.mark.parametrize("node", [-1, 900])
def test_node_that_is_none_is_named(node: int) -> None:
    """bind_numa(-1) and a node that is not there are errors before anything is bound."""
    found = run_child(
        DROPIN,
        f"""
        from provisioner.errors import InputError
        before = masks()
        try:
            bind_numa({node})
        except InputError as error:
            answer([str(error), masks() == before, get_policy().mode])
        """,
    )
    message, unchanged, mode = found
    assert f"NUMA node {node}: there is none" in message
    assert (unchanged, mode) == (True, "default")


@needs_numbers
def test_refused_memory_is_in_the_result(memory_node: int) -> None:
    """sglang#27368: under a filter bind_numa() keeps the CPUs and reports the errno; the process lives."""
    found = run_child(
        DROPIN,
        f"""
        filter_calls(fail_with(), "set_mempolicy")
        result = bind_numa({memory_node})
        answer([result.memory.step, [one.errno for one in result.memory.refused], str(result.affinity.cpus), masks()])
        """,
    )
    step, codes, cpus, masks = found
    assert (step, codes) == ("none", [errno.EPERM] * 3)
    assert masks == [cpus]


def test_affinity_stays_within_what_was_bound(two_cpus: tuple[int, int]) -> None:
    """set_cpu_affinity() narrows what was bound before and does not leave it; nothing left is EINVAL."""
    first, second = two_cpus
    found = run_child(
        DROPIN,
        f"""
        bound = str(bind_local_rank().cpus)
        narrowed = str(set_cpu_affinity("{first}-{second}").cpus)
        try:
            set_cpu_affinity([{first}])
        except OSError as error:
            answer([bound, narrowed, error.errno, masks()])
        """,
        environ=environment(second),
    )
    assert found == [str(second), str(second), errno.EINVAL, [str(second)]]


def test_affinity_without_a_bind_is_the_cpusets() -> None:
    """CPUs that are not there fall away; none at all is an OSError with the kernel's errno."""
    with pytest.raises(OSError, match="CPUs 4000") as caught:
        set_cpu_affinity([4000])
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(InputError, match="no CPU list"):
        set_cpu_affinity("all")
    with pytest.raises(OSError, match="CPUs 1"):
        set_cpu_affinity([1], within=CpuSet((0,)))
