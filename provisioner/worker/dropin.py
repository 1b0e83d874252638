"""The single pieces, by the names that engines know: see docs/worker.md for the table.

Physical card numbers are positions in PCI order among all cards of the host; a local rank is a
position among the devices that the runtime shows. Errors are OSErrors with the kernel's errno, or
this project's own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping

from provisioner.errors import InputError, Problem, ProblemsError, ProvisionError
from provisioner.idset import CpuSet, NodeSet
from provisioner.locality import find_locality
from provisioner.record import Record
from provisioner.root import DirectoryRoot, Root
from provisioner.shares import find_places
from provisioner.sysfs import list_rdma_devices, read_rdma_parent
from provisioner.topology import Accelerator, Machine
from provisioner.worker.affinity import (
    AffinityResult,
    allowed_cpus,
    own_thread,
    set_thread_affinity,
)
from provisioner.worker.binding import BY_NOTHING, last_result
from provisioner.worker.child import DeadlyCallError, Refusal
from provisioner.worker.machine import card_of, find_machine
from provisioner.worker.mempolicy import NO_STEP, MemoryResult, bind_memory, migrate_pages
from provisioner.worker.pages import page_placement
from provisioner.worker.planned import PlannedRank
from provisioner.worker.pool import choose_compile_cpus
from provisioner.worker.procfs import list_threads, read_node_cpus
from provisioner.worker.share import plan_share
from provisioner.worker.target import PLAN_PATHS, read_plan
from provisioner.worker.visible import card_of_rank, resolve_visible


class NumaResult(Record):
    """What became of binding this process to a NUMA node."""

    affinity: AffinityResult
    memory: MemoryResult
    without_policy: tuple[int, ...]  # threads that were there before: they keep their memory policy
    unmoved_pages: int | None  # that stayed behind; None: none were to be moved, or none could be
    migration_refused: Refusal | None = None


# The CPUs of the last bind_numa or bind_cpu, by process: what set_cpu_affinity stays within.
_bound: dict[int, CpuSet] = {}


def bind_numa(node: int, *, migrate: bool = False) -> NumaResult:
    """Binds every thread of this process to a NUMA node's CPUs, and the caller's memory to the node.

    The CPUs are those that the cpuset allows. Where the kernel or a seccomp filter refuses the memory
    policy the CPUs stay bound, and `memory.refused` has the errno of each step.

    Args:
        node: the kernel's id of a node with CPUs.
        migrate: move the pages that exist already, and count those that stay.

    Raises:
        InputError: there is no such node, or it has no CPUs.
        OSError: by the kernel's errno; nothing was bound. EINVAL: the cpuset has none of the node's CPUs.
        DeadlyCallError: a seccomp filter kills who sets an affinity.
    """
    cpus = read_node_cpus(node) if node >= 0 else None
    if not cpus:
        found = "there is none" if cpus is None else "it has no CPUs"
        raise InputError(
            f"NUMA node {node}: {found}", "Take a node from which_numa(), or from: numactl -H"
        )
    nodes = NodeSet((node,))
    affinity = set_thread_affinity(cpus)
    _bound[os.getpid()] = cpus
    memory = bind_memory(nodes)
    mine = own_thread()
    # A refused policy is no thread's to lack.
    others = () if memory.step == NO_STEP else tuple(t for t in list_threads() if t != mine)
    unmoved, refusal = _migrate(nodes) if migrate else (None, None)
    return NumaResult(affinity, memory, others, unmoved, refusal)


def set_cpu_affinity(cpus: Iterable[int] | str, within: CpuSet | None = None) -> AffinityResult:
    """Binds every thread of this process to CPUs, within what it is bound to already.

    Args:
        cpus: ids, or a kernel list.
        within: what they are intersected with; None is what bind_numa, bind_cpu or bind_local_rank
            bound last, if anything. The cpuset bounds them in any case.

    Raises:
        ParseError: they are no CPUs.
        OSError: by the kernel's errno. EINVAL: nothing is left of them.
    """
    wanted = CpuSet.parse_list(cpus) if isinstance(cpus, str) else CpuSet(cpus)
    bound = _find_bound() if within is None else within
    left = wanted if bound is None else wanted & bound
    if not left:
        raise OSError(
            errno.EINVAL,
            f"CPUs {wanted or 'none'}: none of them is among {bound or 'any'}, which this process is bound to",
        )
    return set_thread_affinity(left)


def bind_cpu(gpu_id: int | str) -> AffinityResult:
    """Binds every thread of this process to the share of cores of a physical card.

    Args:
        gpu_id: the physical card's number, as `physical_device_id` gives it.

    Raises:
        InputError, ProblemsError: there is no such card, or no share of it can be right.
        OSError: by the kernel's errno; nothing was bound.
    """
    cpus = share_of_card(gpu_id)
    found = set_thread_affinity(cpus)
    _bound[os.getpid()] = cpus
    return found


def share_of_card(gpu_id: int | str, *, root: Root | None = None) -> CpuSet:
    """The CPUs of a physical card: the plan's, if there is one that has it; else its share.

    Args:
        gpu_id: the physical card's number.
        root: a recorded machine, without a plan; None is the running one.

    Raises:
        InputError, ProblemsError: there is no such card, or no share of it can be right.
        OSError: seccomp refuses to say what the cpuset allows.
    """
    machine = _find_allowed(root)
    card = card_of(machine, _parse_number(gpu_id))
    planned = _find_planned(machine, card) if root is None else None
    return plan_share(machine, (card,)).cpus if planned is None else planned.cpus


def get_idle_cpus(
    gpu_id: int | str,
    count: int | None = None,
    *,
    root: Root | None = None,
    environ: Mapping[str, str] | None = None,
) -> CpuSet:
    """The CPUs of a card's share that are for background compilation: whole cores from its end.

    Those that the plan sets aside, if it does. `compile_pool` moves the main threads off them.

    Args:
        gpu_id: the physical card's number.
        count: how many CPUs at least, where no plan says; None is DEEPINFER_SO_BUILDER_CPUS, else 4.
        root: a recorded machine, without a plan; None is the running one.
        environ: the environment; None is this process's.

    Raises:
        InputError: the share is too small, or there is no such card.
        ProblemsError: no share can be right.
        OSError: seccomp refuses to say what the cpuset allows.
    """
    machine = _find_allowed(root)
    card = card_of(machine, _parse_number(gpu_id))
    planned = _find_planned(machine, card) if root is None else None
    if planned is not None and planned.compile_cpus:
        return planned.compile_cpus
    share = plan_share(machine, (card,)).cpus if planned is None else planned.cpus
    return choose_compile_cpus(share, count, environ, root)


def which_numa(
    i_gpu: int | None = None,
    i_ib: int | str | None = None,
    *,
    root: Root | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """The NUMA node whose CPUs serve a local rank's card, or an RDMA device.

    Args:
        i_gpu: the local rank.
        i_ib: the RDMA device, by its name (mlx5_bond_0, bnxt_re1) or by its number: mlx5_N, else the
            only device whose name ends in N.
        root: a recorded machine; None is the running one.
        environ: the environment; None is this process's.

    Raises:
        InputError: not one of the two is given, there is no such device, or nothing says its node.
        ProblemsError: nothing says the card's node.
    """
    if i_gpu is not None and i_ib is None:
        own = find_machine(root)
        visible = resolve_visible(own.usable, environ, tiled=own.tiled)
        return _node_of_card(own.machine, card_of_rank(visible, i_gpu))
    if i_ib is not None and i_gpu is None:
        tree: Root = DirectoryRoot() if root is None else root
        return _node_of_rdma(tree, find_machine(root).machine, i_ib)
    raise InputError("which_numa: expected either i_gpu or i_ib")


def device_numa_node(index: int | str, *, root: Root | None = None) -> int:
    """The NUMA node whose CPUs serve a physical card.

    Raises:
        InputError: there is no such card.
        ProblemsError: nothing says its node.
    """
    machine = find_machine(root).machine
    return _node_of_card(machine, card_of(machine, _parse_number(index)))


def physical_core_cpus_by_numa(*, root: Root | None = None) -> dict[int, list[int]]:
    """By NUMA node, the lowest CPU of each of its cores, ascending.

    Raises:
        InputError: the files describe no machine, or can't be read.
    """
    machine = find_machine(root).machine
    return {
        node.id: sorted(core.id for core in machine.node_cores(node.id))
        for node in machine.nodes
        if node.cpus
    }


def _find_bound() -> CpuSet | None:
    """What this process is bound to; None if to nothing."""
    own = _bound.get(os.getpid())
    last = last_result()
    if own is None and last is not None and last.cpus_by != BY_NOTHING:
        return last.target.cpus
    return own


def _find_allowed(root: Root | None) -> Machine:
    return find_machine(root, allowed_cpus() if root is None else None).machine


def _find_planned(machine: Machine, card: Accelerator) -> PlannedRank | None:
    """The plan's rank that has a card, if this process may use all of its CPUs."""
    for planned in read_plan(os.environ, PLAN_PATHS):
        if card.name in planned.devices and planned.cpus <= machine.ceiling_cpus:
            return planned
    return None


def _node_of_card(machine: Machine, card: Accelerator) -> int:
    places, problems = find_places(machine, {})
    for place in places:
        if place.card.name == card.name:
            if len(place.cpu_nodes) > 1:
                raise InputError(
                    f"{card.noun} {card.name}: NUMA nodes {place.cpu_nodes} are equally local to it",
                    "Use bind_local_rank(), which draws on each of them",
                )
            return place.cpu_nodes.first
    raise ProblemsError([one for one in problems if card.name in one.message] or problems)


def _node_of_rdma(root: Root, machine: Machine, device: int | str) -> int:
    names = list_rdma_devices(root)
    name = _find_rdma_name(names, device)
    interface = read_rdma_parent(root, name)
    for nic in machine.nics:
        if name in nic.rdma_names or (interface is not None and interface in nic.net_names):
            found = find_locality(machine, nic.address)
            if isinstance(found, Problem):
                raise InputError(f"RDMA device {name}: {found.message}", found.hint)
            return found.nodes.first
    if len(machine.cpu_nodes) == 1:
        return machine.cpu_nodes.first
    raise InputError(f"RDMA device {name}: it is on no PCI bus, so nothing says its NUMA node")


def _find_rdma_name(names: list[str], device: int | str) -> str:
    text = str(device)
    wanted = [text]
    if text.isascii() and text.isdigit():
        wanted = [f"mlx5_{int(text)}"]
        if wanted[0] not in names:
            wanted = [name for name in names if _ends_in(name, int(text))]
    found = [name for name in wanted if name in names]
    if len(found) == 1:
        return found[0]
    why = f"several are meant: {', '.join(found)}" if found else "there is none"
    raise InputError(
        f"RDMA device '{text[:60]}': {why}: the machine has {', '.join(names) or 'none'}",
        "Give its name, as /sys/class/infiniband has it",
    )


def _ends_in(name: str, number: int) -> bool:
    digits = name[len(name.rstrip("0123456789")) :]
    return digits != "" and int(digits) == number


def _parse_number(card: int | str) -> int:
    text = str(card).strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise InputError(
            f"card '{text[:60]}' is no physical card's number",
            "Translate a local rank by physical_device_id()",
        )
    return int(text)


def _migrate(nodes: NodeSet) -> tuple[int | None, Refusal | None]:
    try:
        others = NodeSet(page_placement().total) - nodes
        return (migrate_pages(0, others, nodes) if others else 0), None
    except DeadlyCallError as error:
        return None, error.refusal
    except OSError as error:
        return None, Refusal("migrate_pages", errno=error.errno)
    except ProvisionError as error:
        return None, Refusal("migrate_pages", fault=error.message)
