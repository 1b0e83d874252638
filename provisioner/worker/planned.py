"""The ranks of a plan.json, read by the standard library alone.

`planfile` reads the whole plan for the host half, and needs more than Python for it. The worker takes
what it needs of the same file, and checks the form of that.
"""

from __future__ import annotations

from provisioner.errors import InputError, ParseError, shorten
from provisioner.idset import CpuSet, NodeSet
from provisioner.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeVar

    T = TypeVar("T")

_SCHEMA = "provision.plan/1"
# A plan of a thousand ranks is a tenth of this.
_MAX_BYTES = 16 << 20


class PlannedRank(Record):
    """One rank of a plan, by the names that plan.json has."""

    path: str  # of the plan's file
    service: str
    rank: int
    vendor: str  # of its cards
    devices: tuple[str, ...]  # PCI addresses
    device_indexes: tuple[int, ...]  # their physical card numbers
    node_sources: tuple[str, ...]  # what said each card's node; empty in plans that do not say
    cpu_nodes: NodeSet
    memory_nodes: NodeSet
    memory: str  # of its service: bind, prefer or off
    cpus: CpuSet
    compile_cpus: CpuSet
    is_local: bool  # all of its CPUs are on its cards' nodes


def read_ranks(path: str) -> tuple[PlannedRank, ...]:
    """The ranks of every service of a plan file.

    Raises:
        OSError: it can't be read.
        InputError: it is no plan, or what is read of it is not of its form.
    """
    with open(path, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise InputError(f"{path}: is over {_MAX_BYTES} bytes: no plan is")
    return parse_ranks(data, path)


def parse_ranks(data: bytes | str, path: str) -> tuple[PlannedRank, ...]:
    """The ranks in the text of a plan.json; `path` is its name for messages.

    Raises:
        InputError: it is no plan, or what is read of it is not of its form.
    """
    hint = "Give the plan.json that provision render wrote"
    try:
        plan = _decode(data if isinstance(data, str) else data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is no JSON: {error}", hint) from error
    schema = plan.get("schema") if isinstance(plan, dict) else None
    if schema != _SCHEMA:
        raise InputError(
            f"{path}: is no plan: schema is '{shorten(str(schema))}', expected '{_SCHEMA}'", hint
        )
    try:
        return tuple(
            _read_rank(path, service, rank)
            for service in _take_list(plan, "services", dict)
            for rank in _take_list(service, "ranks", dict)
        )
    except ParseError as error:
        raise InputError(
            f"{path}: {error.message}", "Make the plan again with provision render"
        ) from error


class _Context:
    """What json's scanner takes for its options, as json.JSONDecoder has them."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = str  # of NaN and its like, which no plan has
    memo: dict[str, str] = {}  # noqa: RUF012  # the scanner's own


def _decode(text: str) -> Any:
    """The value of a JSON text.

    `json` loads `re`, which alone takes as long as a whole bind may. Its scanner stands in a module
    of its own, in CPython, and is what `json.loads` calls.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        from _json import make_scanner
    except ImportError:
        import json

        return json.loads(text)
    try:
        # The scanner takes any object with a decoder's options.
        scan = make_scanner(_Context)  # type: ignore[arg-type]
        value, end = scan(text, len(text) - len(text.lstrip()))
    except StopIteration as error:
        raise ValueError(f"expected a value at character {error.value}") from error
    if text[end:].strip():
        raise ValueError(f"expected nothing behind character {end}")
    return value


def _read_rank(path: str, service: Mapping[str, Any], rank: Mapping[str, Any]) -> PlannedRank:
    memory = _take(service, "memory", str)
    if memory not in ("bind", "prefer", "off"):
        raise ParseError(f"memory is '{shorten(memory)}': expected bind, prefer or off")
    cpus = CpuSet.parse_list(_take(rank, "cpus", str))
    compile_cpus = CpuSet.parse_list(_take(rank, "compile_cpus", str))
    if not cpus or not compile_cpus < cpus:
        raise ParseError(
            f"cpus is '{cpus}' and compile_cpus '{compile_cpus}': expected CPUs, and fewer of them"
        )
    return PlannedRank(
        path,
        _take(service, "name", str),
        _take(rank, "rank", int),
        _take(rank, "vendor", str),
        _take_list(rank, "devices", str),
        _take_list(rank, "device_indexes", int),
        _take_list(rank, "node_sources", str) if "node_sources" in rank else (),
        NodeSet.parse_list(_take(rank, "cpu_nodes", str)),
        NodeSet.parse_list(_take(rank, "memory_nodes", str)),
        memory,
        cpus,
        compile_cpus,
        _take(_take(rank, "alignment", dict), "local", bool),
    )


def _take(values: Mapping[str, Any], key: str, kind: type[T]) -> T:
    value = values.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        found = "missing" if value is None else f"'{shorten(str(value))}'"
        raise ParseError(f"{key} is {found}: expected {kind.__name__}")
    return value


def _take_list(values: Mapping[str, Any], key: str, kind: type[T]) -> tuple[T, ...]:
    found = _take(values, key, list)
    return tuple(_take({key: one}, key, kind) for one in found)
