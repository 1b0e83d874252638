"""Facts of one machine by two readers, held against each other and counted.

A difference is a fault of ours, or has a reason that names the machines it holds for; a reason whose
difference does not occur is a fault as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

# The property of a test's report that carries a tally; `conftest.py` sums them up.
PROPERTY = "agreement"
Record = Callable[[str, object], None]  # pytest's record_property


class Fact(NamedTuple):
    """One thing that both readers may say of a machine; None: that reader says nothing."""

    kind: str  # in the plural, as it stands in the summary
    about: object  # what it is a fact of
    ours: object
    theirs: object


class Reason(NamedTuple):
    """Why the other reader is wrong, or why the data says nothing, about some facts of some machines."""

    text: str
    names: frozenset[str]
    holds: Callable[[Fact], bool]


def hold(
    record: Record, reader: str, name: str, facts: Iterable[Fact], reasons: Sequence[Reason] = ()
) -> None:
    """Counts a machine's facts in the test's report; fails for differences and for idle reasons."""
    own = [reason for reason in reasons if name in reason.names]
    counts: Counter[str] = Counter()
    explained: Counter[str] = Counter()
    faults: list[Fact] = []
    for fact in facts:
        counts[fact.kind] += 1
        if fact.ours != fact.theirs:
            reason = next((reason for reason in own if reason.holds(fact)), None)
            if reason is None:
                faults.append(fact)
            else:
                explained[reason.text] += 1
    record(PROPERTY, [reader, name, dict(counts), dict(explained)])
    assert counts, f"{name}: no fact was compared"
    assert faults == [], f"{name}: {len(faults)} facts differ from {reader}'s"
    idle = [reason.text for reason in own if not explained[reason.text]]
    assert idle == [], f"{name}: no difference has these reasons any more"


class Sum(NamedTuple):
    """What all tests of one reader compared."""

    names: set[str]
    counts: Counter[str]
    explained: Counter[str]


def summarise(properties: Iterable[Iterable[tuple[str, object]]]) -> list[str]:
    """Lines for people: by reader the machines, the facts by kind, the differences by reason.

    Args:
        properties: the properties of each test's report.
    """
    sums: dict[str, Sum] = {}
    for recorded in properties:
        for key, value in recorded:
            if key != PROPERTY:
                continue
            assert isinstance(value, list)
            reader, name, counts, explained = value
            one = sums.setdefault(reader, Sum(set(), Counter(), Counter()))
            one.names.add(name)
            one.counts.update(counts)
            one.explained.update(explained)
    lines: list[str] = []
    for reader, one in sorted(sums.items()):
        lines.append(
            f"{reader}: {len(one.names)} machines, {one.counts.total()} facts compared, "
            f"{one.explained.total()} differences explained"
        )
        lines += [f"  {count:6} {kind}" for kind, count in sorted(one.counts.items())]
        lines += [f"  {count:6} differ: {text}" for text, count in one.explained.most_common()]
    return lines
