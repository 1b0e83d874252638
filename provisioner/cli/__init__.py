"""The command line: `provision COMMAND`. One command a module; this one turns errors into text."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence

import click

from provisioner import __version__
from provisioner.cli.console import print_error, printable
from provisioner.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_STARTED,
    EXIT_USAGE,
    ProvisionError,
)

# name -> module below provisioner.cli; only the one that runs is imported, for a quick start.
_COMMANDS = {
    "topology": "topology",
    "plan": "plan",
    "doctor": "doctor",
    "render": "render",
    "apply": "apply",
    "verify": "verify",
    "run": "run",
    "launch": "launch",
    "status": "status",
    "undo": "undo",
    "samples": "samples",
    "snapshot": "snapshot",
}


class _LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(f"provisioner.cli.{module}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(
                f"there is no command '{args[0]}': expected one of {', '.join(_COMMANDS)}", ctx
            ) from error


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: provision plan --sample two-socket-8gpu",
)
@click.version_option(__version__, "-V", "--version", prog_name="provision")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Put every GPU worker on the right cores and the right memory, by cgroup.

    provision reads the machine (no accelerator library is needed), plans which physical cores and
    which memory node belong to each card, and writes that down as systemd slices.
    """
    context.obj = {"debug": debug}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its status."""
    # A command is short, and looking for garbage while modules load is a twentieth of its time.
    gc.set_threshold(100_000)
    # A closed stream is None in Python; what is said to it goes nowhere.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    sys.exit(run_command(list(sys.argv[1:] if arguments is None else arguments)))


# What names a machine that is not the running system, and the commands that act on that alone.
_RECORDINGS = ("--root", "--sample", "--snapshot", "--hwloc")
_ACTING = ("apply", "verify", "run", "launch", "status", "undo")


def _command_of(arguments: Sequence[str]) -> str:
    return next((one for one in arguments if not one.startswith("-")), "")


def _refused(arguments: Sequence[str], status: int) -> int:
    """The exit status of a command line that was refused: `run` keeps off those that its command may have."""
    is_common = status in (EXIT_FAILED, EXIT_USAGE)
    return EXIT_NOT_STARTED if is_common and _command_of(arguments) == "run" else status


def _explain(error: click.ClickException, arguments: Sequence[str]) -> click.ClickException:
    """The error, in better words where an acting command is given a recording."""
    command = _command_of(arguments)
    if not isinstance(error, click.NoSuchOption) or command not in _ACTING:
        return error
    if error.option_name not in _RECORDINGS:
        return error
    return click.UsageError(
        f"{error.option_name} names a recording: provision {command} is about the running system alone",
        error.ctx,
    )


def run_command(arguments: list[str]) -> int:
    """The exit status of one command line; everything to be said is printed."""
    debug = "--debug" in arguments[:1]
    as_json = "--json" in arguments
    try:
        outcome = cli.main(args=arguments, prog_name="provision", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        click.echo("Interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        _explain(error, arguments).show()
        return _refused(arguments, error.exit_code)
    except BrokenPipeError:
        # The reader went away, as head does. Python would complain once more when it exits.
        sys.stdout = None
        return EXIT_FAILED
    except ProvisionError as error:
        if debug:
            raise
        print_error(error, as_json=as_json)
        return _refused(arguments, error.exit_status)
    except OSError as error:
        if debug:
            raise
        # Files are read and written with errors of their own; what is left is the output.
        place = error.filename or "the output"
        click.echo(f"Error: {printable(str(place))}: can't be written: {error.strerror}", err=True)
        try:
            sys.stdout.flush()
        except OSError:
            sys.stdout = (
                None  # Python would try once more when it exits, and end with a status of its own
            )
        return _refused(arguments, EXIT_FAILED)
    except Exception as error:
        if debug:
            raise
        click.echo(f"Error: {type(error).__name__}: {error}", err=True)
        click.echo(
            "(This is a fault of provision; run it again as provision --debug, and report it)",
            err=True,
        )
        return _refused(arguments, EXIT_FAILED)
    return outcome if isinstance(outcome, int) else 0
