"""One read and, where its form is not shared, one parse function per kernel file.

Source of the paths: Documentation/ABI/stable/sysfs-devices-node, ABI/testing/sysfs-devices-system-cpu,
ABI/testing/sysfs-bus-pci, admin-guide/cputopology.rst; NVIDIA's kernel-open/nvidia/nv-procfs.c.
The files of other vendors' drivers are `cardfs`'s.

Absent, throughout: None (or an empty set where the docstring says so). Every function raises
ReadError for a file that is there but can't be read, and ParseError, with the file's path, for text
that is not of the file's form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from provisioner.errors import ParseError, shorten
from provisioner.idset import CpuSet, NodeSet
from provisioner.pci import PciAddress, find_pci_address, is_pci_root
from provisioner.root import Root, read_parsed

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"
_NVIDIA = "proc/driver/nvidia/gpus"


def parse_int(text: str) -> int:
    """The decimal number that the text is, sign allowed."""
    stripped = text.strip()
    if not re.fullmatch(r"-?[0-9]{1,18}", stripped, re.ASCII):
        raise ParseError(f"'{shorten(stripped)}' is no number")
    return int(stripped)


def parse_hex(text: str) -> int:
    """The number that ``0x...`` text is."""
    stripped = text.strip()
    if not re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}", stripped, re.ASCII):
        raise ParseError(f"'{shorten(stripped)}' is no hexadecimal number such as 0x10de")
    return int(stripped, 16)


def parse_id(text: str) -> int | None:
    """A kernel id; None for -1, by which the kernel says that it does not know."""
    value = parse_int(text)
    return None if value < 0 else value


# CPUs ------------------------------------------------------------------------------------------


def read_cpu_set(root: Root, name: str) -> CpuSet | None:
    """The set in /sys/devices/system/cpu/NAME: online, offline, possible, present or isolated."""
    return read_parsed(root, f"{_CPU}/{name}", CpuSet.parse_list)


def list_cpus(root: Root) -> CpuSet:
    """The CPUs that have a folder; empty if there is none."""
    names = root.list(_CPU)
    return CpuSet(int(name[3:]) for name in names if name.startswith("cpu") and is_id(name[3:]))


def read_cpu_online(root: Root, cpu: int) -> bool | None:
    """Whether cpuN/online says 1.

    Absent: None if there is no such file, as for a CPU that can't be unplugged, or it is empty, as
    in recordings by a user who may not read it.
    """
    path = f"{_CPU}/cpu{cpu}/online"
    value = read_parsed(root, path, lambda text: parse_int(text) if text.strip() else None)
    return None if value is None else value != 0


def list_topology_files(root: Root, cpu: int) -> frozenset[str]:
    """The names in cpuN/topology, which a kernel has alike for all online CPUs; empty for an offline one."""
    return frozenset(root.list(f"{_CPU}/cpu{cpu}/topology"))


def list_cache_indexes(root: Root, cpu: int) -> tuple[str, ...]:
    """The names of the caches in cpuN/cache: index0 and so on; empty if none is described."""
    names = root.list(f"{_CPU}/cpu{cpu}/cache")
    return tuple(name for name in names if name.startswith("index") and is_id(name[5:]))


# The files that name a group's members, the best first. Each has a list and a mask form; kernels
# before 2.6.26 had the masks alone, and the older names stand beside the newer.
SIBLING_FILES = ("core_cpus_list", "thread_siblings_list", "core_cpus", "thread_siblings")
PACKAGE_FILES = ("package_cpus_list", "core_siblings_list", "package_cpus", "core_siblings")
DIE_FILES = ("die_cpus_list", "die_cpus")


def read_topology_group(root: Root, cpu: int, names: Iterable[str]) -> CpuSet | None:
    """The first of cpuN/topology/NAME that names the CPU itself; else the last that is not empty.

    Some recordings hold an empty or a stale list beside the right mask.
    Absent: None, also where every file is empty.
    """
    return _read_own_group(root, cpu, [f"{_CPU}/cpu{cpu}/topology/{name}" for name in names])


def read_package_id(root: Root, cpu: int) -> int | None:
    """topology/physical_package_id."""
    return read_parsed(root, f"{_CPU}/cpu{cpu}/topology/physical_package_id", parse_id)


def read_die_id(root: Root, cpu: int) -> int | None:
    """topology/die_id."""
    return read_parsed(root, f"{_CPU}/cpu{cpu}/topology/die_id", parse_id)


def read_last_level_cache(root: Root, cpu: int) -> CpuSet | None:
    """The CPUs that share the CPU's highest-level data cache; None if none is described."""
    best: tuple[int, str] | None = None
    for name in list_cache_indexes(root, cpu):
        folder = f"{_CPU}/cpu{cpu}/cache/{name}"
        level = read_parsed(root, f"{folder}/level", parse_int)
        if level is None or (best is not None and level <= best[0]):
            continue
        if (root.read(f"{folder}/type") or "").strip() != "Instruction":
            best = (level, folder)
    if best is None:
        return None
    return _read_own_group(root, cpu, [f"{best[1]}/shared_cpu_list", f"{best[1]}/shared_cpu_map"])


def _read_own_group(root: Root, cpu: int, paths: list[str]) -> CpuSet | None:
    found: CpuSet | None = None
    for path in paths:
        parse = CpuSet.parse_list if path.endswith("_list") else CpuSet.parse_mask
        members = read_parsed(root, path, parse)
        if members:
            if cpu in members:
                return members
            found = members
    return found


def describe_cpus(root: Root, leaf: str = "") -> str:
    """The path of the folder of all CPUs, or of something in it, for messages."""
    return root.describe(f"{_CPU}/{leaf}".rstrip("/"))


def describe_cpu(root: Root, cpu: int, leaf: str = "topology") -> str:
    """The path of a CPU's folder, for messages."""
    return root.describe(f"{_CPU}/cpu{cpu}/{leaf}")


# NUMA nodes ------------------------------------------------------------------------------------


def list_nodes(root: Root) -> NodeSet:
    """The nodes that have a folder, the online ones; empty if the kernel has no NUMA."""
    names = root.list(_NODE)
    return NodeSet(int(name[4:]) for name in names if name.startswith("node") and is_id(name[4:]))


def read_nodes_with_memory(root: Root) -> NodeSet | None:
    """has_memory, else has_normal_memory."""
    for name in ("has_memory", "has_normal_memory"):
        found = read_parsed(root, f"{_NODE}/{name}", NodeSet.parse_list)
        if found is not None:
            return found
    return None


def read_node_cpus(root: Root, node: int) -> CpuSet | None:
    """nodeN/cpulist, else nodeN/cpumap."""
    return _read_list_or_mask(root, f"{_NODE}/node{node}/cpulist", f"{_NODE}/node{node}/cpumap")


def read_node_memory(root: Root, node: int) -> int | None:
    """MemTotal of nodeN/meminfo. Unit: bytes."""
    return read_parsed(root, f"{_NODE}/node{node}/meminfo", parse_meminfo)


def read_node_available(root: Root, node: int) -> int | None:
    """What of a node's memory is free or can be freed at once. Unit: bytes.

    Source: nodeN/meminfo: MemFree, the page cache but for shared memory, and SReclaimable.
    """
    return read_parsed(root, f"{_NODE}/node{node}/meminfo", parse_available)


def read_node_distances(root: Root, node: int) -> tuple[int, ...] | None:
    """nodeN/distance: one number for each online node in ascending order."""
    return read_parsed(root, f"{_NODE}/node{node}/distance", parse_distances)


def read_node_bandwidth(root: Root, node: int) -> int | None:
    """Read bandwidth from the nearest CPUs, of the firmware's HMAT. Unit: MB/s.

    Source: Documentation/admin-guide/mm/numaperf.rst; access class 1 counts CPUs alone, 0 any initiator.
    """
    for access in ("access1", "access0"):
        path = f"{_NODE}/node{node}/{access}/initiators/read_bandwidth"
        found = read_parsed(root, path, parse_int)
        if found is not None:
            return found
    return None


def describe_nodes(root: Root, leaf: str) -> str:
    """The path of something in the folder of all nodes, for messages."""
    return root.describe(f"{_NODE}/{leaf}")


def describe_node(root: Root, node: int, leaf: str) -> str:
    """The path of a node's file, for messages."""
    return root.describe(f"{_NODE}/node{node}/{leaf}")


def read_machine_memory(root: Root) -> int | None:
    """MemTotal of /proc/meminfo. Unit: bytes."""
    return read_parsed(root, "proc/meminfo", parse_meminfo)


def read_is_knights_landing(root: Root) -> bool:
    """Whether /proc/cpuinfo names a Xeon Phi, whose CPU-less nodes are its high-bandwidth memory."""
    return "Xeon Phi" in (root.read("proc/cpuinfo") or "")


def read_numa_balancing(root: Root) -> bool | None:
    """Whether kernel.numa_balancing is on. Source: admin-guide/sysctl/kernel.rst."""
    value = read_parsed(root, "proc/sys/kernel/numa_balancing", parse_int)
    return None if value is None else value != 0


_MEM_TOTAL = re.compile(
    r"^(?:Node +[0-9]+ +)?MemTotal: *([0-9]{1,15}) *kB *$", re.ASCII | re.MULTILINE
)


def parse_meminfo(text: str) -> int:
    """MemTotal in bytes, of a node's meminfo or of /proc/meminfo."""
    match = _MEM_TOTAL.search(text)
    if match is None:
        raise ParseError("has no line 'MemTotal: N kB'")
    return int(match[1]) * 1024


_NODE_LINE = re.compile(
    r"^Node +[0-9]+ +([A-Za-z_()]+): *([0-9]{1,15}) *kB *$", re.ASCII | re.MULTILINE
)


def parse_available(text: str) -> int:
    """The bytes of a node's meminfo that are free or can be freed at once."""
    lines = {name: int(kib) * 1024 for name, kib in _NODE_LINE.findall(text)}
    if "MemFree" not in lines:
        raise ParseError("has no line 'Node N MemFree: N kB'")
    names = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return sum(lines.get(name, 0) for name in names)


def parse_distances(text: str) -> tuple[int, ...]:
    """The numbers of a distance row, each 0 to 255 (the ACPI SLIT's bytes) or, on some machines, more."""
    return tuple(parse_int(part) for part in text.split())


# PCI -------------------------------------------------------------------------------------------


def list_pci(root: Root) -> list[PciAddress]:
    """The addresses of every PCI function, in PCI order; empty if there is no PCI bus."""
    found = (find_pci_address(name) for name in root.list(_PCI))
    return sorted(address for address in found if address is not None)


def read_pci_class(root: Root, address: PciAddress) -> int | None:
    """The class, 24 bits, e.g. 0x030200."""
    return read_parsed(root, f"{_PCI}/{address}/class", parse_hex)


def read_pci_vendor(root: Root, address: PciAddress) -> int | None:
    """The vendor id, 16 bits."""
    return read_parsed(root, f"{_PCI}/{address}/vendor", parse_hex)


def read_pci_device(root: Root, address: PciAddress) -> int | None:
    """The device id, 16 bits."""
    return read_parsed(root, f"{_PCI}/{address}/device", parse_hex)


def read_pci_numa_node(root: Root, address: PciAddress) -> int | None:
    """numa_node; None also for -1."""
    return read_parsed(root, f"{_PCI}/{address}/numa_node", parse_id)


def read_pci_local_cpus(root: Root, address: PciAddress) -> CpuSet | None:
    """local_cpulist, else local_cpus. A device without a node lists every CPU there."""
    return _read_list_or_mask(
        root, f"{_PCI}/{address}/local_cpulist", f"{_PCI}/{address}/local_cpus"
    )


def is_virtual_function(root: Root, address: PciAddress) -> bool:
    """Whether the function is an SR-IOV virtual one: it has a physfn link."""
    return root.resolve(f"{_PCI}/{address}/physfn") is not None


def list_pci_driver(root: Root, driver: str) -> list[PciAddress]:
    """The functions that a PCI driver holds, in PCI order; empty if there is no such driver."""
    found = (find_pci_address(name) for name in root.list(f"sys/bus/pci/drivers/{driver}"))
    return sorted(address for address in found if address is not None)


class PciPath(NamedTuple):
    """Where a function hangs."""

    host_bridge: str | None  # e.g. pci0000:00
    bridges: tuple[PciAddress, ...]  # from the host bridge down, without the function itself


def read_pci_path(root: Root, address: PciAddress) -> PciPath:
    """The host bridge and the bridges above a function, from where its link leads.

    Absent: no host bridge and no bridges, as in a recording that kept no links.
    """
    real = root.resolve(f"{_PCI}/{address}")
    parts = (real or "").split("/")
    for start, part in enumerate(parts):
        if is_pci_root(part):
            bridges = (find_pci_address(one) for one in parts[start + 1 : -1])
            return PciPath(part, tuple(one for one in bridges if one is not None))
    return PciPath(None, ())


def list_class_devices(root: Root, kind: str) -> list[tuple[str, PciAddress]]:
    """(name, PCI address) of each device of /sys/class/KIND that is on the PCI bus."""
    found: list[tuple[str, PciAddress]] = []
    for name in root.list(f"sys/class/{kind}"):
        real = root.resolve(f"sys/class/{kind}/{name}/device")
        # A virtio device hangs below the function that brings it.
        parts = re.sub(r"/virtio[0-9]+$", "", real or "")
        address = find_pci_address(parts.rpartition("/")[2])
        if address is not None:
            found.append((name, address))
    return found


def list_function_devices(root: Root, address: PciAddress, kind: str) -> list[str]:
    """The sorted names of the devices of class KIND in a PCI function's own folder."""
    folder = f"{_PCI}/{address}/{kind}"
    # Each is followed, since what is only listed is in no snapshot.
    return [name for name in root.list(folder) if root.resolve(f"{folder}/{name}") is not None]


def list_rdma_ports(root: Root, name: str) -> tuple[int, ...]:
    """The port numbers of an RDMA device, ascending; empty if it does not say them."""
    ports = root.list(f"sys/class/infiniband/{name}/ports")
    return tuple(sorted(int(port) for port in ports if is_id(port)))


def has_unified_bus(root: Root) -> bool:
    """Whether there is a class of devices on the unified bus, which Ascend NPUs may be on."""
    return root.resolve("sys/class/ubcore") is not None


def list_rdma_devices(root: Root) -> list[str]:
    """The names of every RDMA device, those without PCI (rxe, siw) too; empty if there is none."""
    return root.list("sys/class/infiniband")


def read_rdma_parent(root: Root, name: str) -> str | None:
    """The network interface that a soft RDMA device sits on. Source: drivers/infiniband/sw/rxe/rxe_verbs.c."""
    text = root.read(f"sys/class/infiniband/{name}/parent")
    return None if text is None else text.strip() or None


# NVIDIA's driver --------------------------------------------------------------------------------


def list_nvidia_driver(root: Root) -> list[PciAddress]:
    """The cards that NVIDIA's driver holds, in PCI order; empty if it is not loaded."""
    found = {find_pci_address(name) for name in root.list(_NVIDIA)}
    return sorted(address for address in found if address is not None)


class NvidiaInformation(NamedTuple):
    """What the driver's information file says; None for a line that is not there or says nothing."""

    model: str | None
    uuid: str | None
    minor: int | None


def read_nvidia_information(root: Root, address: PciAddress) -> NvidiaInformation:
    """/proc/driver/nvidia/gpus/ADDRESS/information. Absent: nothing in it."""
    return read_parsed(
        root, f"{_nvidia_folder(root, address)}/information", parse_nvidia_information
    ) or (NvidiaInformation(None, None, None))


def read_nvidia_memory_node(root: Root, address: PciAddress) -> int | None:
    """The NUMA node that is the card's own memory, from its numa_status file; None if it has none."""
    return read_parsed(root, f"{_nvidia_folder(root, address)}/numa_status", parse_numa_status)


def _nvidia_folder(root: Root, address: PciAddress) -> str:
    # The driver's folder may write the domain with four or eight digits.
    name = str(address)
    if root.resolve(f"{_NVIDIA}/{name}") is None:
        name = f"{address.domain:08x}:{address.bus:02x}:{address.device:02x}.{address.function:x}"
    return f"{_NVIDIA}/{name}"


def parse_nvidia_information(text: str) -> NvidiaInformation:
    """The lines 'Model:', 'GPU UUID:' and 'Device Minor:'."""
    lines = _parse_lines(text)
    uuid = lines.get("GPU UUID")
    minor = lines.get("Device Minor", "")
    return NvidiaInformation(
        lines.get("Model") or None,
        # The driver writes question marks until a card was first used.
        uuid if uuid and "?" not in uuid else None,
        int(minor) if is_id(minor) else None,
    )


def parse_numa_status(text: str) -> int | None:
    """The number of the line 'Node:', if it is one."""
    node = _parse_lines(text).get("Node", "")
    return int(node) if is_id(node) else None


def list_nvidia_nodes(root: Root) -> list[int]:
    """N of each /dev/nvidiaN, ascending."""
    return numbers_of(root.list("dev"), "nvidia")


def numbers_of(names: list[str], prefix: str) -> list[int]:
    """N of each name that is the prefix and a number, ascending."""
    start = len(prefix)
    return sorted(
        int(name[start:]) for name in names if name.startswith(prefix) and is_id(name[start:])
    )


def _parse_lines(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _read_list_or_mask(root: Root, list_path: str, mask_path: str) -> CpuSet | None:
    found = read_parsed(root, list_path, CpuSet.parse_list)
    return found if found is not None else read_parsed(root, mask_path, CpuSet.parse_mask)


def is_id(text: str) -> bool:
    """Whether the text is a number of at most nine digits, as the kernel numbers things."""
    return text.isascii() and text.isdigit() and len(text) <= 9
