"""Whose cores interrupts land on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from provisioner.idset import CpuSet, IdSet, union_cpus
from provisioner.locality import Locality, find_locality
from provisioner.pci import PciAddress, find_pci_address
from provisioner.plan import Note, Plan, Rank
from provisioner.setting_notes import name_some
from provisioner.settings import Interrupt, Irqbalance
from provisioner.topology import Machine


def named_ranks(plan: Plan) -> Iterator[tuple[str, Rank]]:
    """(name for people, rank) of every rank."""
    for service in plan.services:
        of = f" of service {service.name}" if len(plan.services) > 1 else ""
        for rank in service.ranks:
            yield f"rank {rank.rank}{of}", rank


class _Device(NamedTuple):
    """A PCI function that ranks use, or none does."""

    label: str
    ranks: tuple[str, ...]  # for people
    own: CpuSet  # all of theirs


def find_stray_interrupts(
    machine: Machine,
    interrupts: Mapping[PciAddress, tuple[Interrupt, ...]],
    plan: Plan,
) -> Iterator[Note]:
    """The notes on interrupts that land on cores of ranks which do not use their device, or off its node.

    Args:
        machine: the host.
        interrupts: those of its cards and network devices.
        plan: whose CPUs are the ranks'.
    """
    devices = _find_devices(machine, plan)
    strays: list[str] = []
    stray_cpus = CpuSet()
    for address, listed in interrupts.items():
        device = devices.get(address)
        used = [one for one in listed if one.cpus]
        own = device.own if device is not None else CpuSet()
        foreign = plan.assigned_cpus - own
        hits = [one for one in used if not one.cpus.isdisjoint(foreign)]
        if device is None or not device.ranks:
            if hits:
                strays.append(device.label if device is not None else str(address))
                stray_cpus |= union_cpus(one.cpus for one in hits) & foreign
            continue
        near = _node_cpus(machine, address)
        # On the node, where no rank is; else on the rank's own.
        better = (near & plan.system_cpus) or (near & own) or own
        far = [one for one in used if near and one.cpus.isdisjoint(near)]
        if hits:
            there = union_cpus(one.cpus for one in hits) & foreign
            yield Note(
                "foreign_interrupts",
                f"{len(hits)} of {len(used)} interrupts of {device.label}, used by {name_some(device.ranks)}, land on "
                f"CPUs {there} of {name_some(_ranks_on(plan, there))}.",
                _how_to_move(hits, better),
            )
        elif far:
            yield Note(
                "remote_interrupts",
                f"{len(far)} of {len(used)} interrupts of {device.label}, used by {name_some(device.ranks)}, land on "
                f"CPUs {union_cpus(one.cpus for one in far)}, off its NUMA node.",
                _how_to_move(far, better),
            )
    if strays:
        yield Note(
            "stray_interrupts",
            f"Interrupts of {name_some(strays, 4)}, which no rank uses, land on CPUs {stray_cpus} of "
            f"{name_some(_ranks_on(plan, stray_cpus), 4)}.",
            _how_to_move((), plan.system_cpus) if plan.system_cpus else _RESERVE,
        )


_RESERVE = "Keep cores for the system (reserve_cores=), and send them there"


def _how_to_move(interrupts: Sequence[Interrupt], cpus: CpuSet) -> str:
    which = (
        f" for N of {IdSet(one.number for one in interrupts if one.number <= 65535)}"
        if interrupts
        else ""
    )
    return (
        f"Send them to CPUs {cpus}: echo {cpus} > /proc/irq/N/smp_affinity_list{which}; "
        "irqbalance would move them again unless it is told not to"
    )


def _find_devices(machine: Machine, plan: Plan) -> dict[PciAddress, _Device]:
    """The cards and network devices by address, with the ranks that use each."""
    by_name = {name: nic.address for nic in machine.nics for name in nic.rdma_names}
    found = {
        nic.address: _Device(_label(nic.name, nic.address), (), CpuSet()) for nic in machine.nics
    }
    for card in machine.accelerators:
        if card.address is not None:
            found[card.address] = _Device(f"card {card.name}", (), CpuSet())
    for label, rank in named_ranks(plan):
        used = [find_pci_address(device) for device in rank.devices]
        for address in (*used, *(by_name.get(name) for name in rank.nics)):
            if address is not None and address in found:
                known = found[address]
                found[address] = known._replace(
                    ranks=(*known.ranks, label), own=known.own | rank.cpus
                )
    return found


def _label(name: str | None, address: PciAddress) -> str:
    return f"{name} ({address})" if name is not None else str(address)


def _ranks_on(plan: Plan, cpus: CpuSet) -> list[str]:
    return [label for label, rank in named_ranks(plan) if not rank.cpus.isdisjoint(cpus)]


def _node_cpus(machine: Machine, address: PciAddress) -> CpuSet:
    locality = find_locality(machine, address)
    if not isinstance(locality, Locality):
        return CpuSet()
    return union_cpus(machine.node(node).cpus for node in locality.nodes)


def note_irqbalance(machine: Machine, daemon: Irqbalance, plan: Plan) -> Iterator[Note]:
    """The note on irqbalance where it may move interrupts to the ranks' CPUs."""
    # Without settings it keeps off isolated CPUs by itself, and with them off those alone.
    banned = machine.isolated_cpus if daemon.banned is None else daemon.banned
    free = plan.assigned_cpus - banned
    if not free:
        return
    ban = plan.assigned_cpus | machine.isolated_cpus
    said = "" if daemon.banned is None else f", banned from CPUs {daemon.banned or 'none'}"
    yield Note(
        "irqbalance",
        f"irqbalance runs{said} and may move any interrupt to CPUs {free} of the ranks.",
        f"Set IRQBALANCE_BANNED_CPULIST={ban} in {daemon.settings} and restart it"
        if plan.system_cpus
        else "Keep cores for the system (reserve_cores=), then ban it from the ranks' CPUs by "
        f"IRQBALANCE_BANNED_CPULIST= in {daemon.settings}, or stop it",
    )
