"""The rows of ENGINE.md, each by a test that names it; beside a faulty row's old answer stands the right one.

The old formulas are written here as that file describes them.
"""

from __future__ import annotations

import ast
import errno
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from provisioner.discovery import discover
from provisioner.errors import InputError, ProblemsError
from provisioner.facts.values import BridgeFacts, CardFacts, CgroupFacts, NicFacts
from provisioner.idset import CpuSet
from provisioner.pci import PciAddress, parse_pci_address
from provisioner.root import MemoryRoot
from provisioner.topology import Accelerator, Machine
from provisioner.worker import (
    accelerator_kind,
    assign_visible_devices,
    device_numa_node,
    find_target,
    get_idle_cpus,
    parse_npu_affinity,
    physical_core_cpus_by_numa,
    physical_device_id,
    visible_device_ids,
    which_numa,
)
from provisioner.worker.dropin import share_of_card
from provisioner.worker.npusmi import match_npu_nodes
from provisioner.worker.nvml import bf16_tflops
from provisioner.worker.visible import RankError, UnknownDeviceError
from tests.hosts import make_tree
from tests.machines import FOLDER
from tests.worker.children import run_child
from tests.worker.test_binding import environment
from tests.worker.test_npusmi import TEXT
from tests.worker.trees import without

NODES = {0: "0-15,32-47", 1: "16-31,48-63"}
FOUR_AND_FOUR = make_tree(NODES, [0, 0, 0, 0, 1, 1, 1, 1], stride=32)
FIVE_AND_THREE = make_tree(NODES, [0, 0, 0, 0, 0, 1, 1, 1], stride=32)
EVEN = ",".join(str(cpu) for cpu in range(0, 64, 2))
ODD = ",".join(str(cpu) for cpu in range(1, 64, 2))
INTERLEAVED = make_tree({0: EVEN, 1: ODD}, [0, 0, 1, 1], stride=32)
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

# Rows that are discovery's alone, and tested with it.
ELSEWHERE = {"Ascend cards", "Ascend node"}


# The old formulas ----------------------------------------------------------------------------------


def old_cards(root: MemoryRoot) -> list[str]:
    """NVIDIA cards: the driver's folders by name, else /dev/nvidia0 and so on."""
    folders = root.list("proc/driver/nvidia/gpus")
    return folders or [name for name in root.list("dev") if re.fullmatch(r"nvidia\d+", name)]


def old_node(root: MemoryRoot, address: str) -> int:
    """NUMA node of a card: its numa_node file, and nothing else."""
    return int(root.read(f"sys/bus/pci/devices/{address}/numa_node") or "")


def old_visible(environ: Mapping[str, str], count: int) -> list[str]:
    """Unset, all cards; empty or -1, none; else split at commas."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [str(number) for number in range(count)]
    return [] if value in ("", "-1") else value.split(",")


def old_physical_id(local_rank: int, environ: Mapping[str, str]) -> str:
    """The entry at that position, as text."""
    return environ["CUDA_VISIBLE_DEVICES"].split(",")[local_rank]


def old_assign(rank: int, count: int, devices_per_rank: int, offset: int) -> list[int]:
    """Consecutive cards from offset + group * devices_per_rank on."""
    start = offset + rank % (count // devices_per_rank) * devices_per_rank
    return list(range(start, start + devices_per_rank))


def old_bind_cpu(machine: Machine, gpu_id: int) -> CpuSet:
    """Physical cores // cards in the machine, cut from CPU 0 on by the card's number."""
    each = len(machine.cores) // len(machine.accelerators)
    return CpuSet(range(gpu_id * each, (gpu_id + 1) * each))


def share(root: MemoryRoot, gpu_id: int) -> CpuSet:
    """A physical card's share here."""
    return share_of_card(gpu_id, root=root)


# Device discovery ----------------------------------------------------------------------------------


def test_accelerator_kind() -> None:
    """ENGINE.md, accelerator_kind(): the kind is each root's own, however the roots are asked in turn."""
    with_cards, without_cards = make_tree({0: "0-3"}, [0]), make_tree({0: "0-3"})
    asked = [with_cards, without_cards, with_cards, without_cards]
    assert [accelerator_kind(root) for root in asked] == ["nvidia", "cpu", "nvidia", "cpu"]
    # One cache for all of them would have said the first one's answer ever after.
    once: dict[str, str] = {}
    assert [once.setdefault("kind", accelerator_kind(root)) for root in asked] == ["nvidia"] * 4


def test_nvidia_cards() -> None:
    """ENGINE.md, NVIDIA cards: before the driver is loaded the PCI bus knows the cards, in PCI order."""
    bare = without(FOUR_AND_FOUR, "proc/driver/nvidia", "dev/nvidia")
    assert old_cards(bare) == []
    assert len(visible_device_ids({}, cards=discover(bare).accelerators)) == 8
    # 0001:... sorts before 10000:... in PCI order, and behind it as text.
    far = make_tree({0: "0-7", 1: "8-15"}, [("10000:01:00.0", 1), ("2000:01:00.0", 0)])
    cards = [card.name for card in discover(far).accelerators]
    assert old_cards(far) == ["10000:01:00.0", "2000:01:00.0"]
    assert cards == ["2000:01:00.0", "10000:01:00.0"]


def test_order_of_unlike_cards_is_not_guessed() -> None:
    """ENGINE.md, NVIDIA cards: among unlike cards CUDA's default order is fastest first, so numbers mean nothing."""
    cards = tuple(
        Accelerator("nvidia", index, PciAddress(0, 16 + index, 0, 0), "driver", model=model)
        for index, model in enumerate(("NVIDIA T4", "NVIDIA H100"))
    )
    with pytest.raises(UnknownDeviceError, match="CUDA_DEVICE_ORDER is not PCI_BUS_ID"):
        physical_device_id(0, {"CUDA_VISIBLE_DEVICES": "0"}, cards=cards)
    assert physical_device_id(0, {"CUDA_VISIBLE_DEVICES": "0", **ORDER}, cards=cards) == "0"


def test_numa_node_of_a_card() -> None:
    """ENGINE.md, NUMA node of a card: -1 is settled by the bridge above, or refused; it is never a node."""
    bridge, address = parse_pci_address("0000:80:01.0"), parse_pci_address("0000:81:00.0")
    tree = make_tree(
        {0: "0-7", 1: "8-15"},
        card_facts=(CardFacts(path=(bridge, address), device=1),),
        bridges=(BridgeFacts(address=bridge, numa_node=1),),
    )
    assert old_node(tree, "0000:81:00.0") == -1
    assert device_numa_node(0, root=tree) == 1
    with pytest.raises(ProblemsError, match="numa_node is -1, no bridge above it knows one"):
        device_numa_node(0, root=make_tree({0: "0-7", 1: "8-15"}, [None]))


def test_compute_capability() -> None:
    """ENGINE.md, compute capability: NVML by ctypes; without NVML it is None, and then not SM 10."""
    found = run_child(
        """
        from provisioner.worker import compute_capability, is_sm_major_10
        found = [compute_capability(), is_sm_major_10()]
        answer([*found, "torch" in sys.modules, "ctypes" in sys.modules])
        """,
        environ={"LD_LIBRARY_PATH": ""},
    )
    capability, is_ten, has_torch, has_ctypes = found
    if capability is None:
        assert not is_ten
    assert (has_torch, has_ctypes) == (False, True)


def test_bf16_limit() -> None:
    """ENGINE.md, get_bf16_tflops_limit(): Ascend, SM 10 by the host, a table beyond; the error names the device."""
    assert bf16_tflops("ascend", None, None, "aarch64") == 432
    assert bf16_tflops("nvidia", "NVIDIA GB200", (10, 0), "aarch64") == 2500
    assert bf16_tflops("nvidia", "NVIDIA B200", (10, 0), "x86_64") == 2250
    # Where the old one had an error for every other device:
    assert bf16_tflops("nvidia", "NVIDIA H200", (9, 0), "x86_64") == 989
    with pytest.raises(InputError, match=r"'NVIDIA GeForce GTX 1080' of compute capability 6\.1"):
        bf16_tflops("nvidia", "NVIDIA GeForce GTX 1080", (6, 1), "x86_64")


def test_ascend_topology() -> None:
    """ENGINE.md, Ascend topology: npu-smi's CPU affinity column is matched against the cores by node."""
    tree = make_tree({0: "0-23,48-71", 1: "24-47,72-95"}, stride=48)
    nodes = match_npu_nodes(parse_npu_affinity(TEXT), physical_core_cpus_by_numa(root=tree))
    assert [str(nodes[npu]) for npu in range(3)] == ["0", "0", "1"]


def test_physical_core_cpus() -> None:
    """ENGINE.md, physical_core_cpus_by_numa(): the lowest CPU of each core, by node, whatever the numbering."""
    assert physical_core_cpus_by_numa(root=FIVE_AND_THREE) == {0: [*range(16)], 1: [*range(16, 32)]}
    assert physical_core_cpus_by_numa(root=INTERLEAVED) == {
        0: [*range(0, 32, 2)],
        1: [*range(1, 32, 2)],
    }


# From rank to physical card ----------------------------------------------------------------------------


def cards_of(root: MemoryRoot) -> tuple[Accelerator, ...]:
    """The machine's cards, with UUIDs that begin apart."""
    return tuple(
        Accelerator(
            card.vendor, card.index, card.address, "driver", "H100", f"GPU-{card.index}abc-1"
        )
        for card in discover(root).accelerators
    )


CARDS = cards_of(FOUR_AND_FOUR)


@pytest.mark.parametrize(
    "value, old, right",
    [
        (None, "0,1,2,3,4,5,6,7", "0,1,2,3,4,5,6,7"),
        ("", "", ""),
        ("-1", "", ""),
        ("4,5", "4,5", "4,5"),
        ("3,9,1", "3,9,1", "3"),
        ("3,-1,1", "3,-1,1", "3"),
        ("2,2", "2,2", ""),
    ],
)
def test_visible_device_ids(value: str | None, old: str, right: str) -> None:
    """ENGINE.md, visible_device_ids(): CUDA stops at the first bad entry, and a repeated one hides all."""
    environ = dict(ORDER) if value is None else {"CUDA_VISIBLE_DEVICES": value, **ORDER}
    assert ",".join(old_visible(environ, len(CARDS))) == old
    assert ",".join(visible_device_ids(environ, cards=CARDS)) == right


def test_physical_device_id() -> None:
    """ENGINE.md, physical_device_id(local_rank): with 4,5 visible rank 0 is card 4; a UUID is its card too."""
    environ = {"CUDA_VISIBLE_DEVICES": "4,5", **ORDER}
    assert physical_device_id(0, environ, cards=CARDS) == old_physical_id(0, environ) == "4"
    by_uuid = {"CUDA_VISIBLE_DEVICES": "GPU-6abc,GPU-1abc-1"}
    assert old_physical_id(0, by_uuid) == "GPU-6abc"
    assert [physical_device_id(rank, by_uuid, cards=CARDS) for rank in (0, 1)] == ["6", "1"]
    with pytest.raises(IndexError) as caught:
        physical_device_id(2, environ, cards=CARDS)
    assert isinstance(caught.value, RankError)


def test_reports_4_permuted_devices() -> None:
    """REPORTS.md case 4, sglang#24766: with 3,6,5,4,0,7,1,2 each rank has its entry's card and cores."""
    listed = "3,6,5,4,0,7,1,2"
    environ = {"CUDA_VISIBLE_DEVICES": listed, **ORDER}
    for rank, number in enumerate(map(int, listed.split(","))):
        target = find_target(rank, environ=environ, root=FOUR_AND_FOUR, plan_paths=())
        assert target.devices == (CARDS[number].name,)
        assert target.cpus == share(FOUR_AND_FOUR, number)


MIG = "MIG-11111111-2222-3333-4444-555555555555"


@pytest.mark.parametrize(
    "entry, number",
    [
        ("3", "3"),
        ("GPU-3abc-1", "3"),
        ("GPU-3abc", "3"),
        ("gpu-3ABC", "3"),
        ("MIG-GPU-3abc-1/1/0", "3"),
        ("3:0", "3"),
    ],
)
def test_reports_38_every_form_of_a_device(entry: str, number: str) -> None:
    """REPORTS.md case 38, vllm#6582, #41850, TensorRT-LLM#12985: each form is its parent card, or a named error."""
    environ = {"CUDA_VISIBLE_DEVICES": entry, **ORDER}
    assert physical_device_id(0, environ, cards=CARDS) == number
    if not entry.isdigit():
        with pytest.raises(ValueError, match="invalid literal"):
            int(old_physical_id(0, environ))
    with pytest.raises(UnknownDeviceError, match="does not say which of 8 cards"):
        physical_device_id(0, {"CUDA_VISIBLE_DEVICES": MIG}, cards=CARDS)


def test_assign_visible_devices() -> None:
    """ENGINE.md, assign_visible_devices(rank, devices_per_rank, offset): past the last card is an error."""
    ids = [str(number) for number in range(8)]
    assert assign_visible_devices(1, 2, 2, ids=ids) == ("4", "5")
    assert assign_visible_devices(5, 2, 0, ids=ids) == ("2", "3")
    assert old_assign(3, 8, 2, 2) == [8, 9]
    with pytest.raises(InputError, match="leads past the last one"):
        assign_visible_devices(3, 2, 2, ids=ids)
    with pytest.raises(InputError, match="8 devices can't be divided among ranks of 3"):
        assign_visible_devices(0, 3, 0, ids=ids)


def test_which_numa_of_a_card() -> None:
    """ENGINE.md, which_numa(i_gpu): the rank is translated first; a UUID has a node, and '-1' is an error."""
    environ = {"CUDA_VISIBLE_DEVICES": "4,5", **ORDER}
    assert which_numa(0, root=FOUR_AND_FOUR, environ=environ) == 1
    # Where the rank is taken for the card, it is card 0's:
    assert device_numa_node(0, root=FOUR_AND_FOUR) == 0
    uuid = discover(FOUR_AND_FOUR).accelerators[6].uuid
    assert uuid is not None
    by_uuid = {"CUDA_VISIBLE_DEVICES": uuid}
    with pytest.raises(ValueError, match="invalid literal"):
        int(old_physical_id(0, by_uuid))
    assert which_numa(0, root=FOUR_AND_FOUR, environ=by_uuid) == 1
    with pytest.raises(InputError, match="ends the list"):
        which_numa(0, root=FOUR_AND_FOUR, environ={"CUDA_VISIBLE_DEVICES": "-1"})


def test_which_numa_of_an_rdma_device() -> None:
    """ENGINE.md, which_numa(i_ib=N): the device need not be called mlx5_N."""
    nic = NicFacts(path=(parse_pci_address("0000:40:00.0"),), numa_node=1, rdma=("bnxt_re3",))
    tree = make_tree({0: "0-7", 1: "8-15"}, nics=(nic,))
    assert tree.read("sys/class/infiniband/mlx5_3/device/numa_node") is None
    assert which_numa(i_ib=3, root=tree) == which_numa(i_ib="bnxt_re3", root=tree) == 1


# Binding -----------------------------------------------------------------------------------------------


def test_bind_numa(two_cpus: tuple[int, int], memory_node: int) -> None:
    """ENGINE.md, bind_numa(node): all threads and not the caller alone, node -1 is an error and not printed."""
    found = run_child(
        """
        import threading
        from provisioner.errors import InputError
        from provisioner.worker import bind_numa
        stop = threading.Event()
        threading.Thread(target=stop.wait).start()
        def masks():
            return {read_status(tid)["Cpus_allowed_list"] for tid in os.listdir("/proc/self/task")}
        """,
        f"""
        for tid in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(tid), ({two_cpus[0]},))
        os.sched_setaffinity(os.getpid(), ({two_cpus[0]}, {two_cpus[1]}))
        old = len(masks())
        result = bind_numa({memory_node})
        try:
            bind_numa(-1)
        except InputError as error:
            words = str(error)
        answer([old, len(masks()), len(result.affinity.bound), words])
        stop.set()
        """,
    )
    assert found == [2, 1, 2, "NUMA node -1: there is none"]


def test_set_cpu_affinity(two_cpus: tuple[int, int]) -> None:
    """ENGINE.md, set_cpu_affinity(cpus): it intersects with what was bound, where the old one overrode it."""
    first, second = two_cpus
    found = run_child(
        f"""
        from provisioner.worker import bind_local_rank, set_cpu_affinity
        bind_local_rank()
        new = sorted(set_cpu_affinity([{first}, {second}]).cpus)
        os.sched_setaffinity(0, [{first}, {second}])
        answer([new, sorted(os.sched_getaffinity(0))])
        """,
        environ=environment(second),
    )
    assert found == [[second], [first, second]]


def test_order_in_a_worker(two_cpus: tuple[int, int], memory_node: int) -> None:
    """ENGINE.md, order in a worker: environment, bind, then the runtime; what starts later has both masks."""
    found = run_child(
        """
        import threading
        from provisioner.worker import bind_local_rank, configure_worker_environment
        from provisioner.worker.mempolicy import get_policy
        done = configure_worker_environment(kind="nvidia")
        result = bind_local_rank(required=True)
        late = []
        def look():
            late.append(read_status(threading.get_native_id())["Cpus_allowed_list"])
        thread = threading.Thread(target=look)
        thread.start(); thread.join()
        answer([done["CUDA_DEVICE_ORDER"], result.runtimes, late])
        """,
        environ=environment(two_cpus[1], memory_node),
    )
    assert found == ["PCI_BUS_ID", [], [str(two_cpus[1])]]


def test_failed_bind() -> None:
    """ENGINE.md, a failed bind: the worker goes on, the result says so, and required=True makes it an error."""
    found = run_child(
        """
        from provisioner.worker import BindError, bind_local_rank
        result = bind_local_rank()
        try:
            bind_local_rank(required=True)
        except BindError as error:
            answer([result.is_full, [one.code for one in result.problems], error.result == result])
        """,
        environ={"LOCAL_RANK": "99999999", "CUDA_VISIBLE_DEVICES": ""},
    )
    is_full, codes, same = found
    assert (is_full, same) == (False, True)
    assert codes in (["no_device_for_rank"], ["no_accelerator"])


def test_gpu_id() -> None:
    """ENGINE.md, gpu_id: TP=4 and DP=2 on 8 cards; by local rank both copies' rank 0 get the same cores."""
    copies = [{"CUDA_VISIBLE_DEVICES": cards, **ORDER} for cards in ("0,1,2,3", "4,5,6,7")]
    machine = discover(FOUR_AND_FOUR)
    assert old_bind_cpu(machine, 0) == old_bind_cpu(
        machine, 0 % 4
    )  # by local rank: one set for both
    numbers = [physical_device_id(0, one, cards=CARDS) for one in copies]
    assert numbers == ["0", "4"]
    sets = [share(FOUR_AND_FOUR, int(number)) for number in numbers]
    assert sets[0].isdisjoint(sets[1])
    assert [str(cpus) for cpus in sets] == ["0-3,32-35", "16-19,48-51"]


def test_bind_cpu_on_five_and_three() -> None:
    """ENGINE.md, bind_cpu(gpu_id): on 5 + 3 cards the old cut puts card 4 on the other node."""
    machine = discover(FIVE_AND_THREE)
    assert str(old_bind_cpu(machine, 4)) == "16-19"
    assert device_numa_node(4, root=FIVE_AND_THREE) == 0
    right = share(FIVE_AND_THREE, 4)
    assert str(right) == "12-14,44-46"
    assert right <= machine.node(0).cpus
    # And it leaves every second CPU of a core idle.
    assert not any(core.cpus <= old_bind_cpu(machine, 4) for core in machine.cores)


def test_bind_cpu_on_interleaved_ids() -> None:
    """ENGINE.md, bind_cpu(gpu_id): with even ids on node 0 and odd on 1 the old cut is half on either."""
    machine = discover(INTERLEAVED)
    old = old_bind_cpu(machine, 0)
    assert [len(old & machine.node(node).cpus) for node in (0, 1)] == [4, 4]
    right = share(INTERLEAVED, 0)
    assert right <= machine.node(0).cpus
    assert len(right) == 16


def test_bind_cpu_in_a_renumbered_cpuset() -> None:
    """ENGINE.md, bind_cpu(gpu_id): in a container's cpuset the old cut names CPUs that are not in it."""
    inside = CpuSet.parse_list("8-15,24-31,40-47,56-63")
    tree = make_tree(
        NODES,
        [0, 0, 0, 0, 1, 1, 1, 1],
        stride=32,
        cgroups=(CgroupFacts(path="/docker", cpus=inside),),
        own_cgroup="/docker",
    )
    assert old_bind_cpu(discover(tree), 0).isdisjoint(inside)
    assert str(share(tree, 0)) == "8-9,40-41"
    assert all(share(tree, number) <= inside for number in range(8))


def test_old_cut_is_refused_by_the_kernel(two_cpus: tuple[int, int]) -> None:
    """ENGINE.md, bind_cpu(gpu_id): nothing checks the old cut; what it names may not be there at all (EINVAL)."""
    found = run_child(
        """
        from provisioner.worker import set_cpu_affinity
        try:
            set_cpu_affinity(range(4000, 4008))
        except OSError as error:
            answer([error.errno, "4000-4007" in str(error)])
        """
    )
    assert found == [errno.EINVAL, True]


def test_multi_modal_processor(two_cpus: tuple[int, int], memory_node: int) -> None:
    """ENGINE.md, multi-modal processor: bound to rank 0's card before it starts, by inheritance."""
    found = run_child(
        """
        import subprocess
        from provisioner.worker import bind_local_rank
        bind_local_rank(0)
        code = "import os; print(sorted(os.sched_getaffinity(0)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        answer(json.loads(done.stdout))
        """,
        environ=environment(two_cpus[1], memory_node),
    )
    assert found == [two_cpus[1]]


# Background compilation ----------------------------------------------------------------------------------


def test_get_idle_cpus() -> None:
    """ENGINE.md, get_idle_cpus(gpu): the old ones are where the main threads run; these are apart."""
    cpus = share(FOUR_AND_FOUR, 0)
    old = CpuSet(sorted(cpus)[:4])
    idle = get_idle_cpus(0, root=FOUR_AND_FOUR, environ={})
    assert str(old) == "0-3"
    assert str(idle) == "2-3,34-35"
    # The old four are half of every core of the share: no main thread has a core to itself.
    machine = discover(FOUR_AND_FOUR)
    assert all(not core.cpus.isdisjoint(old) for core in machine.cores_of(cpus))
    assert all(core.cpus <= idle or core.cpus.isdisjoint(idle) for core in machine.cores_of(cpus))
    with pytest.raises(InputError, match="the share has 8 CPUs on 4 cores"):
        get_idle_cpus(0, 8, root=FOUR_AND_FOUR, environ={})


def test_grammar_builder(two_cpus: tuple[int, int]) -> None:
    """ENGINE.md, grammar builder: the pool's threads are pinned, where psutil's way pins the main thread."""
    found = run_child(
        """
        from provisioner.worker import bind_local_rank, compile_pool
        def mask():
            return sorted(os.sched_getaffinity(0))
        bind_local_rank()
        pool = compile_pool()
        here = [pool.submit(mask).result(), mask()]
        # What psutil's Process().cpu_affinity(...) does in an initializer:
        pool.submit(os.sched_setaffinity, os.getpid(), pool.cpus).result()
        answer([*here, mask()])
        """,
        environ=environment(
            f"{two_cpus[0]},{two_cpus[1]}", PROVISION_COMPILE_CPUS=str(two_cpus[1])
        ),
    )
    assert found == [[two_cpus[1]], [two_cpus[0]], [two_cpus[1]]]


# The file itself -------------------------------------------------------------------------------------------


def test_every_row_is_named() -> None:
    """Each row of ENGINE.md is named by a test here."""
    path = FOLDER.parent / "ENGINE.md"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    cells = [line.split("|")[1] for line in path.read_text().splitlines() if line.startswith("| ")]
    rows = {cell.replace("`", "").strip() for cell in cells} - {"what"}
    tests = ast.parse(Path(__file__).read_text()).body
    words = [ast.get_docstring(one) or "" for one in tests if isinstance(one, ast.FunctionDef)]
    named = {text.partition(": ")[0].removeprefix("ENGINE.md, ") for text in words}
    assert rows - named == ELSEWHERE
