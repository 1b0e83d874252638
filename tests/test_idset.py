"""CPU and node sets: the kernel's texts, and set algebra."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.errors import ParseError
from provisioner.idset import MAX_ID, CpuSet, NodeSet, union_cpus, union_nodes

IDS = st.sets(st.integers(0, 300))


@given(IDS)
def test_list_round_trip(ids: set[int]) -> None:
    """A set's text is read back as the same set."""
    assert set(CpuSet.parse_list(str(CpuSet(ids)))) == ids


@given(IDS)
def test_mask_round_trip(ids: set[int]) -> None:
    """A mask in the kernel's groups of 32 bits is read as the set of its bits."""
    bits = sum(1 << one for one in ids)
    digits = f"{bits:x}"
    digits = digits.rjust(-(-len(digits) // 8) * 8, "0")
    mask = ",".join(digits[start : start + 8] for start in range(0, len(digits), 8))
    assert set(CpuSet.parse_mask(mask)) == ids


@given(IDS, IDS)
def test_algebra(left: set[int], right: set[int]) -> None:
    """Union, intersection, difference, subset and disjointness are those of Python's sets."""
    a, b = CpuSet(left), CpuSet(right)
    assert set(a | b) == left | right == set(union_cpus([a, b]))
    assert set(a & b) == left & right
    assert set(a - b) == left - right
    assert (a <= b) == (left <= right)
    assert (a < b) == (left < right)
    assert a.isdisjoint(b) == left.isdisjoint(right)
    assert (a == b) == (left == right)
    assert len(a) == len(left)
    assert all(one in a for one in left)


@pytest.mark.parametrize(
    "text, ids",
    [
        ("", []),
        ("\n", []),
        ("0", [0]),
        ("0-3,8\n", [0, 1, 2, 3, 8]),
        (" 1 , 3-4 ", [1, 3, 4]),
        ("0-9:2/5", [0, 1, 5, 6]),
        ("0-10:1/4", [0, 4, 8]),
        ("3,1-2,2", [1, 2, 3]),
    ],
)
def test_list_forms(text: str, ids: list[int]) -> None:
    """Every form of list that the kernel writes or reads is understood."""
    assert list(CpuSet.parse_list(text)) == ids


@pytest.mark.parametrize(
    "text",
    [
        "3-1",
        "a",
        "0-",
        "-1",
        "0,,1",
        "0-3:2",
        "0-3:0/2",
        "0-3:3/2",
        "5:1/2",
        "0x3",
        "1\x002",
        "٣",
        "65536",
        "9" * 5000,
    ],
)
def test_list_refused(text: str) -> None:
    """Text that is no list is refused with one printable line that says what was found."""
    with pytest.raises(ParseError) as caught:
        CpuSet.parse_list(text)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 250


@pytest.mark.parametrize("text", ["", "g", "0x1", "1,", "123456789,0", "-1", "f" * 20000])
def test_mask_refused(text: str) -> None:
    """Text that is no mask is refused."""
    with pytest.raises(ParseError):
        CpuSet.parse_mask(text)


def test_types_do_not_mix() -> None:
    """CPUs and nodes can't be combined or be equal, whatever their ids."""
    assert CpuSet([1]) != NodeSet([1])
    with pytest.raises(TypeError, match="CpuSet with NodeSet"):
        _ = CpuSet([1]) | NodeSet([1])  # type: ignore[operator]
    assert str(union_nodes([NodeSet([1]), NodeSet([3])])) == "1,3"


def test_immutable_and_hashable() -> None:
    """A set can't be changed, serves as a key, and survives pickling."""
    cpus = CpuSet([1, 2])
    with pytest.raises(AttributeError):
        cpus.bits = 0
    assert {cpus: 1}[CpuSet([2, 1])] == 1
    assert pickle.loads(pickle.dumps(cpus)) == cpus  # our own value


def test_ends() -> None:
    """The first and last id are the lowest and highest; an empty set has neither."""
    assert (CpuSet([7, 3]).first, CpuSet([7, 3]).last) == (3, 7)
    for end in ("first", "last"):
        with pytest.raises(ValueError, match="empty"):
            getattr(CpuSet(), end)


@pytest.mark.parametrize("one", [-1, MAX_ID + 1])
def test_out_of_range(one: int) -> None:
    """An id that no kernel has is refused."""
    with pytest.raises(ParseError, match="out of range"):
        CpuSet([one])
