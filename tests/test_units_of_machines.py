"""The units of every machine, recorded and sampled, read by systemd's own parser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from provisioner.discovery import discover
from provisioner.errors import InputError, ProblemsError, TopologyError
from provisioner.facts import build_tree
from provisioner.plan import Plan
from provisioner.planfile import format_plan
from provisioner.planner import make_plan
from provisioner.render import RenderedFile, render
from provisioner.request import PlacementRequest, ServiceRequest, WorkerRequest
from provisioner.samples import list_samples, read_sample
from provisioner.topology import Machine
from tests.machines import machine_names, read_machine
from tests.systemd import unit_folder, verify_units

WORKER = WorkerRequest(("/bin/sh", "-c", "exec sleep $1", "x"), environment={"A": "b c"})
REQUESTS = {
    "default": PlacementRequest(),
    "everything": PlacementRequest(
        (ServiceRequest("chat", memory="prefer", worker=WORKER),), reserve_cores=1, confine=True
    ),
}

# As many cards as cores on a node: there is none to reserve.
NOTHING_TO_RESERVE = {"rccl-8gpu-skylake-all-on-node0"}


def find_machine(name: str) -> Machine | None:
    """A sample or a recorded machine; None for a recording that describes no machine."""
    if name in {sample.name for sample in list_samples()}:
        return discover(build_tree(read_sample(name)))
    try:
        return discover(read_machine(name))
    except (InputError, TopologyError):  # its refusal is tested elsewhere
        return None


def names_with_cards() -> list[str]:
    """Every machine that has cards; the recordings without are refused before anything is rendered."""
    names = [sample.name for sample in list_samples()] + machine_names()
    return [name for name in names if (machine := find_machine(name)) and machine.accelerators]


def units_of(plan: Plan, files: Mapping[str, RenderedFile]) -> list[str]:
    """The units that are made of a plan's files: a template as each rank's instance.

    The confined units have drop-ins alone. init.scope is left out: it exists in a running
    system only, and what systemd makes of its drop-in test_render asks.
    """
    units = [name for name in files if name.endswith(".slice")]
    for service in plan.services:
        if service.worker is not None:
            units += [f"{service.name}@{rank.rank}.service" for rank in service.ranks]
    return units + (["system.slice", "user.slice", "machine.slice"] if plan.confine else [])


@pytest.mark.parametrize("asked", REQUESTS)
def test_systemd_has_not_a_word_to_say(asked: str) -> None:
    """Every unit rendered for every machine passes systemd-analyze verify without a word."""
    words: dict[str, str] = {}
    names = names_with_cards()
    for name in names:
        machine = find_machine(name)
        assert machine is not None
        request = REQUESTS[asked]
        if name in NOTHING_TO_RESERVE:
            with pytest.raises(ProblemsError):
                make_plan(machine, REQUESTS["everything"])
            request = replace(request, reserve_cores=0, confine=False)
        plan = make_plan(machine, request)
        files = render(plan, format_plan(plan))
        with unit_folder(files) as folder:
            found = verify_units(folder, units_of(plan, files))
        if found:
            words[name] = found
    assert words == {}
    assert len(names) >= len(list_samples())


def test_a_wrong_line_in_any_file_is_heard() -> None:
    """Silence means something: each file that systemd reads is among those that verify looks at."""
    machine = find_machine("uneven-5-3")
    assert machine is not None
    plan = make_plan(machine, REQUESTS["everything"])
    files = render(plan, format_plan(plan))
    unheard = []
    for name, file in files.items():
        if name.endswith((".slice", ".service", ".conf")):
            wrong = RenderedFile(
                re.sub(r"(?m)^\[(Slice|Scope|Service)\]$", r"\g<0>\nMistyped=1", file.text)
            )
            with unit_folder({**files, name: wrong}) as folder:
                if "Mistyped" not in verify_units(folder, units_of(plan, files)):
                    unheard.append(name)
    assert unheard == ["init.scope.d/50-provision-confine.conf"]
