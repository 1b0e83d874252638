"""Trees on disk, machines at random and large machines, all made from facts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from provisioner.facts.values import (
    BridgeFacts,
    CardFacts,
    CgroupFacts,
    DistanceFacts,
    HostFacts,
    NicFacts,
    NodeFacts,
    PackageFacts,
)
from provisioner.idset import CpuSet, NodeSet, union_cpus
from provisioner.pci import PciAddress
from provisioner.root import MemoryRoot

GIB = 1 << 30

# (vendor id, device id, class) of a card of each vendor.
CARD_IDS = {
    "nvidia": (0x10DE, 0x2330, 0x030200),
    "amd": (0x1002, 0x74A1, 0x120000),
    "hygon": (0x1D94, 0x6320, 0x0B4000),
    "intel": (0x8086, 0x0BD5, 0x038000),
    "habana": (0x1DA3, 0x1060, 0x120000),
    "ascend": (0x19E5, 0xD802, 0x120000),
}


def write_tree(root: MemoryRoot, directory: Path) -> None:
    """Writes the files and links of a tree held in memory into a folder, which is made."""
    for folder in {os.path.dirname(path) for path in (*root.files, *root.links)}:
        os.makedirs(directory / folder, exist_ok=True)
    for path, text in root.files.items():
        with open(os.path.join(directory, path), "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
    for path, target in root.links.items():
        os.symlink(target, os.path.join(directory, path))


def add_files(
    root: MemoryRoot,
    files: Mapping[str, str],
    folders: Iterable[str] = (),
    links: Mapping[str, str] = {},
) -> MemoryRoot:
    """A tree with more files, empty folders and links; a PCI function's by its path below /sys/bus too."""

    def place(path: str) -> str:
        parts = path.split("/")
        real = root.resolve("/".join(parts[:5])) if path.startswith("sys/bus/pci/") else None
        return path if real is None else "/".join((real, *parts[5:]))

    return MemoryRoot(
        root.name,
        {**root.files, **{place(path): text for path, text in files.items()}},
        {**root.links, **links},
        (*root.empty_folders, *folders),
    )


def interrupt_files(number: int, cpus: str, address: PciAddress | str) -> dict[str, str]:
    """The files of a PCI function's interrupt that lands on these CPUs and may land on CPUs 0 to 7."""
    return {
        f"sys/bus/pci/devices/{address}/msi_irqs/{number}": "msix\n",
        f"proc/irq/{number}/effective_affinity_list": f"{cpus}\n",
        f"proc/irq/{number}/smp_affinity_list": "0-7\n",
    }


def made_host(cpus: int = 2048, nodes: int = 64, cards: int = 16, threads: int = 2) -> HostFacts:
    """A regular large machine: SMT siblings half the CPUs apart, two nodes a package, eight cores an LLC."""
    cores = cpus // threads
    each = cores // nodes

    def cpus_of(node: int) -> CpuSet:
        first = range(node * each, (node + 1) * each)
        return CpuSet(core + thread * cores for thread in range(threads) for core in first)

    sets = [cpus_of(node) for node in range(nodes)]
    packages = [union_cpus(sets[start : start + 2]) for start in range(0, nodes, 2)]
    return HostFacts(
        name=f"made-{cpus}",
        title=f"{cpus} CPUs, {nodes} nodes, {cards} cards",
        packages=tuple(PackageFacts(cpus=one, id=number) for number, one in enumerate(packages)),
        nodes=tuple(
            NodeFacts(id=node, cpus=one, memory_bytes=64 * GIB) for node, one in enumerate(sets)
        ),
        threads=threads,
        sibling_stride=cores if threads > 1 else 0,
        cores_per_llc=8,
        distances=tuple(
            DistanceFacts(from_nodes=NodeSet([node]), to_nodes=NodeSet([node + 1]), value=12)
            for node in range(0, nodes - 1, 2)
        ),
        cards=tuple(
            CardFacts(
                path=(PciAddress(number, 0, 1, 0), PciAddress(number, 1, 0, 0)),
                device=0x2330,
                numa_node=number * nodes // cards,
                model="made",
            )
            for number in range(cards)
        ),
        nics=tuple(
            NicFacts(
                path=(PciAddress(number, 0, 1, 0), PciAddress(number, 2, 0, 0)),
                numa_node=number * nodes // cards,
                rdma=(f"mlx5_{number}",),
            )
            for number in range(cards)
        ),
    )


@st.composite
def host_facts(draw: st.DrawFn) -> HostFacts:
    """Machines of up to 96 CPUs, 6 nodes and 10 cards with the oddities of real ones.

    SMT of 1, 2 and 4 with siblings beside each other or far apart, hybrid cores, sparse CPU and node
    ids, nodes without CPUs or memory, GPU memory, bridges that know a node or not, cards that do
    not, NICs beside cards, offline and isolated CPUs, a ceiling that cuts cores, and PCI domains of
    32 bits.
    """
    threads = draw(st.sampled_from([1, 2, 2, 4]))
    node_ids = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=4)))
    core_counts = [draw(st.integers(1, 6)) for _ in node_ids]
    cores, base = _number_cores(draw, sum(core_counts), threads)
    if threads > 1 and draw(st.booleans()):  # hybrid: some cores without SMT
        plain = draw(st.sets(st.integers(0, len(cores) - 1), max_size=len(cores) // 2))
        cores = [CpuSet([core.first]) if at in plain else core for at, core in enumerate(cores)]
    order = draw(st.permutations(range(len(cores)))) if draw(st.booleans()) else range(len(cores))
    shuffled = [cores[at] for at in order]
    node_cores: list[list[CpuSet]] = []
    for count in core_counts:
        node_cores.append(shuffled[:count])
        shuffled = shuffled[count:]
    nodes = [
        NodeFacts(
            id=node,
            cpus=union_cpus(members),
            memory_bytes=draw(st.sampled_from([0, 16, 64, 64])) * GIB,
        )
        for node, members in zip(node_ids, node_cores, strict=True)
    ]
    gpu_nodes = sorted(draw(st.sets(st.integers(20, 25), max_size=2)))
    nodes += [
        NodeFacts(id=node, memory_bytes=draw(st.sampled_from([0, 8])) * GIB) for node in gpu_nodes
    ]
    if not any(node.memory_bytes for node in nodes):  # the kernel itself lives somewhere
        nodes[0] = replace(nodes[0], memory_bytes=64 * GIB)
    card_memory = [node.id for node in nodes if node.memory_bytes and not node.cpus]
    cpus = union_cpus(cores)
    cards = _draw_cards(draw, node_ids, gpu_nodes, card_memory, union_cpus(node_cores[0]))
    nics = _draw_nics(draw, cards, node_ids)
    bridges = {path: None for card in cards for path in card.bridges}
    offline = draw(st.sets(st.sampled_from(list(cpus)), max_size=len(cpus) // 4))
    offline -= {cores[0].first}  # one CPU is always online
    cut = draw(st.sets(st.sampled_from(list(cpus)), max_size=len(cpus) // 4))
    return HostFacts(
        name="drawn",
        title="a machine at random",
        packages=tuple(
            PackageFacts(cpus=union_cpus(members), id=number)
            for number, members in enumerate(
                _pairs(node_cores) if draw(st.booleans()) else node_cores
            )
        ),
        nodes=tuple(nodes),
        core_cpus=tuple(cores),
        llcs=tuple(union_cpus(group) for members in node_cores for group in _pairs_of(members)),
        distances=tuple(
            DistanceFacts(
                from_nodes=NodeSet([a.id]),
                to_nodes=NodeSet([b.id]),
                value=draw(st.sampled_from([12, 20, 32])),
            )
            for at, a in enumerate(nodes)
            for b in nodes[at + 1 :]
        ),
        possible_cpus=CpuSet(range(base + cpus.last + 1)),
        offline_cpus=CpuSet(offline),
        isolated_cpus=CpuSet(draw(st.sets(st.sampled_from(list(cpus)), max_size=2))),
        numa_balancing=draw(st.sampled_from([None, 0, 1])),
        cards=tuple(cards),
        nics=tuple(nics),
        bridges=tuple(
            BridgeFacts(address=address, numa_node=draw(st.sampled_from([None, *node_ids])))
            for address in bridges
        ),
        cgroups=(CgroupFacts(path="/", cpus=cpus - CpuSet(offline) - CpuSet(cut)),)
        if draw(st.booleans()) and cpus - CpuSet(offline) - CpuSet(cut)
        else (),
    )


def _number_cores(draw: st.DrawFn, count: int, threads: int) -> tuple[list[CpuSet], int]:
    """The cores' CPU ids, and the lowest: siblings in a row or a stride apart, from any base on."""
    base = draw(st.sampled_from([0, 0, 0, 8]))
    if draw(st.booleans()):
        return [
            CpuSet(range(base + at * threads, base + (at + 1) * threads)) for at in range(count)
        ], base
    return [
        CpuSet(base + at + thread * count for thread in range(threads)) for at in range(count)
    ], base


def _draw_cards(
    draw: st.DrawFn,
    node_ids: list[int],
    gpu_nodes: list[int],
    card_memory: list[int],
    some: CpuSet,
) -> list[CardFacts]:
    domain = draw(st.sampled_from([0, 0, 1, 0x10000, 0xDEADBEEF]))
    vendors = draw(st.sampled_from([("nvidia",), ("nvidia",), tuple(CARD_IDS), ("amd",)]))
    cards = []
    for number in range(draw(st.integers(1, 10))):
        node = draw(st.sampled_from([*node_ids, *node_ids, None]))
        if gpu_nodes and draw(st.integers(0, 9)) == 0:
            node = gpu_nodes[0]
        above = (PciAddress(domain, 2 * number, 1, 0),) if draw(st.booleans()) else ()
        vendor = draw(st.sampled_from(vendors))
        vendor_id, device, pci_class = CARD_IDS[vendor]
        cards.append(
            CardFacts(
                path=(*above, PciAddress(domain, 2 * number + 1, 0, 0)),
                vendor=vendor_id,
                device=device,
                pci_class=pci_class,
                partitions=draw(st.sampled_from([1, 1, 8])) if vendor == "amd" else 1,
                numa_node=node,
                local_cpus=draw(st.sampled_from([None, some])) if node is None else None,
                memory_node=card_memory[number]
                if vendor == "nvidia" and number < len(card_memory)
                else None,
                has_driver=True,
                model="made",
            )
        )
    return cards


def _draw_nics(draw: st.DrawFn, cards: list[CardFacts], node_ids: list[int]) -> list[NicFacts]:
    """NICs, each below the bridges of a card that has some."""
    chosen = [card for card in cards if draw(st.booleans()) and card.bridges][:3]
    return [
        NicFacts(
            path=(*card.bridges, card.address._replace(device=1)),
            numa_node=draw(st.sampled_from([card.numa_node, *node_ids])),
            rdma=(f"mlx5_{number}",),
            net=(f"eth{number}",) if draw(st.booleans()) else (),
        )
        for number, card in enumerate(chosen)
    ]


def _pairs(groups: list[list[CpuSet]]) -> list[list[CpuSet]]:
    """Neighbouring lists joined two by two."""
    return [
        [*groups[at], *(groups[at + 1] if at + 1 < len(groups) else [])]
        for at in range(0, len(groups), 2)
    ]


def _pairs_of(members: list[CpuSet]) -> list[list[CpuSet]]:
    """The members in twos."""
    return [members[at : at + 2] for at in range(0, len(members), 2)]
