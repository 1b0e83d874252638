"""Records: what the worker half has for dataclasses."""

from __future__ import annotations

import copy
import pickle

import pytest

from provisioner.errors import Problem
from provisioner.record import Record


class Pair(Record):
    """Two fields, one with a default."""

    first: int
    second: str = "two"


def test_fields_are_given_in_order_or_by_name() -> None:
    """A record takes its fields as a dataclass does, with defaults."""
    assert (Pair(1).first, Pair(1).second) == (1, "two")
    assert Pair(1, second="three") == Pair(1, "three")
    assert repr(Pair(1)) == "Pair(first=1, second='two')"


def test_wrong_fields_are_type_errors() -> None:
    """A field that is missing, unknown, too many or given twice is a TypeError."""
    for wrong in ([], [1, "a", 2]):
        with pytest.raises(TypeError, match="Pair: expected"):
            Pair(*wrong)  # type: ignore[arg-type]
    for named in ({"first": 1}, {"third": 1}):
        with pytest.raises(TypeError, match="Pair: expected"):
            Pair(1, **named)  # type: ignore[arg-type]


def test_records_are_values() -> None:
    """Equal fields are an equal record with an equal hash, of its own class alone."""
    assert Pair(1) == Pair(1)
    assert hash(Pair(1)) == hash(Pair(1))
    assert Pair(1) != Pair(2)
    assert Pair(1) != (1, "two")


def test_records_do_not_change() -> None:
    """A field can neither be set nor deleted."""
    pair = Pair(1)
    with pytest.raises(AttributeError, match="immutable"):
        pair.first = 2  # type: ignore[misc]
    with pytest.raises(AttributeError, match="immutable"):
        del pair.first
    assert pair == Pair(1)


def test_records_travel_between_processes() -> None:
    """A record survives pickle and copy, so that a worker can hand it to its driver."""
    problem = Problem("no_card", "no accelerator was found")
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert copy.deepcopy(problem) == problem
