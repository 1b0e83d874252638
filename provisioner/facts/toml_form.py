"""The text form of a machine's facts: TOML, decoded with every fault at once.

`provisioner.facts` describes the form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypedDict, TypeVar

from provisioner.errors import InputError, ParseError, Problem
from provisioner.facts.check import FactsError, check_facts
from provisioner.facts.values import (
    NIC_CLASS,
    NIC_DEVICE,
    NIC_VENDOR,
    BridgeFacts,
    CardFacts,
    CgroupFacts,
    DistanceFacts,
    HostFacts,
    NicFacts,
    NodeFacts,
    PackageFacts,
    PciFacts,
    UbFacts,
)
from provisioner.idset import CpuSet, NodeSet
from provisioner.pci import PciAddress, parse_pci_address
from provisioner.sizes import parse_size

_T = TypeVar("_T")


def read_facts(text: str, place: str) -> HostFacts:
    """The machine that a fact file describes.

    Args:
        text: the file's contents.
        place: the file's path or the sample's name, for messages; the facts' `name`.

    Raises:
        InputError: the text is no TOML.
        FactsError: keys or values are wrong, all of them in it; or, where none is, the facts
            contradict each other, with all contradictions in it.
    """
    import tomllib  # a few milliseconds that only fact files need

    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{place}: is no TOML: {error}") from error
    problems: list[Problem] = []
    facts = _decode_host(_Table(raw, f"{place}: ", problems), place)
    problems = problems or check_facts(facts)
    if problems:
        raise FactsError(problems, subject=place)
    return facts


class _Table:
    """One table of the file; every value is taken once, and a wrong one becomes a problem."""

    def __init__(self, raw: Mapping[str, object], where: str, problems: list[Problem]) -> None:
        self._left = dict(raw)
        self._keys: list[str] = []  # those that were asked for
        self._where = where
        self._problems = problems

    def fault(self, message: str, hint: str = "") -> None:
        self._problems.append(Problem("bad_facts", self._where + message, hint))

    def finish(self) -> None:
        """Makes a problem of every key that nothing asked for."""
        if not self._left:
            return
        import difflib  # only a wrong file needs it

        for key in self._left:
            near = difflib.get_close_matches(key, self._keys, 1)
            self.fault(f"{key}= is unknown", f"Did you mean {near[0]}=?" if near else "")

    def take(self, key: str, kind: type[_T], wanted: str) -> _T | None:
        """The value; None if it is not there or, with a problem made, not of the kind."""
        self._keys.append(key)
        value = self._left.pop(key, None)
        if value is None:
            return None
        if type(value) is not kind:  # to isinstance a bool is an int
            self.fault(f"{key}= is {value!r}: expected {wanted}")
            return None
        return value

    def need(self, *keys: str) -> None:
        """Makes a problem of each key that is not there."""
        for key in keys:
            if key not in self._left:
                self.fault(f"{key}= is missing")

    def text(self, key: str, default: str = "") -> str:
        value = self.take(key, str, "a text")
        return default if value is None else value

    def number(self, key: str, default: int = 0) -> int:
        value = self.take(key, int, "a whole number")
        return default if value is None else value

    def parsed(self, key: str, parse: Callable[[str], _T]) -> _T | None:
        """What `parse` makes of a text; None if it is not there or, with a problem made, wrong."""
        text = self.take(key, str, "a text")
        if text is None:
            return None
        try:
            return parse(text)
        except ParseError as error:
            self.fault(f"{key}= {error.message}", error.hint)
            return None

    def cpus(self, key: str) -> CpuSet:
        return self.parsed(key, CpuSet.parse_list) or CpuSet()

    def nodes(self, key: str) -> NodeSet:
        return self.parsed(key, NodeSet.parse_list) or NodeSet()

    def strings(self, key: str) -> tuple[str, ...]:
        items: list[object] = self.take(key, list, "a list of texts") or []
        for item in items:
            if not isinstance(item, str):
                self.fault(f"{key}= holds {item!r}: expected texts")
        return tuple(item for item in items if isinstance(item, str))

    def cpu_sets(self, key: str) -> tuple[CpuSet, ...]:
        found = []
        for text in self.strings(key):
            try:
                found.append(CpuSet.parse_list(text))
            except ParseError as error:
                self.fault(f"{key}= {error.message}", error.hint)
        return tuple(found)

    def tables(self, key: str, defaults_key: str | None = None) -> Iterator[_Table]:
        """Each table of a list, on top of the table of defaults; unknown keys in it become problems."""
        defaults: dict[str, object] = {}
        if defaults_key is not None:
            defaults = self.take(defaults_key, dict, "a table") or {}
        items: list[object] = self.take(key, list, "a list of tables") or []
        for index, item in enumerate(items):
            if not isinstance(item, dict):
                self.fault(f"{key}[{index}] is {item!r}: expected a table")
                continue
            table = _Table({**defaults, **item}, f"{self._where}{key}[{index}]: ", self._problems)
            yield table
            table.finish()


def _decode_host(table: _Table, name: str) -> HostFacts:
    table.need("title", "packages")
    facts = HostFacts(
        name=name,
        title=table.text("title", "unknown"),
        description=table.text("description"),
        arch=table.text("arch", "x86_64"),
        packages=tuple(_decode_package(one) for one in table.tables("packages")),
        threads=table.number("threads", 1),
        sibling_stride=table.number("sibling_stride"),
        core_cpus=table.cpu_sets("cores"),
        cores_per_llc=table.number("cores_per_llc"),
        llcs=table.cpu_sets("llcs"),
        nodes=tuple(node for one in table.tables("nodes") for node in _decode_nodes(one)),
        distances=tuple(_decode_distance(one) for one in table.tables("distances")),
        memory_bytes=table.parsed("memory", parse_size) or 0,
        possible_cpus=table.parsed("possible_cpus", CpuSet.parse_list),
        possible_nodes=table.parsed("possible_nodes", NodeSet.parse_list),
        offline_cpus=table.cpus("offline"),
        isolated_cpus=table.cpus("isolated"),
        kernel_max=table.number("kernel_max", 8191),
        numa_balancing=table.take("numa_balancing", int, "a whole number"),
        cards=tuple(_decode_card(one) for one in table.tables("cards", "card")),
        nics=tuple(_decode_nic(one) for one in table.tables("nics", "nic")),
        ub_devices=tuple(_decode_ub_device(one) for one in table.tables("ub_devices")),
        functions=tuple(_decode_function(one) for one in table.tables("functions", "function")),
        bridges=tuple(_decode_bridge(one) for one in table.tables("bridges")),
        cgroups=tuple(_decode_cgroup(one) for one in table.tables("cgroups")),
        own_cgroup=table.text("own_cgroup", "/"),
        absent=table.strings("absent"),
    )
    table.finish()
    return facts


def _decode_package(table: _Table) -> PackageFacts:
    table.need("cpus")
    return PackageFacts(
        id=_known(table.number("id", -1)), cpus=table.cpus("cpus"), dies=table.cpu_sets("dies")
    )


def _decode_nodes(table: _Table) -> tuple[NodeFacts, ...]:
    """One node for each id of `ids`, or the one of `id`; several can't have CPUs."""
    table.need("memory")
    single = table.take("id", int, "a whole number")
    ids = table.parsed("ids", NodeSet.parse_list)
    if (single is None) == (ids is None):
        table.fault("id= and ids= are both there or both missing: expected one of them")
    if ids is None:
        try:
            ids = NodeSet(() if single is None else (single,))
        except ParseError as error:
            table.fault(f"id= {error.message}")
            ids = NodeSet()
    cpus = table.cpus("cpus")
    if cpus and len(ids) > 1:
        table.fault(f"cpus= is there for {len(ids)} nodes, {ids}: expected id= with it")
    memory_bytes = table.parsed("memory", parse_size) or 0
    bandwidth = table.take("read_bandwidth", int, "a whole number")
    return tuple(
        NodeFacts(id=one, memory_bytes=memory_bytes, cpus=cpus, read_bandwidth=bandwidth)
        for one in ids
    )


def _decode_distance(table: _Table) -> DistanceFacts:
    table.need("from", "to", "value")
    return DistanceFacts(
        from_nodes=table.nodes("from"), to_nodes=table.nodes("to"), value=table.number("value")
    )


class _Common(TypedDict):
    path: tuple[PciAddress, ...]
    numa_node: int | None
    local_cpus: CpuSet | None
    physfn: PciAddress | None


def _decode_common(table: _Table) -> _Common:
    table.need("path")
    return _Common(
        path=table.parsed("path", parse_pci_path) or (),
        numa_node=_known(table.number("node", -1)),
        local_cpus=table.parsed("local_cpus", CpuSet.parse_list),
        physfn=table.parsed("physfn", parse_pci_address),
    )


def _decode_card(table: _Table) -> CardFacts:
    table.need("vendor", "device", "class")
    return CardFacts(
        **_decode_common(table),
        pci_class=table.number("class"),
        vendor=table.number("vendor"),
        device=table.number("device"),
        model=table.text("model"),
        has_driver=table.take("has_driver", bool, "true or false") is not False,
        memory_node=table.take("memory_node", int, "a whole number"),
        minor=table.take("minor", int, "a whole number"),
        module=table.take("module", int, "a whole number"),
        partitions=table.number("partitions", 1),
    )


def _decode_nic(table: _Table) -> NicFacts:
    return NicFacts(
        **_decode_common(table),
        pci_class=table.number("class", NIC_CLASS),
        vendor=table.number("vendor", NIC_VENDOR),
        device=table.number("device", NIC_DEVICE),
        rdma=table.strings("rdma"),
        net=table.strings("net"),
        ports=table.number("ports", 1),
    )


def _decode_ub_device(table: _Table) -> UbFacts:
    table.need("name")
    return UbFacts(
        name=table.text("name"),
        numa=_known(table.number("numa", -1)),
        entities=table.number("entities", 1),
    )


def _decode_function(table: _Table) -> PciFacts:
    table.need("vendor", "device", "class")
    return PciFacts(
        **_decode_common(table),
        pci_class=table.number("class"),
        vendor=table.number("vendor"),
        device=table.number("device"),
    )


def _decode_bridge(table: _Table) -> BridgeFacts:
    table.need("address")
    return BridgeFacts(
        address=table.parsed("address", parse_pci_address) or PciAddress(0, 0, 0, 0),
        numa_node=_known(table.number("node", -1)),
    )


def _decode_cgroup(table: _Table) -> CgroupFacts:
    table.need("path")
    return CgroupFacts(
        path=table.text("path", "/"),
        cpus=table.parsed("cpus", CpuSet.parse_list),
        nodes=table.parsed("nodes", NodeSet.parse_list),
    )


def _known(number: int) -> int | None:
    """The id; None for -1, by which the kernel says that it does not know."""
    return None if number == -1 else number


def parse_pci_path(text: str) -> tuple[PciAddress, ...]:
    """The addresses of a path such as '0008:00:00.0/01:00.0'; the first one's domain holds for all."""
    parts = text.split("/")
    first = parse_pci_address(parts[0])
    rest = (
        parse_pci_address(one if one.count(":") > 1 else f"{first.domain:x}:{one}")
        for one in parts[1:]
    )
    return (first, *rest)
