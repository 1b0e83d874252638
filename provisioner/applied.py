"""The record of what `apply` did, which `undo` and `verify` go by: applied.json.

It is written before anything else and says that it is not complete until everything is done, so that
an apply that was killed is known for one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from provisioner.errors import InputError, ReadError, shorten
from provisioner.idset import CpuSet, NodeSet
from provisioner.layout import LAYOUTS, Layout, Mode
from provisioner.plan import Plan
from provisioner.planfile import decode, parse_plan, to_json

SCHEMA = "provision.applied/1"


@dataclass(frozen=True, slots=True)
class Before:
    """What a unit of the system's own had been told before it was confined; empty: nothing."""

    cpus: CpuSet
    nodes: NodeSet


@dataclass(frozen=True, slots=True)
class Applied:
    """What has been applied to this system."""

    mode: Mode
    complete: bool  # whether apply came to its end
    files: dict[
        str, str
    ]  # digest of every file that apply wrote by path, this record aside, sorted;
    # empty where systemd wrote it at apply's word
    folders: tuple[str, ...]  # every folder that apply made, sorted
    slices: tuple[str, ...]  # those of the plan, each after the one that it lies in
    before: dict[str, Before]  # by unit, of those that were confined
    schema: str = SCHEMA

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file that apply wrote or had written, this record aside, sorted."""
        return tuple(self.files)

    @property
    def layout(self) -> Layout:
        """Where the plan lies."""
        return LAYOUTS[self.mode]


@dataclass(frozen=True, slots=True)
class InForce:
    """A plan that was applied, with the record of it."""

    applied: Applied
    plan: Plan | None  # None: killed before it was written, or removed since
    plan_text: str


def format_applied(applied: Applied) -> str:
    """The text of applied.json."""
    return json.dumps(to_json(applied), indent=1) + "\n"


def parse_applied(text: str, place: str) -> Applied:
    """What applied.json holds. Raises: InputError."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: is no JSON: {error}", _HINT) from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise InputError(f"{place}: schema is '{shorten(str(schema))}': expected '{SCHEMA}'", _HINT)
    return decode(raw, Applied, place, _HINT)


_HINT = "Remove it if no plan is in force on this system, and apply again"


def read_applied(layouts: Mapping[Mode, Layout] = LAYOUTS) -> Applied | None:
    """The record on this system; None if nothing has been applied.

    Raises:
        ReadError: it can't be read.
        InputError: it is no such record.
    """
    for place in dict.fromkeys(layout.applied_path for layout in layouts.values()):
        path = Path(place)
        try:
            return parse_applied(path.read_text("utf-8"), str(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ReadError(f"{path}: can't be read: {error}") from error
    return None


def read_in_force() -> InForce:
    """The plan that was applied on this system.

    Raises:
        ReadError: nothing has been applied, or a file can't be read.
        InputError, ProblemsError: a file is not what apply wrote.
    """
    applied = read_applied()
    if applied is None:
        raise ReadError(
            "no plan is in force on this system: there is no "
            + " and no ".join(dict.fromkeys(one.applied_path for one in LAYOUTS.values())),
            "Bring one into force: provision apply",
        )
    path = Path(applied.layout.plan_path)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return InForce(applied, None, "")
    except (OSError, UnicodeDecodeError) as error:
        raise ReadError(f"{path}: can't be read: {error}") from error
    return InForce(applied, parse_plan(text, str(path)), text)
