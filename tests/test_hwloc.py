"""Machines from hwloc's XML: held against the same machines' trees, and against nonsense."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.cli import run_command
from provisioner.discovery import discover
from provisioner.errors import InputError, ProblemsError
from provisioner.facts import build_tree
from provisioner.hwloc import read_hwloc
from provisioner.oddities import find_oddities
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.root import MemoryRoot
from provisioner.samples import list_samples, read_sample
from provisioner.topology import Machine
from tests.machines import machine_names, read_machine
from tests.test_agreement import REFUSED
from tests.trees import write_tree

LSTOPO = shutil.which("lstopo-no-graphics")
NAMES = [name for name in machine_names() if name not in REFUSED] or ["none"]
SAMPLES = [sample.name for sample in list_samples()]

# What the XML says differently from the tree that it was made of, each with its reason. Where a
# reason holds for some machines only, their names stand with it.
NO_GPU_MEMORY = "hwloc leaves out NVIDIA's GPU memory nodes unless it is asked for them"
DIFFERENCES = {
    "offline_cpus": "version 1 says which CPUs are offline, version 2 does not; neither lists CPUs that "
    "only `possible` or a driver's list names",
    "die": "hwloc has no object for dies where each package has one, and version 1 has none at all",
    "distances": "hwloc writes no matrix of one node; NO_GPU_MEMORY leaves rows out of others",
    "llc": "where all of a cache's shared_cpu_map is zeros, hwloc takes the cache for each core's own",
    "node_ids": NO_GPU_MEMORY,
    "memory_bytes": f"hwloc writes no size of 0; {NO_GPU_MEMORY}",
    "kind": f"version 1 does not name kinds; version 2 has none for nodes without memory; {NO_GPU_MEMORY}",
}
LLC_DIFFERS = {"8ia64-2n2s2c", "8ia64-2s2c2t"}
GPU_MEMORY_MISSING = {"gb200-34nodes", "gh200-1x-9nodes", "grace-4gpu"}
KIND_DIFFERS = {*GPU_MEMORY_MISSING, "fakeheteromemtiers", "max-6gpu"}
# A made tree holds no PCI configuration space, without which hwloc knows of no bridge, and so of no
# switch that a card and a NIC share.
NICS_DIFFER = {"two-socket-8gpu", "uneven-5-3"}
# One capture lacks nodeN/meminfo, and a machine of one node has the memory that /proc/meminfo says.
MEMORY_DIFFERS = {*GPU_MEMORY_MISSING, "linux-amd64-61797caf7c0b6bca1725ad7975ed4773"}


def lstopo(folder: Path, version: int) -> str:
    """What lstopo writes of a tree, the CPUs that its recorder was not allowed to use included."""
    if LSTOPO is None:
        pytest.skip("no lstopo here: Debian and Ubuntu have it in hwloc-nox")
    done = subprocess.run(
        [
            *(LSTOPO, "--if", "fsroot", "-i", folder, "--of", "xml", "--disallowed"),
            *("--export-xml-flags", "v1" if version == 1 else "none"),
        ],
        capture_output=True,
        check=True,
    )
    return done.stdout.decode("utf-8", "replace")


def what_is_planned(machine: Machine, *, nics: bool) -> object:
    """Each rank's cards, CPUs, memory nodes and maybe NICs, or the codes of why there is no plan."""
    try:
        plan = make_plan(machine, PlacementRequest())
    except ProblemsError as error:
        return sorted({problem.code for problem in error.problems})
    return [
        (rank.devices, rank.cpus, rank.memory_nodes, rank.cpu_nodes, rank.nics if nics else ())
        for service in plan.services
        for rank in service.ranks
    ]


def differences(ours: Machine, theirs: Machine) -> Iterator[str]:
    """The names of what two machines say differently."""
    for name in ("online_cpus", "offline_cpus", "cpu_nodes", "node_ids"):
        if getattr(ours, name) != getattr(theirs, name):
            yield name
    for name in ("core", "package", "die", "llc", "node"):
        if [getattr(row, name) for row in ours.cpus] != [getattr(row, name) for row in theirs.cpus]:
            yield name
    for name in ("kind", "memory_bytes", "distances"):
        if {node.id: getattr(node, name) for node in ours.nodes} != {
            node.id: getattr(node, name) for node in theirs.nodes
        }:
            yield name
    if [card.name for card in ours.accelerators] != [card.name for card in theirs.accelerators]:
        yield "cards"
    if [(nic.address, nic.ports) for nic in ours.nics if nic.rdma_names and not nic.is_virtual] != [
        (nic.address, nic.ports) for nic in theirs.nics if nic.rdma_names and not nic.is_virtual
    ]:
        yield "rdma"


def check_agreement(name: str, tree: MemoryRoot, folder: Path) -> None:
    """Checks that the XML of a tree is planned as the tree is, and differs where it may only."""
    write_tree(tree, folder)
    ours = discover(tree)
    for version in (1, 2):
        theirs = read_hwloc(lstopo(folder, version), "host.xml")
        nics = name not in NICS_DIFFER
        assert what_is_planned(theirs, nics=nics) == what_is_planned(ours, nics=nics)
        found = set(differences(ours, theirs))
        assert found <= DIFFERENCES.keys()
        assert ("llc" in found) == (name in LLC_DIFFERS)
        assert ("node_ids" in found) == (name in GPU_MEMORY_MISSING)
        assert ("memory_bytes" in found) == (name in MEMORY_DIFFERS)
        assert ("kind" in found) <= (name in KIND_DIFFERS)
        if "distances" in found:
            assert len(ours.nodes) == 1 or name in GPU_MEMORY_MISSING
        if "die" in found:
            assert version == 1 or {row.die for row in theirs.cpus} == {None}


@pytest.mark.parametrize("name", NAMES)
def test_recorded_machine(name: str, tree_path: Path) -> None:
    """The plan from the XML of a recorded machine, in either version, is that from its tree."""
    check_agreement(name, read_machine(name), tree_path)


@pytest.mark.parametrize("name", SAMPLES)
def test_sample(name: str, tree_path: Path) -> None:
    """The same of each sample."""
    check_agreement(name, build_tree(read_sample(name), with_masks=True), tree_path)


# Made by hand ------------------------------------------------------------------------------------

PUS = "".join(
    f"""
    <object type="Core" os_index="{core}" cpuset="0x{3 << 2 * core:x}">
     <object type="PU" os_index="{2 * core}" cpuset="0x{1 << 2 * core:x}"/>
     <object type="PU" os_index="{2 * core + 1}" cpuset="0x{2 << 2 * core:x}"/>
    </object>"""
    for core in range(4)
).split("\n    </object>")
CORES = [f"{core}</object>" for core in PUS[:4]]
CARD = (
    '<object type="PCIDev" pci_busid="0000:{0:02x}:00.0" pci_type="0302 [10de:2330] [0:0] a1">'
    "{1}</object>"
)


def xml(
    machine: str = "", first: str = "", second: str = "", end: str = "", *, version: str = "2.0"
) -> str:
    """The XML of a machine of two packages with a NUMA node, two cores and four PUs each.

    Args:
        machine: attributes of the machine.
        first: what else is in the first package.
        second: what else is in the second.
        end: what follows the machine.
        version: the format's.
    """
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="{version}">
 <object type="Machine" os_index="0" cpuset="0xff" complete_cpuset="0xff" nodeset="0x3" {machine}>
  <object type="Package" os_index="0" cpuset="0xf" nodeset="0x1">
   <object type="NUMANode" os_index="0" cpuset="0xf" nodeset="0x1" local_memory="1073741824"/>
   {first}{CORES[0]}{CORES[1]}
  </object>
  <object type="Package" os_index="1" cpuset="0xf0" nodeset="0x2">
   <object type="NUMANode" os_index="1" cpuset="0xf0" nodeset="0x2" local_memory="1073741824"/>
   {second}{CORES[2]}{CORES[3]}
  </object>
 </object>{end}
</topology>
"""


def notes_of(machine: Machine) -> str:
    """Everything that is odd about a machine."""
    return "\n".join(note.message for note in find_oddities(machine))


def test_cards_and_what_is_not_said() -> None:
    """Cards are planned where they hang; isolated CPUs, ceiling and drivers are told as not said."""
    nic = '<object type="OSDev" name="mlx5_3" osdev_type="3"/>'
    model = '<info name="GPUModel" value="H100"/>'
    gpu = f'<object type="OSDev" name="nvml0" osdev_type="5">{model}</object>'
    text = xml(
        first=f'<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[10-1f]">{CARD.format(17, "")}</object>',
        second='<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[20-2f]">'
        '<object type="Bridge" bridge_type="1-1" pci_busid="0000:20:01.0" pci_type="0604 [1000:c030] [0:0] 00">'
        + CARD.format(33, gpu)
        + f'<object type="PCIDev" pci_busid="0000:22:00.0" pci_type="0207 [15b3:1021] [0:0] 0">{nic}</object>'
        "</object></object>",
    )
    machine = read_hwloc(text, "host.xml")
    assert machine.is_this_system is False
    assert [card.model for card in machine.accelerators] == [None, "H100"]
    assert [function.host_bridge for function in machine.pci.values()][:1] == ["pci0000:10"]
    (service,) = make_plan(machine, PlacementRequest()).services
    assert [
        (str(rank.cpus), str(rank.memory_nodes), rank.node_sources, rank.nics)
        for rank in service.ranks
    ] == [("0-3", "0", ("numa_node",), ()), ("4-7", "1", ("numa_node",), ("mlx5_3",))]
    assert machine.isolated_cpus == machine.offline_cpus
    assert machine.ceiling.cpus is None
    assert "does not say which CPUs are isolated, nor what the root cgroup may use" in notes_of(
        machine
    )
    assert machine.sources == (("all of it", "host.xml, hwloc's XML of version 2"),)


def test_ids_that_hwloc_could_not_read() -> None:
    """An id of 0000 is none: a card of AMD's is one by its class, and nobody's device is nobody's card."""
    bridge = '<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[10-1f]">{}</object>'
    for ids, vendor, found in (("1002:0000", 0x1002, ["amd"]), ("0000:0000", None, [])):
        text = xml(first=bridge.format(CARD.format(17, "").replace("10de:2330", ids)))
        machine = read_hwloc(text, "x")
        assert [card.vendor for card in machine.accelerators] == found
        assert [(function.vendor, function.device) for function in machine.pci.values()] == [
            (vendor, None)
        ] * len(found)
        assert ("do not say their vendor" in notes_of(machine)) == (not found)


def test_driver_that_is_not_told() -> None:
    """The XML of a host whose driver is loaded does not say so, and neither does the note."""
    bridge = '<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[10-1f]">{}</object>'
    text = xml(first=bridge.format(CARD.format(17, "").replace("10de:2330", "1da3:1020")))
    notes = notes_of(read_hwloc(text.replace('pci_type="0302', 'pci_type="1200'), "x"))
    assert "hwloc's XML does not say which cards a driver holds" in notes
    assert "Look again with the driver loaded" not in notes


def test_ports_of_rdma_devices() -> None:
    """The ports that the XML tells the states of are the device's; without one they are unknown."""
    infos = '<info name="NodeGUID" value="x"/>' + "".join(
        f'<info name="Port{port}State" value="4"/><info name="Port{port}LID" value="0x1"/>'
        for port in (1, 2)
    )
    card = '<object type="PCIDev" pci_busid="0000:{:02x}:00.0" pci_type="0207 [15b3:1021] [0:0] 0">{}</object>'
    text = xml(
        first='<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[10-1f]">'
        + card.format(17, f'<object type="OSDev" name="mlx5_0" osdev_type="3">{infos}</object>')
        + card.format(18, '<object type="OSDev" name="mlx5_1" osdev_type="3"/>')
        + "</object>"
    )
    assert [nic.ports for nic in read_hwloc(text, "x").nics] == [((1, 2),), ((),)]


def test_ceiling_of_the_process_that_wrote_it() -> None:
    """Its allowed_cpuset is the ceiling within self, and none within root."""
    text = xml('allowed_cpuset="0x3c" allowed_nodeset="0x1"')
    own = read_hwloc(text, "host.xml", "self")
    assert (str(own.ceiling.cpus), str(own.ceiling.nodes)) == ("2-5", "0")
    assert own.ceiling.source == "host.xml: allowed_cpuset"
    assert read_hwloc(text, "host.xml").ceiling.cpus is None
    assert read_hwloc(xml('allowed_cpuset="0xf...f"'), "x", "self").ceiling.cpus is None


def test_cpus_that_are_not_in_it() -> None:
    """CPUs that are offline or were not allowed take no part, which is told; version 1 tells them apart."""
    machine = read_hwloc(xml().replace('complete_cpuset="0xff"', 'complete_cpuset="0xfff"'), "x")
    assert str(machine.offline_cpus) == ""
    assert "leaves out CPUs 8-11: they are offline, or the process that wrote it" in notes_of(
        machine
    )
    one = xml('online_cpuset="0x2ff"', version="1.0")
    machine = read_hwloc(one.replace('complete_cpuset="0xff"', 'complete_cpuset="0xfff"'), "x")
    assert str(machine.offline_cpus) == "8,10-11"
    assert "leaves out CPUs 9: they were not allowed" in notes_of(machine)


def test_nodes_that_share_cpus() -> None:
    """Of several nodes near the same CPUs the kernel's is that of plain memory; each kind is the XML's."""
    more = "".join(
        f'<object type="NUMANode" os_index="{node}" cpuset="0xf" local_memory="1024" subtype="{kind}">'
        f'<info name="PCIBusID" value="{card}"/></object>'
        for node, kind, card in ((2, "HBM", ""), (3, "GPUMemory", "0000:11:00.0"), (4, "NVM", ""))
    )
    bridge = '<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[10-1f]">'
    machine = read_hwloc(xml(first=more + bridge + CARD.format(17, "") + "</object>"), "x")
    assert [(node.id, str(node.cpus), node.kind) for node in machine.nodes] == [
        (0, "0-3", "dram"),
        (1, "4-7", "dram"),
        (2, "", "hbm"),
        (3, "", "gpu"),
        (4, "", "cxl"),
    ]
    assert str(machine.accelerators[0].memory_nodes) == "3"
    assert "CPUs 0-3 near several NUMA nodes" in notes_of(machine)
    (service,) = make_plan(machine, PlacementRequest()).services
    assert [str(rank.memory_nodes) for rank in service.ranks] == ["0"]


MATRIX = (
    '<distances2 type="NUMANode" nbobjs="2" kind="{kind}" indexing="os">'
    '<indexes length="4">{indexes}</indexes><u64values length="9">{values}</u64values></distances2>'
)


@pytest.mark.parametrize(
    "end, rows",
    [
        (
            MATRIX.format(kind=5, indexes="0 1", values="10 21 31 11"),
            [{0: 10, 1: 21}, {0: 31, 1: 11}],
        ),
        (
            MATRIX.format(kind=5, indexes="1 0", values="11 31 21 10"),
            [{0: 10, 1: 21}, {0: 31, 1: 11}],
        ),
        (MATRIX.format(kind=9, indexes="0 1", values="1 2 3 4"), [None, None]),
        (MATRIX.format(kind="²", indexes="0 1", values="1 2 3 4"), [None, None]),
        (MATRIX.format(kind="4" * 5000, indexes="0 1", values="1 2 3 4"), [None, None]),
        (MATRIX.format(kind=5, indexes="0", values="10"), [None, None]),
        ("", [None, None]),
    ],
)
def test_distances(end: str, rows: list[dict[int, int] | None]) -> None:
    """Distances are those of the matrix of latencies, in whatever order it has the nodes."""
    assert [node.distances for node in read_hwloc(xml(end=end), "x").nodes] == rows


def test_distances_of_version_1() -> None:
    """Version 1 writes them as parts of the smallest, in the order of the nodes."""
    values = "".join(f'<latency value="{one}"/>' for one in ("1.000000", "2.1", "2.100000", "1.0"))
    end = f'<distances nbobjs="2" relative_depth="1" latency_base="10.000000">{values}</distances>'
    machine = read_hwloc(xml(end=end, version="1.0"), "x")
    assert [node.distances for node in machine.nodes] == [{0: 10, 1: 21}, {0: 21, 1: 10}]


HOSTILE = {
    "no XML": ("cpu0 cpu1", ":1: is no XML: syntax error"),
    "cut short": (xml()[:900], "is no XML: unclosed token"),
    "not closed": (xml().removesuffix("</topology>\n"), "is no XML: no element found"),
    "other document": ("<svg/>", ":1: the document is a 'svg': expected lstopo's 'topology'"),
    "other version": (xml(version="3.0"), ":3: the format's version is '3.0': expected 1 or 2"),
    "no object": ('<topology version="2.0"/>', "describes no machine"),
    "two machines": (xml(end='<object type="Machine"/>'), "a second outermost object"),
    "no PU": (
        '<topology version="2.0">\n<object type="Machine"/></topology>',
        ":2: Machine: there is no PU in it",
    ),
    "entities that grow": (
        '<!DOCTYPE topology [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><topology>&b;</topology>',
        "the document type declares something",
    ),
    "entity of a file": (
        '<!DOCTYPE topology [\n<!ENTITY a SYSTEM "file:///etc/passwd">]><topology>&a;</topology>',
        "the document type declares something",
    ),
    "entity that nobody declares": (xml(end="&a;"), "there is an entity 'a': lstopo writes none"),
    "nested deep": ("<topology>" + "<object>" * 300, "elements are nested 257 deep"),
    "too many elements": ("<topology>" + "<a/>" * (1 << 19), "there are over 524288 elements"),
    "PU twice": (
        xml().replace('type="PU" os_index="7"', 'type="PU" os_index="6"'),
        "PU 6: is there twice: expected it once",
    ),
    "PU of a huge number": (
        xml().replace('type="PU" os_index="7"', 'type="PU" os_index="70000"'),
        "PU 70000: os_index is 70000: expected 0 to 65535",
    ),
    "PU without a number": (
        xml().replace('type="PU" os_index="7"', 'type="PU"'),
        "PU: os_index is absent: expected 0 to 65535",
    ),
    "number that is none": (
        xml().replace('os_index="7"', 'os_index="seven\x7f"'),
        "os_index is 'seven\\x7f': expected a number",
    ),
    "core that says other CPUs": (
        xml().replace(
            'type="Core" os_index="3" cpuset="0xc0"', 'type="Core" os_index="3" cpuset="0x40"'
        ),
        "Core 3: cpuset is '6', and its PUs are '6-7': expected the same",
    ),
    "mask that is none": (
        xml().replace(
            'type="NUMANode" os_index="1" cpuset="0xf0"',
            'type="NUMANode" os_index="1" cpuset="0-7"',
        ),
        ":16: NUMANode 1: cpuset is '0-7': expected a mask such as 0x0000ffff",
    ),
    "mask without end": (
        xml().replace('cpuset="0xff"', f'cpuset="0x{"f" * 20000}"', 1),
        "expected a mask",
    ),
    "node twice": (
        xml().replace('type="NUMANode" os_index="1"', 'type="NUMANode" os_index="0"'),
        "NUMANode 0: is there twice",
    ),
    "core on two nodes": (
        xml()
        .replace(
            'type="NUMANode" os_index="0" cpuset="0xf"', 'type="NUMANode" os_index="0" cpuset="0x7"'
        )
        .replace(
            'type="NUMANode" os_index="1" cpuset="0xf0"',
            'type="NUMANode" os_index="1" cpuset="0xf8"',
        ),
        "Core 1: its PUs are on NUMA nodes 0-1: expected one node for a core",
    ),
    "matrix cut short": (
        xml(end=MATRIX.format(kind=5, indexes="0 1", values="10 21 21")),
        "distances: there are 3 numbers: expected 4, for 2 NUMA nodes",
    ),
    "matrix of other nodes": (
        xml(end=MATRIX.format(kind=5, indexes="0 7", values="10 21 21 10")),
        "distances: indexes are '0 7': expected NUMA nodes, each once",
    ),
    "matrix of words": (
        xml(end=MATRIX.format(kind=5, indexes="0 1", values="10 far 21 10")),
        "distances: 'far' is no number such as 10",
    ),
    "card twice": (
        xml(first=CARD.format(17, ""), second=CARD.format(17, "")),
        "PCIDev 0000:11:00.0: is there twice",
    ),
    "card that is nowhere": (
        xml(first=CARD.format(17, "").replace("0000:11:00.0", "../../a")),
        "pci_busid is no PCI address such as 0000:1b:00.0",
    ),
    "device that leads out": (
        xml(first=CARD.format(17, '<object type="OSDev" name="../../x" osdev_type="2"/>')),
        "OSDev: name is '../../x': expected a device's",
    ),
    "device twice": (
        xml(first=CARD.format(17, '<object type="OSDev" name="a" osdev_type="2"/>' * 2)),
        "OSDev: 'a' is there twice",
    ),
    "cache without a level": (
        xml().replace(' type="Core"', ' type="L3Cache"', 1),
        "L3Cache 0: depth is absent: expected the cache's level",
    ),
    "none of its PUs online": (
        xml('online_cpuset="0x100"', version="1.0"),
        "Machine 0: online_cpuset is '8': expected one of the PUs 0-7 in it",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_xml(name: str) -> None:
    """What lstopo does not write, and what contradicts itself, is refused with the line and the object."""
    text, found = HOSTILE[name]
    with pytest.raises(InputError) as caught:
        read_hwloc(text, "bad.xml")
    assert found in caught.value.message
    assert caught.value.message.startswith("bad.xml:")
    assert caught.value.message.isprintable()


# The command line --------------------------------------------------------------------------------


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Topology, plan and render read an XML; it holds no files that a snapshot could be taken of."""
    path = tmp_path / "host.xml"
    path.write_text(xml(first=CARD.format(17, "")))
    assert run_command(["topology", "--hwloc", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_this_system"] is False
    assert run_command(["plan", "--hwloc", str(path)]) == 0
    assert "0     0     0000:11:00.0  0     0-3" in capsys.readouterr().out
    assert run_command(["render", "--hwloc", str(path), "--output", str(tmp_path / "units")]) == 0
    capsys.readouterr()
    assert run_command(["snapshot", "--hwloc", str(path)]) == 2
    assert "--hwloc holds no files of a machine" in capsys.readouterr().err


def test_standard_input() -> None:
    """An XML comes from a pipe, as lstopo writes one to it."""
    code = "from provisioner.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "topology", "--hwloc", "-"],
        input=xml(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 packages, 2 NUMA nodes, 4 cores, 8 CPUs (SMT 2), 0 cards" in done.stdout


def test_wrong_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A file that is no text, or is not there, ends in status 2."""
    (tmp_path / "a.xml").write_bytes(b"\xff\xfe<\0")
    for name, found in (("a.xml", "is no UTF-8 text"), ("none.xml", "can't be read")):
        assert run_command(["plan", "--hwloc", str(tmp_path / name)]) == 2
        assert found in capsys.readouterr().err
