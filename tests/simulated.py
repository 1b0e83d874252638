"""A small systemd and kernel in memory, with the ways of both that apply has to live with.

It reads real unit files from a folder, keeps a cpuset for each cgroup by the kernel's rules (what can't be
granted falls back to the parent's set; an empty set is refused where processes are; a CPU beyond the machine
rejects the whole write) and calls everything active. `follows` says whether a reload reaches running cgroups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from provisioner.bus import ListedUnit, UnitState
from provisioner.errors import BusError, ParseError
from provisioner.idset import CpuSet, NodeSet
from provisioner.layout import Layout, drop_in_folders, slice_cgroup, unit_cgroup
from provisioner.root import MemoryRoot

CPUS, NODES = CpuSet.parse_list("0-9"), NodeSet.parse_list("0-1")
_MOUNT = "sys/fs/cgroup"


@dataclass
class Group:
    """One cgroup."""

    cpus: CpuSet = CpuSet()
    nodes: NodeSet = NodeSet()
    partition: str = "member"
    processes: list[int] = field(default_factory=list)


@dataclass
class Unit:
    """A unit as systemd has read it."""

    fragment: str = ""
    drop_ins: tuple[str, ...] = ()
    cpus: CpuSet = CpuSet()
    nodes: NodeSet = NodeSet()
    active: bool = False
    disabled: tuple[str, ...] = ()


@dataclass
class Process:
    """One process with one thread."""

    cpus: CpuSet
    nodes: NodeSet
    numa_maps: str


class SimulatedHost:
    """A bus and a root that belong together; `calls` records what the bus was asked to do."""

    def __init__(self, base: Path, *, follows: bool = True) -> None:
        self.layout = Layout(
            "persistent", str(base / "units"), str(base / "provision"), str(base / "bin")
        )
        self.follows = follows
        self.calls: list[str] = []
        self.groups: dict[str, Group] = {"/": Group()}
        self.units: dict[str, Unit] = {}
        self.processes: dict[int, Process] = {}
        self.online = CPUS
        self.listed: list[ListedUnit] = []
        self.groups_of: dict[str, str] = {}  # of units other than slices
        self.deaf = False  # whether cgroups stay as they are, whatever systemd is told
        self.refuse: dict[str, BusError] = {}
        for name in ("system.slice", "user.slice", "init.scope"):
            self.groups[f"/{name}"] = Group(processes=[1])
            self.units[name] = Unit(active=True)
        (base / "units").mkdir()
        (base / "bin").mkdir()

    # The kernel -----------------------------------------------------------------------------------

    @property
    def root(self) -> SimulatedRoot:
        """The machine's files, as they are at each reading."""
        return SimulatedRoot(self)

    def effective(self, path: str) -> tuple[CpuSet, NodeSet]:
        """What the kernel grants a cgroup."""
        if path == "/":
            return self.online, NODES
        cpus, nodes = self.effective(path.rpartition("/")[0] or "/")
        own = self.groups[path]
        return own.cpus & cpus or cpus, own.nodes & nodes or nodes

    def populated(self, path: str) -> bool:
        """Whether a process is in a cgroup or below it."""
        return any(
            group.processes
            for name, group in self.groups.items()
            if name == path or name.startswith(path.rstrip("/") + "/")
        )

    def write(self, path: str, cpus: CpuSet, nodes: NodeSet) -> None:
        """What systemd writes; what the kernel rejects stays as it was."""
        group = self.groups[path]
        if (cpus or not self.populated(path)) and cpus <= CPUS:
            group.cpus = cpus
        if (nodes or not self.populated(path)) and nodes <= NODES:
            group.nodes = nodes

    def spawn(self, path: str, pid: int, *, numa_maps: str = "") -> None:
        """Starts a process in a cgroup, which is made if it is not there."""
        self.groups.setdefault(path, Group()).processes.append(pid)
        cpus, nodes = self.effective(path)
        self.processes[pid] = Process(cpus, nodes, numa_maps)

    def files(self) -> dict[str, str]:
        """The files below /sys and /proc."""
        found = {
            "proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
            f"{_MOUNT}/cgroup.controllers": "cpuset cpu memory pids\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemFree: 1048576 kB\n",
            "sys/devices/system/node/node1/meminfo": "Node 1 MemFree: 1048576 kB\n",
        }
        for path, group in self.groups.items():
            folder = _MOUNT + path.rstrip("/")
            cpus, nodes = self.effective(path)
            found[f"{folder}/cgroup.procs"] = "".join(f"{pid}\n" for pid in group.processes)
            found[f"{folder}/cpuset.cpus.effective"] = f"{cpus}\n"
            found[f"{folder}/cpuset.mems.effective"] = f"{nodes}\n"
            if path != "/":
                found[f"{folder}/cpuset.cpus"] = f"{group.cpus}\n"
                found[f"{folder}/cpuset.mems"] = f"{group.nodes}\n"
                found[f"{folder}/cpuset.cpus.partition"] = f"{group.partition}\n"
        for pid, process in self.processes.items():
            found[f"proc/{pid}/task/{pid}/status"] = (
                f"Name:\tworker\nCpus_allowed_list:\t{process.cpus}\n"
                f"Mems_allowed_list:\t{process.nodes}\n"
            )
            found[f"proc/{pid}/numa_maps"] = process.numa_maps
        return found

    # Systemd: the protocol of provisioner.bus -----------------------------------------------------

    def version(self) -> str:
        return "simulated"

    def reload(self) -> None:
        self._called("reload")
        for name in {*self.units, *self._names()}:
            self._read(name)
        if self.follows:
            for name in sorted(self.units, key=lambda name: (unit_cgroup(name) or "").count("/")):
                self._realize(name)

    def start(self, unit: str) -> None:
        self._called(f"start {unit}")
        if not unit.endswith(".slice"):
            self.units.setdefault(unit, Unit()).active = True
            return
        path = slice_cgroup(unit)
        above = path.rpartition("/")[0]
        if above and above not in self.groups:
            self.start(above.rpartition("/")[2])
        if unit in self.units and self.units[unit].active and path in self.groups:
            return  # as it was told before: starting what is active changes nothing
        self._read(unit)
        self.units[unit].active = True
        self.groups.setdefault(path, Group())
        self._realize(unit)

    def stop(self, unit: str) -> None:
        self._called(f"stop {unit}")
        path = unit_cgroup(unit)
        if path and self.populated(path):
            raise AssertionError(f"{unit} was stopped with processes in it")
        for name in [name for name in self.groups if path and (name + "/").startswith(path + "/")]:
            del self.groups[name]
        for name in self.units:
            if (unit_cgroup(name) or "-").startswith(path or "?"):
                self.units[name].active = False

    def restart(self, unit: str) -> None:
        self._called(f"restart {unit}")
        self.units.setdefault(unit, Unit()).active = True

    def reset_failed(self, unit: str) -> None:
        self._called(f"reset-failed {unit}")

    def unit(self, name: str) -> UnitState:
        if name not in self.units:
            self._read(name)
        unit = self.units[name]
        return UnitState(
            name=name,
            load_state="loaded",
            active_state="active" if unit.active else "inactive",
            sub_state="active" if unit.active else "dead",
            fragment_path=unit.fragment,
            drop_in_paths=unit.drop_ins,
            need_daemon_reload=self._parsed(name) != replace(unit, active=False),
            allowed_cpus=unit.cpus,
            allowed_nodes=unit.nodes,
            control_group=self.groups_of.get(
                name, (unit_cgroup(name) or "") if unit.active else ""
            ),
            disabled_controllers=unit.disabled,
            description=name,
            main_pid=0,
            result="",
            exit_code=0,
            exit_status=0,
        )

    def list_units(self, *patterns: str) -> tuple[ListedUnit, ...]:
        return tuple(
            one for one in self.listed if any(fnmatch(one.name, pattern) for pattern in patterns)
        )

    def list_processes(self, unit: str) -> tuple[int, ...]:
        path = unit_cgroup(unit) or "?"
        return tuple(
            sorted(
                pid
                for name, group in self.groups.items()
                if name == path or name.startswith(path + "/")
                for pid in group.processes
            )
        )

    def set_cpuset(self, unit: str, cpus: CpuSet | None, nodes: NodeSet | None) -> None:
        self._called(f"set {unit} {cpus} {nodes}")
        state = self.units[unit]
        state.cpus = state.cpus if cpus is None else cpus
        state.nodes = state.nodes if nodes is None else nodes
        self._realize(unit)

    def start_transient(self, unit: str, properties: Mapping[str, Any]) -> None:
        self._called(f"transient {unit} {sorted(properties)}")

    def kill(self, unit: str, number: int) -> None:
        self._called(f"kill {unit} {number}")

    def _called(self, what: str) -> None:
        self.calls.append(what)
        for start, error in self.refuse.items():
            if what.startswith(start):
                raise error

    def _names(self) -> set[str]:
        units = Path(self.layout.units)
        return {path.name for path in units.glob("*.slice")} | {
            path.name.removesuffix(".d") for path in units.glob("*.slice.d")
        }

    def _read(self, name: str) -> None:
        """Reads a unit's files; what is active stays so."""
        active = name in self.units and self.units[name].active
        self.units[name] = replace(self._parsed(name), active=active)

    def _parsed(self, name: str) -> Unit:
        units = Path(self.layout.units)
        fragment = units / name
        drop_ins = sorted(
            (path for folder in drop_in_folders(name) for path in (units / folder).glob("*.conf")),
            key=lambda path: path.name,
        )
        sets: dict[str, Any] = {"AllowedCPUs": CpuSet(), "AllowedMemoryNodes": NodeSet()}
        disabled: tuple[str, ...] = ()
        for path in [fragment, *drop_ins]:
            for line in path.read_text().splitlines() if path.exists() else ():
                key, _, value = line.partition("=")
                if key == "DisableControllers":
                    disabled = tuple(value.split())
                if key in sets:
                    sets[key] = _merge(sets[key], value)
        return Unit(
            fragment=str(fragment) if fragment.exists() else "",
            drop_ins=tuple(map(str, drop_ins)),
            cpus=sets["AllowedCPUs"],
            nodes=sets["AllowedMemoryNodes"],
            disabled=disabled,
        )

    def _realize(self, name: str) -> None:
        path = unit_cgroup(name)
        if path in self.groups and self.units[name].active and not self.deaf:
            self.write(path, self.units[name].cpus, self.units[name].nodes)


class SimulatedRoot:
    """The root of a simulated host, read anew at each call."""

    is_this_system = True

    def __init__(self, host: SimulatedHost) -> None:
        self._host = host

    def describe(self, path: str) -> str:
        return f"/{path}"

    def read(self, path: str, *, lossy: bool = False) -> str | None:
        return self._now().read(path, lossy=lossy)

    def list(self, path: str) -> list[str]:
        return self._now().list(path)

    def resolve(self, path: str) -> str | None:
        return self._now().resolve(path)

    def _now(self) -> MemoryRoot:
        return MemoryRoot("host", self._host.files())


def _merge(old: Any, value: str) -> Any:
    """By systemd's rules: an empty assignment resets, others merge, and an unreadable one resets too."""
    if not value:
        return type(old)()
    if re.search(r"-$|-,", value):
        return type(old)()
    try:
        return old | type(old).parse_list(value.replace(" ", ","))
    except ParseError:
        return type(old)()
