"""`provision.toml`: reading one into a PlacementRequest, and writing a complete one with comments.

The keys are the fields of the request's dataclasses. A field `..._bytes` is a key without that
ending, because its value names its unit; the fields in `_TABLES` are tables of their own.
"""

from __future__ import annotations

import dataclasses
import textwrap
import tomllib
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from provisioner.errors import EXIT_USAGE, ParseError, Problem, ProblemsError
from provisioner.idset import CpuSet
from provisioner.request import (
    PlacementRequest,
    ServiceRequest,
    WorkerRequest,
    check_request,
    parse_card,
    parse_card_name,
)
from provisioner.sizes import SIZE_FORM, format_size, parse_size

_Table = Mapping[str, Any]  # as tomllib gives one


class _Key(NamedTuple):
    """What the dataclass field of a key says."""

    field: str
    kind: Any  # the type of its value, or of each entry of an array
    is_array: bool
    default: Any  # dataclasses.MISSING: the key is required


_Keys = Mapping[str, _Key]
_TABLES = frozenset({"services", "locality", "worker", "environment"})


def _keys_of(record: type[Any]) -> dict[str, _Key]:
    keys: dict[str, _Key] = {}
    for name, kind in get_type_hints(record).items():
        if name not in _TABLES:
            kind = get_args(kind)[0] if NoneType in get_args(kind) else kind  # None: key is absent
            is_array = get_origin(kind) is tuple
            kind = get_args(kind)[0] if is_array else kind
            default = record.__dataclass_fields__[name].default
            keys[name.removesuffix("_bytes")] = _Key(name, kind, is_array, default)
    return keys


_HOST_KEYS = _keys_of(PlacementRequest)
_SERVICE_KEYS = _keys_of(ServiceRequest)
_WORKER_KEYS = _keys_of(WorkerRequest)
_HOMES = {"placement": _HOST_KEYS | _SERVICE_KEYS, "worker": _WORKER_KEYS}
_NODE = _Key("locality", int, is_array=False, default=0)
_VARIABLE = _Key("environment", str, is_array=False, default="")
_FORMS: Mapping[object, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "a text",
    CpuSet: "a cpulist such as '0-1,56'",
    "devices": "a PCI address such as '0000:1b:00.0', or a card number",
    "memory_need_bytes": SIZE_FORM,
}


def _form(key: _Key) -> str:
    """What the value, or each entry of the array, must be."""
    if get_origin(key.kind) is Literal:
        # 'none' is the kind of a node without memory, which a machine has and nobody can ask for
        return f"one of {', '.join(one for one in get_args(key.kind) if one != 'none')}"
    return _FORMS.get(key.field) or _FORMS[key.kind]


def read_config(text: str, place: str) -> PlacementRequest:
    """The request that the text of a `provision.toml` makes; `place` names the file in messages.

    Raises:
        ProblemsError: the text is no TOML, or there are faults in it: all, each with its place.
    """
    reader = _Reader(place)
    try:
        request = reader.read(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        lines = text.split("\n")
        end = f"line {len(lines)}, column {len(lines[-1]) + 1}"
        reader.refuse("bad_toml", f"no TOML: {str(error).replace('end of document', end)}")
    except (ValueError, RecursionError):  # Python's own limits: digits of a number, nested calls
        reader.refuse("bad_toml", "no TOML: a number is too long, or tables are nested too deeply")
    else:
        if not reader.problems:
            return request
    raise ProblemsError(reader.problems, exit_status=EXIT_USAGE, subject=place)


class _Reader:
    """Decodes table by table and key by key, and keeps each problem instead of stopping at it.

    A refused value is replaced by one that `check_request` accepts, so that no fault is told twice.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self.problems: list[Problem] = []
        self._repeated: set[Problem] = set()  # what check_request tells of a thing told already

    def refuse(self, code: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(code, f"{self._place}: {message}", hint))

    def read(self, document: dict[str, Any]) -> PlacementRequest:
        """The request of a whole file; one that only resembles it if there are problems."""
        self._settings(document, "", {}, "placement", "locality", "worker", "service")
        placement = self._table(document.get("placement", {}), "[placement]")
        given = self._settings(placement, "[placement]", _HOMES["placement"])
        names = [key.field for key in _HOST_KEYS.values() if key.field in given]
        host = {name: given.pop(name) for name in names}
        host["locality"] = self._locality(document.get("locality", {}))
        if "worker" in document:
            given["worker"] = self._worker(document["worker"], "[worker]")
        services = [ServiceRequest(**given)]
        if "service" in document:
            for name in [name for name in ("name", "devices") if name in given]:
                del given[name]
                message = f"[placement] {name} is set, and there are [[service]] tables"
                hint = f"Give {name} in each [[service]] instead"
                self.refuse("config_contradicts", message, hint)
            services = self._services(document["service"], given)
        request = PlacementRequest(services=tuple(services), **host)
        for problem in check_request(request):
            if problem not in self._repeated:
                self.refuse(problem.code, problem.message, problem.hint)
        return request

    def _services(self, value: object, shared: _Table) -> list[ServiceRequest]:
        """The services of the `[[service]]` tables.

        What is wrong with what they share is told here, once, whoever inherits it.
        """
        default = ServiceRequest(**shared)
        for problem in check_request(PlacementRequest((default,))):
            message = problem.message.removeprefix(f"service '{default.name}': ")
            prefix = "" if message.startswith("[worker]") else "[placement] "
            self.refuse(problem.code, prefix + message, problem.hint)
        if not (isinstance(value, list) and all(isinstance(entry, dict) for entry in value)):
            self._bad("service", value, "tables headed [[service]]")
            value = [value if isinstance(value, dict) else {}]
        services: list[ServiceRequest] = []
        for number, table in enumerate(value, 1):
            name = table.get("name")
            where = f"[[service]] {number}" + (f" ({_cut(name)})" if isinstance(name, str) else "")
            own = self._settings(table, where, _SERVICE_KEYS, "worker")
            if "name" in own and not isinstance(name, str):
                own["name"] = f"unnamed_{number}"  # the default would be there twice
            if "worker" in table:
                own["worker"] = self._worker(table["worker"], f"{where} [service.worker]")
            services.append(ServiceRequest(**{**shared, **own}))
            inherited = {key: shared[key] for key in shared if key not in own}
            alone = PlacementRequest((ServiceRequest(name=services[-1].name, **inherited),))
            self._repeated.update(one for one in check_request(alone) if one.code != "bad_name")
        return services

    def _worker(self, value: object, where: str) -> WorkerRequest:
        table = self._table(value, where)
        if isinstance(value, dict) and "command" not in value:
            self.refuse("missing_key", f"{where} command is missing: expected a program")
        settings = {"command": ("/",)} | self._settings(table, where, _WORKER_KEYS, "environment")
        where = f"{where.removesuffix(']')}.environment]"
        settings["environment"] = {
            name: self._value(_VARIABLE, text, f"{where} {_cut(name)}")
            for name, text in self._table(table.get("environment", {}), where).items()
        }
        return WorkerRequest(**settings)

    def _locality(self, value: object) -> dict[str, int]:
        nodes: dict[str, int] = {}
        for name, node in self._table(value, "[locality]").items():
            try:
                card = parse_card_name(name)
            except ParseError as error:
                self.refuse("bad_value", f"[locality] key {error.message}")
                continue
            if card in nodes:
                self.refuse("repeated_devices", f"[locality] '{card}' is there twice")
            nodes[card] = self._value(_NODE, node, f"[locality] '{_cut(name)}'")
        return nodes

    def _table(self, value: object, where: str) -> _Table:
        if not isinstance(value, dict):
            self._bad(where, value, "a table")
        return value if isinstance(value, dict) else {}

    def _settings(self, table: _Table, where: str, keys: _Keys, *tables: str) -> dict[str, Any]:
        """Field -> value for the keys that a table has, which may hold the given tables besides."""
        settings: dict[str, Any] = {}
        for name, value in table.items():
            if name in keys:
                settings[keys[name].field] = self._value(keys[name], value, f"{where} {name}")
            elif name not in tables:
                self._unknown(where, name, *keys, *tables)
        return settings

    def _value(self, key: _Key, value: object, where: str) -> Any:
        if key.is_array:
            if not isinstance(value, list):
                self._bad(where, value, f"an array, each entry {_form(key)}")
                return (_accepted(key, 0),)
            values = []
            for number, one in enumerate(value, 1):
                entry = key._replace(is_array=False, default=_accepted(key, number))
                values.append(self._value(entry, one, f"{where} entry {number}"))
            return tuple(values)
        try:
            return _convert(key, value)
        except ParseError as error:
            self.refuse("bad_value", f"{where}: {error.message}", error.hint)
        except msgspec.ValidationError:
            self._bad(where, value, _form(key))
        return key.default

    def _bad(self, where: str, value: object, expected: str) -> None:
        self.refuse("bad_value", f"{where} is {_shown(value)}: expected {expected}")

    def _unknown(self, where: str, name: str, *expected: str) -> None:
        import difflib  # only who mistypes waits for it

        near = difflib.get_close_matches(name, expected, 1)
        guess = f" (did you mean '{near[0]}'?)" if near else ""
        homes = [f"It belongs in [{table}]" for table, keys in _HOMES.items() if name in keys]
        message = f"unknown key '{_cut(name)}': expected one of {', '.join(expected)}{guess}"
        self.refuse("unknown_key", f"{where}: {message}" if where else message, "".join(homes))


def _accepted(key: _Key, number: int) -> str:
    """What stands for a refused entry, so that check_request does not refuse it once more."""
    return str(999_999 - number) if key.field == "devices" else f"/{number}"


def _convert(key: _Key, value: object) -> Any:
    """A key's value, or an entry of it; raises ParseError or msgspec.ValidationError for a wrong one."""
    if isinstance(value, int) and value.bit_length() > 63:
        raise ParseError("the number is out of range: expected up to 64 bits, as TOML has them")
    if key.field == "devices":
        return parse_card(str(msgspec.convert(value, int | str)))
    if key.field.endswith("_bytes") and isinstance(value, str):
        return parse_size(value)
    if key.kind is CpuSet:
        return CpuSet.parse_list(msgspec.convert(value, str))
    return msgspec.convert(value, key.kind)


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "an array"
    return f'"{_cut(value)}"' if isinstance(value, str) else _toml(value).strip('"')


def _cut(text: str) -> str:
    """The inside of a quoted text, short and with nothing in it that a terminal would act on."""
    return _escape(text if len(text) <= 60 else f"{text[:57]}...")


_NOTES = {
    "file": "What provision places on this host. A key behind a '#' is unset: take the '#' away to set it.",
    "placement": "The host. A service's keys here, save name and devices, are the default of each [[service]].",
    "policy": "How cards share a NUMA node's cores. exclusive: equal shares. node: all of them, together. "
    "llc: whole last-level caches. card-range: by card number, whatever the node (to compare).",
    "smt": "CPUs taken of each core. siblings: all. first: one, and its siblings stay idle.",
    "reach": "Whose cores and memory a card has. node: its NUMA node's. package: also its package's cardless nodes'.",
    "remainder": "Cores that do not divide evenly. unassigned: no rank's. spread: handed out one each.",
    "reserve_cores": "Cores kept for the system, whole ones on each NUMA node with CPUs.",
    "reserve_cpus": "CPUs kept for the system, a cpulist such as \"0-1,56\", rounded up to whole cores.",
    "exclude_cpus": "CPUs that are not planned with, a cpulist such as \"0-1,56\".",
    "use_isolated": "Whether ranks may have CPUs isolated at boot, where the kernel balances no load.",
    "confine": "Whether to keep the system's own slices on the reserved and unassigned cores.",
    "name": "The service's name, and its slice's: up to 64 letters, digits, '_', '.' and ':'.",
    "devices": "The cards in the order of the ranks: PCI addresses or card numbers. Unset: every card.",
    "vendor": "Whose cards, and whose numbers devices count. Unset: every vendor's.",
    "devices_per_rank": "Cards of each rank.",
    "compile_cores": "Cores of each rank set aside for background compilation.",
    "memory": "How a rank is kept on its memory nodes. bind: it can use no other, and is killed when they are "
    "full. prefer: it uses others when they are full. off: not at all.",
    "memory_need_bytes": "Memory that a rank needs, to be checked: \"200GiB\", \"200GB\" or bytes. Unset: unchecked.",
    "memory_kinds": "Kinds of memory node that a rank may use.",
    "visible_devices": "Cards that a rank's environment names. service: all of its service. rank: its own.",
    "nic_environment": "Whether a rank's environment names its RDMA devices to NCCL and UCX.",
    "virtual_nics": "Whether virtual functions count as RDMA devices that a rank may be near to.",
    "locality": "NUMA nodes of cards that do not know theirs: PCI address (or nvidia0 and so on) = node id.",
    "worker": "What a unit starts for each rank of services without a [service.worker]. Unset: no such unit.",
    "command": "Program (absolute path) and arguments, taken literally. Required.",
    "user": "User that it runs as, name or number. Unset: root.",
    "group": "Group that it runs as, name or number. Unset: the user's.",
    "working_directory": "Where it starts, an absolute path. Unset: /.",
    "environment": "Variables, taken literally, which override the rank's own.",
    "services": "Several services on one host: a [[service]] for each, and no name or devices in [placement].",
}  # fmt: skip
_EXAMPLES: Mapping[str, Any] = {
    "name": "chat", "devices": ("0000:1b:00.0", "1"), "vendor": "amd", "memory_need_bytes": 200 << 30,
    "command": ("/usr/bin/python3", "-m", "engine"), "user": "engine", "group": "engine",
    "working_directory": "/srv/engine", "environment": {"LOG_LEVEL": "info"}, "locality": {"0000:8a:00.0": 1},
}  # fmt: skip


def format_config(request: PlacementRequest) -> str:
    """The complete `provision.toml` of a request, with comments, which `read_config` reads back."""
    one = request.services[0] if len(request.services) == 1 else None
    lines = [*_comment("file"), "", *_comment("placement"), "[placement]"]
    lines += [*_settings(_HOST_KEYS, request), *_settings(_SERVICE_KEYS, one)]
    lines += ["", *_comment("locality"), "[locality]", *_entries("locality", request)]
    lines += ["", *_comment("worker"), *_worker("worker", one), "", *_comment("services")]
    for service in (None,) if one is not None else request.services:
        lines += ["#[[service]]"] if service is None else ["", "[[service]]"]
        lines += _settings(_SERVICE_KEYS, service, explained=False)
        lines += _worker("service.worker", service, explained=False)
    return "\n".join((*lines, ""))


def _worker(name: str, service: ServiceRequest | None, explained: bool = True) -> list[str]:
    worker = None if service is None else service.worker
    unset = "#" if worker is None else ""
    lines = [f"{unset}[{name}]", *_settings(_WORKER_KEYS, worker, explained)]
    lines += ["", *_comment("environment")] if explained else []
    return [*lines, f"{unset}[{name}.environment]", *_entries("environment", worker)]


def _settings(keys: _Keys, record: object, explained: bool = True) -> list[str]:
    """A line for each key, commented out where the record has no value, or is None itself."""
    lines: list[str] = []
    for name, key in keys.items():
        lines += ["", *_comment(key.field, key)] if explained else []
        value = getattr(record, key.field, None)
        unset = "#" if value is None else ""
        value = _EXAMPLES.get(key.field, key.default) if value is None else value
        value = format_size(value) if key.field.endswith("_bytes") else value
        lines.append(f"{unset}{name} = {_toml(value)}")
    return lines


def _entries(field: str, record: object) -> list[str]:
    given = getattr(record, field, None)
    unset, shown = ("", given) if given else ("#", _EXAMPLES[field])
    return [f"{unset}{_toml(name, bare=True)} = {_toml(value)}" for name, value in shown.items()]


def _comment(name: str, key: _Key | None = None) -> list[str]:
    """What is to be known of a table, or of a key with its choices and its default."""
    lines = textwrap.wrap(_NOTES[name], 98, break_on_hyphens=False)
    if key is not None:
        facts = [f"{_form(key).capitalize()}."] if get_origin(key.kind) is Literal else []
        if key.default not in (None, dataclasses.MISSING):
            facts.append(f"Default: {_toml(key.default)}.")
        lines += textwrap.wrap(" ".join(facts), 98)
    return [f"# {line}" for line in lines]


def _toml(value: object, *, bare: bool = False) -> str:
    if isinstance(value, int):
        return str(value).lower()  # True is an int, and true in TOML
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(one) for one in value)}]"
    text = str(value)
    return text if bare and text.isascii() and text.isidentifier() else f'"{_escape(text)}"'


def _escape(text: str) -> str:
    """The inside of a TOML basic string; what does not print stands there by its number."""
    return "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\U{ord(c):08X}") for c in text)


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
