"""From a root to a Machine: what the kernel's files say, read once and frozen.

No accelerator library is used, nor anything that a driver's user space brings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from provisioner.cgroup import (
    WITHIN_ROOT,
    find_ceiling,
    find_hierarchies,
    read_isolated_partition,
)
from provisioner.discovery.cards import find_cards
from provisioner.discovery.cpus import find_cpus
from provisioner.discovery.nics import find_nics
from provisioner.discovery.nodes import NodeTable, find_nodes
from provisioner.discovery.pcibus import PciBus
from provisioner.errors import TopologyError
from provisioner.idset import NodeSet
from provisioner.root import Root
from provisioner.sysfs import describe_cpu, read_cpu_set, read_numa_balancing
from provisioner.topology import Cpu, Machine


def discover(root: Root, within: str = WITHIN_ROOT) -> Machine:
    """The machine below a root.

    Args:
        root: the running system, a recorded tree or files in memory.
        within: the cgroup whose effective cpuset is the ceiling: root, self or a path.

    Raises:
        InputError: the root describes no machine: no CPU in it, or no such cgroup.
        ReadError, ParseError: a file is there but can't be read or is not of its form.
        TopologyError: files contradict each other.
    """
    oddities: list[str] = []
    cpu_table = find_cpus(root, oddities)
    bus = PciBus(root)
    cards = find_cards(root, bus, oddities)
    nodes = find_nodes(
        root,
        cpu_table.online,
        NodeSet(node for card in cards for node in card.memory_nodes),
        oddities,
    )
    node_of = {cpu: node.id for node in nodes.nodes for cpu in node.cpus}
    _check_cores(root, cpu_table.rows, node_of)
    nics = find_nics(root, bus)
    _find_strange_nodes(bus, nodes, oddities)
    hierarchies = find_hierarchies(root)
    return Machine(
        cpus=tuple(row._replace(node=node_of.get(row.id)) for row in cpu_table.rows),
        offline_cpus=cpu_table.offline,
        possible_cpus=read_cpu_set(root, "possible"),
        isolated_cpus=cpu_table.isolated | read_isolated_partition(root, hierarchies),
        nodes=nodes.nodes,
        accelerators=cards,
        nics=nics,
        pci=bus.functions(),
        ceiling=find_ceiling(root, hierarchies, within),
        is_this_system=root.is_this_system,
        has_node_directories=nodes.has_directories,
        numa_balancing=read_numa_balancing(root),
        sources=(*cpu_table.sources, *nodes.sources),
        oddities=tuple(oddities),
    )


def _find_strange_nodes(bus: PciBus, nodes: NodeTable, oddities: list[str]) -> None:
    """Tells of PCI functions that name a NUMA node which the machine does not have.

    A card among them is refused when it is planned; a network device is near to no card by its node.
    The sentence has no path of the root: a plan says the same wherever its machine is read from.
    """
    known = {node.id for node in nodes.nodes}
    strange = [
        f"{address} says {function.numa_node}"
        for address, function in bus.functions().items()
        if function.numa_node is not None and function.numa_node not in known
    ]
    if strange:
        more = f", and {len(strange) - 8} more" if len(strange) > 8 else ""
        oddities.append(
            f"PCI functions name NUMA nodes by their numa_node that are not there: {', '.join(strange[:8])}{more}."
        )


def _check_cores(root: Root, rows: Sequence[Cpu], node_of: Mapping[int, int]) -> None:
    """Raises TopologyError for a core whose SMT siblings are not together in all else."""
    by_id = {row.id: row for row in rows}
    for row in rows:
        first = by_id[row.core]
        for what, own, other in (
            ("in package", row.package, first.package),
            ("in die", row.die, first.die),
            ("below the last-level cache of CPU", row.llc, first.llc),
            ("on NUMA node", node_of.get(row.id), node_of.get(row.core)),
        ):
            # Only of nodes is it known that every CPU is on one.
            is_known = None not in (own, other) or what == "on NUMA node"
            if own != other and is_known:
                raise TopologyError(
                    f"{describe_cpu(root, row.id)}: CPU {row.id} is {what} {own} and its SMT sibling "
                    f"{row.core} {what} {other}: expected one for a core",
                )
