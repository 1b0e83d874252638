"""Many snapshots planned at once, on every core, and their hosts grouped by fingerprint.

What grows with the number of hosts lies in temporary files: memory grows with that of different
machines alone, by a few hundred bytes for each.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import IO, NamedTuple, Self

from provisioner.discovery import discover
from provisioner.errors import Problem, ProvisionError
from provisioner.plan import Plan
from provisioner.planfile import format_plan, parse_plan
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.snapshot import read_snapshot
from provisioner.topology_report import RankLabel, rank_labels

_NAMES_SHOWN = 3
_IN_MEMORY_BYTES = 1 << 20
# Hosts that a process takes at a time, and of which a process of its own is worth its start.
_CHUNK = 16


class HostPlan(NamedTuple):
    """What became of one snapshot."""

    file: str
    plan: Plan | None  # None: refused
    labels: tuple[tuple[RankLabel, ...], ...]  # of each rank of each service
    problems: tuple[Problem, ...]  # why there is no plan


@dataclass(slots=True)
class Group:
    """The hosts of one fingerprint."""

    number: int  # from 1, in the order of their first hosts
    fingerprint: str
    hosts: int = 0
    first: list[str] = field(default_factory=list)  # the files of the first few


class HostGroup(NamedTuple):
    """Where one snapshot belongs."""

    file: str
    group: int | None  # None: refused
    problems: tuple[Problem, ...]


class Fleet:
    """Hosts as they come, and the groups that they make; a context that its files are gone after."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.refused = 0
        self._plans = _open_spool()
        self._hosts = _open_spool()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._plans.close()
        self._hosts.close()

    def add(self, host: HostPlan) -> None:
        """Takes a host to the group of its fingerprint; a group's plan is that of its first host."""
        group = None
        if host.plan is None:
            self.refused += 1
        else:
            group = self.groups.get(host.plan.fingerprint)
            if group is None:
                group = Group(len(self.groups) + 1, host.plan.fingerprint)
                self.groups[group.fingerprint] = group
                _write_line(self._plans, [host.labels, format_plan(host.plan)])
            group.hosts += 1
            if len(group.first) < _NAMES_SHOWN:
                group.first.append(host.file)
        problems = [[one.code, one.message, one.hint] for one in host.problems]
        _write_line(self._hosts, [host.file, None if group is None else group.number, problems])

    def plans(self) -> Iterator[tuple[Group, Plan, list[list[RankLabel]]]]:
        """Each group with its plan and its ranks' labels."""
        for group, (labels, text) in zip(
            self.groups.values(), _read_lines(self._plans), strict=True
        ):
            named = [[RankLabel(*label) for label in service] for service in labels]
            yield group, parse_plan(text, group.first[0]), named

    def hosts(self) -> Iterator[HostGroup]:
        """Every host, in the order of the files."""
        for file, group, problems in _read_lines(self._hosts):
            yield HostGroup(file, group, tuple(Problem(*one) for one in problems))


def plan_hosts(
    files: Sequence[str], request: PlacementRequest, within: str, processes: int | None = None
) -> Iterator[HostPlan]:
    """What becomes of each snapshot, in the order of the files.

    Args:
        files: the snapshots.
        request: what is to be planned on each of them.
        within: the ceiling of each.
        processes: how many to use; one for each CPU that may be used if left out.

    Raises ProvisionError if one of the processes is killed.
    """
    plan_one = functools.partial(plan_host, request=request, within=within)
    wanted = len(os.sched_getaffinity(0)) if processes is None else processes
    count = min(wanted, -(-len(files) // _CHUNK))
    if count <= 1:
        yield from map(plan_one, files)
        return
    # By fork: what is loaded is loaded in all of them, and no thread runs yet.
    pool = ProcessPoolExecutor(
        count, multiprocessing.get_context("fork"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
    )
    try:
        yield from pool.map(plan_one, files, chunksize=_CHUNK)
    except BrokenProcessPool as error:
        raise ProvisionError(
            "a process that plans was ended by something else, before its hosts were planned",
            "See in the kernel's log whether memory ran out",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def plan_host(file: str, request: PlacementRequest, within: str) -> HostPlan:
    """What becomes of one snapshot; its problems name the file."""
    try:
        machine = discover(read_snapshot(file), within)
        plan = make_plan(machine, request)
    except ProvisionError as error:
        problems = [
            one
            if one.message.startswith(file)
            else Problem(one.code, f"{file}: {one.message}", one.hint)
            for one in error.problems
        ]
        return HostPlan(file, None, (), tuple(problems))
    return HostPlan(file, plan, rank_labels(machine, plan), ())


def _open_spool() -> IO[str]:
    return tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, "w+", encoding="utf-8")


def _write_line(spool: IO[str], value: object) -> None:
    spool.write(json.dumps(value) + "\n")


def _read_lines(spool: IO[str]) -> Iterator[list]:  # type: ignore[type-arg]
    spool.seek(0)
    for line in spool:
        yield json.loads(line)
