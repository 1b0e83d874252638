"""The worker's own reading of plan.json, held against the host half's."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from provisioner.errors import InputError
from provisioner.planfile import format_plan, plan_to_json
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest, ServiceRequest
from provisioner.worker.planned import parse_ranks
from tests.hosts import make_host

PLAN = make_plan(
    make_host({0: "0-15", 1: "16-31"}, [0, 0, 1, 1]),
    PlacementRequest(
        (
            ServiceRequest("a", devices=("0", "1"), compile_cores=2),
            ServiceRequest("b", devices=("2", "3"), memory="prefer"),
        )
    ),
)


def test_ranks_are_those_of_the_plan() -> None:
    """Every value that the worker takes of a plan is the plan's."""
    found = parse_ranks(format_plan(PLAN), "plan.json")
    wanted = [(service, rank) for service in PLAN.services for rank in service.ranks]
    assert len(found) == len(wanted) == 4
    for mine, (service, rank) in zip(found, wanted, strict=True):
        assert (mine.service, mine.memory) == (service.name, service.memory)
        for name in ("rank", "vendor", "devices", "device_indexes", "node_sources", "cpu_nodes"):
            assert getattr(mine, name) == getattr(rank, name)
        assert (mine.memory_nodes, mine.cpus, mine.compile_cpus, mine.is_local) == (
            rank.memory_nodes,
            rank.cpus,
            rank.compile_cpus,
            rank.alignment.local,
        )


def test_older_plan_without_sources_is_read() -> None:
    """A plan that does not say what told each card's node is read all the same."""
    raw = plan_to_json(PLAN)
    for service in raw["services"]:
        for rank in service["ranks"]:
            del rank["node_sources"]
    assert all(one.node_sources == () for one in parse_ranks(json.dumps(raw), "plan.json"))


@pytest.mark.parametrize(
    "path, value",
    [
        (("services",), None),
        (("services", 0), 3),
        (("services", 0, "name"), 7),
        (("services", 0, "memory"), "hard"),
        (("services", 0, "ranks"), {}),
        (("services", 0, "ranks", 0, "rank"), True),
        (("services", 0, "ranks", 0, "cpus"), "0-"),
        (("services", 0, "ranks", 0, "cpus"), ""),
        (("services", 0, "ranks", 0, "compile_cpus"), "0-31"),
        (("services", 0, "ranks", 0, "devices"), [1]),
        (("services", 0, "ranks", 0, "alignment"), {}),
        (("services", 0, "ranks", 0, "memory_nodes"), None),
    ],
)
def test_wrong_values_are_named(path: tuple[str | int, ...], value: object) -> None:
    """A value of the wrong form is an error with the plan's path, and never a traceback."""
    raw: Any = copy.deepcopy(plan_to_json(PLAN))
    inner = raw
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(InputError, match=r"^/etc/plan\.json: "):
        parse_ranks(json.dumps(raw), "/etc/plan.json")


@pytest.mark.parametrize(
    "text", ["", " ", "nul", "[1", "{}{}", '{"a": }', '"\ud800"', "[" * 100_000]
)
def test_what_is_no_json_is_named(text: str) -> None:
    """A text that is no JSON, or goes too deep, is an error with the plan's path."""
    with pytest.raises(InputError, match=r"^plan\.json: is no"):
        parse_ranks(text, "plan.json")
    with pytest.raises(InputError, match=r"^plan\.json: is no JSON"):
        parse_ranks(b"\xff", "plan.json")
