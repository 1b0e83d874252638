"""Which NUMA nodes a PCI device is local to, and which nodes' CPUs and memory serve it.

Pure functions over a Machine. Unknown stays unknown: what no evidence settles comes back as a
Problem for the operator to settle.
"""

from __future__ import annotations

from typing import NamedTuple

from provisioner.errors import Problem
from provisioner.idset import CpuSet, NodeSet
from provisioner.pci import PciAddress
from provisioner.topology import Accelerator, Machine, NodeSource


class Locality(NamedTuple):
    """The nodes that a device is local to, and what said so."""

    nodes: NodeSet  # one, or several where only a local_cpulist over several nodes is known
    source: NodeSource
    evidence: str  # for people, e.g. 'bridge 0000:80:01.0 is on node 1'


def find_locality(
    machine: Machine, address: PciAddress | None, stated: int | None = None
) -> Locality | Problem:
    """The locality of a PCI device, or the Problem that keeps it unknown.

    The order of evidence:

    1. the node that the operator stated;
    2. the device's own ``numa_node``;
    3. the nearest bridge above it that knows its node;
    4. its ``local_cpulist``, if that is a proper subset of the online CPUs (a device that does not
       know its node lists every CPU);
    5. the only node with CPUs, if there is just one.

    Args:
        machine: the machine.
        address: the device's PCI address; None where only /dev knows it.
        stated: the node that the operator stated for it.
    """
    if stated is not None:
        return _checked(machine, address, stated, "locality", "stated by the operator")
    tried: list[str] = []
    for depth, function in enumerate(machine.pci_path(address)):
        if function.numa_node is not None:
            if depth == 0:
                return _checked(
                    machine,
                    address,
                    function.numa_node,
                    "numa_node",
                    f"its numa_node is {function.numa_node}",
                )
            evidence = f"bridge {function.address} above it is on node {function.numa_node}"
            return _checked(machine, address, function.numa_node, "bridge", evidence)
    own = machine.pci.get(address) if address is not None else None
    tried += (
        ["numa_node is -1", "no bridge above it knows one"]
        if own is not None
        else ["it has no entry on the PCI bus"]
    )
    if own is not None and own.local_cpus is not None:
        local = own.local_cpus & machine.online_cpus
        if local and local < machine.online_cpus:
            nodes = nodes_of(machine, local)
            if nodes:
                return Locality(nodes, "local_cpulist", f"its local_cpulist is {own.local_cpus}")
            tried.append(f"local_cpulist {own.local_cpus} lies on no node")
    cpu_nodes = machine.cpu_nodes
    if len(cpu_nodes) == 1:
        return Locality(cpu_nodes, "one_node", f"node {cpu_nodes} is the only one with CPUs")
    return Problem(
        "no_locality",
        f"it has no NUMA node: {', '.join(tried)}, and there are {len(cpu_nodes)} nodes with CPUs ({cpu_nodes})",
    )


def find_card_locality(
    machine: Machine, card: Accelerator, stated: int | None = None
) -> Locality | Problem:
    """The locality of a card: a PCI device's, or what its driver says of one that is not on PCI."""
    if stated is None and card.numa_node is not None:
        evidence = f"its driver says node {card.numa_node}"
        return _checked(machine, card.address, card.numa_node, "driver", evidence)
    return find_locality(machine, card.address, stated)


def _checked(
    machine: Machine, address: PciAddress | None, node_id: int, source: NodeSource, evidence: str
) -> Locality | Problem:
    if machine.find_node(node_id) is None:
        return Problem(
            "no_such_node",
            f"{evidence}, and there is no such node: the machine has {machine.node_ids}",
        )
    return Locality(NodeSet((node_id,)), source, evidence)


def nodes_of(machine: Machine, cpus: CpuSet) -> NodeSet:
    """The nodes that any of the CPUs is on."""
    return NodeSet(node.id for node in machine.nodes if not node.cpus.isdisjoint(cpus))


def nearest(machine: Machine, from_node: int, candidates: NodeSet) -> NodeSet:
    """The candidates at the least distance from a node; all of them where the machine gives no distances.

    A candidate whose distance is unknown counts as farther than any known one.
    """
    if from_node in candidates:
        return NodeSet((from_node,))
    known = {
        one: gap for one in candidates if (gap := machine.distance(from_node, one)) is not None
    }
    if not known:
        return candidates
    least = min(known.values())
    return NodeSet(one for one, gap in known.items() if gap == least)


def find_cpu_nodes(
    machine: Machine, accelerator: Accelerator, locality: Locality
) -> NodeSet | Problem:
    """The nodes whose CPUs serve a card, or the Problem that leaves several to choose from.

    A local node with CPUs serves itself. One without (GPU memory, HBM, CXL) is served by the nearest
    node with CPUs, judged by distance, then by the node of a bridge above the card, then by the
    card's local_cpulist.
    """
    found = NodeSet()
    for node_id in locality.nodes:
        near = nearest(machine, node_id, machine.cpu_nodes)
        for narrow in (_bridge_nodes, _local_cpu_nodes):
            if len(near) <= 1:
                break
            narrowed = near & narrow(machine, accelerator.address)
            near = narrowed or near
        if len(near) != 1:
            gaps = machine.distance(node_id, near.first) if near else None
            why = (
                f"nodes {near} are equally near ({gaps})"
                if gaps is not None
                else f"no distance tells which of {near} is nearest"
            )
            return Problem("no_cpu_node", f"its NUMA node {node_id} has no CPUs, and {why}")
        found |= near
    return found


def _bridge_nodes(machine: Machine, address: PciAddress | None) -> NodeSet:
    known = [one.numa_node for one in machine.pci_path(address)[1:] if one.numa_node is not None]
    return NodeSet(known[:1])


def _local_cpu_nodes(machine: Machine, address: PciAddress | None) -> NodeSet:
    own = machine.pci.get(address) if address is not None else None
    if own is None or own.local_cpus is None or machine.online_cpus <= own.local_cpus:
        return NodeSet()
    return nodes_of(machine, own.local_cpus & machine.online_cpus)


def find_memory_nodes(machine: Machine, cpu_node: int) -> NodeSet:
    """The nodes whose ordinary memory serves a CPU node: itself, else the nearest; empty if none may be used.

    Only allowed nodes count, and CPU-less ones only if they are plain DRAM, which the machine's
    evidence never says of GPU memory, HBM or CXL.
    """
    usable = NodeSet(
        node.id
        for node in machine.nodes
        if node.id in machine.allowed_nodes
        and node.has_memory
        and (node.kind == "dram" or node.cpus)
    )
    return nearest(machine, cpu_node, usable) if usable else usable
