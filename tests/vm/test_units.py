"""The rendered units in force, on machines with the oddities that plans have to get right."""

from __future__ import annotations

from pathlib import Path

from tests.vm.harness import guest_tests
from tests.vm.machine import Card, Machine, Node

# Five cards on node 0 and three on node 1, of other PCI domains; one that does not know its node.
# Node 2 has a core and no memory, node 3 memory and no CPUs.
MACHINE = Machine(
    nodes=(
        Node("0-9", 1024, (10, 21, 12, 17)),
        Node("10-17", 512, (21, 10, 31, 28)),
        Node("18-19", 0, (12, 31, 10, 28)),
        Node("", 128, (17, 28, 28, 10)),
    ),
    cards=(
        *(Card(f"0000:a{number}:00.0", 0) for number in range(1, 6)),
        *(Card(f"0001:0{number}:00.0", 1) for number in range(5, 8)),
        Card("10000:01:00.0", -1),
    ),
    sockets=2,
    cores=5,
    threads=2,
)

test_units = guest_tests(Path(__file__).with_name("guest_units.py"), MACHINE)
