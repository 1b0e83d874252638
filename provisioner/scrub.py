"""What was read of a machine, less what would tell whose machine it is.

Nothing is kept because it looks harmless: each file's text is reduced to what its parser takes from
it, or is numbers and sets of numbers, or is refused. Names of devices and cgroups are kept unless
they hold an identifier.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from provisioner.cgroup import (
    Hierarchy,
    find_hierarchies,
    find_own_path,
    format_mounts,
    format_own_paths,
)
from provisioner.errors import ParseError, ReadError, shorten
from provisioner.hostfs import (
    CGROUP_MOUNTS,
    ENVIRONMENT,
    IRQBALANCE,
    IRQBALANCE_UNIT,
    MANAGER,
    MANAGER_ENVIRONMENT,
    SERVICES,
    UNREADABLE,
    parse_banned,
    parse_is_virtual,
    parse_manager_environment,
    parse_manager_keys,
    parse_shell,
    parse_variables,
)
from provisioner.pci import find_pci_address
from provisioner.recording import Recorded
from provisioner.root import MemoryRoot, Root
from provisioner.sysfs import parse_nvidia_information

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
# Devices that an administrator may name.
_NAMED_BY_PEOPLE = ("net", "infiniband")
# Files that an administrator names, which are read in the order of their names; systemd brings one itself.
_WRITTEN_BY_PEOPLE = re.compile(
    r".*/(?:environment|profile|system\.conf)\.d/(?!99-environment\.conf)[^/]*(\.[a-z]+)"
)
# The cgroups of services that doctor looks for, which are the same everywhere, and of what holds them.
_UNIT = re.compile(
    f"(?:{'|'.join(CGROUP_MOUNTS)})/system\\.slice"
    f"(?:/(?:{'|'.join(re.escape(one) for one in (*SERVICES, IRQBALANCE_UNIT))}))?"
)
# irqbalance's, of which something is in it while it runs.
_SOCKETS = "run/irqbalance"
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
# A number, an id such as 0x10de, a part of a list such as 0-3 or 0-7:1/2, a group of a mask such as ffffffff.
_WORD = re.compile(
    r"-?[0-9]{1,18}|0x[0-9a-f]{1,16}|[0-9]{1,9}-[0-9]{1,9}(?::[0-9]{1,9}/[0-9]{1,9})?|[0-9a-f]{1,8}",
    re.ASCII | re.IGNORECASE,
)


class Scrubbed(NamedTuple):
    """A tree that says nothing of whose machine it is."""

    tree: MemoryRoot
    renamed: Mapping[str, str]  # devices' names that held an identifier -> what stands for them


def scrub(
    root: Root,
    recorded: Recorded,
    name: str,
    cgroups: Iterable[str] = (),
    unreadable: Iterable[str] = (),
) -> Scrubbed:
    """The tree of what was recorded.

    Args:
        root: where it was recorded, for the mounts, the own cgroup and the host's name.
        recorded: what was found there.
        name: the tree's, for messages.
        cgroups: the paths that somebody asked for by name, which are kept.
        unreadable: the files of settings that could not be read, which stay so.

    Raises ReadError for a file whose text no rule covers: there may be anything in it.
    """
    moves, own = _place_cgroups(root, recorded.files, cgroups)
    paths = [*recorded.files, *recorded.links, *recorded.links.values(), *recorded.folders]
    renames, devices = _find_renames([_move(path, moves) for path in paths], find_host_name(root))
    reduced = {
        path: _reduce(path, text.removeprefix("\ufeff")) for path, text in recorded.files.items()
    }
    for path in (one.lstrip("/") for one in unreadable):
        # No file can stand where others lie below.
        if not any(other.startswith(f"{path}/") for other in paths):
            reduced[path] = UNREADABLE
    numbers = _number_files(path for path, text in reduced.items() if text is not None)

    def rename(path: str) -> str:
        path = numbers.get(path, path)
        return "/".join(renames.get(part, part) for part in _move(path, moves).split("/"))

    files = {rename(path): text for path, text in reduced.items() if text is not None}
    if "proc/self/mounts" in recorded.files or "proc/mounts" in recorded.files:
        files["proc/self/mounts"] = format_mounts([hierarchy for hierarchy, _ in own])
    if "proc/self/cgroup" in recorded.files or "proc/self/cpuset" in recorded.files:
        files["proc/self/cgroup"] = format_own_paths(own)
    links = {
        rename(path): posixpath.relpath("/" + rename(target), posixpath.dirname("/" + rename(path)))
        for path, target in recorded.links.items()
    }
    folders = {rename(path) for path in recorded.folders}
    # Where the recorder was in one of these itself, what else is in it was moved with it.
    folders |= {path for path in recorded.folders if _UNIT.fullmatch(path)}
    if recorded.folders.get(_SOCKETS):
        files[f"{_SOCKETS}/socket"] = ""
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
            if is_named_so or (is_device and host and host in part.lower()):
                found[part] = found.get(part, False) or is_device
            above = part
    renames = {part: f"renamed{number}" for number, part in enumerate(sorted(found))}
    return renames, {part: new for part, new in renames.items() if found[part]}


def _number_files(paths: Iterable[str]) -> dict[str, str]:
    """Path -> path with a number for a name, of the files that an administrator named.

    Files of one name keep one name, and all of them their order: of those in several folders the
    first hides the others.
    """
    named = {path: match[1] for path in paths if (match := _WRITTEN_BY_PEOPLE.fullmatch(path))}
    names = sorted({posixpath.basename(path) for path in named})
    numbers = {name: f"{number:03d}" for number, name in enumerate(names)}
    return {
        path: f"{posixpath.dirname(path)}/{numbers[posixpath.basename(path)]}{ending}"
        for path, ending in named.items()
    }


def find_host_name(root: Root) -> str:
    """The host's name without its domain, if it is long enough to tell anything; else empty."""
    try:
        text = root.read("proc/sys/kernel/hostname", lossy=True) or ""
    except ReadError:
        text = ""
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
    words = re.split(r"[\s,]+", text)
    return all(not word or _WORD.fullmatch(word) for word in words) and not _IDENTIFIER.search(text)


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


# Of values: numbers, what the variables' own documentations name, and RDMA devices as drivers call them.
_PLAIN = re.compile(
    r"-?[0-9]{1,5}|PCI_BUS_ID|FASTEST_FIRST|all|none|void|true|false|yes|no|on|off|enable|disable"
    r"|close|spread|master|primary|cores|threads|sockets|ll_caches|numa_domains"
    r"|granularity|fine|core|tile|thread|compact|scatter|balanced|disabled|explicit|proclist|verbose|noverbose"
    r"|respect|norespect|warnings|nowarnings|socket|node|numa|cache[123]?|omp|auto|pack|bunch"
    r"|(?:mlx[45]|bnxt_re|irdma|hfi1|qedr|efa|hns|mana)_[0-9]{1,3}",
    re.ASCII | re.IGNORECASE,
)
REMOVED = "(removed)"


def _plain(value: str) -> str:
    """A value, if all of its words are known; else what stands for one."""
    words = re.split(r"[\s,:;=(){}|*+-]+", value)
    is_known = all(not word or _PLAIN.fullmatch(word) for word in words)
    return value if is_known and not holds_identifier(value) else REMOVED


def _assignments(
    parse: Callable[[str, Collection[str]], list[tuple[str, str]]], start: str = ""
) -> _Reduce:
    """Keeps the lines 'NAME=value' of variables that matter, with what identifies nobody of the values."""

    def reduce(text: str) -> str | None:
        kept = [f'{start}{name}="{_plain(value)}"\n' for name, value in parse(text, ENVIRONMENT)]
        return "".join(kept) or None

    return reduce


def _banned(text: str) -> str:
    """Keeps the CPUs that irqbalance is banned from; what is no list of them stays so."""
    try:
        banned = parse_banned(text)
    except ParseError:
        return UNREADABLE
    return "" if banned is None else f"{IRQBALANCE[0]}={banned}\n"


def _manager_keys(text: str) -> str | None:
    """Keeps what systemd's own configuration says of all services' CPUs, memory and environment."""
    kept: list[str] = []
    for key, value in parse_manager_keys(text, (*MANAGER, MANAGER_ENVIRONMENT)):
        if key != MANAGER_ENVIRONMENT:
            is_known = re.fullmatch(
                r"[0-9]{1,5}(?:[\s,-]+[0-9]{1,5})*|numa|default|preferred|bind|interleave|local",
                value,
            )
            kept.append(f"{key}={value if is_known or not value else REMOVED}\n")
            continue
        pairs = [f'"{name}={_plain(one)}"' for name, one in parse_manager_environment(value)]
        if pairs or not value:
            kept.append(f"{key}={' '.join(pairs)}\n")
    return "[Manager]\n" + "".join(kept) if kept else None


def _numbers_or_unreadable(text: str) -> str:
    """Keeps numbers; what is none where it should be stays so."""
    return text.rstrip() + "\n" if _is_numbers(text) else UNREADABLE


def _cpuinfo(text: str) -> str:
    """Keeps what names a Xeon Phi, and whether a hypervisor is below."""
    virtual = parse_is_virtual(text)
    flags = "" if virtual is None else f"flags\t: {'hypervisor' if virtual else ''}\n"
    return ("model name\t: Xeon Phi\n" if "Xeon Phi" in text else "") + flags


def _product(text: str) -> str | None:
    """Keeps what a product is called: the card's own memory may hold anything there."""
    name = text.strip()
    is_name = re.fullmatch(r"[\w (),./+-]{1,80}", name, re.ASCII) and not holds_identifier(name)
    return f"{name}\n" if is_name else None


def _nvidia_information(text: str) -> str:
    """Keeps the card's model and number."""
    information = parse_nvidia_information(text)
    model = _product(information.model or "")
    minor = "" if information.minor is None else f"Device Minor: \t {information.minor}\n"
    return ("" if model is None else f"Model: \t\t {model}") + minor


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
        (r"proc/irq/.*|.*/nr_hugepages", _numbers_or_unreadable),
        (
            r"etc/environment|(?:etc|run|usr/lib)/environment\.d/[^/]+",
            _assignments(parse_variables),
        ),
        (
            r"etc/(?:profile|bash\.bashrc|profile\.d/[^/]+)",
            _assignments(parse_shell, "export "),
        ),
        (r"(?:etc|run|usr(?:/local)?/lib)/systemd/system\.conf(?:\.d/[^/]+)?", _manager_keys),
        (r"etc/(?:default|sysconfig)/irqbalance", _banned),
        (r"proc/driver/nvidia/gpus/[^/]+/information", _nvidia_information),
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
