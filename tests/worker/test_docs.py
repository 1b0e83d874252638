"""docs/worker.md, held against the code."""

from __future__ import annotations

import itertools
import re

import provisioner.worker
from provisioner.worker.binding import BindResult
from tests.worker.children import ROOT

TEXT = (ROOT / "docs" / "worker.md").read_text()


def table(title: str) -> list[list[str]]:
    """The cells of each row of the first table behind a title, without its head."""
    lines = TEXT.partition(title)[2].splitlines()
    rows = itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    cells = [
        row.strip("|").split("|") for row in itertools.takewhile(lambda line: line != "", rows)
    ]
    return [[cell.strip() for cell in row] for row in cells[2:]]


def test_each_name_in_the_table_exists() -> None:
    """Every name that stands for one of deep_cluster's can be imported, and takes the arguments that are shown."""
    rows = table("## In place of `deep_cluster`")
    names = {name for row in rows for name in re.findall(r"`(\w+)\(", row[1])}
    assert len(rows) > 15
    assert len(names) > 15
    assert names <= set(provisioner.worker.__all__)
    for name in names:
        assert callable(getattr(provisioner.worker, name))


def test_kept_names_are_kept() -> None:
    """What the engine's package calls by a name has that name here."""
    for theirs, ours, _ in table("## In place of `deep_cluster`"):
        for name in re.findall(r"`(\w+)\(", theirs):
            assert f"`{name}(" in ours, theirs


def test_each_field_in_the_table_exists() -> None:
    """Every field of the result that the table explains is one."""
    names = {name for row in table("full     yes") for name in re.findall(r"`(\w+)`", row[0])}
    assert names
    assert names <= {*BindResult.__annotations__, "is_full"}
    assert set(BindResult.__annotations__) - names == {"target", "unmoved_pages"}


def test_every_public_name_is_loaded() -> None:
    """Each name of the package is found where it says it is, and a name that there is not is an AttributeError."""
    for name in provisioner.worker.__all__:
        assert getattr(provisioner.worker, name).__module__.startswith("provisioner.")
    assert set(provisioner.worker.__all__) <= set(dir(provisioner.worker))
    assert not hasattr(provisioner.worker, "nothing")
