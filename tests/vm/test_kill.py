"""An apply and an undo that are killed at each of their steps in turn."""

from __future__ import annotations

from pathlib import Path

from tests.vm.harness import guest_tests
from tests.vm.machine import Card, Machine, Node

MACHINE = Machine(
    nodes=(Node("0-3", 512, (10, 21)), Node("4-7", 256, (21, 10))),
    cards=(Card("0000:a1:00.0", 0), Card("0001:05:00.0", 1)),
    sockets=2,
    cores=2,
    threads=2,
)

test_kill = guest_tests(Path(__file__).with_name("guest_kill.py"), MACHINE, seconds=2400)
