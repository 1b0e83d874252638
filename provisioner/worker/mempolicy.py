"""The memory policy of the calling thread, by raw system calls: libnuma is not needed.

Source: set_mempolicy(2), get_mempolicy(2), migrate_pages(2), include/uapi/linux/mempolicy.h,
mm/mempolicy.c. A policy belongs to one thread; threads that it starts later inherit it, others do
not, and no call reaches them. It governs allocations from now on: pages that exist stay where they
are.
"""

from __future__ import annotations

import os
import sys

from provisioner.errors import InputError, ProvisionError
from provisioner.idset import NodeSet
from provisioner.record import Record
from provisioner.worker.child import Refusal, is_filtered, raise_if_deadly, try_in_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

# enum { MPOL_DEFAULT, ... } of include/uapi/linux/mempolicy.h
MODES = (
    "default",
    "preferred",
    "bind",
    "interleave",
    "local",
    "preferred_many",
    "weighted_interleave",
)
FLAG_STATIC_NODES = 1 << 15  # MPOL_F_STATIC_NODES
FLAG_RELATIVE_NODES = 1 << 14  # MPOL_F_RELATIVE_NODES
FLAG_NUMA_BALANCING = 1 << 13  # MPOL_F_NUMA_BALANCING
_MODE_FLAGS = FLAG_STATIC_NODES | FLAG_RELATIVE_NODES | FLAG_NUMA_BALANCING
_MEMS_ALLOWED = 1 << 2  # MPOL_F_MEMS_ALLOWED

BIND_STEPS = ("bind", "preferred_many", "preferred")  # from the hardest to the softest
NO_STEP = "none"

_WORD_BITS = 64  # of an unsigned long, on both architectures
# get_mempolicy fails for fewer bits than the kernel has nodes (1024 at most, CONFIG_NODES_SHIFT), and
# for more than a page of them.
_READ_BITS = 4096


class CallNumbers(Record):
    """The numbers of the system calls on one architecture."""

    set_mempolicy: int
    get_mempolicy: int
    migrate_pages: int


# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h
CALL_NUMBERS = {"x86_64": CallNumbers(238, 239, 256), "aarch64": CallNumbers(237, 236, 238)}


class UnsupportedMachineError(ProvisionError):
    """The numbers of the memory policy's system calls are not known on this architecture."""

    code = "unsupported_machine"


class Policy(Record):
    """A thread's memory policy."""

    mode: str  # one of MODES, or 'mode N' for one that is not known here
    flags: int  # FLAG_*, combined
    nodes: NodeSet  # empty for default and local


class MemoryResult(Record):
    """What became of binding the calling thread's memory."""

    step: str  # the one of BIND_STEPS that holds, or NO_STEP
    policy: Policy | None  # in force now, read back; None: it may not be read
    refused: tuple[Refusal, ...] = ()  # the steps before, one each


def set_policy(mode: str, nodes: NodeSet, flags: int = 0) -> None:
    """Sets the calling thread's memory policy.

    The kernel trims the nodes to those of the cpuset, and refuses a set without one of them.
    A seccomp filter may kill who makes this call: `probe_policy` finds out, `bind_memory` cares.

    Raises:
        OSError: by the kernel's errno. EINVAL: no node of the set is allowed and has memory, or the
            kernel does not know the mode; EPERM: seccomp.
        UnsupportedMachineError: the call's number is not known here.
        ValueError: there is no such mode.
    """
    if mode not in MODES:
        raise ValueError(f"memory policy '{mode}': expected {', '.join(MODES)}")
    words = _count_words(nodes)
    _call(
        _describe(mode, nodes),
        _find_numbers().set_mempolicy,
        MODES.index(mode) | flags,
        _make_mask(nodes, words),
        _max_node(words),
    )


def get_policy() -> Policy:
    """The calling thread's memory policy.

    Raises:
        OSError: by the kernel's errno.
        UnsupportedMachineError: the call's number is not known here.
    """
    number, nodes = _get_mempolicy(0)
    mode = number & ~_MODE_FLAGS
    name = MODES[mode] if mode < len(MODES) else f"mode {mode}"
    return Policy(name, number & _MODE_FLAGS, nodes)


def allowed_nodes() -> NodeSet:
    """The nodes that the calling thread's cpuset lets it allocate on (Mems_allowed).

    Raises:
        OSError: by the kernel's errno.
        DeadlyCallError: a seccomp filter kills who makes the call.
        UnsupportedMachineError: the call's number is not known here.
    """
    raise_if_deadly("get_mempolicy", ask_for_nodes)
    return ask_for_nodes()


def ask_for_nodes() -> NodeSet:
    """As `allowed_nodes`, whatever a filter does to who asks: for a child.

    Raises:
        OSError: by the kernel's errno.
        UnsupportedMachineError: the call's number is not known here.
    """
    return _get_mempolicy(_MEMS_ALLOWED)[1]


def probe_policy(mode: str, nodes: NodeSet, flags: int = 0) -> Refusal | None:
    """What refuses a policy when a child process sets it; None if nothing does.

    That get_mempolicy works says nothing of set_mempolicy, so the child really makes the call.
    """
    return try_in_child(_describe(mode, nodes), _try_policy, mode, nodes.bits, flags)


def bind_memory(nodes: NodeSet, steps: Sequence[str] = BIND_STEPS) -> MemoryResult:
    """Binds the calling thread's memory to nodes as hard as the kernel lets it.

    The steps, of which the first that the kernel takes holds:

    1. bind: only these nodes, the rest of the machine is out of reach.
    2. preferred_many: these nodes first, others when they are full. Since Linux 5.15.
    3. preferred: the lowest of these nodes first.
    4. none: what held before holds on.

    Args:
        nodes: the memory nodes.
        steps: those of BIND_STEPS that are tried, in this order.

    Raises:
        InputError: the set is empty.
        UnsupportedMachineError: the calls' numbers are not known here.
    """
    if not nodes:
        # To the kernel an empty 'preferred' means 'wherever the thread runs', and succeeds.
        raise InputError("memory nodes: the set is empty, expected at least one node")
    refused: list[Refusal] = []
    # A filter goes by the call's number: once a child has lived through it, this process will.
    is_safe = not is_filtered()
    for step in steps:
        wanted = NodeSet((nodes.first,)) if step == "preferred" else nodes
        refusal = None if is_safe else probe_policy(step, wanted)
        is_safe = is_safe or refusal is None or refusal.errno is not None
        if refusal is None:
            refusal = _set_or_refuse(step, wanted)
        if refusal is None:
            return MemoryResult(step, _find_policy(), tuple(refused))
        refused.append(refusal)
    return MemoryResult(NO_STEP, _find_policy() if is_safe else None, tuple(refused))


def migrate_pages(pid: int, from_nodes: NodeSet, to_nodes: NodeSet) -> int:
    """How many pages could not be moved when a process's pages go from some nodes to others.

    Pages that several processes map stay, unless the caller has CAP_SYS_NICE. 0 is this process.

    Raises:
        OSError: by the kernel's errno. EINVAL, or EPERM without CAP_SYS_NICE: a target node is not
            allowed or has no memory; EPERM: another user's process, or seccomp; ESRCH: no process.
        DeadlyCallError: a seccomp filter kills who makes the call.
        UnsupportedMachineError: the call's number is not known here.
    """
    # The child tries it on itself.
    raise_if_deadly(
        _describe_migration(pid, from_nodes, to_nodes), _migrate, 0, from_nodes.bits, to_nodes.bits
    )
    return _migrate(pid, from_nodes.bits, to_nodes.bits)


def _set_or_refuse(mode: str, nodes: NodeSet) -> Refusal | None:
    try:
        set_policy(mode, nodes)
    except OSError as error:
        return Refusal(_describe(mode, nodes), errno=error.errno)
    return None


def _find_policy() -> Policy | None:
    try:
        return get_policy()
    except OSError:
        return None


def _try_policy(mode: str, bits: int, flags: int) -> None:
    """For a child: reads the policy and sets one, so that an answer clears both calls."""
    _find_policy()
    set_policy(mode, NodeSet.from_bits(bits), flags)


def _migrate(pid: int, from_bits: int, to_bits: int) -> int:
    from_nodes, to_nodes = NodeSet.from_bits(from_bits), NodeSet.from_bits(to_bits)
    words = _count_words(from_nodes, to_nodes)
    return _call(
        _describe_migration(pid, from_nodes, to_nodes),
        _find_numbers().migrate_pages,
        pid,
        _max_node(words),
        _make_mask(from_nodes, words),
        _make_mask(to_nodes, words),
    )


def _get_mempolicy(flags: int) -> tuple[int, NodeSet]:
    """(mode with its flags, nodes); the mode is 0 where the flags ask for something else."""
    import ctypes

    mode = ctypes.c_int(0)
    words = _READ_BITS // _WORD_BITS
    mask = _make_mask(NodeSet(), words)
    _call(
        "get_mempolicy",
        _find_numbers().get_mempolicy,
        None if flags else ctypes.byref(mode),
        mask,
        _max_node(words),
        None,
        flags,
    )
    bits = sum(word << _WORD_BITS * index for index, word in enumerate(mask))
    return mode.value, NodeSet.from_bits(bits)


def _find_numbers() -> CallNumbers:
    machine = os.uname().machine
    # A 32-bit Python on a 64-bit kernel has other numbers, and a mask of other words.
    if machine in CALL_NUMBERS and sys.maxsize > 1 << 32:
        return CALL_NUMBERS[machine]
    raise UnsupportedMachineError(
        f"memory policy: the system calls of {sys.maxsize.bit_length() + 1}-bit programs on "
        f"'{machine}' are not known here: expected 64-bit ones on {' or '.join(CALL_NUMBERS)}",
        "Bind the memory from outside: AllowedMemoryNodes= of a slice, or numactl",
    )


def _count_words(*sets: NodeSet) -> int:
    """How many words a mask needs that holds any of the sets; at least one."""
    return max(1, *(-(-one.bits.bit_length() // _WORD_BITS) for one in sets))


def _make_mask(nodes: NodeSet, words: int) -> ctypes.Array[ctypes.c_ulong]:
    import ctypes

    every = (1 << _WORD_BITS) - 1
    return (ctypes.c_ulong * words)(*(nodes.bits >> _WORD_BITS * i & every for i in range(words)))


def _max_node(words: int) -> int:
    # The kernel takes one off it before it counts the bits of the mask (mm/mempolicy.c, get_nodes).
    return words * _WORD_BITS + 1


def _call(what: str, number: int, *args: object) -> int:
    """The result of a system call; its arguments are integers, pointers or None.

    Raises:
        OSError: with the kernel's errno; the message begins with what was tried.
    """
    import ctypes

    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    # An argument of a variadic function is passed as an int unless it says that it is longer.
    result: int = syscall(
        ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args)
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _describe(mode: str, nodes: NodeSet) -> str:
    return f"set_mempolicy({mode}, nodes {nodes or 'none'})"


def _describe_migration(pid: int, from_nodes: NodeSet, to_nodes: NodeSet) -> str:
    process = f"process {pid}" if pid else "this process"
    return (
        f"migrate_pages({process}, from nodes {from_nodes or 'none'} to nodes {to_nodes or 'none'})"
    )
