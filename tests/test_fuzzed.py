"""What fuzzing found, each once, and that every target takes what it starts from: see fuzz/."""

from __future__ import annotations

import pytest

from fuzz.seeds import seeds
from fuzz.targets import TARGETS

FOUND = {
    "a PCI address that a terminal would act on": ("texts", b"\0\0\0\0"),
    "a NUMA node below a bridge": (
        "hwloc",
        (
            b'<topology><object type="Machine"><object type="PU" os_index="0"/><object type="Bridge">'
            b'<object type="Package"><object type="PCIDev" pci_busid="0000:11:00.0"/></object></object>'
            b"</object></topology>"
        ),
    ),
    "a link to where a terminal would act": ("tree", b"\xe8\xff\xff/\xff,\0\0\0\0\0\0\x01\xff"),
    "an object whose type a terminal would act on": (
        "hwloc",
        (
            b'<topology><object type="Machine"><object type="P\x7fU" cpuset="0x2">'
            b'<object type="PU" os_index="0"/></object></object></topology>'
        ),
    ),
    "a path of facts that a terminal would act on": (
        "facts",
        b'title = "x"\npackages = [{ cpus = "0" }]\ncards = [{ path = "0:35:\\t\\t", node = 0 }]\n',
    ),
    "a link between GPUs that a terminal would act on": (
        "texts",
        b"\tGPU0\tNIC0\tCPU Affinity\nGPU0\tX\tPIX\0\t0-3\n",
    ),
    "a row of an NPU that a terminal would act on": (
        "texts",
        b"| 0 \x18| 0000:C1:00.0 | 02|\n",
    ),
    "a service of a plan file that a terminal would act on": (
        "plan_file",
        (
            b'{"schema": "provision.plan/1", "fingerprint": "x", "within": "root", "services": '
            b'[{"name": "a\\u007f\\ufffd", "slice": "b", "ranks": [], "memory": "bind", '
            b'"visible_devices": "rank", "worker": null}], "reserved_cpus": "0", "unassigned_cpus": "0", '
            b'"confine": false, "notes": []}'
        ),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    """What once failed is refused by one printable message, or makes sense."""
    target, data = FOUND[name]
    TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_seeds(target: str) -> None:
    """What a target starts from goes through it."""
    for data in seeds(target):
        TARGETS[target](data)
