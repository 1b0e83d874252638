"""provision.toml: what is read, what is refused, and what is written."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner import config
from provisioner.config import format_config, read_config
from provisioner.errors import EXIT_USAGE, ParseError, Problem, ProblemsError
from provisioner.idset import CpuSet
from provisioner.pci import PciAddress
from provisioner.request import (
    MEMORY_MODES,
    POLICIES,
    REACHES,
    REMAINDERS,
    SMT_MODES,
    VISIBLE_MODES,
    PlacementRequest,
    ServiceRequest,
    WorkerRequest,
    check_request,
)
from provisioner.sizes import format_size, parse_size
from provisioner.topology import VENDORS

DEFAULT_TEXT = """\
# What provision places on this host. A key behind a '#' is unset: take the '#' away to set it.

# The host. A service's keys here, save name and devices, are the default of each [[service]].
[placement]

# How cards share a NUMA node's cores. exclusive: equal shares. node: all of them, together. llc:
# whole last-level caches. card-range: by card number, whatever the node (to compare).
# One of exclusive, node, llc, card-range. Default: "exclusive".
policy = "exclusive"

# CPUs taken of each core. siblings: all. first: one, and its siblings stay idle.
# One of siblings, first. Default: "siblings".
smt = "siblings"

# Whose cores and memory a card has. node: its NUMA node's. package: also its package's cardless
# nodes'.
# One of node, package. Default: "node".
reach = "node"

# Cores that do not divide evenly. unassigned: no rank's. spread: handed out one each.
# One of unassigned, spread. Default: "unassigned".
remainder = "unassigned"

# Cores kept for the system, whole ones on each NUMA node with CPUs.
# Default: 0.
reserve_cores = 0

# CPUs kept for the system, a cpulist such as "0-1,56", rounded up to whole cores.
# Default: "".
reserve_cpus = ""

# CPUs that are not planned with, a cpulist such as "0-1,56".
# Default: "".
exclude_cpus = ""

# Whether ranks may have CPUs isolated at boot, where the kernel balances no load.
# Default: false.
use_isolated = false

# Whether to keep the system's own slices on the reserved and unassigned cores.
# Default: false.
confine = false

# Whether virtual functions count as RDMA devices that a rank may be near to.
# Default: false.
virtual_nics = false

# The service's name, and its slice's: up to 64 letters, digits, '_', '.' and ':'.
# Default: "provision".
name = "provision"

# The cards in the order of the ranks: PCI addresses or card numbers. Unset: every card.
#devices = ["0000:1b:00.0", "1"]

# Cards of each rank.
# Default: 1.
devices_per_rank = 1

# Whose cards, and whose numbers devices count. Unset: every vendor's.
# One of nvidia, amd, hygon, intel, habana, ascend.
#vendor = "amd"

# Cores of each rank set aside for background compilation.
# Default: 0.
compile_cores = 0

# How a rank is kept on its memory nodes. bind: it can use no other, and is killed when they are
# full. prefer: it uses others when they are full. off: not at all.
# One of bind, prefer, off. Default: "bind".
memory = "bind"

# Memory that a rank needs, to be checked: "200GiB", "200GB" or bytes. Unset: unchecked.
#memory_need = "200GiB"

# Kinds of memory node that a rank may use.
# One of dram, gpu, hbm, cxl. Default: ["dram"].
memory_kinds = ["dram"]

# Cards that a rank's environment names. service: all of its service. rank: its own.
# One of service, rank. Default: "service".
visible_devices = "service"

# Whether a rank's environment names its RDMA devices to NCCL and UCX.
# Default: false.
nic_environment = false

# NUMA nodes of cards that do not know theirs: PCI address (or nvidia0 and so on) = node id.
[locality]
#"0000:8a:00.0" = 1

# What a unit starts for each rank of services without a [service.worker]. Unset: no such unit.
#[worker]

# Program (absolute path) and arguments, taken literally. Required.
#command = ["/usr/bin/python3", "-m", "engine"]

# User that it runs as, name or number. Unset: root.
#user = "engine"

# Group that it runs as, name or number. Unset: the user's.
#group = "engine"

# Where it starts, an absolute path. Unset: /.
#working_directory = "/srv/engine"

# Variables, taken literally, which override the rank's own.
#[worker.environment]
#LOG_LEVEL = "info"

# Several services on one host: a [[service]] for each, and no name or devices in [placement].
#[[service]]
#name = "chat"
#devices = ["0000:1b:00.0", "1"]
#devices_per_rank = 1
#vendor = "amd"
#compile_cores = 0
#memory = "bind"
#memory_need = "200GiB"
#memory_kinds = ["dram"]
#visible_devices = "service"
#nic_environment = false
#[service.worker]
#command = ["/usr/bin/python3", "-m", "engine"]
#user = "engine"
#group = "engine"
#working_directory = "/srv/engine"
#[service.worker.environment]
#LOG_LEVEL = "info"
"""


def refusal(text: str) -> tuple[Problem, ...]:
    """The problems that the text is refused with."""
    with pytest.raises(ProblemsError) as caught:
        read_config(text, "provision.toml")
    assert caught.value.exit_status == EXIT_USAGE
    assert all(one.message.startswith("provision.toml: ") for one in caught.value.problems)
    return caught.value.problems


def messages(text: str) -> list[str]:
    """The messages of the problems that the text is refused with, without the file's name."""
    return [one.message.removeprefix("provision.toml: ") for one in refusal(text)]


# What is read.


def test_empty_file() -> None:
    """A file without a key is the default request."""
    assert read_config("", "-") == PlacementRequest()


def test_one_service() -> None:
    """Host and service stand together in [placement] if there is one service."""
    request = read_config(
        """
        [placement]
        policy = "llc"
        smt = "first"
        reach = "package"
        remainder = "spread"
        reserve_cores = 2
        reserve_cpus = "0-1,56"
        exclude_cpus = "7"
        use_isolated = true
        confine = true
        name = "chat"
        devices = [1, " 1B:00.0 ", "00000000:8A:00.0", "007"]
        devices_per_rank = 2
        compile_cores = 1
        memory = "prefer"
        memory_need = "1.5GiB"
        memory_kinds = ["dram", "hbm"]
        visible_devices = "rank"
        [locality]
        "8A:00.0" = 1
        NVIDIA0 = 0
        [worker]
        command = ["/bin/engine", "--port=1"]
        user = "engine"
        group = "0"
        working_directory = "/srv"
        [worker.environment]
        A = "b"
        """,
        "-",
    )
    assert request == PlacementRequest(
        services=(
            ServiceRequest(
                name="chat",
                devices=("1", "0000:1b:00.0", "0000:8a:00.0", "7"),
                devices_per_rank=2,
                compile_cores=1,
                memory="prefer",
                memory_need_bytes=3 << 29,
                memory_kinds=("dram", "hbm"),
                visible_devices="rank",
                worker=WorkerRequest(
                    ("/bin/engine", "--port=1"), "engine", "0", "/srv", {"A": "b"}
                ),
            ),
        ),
        policy="llc",
        smt="first",
        reach="package",
        remainder="spread",
        reserve_cores=2,
        reserve_cpus=CpuSet((0, 1, 56)),
        exclude_cpus=CpuSet((7,)),
        use_isolated=True,
        confine=True,
        locality={"0000:8a:00.0": 1, "nvidia0": 0},
    )


def test_defaults_of_several_services() -> None:
    """A [[service]] has what [placement] and [worker] say, unless it says otherwise itself."""
    request = read_config(
        """
        placement = { devices_per_rank = 2, memory = "off" }
        worker = { command = ["/bin/a"], environment = { A = "1" } }
        [[service]]
        name = "a"
        devices = [0, 1]
        [[service]]
        name = "b"
        devices = [2]
        devices_per_rank = 1
        memory = "bind"
        memory_need = 4096
        [service.worker]
        command = ["/bin/b"]
        """,
        "-",
    )
    assert request.services == (
        ServiceRequest(
            "a",
            ("0", "1"),
            2,
            memory="off",
            worker=WorkerRequest(("/bin/a",), environment={"A": "1"}),
        ),
        ServiceRequest("b", ("2",), 1, memory_need_bytes=4096, worker=WorkerRequest(("/bin/b",))),
    )


# What is refused.


def test_every_key_wrong() -> None:
    """Everything that is wrong in a file is told at once, each with its place and only once."""
    text = """
        polcy = 1
        [placement]
        policy = "nod"
        smt = 1
        reach = []
        remainder = true
        reserve_cores = "two"
        reserve_cpus = "5-1"
        exclude_cpus = 3
        use_isolated = "yes"
        confine = 0
        devices_per_rank = 1.0
        vendor = "matrox"
        compile_cores = true
        memory = 2020-01-01
        memory_need = "lots"
        memory_kinds = ["dram", 1, "ram"]
        visible_devices = {}
        [locality]
        "8a:00.0" = 1
        "0000:8A:00.0" = true
        gpu = 1
        [worker]
        command = "python3 -m engine"
        user = 1
        group = []
        working_directory = false
        [worker.environment]
        A = 8
        [[service]]
        name = "batch"
        device = []
        devices = 0
        reserve_cores = 1
        [[service]]
        name = 4
        devices = [1.5, -1, "card", "1b:20.0", 1000000]
        devices_per_rank = 0x8000000000000000
        [service.worker]
        user = "root"
        [[service]]
        name = []
        devices = "1"
        worker = 1
        """
    card = "a PCI address such as '0000:1b:00.0', or a card number"
    named = "a PCI address such as '0000:1b:00.0', a card number, or vendor and number such as 'nvidia0'"
    size = "a size such as '200GiB', '1.5TiB' or '200GB', or a number of bytes"
    service_keys = (
        "name, devices, devices_per_rank, vendor, compile_cores, memory, memory_need, "
        "memory_kinds, visible_devices, nic_environment, worker"
    )
    assert messages(text) == [
        "unknown key 'polcy': expected one of placement, locality, worker, service",
        '[placement] policy is "nod": expected one of exclusive, node, llc, card-range',
        "[placement] smt is 1: expected one of siblings, first",
        "[placement] reach is an array: expected one of node, package",
        "[placement] remainder is true: expected one of unassigned, spread",
        '[placement] reserve_cores is "two": expected a whole number',
        "[placement] reserve_cpus: '5-1' is no CPU list: range '5-1' runs backwards",
        "[placement] exclude_cpus is 3: expected a cpulist such as '0-1,56'",
        '[placement] use_isolated is "yes": expected true or false',
        "[placement] confine is 0: expected true or false",
        "[placement] devices_per_rank is 1.0: expected a whole number",
        (
            '[placement] vendor is "matrox": expected one of nvidia, amd, hygon, intel, habana, '
            "ascend"
        ),
        "[placement] compile_cores is true: expected a whole number",
        "[placement] memory is 2020-01-01: expected one of bind, prefer, off",
        f"[placement] memory_need: 'lots' is no size: expected {size}",
        "[placement] memory_kinds entry 2 is 1: expected one of dram, gpu, hbm, cxl",
        '[placement] memory_kinds entry 3 is "ram": expected one of dram, gpu, hbm, cxl',
        "[placement] visible_devices is a table: expected one of service, rank",
        "[locality] '0000:8a:00.0' is there twice",
        "[locality] '0000:8A:00.0' is true: expected a whole number",
        "[locality] key 'gpu' is no card: expected a PCI address, or vendor and number: 'nvidia0'",
        '[worker] command is "python3 -m engine": expected an array, each entry a text',
        "[worker] user is 1: expected a text",
        "[worker] group is an array: expected a text",
        "[worker] working_directory is false: expected a text",
        "[worker.environment] A is 8: expected a text",
        (
            f"[[service]] 1 (batch): unknown key 'device': expected one of {service_keys} "
            "(did you mean 'devices'?)"
        ),
        f"[[service]] 1 (batch) devices is 0: expected an array, each entry {card}",
        f"[[service]] 1 (batch): unknown key 'reserve_cores': expected one of {service_keys}",
        "[[service]] 2 name is 4: expected a text",
        f"[[service]] 2 devices entry 1 is 1.5: expected {card}",
        f"[[service]] 2 devices entry 2: '-1' is no card: expected {named}",
        f"[[service]] 2 devices entry 3: 'card' is no card: expected {named}",
        f"[[service]] 2 devices entry 4: '1b:20.0' is no card: expected {named}",
        f"[[service]] 2 devices entry 5: '1000000' is no card: expected {named}",
        (
            "[[service]] 2 devices_per_rank: the number is out of range: expected up to 64 bits, "
            "as TOML has them"
        ),
        "[[service]] 2 [service.worker] command is missing: expected a program",
        "[[service]] 3 name is an array: expected a text",
        f'[[service]] 3 devices is "1": expected an array, each entry {card}',
        "[[service]] 3 [service.worker] is 1: expected a table",
    ]


def test_contradictions_are_told_with_the_rest() -> None:
    """What contradicts itself is told together with what can't be decoded."""
    text = """
        [placement]
        reserve_cores = -1
        devices = ["1b:00.0", "0000:1B:00.0", "card"]
        memory = "off"
        memory_need = 1
        """
    assert [one.code for one in refusal(text)] == [
        "bad_value",
        "repeated_devices",
        "memory_contradicts",
        "bad_number",
    ]


def test_shared_fault_is_told_once() -> None:
    """A fault in the defaults is told where it stands, not again for each service that has it."""
    text = """
        [placement]
        devices_per_rank = 0
        compile_cores = -1
        [worker]
        command = ["engine"]
        [[service]]
        name = "a-b"
        devices = [0]
        [[service]]
        name = "c"
        devices = [1]
        compile_cores = -1
        """
    assert messages(text) == [
        "[placement] devices_per_rank= is 0: expected 1 or more",
        "[placement] compile_cores= is -1: expected 0 or more",
        "[worker] command= is 'engine': expected the program's absolute path, as units need it",
        (
            "service 'a-b': the name is no service name: "
            "expected 1 to 64 letters, digits, '_', '.' or ':'"
        ),
        "service 'c': compile_cores= is -1: expected 0 or more",
    ]


def test_no_fault_follows_from_a_wrong_value() -> None:
    """A value that was refused makes no contradiction with the default that it hid."""
    text = """
        [placement]
        memory = "off"
        [[service]]
        name = "a"
        devices = [0]
        memory = "bnd"
        memory_need = 1
        """
    assert messages(text) == [
        '[[service]] 1 (a) memory is "bnd": expected one of bind, prefer, off'
    ]


@pytest.mark.parametrize("key", ["name", "devices"])
def test_own_keys_beside_services(key: str) -> None:
    """A key of one service contradicts [[service]] tables when it stands in [placement]."""
    value = {"name": '"a"', "devices": "[0]"}[key]
    found = refusal(f"[placement]\n{key} = {value}\n[[service]]\n")
    assert [one.code for one in found] == ["config_contradicts"]
    assert found[0].hint == f"Give {key} in each [[service]] instead"


@pytest.mark.parametrize(
    "text, message",
    [
        ("a = ", "no TOML: Invalid value (at line 1, column 5)"),
        ("[worker]\ncommand = [\n", "no TOML: Invalid value (at line 3, column 1)"),
        ("[a]\n[a]\n", "no TOML: Cannot declare ('a',) twice (at line 2, column 3)"),
        ("a = " + "[" * 5000, "no TOML: a number is too long, or tables are nested too deeply"),
        ("a = " + "9" * 5000, "no TOML: a number is too long, or tables are nested too deeply"),
        (
            "placement = 0x" + "f" * 5000,
            "no TOML: a number is too long, or tables are nested too deeply",
        ),
        ("placement = 1", "[placement] is 1: expected a table"),
        ("locality = []", "[locality] is an array: expected a table"),
        ("worker = 'x'", '[worker] is "x": expected a table'),
        (
            "[worker]\ncommand = ['/a']\nenvironment = 1",
            "[worker.environment] is 1: expected a table",
        ),
        ("[worker]", "[worker] command is missing: expected a program"),
        ("service = 1", "service is 1: expected tables headed [[service]]"),
        ("[service]", "service is a table: expected tables headed [[service]]"),
        ("service = [1, 2]", "service is an array: expected tables headed [[service]]"),
        ("service = []", "the request names no service: expected at least one"),
        (
            '"\\u001b[2J" = 1',
            "unknown key '\\U0000001B[2J': expected one of placement, locality, worker, service",
        ),
        (
            f"locality = {{ nvidia0 = 1, {'x' * 80} = 1 }}",
            (
                f"[locality] key '{'x' * 57}...' is no card: "
                "expected a PCI address, or vendor and number: 'nvidia0'"
            ),
        ),
    ],
)
def test_one_fault(text: str, message: str) -> None:
    """One fault, of the text or of a whole table, is one problem that says where it is."""
    assert messages(text) == [message]


@pytest.mark.parametrize(
    "text, hint",
    [
        ("policy = 'node'", "It belongs in [placement]"),
        ("[worker]\ncommand = ['/a']\nmemory_need = 1", "It belongs in [placement]"),
        ("[placement]\nuser = 'a'", "It belongs in [worker]"),
        ("[placement]\nnothing = 1", ""),
    ],
)
def test_key_in_the_wrong_table(text: str, hint: str) -> None:
    """A key that another table knows is refused with that table's name."""
    assert [one.hint for one in refusal(text)] == [hint]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_any_value_of_any_key(value: Any) -> None:
    """No value makes reading fail in another way than by problems."""
    keys = [key for keys in config._HOMES.values() for key in keys]
    tables = {"placement": dict.fromkeys(keys, value), "service": [dict.fromkeys(keys, value)]}
    reader = config._Reader("-")
    reader.read(tables | {"worker": dict.fromkeys(keys, value), "locality": {"nvidia0": value}})
    assert reader.problems


# Sizes.


@pytest.mark.parametrize(
    "text, size",
    [
        ("0", 0),
        ("4096", 4096),
        (" 512 MiB ", 512 << 20),
        ("200GiB", 200 << 30),
        ("1.5TiB", 3 << 39),
        ("200GB", 200 * 10**9),
        ("1kb", 1000),
        ("0.1KiB", 103),
        ("3B", 3),
        ("1PiB", 1 << 50),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """A size is a number with a binary or decimal unit, or of bytes; parts of one are rounded up."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "1.5", "-1", "1G", "1 2", "1.GiB", ".5GiB", "1e3", "٣GiB", "9" * 5000, "1GiB\x1b"],
)
def test_refused_sizes(text: str) -> None:
    """What is no size is refused with the form that is expected, in a text that prints."""
    with pytest.raises(ParseError, match="is no size: expected a size such as '200GiB'") as caught:
        parse_size(text)
    assert caught.value.message.isprintable()


@given(
    st.integers(0, 2**63 - 1) | st.builds(int.__lshift__, st.integers(0, 2000), st.integers(0, 50))
)
def test_sizes_round_trip(size: int) -> None:
    """A size is read back as what was written."""
    assert parse_size(format_size(size)) == size


def test_size_takes_the_largest_unit() -> None:
    """A size is written in the largest binary unit that divides it."""
    assert [format_size(n) for n in (0, 1000, 1 << 10, 3 << 39, 1 << 60)] == [
        "0",
        "1000",
        "1KiB",
        "1536GiB",
        "1024PiB",
    ]


# What is written.

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:]{0,20}", fullmatch=True)
ADDRESSES = st.builds(
    PciAddress,
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 0xFF),
    st.integers(0, 0x1F),
    st.integers(0, 0xF),
).map(str)
CARDS = ADDRESSES | st.integers(0, 999999).map(str)
VENDOR_CARDS = st.from_regex(r"[a-z]{1,8}(0|[1-9][0-9]{0,2})", fullmatch=True)
CPU_SETS = st.sets(st.integers(0, 600)).map(CpuSet)
# For each dataclass, what each of its fields may be.
WORKER: dict[str, st.SearchStrategy[Any]] = {
    "command": st.builds(
        lambda program, arguments: (f"/{program}", *arguments), TEXTS, st.lists(TEXTS)
    ),
    "user": st.none() | st.sampled_from(["engine", "0", "a.b-c$"]),
    "group": st.none() | st.sampled_from(["engine", "0"]),
    "working_directory": st.none() | TEXTS.map(lambda text: f"/{text}"),
    "environment": st.dictionaries(
        st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True), TEXTS
    ),
}
SERVICE: dict[str, st.SearchStrategy[Any]] = {
    "name": NAMES,
    "devices": st.none() | st.lists(CARDS, min_size=1, max_size=4, unique=True).map(tuple),
    "devices_per_rank": st.integers(1, 2**63 - 1),
    "vendor": st.none() | st.sampled_from(VENDORS),
    "compile_cores": st.integers(0, 9),
    "memory": st.sampled_from(MEMORY_MODES),
    "memory_need_bytes": st.none() | st.integers(1, 2**63 - 1),
    "memory_kinds": st.lists(st.sampled_from(["dram", "gpu", "hbm", "cxl"]), min_size=1).map(tuple),
    "visible_devices": st.sampled_from(VISIBLE_MODES),
    "nic_environment": st.booleans(),
    "worker": st.none() | st.builds(WorkerRequest, **WORKER),
}
PLACEMENT: dict[str, st.SearchStrategy[Any]] = {
    "services": st.lists(st.builds(ServiceRequest, **SERVICE), min_size=1, max_size=3).map(tuple),
    "policy": st.sampled_from(POLICIES),
    "smt": st.sampled_from(SMT_MODES),
    "reach": st.sampled_from(REACHES),
    "remainder": st.sampled_from(REMAINDERS),
    "reserve_cores": st.integers(0, 9),
    "reserve_cpus": CPU_SETS,
    "exclude_cpus": CPU_SETS,
    "use_isolated": st.booleans(),
    "confine": st.booleans(),
    "virtual_nics": st.booleans(),
    "locality": st.dictionaries(ADDRESSES | VENDOR_CARDS, st.integers(0, 99), max_size=3),
}


def made_valid(request: PlacementRequest) -> PlacementRequest:
    """The request with what contradicts something else in it set to its default."""
    several = len(request.services) > 1
    services = tuple(
        dataclasses.replace(
            one,
            name=f"s{number}_{one.name}"[:64],
            devices=one.devices or (("0",) if several else None),
            memory_need_bytes=None if one.memory == "off" else one.memory_need_bytes,
        )
        for number, one in enumerate(request.services)
    )
    plain = request.policy in {"node", "card-range"}
    return dataclasses.replace(
        request,
        services=services,
        reach="node" if request.policy == "card-range" else request.reach,
        remainder="unassigned" if plain else request.remainder,
        exclude_cpus=request.exclude_cpus - request.reserve_cpus,
    )


REQUESTS = st.builds(PlacementRequest, **PLACEMENT).map(made_valid)


@given(REQUESTS)
def test_round_trip(request: PlacementRequest) -> None:
    """A request that is written is read back as it was, whatever its texts hold."""
    assert check_request(request) == []
    assert read_config(format_config(request), "-") == request


@given(REQUESTS)
def test_written_text_prints(request: PlacementRequest) -> None:
    """No text of a request can act on a terminal, or hide in an editor, when it is written."""
    assert all(line.isprintable() for line in format_config(request).split("\n"))


@pytest.mark.parametrize(
    "record, keys, strategies",
    [
        (PlacementRequest, config._HOST_KEYS, PLACEMENT),
        (ServiceRequest, config._SERVICE_KEYS, SERVICE),
        (WorkerRequest, config._WORKER_KEYS, WORKER),
    ],
)
def test_every_field_has_a_key(
    record: type[Any], keys: dict[str, Any], strategies: dict[str, Any]
) -> None:
    """Every field of a request is a key or a table, is explained, and takes part in the round trip."""
    names = {field.name for field in dataclasses.fields(record)}
    fields = {key.field for key in keys.values()}
    assert fields == names - config._TABLES
    assert fields | (names & config._TABLES) <= config._NOTES.keys()
    assert strategies.keys() == names


def test_no_note_is_left_over() -> None:
    """Every note explains a key or a table, and every example stands for one."""
    known = {key.field for keys in config._HOMES.values() for key in keys.values()}
    assert config._NOTES.keys() == known | config._TABLES | {"file", "placement"}
    assert config._EXAMPLES.keys() <= known | config._TABLES


def test_default_text() -> None:
    """The default request is written with every key, its meaning, its choices and its default."""
    assert format_config(PlacementRequest()) == DEFAULT_TEXT


def test_lines_are_not_too_long() -> None:
    """What is written fits in 100 columns."""
    assert max(map(len, format_config(PlacementRequest()).splitlines())) <= 100


def test_examples_are_right() -> None:
    """Each key that is commented out can be set by taking its '#' away."""
    one, services, several = DEFAULT_TEXT.partition("#[[service]]")
    uncommented = [
        "\n".join(line.removeprefix("#") if line[1:2] != " " else line for line in text.split("\n"))
        for text in (one, services + several)
    ]
    assert read_config(uncommented[0], "-").services[0].worker is not None
    assert [one.name for one in read_config(uncommented[1], "-").services] == ["chat"]


def test_several_services() -> None:
    """Each of several services is written as a table of its own, and none has a default worker."""
    request = PlacementRequest(
        services=(
            ServiceRequest("a", ("0",), worker=WorkerRequest(("/bin/a",))),
            ServiceRequest("b", ("0000:1b:00.0",)),
        )
    )
    document = tomllib.loads(format_config(request))
    assert document.keys() == {"placement", "locality", "service"}
    assert document["placement"].keys() == config._HOST_KEYS.keys()
    assert [entry["name"] for entry in document["service"]] == ["a", "b"]
    assert [entry.get("worker") for entry in document["service"]] == [
        {"command": ["/bin/a"], "environment": {}},
        None,
    ]
