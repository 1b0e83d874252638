"""`provision topology --root` of made machines that double: the time for each CPU must not grow."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from bench.timing import program, spread, time_process
from bench.trees import write_made

SIZES = (256, 512, 1024, 2048)
CPUS_PER_NODE = 32
RUNS = 11


def main() -> None:
    print(f"topology --root of made machines, {CPUS_PER_NODE} CPUs on each NUMA node, {RUNS} runs")
    first = 0.0
    with tempfile.TemporaryDirectory() as name:
        trees = {size: Path(name) / str(size) for size in SIZES}
        for size, tree in trees.items():
            write_made(tree, cpus=size, nodes=size // CPUS_PER_NODE)
        times: dict[int, list[float]] = {size: [] for size in SIZES}
        for run in range(RUNS + 1):
            for size, tree in trees.items():
                taken = time_process(program(), "topology", "--root", tree)
                if run:  # the first one warms the caches
                    times[size].append(taken * 1000)
    for size, all_taken in times.items():
        each = statistics.median(all_taken) / size
        first = first or each
        print(
            f"  {size:5} CPUs, {size // CPUS_PER_NODE:2} nodes   {spread(all_taken, '.0f')} ms"
            f"   {each * 1000:.0f} us a CPU, {each / first:.2f} of the smallest machine's"
        )


if __name__ == "__main__":
    main()
