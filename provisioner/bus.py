"""Systemd's manager, as far as provision needs it: a small protocol, and pystemd behind it.

Source: org.freedesktop.systemd1(5) for objects, methods and properties; systemd.resource-control(5)
for AllowedCPUs= and AllowedMemoryNodes=; sd_bus_call(3) for time limits.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from provisioner.errors import BusError
from provisioner.idset import CpuSet, IdSet, NodeSet

_S = TypeVar("_S", bound=IdSet)

_DESTINATION = b"org.freedesktop.systemd1"
_MANAGER_PATH = b"/org/freedesktop/systemd1"
_MANAGER = b"org.freedesktop.systemd1.Manager"
_PROPERTIES = b"org.freedesktop.DBus.Properties"

# How long systemd may take to answer a call. A reload runs every generator, which takes minutes on
# hosts with many mounts; systemctl(1) waits as long, while sd-bus alone gives up after 25 seconds.
CALL_SECONDS = 180
# How long a unit may take to start or stop.
JOB_SECONDS = 90
_POLL_SECONDS = 0.05

# What the D-Bus properties are that pystemd has no signature for.
_SIGNATURES = {
    b"AllowedCPUs": b"ay",
    b"AllowedMemoryNodes": b"ay",
    b"NUMAMask": b"ay",
    b"NUMAPolicy": b"i",
    b"PIDs": b"au",
    b"AddRef": b"b",
    b"CollectMode": b"s",
    b"OOMPolicy": b"s",
}

# The reload went on, and the connection or the answer was lost.
_LOST = {"NoReply", "Timeout", "TimedOut", "Disconnected", "NameHasNoOwner", "ServiceUnknown"}


class UnitState(NamedTuple):
    """What systemd says of a unit. It is the configuration: what is in force, the kernel says."""

    name: str
    load_state: (
        str  # loaded, not-found, masked, bad-setting, error; a slice without a file is loaded
    )
    active_state: str  # active, inactive, failed, activating, deactivating
    sub_state: str
    fragment_path: str  # empty if there is no unit file
    drop_in_paths: tuple[str, ...]
    need_daemon_reload: bool  # the files have changed since they were read
    allowed_cpus: CpuSet  # empty: not set
    allowed_nodes: NodeSet  # empty: not set
    control_group: str  # below the mount of cgroups; empty if the unit has none
    disabled_controllers: tuple[str, ...]
    description: str
    main_pid: int  # 0: none
    result: str  # of a service or scope: success, exit-code, signal, oom-kill, …; else empty
    exit_code: int  # ExecMainCode of a service: 1 exited, 2 killed, 3 dumped core; 0: not ended
    exit_status: int  # ExecMainStatus: the exit status or the signal's number


class ListedUnit(NamedTuple):
    """A loaded unit."""

    name: str
    active_state: str
    sub_state: str


class Bus(Protocol):
    """A connection to systemd. Every method raises BusError for what systemd refuses."""

    def version(self) -> str:
        """The manager's version, such as 252.39-1~deb12u1."""

    def reload(self) -> None:
        """Has systemd read all unit files again, and returns when it has."""

    def start(self, unit: str) -> None:
        """Starts a unit and returns when its job is done. Raises BusError if it isn't active then."""

    def stop(self, unit: str) -> None:
        """Stops a unit, a slice with all in it, and returns when its job is done."""

    def restart(self, unit: str) -> None:
        """Restarts a unit and returns when its job is done."""

    def reset_failed(self, unit: str) -> None:
        """Forgets that a unit failed; nothing if it isn't loaded."""

    def unit(self, name: str) -> UnitState:
        """The state of a unit, which is loaded for it. Unset sets are empty."""

    def list_units(self, *patterns: str) -> tuple[ListedUnit, ...]:
        """The loaded units whose names match one of the shell patterns, by name."""

    def list_processes(self, unit: str) -> tuple[int, ...]:
        """The ids of the processes in a unit and below it, ascending."""

    def set_cpuset(self, unit: str, cpus: CpuSet | None, nodes: NodeSet | None) -> None:
        """Sets AllowedCPUs= and AllowedMemoryNodes= of a loaded unit until the next boot.

        None leaves one as it is. Systemd writes a drop-in below /run/systemd/system.control that
        wins over unit files from then on.
        """

    def start_transient(self, unit: str, properties: Mapping[str, Any]) -> None:
        """Makes a unit without a file, starts it, and returns when its job is done.

        Values: str, bool, int, a CpuSet or NodeSet, a list of str, or a list of int for PIDs; an
        ExecStart is a list of words.
        """

    def kill(self, unit: str, number: int) -> None:
        """Sends a signal to the main process of a unit."""


def format_mask(ids: IdSet) -> list[int]:
    """The set as systemd's byte array: bit n % 8 of byte n // 8. Shape: 8 bytes at a time."""
    value = sum(1 << one for one in ids)
    size = max(1, -(-value.bit_length() // 64)) * 8
    return list(value.to_bytes(size, "little")) if value else []


def parse_mask(data: Sequence[int], kind: type[_S]) -> _S:
    """The set that systemd's byte array holds; empty for an empty one."""
    value = int.from_bytes(bytes(data), "little")
    return kind(bit for bit in range(value.bit_length()) if value >> bit & 1)


def open_bus() -> SystemdBus:
    """A connection to this system's systemd.

    Raises:
        BusError: pystemd is not installed, or there is no systemd to talk to.
    """
    try:
        from pystemd import dbuslib, systemd1  # noqa: F401
    except ImportError as error:
        raise BusError(
            f"pystemd can't be imported: {error}",
            "Install it into provision's environment: apt-get install gcc python3-dev libsystemd-dev "
            "pkg-config, then pip install '.[live]' in a clone, or pip install pystemd",
            name="NoPystemd",
        ) from error
    if not os.path.isdir("/run/systemd/system"):  # sd_booted(3)
        raise BusError(
            "systemd does not manage this system: there is no folder /run/systemd/system",
            "Run it on the host and not in a container; the worker's own binding needs no systemd",
            name="NotBooted",
        )
    return SystemdBus()


class SystemdBus:
    """The protocol carried out by pystemd on the system bus."""

    def __init__(self) -> None:
        """Raises BusError if there is no bus."""
        from pystemd.systemd1 import unit_signatures

        unit_signatures.KNOWN_UNIT_SIGNATURES.update(
            {
                name: signature
                for name, signature in _SIGNATURES.items()
                if name not in unit_signatures.KNOWN_UNIT_SIGNATURES
            }
        )
        self._bus: Any = None
        self._connect()

    def version(self) -> str:
        return _text(self._get(_MANAGER_PATH, _MANAGER, "Version", "s"))

    def reload(self) -> None:
        try:
            self._manager("Reload")
        except BusError as error:
            if error.name not in _LOST:
                raise
            # It may go on for longer than anyone waits for one answer.
            end = time.monotonic() + CALL_SECONDS
            while True:
                try:
                    self._connect()
                    self.version()
                except BusError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(_POLL_SECONDS)
                else:
                    return

    def start(self, unit: str) -> None:
        self._job("StartUnit", unit)
        state = self.unit(unit)
        if state.active_state not in {"active", "reloading"}:
            raise self._not_started(state)

    def stop(self, unit: str) -> None:
        try:
            self._job("StopUnit", unit)
        except BusError as error:
            if error.name != "NoSuchUnit":
                raise

    def restart(self, unit: str) -> None:
        self._job("RestartUnit", unit)
        state = self.unit(unit)
        if state.active_state not in {"active", "reloading"}:
            raise self._not_started(state)

    def reset_failed(self, unit: str) -> None:
        try:
            self._manager("ResetFailedUnit", ("s", unit))
        except BusError as error:
            if error.name != "NoSuchUnit":
                raise

    def unit(self, name: str) -> UnitState:
        path = self._manager("LoadUnit", ("s", name))
        kind = name.rpartition(".")[2]
        own = self._get_all(path, _DESTINATION + b".Unit")
        typed = self._get_all(path, _DESTINATION + b"." + kind.capitalize().encode())
        return UnitState(
            name=name,
            load_state=_text(own["LoadState"]),
            active_state=_text(own["ActiveState"]),
            sub_state=_text(own["SubState"]),
            fragment_path=_text(own["FragmentPath"]),
            drop_in_paths=tuple(_text(one) for one in own["DropInPaths"]),
            need_daemon_reload=bool(own["NeedDaemonReload"]),
            allowed_cpus=parse_mask(typed.get("AllowedCPUs", ()), CpuSet),
            allowed_nodes=parse_mask(typed.get("AllowedMemoryNodes", ()), NodeSet),
            control_group=_text(typed.get("ControlGroup", b"")),
            disabled_controllers=tuple(_text(one) for one in typed.get("DisableControllers", ())),
            description=_text(own["Description"]),
            main_pid=int(typed.get("MainPID", 0)),
            result=_text(typed.get("Result", b"")),
            exit_code=int(typed.get("ExecMainCode", 0)),
            exit_status=int(typed.get("ExecMainStatus", 0)),
        )

    def list_units(self, *patterns: str) -> tuple[ListedUnit, ...]:
        rows = self._manager("ListUnitsByPatterns", ("as", []), ("as", list(patterns))) or ()
        found = (ListedUnit(_text(row[0]), _text(row[3]), _text(row[4])) for row in rows)
        return tuple(sorted(found))

    def list_processes(self, unit: str) -> tuple[int, ...]:
        try:
            rows = self._manager("GetUnitProcesses", ("s", unit)) or ()
        except BusError as error:
            if error.name in {"NoSuchUnit", "UnitInactive"}:
                return ()
            raise
        return tuple(sorted(int(row[1]) for row in rows))

    def set_cpuset(self, unit: str, cpus: CpuSet | None, nodes: NodeSet | None) -> None:
        values: dict[str, IdSet] = {}
        if cpus is not None:
            values["AllowedCPUs"] = cpus
        if nodes is not None:
            values["AllowedMemoryNodes"] = nodes
        if values:
            self._manager("SetUnitProperties", ("s", unit), ("b", True), properties=values)

    def start_transient(self, unit: str, properties: Mapping[str, Any]) -> None:
        job = self._manager(
            "StartTransientUnit", ("s", unit), ("s", "fail"), properties=properties, auxiliary=True
        )
        self._wait(job, unit)
        if unit.endswith((".slice", ".scope")):
            state = self.unit(unit)
            if state.active_state != "active":
                raise self._not_started(state)

    def kill(self, unit: str, number: int) -> None:
        self._manager("KillUnit", ("s", unit), ("s", "main"), ("i", number))

    def _not_started(self, state: UnitState) -> BusError:
        return BusError(
            f"{state.name} did not start: it is {state.active_state} ({state.sub_state}), "
            f"its file is {state.load_state}",
            f"Look at: systemctl status {state.name}; journalctl -b -u {state.name}",
            name="JobFailed",
        )

    def _connect(self) -> None:
        from pystemd.dbuslib import DBus

        old, self._bus = self._bus, None
        if old is not None:
            with _named("closing the bus"):
                old.close()
        bus = DBus()
        with _named("system bus"), _patience():
            bus.open()
            self._bus = bus
            self.version()  # sd-bus reads its time limit at the first call

    def _job(self, method: str, unit: str) -> None:
        self._wait(self._manager(method, ("s", unit), ("s", "replace")), unit)

    def _wait(self, job: object, unit: str) -> None:
        """Returns when a job has ended: then its object is gone."""
        path = _text(job).encode()
        end = time.monotonic() + JOB_SECONDS
        while True:
            try:
                state = self._get(path, _DESTINATION + b".Job", "State", "s")
            except BusError as error:
                if error.name in {"UnknownObject", "NoSuchJob", "UnknownMethod", "UnknownProperty"}:
                    return
                raise
            if time.monotonic() > end:
                raise BusError(
                    f"{unit}: systemd's job is still {_text(state)} after {JOB_SECONDS} s",
                    "Look at: systemctl list-jobs",
                    name="Timeout",
                )
            time.sleep(_POLL_SECONDS)

    def _manager(
        self,
        method: str,
        *arguments: tuple[str, Any],
        properties: Mapping[str, Any] | None = None,
        auxiliary: bool = False,
    ) -> Any:
        """What a method of the manager returns."""
        from pystemd.dbuslib import apply_signature
        from pystemd.systemd1.unit_signatures import signature_array

        message: list[Any] = []
        for signature, value in arguments:
            message += apply_signature(signature.encode(), [_encode(value)])
        if properties is not None:
            message += signature_array(
                {name.encode(): _property(name, value) for name, value in properties.items()}
            )
        if auxiliary:
            message += [(ord(b"a"), b"(sa(sv))"), (-1, None)]
        subject = arguments[0][1] if arguments and isinstance(arguments[0][1], str) else ""
        what = f"{method} {subject}".rstrip()
        return self._call(what, _MANAGER_PATH, _MANAGER, method.encode(), message)

    def _get(self, path: bytes, interface: bytes, name: str, signature: str) -> Any:
        with _named(f"property {name}"):
            return self._bus.get_property(
                _DESTINATION, path, interface, name.encode(), signature.encode()
            )

    def _get_all(self, path: object, interface: bytes) -> dict[str, Any]:
        arguments = [(ord(b"s"), interface)]
        found = self._call("GetAll", _text(path).encode(), _PROPERTIES, b"GetAll", arguments)
        return {_text(name): value for name, value in (found or {}).items()}

    def _call(
        self, what: str, path: bytes, interface: bytes, method: bytes, message: list[Any]
    ) -> Any:
        with _named(what):
            return self._bus.call_method(_DESTINATION, path, interface, method, message).body


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _encode(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, IdSet):
        return format_mask(value)
    if isinstance(value, (list, tuple)):
        return [_encode(one) for one in value]
    return value


def _property(name: str, value: Any) -> Any:
    if name == "ExecStart":  # a(sasb): the program, its words, whether a failure is forgiven
        return [[_encode(value[0]), _encode(value), False]]
    return _encode(value)


@contextmanager
def _patience() -> Iterator[None]:
    """Has sd-bus wait for CALL_SECONDS, unless the operator has said otherwise, and leaves no trace."""
    name = "SYSTEMD_BUS_TIMEOUT"
    if name in os.environ:
        yield
        return
    os.environ[name] = f"{CALL_SECONDS}s"
    try:
        yield
    finally:
        del os.environ[name]


# What to do about an error of the bus, by its name.
_HINTS: Mapping[str, str] = {
    "AccessDenied": "Run it as root, for instance with sudo",
    "InteractiveAuthorizationRequired": "Run it as root, for instance with sudo",
    "FileNotFound": "Start D-Bus: systemctl start dbus",
    "ConnectionRefused": "Start D-Bus: systemctl start dbus",
    "NoServer": "Start D-Bus: systemctl start dbus",
}


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turns what pystemd raises into a BusError that has a name."""
    from pystemd.dbusexc import DBusBaseError

    try:
        yield
    except DBusBaseError as error:
        name = _error_name(error)
        said = str(getattr(error, "err_message", "") or "").strip()
        if isinstance(getattr(error, "err_message", None), bytes):
            said = error.err_message.decode("utf-8", "replace").strip()
        raise BusError(
            f"systemd: {what}: {name}{': ' + said if said else ''}",
            _HINTS.get(name, "Look at: journalctl -b --priority=warning _PID=1"),
            name=name,
        ) from error


def _error_name(error: Any) -> str:
    """The last part of the D-Bus name of an error of pystemd, e.g. AccessDenied.

    It gives the name as the class (DBusAccessDeniedError), or, for names it has no class for, as text.
    """
    known = re.fullmatch(r"DBus(\w+)Error", type(error).__name__)
    if known and known[1] != "Base":
        return known[1]
    said = _text(getattr(error, "err_name", "") or "")
    return said.rpartition(".")[2] or f"errno {getattr(error, 'errno', 0)}"
