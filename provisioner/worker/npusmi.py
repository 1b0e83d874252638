"""The CPU affinity of Ascend's NPUs, from the text of `npu-smi info -t topo`.

    Phy0-7     NPU0       NPU1       CPU Affinity
    NPU0       X          HCCS       144-167
    NPU1       HCCS       X          144-167

A driver's tool, so nothing here starts it: who has its text can hold it against the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from provisioner.errors import ParseError
from provisioner.idset import CpuSet, NodeSet
from provisioner.npu_smi import parse_npu_smi


def parse_npu_affinity(text: str) -> dict[int, CpuSet]:
    """The CPUs of each NPU by its number.

    Raises:
        ParseError: there is no such column, or an entry of it is no CPU list.
    """
    found = dict(parse_npu_smi(text).cpus)
    if not found:
        raise ParseError("npu-smi's topology has no column 'CPU Affinity' with a row for each NPU")
    return found


def match_npu_nodes(
    affinity: Mapping[int, CpuSet], cores_by_node: Mapping[int, Iterable[int]]
) -> dict[int, NodeSet]:
    """The NUMA nodes that each NPU's CPUs are on; empty where they are on none that is known.

    Args:
        affinity: CPUs by NPU, as `parse_npu_affinity` gives them.
        cores_by_node: CPUs by node, as `physical_core_cpus_by_numa` gives them.
    """
    sets = {node: CpuSet(cpus) for node, cpus in cores_by_node.items()}
    return {
        npu: NodeSet(node for node, known in sets.items() if not known.isdisjoint(cpus))
        for npu, cpus in affinity.items()
    }
