"""What was read of a machine, less what would tell whose machine it is.

Nothing is kept because it looks harmless: each file's text is reduced to what its parser takes from
it, or is numbers and sets of numbers, or is refused. Names of devices and cgroups are kept unless
they hold an identifier.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from provisioner.cgroup import (
    Hierarchy,
    find_hierarchies,
    find_own_path,
    format_mounts,
    format_own_paths,
)
from provisioner.errors import ReadError, shorten
from provisioner.hostfs import (
    ENVIRONMENT,
    IRQBALANCE,
    MANAGER,
    MANAGER_ENVIRONMENT,
    parse_assignments,
    parse_is_virtual,
    parse_manager_environment,
    parse_manager_keys,
)
from provisioner.pci import find_pci_address
from provisioner.recording import Recorded
from provisioner.root import MemoryRoot, Root

_Reduce = Callable[[str], str | None]

# UUIDs, MAC addresses and GUIDs, alone or in a name such as enx0c42a1b2c3d4 or a container's cgroup.
# No name that the kernel makes up itself has a run of twelve hexadecimal digits.
_IDENTIFIER = re.compile(
    r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}|[0-9a-f]{12}",
    re.IGNORECASE,
)
# An NPU's device on the unified bus, which is known by its name: the letters before its numbers would
# make them such a run.
_NPU = re.compile(r"udma[cC][0-9]{1,4}d[0-9]{1,4}e[0-9]{1,4}", re.ASCII)
# Devices that an administrator may name, and folders of files of which they may name some.
_NAMED_BY_PEOPLE = ("net", "infiniband")
_WRITTEN_BY_PEOPLE = ("environment.d", "profile.d", "system.conf.d")
_OF_PEOPLE = re.compile(r"(?:etc|run|usr)/")
# The folders of a listing that say something by being there.
_NUMBERED = re.compile(r"(?:cpu|node|index)[0-9]{1,9}", re.ASCII)
# The folder that tells an online CPU by having anything in it.
_TOPOLOGY = re.compile(r"sys/devices/system/cpu/cpu[0-9]+/topology", re.ASCII)
# The folder of which a name's being there is an RDMA device's port.
_PORTS = re.compile(r"sys/.*/infiniband/[^/]+/ports", re.ASCII)
_PORT = re.compile(r"[0-9]{1,9}", re.ASCII)
# The folder of which a name's being there is an interrupt of the function.
_INTERRUPTS = re.compile(r"sys/.*/msi_irqs", re.ASCII)
_DEVICE_NODE = re.compile(r"(?:nvidia|davinci)[0-9]{1,9}", re.ASCII)

_NUMBER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
# Numbers, ids such as 0x10de, lists such as 0-3,8 and masks such as ff,ffffffff.
_NUMBERS = re.compile(r"[0-9a-fx,:/\s-]*", re.ASCII | re.IGNORECASE)


class Scrubbed(NamedTuple):
    """A tree that says nothing of whose machine it is."""

    tree: MemoryRoot
    renamed: Mapping[str, str]  # devices' names that held an identifier -> what stands for them


def scrub(root: Root, recorded: Recorded, name: str, cgroups: Iterable[str] = ()) -> Scrubbed:
    """The tree of what was recorded.

    Args:
        root: where it was recorded, for the mounts, the own cgroup and the host's name.
        recorded: what was found there.
        name: the tree's, for messages.
        cgroups: the paths that somebody asked for by name, which are kept.

    Raises ReadError for a file whose text no rule covers: there may be anything in it.
    """
    moves, own = _place_cgroups(root, recorded.files, cgroups)
    paths = [*recorded.files, *recorded.links, *recorded.links.values(), *recorded.folders]
    host = _host_name(root)
    renames, devices = _find_renames([_move(path, moves) for path in paths], host)

    def rename(path: str) -> str:
        return "/".join(renames.get(part, part) for part in _move(path, moves).split("/"))

    files: dict[str, str] = {}
    for path, text in recorded.files.items():
        reduced = _reduce(path, text)
        if reduced is not None and _OF_PEOPLE.match(path):
            reduced = "".join(
                line for line in reduced.splitlines(True) if not host or host not in line.lower()
            )
        if reduced is not None:
            files[rename(path)] = reduced
    if "proc/self/mounts" in recorded.files or "proc/mounts" in recorded.files:
        files["proc/self/mounts"] = format_mounts([hierarchy for hierarchy, _ in own])
    if "proc/self/cgroup" in recorded.files or "proc/self/cpuset" in recorded.files:
        files["proc/self/cgroup"] = format_own_paths(own)
    links = {
        rename(path): posixpath.relpath("/" + rename(target), posixpath.dirname("/" + rename(path)))
        for path, target in recorded.links.items()
    }
    folders = {rename(path) for path in recorded.folders}
    for path, names in recorded.folders.items():
        if path == "dev":
            files |= {f"{path}/{name}": "" for name in names if _DEVICE_NODE.fullmatch(name)}
            continue
        numbered = [
            name
            for name in names
            if _NUMBERED.fullmatch(name)
            or find_pci_address(name) is not None
            or (_PORT.fullmatch(name) and (_PORTS.fullmatch(path) or _INTERRUPTS.fullmatch(path)))
        ]
        folders |= {f"{rename(path)}/{name}" for name in numbered}
    for path in recorded.folders:
        if _TOPOLOGY.fullmatch(path):
            files |= _keep_something(root, path, recorded.folders[path], files)
    folders -= files.keys() | links.keys()
    return Scrubbed(MemoryRoot(name, files, links, folders), devices)


def _keep_something(
    root: Root, folder: str, names: Iterable[str], files: Mapping[str, str]
) -> dict[str, str]:
    """A file of a folder of which none was read."""
    paths = [f"{folder}/{name}" for name in names]
    if any(path in files for path in paths):
        return {}
    for path in paths:
        text = root.read(path)
        if text is not None and _is_numbers(text):
            return {path: text.rstrip() + "\n"}
    return {}


def holds_identifier(name: str) -> bool:
    """Whether a name has a UUID, a MAC address, or a run of digits as long as one in it."""
    return _IDENTIFIER.search(name) is not None


def _find_renames(paths: Iterable[str], host: str) -> tuple[dict[str, str], dict[str, str]]:
    """(names to replace -> what by, those of devices among them)."""
    found: dict[str, bool] = {}
    for path in paths:
        above = ""
        for part in path.split("/"):
            is_device = above in _NAMED_BY_PEOPLE
            is_named_so = holds_identifier(part) and not _NPU.fullmatch(part)
            by_people = is_device or above in _WRITTEN_BY_PEOPLE
            if is_named_so or (by_people and host and host in part.lower()):
                found[part] = found.get(part, False) or is_device
            above = part
    renames = {part: f"renamed{number}{_ending(part)}" for number, part in enumerate(sorted(found))}
    return renames, {part: new for part, new in renames.items() if found[part]}


def _ending(name: str) -> str:
    """What a file's name has to end in for its reader to take it up."""
    return next((ending for ending in (".conf", ".sh") if name.endswith(ending)), "")


def _host_name(root: Root) -> str:
    """The host's name without its domain, if it is long enough to tell anything."""
    text = root.read("proc/sys/kernel/hostname") or ""
    name = text.strip().lower().partition(".")[0]
    return name if len(name) > 2 else ""


def _move(path: str, moves: Iterable[tuple[str, str]]) -> str:
    for old, new in moves:
        if path == old or path.startswith(f"{old}/"):
            return new + path[len(old) :]
    return path


def _place_cgroups(
    root: Root, files: Mapping[str, str], cgroups: Iterable[str]
) -> tuple[list[tuple[str, str]], list[tuple[Hierarchy, str]]]:
    """(path, path to have instead) of mounts in odd places and of the own cgroup; where both are then.

    Of the own cgroup only that is kept whose cpuset holds, so that all who share one give the same
    snapshot. It has no name of its own, unless it was asked for by name.
    """
    kept = {up for path in cgroups for up in _ancestors(posixpath.normpath("/" + path.strip("/")))}
    hierarchies = find_hierarchies(root)
    # A process has one cgroup in all hierarchies of a version, which may be mounted twice.
    holding: dict[int, str] = {}
    for one in hierarchies:
        for up in reversed(_ancestors(find_own_path(root, one))):
            if any(f"{one.mount}{up}/{name}" in files for name in one.cpus):
                holding.setdefault(one.version, up)
                break
    moves: dict[str, str] = {}
    own: list[tuple[Hierarchy, str]] = []
    for number, one in enumerate(hierarchies):
        mount = one.mount
        if not re.fullmatch(r"(sys/fs/cgroup|dev/cpuset)(/[a-z,_=]+)?", mount, re.ASCII):
            mount = moves[one.mount] = f"mnt/cgroup{number}"
        path = holding.get(one.version, "/")
        if path != "/" and path not in kept:
            moves[one.mount + path] = f"{mount}/own"
            path = "/own"
        own.append((one._replace(mount=mount), path))
    return sorted(moves.items(), key=lambda move: (-len(move[0]), move[0])), own


def _ancestors(path: str) -> list[str]:
    """Each path on the way down to a path, itself included, without '/'."""
    parts = [part for part in path.split("/") if part]
    return ["/" + "/".join(parts[: at + 1]) for at in range(len(parts))]


# What each text becomes ------------------------------------------------------------------------


def _reduce(path: str, text: str) -> str | None:
    """What is kept of a file's text; None if the file is not."""
    for pattern, reduce in _RULES:
        if pattern.fullmatch(path):
            return reduce(text)
    if _is_numbers(text):
        return text.rstrip() + "\n"
    raise ReadError(
        f"{path}: there may be anything in it: found '{shorten(text.strip())}', expected numbers and sets of them",
        "Report it, if this is a machine's own file: provisioner.scrub has no rule for it",
    )


def _is_numbers(text: str) -> bool:
    return bool(_NUMBERS.fullmatch(text)) and not _IDENTIFIER.search(text)


def _lines(*names: str) -> _Reduce:
    """Keeps the lines 'NAME: value' of these names."""

    def reduce(text: str) -> str:
        kept = [line for line in text.splitlines() if line.partition(":")[0].strip() in names]
        return "".join(f"{line.rstrip()}\n" for line in kept)

    return reduce


def _pairs(*names: str) -> _Reduce:
    """Keeps the lines 'NAME NUMBER' of these names."""

    def reduce(text: str) -> str:
        pairs = [line.split() for line in text.splitlines()]
        return "".join(
            f"{pair[0]} {pair[1]}\n"
            for pair in pairs
            if len(pair) == 2 and pair[0] in names and _NUMBER.fullmatch(pair[1])
        )

    return reduce


def _assignments(*names: str) -> _Reduce:
    """Keeps the lines 'NAME=value' of these names, with what identifies nobody of the values."""

    def reduce(text: str) -> str | None:
        kept = [
            f"{name}={shlex.quote(value)}\n"
            for name, value in parse_assignments(text, names)
            if value.isprintable() and not holds_identifier(value)
        ]
        return "".join(kept) or None

    return reduce


def _manager_keys(text: str) -> str | None:
    """Keeps what systemd's own configuration says of all services' CPUs, memory and environment."""
    kept: list[str] = []
    for key, value in parse_manager_keys(text, (*MANAGER, MANAGER_ENVIRONMENT)):
        if key == MANAGER_ENVIRONMENT and value:
            pairs = [
                shlex.quote(f"{name}={one}")
                for name, one in parse_manager_environment(value)
                if not holds_identifier(one)
            ]
            kept += [f"{key}={' '.join(pairs)}\n"] if pairs else []
        elif not holds_identifier(value):
            kept.append(f"{key}={value}\n")
    return "[Manager]\n" + "".join(kept) if kept else None


def _cpuinfo(text: str) -> str:
    """Keeps what names a Xeon Phi, and whether a hypervisor is below."""
    virtual = parse_is_virtual(text)
    flags = "" if virtual is None else f"flags\t: {'hypervisor' if virtual else ''}\n"
    return ("model name\t: Xeon Phi\n" if "Xeon Phi" in text else "") + flags


def _product(text: str) -> str | None:
    """Keeps what a product is called: the card's own memory may hold anything there."""
    name = text.strip()
    return f"{name}\n" if name.isprintable() and not holds_identifier(name) else None


def _address(text: str) -> str | None:
    """Keeps a PCI address."""
    address = find_pci_address(text.strip())
    return None if address is None else f"{address}\n"


def _matching(pattern: str) -> _Reduce:
    """Keeps the words or lines that the pattern finds, each on a line of its own."""
    compiled = re.compile(pattern, re.ASCII | re.MULTILINE)
    return lambda text: "".join(f"{found}\n" for found in compiled.findall(text))


_RULES: tuple[tuple[re.Pattern[str], _Reduce], ...] = tuple(
    (re.compile(pattern, re.ASCII), reduce)
    for pattern, reduce in (
        (r"proc/meminfo|sys/devices/system/node/node\d+/meminfo", _matching(r"^.*MemTotal:.*$")),
        (r"proc/cpuinfo", _cpuinfo),
        (r"proc/sys/kernel/osrelease", _matching(r"\A[0-9]{1,4}\.[0-9]{1,4}")),
        (r"sys/devices/system/cpu/smt/control", _matching(r"\A[a-z]{1,20}")),
        (
            r"etc/(?:environment|profile|environment\.d/[^/]+|profile\.d/[^/]+)",
            _assignments(*ENVIRONMENT),
        ),
        (r"(?:etc|run|usr(?:/local)?/lib)/systemd/system\.conf(?:\.d/[^/]+)?", _manager_keys),
        (r"etc/(?:default|sysconfig)/irqbalance", _assignments(*IRQBALANCE)),
        (r"proc/driver/nvidia/gpus/[^/]+/information", _lines("Model", "Device Minor")),
        (r"proc/driver/nvidia/gpus/[^/]+/numa_status", _lines("Node")),
        # AMD's compute driver has a card's unique_id among what is read.
        (
            r"sys/.*/topology/nodes/\d+/properties",
            _pairs(
                *("cpu_cores_count", "simd_count", "vendor_id"),
                *("device_id", "location_id", "domain"),
            ),
        ),
        (r"sys/.*/product_name", _product),
        (r"sys/.*/pci_addr", _address),
        (
            r"sys/devices/system/cpu/cpu\d+/cache/index\d+/type",
            _matching(r"Data|Instruction|Unified"),
        ),
        (r".*/cgroup\.controllers", _matching(r"\bcpuset\b")),
        # Written anew, from what they say of cpusets.
        (r"proc/self/mounts|proc/mounts|proc/self/cgroup|proc/self/cpuset", lambda _: None),
    )
)
