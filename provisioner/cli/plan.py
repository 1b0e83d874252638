"""`provision plan`: who would get which cores and which memory, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from provisioner.cli.console import (
    bold,
    print_json,
    print_line,
    print_notes,
    print_table,
    print_text,
)
from provisioner.cli.options import (
    SnapshotFile,
    Where,
    machine_options,
    make_request,
    placement_options,
    read_input,
    read_machine,
    read_machine_and_request,
)

if TYPE_CHECKING:
    from provisioner.plan import Alignment, Plan, Rank
    from provisioner.topology import Machine
    from provisioner.topology_report import RankLabel


@click.command(
    "plan", epilog="Example: provision plan --sample uneven-5-3 --reserve-cores 2 --compile-cores 2"
)
@machine_options
@placement_options
@click.argument("snapshots", nargs=-1, metavar="[FILE]...")
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    help="Show a plan.json instead of planning ('-': standard input).",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the complete provision.toml that the options amount to.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema provision.plan/1).")
@click.option(
    "--verbose", "-v", is_flag=True, help="Say for each rank what its placement rests on."
)
def command(
    root: Where,
    sample: str | None,
    within: str,
    snapshots: tuple[str, ...],
    plan_file: str | None,
    print_config: bool,
    as_json: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Show which cores and which memory node each rank would get, and why.

    With --snapshot, more FILEs and folders of them may follow: each host is planned, and hosts of
    the same fingerprint are shown together.
    """
    from provisioner.planfile import plan_to_json
    from provisioner.topology_report import rank_labels

    if print_config:
        from provisioner.config import format_config
        from provisioner.errors import EXIT_USAGE, ProblemsError
        from provisioner.request import check_request

        request = make_request(options)
        problems = check_request(request)
        if problems:
            raise ProblemsError(problems, exit_status=EXIT_USAGE)
        print_text(format_config(request))
        return 0
    if snapshots and not isinstance(root, SnapshotFile):
        raise click.UsageError(
            f"'{snapshots[0]}' follows no --snapshot: expected --snapshot FILE FILE..."
        )
    if isinstance(root, SnapshotFile) and (snapshots or os.path.isdir(root.path)):
        for name, value in (("--plan", plan_file), ("--npu-smi", options["npu_smi"])):
            if value is not None:
                raise click.UsageError(f"{name} goes with one machine, not with several snapshots")
        from provisioner.cli.fleet import show_fleet

        return show_fleet((root.path, *snapshots), make_request(options), within, as_json=as_json)
    machine, plan = read_or_make_plan(root, sample, within, plan_file, options)
    if as_json:
        print_json(plan_to_json(plan))
        return 0
    print_plan(plan, rank_labels(machine, plan))
    if verbose:
        _print_reasons(machine, plan)
    return 0


def print_plan(plan: Plan, labels: Sequence[Sequence[RankLabel]]) -> None:
    """Prints a plan for people, with the label of each rank of each service."""
    from provisioner.sentences import count

    for number, service in enumerate(plan.services):
        if number:
            print_line()
        print_line(
            bold(f"Service {service.name}")
            + f": {count(len(service.ranks), 'rank')}, {service.slice}, memory {service.memory}"
        )
        rows = [
            _rank_row(rank, label)
            for rank, label in zip(service.ranks, labels[number], strict=True)
        ]
        heads = ["RANK", "CARD", "PCI", "NODE", "CPUS", "CORES", "COMPILE", "MEMORY", "FIT", "RDMA"]
        if not any(rank.compile_cpus for rank in service.ranks):
            rows = [row[:6] + row[7:] for row in rows]
            heads.remove("COMPILE")
        print_table(heads, rows, wrapped=("CPUS", "PCI", "RDMA", "COMPILE", "FIT"))
    print_line()
    print_line(f"Reserved for the system: {plan.reserved_cpus or 'none'}")
    print_line(f"Unassigned: {plan.unassigned_cpus or 'none'}")
    if plan.confine:
        print_line(f"The system's own slices are confined to {plan.system_cpus}")
    print_notes("Notes", plan.notes)
    for service in plan.services:
        for rank in service.ranks:
            print_notes(f"Notes on {service.name} rank {rank.rank}", rank.notes)


def read_or_make_plan(
    root: Where,
    sample: str | None,
    within: str,
    plan_file: str | None,
    options: dict[str, Any],
) -> tuple[Machine, Plan]:
    """The machine, and the plan that the options make for it or that a file holds for it.

    Raises ForeignSystemError if the file's plan is for another machine.
    """
    if plan_file is None:
        from provisioner.planner import make_plan

        machine, request = read_machine_and_request(root, sample, within, options)
        return machine, make_plan(machine, request)
    from provisioner.errors import ForeignSystemError
    from provisioner.fingerprint import machine_fingerprint
    from provisioner.planfile import check_plan, parse_plan

    given = [name for name, value in options.items() if value is not None and value != ()]
    if given:
        raise click.UsageError(f"--plan and --{given[0].replace('_', '-')} exclude each other")
    plan = parse_plan(*read_input(plan_file))
    machine = read_machine(root, sample, plan.within)
    found = machine_fingerprint(machine)
    if plan.fingerprint != found:
        raise ForeignSystemError(
            f"{plan_file}: the plan is for another machine: its fingerprint is {plan.fingerprint}, "
            f"and this machine's is {found}",
            "Plan again on this machine: a plan is one machine's",
        )
    check_plan(plan, machine, plan_file)
    return machine, plan


def _rank_row(rank: Rank, label: RankLabel) -> list[str]:
    return [
        str(rank.rank),
        label.cards,
        ",".join(rank.devices),
        str(rank.cpu_nodes),
        str(rank.cpus),
        str(label.cores),
        str(rank.compile_cpus),
        str(rank.memory_nodes) or "any",
        _fit(rank.alignment),
        ",".join(rank.nics),
    ]


def _fit(alignment: Alignment) -> str:
    """What is not ideal about a rank, in a few words; 'good' if nothing is."""
    faults = [
        word
        for word, bad in (
            ("part cores", not alignment.whole_cores),
            ("off node", not alignment.local),
            ("several LLCs", alignment.llc is False),
            ("scattered", not alignment.contiguous),
            (
                f"memory at {alignment.distance}",
                alignment.distance is not None and alignment.distance > 10,
            ),
        )
        if bad
    ]
    return ", ".join(faults) or "good"


def _print_reasons(machine: Machine, plan: Plan) -> None:
    from provisioner.locality import Locality, find_card_locality

    print_line()
    print_line(bold("Why"))
    cards = {card.name: card for card in machine.accelerators}
    for service in plan.services:
        for rank in service.ranks:
            sources = dict(zip(rank.devices, rank.node_sources, strict=False))
            for device in rank.devices:
                stated = sources.get(device) == "locality"
                locality = find_card_locality(machine, cards[device])
                evidence = (
                    locality.evidence
                    if isinstance(locality, Locality) and not stated
                    else "stated by the operator"
                )
                print_line(
                    f"  {service.name} rank {rank.rank}: card {device} is on node {rank.cpu_nodes}: {evidence}"
                )
            alignment = rank.alignment
            print_line(
                f"    whole cores {_said(alignment.whole_cores)}, local {_said(alignment.local)}, one last-level cache "
                f"{_said(alignment.llc)}, contiguous {_said(alignment.contiguous)}, distance to memory "
                f"{'not said' if alignment.distance is None else alignment.distance}"
            )
    print_line(f"  ceiling: {machine.ceiling.source}")
    print_line(f"  fingerprint: {plan.fingerprint}")


def _said(value: bool | None) -> str:
    return "not said" if value is None else "yes" if value else "no"
