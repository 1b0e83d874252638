"""`provision render --root` of an 8-GPU host, against a start of Python with click and jinja2.

Both are run in turn, so that whatever else the host does meets both. The tree is the recorded
machine in $PROVISION_MACHINES (default: ../shared/machines), or a sample's where that is not there.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from bench.timing import program, spread, time_process
from bench.trees import find_recorded, write_sample

PAIRS = 40
ALLOWED_RATIO = 1.7
RECORDED = "oci-bm-gpu-h100-8"
SAMPLE = "two-socket-8gpu"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        tree = scratch / "tree"
        subject = RECORDED if find_recorded(RECORDED, tree) else SAMPLE
        if subject == SAMPLE:
            write_sample(SAMPLE, tree)
        renders, starts = [], []
        # The first pair is not counted: it writes byte code and warms the caches.
        for pair in range(PAIRS + 1):
            starts.append(time_process(sys.executable, "-c", "import click, jinja2"))
            renders.append(
                time_process(
                    *(program(), "render", "--root", tree, "--output", scratch / f"units{pair}")
                )
            )
        del renders[0], starts[0]
    ratio = statistics.median(renders) / statistics.median(starts)
    pairs = [render / start for render, start in zip(renders, starts, strict=True)]
    print(f"render --root {subject}, {PAIRS} pairs")
    print(f"  import click, jinja2   {spread([one * 1000 for one in starts], '.1f')} ms")
    print(f"  provision render       {spread([one * 1000 for one in renders], '.1f')} ms")
    print(f"  ratio of each pair     {spread(pairs, '.2f')}")
    print(f"  ratio of the medians   {ratio:.2f}, allowed {ALLOWED_RATIO}")


if __name__ == "__main__":
    main()
