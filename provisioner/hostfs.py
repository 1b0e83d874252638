"""What a host is set to, read: one read and one parse function per file, and all of them together.

Source: Documentation/core-api/irq/irq-affinity.rst, Documentation/ABI/testing/sysfs-bus-pci (msi_irqs),
Documentation/ABI/testing/sysfs-devices-system-cpu (smt/control), Documentation/admin-guide/mm/hugetlbpage.rst;
environment(5) of PAM, systemd-system.conf(5), environment.d(5); irqbalance(1).

A file that is there and can't be read is not known, as one that is absent is: nothing that is planned
rests on these.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from provisioner.cgroup import find_hierarchies
from provisioner.errors import ParseError, ReadError
from provisioner.idset import CpuSet
from provisioner.pci import PciAddress
from provisioner.root import Root, read_parsed
from provisioner.settings import (
    CARD_CHOICE,
    CARD_ORDER,
    NIC_CHOICE,
    OWN_BINDING,
    THREAD_BINDING,
    HostSettings,
    HugePages,
    Interrupt,
    Irqbalance,
    Setting,
)
from provisioner.sysfs import is_id, parse_int
from provisioner.topology import Machine

_T = TypeVar("_T")

ENVIRONMENT = (*CARD_ORDER, *CARD_CHOICE, *THREAD_BINDING, *OWN_BINDING, *NIC_CHOICE)
# Keys of system.conf that hold for every service.
MANAGER = ("CPUAffinity", "NUMAPolicy", "NUMAMask")
MANAGER_ENVIRONMENT = "DefaultEnvironment"
# Units that give CPUs away or start containers of their own.
SERVICES = (
    *("docker.service", "containerd.service", "crio.service", "podman.service"),
    *("kubelet.service", "k3s.service", "k3s-agent.service", "rke2-agent.service"),
    *("rke2-server.service", "slurmd.service", "tuned.service", "intel_lpmd.service"),
)
IRQBALANCE_SETTINGS = ("etc/default/irqbalance", "etc/sysconfig/irqbalance")
IRQBALANCE = ("IRQBALANCE_BANNED_CPULIST", "IRQBALANCE_BANNED_CPUS")

_PCI = "sys/bus/pci/devices"
_SYSTEM_SLICE = "system.slice"
# The first wins. Source: systemd-system.conf(5).
_MANAGER_FOLDERS = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd")
_ENVIRONMENT_FILES = ("etc/environment", "etc/profile")
_ENVIRONMENT_FOLDERS = (("etc/environment.d", ".conf"), ("etc/profile.d", ".sh"))


def read_settings(root: Root, machine: Machine) -> HostSettings:
    """What the host is set to.

    Args:
        root: where it is read.
        machine: what discovery found there.
    """
    unit_folder = _find_unit_folder(root)
    return HostSettings(
        interrupts=_read_interrupts(root, machine),
        irqbalance=_read_irqbalance(root, unit_folder),
        environment=_read_environment(root),
        manager=read_manager_settings(root) if _exists(root, "etc") else None,
        services=None
        if unit_folder is None
        else frozenset(name for name in SERVICES if _exists(root, f"{unit_folder}/{name}")),
        cgroup_version=_read_cgroup_version(root),
        smt_control=_text(root, "sys/devices/system/cpu/smt/control").strip() or None,
        is_virtual=parse_is_virtual(_text(root, "proc/cpuinfo")),
        huge_pages=_read_huge_pages(root, machine),
        kernel=parse_kernel(_text(root, "proc/sys/kernel/osrelease")),
    )


def _text(root: Root, path: str) -> str:
    """A file's text; empty where there is none that can be read."""
    try:
        return root.read(path, lossy=True) or ""
    except ReadError:
        return ""


def _parsed(root: Root, path: str, parse: Callable[[str], _T]) -> _T | None:
    """What a parser makes of a file; None where there is none that can be read, or of another form."""
    try:
        return read_parsed(root, path, parse)
    except (ReadError, ParseError):
        return None


def _names(root: Root, path: str) -> list[str]:
    """The names in a folder; empty where there is none that can be read."""
    try:
        return root.list(path)
    except ReadError:
        return []


def _exists(root: Root, path: str) -> bool:
    try:
        return root.resolve(path) is not None
    except ReadError:
        return False


# Interrupts ------------------------------------------------------------------------------------


def list_pci_interrupts(root: Root, address: PciAddress) -> tuple[int, ...]:
    """The numbers of a PCI function's message interrupts, ascending; empty if it has none.

    A function without them has one in its file irq, which others may share; that is not read.
    """
    names = _names(root, f"{_PCI}/{address}/msi_irqs")
    return tuple(sorted(int(name) for name in names if is_id(name)))


def read_interrupt_cpus(root: Root, number: int) -> CpuSet | None:
    """Where an interrupt lands; what was asked for where the kernel does not say the former."""
    for name in ("effective_affinity_list", "smp_affinity_list"):
        found = _parsed(root, f"proc/irq/{number}/{name}", CpuSet.parse_list)
        if found is not None:
            return found
    return None


def _read_interrupts(
    root: Root, machine: Machine
) -> dict[PciAddress, tuple[Interrupt, ...]] | None:
    """Of each card and physical network device; None if none of them is said."""
    addresses = [card.address for card in machine.accelerators if card.address is not None]
    addresses += [nic.address for nic in machine.nics if nic.name and not nic.is_virtual]
    found: dict[PciAddress, tuple[Interrupt, ...]] = {}
    for address in addresses:
        lands = (
            (number, read_interrupt_cpus(root, number))
            for number in list_pci_interrupts(root, address)
        )
        known = tuple(Interrupt(number, cpus) for number, cpus in lands if cpus is not None)
        if known:
            found[address] = known
    return found or None


def _find_unit_folder(root: Root) -> str | None:
    """Where the cgroups of the system's services are, relative to the root; None if it is not known."""
    for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified", "sys/fs/cgroup/systemd"):
        if _exists(root, f"{mount}/{_SYSTEM_SLICE}"):
            return f"{mount}/{_SYSTEM_SLICE}"
    return None


def _read_irqbalance(root: Root, unit_folder: str | None) -> Irqbalance | None:
    # Its sockets' folder tells of one that is no unit; systemd removes that folder with the unit.
    runs = unit_folder is not None and _exists(root, f"{unit_folder}/irqbalance.service")
    if not runs and not _names(root, "run/irqbalance"):
        return None
    path = next((one for one in IRQBALANCE_SETTINGS if _exists(root, one)), IRQBALANCE_SETTINGS[0])
    return Irqbalance(_parsed(root, path, parse_banned), f"/{path}")


def parse_banned(text: str) -> CpuSet | None:
    """The CPUs that irqbalance's settings ban; None if they name none."""
    values = dict(parse_assignments(text, IRQBALANCE))
    for name, parse in zip(IRQBALANCE, (CpuSet.parse_list, CpuSet.parse_mask), strict=True):
        if values.get(name):
            return parse(values[name].removeprefix("0x"))
    return None


# Environment -----------------------------------------------------------------------------------


def _read_environment(root: Root) -> tuple[Setting, ...] | None:
    """The variables of ENVIRONMENT that every service or session gets; None where there is no /etc."""
    if not _exists(root, "etc"):
        return None
    paths = [
        *_ENVIRONMENT_FILES,
        *(
            f"{folder}/{name}"
            for folder, ending in _ENVIRONMENT_FOLDERS
            for name in _names(root, folder)
            if name.endswith(ending)
        ),
    ]
    found = [
        Setting(name, value, f"/{path}")
        for path in paths
        for name, value in parse_assignments(_text(root, path), ENVIRONMENT)
    ]
    return (
        *found,
        *(
            Setting(name, value, words.place)
            for words in _read_manager(root, (MANAGER_ENVIRONMENT,))
            for name, value in parse_manager_environment(words.value)
        ),
    )


def read_manager_settings(root: Root) -> tuple[Setting, ...]:
    """The keys of MANAGER that system.conf and its drop-ins set, in the order in which they are read."""
    return _read_manager(root, MANAGER)


def _read_manager(root: Root, keys: Sequence[str]) -> tuple[Setting, ...]:
    """What systemd's own files say of these keys; an empty assignment takes earlier ones back.

    Of the main file the first one counts, of drop-ins of one name likewise, and drop-ins are read
    by name. Source: systemd-system.conf(5).
    """
    main = next(
        (one for folder in _MANAGER_FOLDERS if _exists(root, one := f"{folder}/system.conf")), None
    )
    drop_ins: dict[str, str] = {}
    for folder in _MANAGER_FOLDERS:
        for name in _names(root, f"{folder}/system.conf.d"):
            if name.endswith(".conf"):
                drop_ins.setdefault(name, f"{folder}/system.conf.d/{name}")
    found: list[Setting] = []
    for path in (
        *(() if main is None else (main,)),
        *(drop_ins[name] for name in sorted(drop_ins)),
    ):
        for key, value in parse_manager_keys(_text(root, path), keys):
            if value:
                found.append(Setting(key, value, f"/{path}"))
            else:
                found = [one for one in found if one.name != key]
    return tuple(found)


_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.ASCII)


def parse_assignments(text: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """(name, value) of the lines 'NAME=value' or 'export NAME=value' with one of these names.

    A value's quotes are taken off; what a shell would fill in stays as it is written.
    """
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        match = _ASSIGNMENT.fullmatch(line)
        if match is not None and match[1] in names:
            found.append((match[1], next(iter(_split(match[2])), "")))
    return found


def parse_manager_keys(text: str, keys: Sequence[str]) -> list[tuple[str, str]]:
    """(key, value) of the lines 'key=value' of these keys in the section [Manager]."""
    found: list[tuple[str, str]] = []
    section = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("[") and stripped.endswith("]"):
            section = stripped[1:-1]
        key, equals, value = stripped.partition("=")
        if section == "Manager" and equals and key.strip() in keys:
            found.append((key.strip(), value.strip()))
    return found


def parse_manager_environment(value: str) -> list[tuple[str, str]]:
    """(name, value) of what DefaultEnvironment= sets of the variables of ENVIRONMENT."""
    pairs = (word.partition("=") for word in _split(value))
    return [(name, text) for name, equals, text in pairs if equals and name in ENVIRONMENT]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # an open quote
        return text.split()


# The rest --------------------------------------------------------------------------------------


def _read_cgroup_version(root: Root) -> int | None:
    """Of the hierarchy that owns the cpuset controller; None if none is known to."""
    try:
        hierarchies = find_hierarchies(root)
    except ReadError:
        return None
    for hierarchy in hierarchies:
        if hierarchy.version == 1 and _exists(root, hierarchy.mount):
            return 1
        if "cpuset" in _text(root, f"{hierarchy.mount}/cgroup.controllers").split():
            return 2
    return None


def parse_is_virtual(text: str) -> bool | None:
    """Whether a hypervisor is below, as the flag of that name in /proc/cpuinfo says on x86.

    Absent: None without such flags, as on other processors.
    """
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return None if flags is None else "hypervisor" in flags[1].split()


def parse_kernel(text: str) -> tuple[int, int] | None:
    """The first two numbers of a kernel's release; None if it does not begin with them."""
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", text, re.ASCII)
    return None if match is None else (int(match[1]), int(match[2]))


def _read_huge_pages(root: Root, machine: Machine) -> tuple[HugePages, ...]:
    """Of each size of which there is one; empty if there is none."""
    sizes: dict[int, dict[int, int]] = {}
    for node in machine.nodes:
        folder = f"sys/devices/system/node/node{node.id}/hugepages"
        for name in _names(root, folder):
            match = re.fullmatch(r"hugepages-([0-9]{1,9})kB", name, re.ASCII)
            count = _parsed(root, f"{folder}/{name}/nr_hugepages", parse_int)
            if match is not None and count is not None:
                sizes.setdefault(int(match[1]), {})[node.id] = count
    return tuple(
        HugePages(size, counts) for size, counts in sorted(sizes.items()) if any(counts.values())
    )
