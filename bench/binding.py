"""CPU time of a worker's bind over starting Python, against what it is allowed."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.timing import spread
from bench.trees import find_recorded, write_sample
from provisioner.discovery import discover
from provisioner.planfile import format_plan
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.root import DirectoryRoot

RUNS = 25
RECORDED, SAMPLE = "dgx-h100", "two-socket-8gpu"
ALLOWED_MS = {"environment": 10, "plan": 10, "discovery": 60}

BIND = "from provisioner.worker import bind_local_rank; bind_local_rank()"
# As a bind does it, up to the system calls, on another machine's tree.
ROOT = "from provisioner.root import DirectoryRoot; root = DirectoryRoot({tree!r})"
FIND = (
    f"{ROOT}; from provisioner.worker import bind_local_rank, find_target; find_target(root=root)"
)


def main() -> None:
    cpu = min(os.sched_getaffinity(0))
    rendered = {
        "PROVISION_RANK": "0",
        "PROVISION_CPUS": str(cpu),
        "PROVISION_MEMORY": "bind",
        "PROVISION_MEMORY_NODES": "0",
    }
    listed = {
        "LOCAL_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    with tempfile.TemporaryDirectory() as name:
        tree, plan = Path(name) / "tree", Path(name) / "plan.json"
        tree.mkdir()
        title = RECORDED if find_recorded(RECORDED, tree) else SAMPLE
        if title == SAMPLE:
            write_sample(SAMPLE, tree)
        machine = discover(DirectoryRoot(tree))
        plan.write_text(format_plan(make_plan(machine, PlacementRequest())))
        print(
            f"a worker's bind: CPU time over starting Python, {RUNS} runs; {len(machine.cpus)} CPUs ({title})"
        )
        show("environment", BIND, "pass", rendered)
        listed["PROVISION_PLAN"] = str(plan)
        show("plan", FIND.format(tree=str(tree)), ROOT.format(tree=str(tree)), listed)
        show("discovery", FIND.format(tree=str(tree)), "pass", {"LOCAL_RANK": "0"})


def show(what: str, code: str, base: str, environ: dict[str, str]) -> None:
    """Prints what a piece of code costs more than another one."""
    taken = [cpu_ms(code, environ) - cpu_ms(base, environ) for _ in range(RUNS)]
    allowed = ALLOWED_MS[what]
    word = "allowed" if statistics.median(taken) <= allowed else "OVER the allowed"
    print(f"  by {what:<12} {spread(taken, '.1f')} ms, {word} {allowed}")


def cpu_ms(code: str, environ: dict[str, str]) -> float:
    """Milliseconds of CPU that a Python process takes for some code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **environ})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


if __name__ == "__main__":
    main()
