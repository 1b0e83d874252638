"""The CPUs: which are online, and their cores, packages, dies and last-level caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from provisioner.errors import InputError, TopologyError
from provisioner.idset import CpuSet
from provisioner.root import Root
from provisioner.sysfs import (
    DIE_FILES,
    PACKAGE_FILES,
    SIBLING_FILES,
    describe_cpu,
    describe_cpus,
    list_cache_indexes,
    list_cpus,
    list_topology_files,
    read_cpu_online,
    read_cpu_set,
    read_die_id,
    read_last_level_cache,
    read_package_id,
    read_topology_group,
)
from provisioner.topology import Cpu

_Read = Callable[[Root, int], CpuSet | None]


class CpuTable(NamedTuple):
    """The CPUs of a root; the rows' nodes are still unknown."""

    rows: tuple[Cpu, ...]  # one for each online CPU, ascending
    online: CpuSet
    offline: CpuSet
    isolated: CpuSet  # from the scheduler, at boot
    sources: tuple[tuple[str, str], ...]


def find_cpus(root: Root, oddities: list[str]) -> CpuTable:
    """Every online CPU with what its topology files say.

    A group's file (siblings, package, die, cache) is read for the first CPU of the group that
    comes along, and holds for all that it names: the kernel writes one mask for the whole group.
    That it does is checked with every SMT sibling, and with the last CPU of larger groups.

    Raises InputError if there is no CPU, TopologyError if groups of one kind overlap, or if CPUs of
    a group do not agree about it.
    """
    folders = list_cpus(root)
    online, online_source = _find_online(root, folders)
    if not online:
        raise InputError(
            f"{describe_cpus(root)}: no CPU is online there: expected at least one",
            "Check that the root is a whole /sys and /proc",
        )
    said_offline = read_cpu_set(root, "offline") or CpuSet()
    _check_possible(root, online, said_offline)
    offline = said_offline | (folders - online)
    # All online CPUs have the same files, so that two of them tell which to look for.
    ends = (online.first, online.last)
    known = list_topology_files(root, ends[0]) | list_topology_files(root, ends[1])
    has_caches = any(list_cache_indexes(root, cpu) for cpu in ends)
    siblings = _topology_reader(known, SIBLING_FILES)
    core_of = _group(root, online, "core_cpus_list", siblings, every=True)
    if not core_of:
        oddities.append(
            "No CPU says which its SMT siblings are; each CPU is taken for a core of its own."
        )
    missing = CpuSet(cpu for cpu in online if cpu not in core_of)
    if core_of and missing:
        raise TopologyError(
            f"{describe_cpu(root, missing.first)}: neither core_cpus_list nor thread_siblings_list is there, "
            f"as for CPUs {missing}, while other CPUs have one",
            "Record the tree again, whole",
        )
    package_files = _topology_reader(known, PACKAGE_FILES)
    packages = _numbered(
        root, online, "package_cpus_list", package_files, read_package_id, oddities
    )
    dies: dict[int, int] = {}
    if "die_id" in known:
        die_files = _topology_reader(known, DIE_FILES)
        dies = _numbered(root, online, "die_cpus_list", die_files, read_die_id)
    llc_of: dict[int, int] = {}
    if has_caches:
        llc_of = _group(root, online, "cache/*/shared_cpu_list", read_last_level_cache)
    rows = tuple(
        Cpu(cpu, core_of.get(cpu, cpu), packages.get(cpu), dies.get(cpu), llc_of.get(cpu), None)
        for cpu in online
    )
    isolated = read_cpu_set(root, "isolated")
    sources = (
        ("online CPUs", online_source),
        ("cores", _source(root, known, SIBLING_FILES)),
        ("packages", _source(root, known, ("physical_package_id",))),
        ("dies", _source(root, known, ("die_id",))),
        (
            "last-level caches",
            describe_cpus(root, "cpu*/cache/index*/shared_cpu_list") if has_caches else "not said",
        ),
        (
            "isolated CPUs",
            "not said" if isolated is None else describe_cpus(root, "isolated"),
        ),
    )
    return CpuTable(rows, online, offline - online, isolated or CpuSet(), sources)


def _check_possible(root: Root, online: CpuSet, offline: CpuSet) -> None:
    """Raises TopologyError for CPUs that are online and offline, or online and not possible."""
    both = online & offline
    if both:
        raise TopologyError(
            f"{describe_cpus(root, 'offline')}: CPUs {both} are in it and in online: expected each in one",
            "Record the tree again, while no CPU goes on or offline",
        )
    possible = read_cpu_set(root, "possible")
    if possible is not None and not online <= possible:
        raise TopologyError(
            f"{describe_cpus(root, 'possible')}: CPUs {online - possible} are online and not in it: "
            f"expected all of {online}"
        )


def _source(root: Root, known: frozenset[str], names: tuple[str, ...]) -> str:
    """The path of the first of the topology files that is there."""
    found = next((name for name in names if name in known), None)
    return "not said" if found is None else describe_cpus(root, f"cpu*/topology/{found}")


def _find_online(root: Root, folders: CpuSet) -> tuple[CpuSet, str]:
    """The online CPUs and what said so.

    The file ``online``. Without it, each CPU whose own ``online`` file does not say 0 and that has
    a topology folder (if any CPU has one).
    """
    said = read_cpu_set(root, "online")
    if said is not None:
        return said, describe_cpus(root, "online")
    up = CpuSet(cpu for cpu in folders if read_cpu_online(root, cpu) is not False)
    described = CpuSet(cpu for cpu in up if list_topology_files(root, cpu))
    return described or up, describe_cpus(root, "cpu*")


def _topology_reader(known: frozenset[str], names: tuple[str, ...]) -> _Read:
    wanted = tuple(name for name in names if name in known)
    return lambda root, cpu: read_topology_group(root, cpu, wanted)


def _group(
    root: Root, online: CpuSet, file: str, read: _Read, *, every: bool = False
) -> dict[int, int]:
    """CPU -> lowest online CPU of its group, for the CPUs that some file names.

    With `every`, each member is asked for its group; else the first and the last are.
    """
    group_of: dict[int, int] = {}
    for cpu in online:
        if cpu in group_of:
            continue
        members = read(root, cpu)
        if members is None:
            continue
        if cpu not in members:
            raise TopologyError(
                f"{describe_cpu(root, cpu)}: {file} is '{members}', which lacks CPU {cpu} itself"
            )
        members &= online
        for member in members:
            if member in group_of:
                raise TopologyError(
                    f"{describe_cpu(root, cpu)}: {file} is '{members}', and CPU {member} is also in "
                    f"the group of CPU {group_of[member]}: expected groups that do not overlap"
                )
            group_of[member] = members.first
        for other in members if every else (members.last,):
            said = members if other == cpu else read(root, other)
            if said is not None and said & online != members:
                raise TopologyError(
                    f"{describe_cpu(root, other)}: {file} is '{said & online}', and that of CPU {cpu} is "
                    f"'{members}': expected one group for both",
                    "Record the tree again, whole, while no CPU goes on or offline",
                )
    return group_of


def _numbered(
    root: Root,
    online: CpuSet,
    file: str,
    read_members: _Read,
    read_id: Callable[[Root, int], int | None],
    oddities: list[str] | None = None,
) -> dict[int, int]:
    """CPU -> the kernel's number of its group, for those that have one.

    Where no file tells the members, each CPU's own number is read. A sentence is added to the
    oddities, if they are given, where two groups have one number: by it they are one.
    """
    group_of = _group(root, online, file, read_members)
    numbers = {first: read_id(root, first) for first in sorted(set(group_of.values()))}
    numbers |= {cpu: read_id(root, cpu) for cpu in online if cpu not in group_of}
    # The last CPU of a group is asked too; one that says nothing contradicts nothing.
    for first, last in {first: cpu for cpu, first in sorted(group_of.items())}.items():
        number = read_id(root, last)
        if number is not None and number != numbers[first]:
            raise TopologyError(
                f"{describe_cpu(root, last)}: the number of its group in {file} is {number}, and that of CPU "
                f"{first} in the same group is {numbers[first]}: expected one number"
            )
    if oddities is not None:
        firsts: dict[int, list[int]] = {}
        for first in sorted(set(group_of.values())):
            number = numbers[first]
            if number is not None:
                firsts.setdefault(number, []).append(first)
        twice = {number: cpus for number, cpus in firsts.items() if len(cpus) > 1}
        if twice:
            oddities.append(
                f"CPUs that {file} has in different groups have one number, by which the groups are one: "
                + ", ".join(f"{number} of CPUs {CpuSet(cpus)}" for number, cpus in twice.items())
                + "."
            )
    found = {cpu: numbers[group_of.get(cpu, cpu)] for cpu in online}
    return {cpu: number for cpu, number in found.items() if number is not None}
