"""Options that several commands share, and what they ask for."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click

from provisioner.errors import EXIT_USAGE, InputError, ParseError, Problem, ProblemsError

if TYPE_CHECKING:
    from provisioner.request import PlacementRequest
    from provisioner.root import Root
    from provisioner.topology import Machine

_F = TypeVar("_F", bound=Callable[..., Any])

_MAX_BYTES = 16 << 20
_MAX_CARDS = 1024
_POLICIES = ("exclusive", "node", "llc", "card-range")
_VENDORS = ("nvidia", "amd", "hygon", "intel", "habana", "ascend")


class SnapshotFile(NamedTuple):
    """What --snapshot names."""

    path: str


class HwlocFile(NamedTuple):
    """What --hwloc names."""

    path: str


class OpenedRoot(NamedTuple):
    """A root that is read already: standard input can't be read twice."""

    root: Root


# Where a machine is read from: a folder, another form of one, or None for this system.
Where = str | SnapshotFile | HwlocFile | OpenedRoot | None


def machine_options(function: _F) -> _F:
    """The options that say which machine is read, as the arguments `root`, `sample` and `within`."""

    @functools.wraps(function)
    def with_root(
        *args: Any,
        root: tuple[str, ...],
        sample: tuple[str, ...],
        snapshot: tuple[str, ...],
        hwloc: tuple[str, ...],
        **rest: Any,
    ) -> Any:
        given = {"--root": root, "--sample": sample, "--snapshot": snapshot, "--hwloc": hwloc}
        named = [name for name, values in given.items() for _ in values]
        if len(named) > 1:
            both = " and ".join(dict.fromkeys(named))
            raise click.UsageError(
                f"{both} exclude each other"
                if len(set(named)) > 1
                else f"{both} is given {len(named)} times: it takes one machine "
                "(provision plan takes more snapshots behind the first)"
            )
        where: Where = next(iter(root), None)
        if snapshot:
            where = SnapshotFile(snapshot[0])
        elif hwloc:
            where = HwlocFile(hwloc[0])
        return function(*args, root=where, sample=next(iter(sample), None), **rest)

    command: _F = cast("_F", with_root)
    for option in (
        click.option(
            "--within",
            default="root",
            show_default=True,
            metavar="CGROUP",
            help="The cgroup whose effective cpuset is the ceiling: root, self or a path.",
        ),
        click.option(
            "--sample",
            multiple=True,  # so that a second one is told, and not taken for the first
            metavar="NAME",
            help="Read a sample machine; provision samples lists them.",
        ),
        click.option(
            "--hwloc",
            multiple=True,
            metavar="FILE",
            help="Read what lstopo wrote as XML ('-': standard input).",
        ),
        click.option(
            "--snapshot",
            multiple=True,
            metavar="FILE",
            help="Read a machine that provision snapshot recorded ('-': standard input).",
        ),
        click.option(
            "--root",
            multiple=True,
            metavar="DIR",
            help="Read the recorded /sys and /proc in a folder instead of this system's.",
        ),
    ):
        command = option(command)
    return command


npu_smi_option = click.option(
    "--npu-smi",
    metavar="FILE",
    help="What npu-smi info (and npu-smi info -t topo) printed: the numbers of Ascend NPUs.",
)


def placement_options(function: _F) -> _F:
    """The options that say what is to be planned."""
    for option in reversed(
        (
            click.option(
                "--config",
                metavar="FILE",
                help="Read a provision.toml ('-': standard input); options win over it.",
            ),
            click.option(
                "--service",
                metavar="NAME",
                help="Name of the service and its slices.  [default: provision]",
            ),
            click.option(
                "--devices",
                metavar="LIST",
                help="Cards in rank order, by number or PCI address: 0-3,6 or 0000:1b:00.0.  [default: all]",
            ),
            click.option(
                "--devices-per-rank",
                type=int,
                metavar="N",
                help="Cards of each rank.  [default: 1]",
            ),
            click.option(
                "--vendor",
                type=click.Choice(_VENDORS),
                help="Whose cards, and whose numbers --devices counts.  [default: every vendor's]",
            ),
            click.option(
                "--policy",
                type=click.Choice(_POLICIES),
                help="How the cores of a NUMA node are shared.  [default: exclusive]",
            ),
            click.option(
                "--smt",
                type=click.Choice(("siblings", "first")),
                help="Whole cores, or one CPU of each core.  [default: siblings]",
            ),
            click.option(
                "--reach",
                type=click.Choice(("node", "package")),
                help="Whether NUMA nodes without a card lend their cores.  [default: node]",
            ),
            click.option(
                "--remainder",
                type=click.Choice(("unassigned", "spread")),
                help="What becomes of cores that do not divide.  [default: unassigned]",
            ),
            click.option(
                "--reserve-cores",
                type=int,
                metavar="N",
                help="Cores of each NUMA node kept for the system.  [default: 0]",
            ),
            click.option(
                "--reserve-cpus",
                metavar="CPULIST",
                help="CPUs kept for the system, rounded up to whole cores.",
            ),
            click.option("--exclude-cpus", metavar="CPULIST", help="CPUs that nobody is given."),
            click.option(
                "--use-isolated/--no-use-isolated",
                default=None,
                help="Use isolated CPUs too.  [default: no]",
            ),
            click.option(
                "--confine/--no-confine",
                default=None,
                help="Keep the system's slices on the reserved and unassigned cores.  [default: no]",
            ),
            click.option(
                "--compile-cores",
                type=int,
                metavar="N",
                help="Cores of each rank set aside for background compilation.  [default: 0]",
            ),
            click.option(
                "--memory",
                type=click.Choice(("bind", "prefer", "off")),
                help="A hard wall, a preference, or CPUs alone.  [default: bind]",
            ),
            click.option(
                "--memory-need",
                metavar="SIZE",
                help="Memory that each rank needs, e.g. 200GiB; checked against its node.",
            ),
            click.option(
                "--memory-kinds",
                metavar="LIST",
                help="Kinds of memory that ranks may use: dram, gpu, hbm, cxl.  [default: dram]",
            ),
            click.option(
                "--visible-devices",
                type=click.Choice(("service", "rank")),
                help="Which cards a rank's environment names.  [default: service]",
            ),
            click.option(
                "--nic-environment/--no-nic-environment",
                default=None,
                help="Name the nearest RDMA devices to NCCL and UCX.  [default: no]",
            ),
            click.option(
                "--virtual-nics/--no-virtual-nics",
                default=None,
                help="Count virtual functions as RDMA devices too.  [default: no]",
            ),
            npu_smi_option,
            click.option(
                "--locality",
                multiple=True,
                metavar="CARD=NODE",
                help="The NUMA node of a card that does not know its own; repeatable.",
            ),
        )
    ):
        function = option(function)
    return function


def open_root(root: Where, sample: str | None) -> Root:
    """The root that the options name; this system's without any.

    Raises UsageError for --hwloc, which describes a machine and holds no files of one.
    """
    if isinstance(root, OpenedRoot):
        return root.root
    if isinstance(root, HwlocFile):
        raise click.UsageError("--hwloc holds no files of a machine: expected --root or --snapshot")
    if sample is not None:
        from provisioner.facts import build_tree
        from provisioner.samples import read_sample

        return build_tree(read_sample(sample))
    if isinstance(root, SnapshotFile):
        if root.path == "-":
            from provisioner.archive import MAX_ARCHIVE_BYTES, unpack_tree

            return unpack_tree(*_read_bytes(root.path, MAX_ARCHIVE_BYTES))
        from provisioner.snapshot import read_snapshot

        return read_snapshot(root.path)
    from provisioner.root import DirectoryRoot

    return DirectoryRoot("/" if root is None else root)


def read_machine(root: Where, sample: str | None, within: str) -> Machine:
    """The machine that the options name."""
    if isinstance(root, HwlocFile):
        from provisioner.hwloc import MAX_BYTES, read_hwloc

        return read_hwloc(*read_input(root.path, MAX_BYTES), within)
    from provisioner.discovery import discover

    return discover(open_root(root, sample), within)


def add_npu_smi(
    machine: Machine, request: PlacementRequest, path: str
) -> tuple[Machine, PlacementRequest]:
    """The machine and the request with what a file of npu-smi's output adds to them."""
    from provisioner.npu_smi import apply_npu_smi

    machine, stated = apply_npu_smi(machine, *read_input(path))
    return machine, replace(request, locality={**stated, **request.locality})


def read_machine_and_request(
    root: Where, sample: str | None, within: str, options: Mapping[str, Any]
) -> tuple[Machine, PlacementRequest]:
    """The machine, and what is to be planned on it, by the placement options and npu-smi's text."""
    request = make_request(options)
    machine = read_machine(root, sample, within)
    npu_smi = options.get("npu_smi")
    return (machine, request) if npu_smi is None else add_npu_smi(machine, request, npu_smi)


def read_input(path: str, limit_bytes: int = _MAX_BYTES) -> tuple[str, str]:
    """(text, name for messages) of a file, or of standard input for '-'.

    Raises InputError if it can't be read, is no UTF-8 or is larger than the limit.
    """
    data, place = _read_bytes(path, limit_bytes)
    try:
        return data.decode("utf-8"), place
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place}: is no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from error


def _read_bytes(path: str, limit_bytes: int) -> tuple[bytes, str]:
    place = "<stdin>" if path == "-" else path
    try:
        if path == "-":
            if sys.stdin is None:
                raise InputError(f"{place}: standard input is closed")
            data = sys.stdin.buffer.read(limit_bytes + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(limit_bytes + 1)
    except OSError as error:
        raise InputError(f"{place}: can't be read: {error.strerror}") from error
    if len(data) > limit_bytes:
        raise InputError(f"{place}: is over {limit_bytes} bytes: no file that is read here is")
    return data, place


def make_request(options: Mapping[str, Any]) -> PlacementRequest:
    """The request that --config and the other placement options make together.

    Raises ProblemsError with everything that is wrong with the options' texts at once.
    """
    from provisioner.request import PlacementRequest

    request = PlacementRequest()
    if options.get("config") is not None:
        from provisioner.config import read_config

        request = read_config(*read_input(options["config"]))
    problems: list[Problem] = []
    host, service = _changes(options, problems)
    if len(request.services) > 1:
        for name, option in (("name", "--service"), ("devices", "--devices")):
            if name in service:
                problems.append(
                    Problem(
                        "bad_option",
                        f"{option} is given, and {options['config']} has {len(request.services)} services",
                        "Name the services and their devices in the file",
                    )
                )
    if problems:
        raise ProblemsError(problems, exit_status=EXIT_USAGE)
    services = tuple(replace(one, **service) for one in request.services)
    locality = {**request.locality, **host.pop("locality")}
    return replace(request, services=services, locality=locality, **host)


def _changes(
    options: Mapping[str, Any], problems: list[Problem]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the options change on the host's request, and on each service's."""
    from provisioner.idset import CpuSet

    host = {
        name: options[name]
        for name in (
            "policy",
            "smt",
            "reach",
            "remainder",
            "reserve_cores",
            "use_isolated",
            "confine",
            "virtual_nics",
        )
        if options.get(name) is not None
    }
    for name in ("reserve_cpus", "exclude_cpus"):
        if options.get(name) is not None:
            host[name] = _parsed(name, options[name], CpuSet.parse_list, problems)
    host["locality"] = dict(_locality(text, problems) for text in options.get("locality", ()))
    service = {
        name: options[name]
        for name in (
            "devices_per_rank",
            "vendor",
            "compile_cores",
            "memory",
            "visible_devices",
            "nic_environment",
        )
        if options.get(name) is not None
    }
    if options.get("service") is not None:
        service["name"] = options["service"]
    if options.get("devices") is not None:
        service["devices"] = _parsed("devices", options["devices"], _parse_devices, problems)
    if options.get("memory_need") is not None:
        from provisioner.sizes import parse_size

        service["memory_need_bytes"] = _parsed(
            "memory_need", options["memory_need"], parse_size, problems
        )
    if options.get("memory_kinds") is not None:
        service["memory_kinds"] = _parsed(
            "memory_kinds", options["memory_kinds"], _parse_kinds, problems
        )
    return host, service


def _parsed(name: str, text: str, parse: Callable[[str], Any], problems: list[Problem]) -> Any:
    try:
        return parse(text)
    except ParseError as error:
        problems.append(
            Problem("bad_option", f"--{name.replace('_', '-')}: {error.message}", error.hint)
        )
        return None


def _parse_devices(text: str) -> tuple[str, ...]:
    from provisioner.request import parse_card

    cards: list[str] = []
    for part in text.split(","):
        span = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", part.strip(), re.ASCII)
        if span:
            first, last = int(span[1]), int(span[2])
            if not first <= last < first + _MAX_CARDS:
                raise ParseError(
                    f"'{part.strip()}' is no range of cards: expected up to {_MAX_CARDS} of them, the lowest first"
                )
            cards += [str(number) for number in range(first, last + 1)]
        else:
            cards.append(parse_card(part))
    return tuple(cards)


def _parse_kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(part.strip() for part in text.split(","))
    strange = [kind for kind in kinds if kind not in ("dram", "gpu", "hbm", "cxl")]
    if strange:
        raise ParseError(f"'{strange[0]}' is no kind of memory: expected dram, gpu, hbm or cxl")
    return kinds


def _locality(text: str, problems: list[Problem]) -> tuple[str, int]:
    from provisioner.request import parse_card_name

    card, equals, node = text.rpartition("=")
    name = _parsed("locality", card, parse_card_name, problems) if equals else None
    if not equals or not (node.isascii() and node.isdigit() and len(node) < 9):
        problems.append(
            Problem(
                "bad_option",
                f"--locality: '{text[:60]}' is not of the form CARD=NODE, as in 0000:8a:00.0=1",
            )
        )
        return text, 0
    return name or text, int(node)
