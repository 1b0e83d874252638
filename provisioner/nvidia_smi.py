"""What `nvidia-smi topo -m` prints, held against a machine. Pure.

The tool cuts a list of CPUs that does not fit its column, and shows of a list what its caller's
cpuset allows: neither is a difference.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from provisioner.comparison import Comparison
from provisioner.errors import InputError, ParseError, shorten
from provisioner.idset import CpuSet, NodeSet
from provisioner.locality import Locality, find_card_locality, find_cpu_nodes, find_locality
from provisioner.pci import PciAddress
from provisioner.plan import Note
from provisioner.sentences import name_some
from provisioner.topology import Accelerator, Machine, count_common_bridges

_READER = "nvidia-smi topo -m"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\ufeff")
_GPU = re.compile(r"GPU([0-9]{1,3})", re.ASCII)
# Two heads that ran together when the table was pasted are two.
_HEAD = re.compile(r"(?:GPU|NIC)[0-9]{1,3}(?=(?:GPU|NIC)[0-9]|\s|$)|[^\s]+", re.ASCII)
_LEGEND = re.compile(r"(NIC[0-9]{1,3}): +(\S+)", re.ASCII)
_HEADS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
# Of those of drivers to come, and of older ones, nothing is compared.
_LINK = re.compile(r"[A-Z][A-Z0-9/]{0,5}", re.ASCII)
_LIST = re.compile(r"[0-9][0-9,-]*", re.ASCII)


class GpuRow(NamedTuple):
    """One GPU's row; None for a column that is not there or says nothing."""

    links: Mapping[str, str]  # column, e.g. GPU1, NIC0 or mlx5_0 -> PIX, PXB, PHB, NODE, SYS, NV18
    cpus: str | None  # CPU Affinity as it stands there, perhaps cut
    nodes: NodeSet | None  # NUMA Affinity
    memory_node: int | None  # GPU NUMA ID


class SmiTopology(NamedTuple):
    """The matrix."""

    gpus: Mapping[int, GpuRow]  # by number
    columns: tuple[str, ...]
    names: Mapping[str, str]  # NIC0 -> mlx5_0, of the legend


def parse_topology(text: str) -> SmiTopology:
    """The matrix of `nvidia-smi topo -m`, `-mp` too, with tabs or blanks, cut after some rows or not.

    Raises ParseError if there is no matrix, a row twice or without a column, or one that lacks links.
    """
    columns: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    gpus: dict[int, GpuRow] = {}
    names: dict[str, str] = {}
    is_wrapped = False
    for line in _ESCAPE.sub("", text).replace("\xa0", " ").splitlines():
        if match := _LEGEND.fullmatch(line.strip()):
            names[match[1]] = match[2]
        elif _HEADS[0] in line:
            before, _, _ = line.partition(_HEADS[0])
            columns = tuple(_HEAD.findall(before))
            if "GPU0" not in columns:
                is_wrapped, columns = True, ()
            heads = tuple(head for head in _HEADS if head in line)
        elif columns and (match := _GPU.match(line.strip())):
            words = line.split()
            if not _GPU.fullmatch(words[0]) or (len(words) > 1 and not _LINK.fullmatch(words[1])):
                continue
            number = int(match[1])
            if f"GPU{number}" not in columns:
                raise ParseError(f"row 'GPU{number}' has no column: expected one of its name")
            if number in gpus:
                raise ParseError(f"row 'GPU{number}' is there twice")
            gpus[number] = _parse_row(words, columns, heads)
    if is_wrapped and not gpus and re.search(r"^[^\w\n]*GPU0\s", text, re.MULTILINE):
        raise ParseError(
            f"is wrapped: its column '{_HEADS[0]}' is on another line than 'GPU0'",
            "Send what it prints into a file, and give that",
        )
    if not gpus:
        raise ParseError(
            f"holds no matrix of GPUs with a column '{_HEADS[0]}': expected what '{_READER}' prints"
        )
    return SmiTopology(gpus, columns, names)


def _parse_row(words: Sequence[str], columns: Sequence[str], heads: Sequence[str]) -> GpuRow:
    links, rest = words[1 : len(columns) + 1], list(words[len(columns) + 1 :])
    strange = [link for link in links if not _LINK.fullmatch(link)]
    if len(links) < len(columns) or strange:
        found = f"found '{shorten(strange[0])}'" if strange else f"found {len(links)}"
        raise ParseError(
            f"row '{words[0]}': {found}: expected {len(columns)} links such as PIX or NV18"
        )
    # A blank after a comma.
    pieces = 0
    while len(rest) - pieces > len(heads) and rest[pieces].endswith(","):
        pieces += 1
    rest[: pieces + 1] = ["".join(rest[: pieces + 1])]
    # What is empty can't be told from what is missing, unless all is there.
    said = dict(zip(heads, rest, strict=False)) if len(rest) >= len(heads) else {}
    cpus, nodes, own = (said.get(head) for head in _HEADS)
    return GpuRow(
        dict(zip(columns, links, strict=True)),
        cpus if cpus is not None and _LIST.fullmatch(cpus) else None,
        _parse_nodes(nodes),
        int(own) if own is not None and own.isdecimal() else None,
    )


def _parse_nodes(text: str | None) -> NodeSet | None:
    """A list of nodes; None if it says nothing, or was cut."""
    try:
        return NodeSet.parse_list(text) if text is not None and _LIST.fullmatch(text) else None
    except ParseError:
        return None


def compare_topology(machine: Machine, text: str, place: str) -> Comparison:
    """What `nvidia-smi topo -m` says otherwise than the machine.

    1. GPU n is the machine's nth card in PCI order, as the tool counts; with other numbers of cards
       nothing else is compared.
    2. CPUs, NUMA node and own memory node of each GPU.
    3. Whether each pair of devices is below one PCI switch (PIX, PXB) or not, and no nearer here than
       there (PHB: one host bridge, NODE: one node), where the machine knows their places on the bus.

    Raises InputError if the text is not the tool's, or the machine has none of its cards.
    """
    try:
        theirs = parse_topology(text)
    except ParseError as error:
        raise InputError(f"{place}: {error.message}", error.hint) from error
    cards = [card for card in machine.accelerators if card.vendor == "nvidia"]
    if not cards:
        raise InputError(
            f"{place}: is about NVIDIA's GPUs, and this machine has none",
            "Leave the option out, or give the machine's recording with --root or --snapshot",
        )
    count = sum(1 for column in theirs.columns if _GPU.fullmatch(column))
    if count != len(cards):
        note = Note(
            "nvidia_smi_cards",
            f"{place} has {count} GPUs, and this machine {len(cards)} cards: {', '.join(card.name for card in cards)}.",
            "Take both of the same machine"
            if count > len(cards)
            else "Run it outside of containers, and look at what the driver says of cards that it does not take: dmesg",
        )
        return Comparison(_READER, place, 1, 0, (), (), (note,))
    differences: dict[str, list[str]] = {}
    cut: list[int] = []
    narrow: list[int] = []
    facts, agreed = 1, 1
    for number, row in sorted(theirs.gpus.items()):
        card = cards[number]
        for code, said, ours, same in _row_facts(machine, card, row):
            facts += 1
            if same is None:
                is_cut = _is_cut(row.cpus or "", CpuSet.parse_list(ours))
                (cut if is_cut else narrow).append(number)
            elif same:
                agreed += 1
            else:
                differences.setdefault(code, []).append(
                    f"GPU{number} {said}, and card {card.name} here {ours}"
                )
    apart = False
    for one, other, link, kind in _link_facts(machine, cards, theirs):
        facts += 1
        if link == "SYS" and kind in (1, 2):
            apart = True
        elif (_KINDS[link] == 3) != (kind == 3) or _KINDS[link] > kind:
            differences.setdefault("nvidia_smi_link", []).append(
                f"{one} and {other} are {link}, and here they are {_WORDS[kind]}"
            )
        else:
            agreed += 1
    nics = {name for nic in machine.nics for name in nic.rdma_names}
    explained = []
    if cut:
        explained.append(f"it cuts the lists of CPUs of GPUs {NodeSet(cut)}")
    if narrow:
        explained.append(
            f"it shows a part of the CPUs of GPUs {NodeSet(narrow)}: those of its caller's cpuset"
        )
    if apart:
        explained.append("it says SYS of devices on one NUMA node, as it does on some hosts")
    return Comparison(
        _READER,
        place,
        facts,
        agreed,
        tuple(explained),
        tuple(_find_unsaid(theirs, len(cards), nics, place)),
        tuple(
            Note(code, f"{place}: {_first(listed)}.", _HINTS.get(code, _HINT))
            for code, listed in differences.items()
        ),
    )


_HINT = 'Ask which is right: lspci -vv, the board\'s manual; then state it in provision.toml: [locality] "CARD" = NODE'
_HINTS = {
    "nvidia_smi_link": "Which RDMA device is near to a card rests on this: look at lspci -tv",
    "nvidia_smi_memory": "The driver's word is in /proc/driver/nvidia/gpus/*/numa_status: look there",
}


def _first(listed: Sequence[str], most: int = 3) -> str:
    """The first sentences, and how many more there are."""
    more = f"; and {len(listed) - most} more" if len(listed) > most else ""
    return "; ".join(listed[:most]) + more


def _find_unsaid(
    theirs: SmiTopology, cards: int, nics: Container[str], place: str
) -> Iterator[str]:
    """What the matrix leaves out, was cut off, or says of devices that the machine does not have."""
    strange = [
        name
        for column in theirs.columns
        if not _GPU.fullmatch(column) and (name := theirs.names.get(column, column)) not in nics
    ]
    if strange:
        yield f"how near {name_some([shorten(one) for one in strange], 4)} of {place} are: no such device is here"
    missing = NodeSet(range(cards)) - NodeSet(theirs.gpus)
    if missing:
        yield f"what it says of GPUs {missing} (their rows are not in {place})"
    for what, mute in (
        ("CPUs", [number for number, row in theirs.gpus.items() if row.cpus is None]),
        ("NUMA nodes", [number for number, row in theirs.gpus.items() if row.nodes is None]),
    ):
        if mute:
            yield f"the {what} of GPUs {NodeSet(mute)} ({place} does not say them)"


def _row_facts(
    machine: Machine, card: Accelerator, row: GpuRow
) -> Iterator[tuple[str, str, str, bool | None]]:
    """(code, what they say, what the machine says, whether it is the same; None: a part of it)."""
    locality = find_card_locality(machine, card)
    if not isinstance(locality, Locality):
        if row.nodes is not None:
            yield ("nvidia_smi_node", f"is on node {row.nodes}", "on none that is known", False)
        return
    cpu_nodes = find_cpu_nodes(machine, card, locality)
    if isinstance(cpu_nodes, NodeSet):
        cpus = machine.cpus_on(cpu_nodes)
        if row.cpus is not None:
            same = _compare_cpus(row.cpus, cpus)
            yield ("nvidia_smi_cpus", f"has CPUs {row.cpus}", str(cpus), same)
        # Grace lists the cards' own memory among them.
        if row.nodes is not None and (theirs := row.nodes & machine.cpu_nodes):
            said = f"is on node {row.nodes}"
            yield "nvidia_smi_node", said, f"on node {cpu_nodes}", theirs == cpu_nodes
    if row.memory_node is not None:
        yield (
            "nvidia_smi_memory",
            f"has its memory as node {row.memory_node}",
            f"as node {card.memory_nodes or 'none'}",
            row.memory_node in card.memory_nodes,
        )


def _compare_cpus(text: str, ours: CpuSet) -> bool | None:
    """Whether a list is the same; None if it may be cut, or is a part of ours."""
    if _is_cut(text, ours):
        return None
    for whole in (text, text.rstrip(",-"), text.rstrip(",-").rpartition(",")[0]):
        try:
            theirs = CpuSet.parse_list(whole)
        except ParseError:
            continue
        if theirs == ours:
            return True
        return None if theirs and theirs < ours else False
    return False


def _is_cut(text: str, ours: CpuSet) -> bool:
    """Whether a list is ours up to somewhere behind its first number."""
    return text != str(ours) and str(ours).startswith(text.rstrip(",-")) and not text.isdecimal()


_KINDS = {"PIX": 3, "PXB": 3, "PHB": 2, "NODE": 1, "SYS": 0}
_WORDS = {
    3: "below one switch",
    2: "below one host bridge",
    1: "on one NUMA node",
    0: "on different NUMA nodes",
}


def _link_facts(
    machine: Machine, cards: Sequence[Accelerator], theirs: SmiTopology
) -> Iterator[tuple[str, str, str, int]]:
    """(device, device, link, kind of nearness here) of each pair whose link tells of the PCI bus."""
    nics = {name: nic.address for nic in machine.nics for name in nic.rdma_names}
    places: dict[str, PciAddress] = {}
    for column in theirs.columns:
        match = _GPU.fullmatch(column)
        address = (
            cards[int(match[1])].address
            if match is not None and int(match[1]) < len(cards)
            else nics.get(theirs.names.get(column, column))
        )
        if address is not None:
            places[column] = address
    for number, row in theirs.gpus.items():
        one = f"GPU{number}"
        for other, link in row.links.items():
            # A pair of GPUs is in two rows.
            is_new = not _GPU.fullmatch(other) or int(other[3:]) > number
            if link in _KINDS and is_new and one in places and other in places:
                kind = _find_kind(machine, places[one], places[other])
                if kind is not None:
                    yield one, theirs.names.get(other, other), link, kind


def _find_kind(machine: Machine, one: PciAddress, other: PciAddress) -> int | None:
    """How near two functions are, as _KINDS counts; None where their places or nodes are not known."""
    first, second = machine.pci_path(one), machine.pci_path(other)
    if not first or not second or None in (first[0].host_bridge, second[0].host_bridge):
        return None
    common = count_common_bridges(first, second)
    if common is not None:
        return 3 if common else 2
    near = find_locality(machine, one), find_locality(machine, other)
    if not isinstance(near[0], Locality) or not isinstance(near[1], Locality):
        return None
    return 1 if near[0].nodes == near[1].nodes else 0
