"""Snapshots: what is in one, what is not, and that it is its machine."""

from __future__ import annotations

import io
import os
import posixpath
import pty
import re
import stat
import subprocess
import sys
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from provisioner.archive import MAX_ENTRIES, SCHEMA, pack_tree, unpack_tree
from provisioner.cli import run_command
from provisioner.discovery import discover
from provisioner.errors import InputError, ProblemsError, ReadError, WriteError
from provisioner.facts import CgroupFacts, HostFacts, UbFacts, build_tree
from provisioner.fingerprint import machine_fingerprint
from provisioner.idset import CpuSet, NodeSet
from provisioner.planfile import format_plan
from provisioner.planner import make_plan
from provisioner.recording import Recorded
from provisioner.request import PlacementRequest
from provisioner.root import DirectoryRoot, MemoryRoot, Root
from provisioner.samples import list_samples, read_sample
from provisioner.scrub import scrub
from provisioner.snapshot import list_snapshots, read_snapshot, save_snapshot, take_snapshot
from provisioner.topology import Machine
from provisioner.topology_report import topology_to_json
from tests.machines import extract, machine_names, read_machine, require_machines, unpack_machine
from tests.test_agreement import REFUSED
from tests.trees import CARD_IDS, host_facts, write_tree

NAMES = [name for name in machine_names() if name not in REFUSED] or ["none"]
SAMPLES = [sample.name for sample in list_samples()]


def what_is_planned(machine: Machine) -> str:
    """The text of the plan, or every reason why there is none."""
    try:
        return format_plan(make_plan(machine, PlacementRequest()))
    except ProblemsError as error:
        return "\n".join(str(problem) for problem in error.problems)


def check_equals_machine(root: Root) -> bytes:
    """Checks that a root's snapshot is the machine, whatever is asked of it. The snapshot."""
    data = take_snapshot(root).data
    for within in ("root", "self"):
        machine = discover(root, within)
        replayed = discover(unpack_tree(data, "a.tar.gz"), within)
        assert what_is_planned(replayed) == what_is_planned(machine)
        assert topology_to_json(replayed) == topology_to_json(machine)
    return data


@pytest.mark.parametrize("name", NAMES)
def test_recorded_machine(name: str) -> None:
    """The plan and the topology of a snapshot are its machine's, byte for byte; it names nobody."""
    assert identifiers_in(check_equals_machine(read_machine(name))) == []


# One of each kind: flat, many nodes, deep bridges, virtual functions, a cgroup, cgroup v1, offline CPUs.
ON_DISK = (
    "oci-bm-gpu-h100-8",
    "gb200-34nodes",
    "turin-nps4-4h200-distro",
    "32intel64-2p8co2t+8ve",
    "16amd64-4n4c-cgroup-distance-merge",
    "4fake-4gr1nu1pu",
    "16em64t-4s2c2t-offlines",
)


@pytest.mark.parametrize("name", ON_DISK)
def test_recorded_machine_in_a_folder(name: str, tmp_path: Path) -> None:
    """From a folder, a snapshot is the machine too, and the same bytes as from memory."""
    require_machines()
    data = check_equals_machine(DirectoryRoot(unpack_machine(name, tmp_path)))
    assert data == take_snapshot(read_machine(name)).data


@pytest.mark.parametrize("name", SAMPLES)
def test_sample(name: str, tmp_path: Path) -> None:
    """The same of each sample; from memory and from a folder, by whatever name, its bytes are the same."""
    tree = build_tree(read_sample(name))
    data = check_equals_machine(tree)
    assert identifiers_in(data) == []
    write_tree(tree, tmp_path / "other")
    assert take_snapshot(DirectoryRoot(tmp_path / "other")).data == data
    assert take_snapshot(unpack_tree(data, "x")).data == data


def test_this_system() -> None:
    """A snapshot of the running system is this system, except that it says that it is another."""
    data = take_snapshot(DirectoryRoot()).data
    live, replayed = discover(DirectoryRoot()), discover(unpack_tree(data, "a.tar.gz"))
    assert (live.is_this_system, replayed.is_this_system) == (True, False)
    assert what_is_planned(replayed) == what_is_planned(live)
    assert {**topology_to_json(replayed), "is_this_system": True} == topology_to_json(live)
    assert identifiers_in(data) == []
    # Its /dev holds nothing that is kept, as no made tree's does.
    assert take_snapshot(unpack_tree(data, "a.tar.gz")).data == data


def test_unpacked_snapshot_is_a_root(tmp_path: Path) -> None:
    """What any tar unpacks of a snapshot is read by --root as the machine."""
    snapshot = take_snapshot(build_tree(read_sample("grace-4gpu")))
    with tarfile.open(fileobj=io.BytesIO(snapshot.data)) as archive:
        extract(archive, tmp_path)
    assert topology_to_json(discover(DirectoryRoot(tmp_path))) == topology_to_json(
        discover(snapshot.tree)
    )


# What is not in one ------------------------------------------------------------------------------

_IDENTIFIERS = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    r"|(?<![0-9a-f:])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![0-9a-f:])"
    r"|[0-9a-f]{12}|serial|uuid|hostname",
    re.IGNORECASE,
)


def unpacked_text(data: bytes) -> str:
    """Everything that the archive holds: headers, names and contents."""
    return zlib.decompress(data, 31).replace(b"\0", b"\n").decode()


def identifiers_in(data: bytes) -> list[str]:
    """What in an archive looks like an identifier. Octal numbers of tar's headers and memory sizes are none."""
    lines = unpacked_text(data).splitlines()
    return [
        line
        for line in lines
        if _IDENTIFIERS.search(line)
        and not re.fullmatch(r"[0-7]{11}|ustar.*|.*MemTotal: +[0-9]+ kB", line)
    ]


SECRETS = (
    "4a1b0e1c",
    "1410922045817",
    "b83fd2aa0f11",
    "9803:9b03:0012:3456",
    "kube01",
    "kv-secret",
    "aa:bb:cc:dd:ee:ff",
    "vault",
    "0123456789abcdef",
    "PF2XYZ99",
    "e49d7ca37370",
    "user-1042",
)


def poisoned_tree() -> MemoryRoot:
    """A machine with identifiers wherever real ones have them, of cards, links, CPUs and containers."""
    facts = read_sample("uneven-5-3")
    own = "/user.slice/user-1042.slice/docker-e49d7ca37370aabbccddeeff00112233.scope"
    cgroup = CgroupFacts(path=own, cpus=CpuSet(range(16)), nodes=NodeSet([0]))
    tree = build_tree(replace(facts, cgroups=(cgroup,), own_cgroup=own))
    files, links = dict(tree.files), dict(tree.links)
    card = "sys/devices/" + links["sys/bus/pci/devices/0000:17:00.0"].partition("devices/")[2]
    (address,) = {
        path.split("/")[4] for path in files if path.startswith("proc/driver/nvidia/gpus/0000:17")
    }
    files[f"proc/driver/nvidia/gpus/{address}/information"] += (
        "GPU UUID: \t GPU-4a1b0e1c-0000-4000-8000-b83fd2aa0f11\nGPU Serial: 1410922045817\n"
    )
    files |= {
        f"{card}/serial_number": "1410922045817\n",
        "sys/class/dmi/id/product_uuid": "4a1b0e1c-0000-4000-8000-b83fd2aa0f11\n",
        "sys/class/dmi/id/product_serial": "PF2XYZ99\n",
        "sys/class/infiniband/mlx5_9/node_guid": "9803:9b03:0012:3456\n",
        "sys/class/net/veth0123456789abcdef/address": "aa:bb:cc:dd:ee:ff\n",
        "proc/sys/kernel/hostname": "kube01\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: made\nSerial\t\t: 1410922045817\n",
        "proc/self/mounts": files["proc/self/mounts"]
        + "//vault/kv-secret /mnt/kube01 cifs rw,username=vault 0 0\n"
        + "cgroup2 /srv/kube01/sys/fs/cgroup cgroup2 rw 0 0\n",
        "proc/meminfo": files["proc/meminfo"] + "HardwareCorrupted: 1410922045817 kB\n",
    }
    return MemoryRoot("poisoned", files, links)


def test_nothing_tells_whose_machine_it_is() -> None:
    """No serial number, UUID, MAC address, GUID, host name, mount or container is in a snapshot."""
    tree = poisoned_tree()
    everything = "".join([*tree.files, *tree.files.values(), *tree.links])
    assert [secret for secret in SECRETS if secret not in everything] == []
    text = unpacked_text(check_equals_machine(tree))
    assert dict(take_snapshot(tree).renamed) == {}
    assert [secret for secret in SECRETS if secret in text] == []


VENDORS_SECRETS = (
    "4815162342108151623",
    "692231000042",
    "b83fd2aa0f11",
    "4a1b0e1c-0000",
    "kube01-rack",
    "PCB0815",
)


def poisoned_vendors() -> MemoryRoot:
    """A machine with a card of every other vendor, and identifiers where their drivers have them."""
    facts = read_sample("uneven-5-3")
    cards = tuple(
        replace(
            card,
            vendor=CARD_IDS[vendor][0],
            device=CARD_IDS[vendor][1],
            pci_class=CARD_IDS[vendor][2],
            module=6 if vendor == "habana" else None,
            partitions=2 if vendor == "amd" else 1,
            model="Made" if vendor == "amd" else "",
        )
        for card, vendor in zip(
            facts.cards,
            ("amd", "amd", "hygon", "intel", "habana", "habana", "ascend"),
            strict=False,
        )
    )
    made = build_tree(replace(facts, cards=cards, ub_devices=()))
    files, links = dict(made.files), dict(made.links)
    for path in made.files:
        folder = posixpath.dirname(path)
        if path.endswith("/properties"):
            files[path] += "unique_id 4815162342108151623\nname kube01-rack\n"
            files |= {f"{folder}/gpu_id": "692231000042\n", f"{folder}/name": "kube01-rack\n"}
        elif path.endswith("/product_name"):
            files |= {
                f"{folder}/{leaf}": "PCB0815-692231000042\n"
                for leaf in ("serial_number", "fru_id", "product_number")
            }
        elif path.endswith("/pci_addr"):
            files |= {
                f"{folder}/{leaf}": "4a1b0e1c-0000-4000-8000-b83fd2aa0f11\n"
                for leaf in ("uuid", "infineon_ver")
            }
    second = next(path for path in sorted(files, reverse=True) if path.endswith("/product_name"))
    files[second] = "Made b83fd2aa0f11\n"
    # A driver of before Linux 6.2, whose device lies beside the bus and says its function itself.
    gaudi = next(path for path in files if path.endswith("/pci_addr"))
    files |= {
        "sys/class/habanalabs/hl7/device/pci_addr": files[gaudi],
        "sys/class/habanalabs/hl7/device/module_id": "3\n",
        "sys/class/ubcore/bond_b83fd2aa0f11/device/ub_totalues": "1\n",
        "sys/class/ubcore/bond_b83fd2aa0f11/eid": "4a1b0e1c-0000\n",
        "dev/davinci_manager-kube01-rack": "",
    }
    del files[gaudi]
    del links[next(path for path in links if path.startswith("sys/class/accel/"))]
    return MemoryRoot("poisoned", files, links)


def test_nothing_of_vendors_tells_whose_machine_it_is() -> None:
    """No serial number, unique id, UUID or name of a vendor's driver is in a snapshot; the cards are."""
    tree = poisoned_vendors()
    everything = "".join([*tree.files, *tree.files.values()])
    assert [secret for secret in VENDORS_SECRETS if secret not in everything] == []
    snapshot = take_snapshot(tree)
    text = unpacked_text(snapshot.data)
    assert [secret for secret in VENDORS_SECRETS if secret in text] == []
    machine, replayed = discover(tree), discover(snapshot.tree)
    assert {card.vendor for card in machine.accelerators} == CARD_IDS.keys() - {"nvidia"}
    # A product's name is kept, unless it holds an identifier.
    models = [card.model for card in machine.accelerators if card.vendor == "amd"]
    assert sorted(map(str, models)) == ["Made", "Made b83fd2aa0f11"]
    without = [
        replace(card, model=None) if card.model == "Made b83fd2aa0f11" else card
        for card in machine.accelerators
    ]
    assert replayed.accelerators == tuple(without)
    assert replayed.nics == machine.nics
    assert what_is_planned(replayed) == what_is_planned(machine)


@pytest.mark.parametrize("name", ["mi300x-8gpu", "gaudi-8card", "ascend-8npu"])
def test_machine_whose_bus_is_hidden(name: str) -> None:
    """Cards that are known from their driver's topology or from /dev alone are in a snapshot too."""
    tree = build_tree(read_sample(name))
    hidden = MemoryRoot(
        "hidden",
        {path: text for path, text in tree.files.items() if "/pci" not in path},
        {path: to for path, to in tree.links.items() if "/pci" not in path and "/pci" not in to},
    )
    check_equals_machine(hidden)
    cards = 0 if name == "gaudi-8card" else 8  # which nothing but the bus shows
    assert len(discover(hidden).accelerators) == cards


def test_what_is_odd_is_told_alike_wherever_it_is_read() -> None:
    """A plan's notes name no path of the root, so that a snapshot's are the machine's."""
    tree = build_tree(read_sample("uneven-5-3"))
    path = next(path for path in sorted(tree.files) if path.endswith("0000:17:00.0/numa_node"))
    check_equals_machine(MemoryRoot("odd", {**tree.files, path: "9\n"}, tree.links))


def test_npu_of_many_digits() -> None:
    """An NPU's name on the unified bus is its numbers, and is kept however long they are."""
    facts = read_sample("ascend-8npu")
    devices = tuple(UbFacts(name=f"udmaC11{number}d10e100", numa=0) for number in range(4))
    tree = build_tree(replace(facts, cards=(), ub_devices=devices))
    assert [card.source for card in discover(tree).accelerators] == ["ubcore"] * 4
    check_equals_machine(tree)


@given(host_facts())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_machine(facts: HostFacts) -> None:
    """The snapshot of any machine is the machine, and holds nothing that looks like an identifier."""
    assert identifiers_in(check_equals_machine(build_tree(facts))) == []


def net_device(tree: MemoryRoot, kind: str, name: str, way: str = "") -> MemoryRoot:
    """The tree with one more device on the function of its first NIC."""
    old = next(path for path in tree.links if path.startswith("sys/class/infiniband/"))
    folder = posix_join("sys/class/infiniband", tree.links[old]).rpartition("/infiniband/")[0]
    links = {
        **tree.links,
        f"sys/class/{kind}/{name}": f"../../{folder.removeprefix('sys/')}/{kind}/{name}",
        f"{folder}/{kind}/{name}/device": f"../../../{folder.rpartition('/')[2]}",
    }
    return MemoryRoot("made", {**tree.files, "proc/sys/kernel/hostname": "kube01\n"}, links)


def posix_join(folder: str, target: str) -> str:
    """Where a link in a folder leads."""
    return posixpath.normpath(posixpath.join(folder, target))


@pytest.mark.parametrize(
    "kind, name",
    [("net", "enxb83fd2aa0f11"), ("infiniband", "rocexb83fd2aa0f11"), ("net", "kube01-data")],
)
def test_device_named_by_an_identifier(kind: str, name: str) -> None:
    """A device that is named by its MAC address, its GUID or its host has another name in a snapshot."""
    tree = net_device(build_tree(read_sample("two-socket-8gpu")), kind, name)
    snapshot = take_snapshot(tree)
    assert dict(snapshot.renamed) == {name: "renamed0"}
    assert name not in unpacked_text(snapshot.data)
    replayed, machine = discover(snapshot.tree), discover(tree)
    assert replayed.pci == machine.pci
    names = {one for nic in replayed.nics for one in (*nic.rdma_names, *nic.net_names)}
    assert "renamed0" in names


def test_guid_on_the_way_to_a_card() -> None:
    """On Azure a card's path goes through the GUID of a VMBus device; its bridges are still known."""
    guid = "47505500-0001-0001-3130-444531334632"
    tree = build_tree(read_sample("two-socket-8gpu"))
    files = {vmbus(path, guid): text for path, text in tree.files.items()}
    links = {vmbus(path, guid): vmbus(target, guid) for path, target in tree.links.items()}
    moved = MemoryRoot("azure", files, links)
    snapshot = take_snapshot(moved)
    assert guid not in unpacked_text(snapshot.data)
    assert dict(snapshot.renamed) == {}
    assert discover(snapshot.tree).pci == discover(moved).pci == discover(tree).pci


def vmbus(path: str, guid: str) -> str:
    """The path with a VMBus device above each host bridge."""
    return re.sub(r"devices/(pci[0-9a-f]{4}:)", rf"devices/VMBUS:01/{guid}/\1", path)


def test_volatile_numbers_are_left_out() -> None:
    """Free memory changes from moment to moment; the snapshot of a machine does not."""
    tree = build_tree(read_sample("two-socket-8gpu"))
    later = {path: text.replace("MemFree:   ", "MemFree: 99") for path, text in tree.files.items()}
    assert later != dict(tree.files)
    assert take_snapshot(MemoryRoot("later", later, tree.links)).data == take_snapshot(tree).data


def test_who_takes_it_makes_no_difference() -> None:
    """Processes under the same cpuset take the same snapshot, whatever their cgroups are called."""
    facts = read_sample("uneven-5-3")
    cgroups = (
        CgroupFacts(path="/", cpus=CpuSet(range(100))),
        CgroupFacts(path="/system.slice/cpus", cpus=CpuSet(range(8))),
    )
    limited, free = (
        [
            take_snapshot(build_tree(replace(facts, cgroups=cgroups, own_cgroup=own))).data
            for own in group
        ]
        for group in (
            ("/system.slice/cpus", "/system.slice/cpus/a.service", "/system.slice/cpus/b/c"),
            ("/", "/user.slice/user-7.slice/session-3.scope", "/system.slice"),
        )
    )
    assert len(set(limited)) == len(set(free)) == 1
    assert str(discover(unpack_tree(limited[0], "x"), "self").ceiling.cpus) == "0-7"
    assert str(discover(unpack_tree(free[0], "x"), "self").ceiling.cpus) == "0-99"


def test_named_cgroup_is_kept() -> None:
    """--within takes a cgroup into the snapshot by its name; the own one has another."""
    facts = read_sample("uneven-5-3")
    cgroups = (
        CgroupFacts(path="/work.slice/a", cpus=CpuSet(range(8))),
        CgroupFacts(path="/work.slice/b", cpus=CpuSet(range(4))),
    )
    tree = build_tree(replace(facts, cgroups=cgroups, own_cgroup="/work.slice/b"))
    snapshot = take_snapshot(tree, "work.slice/a")
    replayed = unpack_tree(snapshot.data, "x")
    assert str(discover(replayed, "work.slice/a").ceiling.cpus) == "0-7"
    assert str(discover(replayed, "self").ceiling.cpus) == "0-3"
    assert "work.slice/b" not in unpacked_text(snapshot.data)
    with pytest.raises(InputError, match=r"--within 'work.slice/b': there is no such cgroup"):
        discover(replayed, "work.slice/b")


def test_text_without_a_rule_is_refused() -> None:
    """A file that nobody has looked through for identifiers goes into no snapshot."""
    for text in ("free text\n", "0c:42:a1:b2:c3:d4\n", "1410922045817\n"):
        recorded = Recorded({"sys/class/new/thing": text}, {}, {})
        with pytest.raises(ReadError, match=r"^sys/class/new/thing: there may be anything in it"):
            scrub(MemoryRoot("made", {}), recorded, "x")


# Reading one back --------------------------------------------------------------------------------

Member = tuple[str, bytes, str]  # path, kind, text or target


def tar_of(
    *members: Member, first: Member = ("provision-snapshot", b"0", f"{SCHEMA}\n"), **fields: int
) -> bytes:
    """A compressed tar of these members; `fields` are set on the last."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, kind, text in (first, *members):
            member = tarfile.TarInfo(path)
            member.type = kind
            data = b"" if kind in (b"1", b"2") else text.encode("latin-1")
            member.linkname = text if kind in (b"1", b"2") else ""
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return gzip(stream.getvalue())


def gzip(data: bytes) -> bytes:
    """The data compressed."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


def edited(old: bytes, new: bytes, members: tuple[Member, ...] = (("a", b"0", "x"),)) -> bytes:
    """A small archive with some bytes of its tar replaced."""
    data = zlib.decompress(tar_of(*members), 31)
    assert len(old) == len(new)
    assert old in data
    return gzip(data.replace(old, new))


LONG = "/".join(["sys", *["d" * 60] * 3, "leaf"])
HOSTILE: Mapping[str, tuple[bytes, str]] = {
    "path upwards": (tar_of(("../a", b"0", "x")), "leads out of the archive"),
    "path upwards within": (tar_of(("sys/../../a", b"0", "x")), "leads out of the archive"),
    "absolute path": (edited(b"a\0", b"/\0"), "leads out of the archive"),
    "path of dots": (tar_of(("sys/./a", b"0", "x")), "leads out of the archive"),
    "empty part": (tar_of(("sys//a", b"0", "x")), "leads out of the archive"),
    "name to act on a terminal": (tar_of(("a\x1b[31m", b"0", "x")), "is no name"),
    "letter beyond ASCII": (tar_of(("a\xe9", b"0", "x")), "is no name"),
    "link upwards": (tar_of(("a", b"2", "../b")), "link 'a' leads out of the archive, to '../b'"),
    "link to the root": (tar_of(("a", b"2", "/etc/passwd")), "leads out of the archive"),
    "empty link": (tar_of(("a", b"2", "")), "link 'a' leads out of the archive, to ''"),
    "hard link": (tar_of(("a", b"1", "provision-snapshot")), "is a hard link: expected a file"),
    "character device": (tar_of(("a", b"3", "")), "'a': is a device: expected a file"),
    "block device": (tar_of(("a", b"4", "")), "is a device"),
    "fifo": (tar_of(("a", b"6", "")), "is a fifo"),
    "sparse file": (tar_of(("a", b"S", "x" * 512)), "is a sparse file"),
    "long name of GNU tar": (tar_of(("a", b"L", "b")), "is a long name of GNU tar"),
    "global header": (tar_of(("a", b"g", "30 path=b\n")), "is a header for all that follows"),
    "unknown kind": (tar_of(("a", b"Z", "")), "is of an unknown kind"),
    "extended header of a size": (
        edited(b" path=", b" size=", ((LONG, b"0", "x"),)),
        "an extended header of more than long names",
    ),
    "extended header of a wrong length": (
        tar_of(("a", b"x", "99 path=b\n"), ("a", b"0", "x")),
        "an extended header of more than long names",
    ),
    "two extended headers": (
        tar_of(("a", b"x", "9 path=a\n"), ("a", b"x", "9 path=a\n"), ("b", b"0", "")),
        "a second header of long names",
    ),
    "extended header at the end": (tar_of(("a", b"x", "9 path=a\n")), "goes on after its end"),
    "extended header upwards": (
        tar_of(("a", b"x", "13 path=../b\n"), ("a", b"0", "x")),
        "leads out of the archive",
    ),
    "file twice": (tar_of(("a", b"0", "x"), ("a", b"0", "y")), "entry 'a' is there twice"),
    "link over a file": (tar_of(("a", b"0", "x"), ("a", b"2", "b")), "entry 'a' is there twice"),
    "schema twice": (
        tar_of(("provision-snapshot", b"0", f"{SCHEMA}\n"), ("provision-snapshot", b"0", "")),
        "is there twice",
    ),
    "file below a file": (
        tar_of(("a", b"0", "x"), ("a/b", b"0", "y")),
        "entries below 'a', which is no folder",
    ),
    "file below a link": (
        tar_of(("a", b"2", "b"), ("a/c", b"0", "y")),
        "entries below 'a', which is no folder",
    ),
    "folder with data": (
        edited(b"00000000000\0", b"00000001000\0", (("a", b"5", ""),)),
        "has data",
    ),
    "binary file": (tar_of(("a", b"0", "\xff\xfe")), "entry 'a' is no text: byte 0 is 0xff"),
    "other schema": (
        tar_of(first=("provision-snapshot", b"0", "provision.snapshot/2\n")),
        "schema is 'provision.snapshot/2', expected 'provision.snapshot/1'",
    ),
    "no schema": (
        tar_of(first=("sys/a", b"0", "x")),
        "its first entry is not 'provision-snapshot'",
    ),
    "schema that is a link": (tar_of(first=("provision-snapshot", b"2", "a")), "its first entry"),
    "empty": (b"", "is empty"),
    "no gzip": (b"sys/devices/system/cpu", "is no snapshot: it is not compressed by gzip"),
    "gzip of nothing": (gzip(b""), "it has no end of archive"),
    "gzip of text": (gzip(b"x" * 1024), "is none of tar's"),
    "cut short": (tar_of(("a", b"0", "x"))[:-9], "it ends within the compressed data"),
    "wrong checksum": (tar_of(("a", b"0", "x"))[:-8] + bytes(8), "incorrect data check"),
    "two archives": (tar_of(("a", b"0", "x")) * 2, "bytes after its end"),
    "second tar after the first": (
        gzip(zlib.decompress(tar_of(("a", b"0", "x")), 31) + b"x" * 512),
        "goes on after its end of archive",
    ),
    "tar cut short in a file": (
        gzip(zlib.decompress(tar_of(("a", b"0", "x" * 2000)), 31)[:2000]),
        "is cut short",
    ),
    "size that is no number": (
        edited(b"00000000001\0", b"0000000000z\0"),
        "its size is no octal number",
    ),
    "size below zero": (edited(b"00000000001\0", b"-0000000001\0"), "its size is no octal number"),
    "size in base 256": (
        edited(b"00000000001\0", b"\x80" + bytes(11)),
        "its size is no octal number",
    ),
    "size beyond the end": (edited(b"00000000001\0", b"77777777777\0"), "is cut short"),
    "GNU tar": (edited(b"ustar\00000", b"ustar  \0"), "is none of tar's"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archive(name: str) -> None:
    """What no snapshot holds is refused with the archive's name, and in printable words."""
    data, found = HOSTILE[name]
    with pytest.raises(ReadError) as caught:
        unpack_tree(data, "bad.tar.gz")
    assert found in caught.value.message
    assert caught.value.message.startswith("bad.tar.gz: ")
    assert caught.value.message.isprintable()


def test_snapshot_goes_where_a_shell_would_send_it(tmp_path: Path) -> None:
    """A link's target is written, a device and a fifo are written into, and neither becomes a file."""
    root = build_tree(read_sample("uneven-5-3"))
    data = take_snapshot(root).data
    (tmp_path / "link").symlink_to("real")
    save_snapshot(data, tmp_path / "link")
    assert (tmp_path / "real").read_bytes() == data
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(["cat", tmp_path / "fifo"], stdout=subprocess.PIPE) as reader:
        save_snapshot(data, tmp_path / "fifo")
        assert reader.stdout is not None
        assert reader.stdout.read() == data
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    # As a shell's >(command) and /dev/stdout give it: a path below /proc that leads to a pipe.
    reading, writing = os.pipe()
    save_snapshot(data, f"/proc/self/fd/{writing}")
    os.close(writing)
    with open(reading, "rb") as stream:
        assert stream.read() == data
    (tmp_path / "real").chmod(0o600)
    save_snapshot(data, tmp_path / "real")
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o600
    (tmp_path / "device").symlink_to("/dev/full")
    with pytest.raises(WriteError, match="No space left"):
        save_snapshot(data, tmp_path / "device")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_too_many_entries() -> None:
    """An archive of more entries than any machine's is refused."""
    plain = zlib.decompress(tar_of(("a", b"5", "")), 31)
    start, header = plain[:1024], plain[1024:1536]
    folders = (b"d%07d" % number + header[8:] for number in range(MAX_ENTRIES))
    with pytest.raises(ReadError, match=f"x: has over {MAX_ENTRIES} entries"):
        unpack_tree(gzip(start + b"".join(folders) + bytes(1024)), "x")


def test_gigabytes_of_zeros() -> None:
    """An archive that unpacks to far more than a snapshot is refused before it fills the memory."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    zeros = bytes(1 << 22)
    bomb = b"".join([packer.compress(zeros) for _ in range(256)] + [packer.flush()])
    assert len(bomb) < 2 << 20
    tracemalloc.start()
    try:
        with pytest.raises(ReadError, match="bytes when unpacked: no snapshot is"):
            unpack_tree(bomb, "bomb")
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


def test_links_in_circles_are_told_when_followed() -> None:
    """Links in circles lead nowhere, and are refused by whoever follows them."""
    tree = unpack_tree(tar_of(("a", b"2", "b"), ("b", b"2", "a")), "x")
    with pytest.raises(ReadError, match="too many links"):
        tree.read("a")


def test_tree_and_archive_are_the_same() -> None:
    """Files, links, empty folders and long names go through an archive unchanged."""
    deep = "/".join(["d" * 50] * 6)
    tree = MemoryRoot("x", {"a/b": "1\n", f"{deep}/f": "é"}, {"a/l": f"../{deep}"}, ["e/f"])
    found = unpack_tree(pack_tree(tree), "y")
    assert dict(found.files) == dict(tree.files)
    assert dict(found.links) == dict(tree.links)
    assert found.empty_folders == ["e/f"]
    assert found.read("a/l/f") == "é"


# Files -------------------------------------------------------------------------------------------


def test_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A snapshot takes the place of an older one at once; where it can't, the older one stays."""
    file = tmp_path / "s.tar.gz"
    save_snapshot(b"old", file)
    save_snapshot(b"new", file)
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [file]
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "folder", tmp_path / "none" / "s.tar.gz"):
        with pytest.raises(WriteError, match="can't be written"):
            save_snapshot(b"x", place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "s.tar.gz"]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    "make, found",
    [
        (lambda path: None, "can't be read: No such file or directory"),
        (Path.mkdir, "can't be read: Is a directory"),
        (make_fifo, "is empty"),
        (make_huge, "bytes: no snapshot is"),
        (Path.touch, "is empty"),
    ],
)
def test_no_snapshot(make: Callable[[Path], None], found: str, tmp_path: Path) -> None:
    """What is no file of a snapshot's size is told, and not waited for."""
    path = tmp_path / "s"
    make(path)
    with pytest.raises(ReadError, match=found):
        read_snapshot(path)


def test_folders_are_listed_in_order(tmp_path: Path) -> None:
    """A folder stands for the files in it, sorted; a file and what is not there for themselves."""
    for name in ("b", "a"):
        (tmp_path / name).touch()
    (tmp_path / "c").mkdir()
    assert list_snapshots([str(tmp_path), "none"]) == [f"{tmp_path}/a", f"{tmp_path}/b", "none"]


# The command line --------------------------------------------------------------------------------

Capture = pytest.CaptureFixture[str]
PROVISION = (sys.executable, "-c", "from provisioner.cli import main; main()")


def test_every_reading_command_reads_a_snapshot(capsys: Capture, tmp_path: Path) -> None:
    """Topology, plan and render say of a snapshot what they say of its machine."""
    write_tree(build_tree(read_sample("nps4-8gpu")), tmp_path / "tree")
    file = tmp_path / "s.tar.gz"
    tree = ("--root", str(tmp_path / "tree"))
    assert run_command(["snapshot", *tree, "-o", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{file}: ")
    assert f"fingerprint {machine_fingerprint(discover(read_snapshot(file)))}" in said
    for command in (["topology", "--json"], ["plan", "--json"], ["plan"], ["render", "--stdout"]):
        assert run_command([*command, *tree]) == 0
        told = capsys.readouterr().out
        assert run_command([*command, "--snapshot", str(file)]) == 0
        assert capsys.readouterr().out == told
    units = tmp_path / "units"
    assert run_command(["render", *tree, "--output", str(units)]) == 0
    assert run_command(["render", "--snapshot", str(file), "--check", str(units)]) == 0


def test_verbose_names_the_file_and_the_entry(capsys: Capture, tmp_path: Path) -> None:
    """Where a fact came from is said by the snapshot's file and the path in it."""
    file = tmp_path / "s.tar.gz"
    assert run_command(["snapshot", "--sample", "uneven-5-3", "-o", str(file)]) == 0
    assert run_command(["topology", "--snapshot", str(file), "--verbose"]) == 0
    assert f"online CPUs: {file}:/sys/devices/system/cpu/online" in capsys.readouterr().out


def test_pipes() -> None:
    """With -o - the snapshot goes to a pipe, which --snapshot - reads, and never onto a terminal."""
    done = subprocess.run(
        [*PROVISION, "snapshot", "--sample", "uneven-5-3", "-o", "-"],
        capture_output=True,
        check=True,
    )
    assert done.stdout == take_snapshot(build_tree(read_sample("uneven-5-3"))).data
    assert done.stderr == b""
    planned = [
        subprocess.run(
            [*PROVISION, "plan", *where, "--json"],
            input=done.stdout,
            capture_output=True,
            check=True,
        )
        for where in (("--snapshot", "-"), ("--sample", "uneven-5-3"))
    ]
    assert planned[0].stdout == planned[1].stdout
    ours, theirs = pty.openpty()
    refused = subprocess.run(
        [*PROVISION, "snapshot", "--sample", "uneven-5-3", "-o", "-"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(theirs)
    os.close(ours)
    assert refused.returncode == 2
    assert "would go to the terminal" in refused.stderr


def test_renamed_devices_are_told(capsys: Capture, tmp_path: Path) -> None:
    """Whoever takes a snapshot is told which devices have another name in it."""
    tree = net_device(build_tree(read_sample("two-socket-8gpu")), "net", "enxb83fd2aa0f11")
    write_tree(tree, tmp_path / "tree")
    assert (
        run_command(["snapshot", "--root", str(tmp_path / "tree"), "-o", str(tmp_path / "s")]) == 0
    )
    assert "'enxb83fd2aa0f11' holds an identifier in its name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, found",
    [
        (["topology", "--snapshot", "none"], "none: can't be read: No such file or directory"),
        (
            ["plan", "--snapshot", "none", "--sample", "x"],
            "--sample and --snapshot exclude each other",
        ),
        (["plan", "--snapshot", "a", "--hwloc", "b"], "--snapshot and --hwloc exclude each other"),
        (["snapshot", "--within", "none.slice"], "there is no such cgroup"),
        (["snapshot", "--within", "docker-e49d7ca37370aabb.scope"], "holds an identifier"),
    ],
)
def test_wrong_input(capsys: Capture, arguments: list[str], found: str) -> None:
    """Wrong usage and wrong input end in status 2, and leave no file."""
    assert run_command(arguments) == 2
    assert found in capsys.readouterr().err
    assert not Path("snapshot.tar.gz").exists()
