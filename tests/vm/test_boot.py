"""The machines are what they were asked to be, on both suites."""

from __future__ import annotations

from pathlib import Path

from tests.vm.harness import guest_tests
from tests.vm.machine import Card, Machine, Node

# Two packages with a node each, a third node with CPUs and no memory, a fourth with memory and
# no CPUs, as GPU memory, HBM and CXL have it.
MACHINE = Machine(
    nodes=(
        Node("0-3", 1024, (10, 21, 12, 17)),
        Node("4-5", 384, (21, 10, 31, 28)),
        Node("6-7", 0, (12, 31, 10, 28)),
        Node("", 256, (17, 28, 28, 10)),
    ),
    cards=(
        Card("0000:a1:00.0", 0),
        Card("0000:a2:00.0", 1),
        Card("0000:b1:00.0", -1),
        Card("0001:05:00.0", 2),
        Card("10000:07:1f.0", 0, memory_node=3),
        Card("0000:c1:00.0", 1, identity="1002:74a1:038000"),
    ),
    sockets=2,
    cores=2,
    threads=2,
)

test_boot = guest_tests(Path(__file__).with_name("guest_boot.py"), MACHINE)
