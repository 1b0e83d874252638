"""Virtual machine tests are run by name and not along with the others: they take minutes.

PROVISION_VM=1 lets pytest collect them.
"""

from __future__ import annotations

import os

import pytest

from tests.vm.harness import Machines

collect_ignore_glob = [] if os.environ.get("PROVISION_VM") == "1" else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vm: needs QEMU and minutes; see tests/vm/README.md")


@pytest.fixture(scope="session")
def machines() -> Machines:
    """The machines that this run has booted."""
    return Machines()
