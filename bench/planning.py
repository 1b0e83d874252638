"""Planning alone, by every policy, on a made machine of 2,048 CPUs and 64 NUMA nodes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from bench.timing import spread, time_call
from bench.trees import write_made
from provisioner.discovery import discover
from provisioner.planner import make_plan
from provisioner.request import POLICIES, PlacementRequest
from provisioner.root import DirectoryRoot

CPUS = 2048
NODES = 64
RUNS = 50
ALLOWED_MS = 10


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        write_made(tree, cpus=CPUS, nodes=NODES)
        machine = discover(DirectoryRoot(tree))
    cards = len(machine.accelerators)
    print(
        f"planning {len(machine.cpus)} CPUs, {len(machine.nodes)} nodes, {cards} cards, {RUNS} runs"
    )
    for policy in POLICIES:
        request = PlacementRequest(policy=policy)
        make_plan(machine, request)
        plan_once = functools.partial(make_plan, machine, request)
        taken = [time_call(plan_once) for _ in range(RUNS)]
        print(
            f"  {policy:12} {spread([one * 1000 for one in taken], '.2f')} ms, allowed {ALLOWED_MS}"
        )


if __name__ == "__main__":
    main()
