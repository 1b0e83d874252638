"""The worker half on four NUMA nodes: where its process runs and where its pages lie."""

from __future__ import annotations

from pathlib import Path

from tests.vm.harness import guest_tests
from tests.vm.machine import Card, Machine, Node

# Two cards on node 0 and one on node 1. Node 2 has a core and no memory, node 3 memory and no CPUs.
MACHINE = Machine(
    nodes=(
        Node("0-9", 1024, (10, 21, 12, 17)),
        Node("10-17", 512, (21, 10, 31, 28)),
        Node("18-19", 0, (12, 31, 10, 28)),
        Node("", 128, (17, 28, 28, 10)),
    ),
    cards=(
        Card("0000:a1:00.0", 0),
        Card("0000:a2:00.0", 0),
        Card("0001:05:00.0", 1),
    ),
    sockets=2,
    cores=5,
    threads=2,
)

# Each check starts processes of its own, which takes a while under emulation.
test_worker = guest_tests(Path(__file__).with_name("guest_worker.py"), MACHINE, seconds=1200)
