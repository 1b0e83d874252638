"""`provision snapshot`: a machine in one file."""

from __future__ import annotations

import sys

import click

from provisioner.cli.console import print_line, printable
from provisioner.cli.options import Where, machine_options, open_root

_DEFAULT = "snapshot.tar.gz"


@click.command(
    "snapshot",
    epilog="Example: provision snapshot -o host7.tar.gz; provision plan --snapshot host7.tar.gz",
)
@machine_options
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    default=_DEFAULT,
    show_default=True,
    help="Where to write it ('-': standard output).",
)
def command(root: Where, sample: str | None, within: str, output: str) -> None:
    """Record what provision reads of a machine, to plan for it elsewhere.

    No serial number, UUID, MAC address or host name is in it.
    """
    from provisioner.errors import InputError
    from provisioner.snapshot import save_snapshot, take_snapshot

    if output == "-" and sys.stdout.isatty():
        raise InputError(
            "the snapshot would go to the terminal: expected a file",
            "Give --output FILE, or send standard output somewhere",
        )
    snapshot = take_snapshot(open_root(root, sample), within)
    for old, new in snapshot.renamed.items():
        click.echo(
            f"Note: device '{printable(old)}' holds an identifier in its name and is called '{new}' in "
            "the snapshot; a plan that names it differs in that, and in its fingerprint",
            err=True,
        )
    if output == "-":
        sys.stdout.buffer.write(snapshot.data)
        return
    save_snapshot(snapshot.data, output)
    print_line(
        f"{printable(output)}: {len(snapshot.tree.files)} files in {len(snapshot.data)} bytes, "
        f"fingerprint {snapshot.fingerprint}"
    )
