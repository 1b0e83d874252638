"""The NUMA nodes: their CPUs, memory, distances and what kind of memory each has."""

from __future__ import annotations

from typing import NamedTuple

from provisioner.errors import TopologyError
from provisioner.idset import CpuSet, NodeSet
from provisioner.root import Root
from provisioner.sysfs import (
    describe_node,
    describe_nodes,
    list_nodes,
    read_is_knights_landing,
    read_machine_memory,
    read_node_bandwidth,
    read_node_cpus,
    read_node_distances,
    read_node_memory,
    read_nodes_with_memory,
)
from provisioner.topology import MemoryKind, NumaNode

# High-bandwidth memory has at least this many times the bandwidth of the machine's slowest memory
# that CPUs own: on machines with both it is 3 to 10 times, while DRAM's own spread is below 1.5.
_HBM_RATIO = 2


class NodeTable(NamedTuple):
    """The nodes of a root."""

    nodes: tuple[NumaNode, ...]
    has_directories: bool
    sources: tuple[tuple[str, str], ...]


def find_nodes(root: Root, online: CpuSet, card_memory: NodeSet, oddities: list[str]) -> NodeTable:
    """Every online NUMA node; node 0 for the whole machine where the kernel has no NUMA.

    Args:
        root: the machine.
        online: its online CPUs.
        card_memory: the nodes that drivers say are accelerators' own memory.
        oddities: sentences are added here.

    Raises TopologyError if a CPU is on two nodes, or a distance row is of the wrong length.
    """
    ids = list_nodes(root)
    if not ids:
        # A kernel without NUMA has node 0 alone (include/linux/nodemask.h, MAX_NUMNODES is 1), and
        # cpuset.mems is 0 there.
        whole = NumaNode(0, online, read_machine_memory(root), "dram", None)
        oddities.append("The kernel lists no NUMA nodes; the whole machine is taken as node 0.")
        return NodeTable((whole,), False, (("NUMA nodes", "no node folder: one node"),))
    cpus = {node: (read_node_cpus(root, node) or CpuSet()) & online for node in ids}
    _check_disjoint(root, cpus)
    with_memory = read_nodes_with_memory(root)
    memory = _find_memory(root, ids, with_memory)
    _note_contradictions(memory, with_memory, card_memory - ids, oddities)
    kinds = _find_kinds(root, ids, cpus, memory, with_memory, card_memory)
    nodes = tuple(
        NumaNode(node, cpus[node], memory[node], kinds[node], _find_distances(root, node, ids))
        for node in ids
    )
    has_distances = any(node.distances is not None for node in nodes)
    sources = (
        ("NUMA nodes' CPUs", describe_nodes(root, "node*/cpulist")),
        ("NUMA nodes' memory", describe_nodes(root, "node*/meminfo")),
        (
            "distances",
            describe_nodes(root, "node*/distance") if has_distances else "not said",
        ),
        ("nodes that are cards' memory", str(card_memory) or "no driver names one"),
    )
    return NodeTable(nodes, True, sources)


def _check_disjoint(root: Root, cpus: dict[int, CpuSet]) -> None:
    seen: dict[int, int] = {}
    for node, members in cpus.items():
        for cpu in members:
            if cpu in seen:
                raise TopologyError(
                    f"{describe_node(root, node, 'cpulist')}: CPU {cpu} is on node {node} and on node "
                    f"{seen[cpu]}: expected one node for each CPU",
                )
            seen[cpu] = node


def _note_contradictions(
    memory: dict[int, int | None],
    with_memory: NodeSet | None,
    missing: NodeSet,
    oddities: list[str],
) -> None:
    """Adds a sentence for what the files on memory say differently."""
    for node, size in memory.items():
        if with_memory is not None and size is not None and (size > 0) != (node in with_memory):
            oddities.append(
                f"NUMA node {node} has {size} bytes by its meminfo, and {'some' if node in with_memory else 'no'} "
                "memory by the nodes' has_memory; the former is believed."
            )
    if missing:
        oddities.append(
            f"NVIDIA's driver says that NUMA nodes {missing} are its cards' memory, and there are none: "
            "that memory is not online."
        )


def _find_memory(root: Root, ids: NodeSet, with_memory: NodeSet | None) -> dict[int, int | None]:
    """Node -> bytes; 0 for one that has_memory leaves out; the machine's for one node without a file."""
    memory: dict[int, int | None] = {}
    for node in ids:
        size = read_node_memory(root, node)
        if size is None and with_memory is not None and node not in with_memory:
            size = 0
        if size is None and len(ids) == 1:
            size = read_machine_memory(root)
        memory[node] = size
    return memory


def _find_kinds(
    root: Root,
    ids: NodeSet,
    cpus: dict[int, CpuSet],
    memory: dict[int, int | None],
    with_memory: NodeSet | None,
    card_memory: NodeSet,
) -> dict[int, MemoryKind | None]:
    """Node -> kind of memory.

    1. no bytes: none;
    2. a driver names the node as a card's memory: gpu;
    3. bandwidth in the firmware's HMAT far above the slowest memory that CPUs own: hbm;
    4. it has CPUs, or no node with CPUs has memory, so that the kernel itself lives here: dram;
    5. a CPU-less node of a Xeon Phi: hbm; any other CPU-less memory: cxl;
    6. nothing tells whether it has memory: None.
    """
    bandwidth = {node: read_node_bandwidth(root, node) for node in ids} if len(ids) > 1 else {}
    owned = [value for node, value in bandwidth.items() if value and cpus[node]]
    slowest = min(owned, default=None)
    is_owned = any(cpus[node] and memory[node] != 0 for node in ids)
    is_phi = any(not cpus[node] and memory[node] for node in ids) and read_is_knights_landing(root)
    kinds: dict[int, MemoryKind | None] = {}
    for node in ids:
        speed = bandwidth.get(node)
        is_known = memory[node] is not None or with_memory is not None or len(ids) == 1
        kind: MemoryKind | None
        if memory[node] == 0:
            kind = "none"
        elif node in card_memory:
            kind = "gpu"
        elif not is_known:
            kind = None
        elif slowest is not None and speed is not None and speed >= _HBM_RATIO * slowest:
            kind = "hbm"
        elif cpus[node] or not is_owned:
            kind = "dram"
        else:
            kind = "hbm" if is_phi else "cxl"
        kinds[node] = kind
    return kinds


def _find_distances(root: Root, node: int, ids: NodeSet) -> dict[int, int] | None:
    row = read_node_distances(root, node)
    if row is None:
        return None
    if len(row) != len(ids):
        raise TopologyError(
            f"{describe_node(root, node, 'distance')}: has {len(row)} numbers: expected {len(ids)}, one for "
            f"each node of {ids}"
        )
    return dict(zip(ids, row, strict=True))
