"""What systemd accepts and does not enforce, drift of each kind, and its repair."""

from __future__ import annotations

from pathlib import Path

from tests.vm.harness import guest_tests
from tests.vm.machine import Card, Machine, Node

# Node 2 has a core and no memory, node 3 memory and no CPUs.
MACHINE = Machine(
    nodes=(
        Node("0-5", 1536, (10, 21, 12, 17)),
        Node("6-7", 384, (21, 10, 31, 28)),
        Node("8-9", 0, (12, 31, 10, 28)),
        Node("", 128, (17, 28, 28, 10)),
    ),
    cards=(
        *(Card(f"0000:a{number}:00.0", 0) for number in range(1, 4)),
        Card("0001:05:00.0", 1),
    ),
    sockets=1,
    cores=5,
    threads=2,
)

test_drift = guest_tests(Path(__file__).with_name("guest_drift.py"), MACHINE, seconds=1800)
