"""What the kernel below lets the tests of the worker half do."""

from __future__ import annotations

import os

import pytest

from tests.worker.children import run_child


@pytest.fixture(scope="session")
def memory_node() -> int:
    """A node that a policy may name here; skips where the sandbox refuses policies."""
    found = run_child(
        """
        from provisioner.worker.mempolicy import allowed_nodes, probe_policy
        try:
            node = allowed_nodes().first
            answer([node, str(probe_policy("bind", NodeSet((node,))) or "")])
        except OSError as error:
            answer([None, str(error)])
        """
    )
    node, refusal = found
    if refusal:
        pytest.skip(f"this sandbox refuses memory policies: {refusal}")
    return int(node)


@pytest.fixture
def two_cpus() -> tuple[int, int]:
    """Two CPUs that this process may run on; skips where there is one."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip(f"this process may run on CPU {cpus[0]} alone")
    return cpus[0], cpus[1]
