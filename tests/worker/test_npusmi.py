"""The text of npu-smi, held against the cores of a machine."""

from __future__ import annotations

import pytest

from provisioner.errors import ParseError
from provisioner.worker import parse_npu_affinity
from provisioner.worker.npusmi import match_npu_nodes

TEXT = """\
           NPU0       NPU1       NPU2       CPU Affinity
NPU0       X          HCCS       SYS        0-23
NPU1       HCCS       X          SYS        0-23
NPU2       SYS        SYS        X          24-47,72-95

Legend:
  X    = Self
  SYS  = Path traversing PCIe and NUMA nodes. Nodes are connected through SMP, such as QPI, UPI.
"""


def test_column_is_read_and_matched() -> None:
    """The CPU affinity of each NPU is read, and gives the nodes that have those CPUs."""
    affinity = parse_npu_affinity(TEXT)
    assert {npu: str(cpus) for npu, cpus in affinity.items()} == {
        0: "0-23",
        1: "0-23",
        2: "24-47,72-95",
    }
    nodes = match_npu_nodes(affinity, {0: range(24), 1: range(24, 48)})
    assert {npu: str(found) for npu, found in nodes.items()} == {0: "0", 1: "0", 2: "1"}
    assert not match_npu_nodes(affinity, {5: [200]})[0]


@pytest.mark.parametrize(
    "text",
    ["", "Error: no permission", TEXT.replace("CPU Affinity", ""), TEXT.replace("0-23", "N/A")],
)
def test_text_without_the_column_is_named(text: str) -> None:
    """A text without the column, or with something else in it, is an error and not no NPUs."""
    with pytest.raises(ParseError):
        parse_npu_affinity(text)
