"""Where a rendered plan lies on a system that it is in force on. Pure: names in, paths out.

Source: systemd.unit(5), unit file load path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from provisioner.render import PLAN_FILE

Mode = Literal["persistent", "runtime", "transient"]

APPLIED_FILE = "applied.json"
# Made by the boot-time check when this machine is the plan's; slices assert that it is there.
CHECKED_FILE = "/run/provision/checked"
# Where systemctl set-property and SetUnitProperties put their drop-ins, which win over unit files.
CONTROL_FOLDERS = ("/etc/systemd/system.control", "/run/systemd/system.control")
TRANSIENT_FOLDER = "/run/systemd/transient"  # of units without files, and of their drop-ins
# Where drop-ins that merge into a unit may lie. Source: systemd.unit(5); generators' output included.
UNIT_FOLDERS = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    TRANSIENT_FOLDER,
    "/run/systemd/generator.early",
    "/etc/systemd/system",
    "/etc/systemd/system.attached",
    "/run/systemd/system",
    "/run/systemd/system.attached",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
    "/run/systemd/generator.late",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders of one way of applying a plan."""

    mode: Mode
    units: str  # of unit files and drop-ins; for transient, where they would lie and none does
    folder: str  # of plan.json, the environment files and the record of what was applied
    programs: str  # of the wrappers

    @property
    def plan_path(self) -> str:
        """The path of plan.json."""
        return f"{self.folder}/{PLAN_FILE}"

    @property
    def applied_path(self) -> str:
        """The path of the record of what was applied."""
        return f"{self.folder}/{APPLIED_FILE}"

    @property
    def is_lasting(self) -> bool:
        """Whether it outlives a boot."""
        return self.mode == "persistent"

    def place(self, name: str) -> str:
        """The path of a rendered file."""
        if name == PLAN_FILE or name.endswith(".env"):
            return f"{self.folder}/{name}"
        if name.endswith("-run"):
            return f"{self.programs}/{name}"
        return f"{self.units}/{name}"

    def is_unit(self, name: str) -> bool:
        """Whether a rendered file is one that systemd reads."""
        return self.place(name).startswith(self.units + "/")


LAYOUTS: Mapping[Mode, Layout] = {
    "persistent": Layout("persistent", "/etc/systemd/system", "/etc/provision", "/usr/local/bin"),
    "runtime": Layout("runtime", "/run/systemd/system", "/run/provision", "/run/provision"),
    "transient": Layout("transient", "/run/systemd/system", "/run/provision", "/run/provision"),
}


def drop_in_folders(unit: str) -> tuple[str, ...]:
    """The names of the folders whose drop-ins merge into a unit, the least specific first.

    Source: systemd.unit(5): TYPE.d, for a dashed name each NAME-.TYPE.d, for an instance its
    template's, and the unit's own.
    """
    name, _, kind = unit.rpartition(".")
    base, at, _ = name.partition("@")
    parts = base.split("-")
    prefixes = [f"{'-'.join(parts[:count])}-.{kind}.d" for count in range(1, len(parts))]
    template = [f"{base}@.{kind}.d"] if at else []
    return (f"{kind}.d", *prefixes, *template, f"{unit}.d")


def slice_cgroup(unit: str) -> str:
    """The cgroup of a slice, below the mount: a-b.slice is /a.slice/a-b.slice.

    Source: systemd.slice(5); each dash is a level, and -.slice is the root.
    """
    name = unit.removesuffix(".slice")
    if name == "-":
        return "/"
    parts = name.split("-")
    return "".join(f"/{'-'.join(parts[: count + 1])}.slice" for count in range(len(parts)))


def sort_slices(names: Iterable[str]) -> tuple[str, ...]:
    """Slices in an order in which each comes after the one that it lies in."""
    return tuple(sorted(names, key=lambda name: (slice_cgroup(name).count("/"), name)))


def unit_cgroup(unit: str) -> str | None:
    """The cgroup of a slice or of init.scope, below the mount; None for a unit that systemd places."""
    if unit.endswith(".slice"):
        return slice_cgroup(unit)
    return "/init.scope" if unit == "init.scope" else None
