"""What runs inside a machine: checks with names, and the report that they leave.

A guest script is a Python module of functions marked with check(). They run in their order,
each within its time limit, and one that fails does not stop the next. What they print and what
their commands print goes to the machine's second serial port, and between it, each on a line
that begins with the record separator of RFC 7464, JSON objects: "start" and "check" of every
check, "note" for values a test wants to see, "done" at the end.

This module needs the standard library only, and is only run inside the machine; the host reads
the scripts without importing them (harness.py).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import termios
import time
import traceback
import tty
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, overload

PORT = "/dev/ttyS1"
MACHINE = "/run-checks.json"
SEPARATOR = "\x1e"
_DETAIL_LIMIT = 12_000

Function = Callable[[], object]


class Skip(Exception):
    """Raised by a check that has nothing to say on this machine, with the reason."""


@dataclass(frozen=True, slots=True)
class _Check:
    name: str
    function: Function
    needs: tuple[str, ...]
    seconds: int


_checks: dict[str, _Check] = {}


@overload
def check(function: Function, /) -> Function: ...
@overload
def check(*, needs: Sequence[str] = (), seconds: int = 120) -> Callable[[Function], Function]: ...
def check(
    function: Function | None = None, /, *, needs: Sequence[str] = (), seconds: int = 120
) -> Function | Callable[[Function], Function]:
    """Make a function a check of this script.

    It passes by returning and fails by raising. NEEDS names checks before it: where one of
    them did not pass, this one is skipped. After SECONDS it is interrupted and has failed.
    """

    def register(marked: Function) -> Function:
        name = getattr(marked, "__name__", "")
        if name in _checks:
            raise ValueError(f"two checks are called {name}")
        _checks[name] = _Check(name, marked, tuple(needs), seconds)
        return marked

    return register if function is None else register(function)


def machine() -> dict[str, Any]:
    """What this machine was asked to be: machine.Machine of the host side, and its suite."""
    asked: dict[str, Any] = json.loads(Path(MACHINE).read_text())
    return asked


def equal(actual: object, expected: object, what: str = "value") -> None:
    """Fail unless ACTUAL is EXPECTED, and show both."""
    if actual != expected:
        raise AssertionError(f"{what}: expected {expected!r}, found {actual!r}")


def read(path: str) -> str:
    """The text of a kernel file without the white space around it."""
    return Path(path).read_text().strip()


def run(
    *command: str,
    status: int | None = 0,
    timeout: float = 60,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run COMMAND, show it with what it says, and fail unless it ends with STATUS.

    A STATUS of None takes any. ENV is added to this process's environment.
    """
    print("$", *command, flush=True)
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | dict(env or {}),
        check=False,
    )
    print(done.stdout, done.stderr, sep="", end="", flush=True)
    if status is not None and done.returncode != status:
        raise AssertionError(
            f"{' '.join(command)}: expected status {status}, found {done.returncode}\n"
            f"{done.stdout}{done.stderr}"
        )
    return done


def until(condition: Callable[[], object], what: str, seconds: float = 20) -> None:
    """Wait for CONDITION to hold; fail after SECONDS."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.1)


def note(title: str, **values: object) -> None:
    """Leave VALUES (of JSON's types) in the report for the host side, under TITLE."""
    _send({"kind": "note", "title": title, "values": values})


def _send(record: Mapping[str, object]) -> None:
    sys.stdout.flush()
    # On a line of its own, whatever a command left before it.
    os.write(1, f"\n{SEPARATOR}{json.dumps(record)}\n".encode())


def _late(_signal: int, _frame: FrameType | None) -> None:
    raise TimeoutError("the check's time is over")


def _perform(check: _Check, passed: set[str]) -> tuple[str, str]:
    """The outcome of one check ("ok", "fail", "skip") and what there is to say about it."""
    unmet = [name for name in check.needs if name not in passed]
    if unmet:
        return "skip", f"did not pass: {', '.join(unmet)}"
    signal.alarm(check.seconds)
    try:
        check.function()
    except Skip as reason:
        return "skip", str(reason)
    # SystemExit too: a tested command line that exits must not end the report.
    except BaseException as error:
        # assert is not rewritten here as pytest does it, so the local values take its place.
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
        del told.stack[0]
        return "fail", "".join(told.format())[-_DETAIL_LIMIT:]
    finally:
        signal.alarm(0)
    return "ok", ""


def main(module: str) -> None:
    """Run the checks of MODULE and report to the host."""
    port = os.open(PORT, os.O_RDWR | os.O_NOCTTY)
    tty.setraw(port, termios.TCSANOW)
    os.dup2(port, 1)
    os.dup2(port, 2)
    _send({"kind": "hello", "uptime": float(read("/proc/uptime").split()[0])})
    signal.signal(signal.SIGALRM, _late)
    try:
        importlib.import_module(module)
    except BaseException:
        _send({"kind": "done", "error": traceback.format_exc()})
        termios.tcdrain(port)
        return
    passed: set[str] = set()
    for check in _checks.values():
        _send({"kind": "start", "name": check.name})
        begin = time.monotonic()
        outcome, detail = _perform(check, passed)
        if outcome == "ok":
            passed.add(check.name)
        seconds = round(time.monotonic() - begin, 2)
        _send(
            {
                "kind": "check",
                "name": check.name,
                "outcome": outcome,
                "detail": detail,
                "seconds": seconds,
            }
        )
    if len(passed) < len(_checks):
        journal = ["journalctl", "--boot", "--priority=warning", "--no-pager", "--lines=60"]
        subprocess.run([*journal, "--output=short-monotonic"], check=False)
    _send({"kind": "done", "error": None})
    # The port's buffer would be lost with the machine.
    termios.tcdrain(port)
