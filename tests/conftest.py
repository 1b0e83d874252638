"""What tests share: a place for large trees, and what is said at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agreement import summarise

_MEMORY = Path("/dev/shm")


@pytest.fixture
def tree_path() -> Iterator[Path]:
    """A folder for thousands of small files, in memory where there is room; it is gone after the test."""
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 1 << 30
    with tempfile.TemporaryDirectory(dir=_MEMORY if has_room else None) as folder:
        yield Path(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how much was held against independent readers, of this process and of xdist's workers."""
    properties = [
        report.user_properties
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
    ]
    if lines := summarise(properties):
        terminalreporter.section("agreement with independent readers")
        for line in lines:
            terminalreporter.line(line)
