"""`provision verify`: whether the plan is in force, by what the kernel says."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from provisioner.cli.console import (
    print_json,
    print_line,
    print_table,
    print_text,
    printable,
)
from provisioner.errors import EXIT_MISMATCH, InputError

if TYPE_CHECKING:
    from provisioner.verify import Finding, Report

# How long an apply that is at work is waited for.
_APPLY_SECONDS = 120
# How long after its start the drivers of a machine are waited for.
_BOOT_SECONDS = 180


@click.command("verify", epilog="Example: provision verify --prometheus --output provision.prom")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema provision.verify/1).")
@click.option("--prometheus", is_flag=True, help="Print gauges for Prometheus.")
@click.option(
    "--output",
    metavar="FILE",
    help="Write into a file, whole or not at all: for a node exporter's textfile folder.",
)
@click.option(
    "--pages/--no-pages",
    default=True,
    help="Whether to ask where memory lies; slow for very large processes.  [default: pages]",
)
@click.option(
    "--boot", is_flag=True, help="Check only that this machine is the plan's, as at boot."
)
@click.option(
    "--log", "as_log", is_flag=True, help="One line each, with priorities for the journal."
)
def command(
    as_json: bool,
    prometheus: bool,
    output: str | None,
    pages: bool,
    boot: bool,
    as_log: bool,
) -> int:
    """Compare the plan in force with what the kernel grants.

    For each rank: planned, configured and effective CPUs and memory nodes, every process and thread,
    and where the pages lie. Exit status 3 if anything differs. Needs no root; the pages of other
    users' processes do.
    """
    from provisioner.applied import read_in_force
    from provisioner.filestore import wait_unlocked

    chosen = [
        name
        for name, given in (
            ("--json", as_json),
            ("--prometheus", prometheus),
            ("--log", as_log),
            ("--boot", boot),
        )
        if given
    ]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} exclude each other")
    if output and not (as_json or prometheus):
        raise click.UsageError("--output goes with --json or --prometheus")
    in_force = read_in_force()
    if not boot and not in_force.applied.complete:
        wait_unlocked(_APPLY_SECONDS)  # an apply is at work: its end is what is of interest
        in_force = read_in_force()
    if in_force.plan is None:
        raise InputError(
            f"{in_force.applied.layout.plan_path} is missing, and {in_force.applied.layout.applied_path} "
            "says that a plan was applied",
            "Finish or take back what was interrupted: provision apply, provision undo",
        )
    if boot:
        return _check_boot(
            in_force.plan.fingerprint, in_force.plan.within, in_force.applied.complete
        )
    from provisioner.cli.live import look_at, open_systemd
    from provisioner.verify import report_to_json, verify

    seen = look_at(in_force.plan, in_force.applied, open_systemd(), pages=pages)
    report = verify(in_force.plan, seen)
    if as_json and not output:
        print_json(report_to_json(report))
    elif output:
        _write(report, output, as_json=as_json)
    elif prometheus:
        from provisioner.verify_report import format_prometheus

        print_text(format_prometheus(report))
    elif as_log:
        for finding in report.findings:
            print_line(f"<4>{finding.code}: {printable(finding.message)} ({finding.hint})")
        if report.ok:
            print_line(f"<6>{len(report.ranks)} ranks are as planned")
    else:
        print_ranks(report)
        print_findings(report)
        print_line(_summary(report))
    return 0 if report.ok else EXIT_MISMATCH


def _check_boot(planned: str, within: str, complete: bool) -> int:
    from provisioner.cli.live import live_root
    from provisioner.discovery import discover
    from provisioner.filestore import is_locked
    from provisioner.fingerprint import machine_fingerprint

    # Drivers may still be at work: RDMA names, accelerators and memory nodes come with them.
    found = machine_fingerprint(discover(live_root(), within))
    while found != planned and time.clock_gettime(time.CLOCK_BOOTTIME) < _BOOT_SECONDS:
        time.sleep(2)
        found = machine_fingerprint(discover(live_root(), within))
    if found != planned:
        print_line(
            f"<3>this machine is not the one that the plan was made for: its fingerprint is {found}, "
            f"planned {planned}. No worker starts. Look at provision topology, then provision apply."
        )
        return EXIT_MISMATCH
    if not complete and not is_locked():
        print_line(
            "<3>an apply or undo did not come to its end. No worker starts. "
            "Finish it: provision apply, or go back: provision undo."
        )
        return EXIT_MISMATCH
    print_line(f"<6>this machine is the plan's: {found}")
    return 0


def _write(report: Report, output: str, *, as_json: bool) -> None:
    import json

    from provisioner.errors import WriteError
    from provisioner.verify import report_to_json
    from provisioner.verify_report import format_prometheus
    from provisioner.wholefile import write_output

    text = (
        json.dumps(report_to_json(report), indent=1) + "\n"
        if as_json
        else format_prometheus(report)
    )
    try:
        os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
        write_output(output, text.encode())
    except OSError as error:
        raise WriteError(f"{output}: can't be written: {error.strerror}") from error


def print_ranks(report: Report) -> None:
    """Prints a table of the ranks, from the plan to the pages."""
    several = len({one.service for one in report.ranks}) > 1
    rows = [
        [
            f"{one.service} {one.rank}" if several else str(one.rank),
            str(one.planned_cpus),
            "" if one.effective_cpus is None else str(one.effective_cpus) or "none",
            str(one.planned_nodes) or "any",
            "" if one.effective_nodes is None else str(one.effective_nodes),
            str(one.processes),
            str(one.threads),
            _local(one.local_share),
            "as planned" if one.ok else "DIFFERS",
        ]
        for one in report.ranks
    ]
    heads = [
        *("RANK", "PLANNED CPUS", "EFFECTIVE", "MEMORY", "EFFECTIVE MEMORY"),
        *("PROCESSES", "THREADS", "LOCAL", "STATE"),
    ]
    print_table(heads, rows, wrapped=("PLANNED CPUS", "EFFECTIVE"))


def print_findings(report: Report) -> None:
    """Prints each difference on its line, then what should be known."""
    for title, findings in (("Differences", report.findings), ("Notes", report.notes)):
        if findings:
            print_line()
            print_line(title)
        for finding in findings:
            _print_finding(finding)
    print_line()


def _print_finding(finding: Finding) -> None:
    print_line(f"  {finding.code}: {printable(finding.message)}")
    if finding.hint:
        print_line(f"    ({printable(finding.hint)})")


def _summary(report: Report) -> str:
    ranks = len(report.ranks)
    if report.ok:
        return f"All {ranks} ranks are as planned." if ranks > 1 else "The rank is as planned."
    bad = sum(1 for one in report.ranks if not one.ok)
    return f"{len(report.findings)} differences; {bad} of {ranks} ranks are not as planned."


def _local(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
