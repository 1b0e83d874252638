"""`provision render`: the units of a plan, written, printed or compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from provisioner.cli.console import bold, print_line, print_notes, print_text
from provisioner.cli.options import Where, machine_options, placement_options
from provisioner.errors import EXIT_MISMATCH


@click.command(
    "render", epilog="Example: provision render --config provision.toml --output units.d"
)
@machine_options
@placement_options
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    help="Render a plan.json instead of planning ('-': standard input).",
)
@click.option("--output", metavar="DIR", help="Write the files into a folder.")
@click.option("--stdout", "to_stdout", is_flag=True, help="Print the files.")
@click.option(
    "--check",
    metavar="DIR",
    help="Show what differs from the files in a folder; exit status 3 if anything does.",
)
@click.option(
    "--force", is_flag=True, help="With --output: write over files that provision did not make."
)
def command(
    root: Where,
    sample: str | None,
    within: str,
    plan_file: str | None,
    output: str | None,
    to_stdout: bool,
    check: str | None,
    force: bool,
    **options: Any,
) -> int:
    """Write the systemd units of a plan.

    One of --output, --stdout and --check says where to. Nothing is brought into force.
    """
    from provisioner.cli.plan import read_or_make_plan
    from provisioner.planfile import format_plan
    from provisioner.render import render

    chosen = [
        name
        for name, given in (("--output", output), ("--stdout", to_stdout), ("--check", check))
        if given
    ]
    if len(chosen) != 1:
        found = " and ".join(chosen) if chosen else "none"
        raise click.UsageError(
            f"expected one of --output DIR, --stdout and --check DIR: found {found}"
        )
    if force and not output:
        raise click.UsageError("--force goes with --output")
    _, plan = read_or_make_plan(root, sample, within, plan_file, options)
    files = render(plan, format_plan(plan))
    if to_stdout:
        for name, file in files.items():
            print_line(bold(f"# ==> {name}"))
            print_text(file.text)
            print_line()
        return 0
    from provisioner.output import check_files, write_files

    if check:
        difference = check_files(files, Path(check))
        print_text(difference)
        if not difference:
            print_line(f"{check} is as rendered: {len(files)} files")
        return EXIT_MISMATCH if difference else 0
    result = write_files(files, Path(output or "."), force=force)
    print_line(
        f"{output}: {len(result.written)} files written, {len(result.unchanged)} unchanged, "
        f"{len(result.removed)} removed"
    )
    print_notes("Notes", plan.notes)
    for service in plan.services:
        for rank in service.ranks:
            print_notes(f"Notes on {service.name} rank {rank.rank}", rank.notes)
    return 0
