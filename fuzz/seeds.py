"""What fuzzing starts from: something of each form that is read."""

from __future__ import annotations

import zlib
from importlib import resources

from fuzz.targets import SMALL
from provisioner.config import format_config
from provisioner.discovery import discover
from provisioner.planfile import format_plan
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.snapshot import take_snapshot

_XML = b"""<?xml version="1.0"?><!DOCTYPE topology SYSTEM "hwloc2.dtd"><topology version="2.0">
<object type="Machine" cpuset="0xf" complete_cpuset="0x1f" allowed_cpuset="0x7" nodeset="0x3">
<object type="Package" os_index="0" cpuset="0x3" nodeset="0x1">
<object type="NUMANode" os_index="0" cpuset="0x3" nodeset="0x1" local_memory="4096" subtype="HBM"/>
<object type="L3Cache" depth="3" cache_type="0" cpuset="0x3"><object type="Core" cpuset="0x3">
<object type="PU" os_index="0" cpuset="0x1"/><object type="PU" os_index="1" cpuset="0x2"/></object></object>
<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[10-1f]">
<object type="PCIDev" pci_busid="0000:11:00.0" pci_type="0302 [10de:2330] [0:0] a1"><info name="PCIDevice" value="x"/>
<object type="OSDev" name="mlx5_0" osdev_type="3"/></object></object></object>
<object type="Package" os_index="1" cpuset="0xc" nodeset="0x2"><object type="NUMANode" os_index="1" cpuset="0xc"/>
<object type="PU" os_index="2"/><object type="PU" os_index="3"/></object></object>
<distances2 type="NUMANode" nbobjs="2" kind="5" indexing="os"><indexes length="4">0 1</indexes>
<u64values length="9">10 21 21 10</u64values></distances2></topology>"""
_ONE = (
    b'<topology><object type="Machine" online_cpuset="0x3" cpuset="0x3"><object type="Socket" os_index="0">'
    b'<object type="Cache" depth="2" cache_type="0"><object type="PU" os_index="0"/><object type="PU" '
    b'os_index="1"/></object></object></object><distances nbobjs="1" latency_base="10.0">'
    b'<latency value="1.0"/></distances></topology>'
)
_TEXTS = (
    b"0-3,8:2/4",
    b"0000ffff,00000001",
    b"0x10de",
    b"-1",
    b"10 21",
    b"MemTotal: 12 kB",
    b"00:1b:00.0",
    b"cpu_cores_count 0\nsimd_count 304\nvendor_id 4098\nlocation_id 4352\ndomain 0\n",
    b"NPU0 CPU Affinity\nNPU0 X 0-3\n| 0 910B | OK |\n| 0 | 0000:C1:00.0 | 0 |\n",
    b"4 GiB",
    b"\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\tX\tPIX\t0-3\t0\tN/A\n  NIC0: mlx5_0\n",
    b"node 0 cpus: 0 1\nnode 0 size: 9 MB\nnode distances:\nnode   0\n  0:  10\n",
    b"export OMP_PLACES='cores' # x\nNUMAPolicy=bind\nflags : hypervisor\n6.1\n",
)


def seeds(target: str) -> list[bytes]:
    """Inputs to start from."""
    snapshot = take_snapshot(SMALL).data
    plan = format_plan(make_plan(discover(SMALL), PlacementRequest()))
    facts = resources.files("provisioner") / "sample_facts"
    return {
        "archive": [snapshot],
        "tar": [zlib.decompress(snapshot, 31)],
        "hwloc": [_XML, _ONE],
        "tree": [bytes([at, at, 4]) + b"0-3\n" for at in range(0, 256, 8)],
        "plan_file": [plan.encode()],
        "config": [format_config(PlacementRequest()).encode()],
        "facts": [one.read_bytes() for one in facts.iterdir() if one.name.endswith(".toml")],
        "texts": list(_TEXTS),
    }[target]
