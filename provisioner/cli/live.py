"""What the commands that work on the running system share."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from provisioner.errors import ForeignSystemError, ProvisionError

if TYPE_CHECKING:
    from provisioner.applied import Applied
    from provisioner.bus import Bus
    from provisioner.observe import Observed
    from provisioner.plan import Plan
    from provisioner.root import Root
    from provisioner.topology import Machine


class PermissionDeniedError(ProvisionError):
    """The user may not do this."""

    code = "not_root"


def require_root(command: str) -> None:
    """Raises PermissionDeniedError unless root runs the command."""
    if os.geteuid() != 0:
        raise PermissionDeniedError(
            f"provision {command} changes the system: expected root, found user {os.geteuid()}",
            f"Run it with sudo; provision {'plan' if command == 'apply' else 'verify'} needs no rights",
        )


def require_this_system(machine: Machine) -> None:
    """Raises ForeignSystemError for a recorded machine: nothing is done to it here."""
    if not machine.is_this_system:
        raise ForeignSystemError(
            "a recorded machine can't be acted on: expected the running system",
            "Run the command there, without --root and --sample",
        )


def live_root() -> Root:
    """The running system's root."""
    from provisioner.root import DirectoryRoot

    return DirectoryRoot("/")


def open_systemd() -> Bus:
    """Systemd. Raises: BusError."""
    from provisioner.bus import open_bus

    return open_bus()


def make_tell(verbose: bool) -> Callable[[str], None]:
    """What says each step of an act, if it is to be said."""

    def tell(step: str) -> None:
        if verbose:
            with suppress(OSError, ValueError):  # who reads may be gone, and the work goes on
                click.echo(f"  {step}")
                sys.stdout.flush()

    return tell


def tell_waiting() -> None:
    """Says on standard error that someone else is at work."""
    click.echo("Waiting for another provision that changes this system ...", err=True)


def find_program() -> str:
    """The path of this command, for units that run it."""
    own = os.path.abspath(sys.argv[0])
    return own if os.access(own, os.X_OK) else shutil.which("provision") or own


def look_at(plan: Plan, applied: Applied, bus: Bus, *, pages: bool = True) -> Observed:
    """What is in force of a plan that was applied."""
    from provisioner.discovery import discover
    from provisioner.fingerprint import machine_fingerprint
    from provisioner.observe import observe

    root = live_root()
    fingerprint = machine_fingerprint(discover(root, plan.within))
    return observe(plan, bus, root, fingerprint=fingerprint, applied=applied, pages=pages)
