"""Apply, the ways to start a worker, verify and undo, on machines with the oddities of real ones."""

from __future__ import annotations

from pathlib import Path

from tests.vm.harness import guest_tests
from tests.vm.test_units import MACHINE

test_apply = guest_tests(Path(__file__).with_name("guest_apply.py"), MACHINE, seconds=1500)
