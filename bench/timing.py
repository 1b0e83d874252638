"""Timing, and the machines that are timed."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def time_call(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def time_process(*command: str | Path) -> float:
    """Seconds that a process takes from its start to its end. Raises if it fails."""
    return time_call(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))


def program() -> Path:
    """The `provision` of the environment that runs the script."""
    return Path(sys.executable).with_name("provision")


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """The median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} (quartiles {low:{form}} to {high:{form}})"
