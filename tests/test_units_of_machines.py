"""The units of every machine, recorded and sampled, read by systemd's own parser."""

from __future__ import annotations

import pytest

from provisioner.discovery import discover
from provisioner.errors import InputError, TopologyError
from provisioner.facts import build_tree
from provisioner.planfile import format_plan
from provisioner.planner import make_plan
from provisioner.render import render
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


@pytest.mark.parametrize("asked", REQUESTS)
def test_systemd_has_not_a_word_to_say(asked: str) -> None:
    """Every unit rendered for every machine passes systemd-analyze verify without a word."""
    words: dict[str, str] = {}
    names = names_with_cards()
    for name in names:
        machine = find_machine(name)
        assert machine is not None
        plan = make_plan(machine, REQUESTS[asked])
        files = render(plan, format_plan(plan))
        units = [unit for unit in files if unit.endswith((".slice", ".service"))]
        if asked == "everything":
            # A template is verified as an instance; the confined units have drop-ins
            # alone, and init.scope exists in a running system only.
            units = [unit.replace("@.", "@0.") for unit in units]
            units += ["system.slice", "user.slice", "machine.slice"]
        with unit_folder(files) as folder:
            found = verify_units(folder, units)
        if found:
            words[name] = found
    assert words == {}
    assert len(names) >= len(list_samples()) - 1  # Ascend's sample has no known cards yet
