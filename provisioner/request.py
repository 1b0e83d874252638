"""What an operator asks for: the placement of one or several services on a host. Values only.

Where it comes from (options, provision.toml) is `config`'s subject; whether a machine can serve it
is `planner`'s. `check_request` finds what contradicts itself whatever the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from provisioner.errors import ParseError, Problem, shorten
from provisioner.idset import CpuSet
from provisioner.pci import find_pci_address
from provisioner.topology import MemoryKind, Vendor

Policy = Literal["exclusive", "node", "llc", "card-range"]
Smt = Literal["siblings", "first"]
Reach = Literal["node", "package"]
Remainder = Literal["unassigned", "spread"]
MemoryMode = Literal["bind", "prefer", "off"]
Visible = Literal["service", "rank"]

POLICIES: tuple[Policy, ...] = get_args(Policy)
SMT_MODES: tuple[Smt, ...] = get_args(Smt)
REACHES: tuple[Reach, ...] = get_args(Reach)
REMAINDERS: tuple[Remainder, ...] = get_args(Remainder)
MEMORY_MODES: tuple[MemoryMode, ...] = get_args(MemoryMode)
VISIBLE_MODES: tuple[Visible, ...] = get_args(Visible)

DEFAULT_SERVICE = "provision"


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """The process that a service starts for each rank."""

    command: tuple[str, ...]  # program (absolute path) and arguments, taken literally
    user: str | None = None
    group: str | None = None
    working_directory: str | None = None  # absolute path
    environment: Mapping[str, str] = field(
        default_factory=dict
    )  # on top of the rank's own, which it overrides


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """One service: its cards, cut into ranks."""

    name: str = DEFAULT_SERVICE
    devices: tuple[str, ...] | None = (
        None  # PCI addresses or card numbers, in rank order; None: every card
    )
    devices_per_rank: int = 1
    vendor: Vendor | None = (
        None  # whose cards, and whose numbers devices= counts; None: any vendor's
    )
    compile_cores: int = 0  # cores of each rank's share set aside for background compilation
    memory: MemoryMode = "bind"
    memory_need_bytes: int | None = None  # per rank
    memory_kinds: tuple[MemoryKind, ...] = ("dram",)  # kinds of memory that a rank may use
    visible_devices: Visible = "service"  # which cards a rank's environment names
    nic_environment: bool = False  # name the nearest RDMA devices to NCCL and UCX
    worker: WorkerRequest | None = None


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Everything that a plan is made from, besides the machine."""

    services: tuple[ServiceRequest, ...] = (ServiceRequest(),)
    policy: Policy = "exclusive"
    smt: Smt = "siblings"
    reach: Reach = "node"
    remainder: Remainder = "unassigned"
    reserve_cores: int = 0  # whole cores on each NUMA node with CPUs
    reserve_cpus: CpuSet = CpuSet()  # rounded up to whole cores
    exclude_cpus: CpuSet = CpuSet()
    use_isolated: bool = False
    confine: bool = False
    virtual_nics: bool = False  # virtual functions count as RDMA devices too
    locality: Mapping[str, int] = field(
        default_factory=dict
    )  # card (address, or vendor and index) -> node


# A name is the first component of a slice; systemd's own top-level slices are taken.
# Source: systemd.unit(5), unit names; systemd.special(7).
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:]*", re.ASCII)
_TAKEN = frozenset({"system", "user", "machine", "init", "app", "session", "background"})
# Systemd gives cgroups with such names another one. Source: cg_needs_escape in systemd.
_CONTROLLERS = frozenset(
    (
        *("cgroup", "cpu", "cpuacct", "cpuset", "io", "blkio", "memory", "devices", "pids"),
        *("rdma", "hugetlb", "misc", "dmem"),
    )
)
_NAME_MAX = 64  # unit names are below 256, and '-rank' with a number, '.slice' and drop-in folders are added
# Texts: compiling what a request rarely has would be paid by every start.
_USER = r"[A-Za-z_][A-Za-z0-9_.-]*\$?|[0-9]+"
_CARD_NAME = r"[a-z]+(0|[1-9][0-9]{0,5})"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"


def parse_card(text: str) -> str:
    """A card as devices= names it: a PCI address in the kernel's form, a number, or vendor and number.

    Raises ParseError if the text is none of these.
    """
    stripped = text.strip()
    address = find_pci_address(stripped)
    if address is not None:
        return str(address)
    if stripped.isascii() and stripped.isdigit() and len(stripped) <= 6:
        return str(int(stripped))
    if re.fullmatch(_CARD_NAME, stripped.lower(), re.ASCII):
        return stripped.lower()
    raise ParseError(
        f"'{shorten(text)}' is no card: expected a PCI address such as '0000:1b:00.0', a card number, or "
        "vendor and number such as 'nvidia0'"
    )


def parse_card_name(text: str) -> str:
    """A card as [locality] names it: a PCI address in the kernel's form, or vendor and number.

    Raises ParseError if the text is neither.
    """
    address = find_pci_address(text.strip())
    name = str(address) if address is not None else text.strip().lower()
    if address is None and not re.fullmatch(_CARD_NAME, name, re.ASCII):
        raise ParseError(
            f"'{shorten(text)}' is no card: expected a PCI address, or vendor and number: 'nvidia0'"
        )
    return name


def check_request(request: PlacementRequest) -> list[Problem]:
    """What is wrong with a request whatever the machine; empty if nothing is."""
    problems: list[Problem] = []
    if not request.services:
        problems.append(
            Problem("no_service", "the request names no service: expected at least one")
        )
    seen: set[str] = set()
    for service in request.services:
        problems += _check_service(service)
        if service.name in seen:
            problems.append(
                Problem(
                    "same_name",
                    f"service '{shorten(service.name)}' is there twice",
                    "Give each service a name of its own",
                )
            )
        seen.add(service.name)
    if len(request.services) > 1:
        for service in request.services:
            if service.devices is None and service.vendor is None:
                problems.append(
                    Problem(
                        "devices_missing",
                        f"service '{shorten(service.name)}': devices= is missing: with {len(request.services)} "
                        "services on a host each must list its cards",
                        "List the cards of each service by PCI address or number, or give each its vendor=",
                    )
                )
    if request.reserve_cores < 0:
        problems.append(_negative("reserve_cores=", request.reserve_cores))
    clash = request.reserve_cpus & request.exclude_cpus
    if clash:
        problems.append(
            Problem(
                "reserved_and_excluded",
                f"CPUs {clash} are in reserve_cpus= and in exclude_cpus=: a CPU that is excluded can't be reserved",
                "Take them out of one of the two",
            )
        )
    if request.policy == "card-range":
        for option, given in (
            ("reach=", request.reach != "node"),
            ("remainder=", request.remainder != "unassigned"),
        ):
            if given:
                problems.append(
                    Problem(
                        "policy_contradicts",
                        f"policy= is 'card-range', which cuts CPUs by card number alone, and {option} is set",
                        f"Leave {option} out, or take another policy",
                    )
                )
    elif request.policy == "node" and request.remainder == "spread":
        problems.append(
            Problem(
                "policy_contradicts",
                "policy= is 'node', which leaves no remainder, and remainder= is 'spread'",
                "Leave remainder= out, or take policy 'exclusive'",
            )
        )
    for card, node in request.locality.items():
        if node < 0:
            problems.append(
                Problem(
                    "bad_locality",
                    f"[locality] '{card}' is {node}: expected the id of a NUMA node, 0 or more",
                )
            )
    return problems


def _check_service(service: ServiceRequest) -> list[Problem]:
    problems: list[Problem] = []
    where = f"service '{shorten(service.name)}'"
    if not _NAME.fullmatch(service.name) or len(service.name) > _NAME_MAX:
        problems.append(
            Problem(
                "bad_name",
                f"{where}: the name is no service name: expected 1 to {_NAME_MAX} letters, digits, '_', '.' or ':'",
                "A dash would add a level to the slice hierarchy; write '_' instead"
                if "-" in service.name
                else "",
            )
        )
    elif service.name.startswith(("_", ".")) or service.name.partition(".")[0] in _CONTROLLERS:
        problems.append(
            Problem(
                "bad_name",
                f"{where}: the kernel's own files have such names in a cgroup: expected one that begins "
                f"with none of '_', {', '.join(sorted(_CONTROLLERS))}",
                "Choose another name",
            )
        )
    elif service.name in _TAKEN:
        problems.append(
            Problem(
                "bad_name", f"{where}: {service.name}.slice is systemd's own", "Choose another name"
            )
        )
    if service.devices is not None:
        if not service.devices:
            problems.append(
                Problem("no_devices", f"{where}: devices= is empty: expected at least one card")
            )
        cards: list[str] = []
        for text in service.devices:
            try:
                cards.append(parse_card(text))
            except ParseError as error:
                problems.append(Problem("bad_card", f"{where}: devices= names {error.message}"))
        repeated = sorted({card for card in cards if cards.count(card) > 1})
        if repeated:
            problems.append(
                Problem("repeated_devices", f"{where}: devices= names {', '.join(repeated)} twice")
            )
    if service.devices_per_rank < 1:
        problems.append(
            Problem(
                "bad_number",
                f"{where}: devices_per_rank= is {service.devices_per_rank}: expected 1 or more",
            )
        )
    if service.compile_cores < 0:
        problems.append(_negative(f"{where}: compile_cores=", service.compile_cores))
    if service.memory_need_bytes is not None and service.memory_need_bytes <= 0:
        problems.append(
            Problem(
                "bad_number",
                f"{where}: memory_need= is {service.memory_need_bytes}: expected a size above 0",
            )
        )
    if service.memory_need_bytes is not None and service.memory == "off":
        problems.append(
            Problem(
                "memory_contradicts",
                f"{where}: memory= is 'off', so memory_need= has nothing to be checked against",
                'Take memory = "bind" or "prefer", or leave memory_need= out',
            )
        )
    if not service.memory_kinds or "none" in service.memory_kinds:
        problems.append(
            Problem(
                "bad_kind",
                f"{where}: memory_kinds= must name kinds of memory: expected dram, gpu, hbm or cxl",
            )
        )
    if service.worker is not None:
        problems += _check_worker(where, service.worker)
    return problems


def _check_worker(where: str, worker: WorkerRequest) -> list[Problem]:
    problems: list[Problem] = []

    def refuse(setting: str, found: str, expected: str) -> None:
        problems.append(
            Problem("bad_worker", f"{where}: [worker] {setting} is {found}: expected {expected}")
        )

    if not worker.command:
        refuse("command=", "empty", "a program and its arguments")
    elif not worker.command[0].startswith("/"):
        refuse(
            "command=",
            f"'{shorten(worker.command[0])}'",
            "the program's absolute path, as units need it",
        )
    for setting, name in (("user=", worker.user), ("group=", worker.group)):
        if name is not None and not re.fullmatch(_USER, name, re.ASCII):
            refuse(setting, f"'{shorten(name)}'", "a user's or group's name or number")
    directory = worker.working_directory
    if directory is not None and not directory.startswith("/"):
        refuse("working_directory=", f"'{shorten(directory)}'", "an absolute path")
    for variable in worker.environment:
        if not re.fullmatch(_VARIABLE, variable, re.ASCII):
            refuse(
                "environment",
                f"the name '{shorten(variable)}'",
                "letters, digits and '_', no digit first",
            )
    texts = [("command=", text) for text in worker.command]
    texts += [("working_directory=", directory or "")]
    texts += [(f"environment {shorten(name)}=", text) for name, text in worker.environment.items()]
    for setting, text in texts:
        if "\0" in text or any(0xD800 <= ord(char) <= 0xDFFF for char in text):
            refuse(
                setting,
                "a text with a zero byte or half a character",
                "text that a process can be given",
            )
    return problems


def _negative(setting: str, value: int) -> Problem:
    return Problem("bad_number", f"{setting} is {value}: expected 0 or more")
