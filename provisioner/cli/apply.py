"""`provision apply`: a plan brought into force, or back to what was before."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from provisioner.cli.console import bold, print_line, print_notes, print_text
from provisioner.cli.options import placement_options
from provisioner.errors import InputError

if TYPE_CHECKING:
    from provisioner.apply import Job


@click.command("apply", epilog="Example: provision apply --config provision.toml --boot-check")
@placement_options
@click.option("--plan", "plan_file", metavar="FILE", help="Apply a plan.json instead of planning.")
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--runtime", is_flag=True, help="Until the next boot: files below /run.")
@click.option(
    "--transient",
    is_flag=True,
    help="Until the next boot, without unit files and without a reload of systemd.",
)
@click.option(
    "--boot-check/--no-boot-check",
    default=None,
    help="Install a check at each boot that keeps workers from a machine that is not the plan's.  "
    "[default: as it is]",
)
@click.option(
    "--verify-timer/--no-verify-timer",
    default=None,
    help="Install a timer that verifies and logs what differs.  [default: as it is]",
)
@click.option(
    "--migrate-memory",
    is_flag=True,
    help="Change memory nodes of slices with processes too: the kernel moves their pages.",
)
@click.option(
    "--force", is_flag=True, help="Go on although containers or a manager of cpusets may suffer."
)
@click.option("--verbose", "-v", is_flag=True, help="Say each step.")
def command(
    plan_file: str | None,
    dry_run: bool,
    yes: bool,
    runtime: bool,
    transient: bool,
    boot_check: bool | None,
    verify_timer: bool | None,
    migrate_memory: bool,
    force: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Bring a plan into force, and prove it.

    Writes the files, has systemd read them, starts the slices, and compares what the kernel then
    grants with the plan. If anything fails, what was before is restored. Running workers go on.
    """
    from provisioner.applied import read_applied
    from provisioner.apply import Extras, carry_out, go_back, prepare
    from provisioner.cli.live import (
        find_program,
        live_root,
        make_tell,
        open_systemd,
        require_root,
        require_this_system,
        tell_waiting,
    )
    from provisioner.cli.plan import read_or_make_plan
    from provisioner.filestore import locked
    from provisioner.guard import ignore_signals, run_guarded
    from provisioner.layout import LAYOUTS, Mode
    from provisioner.preflight import Permissions

    if runtime and transient:
        raise click.UsageError("--runtime and --transient exclude each other")
    if runtime and boot_check:
        raise click.UsageError("--boot-check is for what outlives a boot: expected no --runtime")
    if transient and (boot_check or verify_timer):
        raise click.UsageError(
            "--transient writes no units: expected no --boot-check, --verify-timer"
        )
    mode: Mode = "runtime" if runtime else "transient" if transient else "persistent"
    require_root("apply")
    machine, plan = read_or_make_plan(None, None, "root", plan_file, options)
    require_this_system(machine)
    root = live_root()
    tell = make_tell(verbose)
    with locked(tell_waiting):
        bus = open_systemd()
        job = prepare(
            plan,
            LAYOUTS[mode],
            bus,
            root,
            applied=read_applied(),
            fingerprint=plan.fingerprint,
            extras=Extras(boot_check, verify_timer),
            allowed=Permissions(force=force, migrate_memory=migrate_memory),
            program=find_program(),
        )
        print_notes("Notes", [*plan.notes, *job.notes])
        if job.is_done:
            print_line(f"The plan is in force already ({_count(job)}): nothing changed.")
            return
        _print_changes(job, whole=dry_run)
        if dry_run:
            print_line("Nothing was changed: this was a dry run.")
            return
        if not yes:
            _confirm()
        report = run_guarded(
            lambda: carry_out(job, open_systemd(), root, tell, ignore_signals),
            lambda: go_back(job, open_systemd(), root, tell),
            "apply",
        )
    from provisioner.cli.verify import print_findings, print_ranks

    print_ranks(report)
    print_findings(report)
    print_line(
        f"In force: {_count(job)}, read back from the kernel. 'provision undo' takes it back."
    )


def _confirm() -> None:
    if not sys.stdin or not sys.stdin.isatty():
        raise InputError(
            "there is no terminal to ask whether to go on", "Look with --dry-run, then give --yes"
        )
    click.confirm("Bring this into force?", abort=True)


def _count(job: Job) -> str:
    ranks = sum(len(service.ranks) for service in job.plan.services)
    return f"{ranks} {'rank' if ranks == 1 else 'ranks'}"


def _print_changes(job: Job, *, whole: bool) -> None:
    """What would change: files as a diff, new ones whole in a dry run only, and cgroups."""
    import difflib

    print_line(bold("Files"))
    for path in job.changed_paths:
        old, new = job.old[path], job.entries.get(path)
        sign = "-" if new is None else "~" if old.kind else "+"
        print_line(f"  {sign} {path}")
    for path in job.changed_paths:
        old, new = job.old[path], job.entries.get(path)
        if old.kind or whole:
            lines = difflib.unified_diff(
                _lines(old.data), _lines(new.data if new else b""), path, f"{path} (new)"
            )
            print_text("".join(lines))
    changes = [
        (one.unit, found, one)
        for one in job.wanted
        if (found := _told(job, one.unit)) != (str(one.cpus or ""), str(one.nodes or ""))
    ]
    if changes:
        print_line(bold("Cgroups"))
    for unit, (cpus, nodes), one in changes:
        print_line(
            f"  {unit}: CPUs {cpus or 'any'} -> {one.cpus or 'any'}, "
            f"memory nodes {nodes or 'any'} -> {one.nodes or 'any'}"
        )
    for unit in job.stale_slices:
        print_line(f"  {unit}: is stopped")


def _told(job: Job, unit: str) -> tuple[str, str]:
    for one in job.old_wanted:
        if one.unit == unit:
            return str(one.cpus or ""), str(one.nodes or "")
    return "", ""


def _lines(data: bytes) -> list[str]:
    text = data.decode("utf-8", "backslashreplace")
    return [line + "\n" for line in text.split("\n")[:-1]] if text else []
