"""What is odd about a machine, whatever is planned on it: sentences with a hint, for people. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from provisioner.idset import CpuSet, NodeSet
from provisioner.pci import PciAddress
from provisioner.plan import Note
from provisioner.topology import Accelerator, Machine, PciFunction, count_common_bridges

# What a vendor's driver is called, for people.
DRIVERS = {
    "nvidia": "NVIDIA's driver",
    "amd": "AMD's compute driver (KFD)",
    "hygon": "Hygon's compute driver (KFD)",
    "intel": "Intel's driver (i915 or xe)",
    "habana": "Gaudi's driver (habanalabs)",
    "ascend": "Ascend's driver",
}


def find_oddities(machine: Machine, stated: Container[str] = ()) -> Iterator[Note]:
    """The notes on the machine itself; what a request decides about (isolated CPUs, cut cores) is not here.

    Args:
        machine: the machine.
        stated: names of cards whose NUMA node the operator has stated: nothing is said of their own word.
    """
    doubtful = [card for card in machine.accelerators if card.name not in stated]
    for sentence in machine.oddities:
        yield Note("machine", sentence)
    for sentence in machine.unsaid:
        yield Note("unsaid", f"{sentence}.")
    for vendor in dict.fromkeys(
        card.vendor for card in machine.accelerators if card.source == "pci"
    ):
        yield Note(
            "driver_not_loaded",
            f"{DRIVERS[vendor]} does not say which cards it holds: the cards and their numbers are those "
            "of the PCI bus.",
            "Look again with the driver loaded, to be told of cards that it does not take, of their numbers and of "
            "GPU memory nodes",
        )
    if any(card.source == "dev" for card in machine.accelerators):
        yield Note(
            "cards_from_dev",
            "The cards are known from /dev alone: their PCI addresses are unknown, and so is their order.",
            "Make /sys/bus/pci visible here, and of NVIDIA's driver /proc/driver/nvidia",
        )
    for card in doubtful:
        yield from _contradicting_locality(machine, card)
    yield from _unlike_neighbours(machine, doubtful)
    if len(doubtful) == len(machine.accelerators):
        yield from _all_on_one_node(machine)
    yield from _mixed_smt(machine)
    yield from _packages_and_nodes(machine)
    yield from _small_nodes(machine)
    if machine.ceiling_cpus != machine.online_cpus:
        yield Note(
            "ceiling",
            f"Only CPUs {machine.ceiling_cpus or 'none'} of {machine.online_cpus} may be used: "
            f"the cpuset of {_cgroup(machine)} says so.",
            "Widen that cgroup's cpuset to plan for the others",
        )
    # The kernel never lists nodes without memory as usable.
    with_memory = NodeSet(node.id for node in machine.nodes if node.kind != "none")
    if not with_memory <= machine.allowed_nodes:
        yield Note(
            "memory_ceiling",
            f"Only memory of NUMA nodes {with_memory & machine.allowed_nodes or 'none'} of {with_memory} "
            "may be used, by the same cgroup.",
            "Widen that cgroup's memory nodes to plan for the others",
        )
    if machine.numa_balancing and len(machine.cpu_nodes) > 1:
        yield Note(
            "numa_balancing",
            "kernel.numa_balancing is on: it scans the memory of unbound processes and stalls them.",
            "Where all workers are bound: sysctl -w kernel.numa_balancing=0",
        )


def _contradicting_locality(machine: Machine, card: Accelerator) -> Iterator[Note]:
    """The note on a card whose numa_node and local_cpulist name different places."""
    function = machine.pci.get(card.address) if card.address is not None else None
    if function is None or function.numa_node is None or function.local_cpus is None:
        return
    node = machine.find_node(function.numa_node)
    local = function.local_cpus & machine.online_cpus
    # A node of memory alone has no CPUs to be near to.
    if node is not None and node.cpus and local and local.isdisjoint(node.cpus):
        yield Note(
            "contradicting_locality",
            f"Card {card.name} says NUMA node {node.id} by its numa_node and CPUs {function.local_cpus}, of "
            "another node, by its local_cpulist; the former is believed.",
            f'State the right one in provision.toml: [locality] "{card.name}" = NODE',
        )


def _unlike_neighbours(machine: Machine, cards: Sequence[Accelerator]) -> Iterator[Note]:
    """The note on each card whose NUMA node is not that of what is nearest to it on the PCI bus.

    The kernel gives a function the node of its bus, so a card that differs has it from firmware of
    its own, or from somebody who wrote to its numa_node.
    """
    for card in cards:
        path = machine.pci_path(card.address)
        # A node of memory alone, as Grace Hopper's cards name, has no bus.
        if not path or path[0].numa_node not in machine.cpu_nodes:
            continue
        beside = _nearest_nodes(machine, path)
        above = next((one for one in path[1:] if one.numa_node in machine.cpu_nodes), None)
        if above is not None and above.numa_node != path[0].numa_node:
            said = f"the bridge {above.address} above it node {above.numa_node}"
        elif beside and path[0].numa_node not in beside.values():
            said = ", ".join(f"{address} node {node}" for address, node in list(beside.items())[:3])
            said = f"what is nearest to it on the PCI bus another: {said}"
        else:
            continue
        yield Note(
            "unlike_neighbours",
            f"Card {card.name} names NUMA node {path[0].numa_node}, and {said}.",
            "Firmware or somebody who wrote to its numa_node is wrong: see the board's manual, and state the right one "
            f'in provision.toml: [locality] "{card.name}" = NODE',
        )


def _nearest_nodes(machine: Machine, path: Sequence[PciFunction]) -> dict[PciAddress, int]:
    """The NUMA nodes of the cards and network devices below the lowest bridge that has others below it.

    Without such a bridge, of those below the same host bridge; functions without a node are left out.
    """
    found: dict[PciAddress, int] = {}
    best = -1
    for address in (
        *(one.address for one in machine.accelerators),
        *(one.address for one in machine.nics),
    ):
        other = machine.pci_path(address)
        depth = count_common_bridges(path, other)
        if depth is None or address == path[0].address:
            continue
        node = other[0].numa_node
        if node is None or node not in machine.cpu_nodes:
            continue
        if depth > best:
            best, found = depth, {}
        if depth == best and address is not None:
            found[address] = node
    return found


def _all_on_one_node(machine: Machine) -> Iterator[Note]:
    """The note on cards that all name one of several NUMA nodes, as they do where firmware says 0 for unknown."""
    named = [machine.said_node(card) for card in machine.accelerators]
    if len(named) > 1 and len(machine.cpu_nodes) > 1 and len(set(named)) == 1:
        node = named[0]
        if node is not None and node in machine.cpu_nodes:
            yield Note(
                "all_on_one_node",
                f"All {len(named)} cards name NUMA node {node}, of nodes {machine.cpu_nodes}.",
                "Right where all their slots are that node's; some firmware says it where it knows nothing. See the "
                "board's manual, or provision topology for the bridges, and state others in [locality]",
            )


def _mixed_smt(machine: Machine) -> Iterator[Note]:
    """The note on cores with fewer CPUs than others."""
    sizes = sorted({len(core.cpus) for core in machine.cores})
    if len(sizes) < 2:
        return
    few = [core for core in machine.cores if len(core.cpus) < sizes[-1]]
    missing = sum(sizes[-1] - len(core.cpus) for core in few)
    # The kernel does not say whose siblings offline CPUs are; with too few of them, cores are smaller by make.
    if missing <= len(machine.offline_cpus):
        yield Note(
            "mixed_smt",
            f"SMT is off on some cores: {len(few)} of {len(machine.cores)} have fewer CPUs online than the "
            f"others' {sizes[-1]}, the first of them that of CPU {few[0].id}, and CPUs {machine.offline_cpus} are "
            "offline.",
            "Bring the siblings online (echo 1 > /sys/devices/system/cpu/cpuN/online), or take all of them offline "
            "(echo off > /sys/devices/system/cpu/smt/control)",
        )
    else:
        yield Note(
            "mixed_smt",
            f"Cores have {' or '.join(str(one) for one in sizes)} CPUs: {len(few)} of {len(machine.cores)} have "
            f"fewer than {sizes[-1]}.",
            "Hybrid CPUs are so; shares are counted in cores, and exclude_cpus= keeps the slower ones out",
        )


def _packages_and_nodes(machine: Machine) -> Iterator[Note]:
    """The notes on packages and NUMA nodes neither of which is a part of the other."""
    packages: dict[int, CpuSet] = {}
    for core in machine.cores:
        if core.package is not None:
            packages[core.package] = packages.get(core.package, CpuSet()) | core.cpus
    nodes = {node.id: node.cpus for node in machine.nodes if node.cpus}
    across: list[str] = []
    several: dict[int, list[int]] = {}
    for package, cpus in sorted(packages.items()):
        touched = [node for node, own in nodes.items() if not own.isdisjoint(cpus)]
        if len(touched) > 1 and not all(nodes[node] <= cpus for node in touched):
            across.append(f"package {package} lies on nodes {NodeSet(touched)}")
        for node in touched:
            several.setdefault(node, []).append(package)
    if across:
        more = f", and {len(across) - 4} more" if len(across) > 4 else ""
        yield Note(
            "package_across_nodes",
            f"Packages and NUMA nodes contradict each other: {', '.join(across[:4])}{more}, and those nodes have "
            "other packages' CPUs too.",
            "No hardware is so: a hypervisor made it up. Give the virtual machine sockets that match its NUMA nodes",
        )
        return
    crowded = {node: held for node, held in several.items() if len(held) > 1}
    if crowded:
        yield Note(
            "packages_in_node",
            f"{_describe_crowded(crowded)}: where memory is near to is not known within it.",
            "Turn node interleaving (NPS0) off in the firmware and numa=off out of the kernel's command line, or "
            "give the virtual machine as many sockets as NUMA nodes",
        )


def _describe_crowded(crowded: Mapping[int, list[int]]) -> str:
    if len(crowded) > 1:
        return f"NUMA nodes {NodeSet(crowded)} hold several packages each"
    ((node, held),) = crowded.items()
    return f"NUMA node {node} holds {len(held)} packages"


def _small_nodes(machine: Machine) -> Iterator[Note]:
    """The note on nodes with CPUs whose ordinary memory is under two thirds of the largest's."""
    sizes = {
        node.id: node.memory_bytes
        for node in machine.nodes
        if node.cpus and node.kind in ("dram", "none") and node.memory_bytes is not None
    }
    most = max(sizes.values(), default=0)
    small = {node: size for node, size in sizes.items() if 3 * size < 2 * most}
    if small:
        said = ", ".join(f"node {node} has {size / 2**30:.1f} GiB" for node, size in small.items())
        yield Note(
            "small_memory",
            f"Some NUMA nodes have much less memory than the largest's {most / 2**30:.1f} GiB: {said}.",
            "Check the memory modules of their channels; memory_need= refuses a plan whose ranks don't fit there",
        )


def _cgroup(machine: Machine) -> str:
    """The ceiling's cgroup in words that are the same wherever the machine is read from."""
    named = {"root": "the root cgroup", "self": "its own cgroup"}
    return named.get(machine.ceiling.within, f"cgroup {machine.ceiling.within}")
