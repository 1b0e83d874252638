"""What the commands that work on the running system share."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from provisioner.errors import ForeignSystemError, ProvisionError

if TYPE_CHECKING:
    from provisioner.applied import Applied
    from provisioner.bus import Bus
    from provisioner.observe import Observed
    from provisioner.plan import Plan
    from provisioner.render import RenderedFile
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


def find_program() -> str:
    """The path of this command, for units that run it."""
    own = os.path.abspath(sys.argv[0])
    return own if os.access(own, os.X_OK) else shutil.which("provision") or own


def look_at(
    plan: Plan, applied: Applied | None, bus: Bus, *, pages: bool = True
) -> tuple[Observed, dict[str, RenderedFile]]:
    """What is in force of a plan that was applied, and what its files ought to hold."""
    from provisioner.discovery import discover
    from provisioner.fingerprint import machine_fingerprint
    from provisioner.layout import LAYOUTS
    from provisioner.observe import observe
    from provisioner.planfile import format_plan
    from provisioner.render import render

    root = live_root()
    layout = applied.layout if applied else LAYOUTS["persistent"]
    files = {
        layout.place(name): file
        for name, file in render(plan, format_plan(plan), layout.folder).items()
        if layout.mode != "transient" or not layout.is_unit(name)
    }
    fingerprint = machine_fingerprint(discover(root, plan.within))
    seen = observe(
        plan, bus, root, fingerprint=fingerprint, files=files, applied=applied, pages=pages
    )
    return seen, files
