"""A machine from the XML that hwloc's lstopo writes, versions 1 and 2 of the format.

Source: hwloc's hwloc.dtd and hwloc2.dtd, and the manual's "Importing and exporting topologies from/to
XML files".

The XML is turned into the files that a kernel would show of such a machine, as far as it says them,
and those are read as any other. What the XML says and no such file can (the kind of a node's memory)
is put into the machine afterwards. What it does not say stays unknown, and a sentence among the
machine's oddities says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar
from xml.parsers import expat

from provisioner.cgroup import WITHIN_ROOT
from provisioner.discovery import discover
from provisioner.errors import InputError, ParseError, shorten
from provisioner.idset import MAX_ID, CpuSet, IdSet, NodeSet
from provisioner.pci import PciAddress, find_pci_address
from provisioner.root import MemoryRoot
from provisioner.topology import Machine, MemoryKind

# A host of 4,096 CPUs is 8 MiB and 60,000 elements.
MAX_BYTES = 32 << 20
_MAX_ELEMENTS = 1 << 19
_MAX_DEPTH = 256

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_CGROUP = "sys/fs/cgroup"
_RECORDED = "recorded"

_Set = TypeVar("_Set", bound=IdSet)

_IO_TYPES = ("Bridge", "PCIDev", "OSDev", "Misc")
_CACHE = re.compile(r"L[1-5]i?Cache|Cache", re.ASCII)
_INSTRUCTION = "2"  # cache_type; 0 is unified and 1 data
_HOST_BRIDGE = re.compile(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]", re.ASCII)
_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\].*", re.ASCII)
_DEVICE_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.:@-]{0,63}", re.ASCII)
_UNREAD = "0000"  # what hwloc writes for a vendor's or a device's id that it could not read
_OSDEV_FOLDERS = {"2": "net", "3": "infiniband"}
_PORT = re.compile(r"Port([0-9]{1,9})State", re.ASCII)
_LATENCY = 4  # a bit of a matrix's kind: HWLOC_DISTANCES_KIND_MEANS_LATENCY
# Version 2 names what a node's memory is; what is left out here says nothing that counts.
_KINDS: Mapping[str, MemoryKind] = {
    "DRAM": "dram",
    "HBM": "hbm",
    "MCDRAM": "hbm",
    "NVM": "cxl",
    "CXL-DRAM": "cxl",
    "CXL-NVM": "cxl",
    "GPUMemory": "gpu",
}
_HINT = "Write it again, with lstopo FILE.xml of hwloc 1 or 2"


def read_hwloc(text: str, place: str, within: str = WITHIN_ROOT) -> Machine:
    """The machine that an XML of hwloc describes.

    Args:
        text: the XML.
        place: its name, for messages.
        within: the ceiling: the XML knows that of the process that wrote it, as ``self``.

    Raises InputError, with the line, for what is no such XML or contradicts itself.
    """
    topology = _parse(text, place)
    described = _Description(topology, place)
    tree = MemoryRoot(place, described.files, described.links, described.folders)
    machine = discover(tree, within)
    ceiling = machine.ceiling
    if ceiling.cpus is not None:
        ceiling = ceiling._replace(source=f"{place}: allowed_cpuset")
    return replace(
        machine,
        nodes=tuple(
            node._replace(kind=described.kinds.get(node.id, node.kind)) if node.has_memory else node
            for node in machine.nodes
        ),
        accelerators=tuple(
            replace(
                card,
                source="hwloc",
                model=described.models.get(card.address, card.model),
                memory_nodes=described.card_memory.get(card.address, card.memory_nodes),
            )
            if card.address is not None
            else card
            for card in machine.accelerators
        ),
        ceiling=ceiling,
        sources=(("all of it", f"{place}, hwloc's XML of version {topology.version}"),),
        oddities=(*machine.oddities, *described.oddities),
        unsaid=_UNSAID,
    )


# Of version 1 and of version 2.
_UNSAID = (
    "hwloc's XML does not say which CPUs are isolated, nor what the root cgroup may use: neither limits anything here",
    "hwloc's XML does not say which cards a driver holds: the cards and their numbers are those of the PCI bus",
)


# The XML as objects ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Object:
    """One <object>."""

    kind: str  # the attribute type
    attributes: Mapping[str, str]
    line: int
    place: str
    children: list[_Object] = field(default_factory=list)
    infos: dict[str, str] = field(default_factory=dict)

    def fail(self, problem: str) -> InputError:
        """The error that something is wrong with this object."""
        number = self.attributes.get("os_index", self.attributes.get("pci_busid", ""))
        name = f"{shorten(self.kind)} {shorten(number)}".strip()
        return InputError(f"{self.place}:{self.line}: {name}: {problem}", _HINT)

    def cpus(self, name: str = "cpuset") -> CpuSet | None:
        """A set of CPUs; None if the attribute is absent or stands for all that there may be."""
        return self._set(CpuSet, name)

    def nodes(self, name: str = "nodeset") -> NodeSet | None:
        """A set of nodes, likewise."""
        return self._set(NodeSet, name)

    def _set(self, kind: type[_Set], name: str) -> _Set | None:
        text = self.attributes.get(name)
        if text is None or text.startswith("0xf...f"):
            return None
        groups = ",".join(part.removeprefix("0x") or "0" for part in text.strip().split(","))
        try:
            return kind.parse_mask(groups)
        except ParseError as error:
            raise self.fail(
                f"{name} is '{shorten(text)}': expected a mask such as 0x0000ffff"
            ) from error

    def number(self, name: str) -> int | None:
        """A number; None if the attribute is absent, or -1 in any of its forms."""
        text = self.attributes.get(name)
        if text is None or text in ("-1", "4294967295", "18446744073709551615"):
            return None
        if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
            raise self.fail(f"{name} is '{shorten(text)}': expected a number")
        return int(text)

    def id(self) -> int:
        """The kernel's number of it."""
        number = self.number("os_index")
        if number is None or number > MAX_ID:
            raise self.fail(
                f"os_index is {'absent' if number is None else number}: expected 0 to {MAX_ID}"
            )
        return number


@dataclass(slots=True)
class _Matrix:
    """One <distances> or <distances2>."""

    attributes: Mapping[str, str]
    line: int
    indexes: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)


class _Topology(NamedTuple):
    version: int
    machine: _Object
    matrices: list[_Matrix]


class _Reader:
    """The handlers of one parse."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.version: int | None = None
        self.machine: _Object | None = None
        self.matrices: list[_Matrix] = []
        self._stack: list[_Object] = []
        self._matrix: _Matrix | None = None
        self._text: list[str] | None = None
        self._depth = self._count = 0
        # No name space and no encoding but that of the text, which is decoded already.
        self.parser = expat.ParserCreate("utf-8")
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._data
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.EntityDeclHandler = self._entity
        self.parser.SkippedEntityHandler = self._entity

    def fail(self, problem: str) -> InputError:
        return InputError(f"{self.place}:{self.parser.CurrentLineNumber}: {problem}", _HINT)

    def _doctype(self, _name: str, _system: str | None, _public: str | None, internal: int) -> None:
        # What lstopo writes names a DTD, which nobody reads, and declares nothing itself.
        if internal:
            raise self.fail("the document type declares something: lstopo's declares nothing")

    def _entity(self, name: str, *_rest: object) -> None:
        raise self.fail(f"there is an entity '{shorten(name)}': lstopo writes none of its own")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        self._count += 1
        if self._depth > _MAX_DEPTH:
            raise self.fail(f"elements are nested {self._depth} deep: no machine is")
        if self._count > _MAX_ELEMENTS:
            raise self.fail(f"there are over {_MAX_ELEMENTS} elements: no machine has as many")
        if self.version is None:
            self._start_topology(name, attributes)
        elif name == "object":
            one = _Object(
                attributes.get("type", ""), attributes, self.parser.CurrentLineNumber, self.place
            )
            if self._stack:
                self._stack[-1].children.append(one)
            elif self.machine is None:
                self.machine = one
            else:
                raise self.fail("a second outermost object: expected one machine")
            self._stack.append(one)
        elif name == "info" and self._stack:
            self._stack[-1].infos[attributes.get("name", "")] = attributes.get("value", "")
        elif name in ("distances", "distances2"):
            self._matrix = _Matrix(attributes, self.parser.CurrentLineNumber)
            self.matrices.append(self._matrix)
        elif name == "latency" and self._matrix is not None:
            self._matrix.values.append(attributes.get("value", ""))
        elif name in ("indexes", "u64values"):
            self._text = []

    def _start_topology(self, name: str, attributes: dict[str, str]) -> None:
        if name != "topology":
            raise self.fail(f"the document is a '{shorten(name)}': expected lstopo's 'topology'")
        version = attributes.get("version", "1.0")
        if version.partition(".")[0] not in ("1", "2"):
            raise self.fail(f"the format's version is '{shorten(version)}': expected 1 or 2")
        self.version = int(version.partition(".")[0])

    def _end(self, name: str) -> None:
        self._depth -= 1
        if name == "object" and self._stack:
            self._stack.pop()
        elif name in ("distances", "distances2"):
            self._matrix = None
        elif name in ("indexes", "u64values") and self._text is not None:
            if self._matrix is not None:
                into = self._matrix.indexes if name == "indexes" else self._matrix.values
                into += "".join(self._text).split()
            self._text = None

    def _data(self, text: str) -> None:
        if self._text is not None:
            self._text.append(text)


def _parse(text: str, place: str) -> _Topology:
    reader = _Reader(place)
    try:
        reader.parser.Parse(text.encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        raise InputError(
            f"{place}:{error.lineno}: is no XML: {expat.errors.messages[error.code]}", _HINT
        ) from error
    if reader.version is None or reader.machine is None:
        raise InputError(f"{place}: describes no machine: expected an object in it", _HINT)
    return _Topology(reader.version, reader.machine, reader.matrices)


# The objects as files --------------------------------------------------------------------------


class _Around(NamedTuple):
    """The objects around a PU."""

    core: _Object | None
    package: _Object | None
    die: _Object | None
    cache: _Object | None  # of the highest level


class _Description:
    """The files that say what the XML says, and what no file can."""

    def __init__(self, topology: _Topology, place: str) -> None:
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.folders: set[str] = set()
        self.kinds: dict[int, MemoryKind] = {}  # node -> what its memory is
        self.card_memory: dict[PciAddress, NodeSet] = {}
        self.models: dict[PciAddress, str] = {}
        self.oddities: list[str] = []
        self._place = place
        machine = topology.machine
        self._below: dict[int, CpuSet] = {}  # id() of an object -> the PUs below it
        self._around: dict[int, _Around] = {}
        self._walk(machine, _Around(None, None, None, None))
        if not self._around:
            raise machine.fail("there is no PU in it: expected at least one")
        self._online = self._find_online(machine)
        self._add_cpus()
        nodes = self._find_nodes(machine)
        self._add_nodes(nodes, machine)
        self._add_distances(topology, nodes)
        self._add_devices(machine, machine, None, ())
        self._add_ceiling(machine)

    # CPUs

    def _walk(self, one: _Object, around: _Around) -> CpuSet:
        """The PUs below an object; what is around each of them is remembered."""
        below = CpuSet()
        if one.kind == "PU":
            cpu = one.id()
            if cpu in self._around:
                raise one.fail("is there twice: expected it once")
            self._around[cpu] = around
            below = CpuSet((cpu,))
        elif one.kind == "Core":
            around = around._replace(core=one)
        elif one.kind in ("Package", "Socket"):
            around = around._replace(package=one)
        elif one.kind == "Die":
            around = around._replace(die=one)
        elif (
            _CACHE.fullmatch(one.kind)
            and one.attributes.get("cache_type") != _INSTRUCTION
            and around.cache is None  # the outermost is met first
        ):
            around = around._replace(cache=one)
        for child in one.children:
            if child.kind not in _IO_TYPES:
                below |= self._walk(child, around)
        self._below[id(one)] = below
        said = one.cpus()
        if said is not None and below and said != below:
            raise one.fail(f"cpuset is '{said}', and its PUs are '{below}': expected the same")
        return below

    def _find_online(self, machine: _Object) -> CpuSet:
        """The CPUs to plan with. Version 1 says which of the others are offline, version 2 does not."""
        listed = CpuSet(self._around)
        complete = machine.cpus("complete_cpuset") or listed
        said = machine.cpus("online_cpuset")
        if said is None:
            online, hidden = listed, complete - listed
            why = "are offline, or the process that wrote it was not allowed to use them"
        else:
            self.files[f"{_CPU}/offline"] = f"{complete - said}\n"
            online, hidden = listed & said, said - listed
            why = "were not allowed to the process that wrote it"
        if hidden:
            self.oddities.append(
                f"hwloc's XML leaves out CPUs {hidden}: they {why}. They take no part here."
            )
        if not online:
            raise machine.fail(f"online_cpuset is '{said}': expected one of the PUs {listed} in it")
        return online

    def _add_cpus(self) -> None:
        self.files[f"{_CPU}/online"] = f"{self._online}\n"
        for cpu in self._online:
            folder = f"{_CPU}/cpu{cpu}"
            around = self._around[cpu]
            if around.core is not None:
                self._put_group(f"{folder}/topology/core_cpus_list", around.core)
            if around.package is not None:
                if "Xeon Phi" in around.package.infos.get("CPUModel", ""):
                    self.files["proc/cpuinfo"] = "model name: Xeon Phi\n"
                self._put_group(f"{folder}/topology/package_cpus_list", around.package)
                number = around.package.number("os_index")
                self.files[f"{folder}/topology/physical_package_id"] = _id_text(number)
            if around.die is not None:
                self._put_group(f"{folder}/topology/die_cpus_list", around.die)
                self.files[f"{folder}/topology/die_id"] = _id_text(around.die.number("os_index"))
            if around.cache is not None:
                self._put_group(f"{folder}/cache/index0/shared_cpu_list", around.cache)
                level = around.cache.number("depth")
                if level is None:
                    raise around.cache.fail("depth is absent: expected the cache's level")
                self.files[f"{folder}/cache/index0/level"] = f"{level}\n"
                self.files[f"{folder}/cache/index0/type"] = "Unified\n"

    def _put_group(self, path: str, one: _Object) -> None:
        self.files[path] = f"{self._below[id(one)] & self._online}\n"

    # NUMA nodes

    def _find_nodes(self, machine: _Object) -> dict[int, _Object]:
        """Node -> its object, in the order of the XML, which is that of version 1's matrices."""
        found: dict[int, _Object] = {}
        todo = [machine]
        while todo:
            one = todo.pop()
            if one.kind == "NUMANode":
                if one.id() in found:
                    raise one.fail("is there twice: expected it once")
                found[one.id()] = one
            todo += [child for child in reversed(one.children) if child.kind not in _IO_TYPES]
        return found

    def _add_nodes(self, nodes: Mapping[int, _Object], machine: _Object) -> None:
        for number, node in nodes.items():
            subtype = node.attributes.get("subtype", "")
            if subtype in _KINDS:
                self.kinds[number] = _KINDS[subtype]
            card = find_pci_address(node.infos.get("PCIBusID", ""))
            if subtype == "GPUMemory" and card is not None:
                known = self.card_memory.get(card, NodeSet())
                self.card_memory[card] = known | NodeSet((number,))
        for number, cpus in self._share_cpus(nodes).items():
            self.files[f"{_NODE}/node{number}/cpulist"] = f"{cpus}\n"
            size = nodes[number].number("local_memory")
            if size is not None:
                text = f"Node {number} MemTotal: {size // 1024} kB\n"
                self.files[f"{_NODE}/node{number}/meminfo"] = text
        size = machine.number("local_memory")
        if not nodes and size is not None:  # version 1 of a machine without NUMA
            self.files["proc/meminfo"] = f"MemTotal: {size // 1024} kB\n"

    def _share_cpus(self, nodes: Mapping[int, _Object]) -> dict[int, CpuSet]:
        """Node -> CPUs.

        To hwloc a node without CPUs has those around it, so that CPUs may be on several. The kernel
        has each on one: the first by number whose memory is not of a kind that comes without CPUs.
        """
        left = self._online
        shared = CpuSet()
        cpus = {number: (node.cpus() or CpuSet()) & self._online for number, node in nodes.items()}
        found = dict.fromkeys(nodes, CpuSet())
        for number in sorted(nodes, key=lambda one: (self.kinds.get(one, "dram") != "dram", one)):
            found[number] = cpus[number] & left
            shared |= cpus[number] - left
            left -= cpus[number]
        if shared:
            self.oddities.append(
                f"hwloc's XML has CPUs {shared} near several NUMA nodes; each is taken for one of the "
                f"first of them, and nodes {NodeSet(one for one in nodes if not found[one])} have no CPUs."
            )
        for core in {id(one.core): one.core for one in self._around.values() if one.core}.values():
            own = self._below[id(core)] & self._online
            on = [number for number, some in found.items() if not some.isdisjoint(own)]
            if len(on) > 1:
                raise core.fail(
                    f"its PUs are on NUMA nodes {NodeSet(on)}: expected one node for a core"
                )
        return found

    def _add_distances(self, topology: _Topology, nodes: Mapping[int, _Object]) -> None:
        """The distances between nodes: the first matrix that says them."""
        for matrix in topology.matrices:
            ids = self._matrix_nodes(topology.version, matrix, nodes)
            if ids is None:
                continue
            size = len(ids)
            if len(matrix.values) != size * size:
                raise InputError(
                    f"{self._place}:{matrix.line}: distances: there are {len(matrix.values)} numbers: "
                    f"expected {size * size}, for {size} NUMA nodes",
                    _HINT,
                )
            if NodeSet(ids) != NodeSet(nodes):
                self.oddities.append(
                    f"hwloc's XML has distances between nodes {NodeSet(ids)} alone: they are not used."
                )
                return
            base = _decimal(matrix, matrix.attributes.get("latency_base", "1"), self._place)
            numbers = [round(_decimal(matrix, one, self._place) * base) for one in matrix.values]
            place = {number: at for at, number in enumerate(ids)}
            for number in ids:
                row = numbers[place[number] * size : (place[number] + 1) * size]
                text = " ".join(str(row[place[to]]) for to in sorted(ids))
                self.files[f"{_NODE}/node{number}/distance"] = f"{text}\n"
            return

    def _matrix_nodes(
        self, version: int, matrix: _Matrix, nodes: Mapping[int, _Object]
    ) -> list[int] | None:
        """The nodes that a matrix is about, in its order; None if it is about something else."""
        attributes = matrix.attributes
        if version == 1:
            # They are numbered by depth in the tree, and only the nodes are as many as they are.
            return list(nodes) if attributes.get("nbobjs") == str(len(nodes)) else None
        kind = re.fullmatch(r"[0-9]{1,9}", attributes.get("kind", ""), re.ASCII)
        if attributes.get("type") != "NUMANode" or kind is None or not int(kind[0]) & _LATENCY:
            return None
        if attributes.get("indexing") == "gp":
            by_index = {node.attributes.get("gp_index"): number for number, node in nodes.items()}
        else:
            by_index = {str(number): number for number in nodes}
        ids = [by_index.get(index) for index in matrix.indexes]
        found = [one for one in ids if one is not None]
        if len(found) != len(ids) or len(set(found)) != len(ids):
            raise InputError(
                f"{self._place}:{matrix.line}: distances: indexes are "
                f"'{shorten(' '.join(matrix.indexes))}': expected NUMA nodes, each once",
                _HINT,
            )
        return found

    # Devices

    def _add_devices(
        self, one: _Object, owner: _Object, host: str | None, path: tuple[PciAddress, ...]
    ) -> None:
        """Adds the I/O objects below an object.

        Args:
            one: the object.
            owner: the nearest object of CPUs or memory: what hangs there is near to it.
            host: the host bridge on the way down, e.g. ``pci0000:00``.
            path: the PCI functions on the way down.
        """
        for child in one.children:
            if child.kind not in _IO_TYPES:
                if one is not owner:
                    raise child.fail(f"lies below a {shorten(one.kind)}: expected a device there")
                self._add_devices(child, child, None, ())
                continue
            below_host, below_path = host, path
            if child.kind in ("Bridge", "PCIDev") and "pci_busid" in child.attributes:
                address = find_pci_address(child.attributes["pci_busid"])
                if address is None:
                    raise child.fail("pci_busid is no PCI address such as 0000:1b:00.0")
                below_path = (*path, address)
                self._add_function(child, owner, host, below_path)
            elif child.kind == "Bridge":
                match = _HOST_BRIDGE.fullmatch(child.attributes.get("bridge_pci", ""))
                below_host = f"pci{match[1]}:{match[2]}" if match else None
            elif child.kind == "OSDev" and path:
                self._add_os_device(child, host, path)
            self._add_devices(child, owner, below_host, below_path)

    def _add_function(
        self, one: _Object, owner: _Object, host: str | None, path: tuple[PciAddress, ...]
    ) -> None:
        address = path[-1]
        link = f"sys/bus/pci/devices/{address}"
        folder = _folder(host, path)
        if f"{folder}/numa_node" in self.files or link in self.links:
            raise one.fail("is there twice: expected it once")
        if folder != link:
            self.links[link] = f"../../../{folder.removeprefix('sys/')}"
        kind = _PCI_TYPE.fullmatch(one.attributes.get("pci_type", ""))
        if kind is not None:
            # hwloc keeps the class and the subclass, not the programming interface.
            self.files[f"{folder}/class"] = f"0x{kind[1]}00\n"
            for leaf, number in (("vendor", kind[2]), ("device", kind[3])):
                if number != _UNREAD:
                    self.files[f"{folder}/{leaf}"] = f"0x{number}\n"
        node = None
        cpus = self._below[id(owner)] & self._online
        if cpus != self._online:
            nodes = owner.nodes()
            node = nodes.first if nodes is not None and len(nodes) == 1 else None
            if cpus:
                self.files[f"{folder}/local_cpulist"] = f"{cpus}\n"
        self.files[f"{folder}/numa_node"] = _id_text(node)
        model = one.infos.get("PCIDevice") or one.attributes.get("name")
        if model:
            self.models[address] = model

    def _add_os_device(self, one: _Object, host: str | None, path: tuple[PciAddress, ...]) -> None:
        model = one.infos.get("GPUModel")
        if model:
            self.models[path[-1]] = model
        kind = _OSDEV_FOLDERS.get(one.attributes.get("osdev_type", ""))
        if kind is None:
            return
        name = one.attributes.get("name", "")
        if not _DEVICE_NAME.fullmatch(name):
            raise one.fail(f"name is '{shorten(name)}': expected a device's")
        link = f"sys/class/{kind}/{name}/device"
        if link in self.links:
            raise one.fail(f"'{name}' is there twice: expected it once")
        self.links[link] = f"../../../../{_folder(host, path)}"
        ports = (_PORT.fullmatch(info) for info in one.infos) if kind == "infiniband" else ()
        self.folders |= {f"sys/class/{kind}/{name}/ports/{port[1]}" for port in ports if port}

    # The ceiling

    def _add_ceiling(self, machine: _Object) -> None:
        """What the process that wrote the XML may use, as its own cgroup's."""
        allowed = machine.cpus("allowed_cpuset")
        if allowed is None:
            return
        self.files["proc/self/cgroup"] = f"0::/{_RECORDED}\n"
        self.files[f"{_CGROUP}/{_RECORDED}/cpuset.cpus.effective"] = f"{allowed}\n"
        nodes = machine.nodes("allowed_nodeset")
        if nodes is not None:
            self.files[f"{_CGROUP}/{_RECORDED}/cpuset.mems.effective"] = f"{nodes}\n"


def _folder(host: str | None, path: tuple[PciAddress, ...]) -> str:
    """The folder of a PCI function; one that says nothing of its way where no host bridge is known."""
    if host is None:
        return f"sys/bus/pci/devices/{path[-1]}"
    return f"sys/devices/{host}/" + "/".join(map(str, path))


def _id_text(number: int | None) -> str:
    return f"{-1 if number is None else number}\n"


def _decimal(matrix: _Matrix, text: str, place: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text, re.ASCII):
        raise InputError(
            f"{place}:{matrix.line}: distances: '{shorten(text)}' is no number such as 10", _HINT
        )
    return float(text)
