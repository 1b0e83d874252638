"""The ranks of a service: each one's cards, cores, memory nodes and network devices. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from provisioner.errors import Problem
from provisioner.idset import CpuSet, NodeSet, union_cpus, union_nodes
from provisioner.locality import find_memory_nodes, nearest
from provisioner.nearness import rdma_names
from provisioner.plan import Alignment, Rank, Service
from provisioner.plan_notes import rank_notes
from provisioner.request import PlacementRequest, ServiceRequest
from provisioner.shares import Place, Shares
from provisioner.topology import Accelerator, Core, Machine, Nic


class RankBuilder(NamedTuple):
    """What the ranks of every service are built from."""

    machine: Machine
    request: PlacementRequest
    places: Mapping[str, Place]
    shares: Shares
    nics: Mapping[str, Sequence[Nic]]  # each card's RDMA functions, by the card's name

    def service(
        self, service: ServiceRequest, cards: Sequence[Accelerator], problems: list[Problem]
    ) -> Service:
        """The service with its ranks; ranks that can't be are added to the problems."""
        step = service.devices_per_rank
        groups = [cards[start : start + step] for start in range(0, len(cards), step)]
        ranks = tuple(
            self._rank(service, number, group, problems) for number, group in enumerate(groups)
        )
        return Service(
            service.name,
            f"{service.name}.slice",
            ranks,
            service.memory,
            service.visible_devices,
            service.worker,
            service.memory_need_bytes,
            service.nic_environment,
        )

    def _rank(
        self,
        service: ServiceRequest,
        number: int,
        cards: Sequence[Accelerator],
        problems: list[Problem],
    ) -> Rank:
        machine = self.machine
        places = [self.places[card.name] for card in cards]
        share = union_cpus(self.shares.cpus.get(card.name, CpuSet()) for card in cards)
        cores = machine.cores_of(share)
        main, compiling = self._split(service, number, cores, problems)
        main_cpus, compile_cpus = self._cpus(main, share), self._cpus(compiling, share)
        lent = union_nodes(self.shares.lent_nodes.get(card.name, NodeSet()) for card in cards)
        cpu_nodes = union_nodes(place.cpu_nodes for place in places)
        memory_nodes = NodeSet()
        if service.memory != "off":
            memory_nodes = self._memory_nodes(service, number, places, cpu_nodes | lent, problems)
        # By address: a rank's cards may share a function.
        nics = {nic.address: nic for card in cards for nic in self.nics[card.name]}.values()
        ports = {
            name: numbers
            for nic in nics
            for name, numbers in zip(nic.rdma_names, nic.ports, strict=False)
        }
        names = rdma_names(nics)
        numbers = tuple(number for card in cards for number in card.runtime_numbers)
        indexes = tuple(card.index for card in cards)
        cpus = main_cpus | compile_cpus
        alignment = _alignment(machine, cores, cpus, cpu_nodes, cpu_nodes | lent, memory_nodes)
        return Rank(
            number,
            f"{service.name}-rank{number}.slice",
            tuple(card.name for card in cards),
            indexes,
            cards[0].vendor,
            cpu_nodes | lent,
            memory_nodes,
            cpus,
            main_cpus,
            compile_cpus,
            len(main),
            names,
            alignment,
            rank_notes(
                machine, self.request, service, number, places, cpus, cpu_nodes, lent, memory_nodes
            ),
            tuple(place.locality.source for place in places),
            () if numbers == indexes else numbers,
            tuple(card.module for card in cards if card.module is not None),
            tuple(f"{name}:{port}" for name in names for port in ports.get(name, ())),
        )

    def _cpus(self, cores: Sequence[Core], share: CpuSet) -> CpuSet:
        """The CPUs of a rank's cores: within its share, and of each core one alone under smt = first."""
        if self.request.smt == "first":
            return CpuSet((core.cpus & share).first for core in cores)
        return union_cpus(core.cpus & share for core in cores)

    def _split(
        self, service: ServiceRequest, number: int, cores: Sequence[Core], problems: list[Problem]
    ) -> tuple[Sequence[Core], Sequence[Core]]:
        """Main and compile cores: the compile budget is cut from the end of the share."""
        budget = service.compile_cores
        if not budget:
            return cores, ()
        if len(cores) <= budget:
            problems.append(
                Problem(
                    "share_too_small",
                    f"service '{service.name}': compile_cores= is {budget}, and the share of rank {number} has "
                    f"{len(cores)} {'core' if len(cores) == 1 else 'cores'}: expected more than {budget}, "
                    "so that main threads keep one",
                    f"Lower compile_cores= to {max(len(cores) - 1, 0)} or less",
                )
            )
            return cores, ()
        return cores[:-budget], cores[-budget:]

    def _memory_nodes(
        self,
        service: ServiceRequest,
        number: int,
        places: Sequence[Place],
        cpu_nodes: NodeSet,
        problems: list[Problem],
    ) -> NodeSet:
        """The rank's memory nodes: ordinary memory nearest to each CPU node, and other kinds asked for."""
        machine = self.machine
        found = NodeSet()
        if "dram" in service.memory_kinds:
            found |= union_nodes(find_memory_nodes(machine, node) for node in cpu_nodes)
        for kind in service.memory_kinds:
            if kind == "dram":
                continue
            of_kind = (
                NodeSet(node.id for node in machine.nodes if node.kind == kind)
                & machine.allowed_nodes
            )
            if kind == "gpu":
                found |= of_kind & union_nodes(place.card.memory_nodes for place in places)
            elif of_kind:
                found |= union_nodes(nearest(machine, node, of_kind) for node in cpu_nodes)
        if not found:
            names = ", ".join(place.card.name for place in places)
            unknown = [node for node in cpu_nodes if machine.node(node).kind is None]
            why = (
                f"nothing says whether NUMA node {NodeSet(unknown)} has memory"
                if unknown
                else f"no allowed NUMA node has memory of kind {', '.join(service.memory_kinds)} "
                f"(allowed are {machine.allowed_nodes or 'none'})"
            )
            problems.append(
                Problem(
                    "no_memory_node",
                    f"service '{service.name}': rank {number} ({places[0].card.noun} {names}): {why}",
                    'Set memory = "off" to plan CPUs alone, or widen the cpuset\'s memory nodes',
                )
            )
        return found


def _alignment(
    machine: Machine,
    cores: Sequence[Core],
    cpus: CpuSet,
    local_nodes: NodeSet,
    cpu_nodes: NodeSet,
    memory_nodes: NodeSet,
) -> Alignment:
    """How the CPUs and the memory of a rank lie.

    Args:
        machine: the machine.
        cores: the rank's cores.
        cpus: its CPUs.
        local_nodes: the CPU nodes of its cards.
        cpu_nodes: those, and the nodes that lent to it.
        memory_nodes: its memory nodes.
    """
    caches = {core.llc for core in cores}
    mine = {core.id for core in cores}
    contiguous = True
    for node in cpu_nodes:
        positions = [at for at, core in enumerate(machine.node_cores(node)) if core.id in mine]
        contiguous &= not positions or positions[-1] - positions[0] + 1 == len(positions)
    gaps = [machine.distance(cpu_node, node) for cpu_node in cpu_nodes for node in memory_nodes]
    known = [gap for gap in gaps if gap is not None]
    return Alignment(
        whole_cores=all(core.cpus <= cpus for core in cores),
        local=all(core.node in local_nodes for core in cores),
        llc=None if None in caches else len(caches) <= 1,
        contiguous=contiguous,
        distance=max(known) if known and len(known) == len(gaps) else None,
    )
