"""The machine as frozen values, and the questions that planning asks of them.

Ids are the kernel's. A core is named by the lowest CPU id among its online SMT siblings and a
last-level cache by the lowest CPU id that shares it, since the kernel's own ``core_id`` and cache
``id`` repeat across packages. None always means that the machine does not say.

Rows are named tuples and not frozen dataclasses where they can be: one of those takes a millisecond
to define, which every start of a command, and of a worker, would pay for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from provisioner.idset import CpuSet, NodeSet, union_cpus
from provisioner.pci import PciAddress

MemoryKind = Literal["dram", "gpu", "hbm", "cxl", "none"]
MEMORY_KINDS: tuple[MemoryKind, ...] = ("dram", "gpu", "hbm", "cxl", "none")

Vendor = Literal["nvidia", "amd", "hygon", "intel", "habana", "ascend"]
VENDORS: tuple[Vendor, ...] = ("nvidia", "amd", "hygon", "intel", "habana", "ascend")

_NOUNS = {"habana": "Gaudi", "ascend": "NPU"}

NodeSource = Literal["locality", "numa_node", "driver", "bridge", "local_cpulist", "one_node"]


class Cpu(NamedTuple):
    """One online logical CPU."""

    id: int  # N of /sys/devices/system/cpu/cpuN
    core: int  # lowest id in topology/core_cpus_list
    package: int | None  # topology/physical_package_id; None: absent or -1
    die: int | None  # topology/die_id, which repeats across packages
    llc: int | None  # lowest id in shared_cpu_list of the highest cache level
    node: int | None  # N of the /sys/devices/system/node/nodeN that lists it


class Core(NamedTuple):
    """One physical core: a CPU and its online SMT siblings."""

    id: int  # the lowest of `cpus`
    cpus: CpuSet
    package: int | None
    die: int | None
    llc: int | None
    node: int | None

    @property
    def sort_key(self) -> tuple[int, int]:
        """(last-level cache, core): the order in which cores are handed out; an unknown cache first."""
        return (-1 if self.llc is None else self.llc, self.id)


class NumaNode(NamedTuple):
    """One NUMA node."""

    id: int  # N of /sys/devices/system/node/nodeN
    cpus: CpuSet  # nodeN/cpulist, online ones
    memory_bytes: int | None  # nodeN/meminfo MemTotal; None: not said
    kind: MemoryKind | None  # None: not said whether it has memory
    distances: Mapping[int, int] | None  # node id -> nodeN/distance; None: absent

    @property
    def has_memory(self) -> bool:
        """Whether the machine says that this node has memory."""
        return self.kind is not None and self.kind != "none"


class PciFunction(NamedTuple):
    """One PCI function that matters to a card or a network device: itself or a bridge above it."""

    address: PciAddress
    parent: PciAddress | None  # the bridge above; None: directly under the host bridge, or unknown
    host_bridge: str | None  # first component of its path below /sys/devices, e.g. pci0000:00
    numa_node: int | None  # the function's numa_node file; None: -1 or absent
    local_cpus: CpuSet | None  # local_cpulist; None: absent
    vendor: int | None = None  # vendor, 16 bits
    device: int | None = None  # device, 16 bits


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One physical accelerator, a card."""

    vendor: str  # one of VENDORS
    index: int  # the physical card number: position in PCI order among the vendor's cards
    address: PciAddress | None  # None: known from /dev alone
    source: Literal["driver", "pci", "ubcore", "dev", "hwloc"]  # what named it
    model: str | None = None  # e.g. the driver's 'Model:' line
    uuid: str | None = None  # the driver's 'GPU UUID:' line
    minor: int | None = None  # the driver's 'Device Minor:' line, N of /dev/nvidiaN
    memory_nodes: NodeSet = NodeSet()  # NUMA nodes that are this card's own memory
    numbers: tuple[int, ...] = ()  # the vendor's runtime's, one for each partition; none: `index`
    module: int | None = None  # its place on the board, accelN/device/module_id of Gaudi
    numa_node: int | None = None  # what its driver says where it has no PCI function

    @property
    def name(self) -> str:
        """The PCI address, or vendor and index where none is known."""
        return str(self.address) if self.address is not None else f"{self.vendor}{self.index}"

    @property
    def noun(self) -> str:
        """What people call such a card, to stand before its name."""
        return _NOUNS.get(self.vendor, "GPU")

    @property
    def runtime_numbers(self) -> tuple[int, ...]:
        """The numbers by which the vendor's runtime counts it; several for a card cut into partitions."""
        return self.numbers or (self.index,)


class Nic(NamedTuple):
    """One network or RDMA device on the PCI bus."""

    address: PciAddress
    rdma_names: tuple[str, ...]  # /sys/class/infiniband/NAME, sorted
    net_names: tuple[str, ...]  # /sys/class/net/NAME, sorted
    is_virtual: bool  # an SR-IOV virtual function (it has a physfn link)
    ports: tuple[tuple[int, ...], ...] = ()  # /sys/class/infiniband/NAME/ports, as `rdma_names`

    @property
    def name(self) -> str | None:
        """The RDMA name, else the network interface's; None if it has neither."""
        return next(iter(self.rdma_names + self.net_names), None)


class Ceiling(NamedTuple):
    """The cpuset that bounds everything planned here."""

    within: str  # root, self, or a cgroup path
    cpus: CpuSet | None  # effective CPUs; None: no cpuset says anything
    nodes: NodeSet | None  # effective memory nodes; None likewise
    source: str  # the file that said so, or why none did


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that planning may know of a machine."""

    cpus: tuple[Cpu, ...]  # online ones, ascending
    offline_cpus: CpuSet
    possible_cpus: CpuSet | None  # /sys/devices/system/cpu/possible; None: absent
    isolated_cpus: CpuSet  # /sys/devices/system/cpu/isolated
    nodes: tuple[NumaNode, ...]  # ascending
    accelerators: tuple[Accelerator, ...]  # by vendor, then in PCI order
    nics: tuple[Nic, ...]  # in PCI order
    pci: Mapping[PciAddress, PciFunction]
    ceiling: Ceiling
    is_this_system: bool
    has_node_directories: (
        bool  # False: the kernel lists no NUMA node, and node 0 stands for the machine
    )
    numa_balancing: bool | None  # kernel.numa_balancing; None: not said
    sources: tuple[tuple[str, str], ...] = ()  # (fact, where it came from), for people
    oddities: tuple[str, ...] = ()  # sentences about the machine's own data, for people
    unsaid: tuple[str, ...] = ()  # what the form that it was read from never says, for people
    online_cpus: CpuSet = field(init=False, repr=False, compare=False)
    cores: tuple[Core, ...] = field(init=False, repr=False, compare=False)  # ascending
    node_ids: NodeSet = field(init=False, repr=False, compare=False)  # every NUMA node
    cpu_nodes: NodeSet = field(init=False, repr=False, compare=False)  # those with online CPUs
    allowed_nodes: NodeSet = field(init=False, repr=False, compare=False)  # those under the ceiling
    _nodes: dict[int, NumaNode] = field(init=False, repr=False, compare=False)
    _node_cores: dict[int, tuple[Core, ...]] = field(init=False, repr=False, compare=False)
    _core_of: dict[int, Core] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        cpu_bits = 0
        core_bits: dict[int, int] = {}
        for cpu in self.cpus:
            bit = 1 << cpu.id
            cpu_bits |= bit
            core_bits[cpu.core] = core_bits.get(cpu.core, 0) | bit
        cores = tuple(
            Core(
                cpu.id, CpuSet.from_bits(core_bits[cpu.id]), cpu.package, cpu.die, cpu.llc, cpu.node
            )
            for cpu in self.cpus
            if cpu.core == cpu.id
        )
        object.__setattr__(self, "online_cpus", CpuSet.from_bits(cpu_bits))
        object.__setattr__(self, "cores", cores)
        nodes = NodeSet(node.id for node in self.nodes)
        allowed = nodes if self.ceiling.nodes is None else nodes & self.ceiling.nodes
        object.__setattr__(self, "node_ids", nodes)
        object.__setattr__(self, "cpu_nodes", NodeSet(node.id for node in self.nodes if node.cpus))
        object.__setattr__(self, "allowed_nodes", allowed)
        object.__setattr__(self, "_nodes", {node.id: node for node in self.nodes})
        object.__setattr__(self, "_core_of", {cpu: core for core in cores for cpu in core.cpus})
        by_node: dict[int, list[Core]] = {}
        for core in sorted(cores, key=lambda core: core.sort_key):
            if core.node is not None:
                by_node.setdefault(core.node, []).append(core)
        object.__setattr__(
            self, "_node_cores", {node: tuple(found) for node, found in by_node.items()}
        )

    @property
    def ceiling_cpus(self) -> CpuSet:
        """The online CPUs under the cpuset ceiling."""
        return (
            self.online_cpus if self.ceiling.cpus is None else self.online_cpus & self.ceiling.cpus
        )

    @property
    def allowed_cpus(self) -> CpuSet:
        """The online CPUs under the cpuset ceiling that are not isolated."""
        return self.ceiling_cpus - self.isolated_cpus

    def find_node(self, node_id: int) -> NumaNode | None:
        """The node of that id, or None."""
        return self._nodes.get(node_id)

    def node(self, node_id: int) -> NumaNode:
        """The node of that id. Raises KeyError if there is none."""
        return self._nodes[node_id]

    def node_cores(self, node_id: int) -> tuple[Core, ...]:
        """The cores of a node in (last-level cache, core) order."""
        return self._node_cores.get(node_id, ())

    def cpus_on(self, nodes: NodeSet) -> CpuSet:
        """The online CPUs of nodes that there are."""
        return union_cpus(self._nodes[node].cpus for node in nodes)

    def cores_of(self, cpus: CpuSet) -> tuple[Core, ...]:
        """The cores that any of the online CPUs belongs to, in (last-level cache, core) order."""
        found = {core.id: core for cpu in cpus if (core := self._core_of.get(cpu)) is not None}
        return tuple(sorted(found.values(), key=lambda core: core.sort_key))

    def node_packages(self, node_id: int) -> frozenset[int]:
        """The packages that a node's CPUs are in; empty if none is known."""
        return frozenset(
            core.package for core in self.node_cores(node_id) if core.package is not None
        )

    def distance(self, from_node: int, to_node: int) -> int | None:
        """The distance between two nodes (10: local), or None if the machine does not say."""
        node = self._nodes.get(from_node)
        if node is None or node.distances is None:
            return None
        return node.distances.get(to_node)

    def said_node(self, card: Accelerator) -> int | None:
        """The NUMA node that a card or its driver says itself, right or wrong; None: neither does."""
        path = self.pci_path(card.address)
        return path[0].numa_node if path else card.numa_node

    def pci_path(self, address: PciAddress | None) -> tuple[PciFunction, ...]:
        """The function and the bridges above it, nearest first; empty if it is not on the bus."""
        path: list[PciFunction] = []
        while address is not None and (function := self.pci.get(address)) is not None:
            path.append(function)
            address = function.parent
        return tuple(path)


def count_common_bridges(one: Sequence[PciFunction], other: Sequence[PciFunction]) -> int | None:
    """How many bridges two functions are both below; None where they are not known to share a host bridge.

    Args:
        one: the path of the one, as `Machine.pci_path` gives it.
        other: that of the other.
    """
    if not one or not other or one[0].host_bridge is None:
        return None
    if one[0].host_bridge != other[0].host_bridge:
        return None
    return len({part.address for part in one[1:]} & {part.address for part in other[1:]})
