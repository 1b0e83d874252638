"""What a host is set to, read: one read and one parse function per file, and all of them together.

Source: Documentation/core-api/irq/irq-affinity.rst, Documentation/ABI/testing/sysfs-bus-pci (msi_irqs),
Documentation/admin-guide/mm/hugetlbpage.rst;
environment(5) of PAM, systemd-system.conf(5), environment.d(5); irqbalance(1).

A file that is there and can't be read is not known, as one that is absent is: nothing that is planned
rests on these.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import TypeVar

from provisioner.cgroup import find_hierarchies
from provisioner.errors import ParseError, ReadError
from provisioner.idset import CpuSet
from provisioner.pci import PciAddress
from provisioner.root import Root
from provisioner.settings import (
    CARD_CHOICE,
    CARD_ORDER,
    CONTAINER_ENGINES,
    CPU_MANAGERS,
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

# What a snapshot has in place of a file that could not be read, which no such file holds.
UNREADABLE = "(unreadable)\n"

ENVIRONMENT = (*CARD_ORDER, *CARD_CHOICE, *THREAD_BINDING, *OWN_BINDING, *NIC_CHOICE)
# Keys of system.conf that hold for every service.
MANAGER = ("CPUAffinity", "NUMAPolicy")
MANAGER_ENVIRONMENT = "DefaultEnvironment"
SERVICES = (*CONTAINER_ENGINES, *CPU_MANAGERS)
IRQBALANCE_SETTINGS = ("etc/default/irqbalance", "etc/sysconfig/irqbalance")
IRQBALANCE = ("IRQBALANCE_BANNED_CPULIST", "IRQBALANCE_BANNED_CPUS")

IRQBALANCE_UNIT = "irqbalance.service"
CGROUP_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified", "sys/fs/cgroup/systemd")
# No line of settings is longer.
_LONGEST = 8192
_PCI = "sys/bus/pci/devices"
# The first wins. Source: environment.d(5).
_ENVIRONMENT_FOLDERS = ("etc/environment.d", "run/environment.d", "usr/lib/environment.d")
# What container engines leave inside. Source: systemd's src/basic/virt.c.
_CONTAINER = ("run/.containerenv", ".dockerenv", "run/systemd/container")
# The first wins. Source: systemd-system.conf(5).
_MANAGER_FOLDERS = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd")


def read_settings(root: Root, machine: Machine) -> HostSettings:
    """What the host is set to.

    Args:
        root: where it is read.
        machine: what discovery found there.
    """
    interrupts, environment, systemd, memory, packages = (_Reader(root) for _ in range(5))
    unit_folder = _find_unit_folder(systemd)
    return HostSettings(
        interrupts=_read_interrupts(interrupts, machine),
        irqbalance=_read_irqbalance(interrupts, unit_folder),
        environment=_read_environment(environment),
        manager=_read_manager(systemd, MANAGER) if systemd.is_whole() else None,
        services=None
        if unit_folder is None
        else frozenset(name for name in SERVICES if systemd.exists(f"{unit_folder}/{name}")),
        cgroup_version=_read_cgroup_version(systemd),
        is_virtual=parse_is_virtual(packages.text("proc/cpuinfo")),
        huge_pages=_read_huge_pages(memory, machine),
        has_systemd=systemd.exists("run/systemd/system") or (False if systemd.is_whole() else None),
        container=next((f"/{one}" for one in _CONTAINER if systemd.exists(one)), None),
        kernel=parse_kernel(systemd.text("proc/sys/kernel/osrelease")),
        unreadable={
            name: tuple(reader.unreadable)
            for name, reader in (
                ("interrupts", interrupts),
                ("environment", environment),
                ("systemd", systemd),
                ("memory", memory),
                ("packages", packages),
            )
            if reader.unreadable
        },
    )


class _Reader:
    """A root of which nothing that is read can fail; what could not be read is remembered."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.unreadable: dict[str, None] = {}

    def read(self, path: str) -> str | None:
        """A file's text; None where there is none that can be read."""
        try:
            text = self.root.read(path, lossy=True)
        except ReadError:
            text = UNREADABLE
        if text == UNREADABLE:
            self.unreadable[f"/{path}"] = None
            return None
        # Windows' editors begin a file with it.
        return None if text is None else text.removeprefix("\ufeff")

    def text(self, path: str) -> str:
        """A file's text; empty where there is none that can be read."""
        return self.read(path) or ""

    def parsed(self, path: str, parse: Callable[[str], _T]) -> _T | None:
        """What a parser makes of a file; None where there is none that can be read, or of another form."""
        text = self.read(path)
        if text is None:
            return None
        try:
            return parse(text)
        except ParseError:
            self.unreadable[f"/{path}"] = None
            return None

    def names(self, path: str) -> list[str]:
        """The names in a folder; empty where there is none that can be read."""
        try:
            return self.root.list(path)
        except ReadError:
            self.unreadable[f"/{path}"] = None
            return []

    def exists(self, path: str) -> bool:
        """Whether something is there, whatever it is.

        Not for files whose text is read too: of those a link would be recorded, and not the name.
        """
        try:
            return self.root.resolve(path) is not None
        except ReadError:
            self.unreadable[f"/{path}"] = None
            return False

    def is_whole(self) -> bool:
        """Whether the root has the files of a system, so that what it lacks the system lacks."""
        # Asked of the running system too: what is not asked for is in no snapshot.
        return self.exists("etc/os-release") or self.root.is_this_system


# Interrupts ------------------------------------------------------------------------------------


def _read_interrupts(
    reader: _Reader, machine: Machine
) -> dict[PciAddress, tuple[Interrupt, ...]] | None:
    """Of each card and network device that says them all; None if none does.

    A function without message interrupts has one in its file irq, which others may share; that is
    not read.
    """
    addresses = [card.address for card in machine.accelerators if card.address is not None]
    addresses += [nic.address for nic in machine.nics if nic.name]
    found: dict[PciAddress, tuple[Interrupt, ...]] = {}
    for address in addresses:
        names = reader.names(f"{_PCI}/{address}/msi_irqs")
        numbers = sorted(int(name) for name in names if is_id(name))
        listed = [_read_interrupt(reader, number) for number in numbers]
        known = tuple(one for one in listed if one is not None)
        if known and len(known) == len(listed):
            found[address] = known
    return found or None


def _read_interrupt(reader: _Reader, number: int) -> Interrupt | None:
    for name in ("effective_affinity_list", "smp_affinity_list"):
        cpus = reader.parsed(f"proc/irq/{number}/{name}", CpuSet.parse_list)
        if cpus is not None:
            return Interrupt(number, cpus, is_asked=name == "smp_affinity_list")
    return None


def _find_unit_folder(reader: _Reader) -> str | None:
    """Where the cgroups of the system's services are, relative to the root; None if it is not known."""
    for mount in CGROUP_MOUNTS:
        if reader.exists(f"{mount}/system.slice"):
            return f"{mount}/system.slice"
    return None


def _read_irqbalance(reader: _Reader, unit_folder: str | None) -> Irqbalance | None:
    # Its sockets' folder tells of one that is no unit; systemd removes that folder with the unit.
    runs = unit_folder is not None and reader.exists(f"{unit_folder}/{IRQBALANCE_UNIT}")
    if not runs and not reader.names("run/irqbalance"):
        return None
    for path in IRQBALANCE_SETTINGS:
        # A file that bans nothing is there too.
        banned = reader.parsed(path, lambda text: (parse_banned(text),))
        if banned is not None:
            return Irqbalance(*banned, f"/{path}")
        if f"/{path}" in reader.unreadable:
            return Irqbalance(None, f"/{path}", is_known=False)
    return Irqbalance(None, f"/{IRQBALANCE_SETTINGS[0]}", is_known=reader.is_whole())


def parse_banned(text: str) -> CpuSet | None:
    """The CPUs that irqbalance's settings ban; None if they name none."""
    values = dict(parse_assignments(text, IRQBALANCE))
    for name, parse in zip(IRQBALANCE, (CpuSet.parse_list, CpuSet.parse_mask), strict=True):
        if values.get(name):
            return parse(values[name].removeprefix("0x"))
    return None


# Environment -----------------------------------------------------------------------------------


def _read_environment(reader: _Reader) -> tuple[Setting, ...] | None:
    """The variables of ENVIRONMENT that every service or session gets; None where the root is no whole system's."""
    if not reader.is_whole():
        return None
    found: list[Setting] = []
    for parse, files, folders, ending in (
        (parse_variables, ("etc/environment",), _ENVIRONMENT_FOLDERS, ".conf"),
        (parse_shell, ("etc/profile", "etc/bash.bashrc"), ("etc/profile.d",), ".sh"),
    ):
        for path in (*files, *_list_drop_ins(reader, folders, ending)):
            # The last one counts.
            values = dict(parse(reader.text(path), ENVIRONMENT))
            found += [Setting(name, value, f"/{path}") for name, value in values.items()]
    own: dict[str, Setting] = {}
    for words in _read_manager(reader, (MANAGER_ENVIRONMENT,)):
        for name, value in parse_manager_environment(words.value):
            own[name] = Setting(name, value, words.place)
    return (*found, *own.values())


def _list_drop_ins(reader: _Reader, folders: Sequence[str], ending: str) -> list[str]:
    """The files of these folders with that ending, by name; of equal names the first folder's counts."""
    paths: dict[str, str] = {}
    for folder in folders:
        for name in reader.names(folder):
            if name.endswith(ending):
                paths.setdefault(name, f"{folder}/{name}")
    return [paths[name] for name in sorted(paths)]


def _read_manager(reader: _Reader, keys: Sequence[str]) -> tuple[Setting, ...]:
    """What systemd's own files say of these keys; an empty assignment takes earlier ones back.

    Of the main file the first one counts, of drop-ins of one name likewise, and drop-ins are read
    by name. Source: systemd-system.conf(5).
    """
    texts: dict[str, str] = {}
    for folder in _MANAGER_FOLDERS:
        main = reader.read(f"{folder}/system.conf")
        if main is not None:
            texts[f"{folder}/system.conf"] = main
            break
    folders = [f"{folder}/system.conf.d" for folder in _MANAGER_FOLDERS]
    texts |= {path: reader.text(path) for path in _list_drop_ins(reader, folders, ".conf")}
    found: list[Setting] = []
    for path, text in texts.items():
        for key, value in parse_manager_keys(text, keys):
            if value:
                found.append(Setting(key, value, f"/{path}"))
            else:
                found = [one for one in found if one.name != key]
    return tuple(found)


def read_manager_settings(root: Root) -> tuple[Setting, ...]:
    """The keys of MANAGER that system.conf and its drop-ins set, in the order in which they are read."""
    return _read_manager(_Reader(root), MANAGER)


_VARIABLE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.ASCII)


def _find_variables(text: str, names: Container[str]) -> Iterator[tuple[str, str]]:
    """(name, what stands behind the equals sign) of the lines that set one of these names."""
    for line in text.splitlines():
        match = _VARIABLE.fullmatch(line)
        if match is not None and match[1] in names:
            yield match[1], match[2]


def parse_variables(text: str, names: Container[str]) -> list[tuple[str, str]]:
    """(name, value) of the lines 'NAME=value' with one of these names, as PAM and environment.d read them.

    What follows a '#' is a comment, and quotes around the whole value are taken off.
    """
    found: list[tuple[str, str]] = []
    for name, rest in _find_variables(text, names):
        value = rest.partition("#")[0].strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found.append((name, value))
    return found


def parse_shell(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """(name, value) of what a shell script hands on of these names.

    These are 'export NAME=value ...' and 'declare -x NAME=value', whatever condition they stand
    under, and 'NAME=value' before 'export NAME'; 'unset NAME' takes it back. What a shell would fill
    in stays as it is written. A variable in front of a command is that command's alone.
    """
    exported: dict[str, str] = {}
    own: dict[str, str] = {}
    for line in text.splitlines():
        if not any(name in line for name in names):
            continue
        for part in re.split(r";|&&|\|\||\bthen\b|\bdo\b", line):
            words = _split(part, comments=True)
            is_kept = words[:1] == ["export"] or words[:2] == ["declare", "-x"]
            pairs = [word.partition("=") for word in words]
            if is_kept:
                for name, equals, value in pairs:
                    if name in names and (equals or name in own):
                        exported[name] = value if equals else own[name]
            elif words[:1] == ["unset"]:
                for name in words[1:]:
                    exported.pop(name, None)
                    own.pop(name, None)
            elif all(equals for _, equals, _ in pairs):
                for name, _, value in pairs:
                    if name in exported:
                        exported[name] = value
                    elif name in names:
                        own[name] = value
    return list(exported.items())


def parse_assignments(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """(name, value) of the lines 'NAME=value' with one of these names, as a shell reads a file of settings."""
    return [
        (name, next(iter(_split(value, comments=True)), ""))
        for name, value in _find_variables(text, names)
    ]


def parse_manager_keys(text: str, keys: Container[str]) -> list[tuple[str, str]]:
    """(key, value) of the lines 'key=value' of these keys in the section [Manager].

    A line that ends in a backslash goes on in the next one that is no comment. Source: systemd.syntax(7).
    """
    found: list[tuple[str, str]] = []
    section = ""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("#", ";"))]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
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


def _split(text: str, *, comments: bool = False) -> list[str]:
    if len(text) > _LONGEST:  # shlex takes the square of the length
        return text.split()
    try:
        return shlex.split(text, comments=comments)
    except ValueError:  # an open quote
        return text.split()


# The rest --------------------------------------------------------------------------------------


def _read_cgroup_version(reader: _Reader) -> int | None:
    """Of the hierarchy that owns the cpuset controller; 0 if none does, None if nothing says so."""
    try:
        hierarchies = find_hierarchies(reader.root)
    except ReadError:
        return None
    found: int | None = None
    for hierarchy in hierarchies:
        if hierarchy.version == 1 and reader.exists(hierarchy.mount):
            return 1
        controllers = reader.text(f"{hierarchy.mount}/cgroup.controllers").split()
        if "cpuset" in controllers:
            return 2
        if controllers:
            found = 0
    return found


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


def _read_huge_pages(reader: _Reader, machine: Machine) -> tuple[HugePages, ...] | None:
    """Of each size of which there is one; None if no node says any."""
    sizes: dict[int, dict[int, int]] = {}
    for node in machine.nodes:
        folder = f"sys/devices/system/node/node{node.id}/hugepages"
        for name in reader.names(folder):
            match = re.fullmatch(r"hugepages-([0-9]{1,9})kB", name, re.ASCII)
            count = reader.parsed(f"{folder}/{name}/nr_hugepages", parse_count)
            if match is not None and count is not None:
                sizes.setdefault(int(match[1]), {})[node.id] = count
    found = (
        HugePages(size, counts) for size, counts in sorted(sizes.items()) if any(counts.values())
    )
    return tuple(found) if sizes else None


def parse_count(text: str) -> int:
    """A number that is not negative."""
    value = parse_int(text)
    if value < 0:
        raise ParseError(f"'{value}' is no number of things")
    return value
