"""Binds this process to its rank's CPUs and memory, and says what holds.

1. What the rank is to have (`target`), within what the cpuset allows, whatever mask a library may
   have set on the caller.
2. Where the cpuset is the rank's already, the cgroup holds it: nothing is changed, but for a caller
   that a library has pinned to a part of it.
3. Else every thread's CPUs are set, and then the memory policy of the calling thread, as hard as the
   kernel lets it.

Whatever fails is in the result, and kills a worker only if it asked for that.
"""

from __future__ import annotations

import os

from provisioner.errors import Problem, ProvisionError
from provisioner.idset import CpuSet, NodeSet
from provisioner.record import Record
from provisioner.worker.affinity import (
    UnreachedThread,
    allowed_cpus,
    ask_for_all,
    own_thread,
    set_thread_affinity,
    thread_masks,
)
from provisioner.worker.child import DeadlyCallError, Refusal, clear_calls
from provisioner.worker.mempolicy import (
    BIND_STEPS,
    NO_STEP,
    UnsupportedMachineError,
    allowed_nodes,
    ask_for_nodes,
    bind_memory,
    migrate_pages,
)
from provisioner.worker.procfs import find_runtimes, list_threads
from provisioner.worker.target import Target, find_target, problems_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

BY_CGROUP = "cgroup"
BY_SYSCALL = "syscall"
BY_NOTHING = "none"


class BindResult(Record):
    """What holds after a bind, and what does not."""

    target: Target  # what was to be bound
    cpus: CpuSet  # what the calling thread may run on now; empty: not known
    cpus_by: str  # cgroup, syscall or none
    memory_nodes: (
        NodeSet  # what its memory comes from, or comes from first; empty: nothing is bound
    )
    memory_by: str  # cgroup, syscall or none
    memory_step: str  # bind, preferred_many, preferred, or none
    refused: tuple[Refusal, ...] = ()  # system calls that were refused, or would have killed
    unreached: tuple[UnreachedThread, ...] = ()  # threads whose CPUs could not be set
    without_policy: tuple[
        int, ...
    ] = ()  # threads that were there before, and keep their memory policy
    runtimes: tuple[str, ...] = ()  # accelerator runtimes loaded already: what they hold stays put
    unmoved_pages: int | None = None  # that stayed behind when pages were moved; None: none were
    problems: tuple[Problem, ...] = ()  # everything that keeps this from being full
    notes: tuple[str, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether all threads have the CPUs and the memory policy that were to be bound."""
        wanted_step = {"bind": "bind", "prefer": "preferred_many", "off": self.memory_step}
        return (
            not self.problems
            and not self.unreached
            and not self.without_policy
            and self.cpus_by != BY_NOTHING
            and (self.memory_by == BY_CGROUP or self.memory_step == wanted_step[self.target.memory])
        )

    def describe(self) -> str:
        """The result as lines of text, for a log."""
        from provisioner.worker.report import format_result

        return format_result(self)


class BindError(ProvisionError):
    """A bind that was required is less than full; `result` says what holds."""

    code = "not_bound"

    def __init__(self, result: BindResult) -> None:
        lacks = [one.message for one in result.problems]
        lacks += [str(one) for one in (*result.refused, *result.unreached)]
        if result.without_policy:
            lacks.append(f"threads {_join(result.without_policy)} keep their memory policy")
        hints = [one.hint for one in result.problems if one.hint]
        super().__init__(
            f"rank {result.target.local_rank}: not bound in full: {'; '.join(lacks)}",
            hints[0] if hints else "Bind before anything starts threads, or allow what was refused",
        )
        self.result = result

    def __reduce__(self) -> tuple[type[BindError], tuple[BindResult]]:
        return (BindError, (self.result,))


_last: dict[int, BindResult] = {}


def bind_local_rank(
    local_rank: int | None = None,
    *,
    required: bool = False,
    migrate: bool = False,
    memory: str | None = None,
    devices_per_rank: int | None = None,
    locality: Mapping[str, int] | None = None,
) -> BindResult:
    """Binds this process to its rank's CPUs and memory; call it before anything allocates.

    Args:
        local_rank: the rank's position among the visible devices; None asks LOCAL_RANK, then the
            unit that systemd started this process in.
        required: raise where the bind is less than full, instead of saying so in the result.
        migrate: move the pages that exist already to the rank's memory nodes.
        memory: bind, prefer or off; None is the plan's, else bind.
        devices_per_rank: how many devices a rank has; None is as many as the plan says, else one.
        locality: NUMA node by card (PCI address), for cards that do not know theirs.

    Raises:
        BindError: it is required and not full.
        InputError: `memory` or `devices_per_rank` is none that there is.
    """
    cpus, nodes, refused = ask_kernel()
    target = find_target(
        local_rank,
        allowed_cpus=cpus,
        allowed_nodes=nodes,
        memory=memory,
        devices_per_rank=devices_per_rank,
        locality=locality,
    )
    result = bind_target(target, cpus, nodes, migrate=migrate, refused=refused)
    if required and not result.is_full:
        raise BindError(result)
    return result


def ask_kernel() -> tuple[CpuSet | None, NodeSet | None, tuple[Refusal, ...]]:
    """The CPUs and memory nodes of the cpuset, None where the kernel does not say, and what it refused."""
    cpus: CpuSet | None = None
    nodes: NodeSet | None = None
    refused: list[Refusal] = []
    # One child for both calls; where it dies, each is tried by itself.
    clear_calls(("sched_setaffinity", "get_mempolicy"), _ask_both)
    try:
        cpus = allowed_cpus()
    except DeadlyCallError as error:
        refused.append(error.refusal)
    except OSError as error:
        refused.append(Refusal("sched_setaffinity(all CPUs)", errno=error.errno))
    try:
        nodes = allowed_nodes()
    except DeadlyCallError as error:
        refused.append(error.refusal)
    except OSError as error:
        refused.append(Refusal("get_mempolicy", errno=error.errno))
    except UnsupportedMachineError:
        pass  # setting a policy will say so
    return cpus, nodes, tuple(refused)


def last_result() -> BindResult | None:
    """What the last `bind_local_rank` of this process came to; None if there was none."""
    return _last.get(os.getpid())


def bind_target(
    target: Target,
    cpuset: CpuSet | None,
    cpuset_nodes: NodeSet | None,
    *,
    migrate: bool = False,
    refused: tuple[Refusal, ...] = (),
) -> BindResult:
    """Binds this process to a target, and says what holds.

    Args:
        target: what to bind to.
        cpuset: the CPUs that the cpuset allows; None: not known.
        cpuset_nodes: the memory nodes that it allows; None: not known.
        migrate: move the pages that exist already.
        refused: what was refused on the way here.
    """
    work = _Work(target, refused)
    work.runtimes = find_runtimes()
    before = list_threads_or_none()
    if target.cpus is not None:
        _bind_cpus(work, target.cpus, cpuset)
    else:
        work.cpus = _find_own_mask()
    if target.memory != "off" and target.memory_nodes:
        _bind_memory(work, target, cpuset_nodes, before)
    if migrate and target.memory_nodes:
        _migrate(work, target.memory_nodes)
    if work.runtimes:
        work.notes.append(
            f"an accelerator runtime was loaded already ({', '.join(work.runtimes)}): "
            "what it has allocated stays where it is"
        )
    result = work.result()
    _last[os.getpid()] = result
    return result


def list_threads_or_none() -> list[int]:
    """The ids of this process's threads; empty where there is no /proc."""
    try:
        return list_threads()
    except OSError:
        return []


class _Work:
    """What a bind has come to so far."""

    def __init__(self, target: Target, refused: tuple[Refusal, ...]) -> None:
        self.target = target
        self.cpus = CpuSet()
        self.cpus_by = BY_NOTHING
        self.memory_nodes = NodeSet()
        self.memory_by = BY_NOTHING
        self.memory_step = NO_STEP
        self.refused = list(refused)
        self.unreached: tuple[UnreachedThread, ...] = ()
        self.without_policy: tuple[int, ...] = ()
        self.runtimes: tuple[str, ...] = ()
        self.unmoved_pages: int | None = None
        self.problems = list(target.problems)
        self.notes = list(target.notes)

    def fail(self, code: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(code, message, hint))

    def result(self) -> BindResult:
        return BindResult(
            self.target,
            self.cpus,
            self.cpus_by,
            self.memory_nodes,
            self.memory_by,
            self.memory_step,
            tuple(self.refused),
            self.unreached,
            self.without_policy,
            self.runtimes,
            self.unmoved_pages,
            tuple(self.problems),
            tuple(self.notes),
        )


def _ask_both() -> None:
    """For a child: makes the calls by which the kernel is asked."""
    for ask in (ask_for_all, ask_for_nodes):
        try:
            ask()
        except (OSError, ProvisionError):
            continue


def _bind_cpus(work: _Work, cpus: CpuSet, cpuset: CpuSet | None) -> None:
    held = cpuset is not None and cpuset <= cpus
    if cpuset is not None and held:
        mine = _find_own_mask()
        if not mine < cpuset:
            work.cpus, work.cpus_by = mine, BY_CGROUP
            _note_narrow_threads(work, cpuset)
            return
        work.notes.append(
            f"the calling thread was pinned to CPUs {mine}, by a library or a launcher"
        )
    try:
        # In a cgroup that holds, threads that were pinned to a part of it may be so on purpose.
        found = set_thread_affinity(cpus, (own_thread(),) if held else None)
    except DeadlyCallError as error:
        work.refused.append(error.refusal)
        work.fail("cpus_refused", error.message, error.hint)
    except (OSError, ProvisionError) as error:
        if isinstance(error, OSError):
            work.refused.append(Refusal("sched_setaffinity", errno=error.errno))
        work.problems += problems_of(error)
    else:
        work.cpus, work.unreached = found.cpus, found.unreached
        work.cpus_by = BY_CGROUP if held else BY_SYSCALL
        if held:
            _note_narrow_threads(work, found.cpus)
        return
    work.cpus = _find_own_mask()
    if held:
        work.cpus_by = BY_CGROUP


def _note_narrow_threads(work: _Work, cpus: CpuSet) -> None:
    try:
        narrow = [tid for tid, mask in thread_masks().items() if mask < cpus]
    except OSError:
        return
    if narrow:
        work.notes.append(f"threads {_join(narrow)} are pinned to a part of the rank's CPUs")


def _bind_memory(
    work: _Work, target: Target, cpuset_nodes: NodeSet | None, before: list[int]
) -> None:
    nodes = target.memory_nodes
    if cpuset_nodes is not None and cpuset_nodes and cpuset_nodes <= nodes:
        # What is left of the memory is the rank's: no policy could take it further.
        work.memory_nodes, work.memory_by, work.memory_step = cpuset_nodes, BY_CGROUP, "bind"
        return
    steps = BIND_STEPS if target.memory == "bind" else BIND_STEPS[1:]
    try:
        found = bind_memory(nodes, steps)
    except ProvisionError as error:
        work.problems += error.problems
        return
    work.refused += found.refused
    work.memory_step = found.step
    if found.step != steps[0]:
        first = found.refused[0] if found.refused else "refused"
        work.fail(
            "memory_refused",
            f"memory on NUMA node {nodes} is {_STATES[found.step]}: {first}",
            "Allow set_mempolicy in the seccomp filter, or widen the memory nodes of the cpuset",
        )
    if found.step == NO_STEP:
        return
    work.memory_by = BY_SYSCALL
    if found.policy is not None:
        work.memory_nodes = found.policy.nodes
    # A policy belongs to the calling thread; those it starts from now on inherit it.
    mine = own_thread()
    now = set(list_threads_or_none())
    work.without_policy = tuple(tid for tid in before if tid != mine and tid in now)
    if work.without_policy:
        work.notes.append(
            f"{len(work.without_policy)} threads existed already, and the kernel lets nobody set "
            "another thread's memory policy"
        )


_STATES = {
    "preferred_many": "preferred and not bound",
    "preferred": "preferred, of one node alone",
    NO_STEP: "not bound",
}


def _migrate(work: _Work, nodes: NodeSet) -> None:
    """Moves what pages there are to the nodes, and counts those that stay."""
    from provisioner.worker.pages import page_placement

    try:
        others = NodeSet(page_placement().total) - nodes
        work.unmoved_pages = 0
        if others:
            work.unmoved_pages = migrate_pages(0, others, nodes)
    except DeadlyCallError as error:
        work.refused.append(error.refusal)
    except (OSError, ProvisionError) as error:
        work.unmoved_pages = None
        work.problems += problems_of(error)
    if work.unmoved_pages:
        work.notes.append(f"{work.unmoved_pages} pages could not be moved to NUMA node {nodes}")


def _find_own_mask() -> CpuSet:
    try:
        return CpuSet(os.sched_getaffinity(0))
    except OSError:
        return CpuSet()


def _join(ids: tuple[int, ...] | list[int]) -> str:
    shown = ", ".join(str(one) for one in ids[:8])
    return shown if len(ids) <= 8 else f"{shown} and {len(ids) - 8} more"
