"""Runs code that changes its own process, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.worker.seccomp import NUMBERS

ROOT = Path(__file__).resolve().parent.parent.parent

needs_numbers = pytest.mark.skipif(
    os.uname().machine not in NUMBERS,
    reason="the numbers of this architecture's system calls are not known here",
)

_PRELUDE = """
import json, os, sys
from provisioner.idset import CpuSet, NodeSet
from tests.worker.seccomp import KILL_PROCESS, KILL_THREAD, fail_with, filter_calls, number_of

def read_status(tid="self"):
    with open(f"/proc/self/task/{os.getpid() if tid == 'self' else tid}/status") as file:
        return {key: value.strip() for key, _, value in (line.partition(":") for line in file)}

def answer(value):
    print(json.dumps(value, default=str))
    sys.stdout.flush()
"""


def run_child(*blocks: str, environ: dict[str, str] | None = None) -> Any:
    """What the blocks of code give to `answer`; fails if the process warns or does not end well."""
    code = "".join(map(textwrap.dedent, (_PRELUDE, *blocks)))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)
