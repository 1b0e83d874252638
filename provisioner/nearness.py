"""Which RDMA devices are nearest to a card, by the way through the PCI bus. Pure."""

from __future__ import annotations

from provisioner.idset import NodeSet
from provisioner.locality import Locality, find_locality
from provisioner.topology import Accelerator, Machine, Nic


def nearest_nics(machine: Machine, card: Accelerator, card_nodes: NodeSet) -> tuple[str, ...]:
    """The names of the RDMA devices nearest to a card, sorted; several where they are equally near.

    1. the deeper the lowest common bridge, the nearer: the same PCI switch;
    2. then the same host bridge: the same root;
    3. then the same NUMA node; beyond it nothing counts as near.

    Virtual functions and devices without an RDMA name are left out.
    """
    best: tuple[int, int] = (0, 0)
    found: list[str] = []
    for nic in machine.nics:
        if nic.is_virtual or not nic.rdma_names:
            continue
        rank = _nearness(machine, card, card_nodes, nic)
        if rank > best:
            best, found = rank, []
        if rank == best and rank > (0, 0):
            found += nic.rdma_names
    return tuple(sorted(found, key=_natural))


def _nearness(
    machine: Machine, card: Accelerator, card_nodes: NodeSet, nic: Nic
) -> tuple[int, int]:
    """(kind, depth): 3 same switch with the depth of the common bridge, 2 same root, 1 same node, 0 far."""
    card_path = machine.pci_path(card.address)
    nic_path = machine.pci_path(nic.address)
    if card_path and nic_path:
        common = {one.address for one in card_path[1:]} & {one.address for one in nic_path[1:]}
        if common:
            return (3, len(common))
        if (
            card_path[0].host_bridge is not None
            and card_path[0].host_bridge == nic_path[0].host_bridge
        ):
            return (2, 0)
    locality = find_locality(machine, nic.address)
    if isinstance(locality, Locality) and not locality.nodes.isdisjoint(card_nodes):
        return (1, 0)
    return (0, 0)


def _natural(name: str) -> tuple[str, int, str]:
    """mlx5_2 before mlx5_10."""
    stem = name.rstrip("0123456789")
    return (stem, int(name[len(stem) :] or 0), name)
