"""What becomes of a machine whose kernel dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vm import cache, image, machine
from tests.vm.machine import KernelPanicError, Machine, Node


@pytest.mark.vm
def test_panic_that_persists_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that panics is booted twice more, which is said, and then the panic is the failure."""
    lacks = machine.missing() + ([] if cache.is_cached(image.SUITES[0]) else image.missing())
    if lacks:
        pytest.skip(f"no virtual machine without {', '.join(lacks)}")
    # There is no such program to start with, and no disk to look for another.
    asked = Machine((Node("0-1", 768),), sockets=1, cores=2, threads=1, parameters=("rdinit=/no",))
    script = Path(__file__).with_name("guest_boot.py")
    with pytest.raises(KernelPanicError, match="Kernel panic - not syncing"):
        machine.boot(asked, cache.get(image.SUITES[0]), script, {}, seconds=100)
    assert capsys.readouterr().err.count("kernel panic, booting again") == 2
