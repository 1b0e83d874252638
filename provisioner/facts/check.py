"""What is wrong with the facts of a machine: everything that no real machine could be."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

from provisioner.errors import EXIT_USAGE, InputError, Problem, ProblemsError
from provisioner.facts.values import KFD_VENDORS, BridgeFacts, CardFacts, HostFacts, PciFacts
from provisioner.idset import CpuSet, NodeSet, union_cpus
from provisioner.pci import PciAddress

_H = TypeVar("_H", bound=Hashable)

# Source: include/linux/acpi.h and the ACPI specification's SLIT: 10 is local, 255 unreachable.
_DISTANCES = range(10, 256)
_DEVICE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*", re.ASCII)


class FactsError(ProblemsError, InputError):
    """The facts of a machine are wrong; every fault that was found is in it."""

    def __init__(self, problems: Iterable[Problem], *, subject: str = "") -> None:
        super().__init__(problems, exit_status=EXIT_USAGE, subject=subject)


def check_facts(facts: HostFacts) -> list[Problem]:
    """What is wrong with a machine's facts; empty if nothing is."""
    found = list(_check_cpus(facts))
    if not found:  # cores and caches only mean something on sound packages and nodes
        found += _check_cores(facts)
    found += _check_nodes(facts)
    found += _check_pci(facts)
    found += _check_devices(facts)
    found += _check_cgroups(facts)
    return [Problem("bad_facts", f"{facts.name}: {message}") for message in found]


def _check_cpus(facts: HostFacts) -> Iterator[str]:
    """Packages, dies, nodes' CPUs, and the sets of CPUs in some state."""
    cpus = facts.cpus
    if not facts.title.strip() or not facts.title.isprintable():
        yield f"title= is {facts.title!r}: expected one line of text"
    if not cpus:
        yield "packages= name no CPU: expected at least one"
        return
    yield from _check_apart("packages=", [package.cpus for package in facts.packages])
    yield from _check_unique(
        "packages= id=", (one.id for one in facts.packages if one.id is not None)
    )
    for package in facts.packages:
        yield from _check_apart("packages= dies=", package.dies)
        if package.dies and union_cpus(package.dies) != package.cpus:
            yield f"packages= dies= hold CPUs {union_cpus(package.dies)}: expected all of {package.cpus}"
    if facts.nodes:
        yield from _check_apart("nodes= cpus=", [node.cpus for node in facts.nodes if node.cpus])
        on_nodes = union_cpus(node.cpus for node in facts.nodes)
        if on_nodes != cpus:
            yield f"nodes= hold CPUs '{on_nodes}': expected those of packages=, {cpus}"
    for key, some in (("offline=", facts.offline_cpus), ("isolated=", facts.isolated_cpus)):
        if not some <= cpus:
            yield f"{key} names CPUs {some - cpus}, which are in no package"
    if cpus <= facts.offline_cpus:
        yield "offline= names every CPU: expected one that is online"
    possible = cpus if facts.possible_cpus is None else facts.possible_cpus
    if not cpus <= possible:
        yield f"possible_cpus= lacks CPUs {cpus - possible}"
    if possible.last > facts.kernel_max:
        yield f"kernel_max= is {facts.kernel_max}: expected at least the highest CPU, {possible.last}"


def _check_cores(facts: HostFacts) -> Iterator[str]:
    """SMT siblings and last-level caches: each in one package and one node, and caches of whole cores."""
    cpus = facts.cpus
    if facts.threads < 1:
        yield f"threads= is {facts.threads}: expected at least 1"
        return
    if facts.threads > 1 and facts.sibling_stride < 1:
        yield f"sibling_stride= is {facts.sibling_stride}: expected at least 1 with threads= {facts.threads}"
        return
    explicit = union_cpus(facts.core_cpus)
    sets = (("cores=", facts.core_cpus), ("llcs=", facts.llcs))
    faults = [fault for key, groups in sets for fault in _check_apart(key, groups)]
    for key, groups in sets:
        if not union_cpus(groups) <= cpus:
            faults.append(f"{key} names CPUs {union_cpus(groups) - cpus}, which are in no package")
    yield from faults
    if faults:
        return
    packages = {cpu: index for index, one in enumerate(facts.packages) for cpu in one.cpus}
    nodes = {cpu: node.id for node in facts.nodes for cpu in node.cpus}
    cores = facts.cores()
    for core in cores:
        if core.isdisjoint(explicit) and len(core) != facts.threads:
            yield (
                f"CPU {core.first} finds siblings {core} at sibling_stride= {facts.sibling_stride}: "
                f"expected {facts.threads} CPUs; state such cores in cores="
            )
        for noun, holders in (("packages", packages), ("nodes", nodes)):
            if len({holders.get(cpu) for cpu in core}) > 1:
                yield f"core {core} lies in several {noun}: expected one"
    if facts.llcs and facts.cores_per_llc:
        yield "llcs= and cores_per_llc= are both there: expected one of them"
    elif facts.cores_per_llc < 0:
        yield f"cores_per_llc= is {facts.cores_per_llc}: expected at least 1"
    for llc in facts.llcs:
        if any(not core.isdisjoint(llc) and not core <= llc for core in cores):
            yield f"llcs= {llc} cuts a core in two: expected whole cores"
        if len({packages[cpu] for cpu in llc}) > 1:
            yield f"llcs= {llc} lies in several packages: expected one"


def _check_nodes(facts: HostFacts) -> Iterator[str]:
    """Nodes, their memory and distances."""
    ids = facts.node_ids
    yield from _check_unique("nodes= id=", (node.id for node in facts.nodes))
    if facts.nodes and not any(node.memory_bytes for node in facts.nodes):
        yield "nodes= have no memory: expected one that has"
    if facts.nodes and facts.memory_bytes:
        yield "memory= is there beside nodes=: expected it on the nodes alone"
    for node in facts.nodes:
        if node.memory_bytes < 0 or node.memory_bytes % 1024:
            yield f"node {node.id}: memory= is {node.memory_bytes} bytes: expected whole KiB"
        if node.read_bandwidth is not None and node.read_bandwidth < 0:
            yield f"node {node.id}: read_bandwidth= is {node.read_bandwidth}: expected MB/s"
    if facts.possible_nodes is not None and not ids <= facts.possible_nodes:
        yield f"possible_nodes= lacks nodes {ids - facts.possible_nodes}"
    for rule in facts.distances:
        for key, some in (("from=", rule.from_nodes), ("to=", rule.to_nodes)):
            if not some <= ids:
                yield f"distances= {key} names nodes {some - ids}, which nodes= lacks"
        if rule.value not in _DISTANCES:
            yield f"distances= value= is {rule.value}: expected 10 to 255"
    if facts.numa_balancing is not None and facts.numa_balancing not in range(4):
        yield f"numa_balancing= is {facts.numa_balancing}: expected 0 to 3"


def _check_pci(facts: HostFacts) -> Iterator[str]:
    """Paths that fit together to trees, ids of the right width, nodes that exist."""
    ids = facts.node_ids
    above: dict[PciAddress, tuple[PciAddress, ...]] = {}
    bridges: set[PciAddress] = set()
    functions = facts.pci_functions
    addresses = {function.address for function in functions if function.path}
    yield from _check_unique("PCI function", (one.address for one in functions if one.path))
    for function in functions:
        if not function.path:
            yield "path= is empty: expected PCI addresses from the host bridge down"
            continue
        for end, address in enumerate(function.path):
            parents = function.path[:end]
            if above.setdefault(address, parents) != parents:
                yield f"PCI function {address} is in two places: expected one path for each bridge"
            if parents and (address.domain, address.bus) <= (parents[-1].domain, parents[-1].bus):
                yield f"PCI function {address} is below {parents[-1]}: expected a higher bus"
            elif parents and address.domain != parents[-1].domain:
                yield f"PCI function {address} is below {parents[-1]}: expected one domain"
        bridges.update(function.bridges)
        yield from _check_function(facts, function, addresses)
    for address in sorted(bridges & addresses):
        yield f"PCI function {address} has others below it: expected a bridge, which has no entry of its own"
    yield from _check_unique("bridges= address=", (bridge.address for bridge in facts.bridges))
    for bridge in facts.bridges:
        if bridge.address not in bridges:
            yield f"bridges= {bridge.address} is in no path="
    named: list[tuple[PciFacts | BridgeFacts, str]] = [
        *(
            (function, f"PCI function {function.path[-1]}")
            for function in functions
            if function.path
        ),
        *((bridge, f"bridges= {bridge.address}") for bridge in facts.bridges),
    ]
    for one, name in named:
        if one.numa_node is not None and one.numa_node not in ids:
            yield f"{name}: node= is {one.numa_node}: expected -1 or one of nodes=, '{ids}'"
        for key, value, bits in (
            ("class=", one.pci_class, 24),
            ("vendor=", one.vendor, 16),
            ("device=", one.device, 16),
        ):
            if not 0 <= value < 1 << bits:
                yield f"{name}: {key} is {value:#x}: expected {bits} bits"


def _check_function(
    facts: HostFacts, function: PciFacts, addresses: set[PciAddress]
) -> Iterator[str]:
    if function.local_cpus is not None and not function.local_cpus <= facts.cpus:
        yield f"PCI function {function.address}: local_cpus= is {function.local_cpus}: expected CPUs of packages="
    if function.physfn is not None and function.physfn not in addresses - {function.address}:
        yield f"PCI function {function.address}: physfn= is {function.physfn}, which is no other function here"


def _check_devices(facts: HostFacts) -> Iterator[str]:
    """What cards and NICs have besides their PCI function."""
    for card in facts.cards:
        yield from _check_card(facts, card)
    memory = (card.memory_node for card in facts.cards if card.memory_node is not None)
    yield from _check_unique("cards= memory_node=", memory)
    # Each vendor's driver has numbers of its own.
    for vendor in {card.vendor for card in facts.cards}:
        mine = [card for card in facts.cards if card.vendor == vendor]
        for key, given in (
            ("minor=", [card.minor for card in mine if card.minor is not None]),
            ("module=", [card.module for card in mine if card.module is not None]),
        ):
            yield from _check_unique(f"cards= {key}", given)
    for nic in facts.nics:
        if nic.ports < 0:
            yield f"nics= ports= is {nic.ports}: expected 0 or more"
    for one in facts.ub_devices:
        if one.entities < 0:
            yield f"ub_devices= {one.name}: entities= is {one.entities}: expected 0 or more"
    for key, names in (
        ("nics= rdma=", [name for nic in facts.nics for name in nic.rdma]),
        ("nics= net=", [name for nic in facts.nics for name in nic.net]),
        ("ub_devices= name=", [one.name for one in facts.ub_devices]),
    ):
        yield from _check_unique(key, names)
        for name in names:
            if not _DEVICE_NAME.fullmatch(name):
                yield f"{key} is {name!r}: expected a device's name, such as mlx5_0"


def _check_card(facts: HostFacts, card: CardFacts) -> Iterator[str]:
    name = f"card {card.path[-1]}" if card.path else "a card"
    if not card.model.isprintable():
        yield f"{name}: model= is {card.model!r}: expected one line of text"
    if card.minor is not None and card.minor < 0:
        yield f"{name}: minor= is {card.minor}: expected 0 or more"
    if card.module is not None and card.module < 0:
        yield f"{name}: module= is {card.module}: expected 0 or more"
    if card.partitions < 1 or (card.partitions > 1 and card.vendor not in KFD_VENDORS):
        yield f"{name}: partitions= is {card.partitions}: expected 1, or of AMD's cards more"
    if card.memory_node is not None:
        memory = next((node for node in facts.nodes if node.id == card.memory_node), None)
        if memory is None or memory.cpus or not memory.memory_bytes:
            yield f"{name}: memory_node= is {card.memory_node}: expected a node with memory and without CPUs"


def _check_cgroups(facts: HostFacts) -> Iterator[str]:
    """Effective cpusets that the kernel could grant."""
    with_memory = NodeSet(node.id for node in facts.nodes if node.memory_bytes) or NodeSet((0,))
    yield from _check_unique("cgroups= path=", (one.path for one in facts.cgroups))
    for path in (facts.own_cgroup, *(one.path for one in facts.cgroups)):
        if not path.startswith("/") or path.startswith("//") or posixpath.normpath(path) != path:
            yield f"cgroup '{path}' is no path: expected the form '/system.slice'"
        if not path.isprintable():
            yield f"cgroup {path!r}: expected printable text"
    for one in facts.cgroups:
        if one.cpus is not None and not (one.cpus and one.cpus <= facts.online_cpus):
            yield f"cgroup '{one.path}': cpus= is '{one.cpus}': expected online CPUs"
        if one.nodes is not None and not (one.nodes and one.nodes <= with_memory):
            yield f"cgroup '{one.path}': nodes= is '{one.nodes}': expected nodes with memory, of {with_memory}"


def _check_apart(key: str, groups: Iterable[CpuSet]) -> Iterator[str]:
    seen = CpuSet()
    for group in groups:
        if not group:
            yield f"{key} has an empty set: expected CPUs"
        if not group.isdisjoint(seen):
            yield f"{key} name CPUs {group & seen} twice"
        seen |= group


def _check_unique(key: str, values: Iterable[_H]) -> Iterator[str]:
    seen: set[_H] = set()
    for value in values:
        if value in seen:
            yield f"{key} {value} is there twice: expected once"
        seen.add(value)
