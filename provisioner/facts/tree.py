"""From facts to the files that a kernel would show on such a machine.

Source of the forms: Documentation/admin-guide/cputopology.rst, ABI/stable/sysfs-devices-node,
ABI/testing/sysfs-devices-system-cpu, ABI/testing/sysfs-bus-pci, admin-guide/mm/numaperf.rst,
admin-guide/cgroup-v2.rst, ABI/testing/sysfs-driver-habanalabs; drivers/gpu/drm/amd/amdkfd/kfd_topology.c;
drivers/infiniband/core/sysfs.c; NVIDIA's kernel-open/nvidia/nv-procfs.c.
"""

from __future__ import annotations

import fnmatch
import re
from typing import NamedTuple

from provisioner.facts.values import (
    ASCEND_VENDOR,
    HABANA_VENDOR,
    INTEL_VENDOR,
    KFD_VENDORS,
    NVIDIA_VENDOR,
    BridgeFacts,
    CardFacts,
    HostFacts,
    PciFacts,
)
from provisioner.idset import CpuSet, NodeSet
from provisioner.pci import PciAddress
from provisioner.root import MemoryRoot

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_CGROUP = "sys/fs/cgroup"
_CONTROLLERS = "cpu io memory hugetlb pids rdma misc\n"
_MOUNTS = """\
sysfs /sys sysfs rw,nosuid,nodev,noexec,relatime 0 0
proc /proc proc rw,nosuid,nodev,noexec,relatime 0 0
cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,relatime,nsdelegate,memory_recursiveprot 0 0
"""
# Firmware describes dies and numbers caches to the kernel on x86 alone (CPUID leaves 0x1f and 4).
_DESCRIBING_ARCHES = ("x86_64", "i686")
# Level and type of the caches that each core has for itself.
_CORE_CACHES = ((1, "Data"), (1, "Instruction"), (2, "Unified"))


def build_tree(facts: HostFacts, *, with_masks: bool = False) -> MemoryRoot:
    """The machine's /sys and /proc, as far as provision reads them.

    Args:
        facts: a machine that `check_facts` finds nothing wrong with.
        with_masks: also the mask twin of each CPU list (``core_cpus`` of ``core_cpus_list``), which
            provision does not need and hwloc does.
    """
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    texts = _CpuTexts(_possible_cpus(facts).last + 1, with_masks)
    _add_cpus(facts, texts, files)
    _add_nodes(facts, texts, files)
    _add_pci(facts, texts, files, links)
    _add_class_devices(facts, files, links)
    _add_nvidia(facts, files)
    _add_kfd(facts, files)
    _add_gaudi(facts, files, links)
    _add_ascend(facts, files)
    _add_drivers(facts, files, links)
    _add_proc_and_cgroups(facts, files, links)
    if facts.absent:
        lacks = re.compile("|".join(fnmatch.translate(pattern) for pattern in facts.absent)).match
        files = {path: text for path, text in files.items() if not lacks(path)}
        links = {path: target for path, target in links.items() if not lacks(path)}
    return MemoryRoot(facts.name, files, links)


class _CpuTexts:
    """Puts CPU sets into files, as lists and, if wanted, as masks.

    Most files of a machine say the same few sets, so callers make each set's texts once.
    """

    def __init__(self, width: int, with_masks: bool) -> None:
        self._width = width  # bits of a mask: the kernel's nr_cpu_ids
        self._with_masks = with_masks

    def say(self, cpus: CpuSet) -> _Said:
        """The set's texts."""
        return _Said(f"{cpus}\n", self.mask(cpus) if self._with_masks else None)

    def mask(self, cpus: CpuSet) -> str:
        """The mask in groups of 32 bits. Source: lib/vsprintf.c, bitmap_string."""
        digits = f"{cpus.bits:0{(self._width + 3) // 4}x}"
        head = len(digits) % 8
        groups = [digits[start : start + 8] for start in range(head, len(digits), 8)]
        return ",".join([digits[:head], *groups] if head else groups) + "\n"


class _Said(NamedTuple):
    """One CPU set as the kernel writes it."""

    as_list: str
    as_mask: str | None  # None: masks are not wanted

    def put(self, files: dict[str, str], list_path: str, mask_path: str) -> None:
        """Adds the file with the list, and the one with the mask."""
        files[list_path] = self.as_list
        if self.as_mask is not None:
            files[mask_path] = self.as_mask


def _possible_cpus(facts: HostFacts) -> CpuSet:
    if facts.possible_cpus is not None:
        return facts.possible_cpus
    return CpuSet(range(facts.cpus.last + 1))


def _add_cpus(facts: HostFacts, texts: _CpuTexts, files: dict[str, str]) -> None:
    """The folder cpu. An offline CPU has no topology and no cache, and is in no other CPU's lists."""
    online, possible = facts.online_cpus, _possible_cpus(facts)
    files[f"{_CPU}/online"] = f"{online}\n"
    files[f"{_CPU}/offline"] = f"{possible - online}\n"
    files[f"{_CPU}/possible"] = f"{possible}\n"
    files[f"{_CPU}/present"] = f"{facts.cpus}\n"
    files[f"{_CPU}/isolated"] = f"{facts.isolated_cpus}\n"
    files[f"{_CPU}/kernel_max"] = f"{facts.kernel_max}\n"
    for cpu in facts.cpus:
        if cpu:  # CPU 0 can't be unplugged
            files[f"{_CPU}/cpu{cpu}/online"] = "1\n" if cpu in online else "0\n"
    numbers_caches = facts.arch in _DESCRIBING_ARCHES
    of_package = _package_files(facts, texts)
    of_llc: dict[int, dict[str, str]] = {}
    for number, llc in enumerate(facts.last_level_caches()):
        cache = _cache_files(3, 3, "Unified", texts.say(llc & online))
        if numbers_caches:
            cache["cache/index3/id"] = f"{number}\n"
        of_llc.update(dict.fromkeys(llc, cache))
    # The next core_id of each package: they repeat across packages.
    core_ids = [0] * len(facts.packages)
    for number, core in enumerate(facts.cores()):
        first = core.first
        package, common = of_package[first]
        own = {**common, "topology/core_id": f"{core_ids[package]}\n"}
        core_ids[package] += 1
        said = texts.say(core & online)
        said.put(own, "topology/core_cpus_list", "topology/core_cpus")
        said.put(own, "topology/thread_siblings_list", "topology/thread_siblings")
        for index, (level, kind) in enumerate(_CORE_CACHES):
            own |= _cache_files(index, level, kind, said)
            if numbers_caches:
                own[f"cache/index{index}/id"] = f"{number}\n"
        own |= of_llc.get(first, {})
        for cpu in core & online:
            folder = f"{_CPU}/cpu{cpu}/"
            for leaf, text in own.items():
                files[folder + leaf] = text


def _package_files(facts: HostFacts, texts: _CpuTexts) -> dict[int, tuple[int, dict[str, str]]]:
    """CPU -> the position of its package, and what its files of the package and the die say."""
    online = facts.online_cpus
    found: dict[int, tuple[int, dict[str, str]]] = {}
    for index, package in enumerate(facts.packages):
        said = texts.say(package.cpus & online)
        for number, die in enumerate(package.dies or (package.cpus,)):
            files = {
                "topology/physical_package_id": f"{-1 if package.id is None else package.id}\n"
            }
            said.put(files, "topology/package_cpus_list", "topology/package_cpus")
            said.put(files, "topology/core_siblings_list", "topology/core_siblings")
            if facts.arch in _DESCRIBING_ARCHES:
                files["topology/die_id"] = f"{number}\n"
                die_said = texts.say(die & online)
                die_said.put(files, "topology/die_cpus_list", "topology/die_cpus")
            found.update(dict.fromkeys(die, (index, files)))
    return found


def _cache_files(index: int, level: int, kind: str, said: _Said) -> dict[str, str]:
    folder = f"cache/index{index}"
    files = {f"{folder}/level": f"{level}\n", f"{folder}/type": f"{kind}\n"}
    said.put(files, f"{folder}/shared_cpu_list", f"{folder}/shared_cpu_map")
    return files


def _add_nodes(facts: HostFacts, texts: _CpuTexts, files: dict[str, str]) -> None:
    """The folder node; none for a kernel without NUMA."""
    if not facts.nodes:
        return
    online = facts.online_cpus
    ids = facts.node_ids
    possible = facts.possible_nodes
    with_memory = _memory_nodes(facts)
    files[f"{_NODE}/online"] = f"{ids}\n"
    files[f"{_NODE}/possible"] = (
        f"{NodeSet(range(ids.last + 1)) if possible is None else possible}\n"
    )
    files[f"{_NODE}/has_cpu"] = (
        f"{NodeSet(node.id for node in facts.nodes if node.cpus & online)}\n"
    )
    files[f"{_NODE}/has_memory"] = f"{with_memory}\n"
    # A card's memory is put into the movable zone, where the kernel keeps nothing of its own.
    movable = NodeSet(card.memory_node for card in facts.cards if card.memory_node is not None)
    files[f"{_NODE}/has_normal_memory"] = f"{with_memory - movable}\n"
    rows = facts.distance_rows()
    for node in facts.nodes:
        folder = f"{_NODE}/node{node.id}"
        files[f"{folder}/cpulist"] = f"{node.cpus & online}\n"
        files[f"{folder}/cpumap"] = texts.mask(node.cpus & online)
        kib = node.memory_bytes // 1024
        files[f"{folder}/meminfo"] = (
            f"Node {node.id} MemTotal:       {kib:8d} kB\nNode {node.id} MemFree:        {kib:8d} kB\n"
        )
        files[f"{folder}/distance"] = " ".join(map(str, rows[node.id])) + "\n"
        if node.read_bandwidth is not None:
            files[f"{folder}/access0/initiators/read_bandwidth"] = f"{node.read_bandwidth}\n"


def _memory_nodes(facts: HostFacts) -> NodeSet:
    return NodeSet(node.id for node in facts.nodes if node.memory_bytes)


def _pci_folder(path: tuple[PciAddress, ...]) -> str:
    """The path of a function's folder below sys: the host bridge, the bridges, the function."""
    return f"devices/pci{path[0].domain:04x}:{path[0].bus:02x}/" + "/".join(map(str, path))


def _add_pci(
    facts: HostFacts, texts: _CpuTexts, files: dict[str, str], links: dict[str, str]
) -> None:
    """The functions' folders, and bus/pci/devices with a link to each."""
    online = facts.online_cpus
    everywhere = texts.say(online)
    on_node = {node.id: texts.say(node.cpus & online) for node in facts.nodes}
    functions: list[tuple[tuple[PciAddress, ...], PciFacts | BridgeFacts, CpuSet | None]] = [
        *((path, bridge, None) for path, bridge in facts.all_bridges()),
        *((function.path, function, function.local_cpus) for function in facts.pci_functions),
    ]
    for path, one, local in functions:
        folder = _pci_folder(path)
        links[f"sys/bus/pci/devices/{path[-1]}"] = f"../../../{folder}"
        files[f"sys/{folder}/class"] = f"0x{one.pci_class:06x}\n"
        files[f"sys/{folder}/vendor"] = f"0x{one.vendor:04x}\n"
        files[f"sys/{folder}/device"] = f"0x{one.device:04x}\n"
        node = one.numa_node
        if facts.nodes:  # a kernel without NUMA has no such file
            files[f"sys/{folder}/numa_node"] = f"{-1 if node is None else node}\n"
        said = everywhere if node is None else on_node.get(node, everywhere)
        if local is not None:
            said = texts.say(local)
        said.put(files, f"sys/{folder}/local_cpulist", f"sys/{folder}/local_cpus")
    paths = {function.address: function.path for function in facts.pci_functions}
    for function in facts.pci_functions:
        if function.physfn is not None:
            up = "../" * (len(function.path) + 2)
            links[f"sys/{_pci_folder(function.path)}/physfn"] = up + _pci_folder(
                paths[function.physfn]
            )


def _add_class_devices(facts: HostFacts, files: dict[str, str], links: dict[str, str]) -> None:
    """The folders class/infiniband and class/net: a link to each device, whose own link is its function."""
    for nic in facts.nics:
        folder = _pci_folder(nic.path)
        for kind, names in (("infiniband", nic.rdma), ("net", nic.net)):
            for name in names:
                links[f"sys/class/{kind}/{name}"] = f"../../{folder}/{kind}/{name}"
                links[f"sys/{folder}/{kind}/{name}/device"] = f"../../../{nic.address}"
        for name in nic.rdma:
            for port in range(1, nic.ports + 1):
                files[f"sys/{folder}/infiniband/{name}/ports/{port}/state"] = "4: ACTIVE\n"


def _held_cards(facts: HostFacts, *vendors: int) -> list[tuple[int, CardFacts]]:
    """(the driver's number, the card) of the cards that these vendors' driver holds, by number."""
    held = [card for card in facts.cards if card.vendor in vendors and card.has_driver]
    in_order = enumerate(sorted(held, key=lambda card: card.address))
    numbered = [(at if card.minor is None else card.minor, card) for at, card in in_order]
    return sorted(numbered, key=lambda pair: pair[0])


def _add_nvidia(facts: HostFacts, files: dict[str, str]) -> None:
    """NVIDIA's driver's folder for each card that it holds, and the card's device node."""
    for minor, card in _held_cards(facts, NVIDIA_VENDOR):
        folder = f"proc/driver/nvidia/gpus/{card.address}"
        files[f"{folder}/information"] = (
            f"Model: \t\t {card.model}\n"
            f"GPU UUID: \t {made_uuid(card)}\n"
            f"Bus Type: \t PCIe\n"
            f"Bus Location: \t {card.address}\n"
            f"Device Minor: \t {minor}\n"
        )
        if card.memory_node is not None:
            files[f"{folder}/numa_status"] = f"Node:      {card.memory_node}\nStatus:    online\n"
        files[f"dev/nvidia{minor}"] = ""


def _add_kfd(facts: HostFacts, files: dict[str, str]) -> None:
    """The compute topology of AMD's driver: the nodes with CPUs, then each GPU or its partitions."""
    held = _held_cards(facts, *KFD_VENDORS)
    if not held:
        return
    nodes = "sys/class/kfd/kfd/topology/nodes"
    cpu_counts = [len(node.cpus) for node in facts.nodes if node.cpus] or [len(facts.cpus)]
    texts = [
        f"cpu_cores_count {count}\nsimd_count 0\nvendor_id 0\ndevice_id 0\nlocation_id 0\ndomain 0\n"
        for count in cpu_counts
    ]
    for _, card in held:
        address = card.address
        location = address.bus << 8 | address.device << 3 | address.function
        texts += [
            f"cpu_cores_count 0\nsimd_count 304\nvendor_id {card.vendor}\ndevice_id {card.device}\n"
            f"location_id {location | partition << 28}\ndomain {address.domain}\n"
            for partition in range(card.partitions)
        ]
        if card.model:
            files[f"sys/{_pci_folder(card.path)}/product_name"] = f"{card.model}\n"
    for number, text in enumerate(texts):
        files[f"{nodes}/{number}/properties"] = text


def _add_gaudi(facts: HostFacts, files: dict[str, str], links: dict[str, str]) -> None:
    """The class accel: a link to each Gaudi's device, whose own link is its function."""
    for number, card in _held_cards(facts, HABANA_VENDOR):
        folder = _pci_folder(card.path)
        links[f"sys/class/accel/accel{number}"] = f"../../{folder}/accel/accel{number}"
        links[f"sys/{folder}/accel/accel{number}/device"] = f"../../../{card.address}"
        files[f"sys/{folder}/pci_addr"] = f"{card.address}\n"
        if card.module is not None:
            files[f"sys/{folder}/module_id"] = f"{card.module}\n"


def _add_ascend(facts: HostFacts, files: dict[str, str]) -> None:
    """The NPUs' device nodes, and the devices of the unified bus."""
    for number, _ in _held_cards(facts, ASCEND_VENDOR):
        files[f"dev/davinci{number}"] = ""
    for one in facts.ub_devices:
        folder = f"sys/class/ubcore/{one.name}/device"
        files[f"{folder}/ub_totalues"] = f"{one.entities}\n"
        files[f"{folder}/numa"] = f"{-1 if one.numa is None else one.numa}\n"


# The kernel's drivers of the vendors whose cards are told to be held by their driver's link.
_PCI_DRIVERS = {INTEL_VENDOR: "xe", ASCEND_VENDOR: "devdrv_device_driver"}


def _add_drivers(facts: HostFacts, files: dict[str, str], links: dict[str, str]) -> None:
    """The link from a function to its driver."""
    for vendor, driver in _PCI_DRIVERS.items():
        for _, card in _held_cards(facts, vendor):
            up = "../" * (len(card.path) + 2)
            links[f"sys/{_pci_folder(card.path)}/driver"] = f"{up}bus/pci/drivers/{driver}"
            files[f"sys/bus/pci/drivers/{driver}/bind"] = "\n"


def made_uuid(card: CardFacts) -> str:
    """A UUID for a made card: the same for the same address, and of no real card."""
    address = card.address
    return f"GPU-{address.domain:08x}-{address.bus:04x}-4000-8000-{address.device:06x}{address.function:06x}"


def _add_proc_and_cgroups(facts: HostFacts, files: dict[str, str], links: dict[str, str]) -> None:
    """The rest of proc, and the one cgroup hierarchy, of version 2."""
    total = sum(node.memory_bytes for node in facts.nodes) or facts.memory_bytes
    files["proc/meminfo"] = f"MemTotal:       {total // 1024:8d} kB\n"
    if facts.numa_balancing is not None:
        files["proc/sys/kernel/numa_balancing"] = f"{facts.numa_balancing}\n"
    files["proc/self/cgroup"] = f"0::{facts.own_cgroup}\n"
    files["proc/self/mounts"] = _MOUNTS
    links["proc/mounts"] = "self/mounts"
    cpus = facts.online_cpus
    # Without NUMA the kernel calls the whole machine node 0.
    nodes = _memory_nodes(facts) or NodeSet((0,))
    limits = {"/": (cpus, nodes)}
    for one in facts.cgroups:
        limits[one.path] = (
            cpus if one.cpus is None else one.cpus,
            nodes if one.nodes is None else one.nodes,
        )
    for path, (cpus, nodes) in limits.items():
        folder = f"{_CGROUP}{path}".rstrip("/")
        files[f"{folder}/cgroup.controllers"] = f"cpuset {_CONTROLLERS}"
        files[f"{folder}/cpuset.cpus.effective"] = f"{cpus}\n"
        files[f"{folder}/cpuset.mems.effective"] = f"{nodes}\n"
    if facts.own_cgroup not in limits:  # the cpuset controller is off there
        files[f"{_CGROUP}{facts.own_cgroup}/cgroup.controllers"] = _CONTROLLERS
