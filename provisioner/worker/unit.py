"""Which rank a process is, by the unit that systemd started it in."""

from __future__ import annotations

from provisioner.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class Unit(Record):
    """A unit whose name says a rank."""

    name: str  # of the unit
    service: str  # what stands before the rank: NAME of NAME-rank3.slice and of NAME@3.service
    rank: int
    is_slice: bool  # a rank's slice, whose cpuset is the rank's own


# Systemd's own templates of which an instance is a number, and none a rank's.
_NO_RANKS = ("user", "user-runtime-dir", "getty", "serial-getty", "session")


def find_unit(paths: Iterable[str]) -> Unit | None:
    """The innermost rank's slice in a cgroup's path; without one, the instance of a service's template.

    Source: systemd.slice(5), systemd.unit(5), "unit names"; `render` for the slices' names.

    Args:
        paths: the paths of the process's cgroups.
    """
    for path in paths:
        parts = path.split("/")[::-1]
        for part in parts:
            service, separator, rank = part.removesuffix(".slice").rpartition("-rank")
            if separator and part.endswith(".slice") and service and _is_rank(rank):
                return Unit(part, service, int(rank), is_slice=True)
        for part in parts:
            service, separator, rank = part.removesuffix(".service").partition("@")
            if separator and part.endswith(".service"):
                if _is_rank(rank) and service not in _NO_RANKS:
                    return Unit(part, service, int(rank), is_slice=False)
                break
    return None


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
