r"""Parses numa_maps: where a process's pages lie. Pure: lines in, sums out.

Source: fs/proc/task_mmu.c (show_numa_map), proc_pid_numa_maps(5). One line a mapping:

    7f6766800000 bind:1 file=/anon_hugepage\040(deleted) huge anon=10 N1=10 kernelpagesize_kB=2048
"""

from __future__ import annotations

from provisioner.errors import ParseError, shorten
from provisioner.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from provisioner.idset import NodeSet


class PagePlacement(Record):
    """Bytes of resident pages by NUMA node. A page that two mappings show is counted in both."""

    anonymous: Mapping[int, int]  # heap, stack, private memory, copied pages of files
    file: Mapping[int, int]  # page cache of mapped files, and shared memory, alike to the kernel
    mixed: Mapping[int, int]  # of mappings over several nodes that hold both, undivided
    planned_nodes: NodeSet | None = None  # where the plan wants them; None: nothing says

    @property
    def planned_share(self) -> float | None:
        """The share, 0 to 1, of all resident bytes that lie where the plan wants them; None if not known."""
        return None if self.planned_nodes is None else self.local_share(self.planned_nodes)

    @property
    def total(self) -> dict[int, int]:
        """Bytes of all resident pages by node."""
        total: dict[int, int] = {}
        for part in (self.anonymous, self.file, self.mixed):
            add_bytes(total, part)
        return total

    def local_share(self, nodes: NodeSet) -> float | None:
        """The share, 0 to 1, of all resident bytes that lie on the nodes; None if there are none."""
        return share_on(self.total, nodes)


class MappingPages(Record):
    """What one line of numa_maps says of resident pages."""

    is_file: bool  # the mapping is of a file, or of shared memory
    anonymous: int  # pages that are anonymous, in kernel pages of `page_bytes`
    nodes: Mapping[int, int]  # all pages by node, likewise
    page_bytes: int  # kernelpagesize_kB; a transparent huge page counts as many small ones


def parse_numa_maps(lines: Iterable[str]) -> PagePlacement:
    """The sum of a numa_maps file's lines; a text is split by `splitlines()` first.

    Raises:
        ParseError: a line is not of the form; its number is in the message.
    """
    anonymous: dict[int, int] = {}
    file: dict[int, int] = {}
    mixed: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            mapping = parse_mapping(line)
        except ParseError as error:
            raise error.at(f"line {number}") from error
        if mapping is None:
            continue
        _sort_in(mapping, anonymous, file, mixed)
    return PagePlacement(anonymous, file, mixed)


def parse_mapping(line: str) -> MappingPages | None:
    """What one line says; None if it has no resident page.

    Raises:
        ParseError: a count is no number, or pages are said without their size.
    """
    is_file = False
    anonymous = page_kib = 0
    nodes: dict[int, int] = {}
    for word in line.split()[2:]:  # behind the address and the policy
        key, _, value = word.partition("=")
        if key == "file":
            is_file = True
        elif key == "anon":
            anonymous = _parse_count(word, value)
        elif key == "kernelpagesize_kB":
            page_kib = _parse_count(word, value)
        elif key[:1] == "N" and key[1:].isdigit():
            nodes[int(key[1:])] = _parse_count(word, value)
    if not nodes:
        return None
    if not page_kib:
        raise ParseError("pages without their size: expected kernelpagesize_kB=N, N over 0")
    return MappingPages(is_file, anonymous, nodes, page_kib * 1024)


def share_on(bytes_by_node: Mapping[int, int], nodes: NodeSet) -> float | None:
    """The share, 0 to 1, of the bytes that lie on the nodes; None if there are none at all."""
    total = sum(bytes_by_node.values())
    if not total:
        return None
    return sum(count for node, count in bytes_by_node.items() if node in nodes) / total


def _sort_in(
    mapping: MappingPages,
    anonymous: dict[int, int],
    file: dict[int, int],
    mixed: dict[int, int],
) -> None:
    sizes = {node: count * mapping.page_bytes for node, count in mapping.nodes.items()}
    total = sum(mapping.nodes.values())
    # Without a file there is nothing to be cached, whatever anon= says of pages such as the vdso's.
    if not mapping.is_file or mapping.anonymous >= total:
        add_bytes(anonymous, sizes)
    elif not mapping.anonymous:
        add_bytes(file, sizes)
    elif len(sizes) == 1:
        ((node, size),) = sizes.items()
        copied = mapping.anonymous * mapping.page_bytes
        add_bytes(anonymous, {node: copied})
        add_bytes(file, {node: size - copied})
    else:
        add_bytes(mixed, sizes)


def add_bytes(total: dict[int, int], part: Mapping[int, int]) -> None:
    """Adds bytes by node to a sum."""
    for node, size in part.items():
        total[node] = total.get(node, 0) + size


def _parse_count(word: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise ParseError(f"'{shorten(word)}' has no count: expected a number behind '='")
    return int(value)
