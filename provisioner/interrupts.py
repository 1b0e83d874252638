"""Whose cores interrupts land on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from provisioner.idset import CpuSet, union_cpus
from provisioner.locality import Locality, find_locality
from provisioner.pci import PciAddress, find_pci_address
from provisioner.plan import Note, Plan
from provisioner.sentences import name_some, named_ranks
from provisioner.settings import Interrupt, Irqbalance
from provisioner.topology import Machine


class Device(NamedTuple):
    """A PCI function that ranks use, or none does."""

    label: str
    ranks: tuple[str, ...]  # for people
    own: CpuSet  # all of theirs
    near: CpuSet  # of its NUMA nodes; empty: not known


def find_stray_interrupts(
    machine: Machine,
    interrupts: Mapping[PciAddress, tuple[Interrupt, ...]],
    plan: Plan,
    devices: Mapping[PciAddress, Device],
    *,
    is_balanced: bool,
) -> Iterator[Note]:
    """The notes on interrupts that land on cores of ranks which do not use their device, or off its node.

    Args:
        machine: the host.
        interrupts: those of its cards and network devices.
        plan: whose CPUs are the ranks'.
        devices: who uses what, as `find_devices` says.
        is_balanced: whether irqbalance runs.
    """
    strays: list[str] = []
    stray: list[Interrupt] = []
    for address, listed in interrupts.items():
        device = devices[address]
        used = [one for one in listed if one.cpus & machine.online_cpus]
        foreign = plan.assigned_cpus - device.own
        hits = [one for one in used if not one.cpus.isdisjoint(foreign)]
        if not device.ranks:
            if hits:
                strays.append(device.label)
                stray += hits
            continue
        # On the node, where no rank is; else on the rank's own.
        better = (device.near & plan.system_cpus) or (device.near & device.own) or device.own
        far = [one for one in used if device.near and one.cpus.isdisjoint(device.near)]
        who = f"of {device.label}, used by {name_some(device.ranks)},"
        if hits:
            there = union_cpus(one.cpus for one in hits) & foreign
            yield Note(
                "foreign_interrupts",
                f"{_count(hits, used)} {who} {_land(hits)} on CPUs {there} of {name_some(_ranks_on(plan, there), 4)}.",
                _how_to_move(hits, better, is_balanced=is_balanced),
            )
        elif far:
            yield Note(
                "remote_interrupts",
                f"{_count(far, used)} {who} {_land(far)} on CPUs {union_cpus(one.cpus for one in far)}, "
                "off its NUMA node.",
                _how_to_move(far, better, is_balanced=is_balanced),
            )
    if strays:
        there = union_cpus(one.cpus for one in stray) & plan.assigned_cpus
        land = "may land" if any(one.is_asked for one in stray) else "land"
        yield Note(
            "stray_interrupts",
            f"Interrupts of {name_some(strays, 4)}, which no rank uses, {land} on CPUs {there} of "
            f"{name_some(_ranks_on(plan, there), 4)}.",
            _how_to_move(stray, plan.system_cpus, is_balanced=is_balanced)
            if plan.system_cpus
            else "Keep cores for the system (reserve_cores=), and send them there",
        )


def _count(some: Sequence[Interrupt], every: Sequence[Interrupt]) -> str:
    """'The interrupt', 'All 4 interrupts' or '3 of 4 interrupts'."""
    if len(every) == 1:
        return "The interrupt"
    return (
        f"All {len(every)} interrupts"
        if len(some) == len(every)
        else f"{len(some)} of {len(every)} interrupts"
    )


def _land(interrupts: Sequence[Interrupt]) -> str:
    if any(one.is_asked for one in interrupts):
        return "may land"
    return "lands" if len(interrupts) == 1 else "land"


def _how_to_move(interrupts: Sequence[Interrupt], cpus: CpuSet, *, is_balanced: bool) -> str:
    numbers = " ".join(
        f"{first}" if first == last else f"{{{first}..{last}}}"
        for first, last in _runs(one.number for one in interrupts)
    )
    first = "Tell irqbalance to keep off, then send" if is_balanced else "Send"
    what = "it" if len(interrupts) == 1 else "them"
    return (
        f"{first} {what} to CPUs {cpus}, as root in bash: for n in {numbers}; do echo {cpus} > "
        "/proc/irq/$n/smp_affinity_list; done"
    )


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The maximal runs (first, last) of numbers, ascending."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def find_devices(machine: Machine, plan: Plan) -> dict[PciAddress, Device]:
    """The cards and network devices by address, with the ranks that use each."""
    by_name = {name: nic.address for nic in machine.nics for name in nic.rdma_names}
    found = {
        nic.address: Device(
            str(nic.address) if nic.name is None else f"{nic.name} ({nic.address})",
            (),
            CpuSet(),
            _node_cpus(machine, nic.address),
        )
        for nic in machine.nics
    }
    for card in machine.accelerators:
        if card.address is not None:
            found[card.address] = Device(f"card {card.name}", (), CpuSet(), CpuSet())
    for label, rank in named_ranks(plan):
        # What the plan says of a card's nodes may be the operator's word.
        near = machine.cpus_on(rank.cpu_nodes)
        for device in rank.devices:
            _add_rank(found, find_pci_address(device), label, rank.cpus, near)
        for name in rank.nics:
            _add_rank(found, by_name.get(name), label, rank.cpus, CpuSet())
    return found


def _add_rank(
    found: dict[PciAddress, Device],
    address: PciAddress | None,
    label: str,
    cpus: CpuSet,
    near: CpuSet,
) -> None:
    if address is not None and address in found:
        known = found[address]
        found[address] = Device(
            known.label, (*known.ranks, label), known.own | cpus, known.near | near
        )


def _ranks_on(plan: Plan, cpus: CpuSet) -> list[str]:
    return [label for label, rank in named_ranks(plan) if not rank.cpus.isdisjoint(cpus)]


def _node_cpus(machine: Machine, address: PciAddress) -> CpuSet:
    locality = find_locality(machine, address)
    if not isinstance(locality, Locality):
        return CpuSet()
    return machine.cpus_on(locality.nodes)


def note_irqbalance(machine: Machine, daemon: Irqbalance, plan: Plan) -> Iterator[Note]:
    """The note on irqbalance where it may move interrupts to the ranks' CPUs."""
    # Without settings it keeps off isolated CPUs by itself, and with them off those alone.
    banned = machine.isolated_cpus if daemon.banned is None else daemon.banned
    free = plan.assigned_cpus - banned
    if not free or not daemon.is_known:
        return
    ban = plan.assigned_cpus | banned | machine.isolated_cpus
    said = f", banned from CPUs {daemon.banned}," if daemon.banned else ""
    yield Note(
        "irqbalance",
        f"irqbalance runs{said} and may move any interrupt to CPUs {free} of the ranks.",
        f"Set IRQBALANCE_BANNED_CPULIST={ban} (and nohz_full CPUs, if there are) in {daemon.settings}, restart it"
        if plan.system_cpus
        else "Keep cores for the system (reserve_cores=), then ban it from the ranks' CPUs by "
        f"IRQBALANCE_BANNED_CPULIST= in {daemon.settings}, or stop it",
    )
