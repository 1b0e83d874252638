"""`provision plan --snapshot FILE FILE...`: the plans of many hosts, those of one kind together."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import click

from provisioner.cli.console import bold, print_line, print_problem, print_text, printable
from provisioner.cli.plan import print_plan
from provisioner.errors import EXIT_DONE, EXIT_FAILED
from provisioner.fleet import Fleet, HostPlan, plan_hosts
from provisioner.planfile import plan_to_json
from provisioner.snapshot import list_snapshots

if TYPE_CHECKING:
    from provisioner.request import PlacementRequest

SCHEMA = "provision.fleet/1"


def show_fleet(
    paths: Sequence[str], request: PlacementRequest, within: str, *, as_json: bool
) -> int:
    """Plans for every snapshot and prints the groups; the exit status is 1 if any host has no plan."""
    files = list_snapshots(paths)
    with Fleet() as fleet:
        with _progress(plan_hosts(files, request, within), len(files)) as hosts:
            for host in hosts:
                fleet.add(host)
        if as_json:
            _print_as_json(fleet)
        else:
            _print_for_people(fleet, len(files))
        return EXIT_FAILED if fleet.refused else EXIT_DONE


def _progress(hosts: Iterable[HostPlan], count: int) -> AbstractContextManager[Iterable[HostPlan]]:
    """The hosts, with a bar on a terminal that shows how far they are; nothing of it elsewhere."""
    if sys.stderr.isatty():
        return click.progressbar(hosts, count, "Planning", file=sys.stderr)
    return nullcontext(hosts)


def _print_for_people(fleet: Fleet, count: int) -> None:
    planned = count - fleet.refused
    print_line(
        f"{planned} of {count} hosts planned, in {len(fleet.groups)} groups of equal fingerprints"
    )
    for group, plan, labels in fleet.plans():
        more = group.hosts - len(group.first)
        names = ", ".join(printable(one) for one in group.first) + (
            f" and {more} more" if more else ""
        )
        print_line()
        print_line(bold(f"Group {group.number}: {group.hosts} hosts") + f", {group.fingerprint}")
        print_line(f"  {names}")
        print_plan(plan, labels)
    if fleet.refused:
        sys.stdout.flush()
        for host in fleet.hosts():
            for problem in host.problems:
                print_problem(problem)


def _print_as_json(fleet: Fleet) -> None:
    """One object, written piece by piece: of many hosts it does not fit into memory."""
    print_text(f'{{"schema": "{SCHEMA}",\n "groups": [')
    comma = ""
    for group, plan, _ in fleet.plans():
        row = {
            "group": group.number,
            "fingerprint": group.fingerprint,
            "hosts": group.hosts,
            "plan": plan_to_json(plan),
        }
        print_text(f"{comma}\n  {json.dumps(row, ensure_ascii=False)}")
        comma = ","
    print_text('],\n "hosts": [')
    comma = ""
    for host in fleet.hosts():
        problems = [
            {"code": one.code, "message": one.message, "hint": one.hint} for one in host.problems
        ]
        row = {"file": host.file, "group": host.group, "problems": problems}
        print_text(f"{comma}\n  {json.dumps(row)}")
        comma = ","
    print_text("]}\n")
