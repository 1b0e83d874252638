"""From a machine and a request to a plan, or to every reason why there is none. Pure.

No clock, no environment, no file: the same machine and request give the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from provisioner.errors import EXIT_FAILED, EXIT_USAGE, ParseError, Problem, ProblemsError
from provisioner.fingerprint import machine_fingerprint
from provisioner.idset import CpuSet, union_cpus
from provisioner.nearness import share_nics
from provisioner.plan import Plan, Service
from provisioner.plan_notes import placement_notes
from provisioner.ranks import RankBuilder
from provisioner.request import (
    PlacementRequest,
    ServiceRequest,
    check_request,
    parse_card,
    parse_card_name,
)
from provisioner.shares import (
    divide_cores,
    find_places,
)
from provisioner.topology import Accelerator, Machine
from provisioner.usable import UsableCores, find_usable_cores


def make_plan(machine: Machine, request: PlacementRequest) -> Plan:
    """The plan for a machine.

    Raises ProblemsError with every reason at once if the request contradicts itself, or the
    machine can't serve it.
    """
    problems = check_request(request)
    # What contradicts itself whatever the machine is wrong input; the rest is a refusal.
    exit_status = EXIT_USAGE if problems else EXIT_FAILED
    stated = _check_locality(machine, request, problems)
    chosen = _choose_cards(machine, request, problems)
    _check_reserve(machine, request, problems)
    places, unplaced = find_places(machine, stated)
    problems += unplaced
    if problems:
        raise ProblemsError(problems, exit_status=exit_status)
    usable = find_usable_cores(machine, request)
    owners = {card.name: service.name for service, cards in chosen for card in cards}
    shares = divide_cores(machine, request, places, usable, owners)
    problems += shares.problems
    if problems:
        raise ProblemsError(problems)
    nics = share_nics(
        machine,
        [(place.card, place.locality.nodes | place.cpu_nodes) for place in places],
        with_virtual=request.virtual_nics,
    )
    builder = RankBuilder(
        machine, request, {place.card.name: place for place in places}, shares, nics
    )
    services = tuple(builder.service(service, cards, problems) for service, cards in chosen)
    problems += _check_memory(machine, request, services)
    reserved = union_cpus(core.cpus for core in usable.reserved)
    assigned = union_cpus(service.cpus for service in services)
    unassigned = _unassigned(usable, assigned)
    if request.confine and not reserved | unassigned:
        problems.append(
            Problem(
                "nothing_to_confine_to",
                "confine= is set, and no core is reserved or unassigned to confine the system to",
                "Set reserve_cores= to 1 or more",
            )
        )
    if problems:
        raise ProblemsError(problems)
    return Plan(
        machine_fingerprint(machine),
        machine.ceiling.within,
        services,
        reserved,
        unassigned,
        request.confine,
        (
            *usable.notes,
            *shares.notes,
            *placement_notes(machine, request, places, services, usable),
        ),
    )


def _unassigned(usable: UsableCores, assigned: CpuSet) -> CpuSet:
    """The free cores that no rank has any CPU of."""
    return union_cpus(
        core.cpus
        for cores in usable.free.values()
        for core in cores
        if not core.cpus.bits & assigned.bits
    )


def _check_locality(
    machine: Machine, request: PlacementRequest, problems: list[Problem]
) -> dict[str, int]:
    """The operator's statements by card name; those about no card or no node become problems."""
    names = {card.name for card in machine.accelerators}
    stated: dict[str, int] = {}
    for text, node in request.locality.items():
        try:
            name = parse_card_name(text)
        except ParseError:
            name = text  # it names no card here either
        if name not in names:
            problems.append(
                Problem(
                    "no_such_card",
                    f"[locality] names '{text}', which is no card here: the cards are "
                    f"{', '.join(sorted(names)) or 'none'}",
                    "Take the address from provision topology",
                )
            )
        elif node >= 0 and machine.find_node(node) is None:
            problems.append(
                Problem(
                    "no_such_node",
                    f"[locality] '{text}' is {node}, and there is no such NUMA node: "
                    f"the machine has {machine.node_ids}",
                )
            )
        else:
            stated[name] = node
    return stated


def _check_reserve(machine: Machine, request: PlacementRequest, problems: list[Problem]) -> None:
    for setting, cpus in (
        ("reserve_cpus=", request.reserve_cpus),
        ("exclude_cpus=", request.exclude_cpus),
    ):
        strange = cpus - machine.online_cpus - machine.offline_cpus
        if strange:
            problems.append(
                Problem(
                    "no_such_cpu",
                    f"{setting} names CPUs {strange}, which the machine does not have: it has {machine.online_cpus}",
                )
            )


def _choose_cards(
    machine: Machine, request: PlacementRequest, problems: list[Problem]
) -> list[tuple[ServiceRequest, tuple[Accelerator, ...]]]:
    """Each service's cards in rank order."""
    if not machine.accelerators:
        problems.append(
            Problem(
                "no_card",
                "no accelerator was found: neither a vendor's driver, nor the PCI bus, nor /dev names one",
                "Check with lspci that the card is there (known are those of NVIDIA, AMD, Hygon, Intel, Habana "
                "and Ascend); provision plan --sample two-socket-8gpu shows a host that has some",
            )
        )
        return []
    chosen: list[tuple[ServiceRequest, tuple[Accelerator, ...]]] = []
    owner: dict[str, str] = {}
    for service in request.services:
        cards = machine.accelerators
        if service.vendor is not None:
            cards = tuple(card for card in cards if card.vendor == service.vendor)
            if not cards:
                known = ", ".join(sorted({card.vendor for card in machine.accelerators}))
                problems.append(
                    Problem(
                        "no_card",
                        f"service '{service.name}': vendor= is '{service.vendor}', and the cards here are of {known}",
                        f"Take one of {known}",
                    )
                )
                continue
        if service.devices is not None:
            # The same text twice is check_request's to report.
            texts = dict.fromkeys(service.devices)
            found = [_find_card(cards, service, text, problems) for text in texts]
            cards = tuple(card for card in found if card is not None)
        for card in cards:
            if card.name in owner:
                again = owner[card.name] == service.name
                where = "it a second time" if again else f"service '{owner[card.name]}'"
                problems.append(
                    Problem(
                        "shared_card",
                        f"service '{service.name}': card {card.name} is also in {where}: "
                        "expected each card once",
                    )
                )
            owner[card.name] = service.name
        per_rank = service.devices_per_rank
        if per_rank >= 1 and len(cards) % per_rank:
            problems.append(
                Problem(
                    "uneven_ranks",
                    f"service '{service.name}': devices_per_rank= {per_rank} does not divide its {len(cards)} cards",
                    f"Take a divisor of {len(cards)}, or list the cards in devices=",
                )
            )
        vendors = sorted({card.vendor for card in cards})
        if len(vendors) > 1 and per_rank > 1:
            problems.append(
                Problem(
                    "mixed_ranks",
                    f"service '{service.name}': its cards are of {' and '.join(vendors)}, "
                    f"and ranks have {per_rank} cards each",
                    "Set vendor=, or list the cards of one vendor in devices=",
                )
            )
        chosen.append((service, cards))
    return chosen


def _find_card(
    cards: Sequence[Accelerator], service: ServiceRequest, text: str, problems: list[Problem]
) -> Accelerator | None:
    """The card, among those of the service's vendor, that a text of devices= names."""
    try:
        name = parse_card(text)
    except ParseError:
        return None  # check_request has said so
    found = [
        card for card in cards if name in (card.name, str(card.index), f"{card.vendor}{card.index}")
    ]
    if len(found) == 1:
        return found[0]
    where = f"service '{service.name}': devices= names '{text}', which is"
    if found:
        both = " and ".join(f"{card.name} of {card.vendor}" for card in found)
        problems.append(
            Problem("ambiguous_card", f"{where} {both}", "Give PCI addresses, or set vendor=")
        )
    else:
        last = max(card.index for card in cards)
        whose = "here" if service.vendor is None else f"of {service.vendor}"
        problems.append(
            Problem(
                "no_such_card",
                f"{where} no card {whose}: {'the only card is 0' if not last else f'the cards are 0 to {last}'}, "
                f"{', '.join(sorted(card.name for card in cards))}",
                "Take the address or the number from provision topology",
            )
        )
    return None


def _check_memory(
    machine: Machine, request: PlacementRequest, services: Sequence[Service]
) -> list[Problem]:
    """Whether the memory that ranks need fits on their nodes.

    For each set of nodes that some rank has: the needs of all ranks confined to those nodes must
    fit into them together.
    """
    needs = [
        (rank.memory_nodes, asked.memory_need_bytes, f"{service.name} rank {rank.rank}")
        for asked, service in zip(request.services, services, strict=True)
        if asked.memory_need_bytes is not None
        for rank in service.ranks
    ]
    problems: list[Problem] = []
    for nodes in sorted(
        {nodes for nodes, _, _ in needs if nodes}, key=lambda nodes: (len(nodes), str(nodes))
    ):
        inside = [(need, name) for within, need, name in needs if within and within <= nodes]
        sizes = [machine.node(node).memory_bytes for node in nodes]
        total = sum(need for need, _ in inside)
        if None in sizes:
            problems.append(
                Problem(
                    "memory_unknown",
                    f"memory_need= can't be checked: nothing says how large NUMA node {nodes} is",
                    "Leave memory_need= out, or record nodeN/meminfo too",
                )
            )
        elif total > (room := sum(size for size in sizes if size is not None)):
            names = ", ".join(name for _, name in inside)
            problems.append(
                Problem(
                    "memory_too_small",
                    f"NUMA node {nodes} is too small: {names} need {total} bytes ({_gib(total)}) together, "
                    f"and it has {room} ({_gib(room)})",
                    "Lower memory_need=, put fewer ranks there, or leave memory_need= out",
                )
            )
    return problems


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
