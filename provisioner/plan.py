"""A plan: which cores and which memory each rank gets, and what is to be said about it. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from provisioner.idset import CpuSet, NodeSet, union_cpus, union_nodes
from provisioner.request import MemoryMode, Visible, WorkerRequest
from provisioner.topology import NodeSource


@dataclass(frozen=True, slots=True)
class Note:
    """Something about a plan, or about its machine, that a person should know."""

    code: str  # stable, snake_case
    message: str  # a sentence
    hint: str = ""  # an action


@dataclass(frozen=True, slots=True)
class Alignment:
    """How a rank's CPUs and memory lie; None where the machine does not say."""

    whole_cores: bool  # every online SMT sibling of each core is in the set
    local: bool  # every CPU is on a CPU node of the rank's cards
    llc: bool | None  # all CPUs share one last-level cache
    contiguous: bool  # no core of its nodes lies between two of its cores, in (LLC, core) order
    distance: int | None  # the largest from its CPU nodes to its memory nodes; 10 is local


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker's place."""

    rank: int
    slice: str  # unit name
    devices: tuple[str, ...]  # cards by PCI address
    device_indexes: tuple[int, ...]  # their physical card numbers
    vendor: str  # of its cards
    cpu_nodes: NodeSet
    memory_nodes: NodeSet  # empty where memory= is off
    cpus: CpuSet
    main_cpus: CpuSet
    compile_cpus: CpuSet
    main_cores: int  # number of cores in main_cpus
    nics: tuple[str, ...]  # RDMA devices nearest to its cards
    alignment: Alignment
    notes: tuple[Note, ...] = ()
    node_sources: tuple[NodeSource, ...] = ()  # what said each card's NUMA node, as `devices`
    runtime_numbers: tuple[int, ...] = ()  # the vendor's runtime's; none: `device_indexes`
    device_modules: tuple[int, ...] = ()  # places on the board, of cards that are named by them
    nic_ports: tuple[str, ...] = ()  # 'mlx5_0:1', for each of `nics` that says its ports

    @property
    def visible_numbers(self) -> tuple[int, ...]:
        """How the vendor's runtime numbers the rank's cards: one for each, or for each partition."""
        return self.runtime_numbers or self.device_indexes


@dataclass(frozen=True, slots=True)
class Service:
    """One service's ranks."""

    name: str
    slice: str  # unit name
    ranks: tuple[Rank, ...]
    memory: MemoryMode
    visible_devices: Visible
    worker: WorkerRequest | None
    memory_need_bytes: int | None = None  # that each rank needs on its nodes; None: not stated
    nic_environment: bool = False  # name the RDMA devices to NCCL and UCX

    @property
    def cpus(self) -> CpuSet:
        """The union of its ranks' CPUs."""
        return union_cpus(rank.cpus for rank in self.ranks)

    @property
    def memory_nodes(self) -> NodeSet:
        """The union of its ranks' memory nodes."""
        return union_nodes(rank.memory_nodes for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement of every service on one machine."""

    fingerprint: str  # of the machine, 'sha256:' and 64 hex digits
    within: str  # the cgroup whose effective cpuset bounds the plan: root, self or a path
    services: tuple[Service, ...]
    reserved_cpus: CpuSet
    unassigned_cpus: CpuSet  # allowed whole cores that no rank has and that are not reserved
    confine: bool  # keep the system's own slices on the reserved and unassigned cores
    notes: tuple[Note, ...]

    @property
    def system_cpus(self) -> CpuSet:
        """Where the system's own slices are kept when `confine` is asked for."""
        return self.reserved_cpus | self.unassigned_cpus

    @property
    def assigned_cpus(self) -> CpuSet:
        """The union of all ranks' CPUs."""
        return union_cpus(service.cpus for service in self.services)
