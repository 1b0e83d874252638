"""What a machine is made of, as frozen values, and what follows from them.

A `HostFacts` states each thing once and compactly (a rule for SMT siblings instead of one list for
each CPU); its methods spell the rules out. They never raise for facts that contradict each other:
finding those is `check_facts`' work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from provisioner.idset import CpuSet, NodeSet, union_cpus
from provisioner.pci import PciAddress

# Source: include/linux/topology.h, LOCAL_DISTANCE and REMOTE_DISTANCE.
LOCAL_DISTANCE = 10
REMOTE_DISTANCE = 20

NVIDIA_VENDOR = 0x10DE
KFD_VENDORS = (0x1002, 0x1D94)  # AMD and Hygon: their cards have one compute driver
INTEL_VENDOR = 0x8086
HABANA_VENDOR = 0x1DA3
ASCEND_VENDOR = 0x19E5
# A network function that says nothing else is an Ethernet port of a ConnectX-7.
NIC_CLASS, NIC_VENDOR, NIC_DEVICE = 0x020000, 0x15B3, 0x1021


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """One processor package."""

    cpus: CpuSet
    id: int | None = None  # topology/physical_package_id; None: the kernel writes -1
    dies: tuple[CpuSet, ...] = ()  # each die's CPUs, numbered from 0; none: the package is one die


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One NUMA node."""

    id: int
    memory_bytes: int  # nodeN/meminfo MemTotal; 0: a node without memory
    cpus: CpuSet = CpuSet()  # offline ones included; empty: a node of memory alone
    read_bandwidth: int | None = None  # MB/s, nodeN/access0/initiators/; None: no HMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceFacts:
    """The distance between any node of one set and any of another, both ways."""

    from_nodes: NodeSet
    to_nodes: NodeSet
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFacts:
    """One PCI function that is no bridge."""

    path: tuple[PciAddress, ...]  # the bridges from the host bridge down, then the function
    pci_class: int  # 24 bits
    vendor: int  # 16 bits
    device: int  # 16 bits
    numa_node: int | None = None  # None: the kernel writes -1
    local_cpus: CpuSet | None = None  # None: those of its node, or every online CPU if it has none
    physfn: PciAddress | None = None  # the physical function, of an SR-IOV virtual one

    @property
    def address(self) -> PciAddress:
        """The function's own address."""
        return self.path[-1]

    @property
    def bridges(self) -> tuple[PciAddress, ...]:
        """The bridges above it, from the host bridge down."""
        return self.path[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts(PciFacts):
    """One accelerator."""

    pci_class: int = 0x030200
    vendor: int = NVIDIA_VENDOR
    model: str = ""
    has_driver: bool = True  # the vendor's driver holds it
    memory_node: int | None = None  # the NUMA node that is its own memory
    # The driver's number (N of nvidiaN, accelN, davinciN, the place among KFD's GPUs); None: its
    # position in PCI order.
    minor: int | None = None
    module: int | None = None  # module_id of a Gaudi
    partitions: int = 1  # GPUs that AMD's driver makes of it


@dataclass(frozen=True, slots=True, kw_only=True)
class NicFacts(PciFacts):
    """One network or RDMA function."""

    pci_class: int = NIC_CLASS
    vendor: int = NIC_VENDOR
    device: int = NIC_DEVICE
    rdma: tuple[str, ...] = ()  # /sys/class/infiniband/NAME
    net: tuple[str, ...] = ()  # /sys/class/net/NAME
    ports: int = 1  # of each RDMA device


@dataclass(frozen=True, slots=True, kw_only=True)
class UbFacts:
    """One device of the unified bus."""

    name: str  # /sys/class/ubcore/NAME
    numa: int | None = None  # device/numa; None: -1
    entities: int = 1  # device/ub_totalues


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeFacts:
    """What is special about a bridge that stands in some function's path.

    A bridge without one of these has the node on which all functions below it agree.
    """

    address: PciAddress
    numa_node: int | None = None
    pci_class: int = 0x060400
    vendor: int = 0x1000
    device: int = 0xC030


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupFacts:
    """One cgroup and its effective cpuset."""

    path: str  # from the mount point, e.g. /system.slice
    cpus: CpuSet | None = None  # cpuset.cpus.effective; None: every online CPU
    nodes: NodeSet | None = None  # cpuset.mems.effective; None: every node with memory


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One machine."""

    name: str  # for messages: the sample's name or the file's path
    title: str
    packages: tuple[PackageFacts, ...]
    description: str = ""
    arch: str = "x86_64"  # as uname -m says it
    threads: int = 1  # CPUs of each core that `core_cpus` does not name
    sibling_stride: int = 0  # the distance of their ids; 0 where threads is 1
    core_cpus: tuple[CpuSet, ...] = ()  # cores that do not follow that rule
    cores_per_llc: int = 0  # cores of one node and package in id order; 0: all of the package
    llcs: tuple[CpuSet, ...] = ()  # instead of cores_per_llc: each last-level cache's CPUs
    nodes: tuple[NodeFacts, ...] = ()  # none: a kernel without NUMA
    distances: tuple[DistanceFacts, ...] = ()  # a later one wins; 20 where there is none
    memory_bytes: int = 0  # of the machine, where it has no nodes
    possible_cpus: CpuSet | None = None  # None: 0 to the highest CPU
    possible_nodes: NodeSet | None = None  # None: 0 to the highest node
    offline_cpus: CpuSet = CpuSet()
    isolated_cpus: CpuSet = CpuSet()
    kernel_max: int = 8191  # the highest CPU id that the kernel is built for
    numa_balancing: int | None = None  # kernel.numa_balancing; None: no such file
    cards: tuple[CardFacts, ...] = ()
    nics: tuple[NicFacts, ...] = ()
    ub_devices: tuple[UbFacts, ...] = ()
    functions: tuple[PciFacts, ...] = ()  # other PCI functions, e.g. NVSwitches
    bridges: tuple[BridgeFacts, ...] = ()
    cgroups: tuple[CgroupFacts, ...] = ()
    own_cgroup: str = "/"  # the cgroup of the process that looks
    absent: tuple[str, ...] = ()  # patterns of files that this machine lacks; '*' matches '/' too

    @property
    def cpus(self) -> CpuSet:
        """Every CPU, offline ones included."""
        return union_cpus(package.cpus for package in self.packages)

    @property
    def online_cpus(self) -> CpuSet:
        """Every online CPU."""
        return self.cpus - self.offline_cpus

    @property
    def node_ids(self) -> NodeSet:
        """Every node."""
        return NodeSet(node.id for node in self.nodes)

    @property
    def pci_functions(self) -> tuple[PciFacts, ...]:
        """Every PCI function that is no bridge."""
        return (*self.cards, *self.nics, *self.functions)

    def find_package(self, cpu: int) -> PackageFacts | None:
        """The package of a CPU."""
        return next((package for package in self.packages if cpu in package.cpus), None)

    def find_node(self, cpu: int) -> NodeFacts | None:
        """The node of a CPU."""
        return next((node for node in self.nodes if cpu in node.cpus), None)

    def cores(self) -> tuple[CpuSet, ...]:
        """Each core's CPUs, offline ones included, by lowest CPU.

        1. The cores in `core_cpus`.
        2. Of the CPUs left, in ascending order, each one not yet taken opens a core of itself and
           the CPUs 1, 2, ... `threads` - 1 strides on.
        """
        found = list(self.core_cpus)
        rest = set(self.cpus - union_cpus(found))
        steps = range(0, self.threads * self.sibling_stride or 1, self.sibling_stride or 1)
        for cpu in sorted(rest):
            if cpu in rest:
                members = [cpu + step for step in steps if cpu + step in rest]
                rest.difference_update(members)
                found.append(CpuSet(members))
        return tuple(sorted(found, key=lambda core: core.first))

    def last_level_caches(self) -> tuple[CpuSet, ...]:
        """The CPUs of each last-level cache, offline ones included.

        `llcs` as they are; else the cores of each node of each package, `cores_per_llc` at a time;
        else each package's CPUs.
        """
        if self.llcs:
            return self.llcs
        if not self.cores_per_llc:
            return tuple(package.cpus for package in self.packages)
        package_of = {cpu: index for index, one in enumerate(self.packages) for cpu in one.cpus}
        node_of = {cpu: node.id for node in self.nodes for cpu in node.cpus}
        places: dict[tuple[int, int], list[CpuSet]] = defaultdict(list)
        for core in self.cores():
            places[package_of[core.first], node_of.get(core.first, -1)].append(core)
        size = self.cores_per_llc
        return tuple(
            union_cpus(cores[start : start + size])
            for cores in places.values()
            for start in range(0, len(cores), size)
        )

    def distance_rows(self) -> dict[int, list[int]]:
        """Node -> its distance to each node, both in ascending order."""
        ids = sorted(node.id for node in self.nodes)
        place = {node: index for index, node in enumerate(ids)}
        rows = {node: [REMOTE_DISTANCE] * len(ids) for node in ids}
        for rule in self.distances:
            for one in rule.from_nodes:
                for other in rule.to_nodes:
                    rows[one][place[other]] = rule.value
                    rows[other][place[one]] = rule.value
        for node, row in rows.items():
            row[place[node]] = LOCAL_DISTANCE
        return rows

    def all_bridges(self) -> Iterator[tuple[tuple[PciAddress, ...], BridgeFacts]]:
        """(path from the host bridge down to it, what it is) of every bridge in a function's path."""
        known = {bridge.address: bridge for bridge in self.bridges}
        nodes: dict[tuple[PciAddress, ...], set[int | None]] = defaultdict(set)
        for function in self.pci_functions:
            for end in range(1, len(function.path)):
                nodes[function.path[:end]].add(function.numa_node)
        for path, below in nodes.items():
            agreed = below.pop() if len(below) == 1 else None
            yield path, known.get(path[-1]) or BridgeFacts(address=path[-1], numa_node=agreed)
