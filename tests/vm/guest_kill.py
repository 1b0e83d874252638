"""Checks of an apply that is killed at each of its steps in turn: see test_kill.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .guest import check, equal, note, read, run
from .guest_live import (
    CONFIG,
    UNITS,
    Started,
    apply,
    changes,
    codes,
    files,
    granted,
    provision,
    system_sets,
    verify,
    write_inputs,
)

_OLD = "[placement]\nconfine = true\nreserve_cores = 1\n"
_NEW = '[placement]\nconfine = true\nreserve_cores = 1\nsmt = "first"\n'
_SLICES = ("provision-rank0.slice", "provision-rank1.slice")

_STEPS = (
    *("record what", "write ", "remove ", "reload ", "start ", "stop ", "have the", "read back"),
    "complete",
)
_start: dict[str, object] = {}
_sets: dict[str, dict[str, tuple[str, str]]] = {}
_files: dict[str, dict[str, str]] = {}
_steps: dict[str, list[str]] = {}


def _effective() -> dict[str, tuple[str, str]]:
    """What each slice and each unit of the system's own is granted, those without a cgroup aside."""
    found = system_sets()
    for name in _SLICES:
        try:
            found[name] = granted(name)
        except FileNotFoundError:
            continue
    return found


def _kill_at(step: int, kill: Callable[[Started, int], None]) -> list[str]:
    """Starts an apply, kills it when it tells its Nth step, and returns the steps that it told."""
    with _started("apply", "--config", CONFIG, "--yes", "--verbose") as (done, lines):
        told: list[str] = []
        for line in lines:
            if line.strip().startswith(_STEPS):
                told.append(line.strip())
                if len(told) == step:
                    child = read(f"/proc/{done.pid}/task/{done.pid}/children").split()
                    kill(done, int(child[0]))
                    break
        rest = lines.read()  # to the end of all that it started
        done.wait()
    print(f"killed at step {step}: {told[-1] if told else 'none'}", rest)
    return told


@contextmanager
def _started(*words: str) -> Iterator[tuple[Started, TextIO]]:
    """A command, and what it and all that it starts print."""
    reader, writer = os.pipe()
    done = Started(*words, out=writer, err=writer)
    os.close(writer)
    with open(reader) as lines:
        yield done, lines
        done.wait()


def _all_of_it(done: Started, _child: int) -> None:
    os.killpg(done.pid, signal.SIGKILL)


def _command_alone(done: Started, _child: int) -> None:
    os.kill(done.pid, signal.SIGKILL)


def _work_alone(_done: Started, child: int) -> None:
    os.kill(child, signal.SIGKILL)


def _wait_for_the_rest() -> None:
    """Returns when nobody is at work any more."""
    run("flock", "/run/provision.lock", "true", timeout=120)


@check(seconds=400)
def the_two_states() -> None:
    """The old state and the new one, to compare with, and the steps from one to the other."""
    _start["files"], _start["sets"] = files(), system_sets()
    for name, text in (("new", _NEW), ("old", _OLD)):
        write_inputs(text)
        done = apply("--verbose")
        lines = [line.strip() for line in done.stdout.splitlines()]
        _steps[name] = [line for line in lines if line.startswith(_STEPS)]
        _sets[name], _files[name] = _effective(), files()
    note("steps", **_steps)
    assert _sets["old"] != _sets["new"], _sets


def _check_mixed(text: str) -> None:
    """After everything was killed at once: each file and each cgroup is as in one of the two states."""
    for path, found in files().items():
        if path.rpartition("/")[2].startswith(".provision-tmp-") or path.endswith("applied.json"):
            continue
        known = {_files[name].get(path) for name in ("old", "new")}
        assert found in known, (path, found, known)
    for name, found_sets in _effective().items():
        known_sets = {_sets[state][name] for state in ("old", "new")}
        assert found_sets in known_sets, (text, name, found_sets, known_sets)


@check(needs=["the_two_states"], seconds=900)
def killed_whole_between_two_plans() -> None:
    """Killed whole at each step to another plan, each part is old or new, and a second apply succeeds."""
    texts = {"old": _OLD, "new": _NEW}
    state, other = "old", "new"
    for step in range(1, len(_steps["old"]) + 1):
        write_inputs(texts[other])
        told = _kill_at(step, _all_of_it)
        _check_mixed(f"step {step}: {told[-1:]}")
        if step % 4 == 3 and len(told) == step and "complete" not in told[-1]:
            report = verify(status=3)
            assert "interrupted" in codes(report), (step, report["findings"])
        apply()
        equal(_effective(), _sets[other], f"sets after step {step} and a second apply")
        equal(changes(_files[other]), [], f"files after step {step} and a second apply")
        state, other = other, state
    write_inputs(_OLD)
    apply()


@check(needs=["the_two_states"], seconds=900)
def killed_whole_at_first_and_undone() -> None:
    """Killed with all of its processes at each step of a first apply, an undo leaves nothing of it."""
    provision("undo")
    equal(changes(_start["files"]), [])
    write_inputs(_OLD)
    for step in range(1, len(_steps["new"]) + 4, 2):
        told = _kill_at(step, _all_of_it)
        if len(told) < step:
            break
        provision("undo")
        equal(changes(_start["files"]), [], f"files after step {step} ({told[-1]}) and an undo")
        equal(system_sets(), _start["sets"], f"sets after step {step} ({told[-1]}) and an undo")
    else:
        raise AssertionError("it never came to its end")
    provision("undo")


@check(needs=["killed_whole_at_first_and_undone"], seconds=900)
def killed_command_leaves_the_new_state() -> None:
    """With the command killed, and not what does its work, the new plan comes into force."""
    write_inputs(_OLD)
    apply()
    write_inputs(_NEW)
    for step in (1, len(_steps["old"]) // 2, len(_steps["old"]) - 2):
        _kill_at(step, _command_alone)
        _wait_for_the_rest()
        equal(changes(_files["new"]), [], f"files after step {step}")
        equal(codes(verify()), set())
        write_inputs(_OLD)
        apply()
        write_inputs(_NEW)


@check(needs=["killed_command_leaves_the_new_state"], seconds=900)
def killed_work_leaves_the_old_state() -> None:
    """With the process killed that does the work, the command goes back, and says so."""
    for step in range(2, len(_steps["old"]), 3):
        write_inputs(_NEW)
        told = _kill_at(step, _work_alone)
        equal(changes(_files["old"]), [], f"files after step {step} ({told[-1:]})")
        equal(_effective(), _sets["old"], f"sets after step {step} ({told[-1:]})")
        write_inputs(_OLD)
        equal(codes(verify()), set())


@check(needs=["killed_work_leaves_the_old_state"], seconds=400)
def stopped_by_a_signal_goes_back() -> None:
    """SIGTERM and SIGINT make it go back, with the exit status of an interrupt."""
    write_inputs(_NEW)
    for number in (signal.SIGTERM, signal.SIGINT):
        _kill_at(6, lambda done, _child, number=number: os.killpg(done.pid, number))  # type: ignore[misc]
        equal(changes(_files["old"]), [])
        equal(_effective(), _sets["old"])
    write_inputs(_OLD)
    equal(codes(verify()), set())


@check(needs=["the_two_states"], seconds=900)
def killed_undo_goes_on() -> None:
    """An undo that was killed is finished by another, whatever step it was at."""
    for step in (1, 8, 16, 20):
        write_inputs(_OLD)
        apply()
        with _started("undo", "--verbose") as (done, lines):
            for count, _ in enumerate(lines, 1):
                if count == step:
                    os.killpg(done.pid, signal.SIGKILL)
                    break
        provision("undo")
        equal(changes(_start["files"]), [], f"files after an undo killed at step {step}")
        equal(system_sets(), _start["sets"], f"sets after an undo killed at step {step}")
    assert not list(UNITS.glob("provision*slice"))
    assert not Path("/etc/provision").exists()
