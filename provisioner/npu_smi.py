"""What `npu-smi` prints about Ascend NPUs, held against the machine. Pure.

The kernel says where an NPU's PCI function is, and not which number the driver gave it; `npu-smi
info` says that (its Bus-Id column), and `npu-smi info -t topo` near to which CPUs a number is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from provisioner.errors import InputError, ParseError, shorten
from provisioner.idset import CpuSet, NodeSet
from provisioner.locality import Locality, find_card_locality, nodes_of
from provisioner.pci import PciAddress, find_pci_address
from provisioner.topology import Accelerator, Machine

_VENDOR = "ascend"
_NAME = re.compile(r"(?:NPU|Phy-ID)([0-9]{1,4})", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)


class NpuTables(NamedTuple):
    """The two tables, by NPU number; each empty where the text has none."""

    addresses: Mapping[int, PciAddress]
    cpus: Mapping[int, CpuSet]


def parse_npu_smi(text: str) -> NpuTables:
    """The Bus-Id column of `npu-smi info` and the CPU affinity column of `npu-smi info -t topo`.

    A text may hold one of them or both, one after the other.

    Raises ParseError if it holds neither, a number twice, or a row that is no row of its table.
    """
    addresses: dict[int, PciAddress] = {}
    cpus: dict[int, CpuSet] = {}
    columns: int | None = None  # NPUs in the head of the topology table
    npu: int | None = None  # of the last row that begins an NPU
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            npu = _read_info_row(line, npu, addresses)
            continue
        words = line.split()
        names = [word for word in words if _NAME.fullmatch(word)]
        if words[-2:] == ["CPU", "Affinity"] and len(names) == len(words) - 2:
            columns = len(names)
        elif columns is not None and words and _NAME.fullmatch(words[0]):
            _read_topo_row(words, columns, cpus)
    if not addresses and not cpus:
        raise ParseError(
            "holds no table of NPUs: expected what 'npu-smi info' or 'npu-smi info -t topo' prints, "
            "the latter with its column 'CPU Affinity'"
        )
    return NpuTables(addresses, cpus)


def _read_info_row(line: str, npu: int | None, addresses: dict[int, PciAddress]) -> int | None:
    """Takes up a row's Bus-Id; returns the NPU that the rows after it belong to.

    An NPU has a row with its number, and one for each chip with the chip's number, on hosts with
    several chips an NPU the number among all of them, and the Bus-Id.
    """
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    numbers = cells[0].split()
    if not numbers or not _NUMBER.fullmatch(numbers[0]):
        return npu
    address = find_pci_address(cells[1]) if len(cells) > 1 else None
    if address is None:
        return int(numbers[0])
    number = int(numbers[1]) if len(numbers) > 1 and _NUMBER.fullmatch(numbers[1]) else npu
    if number is None:
        raise ParseError(
            f"row '{shorten(line.strip())}' has a Bus-Id, and no row of an NPU before it"
        )
    if number in addresses:
        raise ParseError(f"NPU {number} is there twice: at {addresses[number]} and {address}")
    if address in addresses.values():
        raise ParseError(f"Bus-Id {address} is there twice")
    addresses[number] = address
    return npu


def _read_topo_row(words: list[str], columns: int, cpus: dict[int, CpuSet]) -> None:
    """Takes up a row's CPUs: what stands behind the links, a blank after a comma or not."""
    match = _NAME.fullmatch(words[0])
    number = int(match[1]) if match is not None else -1
    if len(words) < columns + 2:
        raise ParseError(
            f"row '{words[0]}' has {len(words) - 1} columns: expected {columns} links and the CPUs"
        )
    if number in cpus:
        raise ParseError(f"row '{words[0]}' is there twice")
    cpus[number] = CpuSet.parse_list("".join(words[columns + 1 :]))


def apply_npu_smi(machine: Machine, text: str, place: str) -> tuple[Machine, Mapping[str, int]]:
    """The machine with the NPUs' own numbers, and the node of each card that says none itself.

    1. A Bus-Id gives its card the NPU's number.
    2. Without Bus-Ids, numbers whose CPUs lie on one node go to the cards on that node, in PCI
       order. Which of several on one node has which number makes no difference to placement.
    3. CPUs of an NPU that contradict the machine become an oddity of it, and change nothing.

    Args:
        machine: what discovery found.
        text: what npu-smi printed.
        place: the text's name, for messages.

    Raises InputError if the text is not npu-smi's, or is about other NPUs than the machine has.
    """
    try:
        tables = parse_npu_smi(text)
    except ParseError as error:
        raise InputError(f"{place}: {error.message}", error.hint) from error
    cards = [card for card in machine.accelerators if card.vendor == _VENDOR]
    if not cards:
        raise InputError(
            f"{place}: is about Ascend NPUs, and this machine has none",
            "Leave the option out, or give the machine's recording with --root",
        )
    oddities: list[str] = []
    numbers = _find_numbers(machine, cards, tables, place)
    numbered = {
        card.name: replace(card, numbers=(numbers[card.name],)) if card.name in numbers else card
        for card in cards
    }
    stated = _check_nodes(machine, tuple(numbered.values()), tables, place, oddities)
    return (
        replace(
            machine,
            accelerators=tuple(numbered.get(card.name, card) for card in machine.accelerators),
            oddities=(*machine.oddities, *oddities),
        ),
        stated,
    )


def _find_numbers(
    machine: Machine,
    cards: list[Accelerator],
    tables: NpuTables,
    place: str,
) -> dict[str, int]:
    """Card name -> NPU number, for all cards that have a PCI address or for none."""
    on_bus = {card.address: card.name for card in cards if card.address is not None}
    if not on_bus:
        return {}
    if tables.addresses:
        if set(tables.addresses.values()) != set(on_bus):
            theirs = ", ".join(str(one) for one in sorted(tables.addresses.values()))
            raise InputError(
                f"{place}: is another machine's, or cut: it names NPUs at {theirs}, and the PCI bus has them at "
                f"{', '.join(on_bus.values())}",
                "Give the whole of what npu-smi info prints on this machine",
            )
        return {on_bus[address]: number for number, address in tables.addresses.items()}
    theirs_by_node: dict[NodeSet, list[int]] = {}
    for number, cpus in sorted(tables.cpus.items()):
        theirs_by_node.setdefault(nodes_of(machine, cpus & machine.online_cpus), []).append(number)
    ours_by_node: dict[NodeSet, list[str]] = {}
    for card in cards:
        locality = find_card_locality(machine, card)
        nodes = locality.nodes if isinstance(locality, Locality) else NodeSet()
        ours_by_node.setdefault(nodes, []).append(card.name)
    counts = {nodes: len(found) for nodes, found in theirs_by_node.items()}
    if counts != {nodes: len(found) for nodes, found in ours_by_node.items()}:
        raise InputError(
            f"{place}: is another machine's, or cut: it puts {_count(counts)}, and the machine has "
            f"{_count({nodes: len(found) for nodes, found in ours_by_node.items()})}",
            "Give the whole of what npu-smi info -t topo prints on this machine, or of npu-smi info",
        )
    return {
        name: number
        for nodes, names in ours_by_node.items()
        for name, number in zip(names, theirs_by_node[nodes], strict=True)
    }


def _check_nodes(
    machine: Machine,
    cards: tuple[Accelerator, ...],
    tables: NpuTables,
    place: str,
    oddities: list[str],
) -> dict[str, int]:
    """Card name -> node, from the CPUs of its number, where the machine does not say it.

    Where it does and the two are not even of one package, that is odd. A package's nodes are not
    told apart: npu-smi names the first of a group for all of the group's NPUs.
    """
    stated: dict[str, int] = {}
    for card in cards:
        cpus = tables.cpus.get(card.runtime_numbers[0])
        if cpus is None or (card.address is not None and not card.numbers):
            continue
        theirs = nodes_of(machine, cpus & machine.online_cpus)
        locality = find_card_locality(machine, card)
        if not isinstance(locality, Locality):
            if len(theirs) == 1:
                stated[card.name] = theirs.first
            continue
        packages = {package for node in locality.nodes for package in machine.node_packages(node)}
        near = {package for node in theirs for package in machine.node_packages(node)}
        if locality.nodes.isdisjoint(theirs) and packages.isdisjoint(near):
            oddities.append(
                f"{place} says that NPU {card.runtime_numbers[0]} ({card.name}) is near to CPUs {cpus} of "
                f"node {theirs or 'none'}, and the machine says node {locality.nodes}."
            )
    return stated


def _count(counts: Mapping[NodeSet, int]) -> str:
    parts = (
        f"{count} on node {nodes}" if nodes else f"{count} on no node"
        for nodes, count in sorted(counts.items(), key=lambda pair: str(pair[0]))
    )
    return ", ".join(parts)
