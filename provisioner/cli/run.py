"""`provision run`: a command as one rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from provisioner.errors import InputError

if TYPE_CHECKING:
    from provisioner.applied import InForce
    from provisioner.plan import Plan


@click.command(
    "run",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog="Example: torchrun --no-python provision run -- python train.py",
)
@click.option("--rank", metavar="N", help="The rank.  [default: LOCAL_RANK]")
@click.option("--name", metavar="NAME", help="The service, if the plan has several.")
@click.option(
    "--scope/--service",
    "as_scope",
    default=True,
    help="Become the command in the rank's slice, or have systemd run it and wait.  [default: scope]",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARGUMENT]...")
def command(rank: str | None, name: str | None, as_scope: bool, words: tuple[str, ...]) -> int:
    """Run a command as one rank: in its slice, with its environment.

    Exit status, signals, standard streams and working directory are the command's own, and so is the
    process id, except as a --service.
    Exit status 125: it was not started: the kernel does not grant what is planned, there is no plan, or
    the options are wrong; 126 and 127: it can't be executed, it was not found.
    """
    from provisioner.cli.live import live_root, open_systemd
    from provisioner.run import become, find_rank, merge_environment, serve

    if not words:
        raise click.UsageError("no command: expected one to run, behind --")
    plan, in_force = read_plan_in_force()
    service, chosen = find_rank(plan, name, rank, os.environ.get("LOCAL_RANK"))
    folder = in_force.applied.layout.folder
    environment = merge_environment(plan, service, chosen, folder, os.environ)
    if as_scope:
        become(service, chosen, words, environment, open_systemd(), live_root())
    return serve(service, chosen, words, environment, open_systemd(), live_root())


def read_plan_in_force() -> tuple[Plan, InForce]:
    """The plan in force. Raises: InputError and ReadError if there is none."""
    from provisioner.applied import read_in_force

    in_force = read_in_force()
    if in_force.plan is None:
        raise InputError(
            f"{in_force.applied.layout.plan_path} is missing, although a plan was applied",
            "Bring it into force again: provision apply",
        )
    return in_force.plan, in_force
