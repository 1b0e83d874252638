"""Sets of CPU ids and of NUMA node ids, as two types that do not mix.

Both are immutable bit sets over the kernel's ids. Text forms are the kernel's:

* list, e.g. ``0-3,8,10-14:2/4``: Source: Documentation/admin-guide/cputopology.rst and
  lib/bitmap-str.c (``bitmap_parselist``), ``isolated``, ``online``, ``*_cpus_list``, ``cpulist``.
* mask, e.g. ``00000000,0000ffff``: Source: lib/bitmap-str.c (``bitmap_parse``), ``cpumap``,
  ``thread_siblings``; 32-bit groups, the highest first.
"""

from __future__ import annotations

from provisioner.errors import ParseError, shorten

TYPE_CHECKING = (
    False  # typing's own would have to be imported, and the worker half counts milliseconds
)
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

# NR_CPUS is at most 8192 (arch/x86/Kconfig) and MAX_NUMNODES 1024; ten times that is no machine,
# and a bound keeps "0-99999999999" in a broken file from taking all memory.
MAX_ID = 65535


class IdSet:
    """An immutable set of ids; compare, sort and combine it only with its own type."""

    __slots__ = ("bits",)
    bits: int  # bit n set: id n is in the set
    noun = "id"

    def __init__(self, ids: Iterable[int] = ()) -> None:
        bits = 0
        for one in ids:
            if not 0 <= one <= MAX_ID:
                raise ParseError(f"{self.noun} {one} is out of range: expected 0 to {MAX_ID}")
            bits |= 1 << one
        object.__setattr__(self, "bits", bits)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return (type(self).from_bits, (self.bits,))

    @classmethod
    def from_bits(cls, bits: int) -> Self:
        """The set whose id n is member when bit n of `bits` is set."""
        new = cls.__new__(cls)
        object.__setattr__(new, "bits", bits)
        return new

    @classmethod
    def parse_list(cls, text: str) -> Self:
        """The set that a kernel list names; whitespace around it is ignored, empty is empty.

        Raises ParseError for a reversed range, a stray character, or an id out of range.
        """
        bits = 0
        text = text.strip()
        if not text:
            return cls.from_bits(0)
        for part in text.split(","):
            bits |= _parse_part(part, text, cls.noun)
        return cls.from_bits(bits)

    @classmethod
    def parse_mask(cls, text: str) -> Self:
        """The set that a kernel mask of comma-separated 32-bit groups names.

        Raises ParseError for anything that is not hexadecimal, or a group of over 8 digits when
        there are several.
        """
        text = text.strip()
        groups = text.split(",")
        for group in groups:
            if (
                not group
                or not group.isascii()
                or any(c not in "0123456789abcdefABCDEF" for c in group)
            ):
                raise ParseError(
                    f"'{shorten(text)}' is no {cls.noun} mask: expected groups of hex digits"
                )
            if len(groups) > 1 and len(group) > 8:
                raise ParseError(
                    f"'{shorten(text)}' is no {cls.noun} mask: a group has over 8 digits"
                )
        joined = groups[0] + "".join(group.rjust(8, "0") for group in groups[1:])
        if len(joined) * 4 > MAX_ID + 1:
            raise ParseError(f"'{shorten(text)}' is no {cls.noun} mask: over {MAX_ID + 1} bits")
        return cls.from_bits(int(joined, 16))

    def __iter__(self) -> Iterator[int]:
        bits = self.bits
        while bits:
            low = bits & -bits
            yield low.bit_length() - 1
            bits ^= low

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __contains__(self, one: object) -> bool:
        return isinstance(one, int) and one >= 0 and bool(self.bits >> one & 1)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.bits == other.bits

    def __hash__(self) -> int:
        return hash((type(self), self.bits))

    def _same(self, other: object) -> int:
        if type(other) is not type(self):
            raise TypeError(f"cannot combine {type(self).__name__} with {type(other).__name__}")
        return other.bits

    def __or__(self, other: Self) -> Self:
        return self.from_bits(self.bits | self._same(other))

    def __and__(self, other: Self) -> Self:
        return self.from_bits(self.bits & self._same(other))

    def __sub__(self, other: Self) -> Self:
        return self.from_bits(self.bits & ~self._same(other))

    def __le__(self, other: Self) -> bool:
        return self.bits & ~self._same(other) == 0

    def __lt__(self, other: Self) -> bool:
        return self <= other and self != other

    def isdisjoint(self, other: Self) -> bool:
        """Whether no id is in both."""
        return self.bits & self._same(other) == 0

    @property
    def first(self) -> int:
        """The lowest id. Raises ValueError if the set is empty."""
        if not self.bits:
            raise ValueError("an empty set has no first id")
        return (self.bits & -self.bits).bit_length() - 1

    @property
    def last(self) -> int:
        """The highest id. Raises ValueError if the set is empty."""
        if not self.bits:
            raise ValueError("an empty set has no last id")
        return self.bits.bit_length() - 1

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The maximal runs (first, last), ascending."""
        bits, base = self.bits, 0
        while bits:
            skip = (bits & -bits).bit_length() - 1
            bits >>= skip
            base += skip
            run = (~bits & (bits + 1)).bit_length() - 1
            yield base, base + run - 1
            bits >>= run
            base += run

    def __str__(self) -> str:
        """The kernel's list form, e.g. ``0-3,8``; empty text for the empty set."""
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.ranges())

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self}')"


class CpuSet(IdSet):
    """A set of logical CPU ids."""

    __slots__ = ()
    noun = "CPU"


class NodeSet(IdSet):
    """A set of NUMA node ids."""

    __slots__ = ()
    noun = "node"


def union_cpus(sets: Iterable[CpuSet]) -> CpuSet:
    """The union of any number of CPU sets."""
    bits = 0
    for one in sets:
        bits |= one.bits
    return CpuSet.from_bits(bits)


def union_nodes(sets: Iterable[NodeSet]) -> NodeSet:
    """The union of any number of node sets."""
    bits = 0
    for one in sets:
        bits |= one.bits
    return NodeSet.from_bits(bits)


def _parse_part(part: str, text: str, noun: str) -> int:
    """The bits of one element of a list: ``a``, ``a-b``, or ``a-b:used/group``."""
    span, colon, stride = part.strip().partition(":")
    first_text, dash, last_text = span.partition("-")
    first = _parse_id(first_text, text, noun)
    last = _parse_id(last_text, text, noun) if dash else first
    if last < first:
        raise ParseError(
            f"'{shorten(text)}' is no {noun} list: range '{shorten(span)}' runs backwards"
        )
    if not colon:
        return ((1 << (last - first + 1)) - 1) << first
    used_text, slash, group_text = stride.partition("/")
    if not (dash and slash):
        raise ParseError(
            f"'{shorten(text)}' is no {noun} list: '{shorten(part)}' lacks 'first-last:used/group'"
        )
    used, group = _parse_id(used_text, text, noun), _parse_id(group_text, text, noun)
    if not 0 < used <= group:
        raise ParseError(
            f"'{shorten(text)}' is no {noun} list: '{shorten(stride)}' must be used/group with 0 < used <= group"
        )
    bits = 0
    for start in range(first, last + 1, group):
        run = min(used, last + 1 - start)
        bits |= ((1 << run) - 1) << start
    return bits


def _parse_id(text: str, whole: str, noun: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit()):
        raise ParseError(f"'{shorten(whole)}' is no {noun} list: '{shorten(text)}' is no number")
    # 19 digits are past any id, and int() refuses over 4300 digits with an error of its own
    value = int(text[:20])
    if value > MAX_ID:
        raise ParseError(f"'{shorten(whole)}' is no {noun} list: {shorten(text)} is over {MAX_ID}")
    return value
