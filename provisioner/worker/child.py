"""Tries a system call in a child first: a seccomp filter may kill whoever makes it.

How the child is made, and why:

1. With no seccomp filter in force (`Seccomp: 0` in the thread's status) the kernel answers every
   call with success or an errno, so `is_filtered` is False and callers need no child at all. That is
   the case outside containers, and costs one read.
2. With a filter and one thread, `os.fork` (about a millisecond in a young process). One thread can
   hold no lock that the child would wait for, and Python 3.12 and later do not warn of it.
3. With a filter and several threads, a fork's child could find another thread's lock held for ever,
   and Python warns, which `-W error` turns into a lost child. There a fresh interpreter is spawned
   (`os.posix_spawn`), which inherits the filter of the calling thread. It costs tens of
   milliseconds, but a process that has threads already binds late, and pays it once.

A signal handler or a vfork that shares memory would not do: SECCOMP_RET_KILL_PROCESS ends every
thread, and its core dump ended all who share the memory before Linux 5.16.
"""

from __future__ import annotations

import os
import sys

from provisioner.errors import ProvisionError
from provisioner.record import Record
from provisioner.worker.procfs import read_thread_status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import NoReturn

_PR_SET_DUMPABLE = 4  # include/uapi/linux/prctl.h
_OTHER_FAULT = 255  # answered for what is no errno; the highest errno is 133


# (process, system call) that a child has lived through; a fork begins anew.
_cleared: set[tuple[int, str]] = set()


class Refusal(Record):
    """Why a system call was not made, or made in vain; one of errno, signal and fault is given."""

    call: str  # e.g. set_mempolicy(bind, nodes 0)
    errno: int | None = None  # what it failed with
    signal: int | None = None  # what killed the child that tried it, 31 (SIGSYS) by seccomp
    fault: str = ""  # why nobody could try it

    def __str__(self) -> str:
        if self.errno is not None:
            return f"{self.call}: {os.strerror(self.errno)} (errno {self.errno})"
        if self.signal is not None:
            return f"{self.call}: would kill this process (signal {self.signal})"
        return f"{self.call}: not tried: {self.fault}"


class DeadlyCallError(ProvisionError):
    """A system call was not made, because it killed the child that tried it, or none could try."""

    code = "deadly_call"

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(
            str(refusal), "Allow the call in the service's or container's seccomp filter"
        )
        self.refusal = refusal


def is_filtered() -> bool:
    """Whether a system call of this thread may meet a seccomp filter; True where nothing says."""
    return read_thread_status().seccomp != 0


def try_in_child(call: str, function: Callable[..., object], *args: int | str) -> Refusal | None:
    """What refuses a call when a child makes it; None if nothing does.

    Args:
        call: the system call with its arguments, for the refusal.
        function: a function at the top level of a module, which makes it and raises OSError.
        *args: its arguments, which must have a literal form.
    """
    try:
        read_end, write_end = os.pipe()
    except OSError as error:
        return Refusal(call, fault=f"no pipe: {error.strerror}")
    try:
        try:
            # A status that can't be read says nothing of threads: then a fork may be unsafe.
            if read_thread_status().threads == 1:
                child = _fork(function, args, write_end)
            else:
                child = _spawn(function, args, write_end)
        except (OSError, LookupError) as error:
            return Refusal(call, fault=f"no child: {error}")
        return _await_answer(call, child, read_end)
    finally:
        os.close(read_end)
        os.close(write_end)


def raise_if_deadly(call: str, function: Callable[..., object], *args: int | str) -> None:
    """Return if this process may make the call, whatever comes of it.

    A filter goes by a call's number, so one that a child has lived through is not tried again.

    Raises:
        DeadlyCallError: a filter is in force and kills who makes it, or nobody could try.
    """
    key = (os.getpid(), call.partition("(")[0])
    if key in _cleared or not is_filtered():
        return
    refusal = try_in_child(call, function, *args)
    if refusal is not None and refusal.errno is None:
        raise DeadlyCallError(refusal)
    _cleared.add(key)


def clear_calls(names: Iterable[str], function: Callable[..., object]) -> None:
    """Has one child make several system calls, which none is tried for again if it lives through them.

    Args:
        names: the system calls.
        function: a function at the top level of a module, which makes them all and raises nothing.
    """
    if is_filtered() and try_in_child("several", function) is None:
        _cleared.update((os.getpid(), name) for name in names)


def answer(
    function: Callable[..., object], args: tuple[int | str, ...], descriptor: int
) -> NoReturn:
    """Ends the child: makes the call, writes its errno (0: none) to the descriptor as one byte."""
    code = _OTHER_FAULT
    try:
        function(*args)
        code = 0
    except OSError as error:
        code = error.errno or _OTHER_FAULT
    finally:
        # Without the interpreter's own end, which would flush buffers copied from the parent.
        os.write(descriptor, bytes((code,)))
        os._exit(0)


def _fork(function: Callable[..., object], args: tuple[int | str, ...], write_end: int) -> int:
    import ctypes  # before the fork, so that the child has little to do

    child = os.fork()
    if child == 0:
        # A killed child would leave a core of the whole parent.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        answer(function, args, write_end)
    return child


def _spawn(function: Callable[..., object], args: tuple[int | str, ...], write_end: int) -> int:
    python = sys.executable or ""
    if "python" not in os.path.basename(python).lower():
        # In a program that embeds Python it is that program, which would not take Python's options.
        raise LookupError(f"'{python}' is no Python interpreter")
    package_parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        f"import sys, ctypes; ctypes.CDLL(None).prctl({_PR_SET_DUMPABLE}, 0, 0, 0, 0); "
        f"sys.path.insert(0, {package_parent!r}); "
        f"from {__name__} import answer; from {function.__module__} import {function.__name__} as call; "
        f"answer(call, {args!r}, 1)"
    )
    return os.posix_spawn(
        python,
        # Without site: quick, and nothing of the engine's is imported.
        [python, "-S", "-P", "-c", code],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, write_end, 1),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
    )


def _await_answer(call: str, child: int, read_end: int) -> Refusal | None:
    signal = None
    try:
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            signal = os.WTERMSIG(status)
    except ChildProcessError:
        # SIGCHLD is ignored, or another thread reaped the child. Either way it has ended.
        pass
    # The child has ended, so its answer is in the pipe; another process may still hold its end.
    os.set_blocking(read_end, False)
    try:
        code = os.read(read_end, 1)
    except BlockingIOError:
        code = b""
    if not code:
        fault = "" if signal is not None else "the child ended without an answer"
        return Refusal(call, signal=signal, fault=fault)
    if code[0] == _OTHER_FAULT:
        return Refusal(call, fault="the child failed before the call")
    return Refusal(call, errno=code[0]) if code[0] else None
