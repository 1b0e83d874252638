"""A target and a bind's result as text for people, and as JSON's own types."""

from __future__ import annotations

from provisioner.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from provisioner.errors import Problem
    from provisioner.worker.binding import BindResult
    from provisioner.worker.target import Target

SCHEMA = "provision.worker/1"


def format_target(target: Target) -> str:
    """What a rank would be bound to, and why, as lines of text."""
    lines = [_first_line(target)]
    if target.cpus is None:
        lines.append("CPUs     nothing is known to be right: they stay as they are")
    else:
        lines.append(f"CPUs     {target.cpus}")
    if target.compile_cpus:
        lines.append(f"         of which {target.compile_cpus} are for background compilation")
    if target.memory == "off":
        lines.append("memory   off: no policy is set")
    else:
        lines.append(f"memory   {target.memory} on NUMA node {target.memory_nodes or 'unknown'}")
    return "\n".join([*lines, *_format_problems(target.problems), *_format_notes(target.notes)])


def format_result(result: BindResult) -> str:
    """What holds after a bind, as lines of text."""
    lines = [_first_line(result.target)]
    lines.append(f"CPUs     {result.cpus or 'unknown'}, by {result.cpus_by}")
    nodes = result.memory_nodes or "none"
    lines.append(f"memory   {result.memory_step} on NUMA node {nodes}, by {result.memory_by}")
    lines += [f"refused  {one}" for one in (*result.refused, *result.unreached)]
    if result.unmoved_pages is not None:
        lines.append(f"moved    all pages but {result.unmoved_pages}")
    lines.append(f"full     {'yes' if result.is_full else 'no'}")
    return "\n".join([*lines, *_format_problems(result.problems), *_format_notes(result.notes)])


def to_json(value: object) -> object:
    """A record as JSON's own types: sets as kernel lists, records as objects of their fields."""
    if isinstance(value, Record):
        return {name: to_json(one) for name, one in vars(value).items()}
    if isinstance(value, dict):
        return {str(key): to_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _first_line(target: Target) -> str:
    rank = "unknown" if target.local_rank is None else str(target.local_rank)
    cards = f", card {', '.join(target.devices)}" if target.devices else ""
    return f"rank     {rank} (by {target.rank_source}){cards}, planned by {target.source}"


def _format_problems(problems: Iterable[Problem]) -> list[str]:
    lines: list[str] = []
    for one in problems:
        lines.append(f"problem  {one.message}")
        if one.hint:
            lines.append(f"         ({one.hint})")
    return lines


def _format_notes(notes: Iterable[str]) -> list[str]:
    return [f"note     {one}" for one in notes]
