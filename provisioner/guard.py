"""Work that changes the system, done so that killing the command leaves no half of it.

The work is done by a child process, and the command waits for it. If the child is killed, the command
goes back; if the command is killed, the child goes on to the end. Only when both are killed at once does
the record that apply keeps have to tell.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

from provisioner.errors import Problem, ProblemsError, ProvisionError

_T = TypeVar("_T")
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """The work was asked to stop by a signal."""


def run_guarded(
    work: Callable[[], _T], go_back: Callable[[], tuple[Problem, ...]], what: str
) -> _T:
    """What the work returns, which has to be a value that can be pickled.

    Args:
        work: is called in a child process; it goes back itself where it fails or is interrupted.
        go_back: is called here if the child was killed; returns what could not be restored.
        what: the work's name, for messages.

    Raises:
        ProvisionError: the work's own, or that it was killed.
        KeyboardInterrupt: it was interrupted.
    """
    reader, writer = os.pipe()
    held = (*_FORWARDED, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, held)  # until both know what to do about them
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(work, writer)
    os.close(writer)
    previous = {number: signal.signal(number, _forward(child)) for number in _FORWARDED}
    # The keyboard's reaches the child as well, which goes back and says so.
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        with open(reader, "rb") as stream:
            data = stream.read()
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if data:
        return cast("_T", _outcome(data))
    left = go_back()
    killed = f"{what} was killed" + (
        f" by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
    )
    if left:
        raise ProblemsError(
            [Problem("killed", f"{killed}, and not all that was before could be restored"), *left],
            subject=what,
        )
    raise ProvisionError(f"{killed}: what was before is in force again", "Run it again")


def _work(work: Callable[[], object], writer: int) -> NoReturn:
    """Does the work and leaves with its outcome in the pipe."""
    for number in (*_FORWARDED, signal.SIGINT):
        signal.signal(number, _stop)
    # Who reads the other end may be gone: the work goes on all the same.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    outcome: tuple[str, object]
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_FORWARDED, signal.SIGINT))
        outcome = ("value", work())
    except ProvisionError as error:
        outcome = ("problems", (tuple(error.problems), error.exit_status))
    except KeyboardInterrupt:
        outcome = ("interrupted", None)
    except BaseException as error:  # noqa: BLE001  # told by the parent
        outcome = ("fault", f"{type(error).__name__}: {error}")
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError), open(writer, "wb") as stream:
        pickle.dump(outcome, stream)
    os._exit(0)


def _outcome(data: bytes) -> Any:
    kind, value = pickle.loads(data)  # noqa: S301  # from our own child
    if kind == "value":
        return value
    if kind == "problems":
        raise ProblemsError(value[0], exit_status=value[1])
    if kind == "interrupted":
        raise KeyboardInterrupt
    raise RuntimeError(value)


def _forward(child: int) -> Callable[[int, FrameType | None], None]:
    def forward(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    return forward


def ignore_signals() -> None:
    """From here on nothing but SIGKILL stops this process: going back is not to be stopped as well."""
    for number in (*_FORWARDED, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    ignore_signals()
    raise Stopped
