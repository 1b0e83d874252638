"""Runs a command as a rank: in its slice, with its environment, and only if the kernel agrees.

By default the command takes this process's place, in a scope of its own in the rank's slice: process id,
signals, exit status, standard streams and working directory are its own. As a service, systemd starts it
and this process waits, hands signals on and ends as it did.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from provisioner.bus import Bus, UnitState
from provisioner.cpusets import find_unified, read_cpuset
from provisioner.errors import EXIT_NOT_STARTED, BusError, InputError, ProvisionError
from provisioner.idset import CpuSet, NodeSet
from provisioner.layout import slice_cgroup
from provisioner.plan import Plan, Rank, Service
from provisioner.processes import read_own_cgroup, read_own_limits, read_process
from provisioner.render import (
    device_variables,
    is_mixed,
    kept_variables,
    preferred_node,
    rank_environment,
    unset_variables,
)
from provisioner.root import Root

# As env(1) and the shell say it.
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MPOL_PREFERRED = 1  # linux/mempolicy.h
_CLD_EXITED = 1  # siginfo.h
_SCOPE_SECONDS = 10.0


class PlaceError(ProvisionError):
    """A command would not run where the plan puts it; it was not started."""

    code = "wrong_place"
    exit_status = EXIT_NOT_STARTED


class CommandError(InputError):
    """The command can't be run."""

    code = "no_command"

    def __init__(self, message: str, hint: str, exit_status: int) -> None:
        super().__init__(message, hint)
        self.exit_status = exit_status  # type: ignore[misc]


def find_rank(
    plan: Plan, name: str | None, given: str | None, local_rank: str | None
) -> tuple[Service, Rank]:
    """The service and rank that are meant.

    Args:
        plan: the plan in force.
        name: the service's name; None: the only one.
        given: the rank as text; None: what LOCAL_RANK says.
        local_rank: LOCAL_RANK; None: it is not set.

    Raises: InputError.
    """
    service = find_service(plan, name)
    number = given
    if number is None and not is_mixed(service):  # else it counts one vendor's ranks
        number = local_rank
    last = len(service.ranks) - 1
    expected = f"0 to {last}" if last else "0"
    if number is None or not number.strip():
        raise InputError(
            f"no rank: {'--rank does not say' if is_mixed(service) else 'neither --rank nor LOCAL_RANK says'} one",
            f"Give --rank N, N from {expected}",
        )
    if not (number.isascii() and number.isdigit()) or int(number) > last:
        raise InputError(
            f"rank '{number}' is not in the plan of service '{service.name}': expected {expected}",
            "provision status shows the ranks",
        )
    return service, service.ranks[int(number)]


def find_service(plan: Plan, name: str | None) -> Service:
    """The service of that name; without one, the only one. Raises: InputError."""
    names = [service.name for service in plan.services]
    if name is None and len(names) > 1:
        raise InputError(
            f"the plan has {len(names)} services: {', '.join(names)}", "Name one with --name"
        )
    for service in plan.services:
        if name is None or service.name == name:
            return service
    raise InputError(
        f"service '{name}' is not in the plan: expected {' or '.join(names)}",
        "provision status shows the services",
    )


def merge_environment(
    plan: Plan, service: Service, rank: Rank, folder: str, caller: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a rank's command. Pure.

    It is the caller's with the rank's over it. Which cards are visible and which of them is the rank's go
    together: who lists the cards numbers them too, so that the caller's list keeps the caller's numbers.
    """
    removed = unset_variables(service)
    environment = {name: value for name, value in caller.items() if name not in removed}
    environment |= rank_environment(plan, service, rank, folder)
    if service.visible_devices == "service" and "LOCAL_WORLD_SIZE" in caller:
        environment["LOCAL_WORLD_SIZE"] = caller["LOCAL_WORLD_SIZE"]
    for devices in device_variables(service):
        if devices.visible in caller:
            names = kept_variables(devices)
            environment |= {name: caller[name] for name in names if name in caller}
    return environment


def find_program(command: Sequence[str], path: str | None = None) -> str:
    """The absolute path of a command's program. Raises: CommandError."""
    found = shutil.which(command[0], path=path)
    if found is not None:
        return os.path.abspath(found)
    if "/" in command[0] and os.path.exists(command[0]):
        raise CommandError(
            f"{command[0]}: is no program that may be executed",
            "Make it executable: chmod +x",
            EXIT_NOT_EXECUTABLE,
        )
    raise CommandError(f"{command[0]}: command not found", "Give its path", EXIT_NOT_FOUND)


def become(
    service: Service,
    rank: Rank,
    command: Sequence[str],
    environment: Mapping[str, str],
    bus: Bus,
    root: Root,
) -> NoReturn:
    """Becomes the command, in a scope of its own in the rank's slice.

    Raises:
        BusError: systemd refuses the scope.
        PlaceError: the kernel does not grant what is planned.
        CommandError: the command can't be executed.
    """
    program = find_program(command, environment.get("PATH"))
    unit = f"{service.name}-rank{rank.rank}-{os.getpid()}.scope"
    bus.start_transient(
        unit,
        {
            "Description": f"{service.name} rank {rank.rank}: {command[0]}",
            "Slice": rank.slice,
            "PIDs": [os.getpid()],
            "CollectMode": "inactive-or-failed",
        },
    )
    wanted = f"{slice_cgroup(rank.slice)}/{unit}"
    end = time.monotonic() + _SCOPE_SECONDS
    while (found := read_own_cgroup(root)) != wanted:
        if time.monotonic() > end:
            raise PlaceError(
                f"{unit}: this process is in the cgroup {found}: expected {wanted}",
                "Look at: journalctl -b --priority=warning _PID=1",
            )
        time.sleep(0.01)
    # A launcher that was pinned hands its affinity down, and since Linux 6.2 it stays within the
    # slice. So: all CPUs, of which the kernel leaves those of the slice.
    reset_affinity()
    _check_place(service, rank, root)
    try:
        os.execve(program, list(command), dict(environment))
    except OSError as error:
        raise CommandError(
            f"{program}: can't be executed: {error.strerror}",
            "Run a program of this machine's kind, or a script with a #! line",
            EXIT_NOT_EXECUTABLE,
        ) from error


def reset_affinity() -> None:
    """Lets this thread run on all CPUs of its cgroup. Source: sched_setaffinity(2)."""
    os.sched_setaffinity(0, range(8192))  # the most that a Linux kernel can be built for


def _check_place(service: Service, rank: Rank, root: Root) -> None:
    limits = read_own_limits(root)
    _check_granted(service, rank, limits.cpus if limits else None, limits.nodes if limits else None)


def _check_granted(
    service: Service, rank: Rank, cpus: CpuSet | None, nodes: NodeSet | None
) -> None:
    walled = service.memory == "bind"
    if cpus == rank.cpus and (not walled or nodes == rank.memory_nodes):
        return
    raise PlaceError(
        f"{rank.slice}: grants CPUs {cpus or 'unknown'} and memory nodes {nodes or 'unknown'}: "
        f"planned {rank.cpus}" + (f" and memory nodes {rank.memory_nodes}" if walled else ""),
        "provision verify says what differs; provision apply mends it",
    )


def service_properties(
    service: Service,
    rank: Rank,
    command: Sequence[str],
    program: str,
    environment: Mapping[str, str],
    *,
    directory: str | None,
    user: str | None = None,
) -> dict[str, Any]:
    """The properties of a transient service that runs a command as a rank.

    Raises: CommandError.
    """
    properties: dict[str, Any] = {
        "Description": f"{service.name} rank {rank.rank}: {command[0]}",
        "Type": "exec",
        "Slice": rank.slice,
        # systemd expands $ in arguments; specifiers such as %i are a unit file's alone.
        "ExecStart": [program, *(word.replace("$", "$$") for word in command[1:])],
        "Environment": [f"{name}={value}" for name, value in environment.items()],
        "UnsetEnvironment": [name for name in unset_variables(service) if name not in environment],
        "KillMode": "mixed",
        "OOMPolicy": "kill",
    }
    if directory is not None:
        properties["WorkingDirectory"] = directory
    if user is not None:
        properties["User"] = user
    if service.memory == "prefer":
        properties["NUMAPolicy"] = _MPOL_PREFERRED
        properties["NUMAMask"] = type(rank.memory_nodes)([preferred_node(rank)])
    return properties


def serve(
    service: Service,
    rank: Rank,
    command: Sequence[str],
    environment: Mapping[str, str],
    bus: Bus,
    root: Root,
) -> int:
    """Runs the command as a service with this process's standard streams.

    Returns: its exit status; 128 and the signal's number if a signal ended it, as a shell says it.
    Raises: BusError, CommandError, PlaceError.
    """
    program = find_program(command, environment.get("PATH"))
    check_slice(service, rank, bus, root)
    unit = f"{service.name}-rank{rank.rank}-{os.getpid()}.service"
    properties = service_properties(
        service, rank, command, program, environment, directory=os.getcwd()
    )
    for name, number in (("Input", 0), ("Output", 1), ("Error", 2)):
        properties[f"Standard{name}FileDescriptor"] = number
    # Held by this connection, so that how it ended can be asked when it has.
    properties |= {"AddRef": True, "CollectMode": "inactive-or-failed"}
    got: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        got.append(number)

    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        bus.start_transient(unit, properties)
        pause = 0.02
        while True:
            state = bus.unit(unit)
            if state.active_state in {"inactive", "failed"}:
                return _exit_status(state)
            while got:
                _kill(unit, got.pop(0), bus)
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _kill(unit: str, number: int, bus: Bus) -> None:
    try:
        bus.kill(unit, number)
    except BusError as error:
        if error.name not in {"NoSuchProcess", "NoSuchUnit", "ESRCH"}:  # it has ended meanwhile
            raise


def check_slice(service: Service, rank: Rank, bus: Bus, root: Root) -> None:
    """Raises PlaceError unless the kernel grants a rank's slice what is planned."""
    bus.start(rank.slice)
    unified = find_unified(root)
    cpuset = read_cpuset(root, unified.mount, slice_cgroup(rank.slice)) if unified else None
    _check_granted(
        service,
        rank,
        cpuset.effective_cpus if cpuset else None,
        cpuset.effective_nodes if cpuset else None,
    )


def launch(
    service: Service,
    ranks: Iterable[Rank],
    command: Sequence[str],
    environments: Mapping[int, Mapping[str, str]],
    bus: Bus,
    root: Root,
    *,
    directory: str | None,
    user: str | None,
) -> tuple[str, ...]:
    """Starts a command as a service per rank, all or none. Returns: their units.

    Raises:
        InputError: a rank is at work already.
        BusError: systemd refuses one; those that were started are stopped again.
        CommandError: the command can't be run.
        PlaceError: the kernel does not grant what is planned.
    """
    program = find_program(command)
    chosen = tuple(ranks)
    names = {rank.rank: f"{service.name}-rank{rank.rank}.service" for rank in chosen}
    _check_free(service, chosen, bus)
    for rank in chosen:
        check_slice(service, rank, bus, root)
    started: list[str] = []
    try:
        for rank in chosen:
            unit = names[rank.rank]
            bus.reset_failed(unit)
            properties = service_properties(
                service,
                rank,
                command,
                program,
                environments[rank.rank],
                directory=directory,
                user=user,
            )
            bus.start_transient(unit, properties)
            started.append(unit)
    except BusError:
        for unit in started:
            bus.stop(unit)
        raise
    return tuple(started)


def launch_workers(
    service: Service, ranks: Iterable[Rank], bus: Bus, root: Root
) -> tuple[str, ...]:
    """Starts the plan's own worker service for each rank, all or none. Returns: their units.

    Raises: as `launch`.
    """
    chosen = tuple(ranks)
    _check_free(service, chosen, bus)
    for rank in chosen:
        check_slice(service, rank, bus, root)
    started: list[str] = []
    try:
        for rank in chosen:
            unit = f"{service.name}@{rank.rank}.service"
            bus.start(unit)
            started.append(unit)
    except BusError:
        for unit in started:
            bus.stop(unit)
        raise
    return tuple(started)


def _check_free(service: Service, ranks: Iterable[Rank], bus: Bus) -> None:
    busy = {rank.rank: found for rank in ranks if (found := bus.list_processes(rank.slice))}
    if busy:
        count = sum(len(found) for found in busy.values())
        raise InputError(
            f"{len(busy)} ranks are at work already: "
            f"{', '.join(map(str, busy))} ({count} processes in their slices)",
            f"Look at provision status; systemctl stop '{service.name}-rank*.service' "
            f"'{service.name}@*.service' ends those of launch",
        )


def check_started(service: Service, rank: Rank, unit: str, bus: Bus, root: Root) -> str | None:
    """What is wrong with a service that was just started: it has ended, or runs elsewhere."""
    state = bus.unit(unit)
    if state.active_state != "active":
        status = _exit_status(state)
        return f"{unit} has ended already, with status {status}: journalctl -u {unit}"
    process = read_process(root, state.main_pid)
    if process is None:
        return None
    allowed = process.tasks[0]
    if allowed.cpus != rank.cpus or (
        service.memory == "bind" and allowed.nodes != rank.memory_nodes
    ):
        return (
            f"{unit} runs on CPUs {allowed.cpus} and memory nodes {allowed.nodes}: planned "
            f"{rank.cpus} and {rank.memory_nodes or 'any'}: provision verify says what differs"
        )
    return None


def _exit_status(state: UnitState) -> int:
    if state.exit_code == _CLD_EXITED:
        return state.exit_status
    return 128 + state.exit_status if state.exit_code else 0
