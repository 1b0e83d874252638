"""`provision launch`: one service per rank."""

from __future__ import annotations

import os

import click

from provisioner.cli.console import print_line
from provisioner.errors import EXIT_FAILED, InputError


@click.command(
    "launch",
    context_settings={"allow_interspersed_args": False},
    epilog="Example: provision launch --directory /opt/engine -- python -m engine",
)
@click.option("--name", metavar="NAME", help="The service, if the plan has several.")
@click.option("--ranks", metavar="LIST", help="The ranks, as 0-3,7.  [default: all]")
@click.option(
    "--setenv",
    "-E",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A variable beside the rank's own; without a value, this shell's.",
)
@click.option("--directory", metavar="DIR", help="The working directory.  [default: this one]")
@click.option("--user", metavar="USER", help="The user to run as.  [default: root]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND [ARGUMENT]...]")
def command(
    name: str | None,
    ranks: str | None,
    variables: tuple[str, ...],
    directory: str | None,
    user: str | None,
    words: tuple[str, ...],
) -> int:
    """Start a command as a service per rank, in the ranks' slices.

    Without a command, the worker of the plan is started (NAME@0 and so on). provision status shows
    them, journalctl -u NAME-rank0 what they say, and systemctl stop 'NAME-rank*.service' ends them.
    """
    from provisioner.cli.live import live_root, open_systemd, require_root
    from provisioner.cli.run import read_plan_in_force
    from provisioner.errors import ParseError
    from provisioner.idset import CpuSet
    from provisioner.render import rank_environment
    from provisioner.run import check_started, find_service, launch, launch_workers

    require_root("launch")
    plan, in_force = read_plan_in_force()
    service = find_service(plan, name)
    chosen = service.ranks
    if ranks is not None:
        try:
            numbers = CpuSet.parse_list(ranks)
        except ParseError as error:
            raise error.at("--ranks") from error
        if not numbers or numbers.last >= len(service.ranks):
            raise InputError(
                f"--ranks {ranks}: service '{service.name}' has the ranks 0 to {len(service.ranks) - 1}",
                "provision status shows them",
            )
        chosen = tuple(service.ranks[number] for number in numbers)
    bus, root = open_systemd(), live_root()
    if not words:
        if service.worker is None:
            raise click.UsageError(
                "no command: expected one behind --, or a plan whose service has a [worker]"
            )
        if in_force.applied.mode == "transient":
            raise InputError(
                "the plan's worker has no unit: it was applied --transient", "Give a command"
            )
        if variables or directory or user:
            raise click.UsageError("--setenv, --directory and --user go with a command")
        units = list(launch_workers(service, chosen, bus, root))
    else:
        folder = in_force.applied.layout.folder
        given = _variables(variables)
        units = list(
            launch(
                service,
                chosen,
                words,
                {
                    rank.rank: rank_environment(plan, service, rank, folder) | given
                    for rank in chosen
                },
                bus,
                root,
                directory=os.path.abspath(directory or os.getcwd()),
                user=user,
            )
        )
    wrong = 0
    for rank, unit in zip(chosen, units, strict=True):
        complaint = check_started(service, rank, unit, bus, root)
        print_line(complaint or f"{unit}: rank {rank.rank} runs on CPUs {rank.cpus}")
        wrong += complaint is not None
    return EXIT_FAILED if wrong else 0


def _variables(given: tuple[str, ...]) -> dict[str, str]:
    from provisioner.quoting import check_variable

    found: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        check_variable(name)
        if not equals:
            if name not in os.environ:
                raise InputError(
                    f"--setenv {name}: is not set in this shell", f"Give a value: {name}=…"
                )
            value = os.environ[name]
        found[name] = value
    return found
