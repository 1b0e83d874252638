"""Snapshots of a running machine: what is planned from one is what is planned on it."""

from __future__ import annotations

from pathlib import Path

from tests.vm.harness import guest_tests
from tests.vm.machine import Card, Machine, Node

# A node without CPUs that is a card's memory, another PCI domain, a card that does not know its node,
# and an isolated CPU.
MACHINE = Machine(
    nodes=(
        Node("0-7", 1024, (10, 21, 17)),
        Node("8-15", 512, (21, 10, 28)),
        Node("", 128, (17, 28, 10)),
    ),
    cards=(
        Card("0000:a1:00.0", 0, memory_node=2),
        Card("0001:05:00.0", 1),
        Card("10000:01:00.0", -1),
    ),
    sockets=2,
    cores=4,
    threads=2,
    parameters=("isolcpus=15",),
)

test_snapshot = guest_tests(Path(__file__).with_name("guest_snapshot.py"), MACHINE)
