"""`provision doctor`: what is odd about a host, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from provisioner.cli.console import bold, print_json, print_line, print_notes, printable
from provisioner.cli.options import (
    HwlocFile,
    OpenedRoot,
    SnapshotFile,
    Where,
    machine_options,
    open_root,
    placement_options,
    read_input,
    read_machine,
    read_machine_and_request,
)
from provisioner.cli.plan import read_or_make_plan
from provisioner.errors import EXIT_MISMATCH, EXIT_USAGE, ProblemsError, ProvisionError

if TYPE_CHECKING:
    from provisioner.comparison import Comparison
    from provisioner.doctor import Diagnosis
    from provisioner.errors import Problem
    from provisioner.plan import Plan
    from provisioner.settings import HostSettings
    from provisioner.topology import Machine


@click.command(
    "doctor",
    epilog="Example: provision doctor --snapshot host7.tar.gz --nvidia-smi topo.txt",
)
@machine_options
@placement_options
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    help="Judge by a plan.json ('-': standard input).  [default: the plan in force, else a new one]",
)
@click.option(
    "--nvidia-smi",
    "nvidia_smi",
    metavar="FILE",
    help="Compare with what nvidia-smi topo -m printed there ('-': standard input).",
)
@click.option(
    "--numactl",
    metavar="FILE",
    help="Compare with what numactl -H printed there ('-': standard input).",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema provision.doctor/1).")
def command(
    root: Where,
    sample: str | None,
    within: str,
    plan_file: str | None,
    nvidia_smi: str | None,
    numactl: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Look for what costs ranks performance or will surprise, and say what to do.

    Of this system or of a recorded one: topology that contradicts itself, memory and SMT that are
    uneven, what the system sets for every process, whose cores interrupts land on, and how it all
    sits with the plan. What a recording does not say is listed as not known. Changes nothing. Exit
    status 3 if a text of another reader says otherwise than the machine.
    """
    from provisioner.doctor import diagnosis_to_json, examine

    named = root.path if isinstance(root, (SnapshotFile, HwlocFile)) else None
    texts = [named, nvidia_smi, numactl, plan_file, options["config"], options["npu_smi"]]
    if texts.count("-") > 1:
        raise click.UsageError("standard input can be read once: '-' is given more than once")
    is_live = root is None and sample is None
    if not isinstance(root, HwlocFile):
        root, sample = OpenedRoot(open_root(root, sample)), None
    machine, plan, judged_by = _find_plan(
        root, sample, within, plan_file, options, in_force=is_live
    )
    settings = _read_settings(root, machine)
    diagnosis = examine(machine, settings, plan, _compare(machine, nvidia_smi, numactl))
    if as_json:
        print_json(diagnosis_to_json(diagnosis))
    else:
        _print(diagnosis, judged_by)
    return EXIT_MISMATCH if diagnosis.contradicted else 0


def _find_plan(
    root: Where,
    sample: str | None,
    within: str,
    plan_file: str | None,
    options: dict[str, Any],
    *,
    in_force: bool,
) -> tuple[Machine, Plan | Sequence[Problem], str]:
    """The machine, the plan that it is judged by or why there is none, and which plan that is."""
    is_asked = any(value is not None and value != () for value in options.values())
    why = ""
    if in_force and plan_file is None and not is_asked and within == "root":
        found, why = _find_in_force()
        if found is not None:
            return *found, "the plan in force"
    if plan_file is not None:
        return *read_or_make_plan(root, sample, within, plan_file, options), "the plan in " + (
            "standard input" if plan_file == "-" else printable(plan_file)
        )
    from provisioner.planner import make_plan

    machine, request = read_machine_and_request(root, sample, within, options)
    try:
        return machine, make_plan(machine, request), f"the plan that provision plan makes{why}"
    except ProblemsError as error:
        if error.exit_status == EXIT_USAGE:
            raise
        return machine, error.problems, ""


def _find_in_force() -> tuple[tuple[Machine, Plan] | None, str]:
    """This machine and the plan in force; None if there is none that is this machine's, and then why it is not."""
    from provisioner.applied import read_applied, read_in_force
    from provisioner.fingerprint import machine_fingerprint

    try:
        if read_applied() is None:
            return None, ""
        plan = read_in_force().plan
        machine = None if plan is None else read_machine(None, None, plan.within)
    except ProvisionError:
        return None, " (the one in force can't be read)"
    if plan is None or machine is None:
        return None, " (an apply or undo did not come to its end)"
    if machine_fingerprint(machine) != plan.fingerprint:
        return None, " (the one in force was made for another machine than this one is now)"
    return (machine, plan), ""


def _read_settings(root: Where, machine: Machine) -> HostSettings:
    from provisioner.hostfs import read_settings
    from provisioner.settings import NOTHING_KNOWN

    return read_settings(root.root, machine) if isinstance(root, OpenedRoot) else NOTHING_KNOWN


def _compare(machine: Machine, nvidia_smi: str | None, numactl: str | None) -> list[Comparison]:
    found: list[Comparison] = []
    if nvidia_smi is not None:
        from provisioner.nvidia_smi import compare_topology

        found.append(compare_topology(machine, *read_input(nvidia_smi)))
    if numactl is not None:
        from provisioner.numactl import compare_numactl

        found.append(compare_numactl(machine, *read_input(numactl)))
    return found


def _print(diagnosis: Diagnosis, judged_by: str) -> None:
    from provisioner.doctor import READERS
    from provisioner.sentences import count

    print_line(f"Fingerprint {diagnosis.fingerprint}")
    if diagnosis.ranks is None:
        print_line("There is no plan for it: placement says why")
    else:
        print_line(f"Judged by {judged_by}: {count(diagnosis.ranks, 'rank')}")
    states = {
        state: [check for check in diagnosis.checks if check.state == state]
        for state in ("found", "fine", "unknown")
    }
    for check in states["found"]:
        title = check.name if check.name in READERS else check.name.capitalize()
        print_notes(title, check.notes)
    if states["fine"]:
        print_line()
        print_line(bold("Fine"))
    for check in states["fine"]:
        print_line(f"  {check.name}: {printable(check.why)}")
    unknown = [(check.name, one) for check in diagnosis.checks for one in check.unknown]
    if unknown:
        print_line()
        print_line(bold("Not known"))
    for name, what in unknown:
        print_line(f"  {name}: {printable(what)}")
    print_line()
    notes = sum(len(check.notes) for check in diagnosis.checks)
    print_line(f"{notes} found, {len(states['fine'])} checks fine, {len(unknown)} not known")
