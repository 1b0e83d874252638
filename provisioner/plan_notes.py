"""What is to be said about a plan: sentences with a hint, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from provisioner.idset import CpuSet, NodeSet, union_cpus
from provisioner.oddities import find_oddities
from provisioner.plan import Note, Service
from provisioner.request import PlacementRequest, ServiceRequest
from provisioner.shares import Place
from provisioner.topology import Machine
from provisioner.usable import UsableCores


def placement_notes(
    machine: Machine,
    request: PlacementRequest,
    places: Sequence[Place],
    services: Sequence[Service],
    usable: UsableCores,
) -> tuple[Note, ...]:
    """The notes on the whole plan, besides those on cores and shares."""
    return (
        *find_oddities(machine, request.locality),
        *_card_notes(places, services),
        *_share_notes(request, services),
        *_idle_notes(machine, request, places, usable),
    )


def _card_notes(places: Sequence[Place], services: Sequence[Service]) -> Iterator[Note]:
    planned = {device for service in services for rank in service.ranks for device in rank.devices}
    hidden = [place.card.name for place in places if place.card.name not in planned]
    if hidden:
        yield Note(
            "cards_without_rank",
            f"Cards {', '.join(hidden)} are in no service; their shares stay unassigned.",
            "List them in a service's devices= to use them",
        )
    for service in services:
        yield from _vendor_notes(places, service)


def _vendor_notes(places: Sequence[Place], service: Service) -> Iterator[Note]:
    """What is special about the runtimes that count the service's cards."""
    ranks: dict[str, list[int]] = {}
    for rank in service.ranks:
        ranks.setdefault(rank.vendor, []).append(rank.rank)
    if len(ranks) > 1:
        parts = "; ".join(
            f"{vendor} has {'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
            for vendor, numbers in ranks.items()
        )
        yield Note(
            "mixed_vendors",
            f"Service '{service.name}' has cards of several vendors: {parts}. LOCAL_RANK counts each vendor's "
            "ranks from 0, as no runtime sees another vendor's cards.",
            "Plan a service for each vendor with vendor=, or choose one vendor with --vendor",
        )
    mine = {device for rank in service.ranks for device in rank.devices}
    unnumbered = [
        place.card.name
        for place in places
        if place.card.vendor == "ascend"
        and place.card.address is not None
        and not place.card.numbers
        and place.card.name in mine
    ]
    if len(unnumbered) > 1:
        yield Note(
            "npu_numbers",
            f"Nothing says which NPU number {', '.join(unnumbered)} have: the numbers in "
            "ASCEND_RT_VISIBLE_DEVICES are positions in PCI order, and the driver's are often others.",
            "Give --npu-smi FILE with what 'npu-smi info' prints",
        )
    for rank in service.ranks:
        mute = set(rank.nics) - {port.rpartition(":")[0] for port in rank.nic_ports}
        if service.nic_environment and mute:
            yield Note(
                "ports_unknown",
                f"Rank {rank.rank} of service '{service.name}': {', '.join(sorted(mute))} does not say its ports, "
                "and UCX_NET_DEVICES names ports: it is left out.",
                "Record /sys/class/infiniband/*/ports too",
            )


def _share_notes(request: PlacementRequest, services: Sequence[Service]) -> Iterator[Note]:
    for service in services:
        sizes: dict[int, list[int]] = {}
        for rank in service.ranks:
            sizes.setdefault(rank.main_cores, []).append(rank.rank)
        if len(sizes) > 1:
            parts = "; ".join(
                f"{cores} for rank {', '.join(str(rank) for rank in ranks)}"
                for cores, ranks in sorted(sizes.items())
            )
            yield Note(
                "uneven_shares",
                f"The ranks of service '{service.name}' have different numbers of main cores: {parts}.",
                "Ranks that move in step wait for the smallest; reserve cores where shares are larger, or live with it",
            )
    if request.smt == "first":
        yield Note(
            "idle_siblings",
            'One CPU of each core is used and its SMT siblings are left idle, as asked by smt = "first".',
        )


def _idle_notes(
    machine: Machine, request: PlacementRequest, places: Sequence[Place], usable: UsableCores
) -> Iterator[Note]:
    if request.policy == "card-range" or request.reach == "package":
        return
    with_cards = NodeSet(node for place in places for node in place.cpu_nodes)
    idle = NodeSet(node for node, cores in usable.free.items() if cores and node not in with_cards)
    if not idle:
        return
    cores = [core for node in idle for core in usable.free[node]]
    sizes = [machine.node(node).memory_bytes for node in idle]
    memory = (
        "memory of unknown size"
        if None in sizes
        else f"{sum(size for size in sizes if size is not None) / 2**30:.1f} GiB of memory"
    )
    subject, verb = ("NUMA nodes", "have") if len(idle) > 1 else ("NUMA node", "has")
    yield Note(
        "idle_nodes",
        f"{subject} {idle} {verb} no card: {len(cores)} cores ({union_cpus(core.cpus for core in cores)}) and "
        f"{memory} serve no rank.",
        'Set reach = "package" to lend them to the cards of the same package, or keep the system there'
        if _shares_package(machine, idle, with_cards)
        else "Keep the system there: no card is in their package",
    )


def _shares_package(machine: Machine, idle: NodeSet, others: NodeSet) -> bool:
    """Whether a node is in the package of one of the others, or nothing says that it is not."""
    packages = [machine.node_packages(node) for node in others]
    return any(
        not own or any(not one or own & one for one in packages)
        for own in map(machine.node_packages, idle)
    )


def rank_notes(
    machine: Machine,
    request: PlacementRequest,
    service: ServiceRequest,
    number: int,
    places: Sequence[Place],
    cpus: CpuSet,
    cpu_nodes: NodeSet,
    lent: NodeSet,
    memory_nodes: NodeSet,
) -> tuple[Note, ...]:
    """The notes on rank `number` of a service."""
    notes: list[Note] = []
    for place in places:
        card, noun, locality = place.card.name, place.card.noun, place.locality
        if locality.source not in {"numa_node", "driver"}:
            hint = (
                ""
                if locality.source == "locality"
                else f'[locality] "{card}" = {place.cpu_nodes.first} would state it'
            )
            notes.append(
                Note(
                    f"by_{locality.source}",
                    f"{noun} {card} is taken for local to node {locality.nodes}: {locality.evidence}.",
                    hint,
                )
            )
        if len(locality.nodes) > 1:
            notes.append(
                Note(
                    "several_nodes",
                    f"{noun} {card} is local to nodes {locality.nodes} and draws on each evenly.",
                )
            )
        notes += [
            Note(
                "node_without_cpus",
                f"{noun} {card}: its node {node} has no CPUs; those of node {place.cpu_nodes} serve it.",
            )
            for node in locality.nodes - place.cpu_nodes
        ]
    if len(places) > 1:
        hint = (
            'Set visible_devices = "rank" for engines that take the one card at entry LOCAL_RANK'
            if service.visible_devices == "service"
            else ""
        )
        notes.append(
            Note(
                "several_cards",
                f"The rank has the shares of its {len(places)} cards together, which are entries "
                f"{number * len(places)} to {(number + 1) * len(places) - 1} of the service's cards.",
                hint,
            )
        )
    notes += [
        Note(
            "partitions",
            f"{place.card.noun} {place.card.name} is cut into {len(place.card.numbers)} partitions: its runtime counts "
            f"{place.card.numbers[0]} to {place.card.numbers[-1]}, and here it is one card.",
            'Set visible_devices = "rank" for engines that take the one device at entry LOCAL_RANK'
            if service.visible_devices == "service"
            else "",
        )
        for place in places
        if len(place.card.numbers) > 1
    ]
    if lent:
        notes.append(
            Note(
                "lent_nodes",
                f"Nodes {lent} of the same package, which have no card, lend it cores and memory.",
            )
        )
    far = cpus - machine.cpus_on(cpu_nodes | lent)
    if far:
        notes.append(
            Note(
                "off_node",
                f"CPUs {far} are not on node {cpu_nodes} of its cards: cut by card number they lie elsewhere.",
                'Policy "exclusive" keeps each rank on its node',
            )
        )
    bare = NodeSet(node for node in cpu_nodes | lent if node not in memory_nodes)
    if service.memory != "off" and bare and memory_nodes:
        if not machine.node(bare.first).has_memory:
            why, hint = "has no memory", "Check the memory modules of the host"
        elif bare <= machine.allowed_nodes:
            kinds = ", ".join(service.memory_kinds)
            why, hint = f"has no memory of the kind asked for ({kinds})", ""
        else:
            why, hint = "may not be used for memory", "Widen the cpuset's memory nodes"
        notes.append(
            Note(
                "remote_memory", f"Node {bare} {why}; memory comes from node {memory_nodes}.", hint
            )
        )
    if request.policy == "node" and len(machine.accelerators) > 1:
        notes.append(
            Note(
                "shared_cores",
                'Its cores are shared with the service\'s other ranks on the same node, as asked by policy "node".',
            )
        )
    return tuple(notes)
