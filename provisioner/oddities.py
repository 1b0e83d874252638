"""What is odd about a machine, whatever is planned on it: sentences with a hint, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from provisioner.idset import NodeSet
from provisioner.plan import Note
from provisioner.topology import Accelerator, Machine

# What a vendor's driver is called, for people.
DRIVERS = {
    "nvidia": "NVIDIA's driver",
    "amd": "AMD's compute driver (KFD)",
    "hygon": "Hygon's compute driver (KFD)",
    "intel": "Intel's driver (i915 or xe)",
    "habana": "Gaudi's driver (habanalabs)",
    "ascend": "Ascend's driver",
}


def find_oddities(machine: Machine) -> Iterator[Note]:
    """The notes on the machine itself; what a request decides about (isolated CPUs, cut cores) is not here."""
    for sentence in machine.oddities:
        yield Note("machine", sentence)
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
    for card in machine.accelerators:
        yield from _contradicting_locality(machine, card)
    smt = sorted({len(core.cpus) for core in machine.cores})
    if len(smt) > 1:
        few = sum(1 for core in machine.cores if len(core.cpus) == smt[0])
        yield Note(
            "mixed_smt",
            f"Cores have {' or '.join(str(one) for one in smt)} CPUs: {few} of {len(machine.cores)} have {smt[0]}.",
            "Hybrid CPUs are so; else look for offline SMT siblings",
        )
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
            "Set it to 0 with sysctl on hosts whose workers are all bound",
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


def _cgroup(machine: Machine) -> str:
    """The ceiling's cgroup in words that are the same wherever the machine is read from."""
    named = {"root": "the root cgroup", "self": "its own cgroup"}
    return named.get(machine.ceiling.within, f"cgroup {machine.ceiling.within}")
