"""Many snapshots planned by one command, and one machine of 4,096 CPUs.

The hosts are 20 different ones of 224 CPUs and 8 cards (memory of different sizes, some with a card
less), each under many names: how many different ones there are makes no difference to the time.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.timing import program, spread, time_process
from bench.trees import write_made
from provisioner.facts import build_tree
from provisioner.samples import read_sample
from provisioner.snapshot import take_snapshot

HOSTS = (1_000, 10_000)
KINDS = 20
ALLOWED_SECONDS = 180
BIG = {"cpus": 4096, "nodes": 128, "cards": 64}
BIG_RUNS = 11
BIG_ALLOWED_MS = 1000


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        plan_many(Path(name))
        plan_big(Path(name))


def plan_many(scratch: Path) -> None:
    kinds = write_kinds(scratch)
    print(
        f"plan --snapshot of hosts of 224 CPUs, {len(os.sched_getaffinity(0))} CPUs to plan on,"
        f" {ALLOWED_SECONDS} s allowed for {HOSTS[-1]} on 2"
    )
    for count in HOSTS:
        folder = scratch / str(count)
        folder.mkdir()
        for number in range(count):
            os.link(kinds[number % KINDS], folder / f"host{number:05}.tar.gz")
        command = (program(), "plan", "--snapshot", folder)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken = time_process(*command)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # The peak is that of the largest process so far: more hosts take no more.
        print(
            f"  {count:6} hosts   {taken:.1f} s   {cpu / count * 1000:.1f} ms of a CPU for each"
            f"   at most {after.ru_maxrss / 1024:.0f} MiB in a process"
        )


def plan_big(scratch: Path) -> None:
    tree, snapshot = scratch / "tree", scratch / "big.tar.gz"
    write_made(tree, **BIG)
    subprocess.run(
        [program(), "snapshot", "--root", tree, "--output", snapshot],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    print(
        f"plan of {BIG['cpus']} CPUs, {BIG['nodes']} nodes, {BIG['cards']} cards, {BIG_RUNS} runs"
    )
    for option, path in (("--root", tree), ("--snapshot", snapshot)):
        time_process(program(), "plan", option, path)
        taken = [time_process(program(), "plan", option, path) * 1000 for _ in range(BIG_RUNS)]
        print(f"  {option:10}  {spread(taken, '.0f')} ms, allowed {BIG_ALLOWED_MS}")


def write_kinds(scratch: Path) -> list[Path]:
    facts = read_sample("two-socket-8gpu")
    paths = []
    for kind in range(KINDS):
        nodes = tuple(
            replace(one, memory_bytes=one.memory_bytes - (kind << 20)) for one in facts.nodes
        )
        cards = facts.cards[:-1] if kind % 5 == 4 else facts.cards
        path = scratch / f"kind{kind}"
        path.write_bytes(take_snapshot(build_tree(replace(facts, nodes=nodes, cards=cards))).data)
        paths.append(path)
    return paths


if __name__ == "__main__":
    main()
