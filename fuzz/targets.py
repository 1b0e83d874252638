"""What is fuzzed: each reader with what it must do with any bytes at all.

A target returns, or raises what is a failure. What a reader refuses it refuses by a ProvisionError of
one printable line; what it accepts it has to make sense of.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from provisioner.archive import pack_tree, unpack_tree
from provisioner.cardfs import parse_kfd_gpu
from provisioner.config import format_config, read_config
from provisioner.discovery import discover
from provisioner.errors import ProblemsError, ProvisionError
from provisioner.facts import (
    CardFacts,
    CgroupFacts,
    HostFacts,
    NicFacts,
    NodeFacts,
    PackageFacts,
    UbFacts,
    build_tree,
    read_facts,
)
from provisioner.fingerprint import machine_fingerprint
from provisioner.hostfs import (
    ENVIRONMENT,
    MANAGER,
    parse_banned,
    parse_is_virtual,
    parse_kernel,
    parse_manager_environment,
    parse_manager_keys,
    parse_shell,
    parse_variables,
)
from provisioner.hwloc import read_hwloc
from provisioner.idset import CpuSet, NodeSet
from provisioner.npu_smi import parse_npu_smi
from provisioner.numactl import parse_numactl
from provisioner.nvidia_smi import parse_topology
from provisioner.pci import PciAddress, parse_pci_address
from provisioner.planfile import format_plan, parse_plan
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.root import MemoryRoot
from provisioner.sizes import parse_size
from provisioner.snapshot import take_snapshot
from provisioner.sysfs import (
    parse_distances,
    parse_hex,
    parse_id,
    parse_int,
    parse_meminfo,
    parse_numa_status,
    parse_nvidia_information,
)
from provisioner.topology import Machine

Target = Callable[[bytes], None]

_GIB = 1 << 30
# Small, so that thousands are read in a second.
SMALL = build_tree(
    HostFacts(
        name="small",
        title="a small machine with a bit of everything",
        packages=(
            PackageFacts(cpus=CpuSet(range(8)), id=0),
            PackageFacts(cpus=CpuSet(range(8, 20)), id=1),
        ),
        nodes=(
            NodeFacts(id=0, cpus=CpuSet(range(8)), memory_bytes=_GIB, read_bandwidth=100),
            NodeFacts(id=1, cpus=CpuSet(range(8, 20)), memory_bytes=_GIB),
            NodeFacts(id=2, memory_bytes=_GIB),
        ),
        threads=2,
        sibling_stride=1,
        isolated_cpus=CpuSet([3]),
        offline_cpus=CpuSet([5]),
        numa_balancing=1,
        cgroups=(CgroupFacts(path="/a", cpus=CpuSet(range(6)), nodes=NodeSet([0])),),
        own_cgroup="/a",
        cards=(
            CardFacts(
                path=(PciAddress(0, 1, 1, 0), PciAddress(0, 2, 0, 0)),
                device=0x2330,
                numa_node=0,
                memory_node=2,
                model="made",
            ),
            CardFacts(
                path=(PciAddress(1, 1, 1, 0), PciAddress(1, 2, 0, 0)),
                device=0x2330,
                numa_node=1,
                model="made",
            ),
            *(
                CardFacts(
                    path=(PciAddress(2, 1, 1, 0), PciAddress(2, 2, number, 0)),
                    vendor=vendor,
                    device=device,
                    pci_class=pci_class,
                    numa_node=1,
                    model="made",
                    module=number,
                )
                for number, (vendor, device, pci_class) in enumerate(
                    (
                        (0x1002, 0x74A1, 0x120000),
                        (0x1D94, 0x6320, 0x0B4000),
                        (0x8086, 0x0BD5, 0x038000),
                        (0x1DA3, 0x1060, 0x120000),
                        (0x19E5, 0xD802, 0x120000),
                    )
                )
            ),
        ),
        ub_devices=(UbFacts(name="udma0", numa=0), UbFacts(name="bond0", entities=0)),
        nics=(
            NicFacts(
                path=(PciAddress(0, 1, 1, 0), PciAddress(0, 3, 0, 0)),
                numa_node=0,
                rdma=("mlx5_0",),
                net=("eth0",),
            ),
        ),
    )
)
_PATHS = sorted(SMALL.files)
_LINKS = sorted(SMALL.links)


@contextmanager
def refused() -> Iterator[None]:
    """Takes a refusal for what it should be: printable, and with an object in front."""
    try:
        yield
    except ProvisionError as error:
        for problem in error.problems:
            if not problem.message.isprintable():
                raise AssertionError(f"not printable: {problem.message!r}") from error


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _planned(machine: Machine) -> str:
    try:
        return format_plan(make_plan(machine, PlacementRequest()))
    except ProblemsError as error:
        return repr(error.problems)


def fuzz_archive(data: bytes) -> None:
    """A snapshot's bytes."""
    with refused():
        unpack_tree(data, "x")


def fuzz_tar(data: bytes) -> None:
    """What a snapshot unpacks to. One that is accepted is the same after another round."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    with refused():
        tree = unpack_tree(packer.compress(data) + packer.flush(), "x")
        again = unpack_tree(pack_tree(tree), "y")
        assert (again.files, again.links) == (tree.files, tree.links)
        machine = discover(tree)
        _planned(machine)


def fuzz_hwloc(data: bytes) -> None:
    """The XML of lstopo."""
    with refused():
        machine = read_hwloc(_text(data), "x")
        _planned(machine)
        read_hwloc(_text(data), "x", "self")


def fuzz_tree(data: bytes) -> None:
    """A machine some of whose files and links say something else; its snapshot is the same machine.

    The bytes are records of two bytes for a path, one for a length, and so many of text.
    """
    files, links = dict(SMALL.files), dict(SMALL.links)
    while len(data) > 3:
        at, size = int.from_bytes(data[:2], "big"), data[2]
        text = _text(data[3 : 3 + size])
        data = data[3 + size :]
        if at < 0xC000:
            files[_PATHS[at % len(_PATHS)]] = text
        elif at < 0xE000:
            files.pop(_PATHS[at % len(_PATHS)], None)
        elif at < 0xF000:
            links[_LINKS[at % len(_LINKS)]] = text
        elif text.isprintable():
            files["/".join(part for part in text.split("/") if part not in ("", ".", ".."))] = "1\n"
    files.pop("", None)
    root = MemoryRoot("x", files, links)
    with refused():
        machine = discover(root)
        planned = _planned(machine)
        snapshot = take_snapshot(root)
        if not snapshot.renamed:
            replayed = discover(unpack_tree(snapshot.data, "y"))
            assert _planned(replayed) == planned
            assert machine_fingerprint(replayed) == machine_fingerprint(machine)


def fuzz_plan_file(data: bytes) -> None:
    """A plan.json; one that is accepted is written as it was read."""
    with refused():
        plan = parse_plan(_text(data), "x")
        assert parse_plan(format_plan(plan), "x") == plan


def fuzz_config(data: bytes) -> None:
    """A provision.toml; what is accepted can be written and read again."""
    with refused():
        request = read_config(_text(data), "x")
        assert read_config(format_config(request), "x") == request


def fuzz_facts(data: bytes) -> None:
    """Facts in TOML; what is accepted is a tree that discovery reads."""
    with refused():
        facts = read_facts(_text(data), "x")
        discover(build_tree(facts))


def fuzz_texts(data: bytes) -> None:
    """Every parser of a kernel file's text."""
    text = _text(data)
    for parse in (
        CpuSet.parse_list,
        CpuSet.parse_mask,
        NodeSet.parse_list,
        parse_distances,
        parse_hex,
        parse_id,
        parse_int,
        parse_kfd_gpu,
        parse_is_virtual,
        parse_kernel,
        parse_manager_environment,
        parse_meminfo,
        parse_npu_smi,
        parse_numa_status,
        parse_numactl,
        parse_nvidia_information,
        parse_pci_address,
        parse_size,
        parse_topology,
        lambda text: parse_banned(f"IRQBALANCE_BANNED_CPUS={text}"),
        lambda text: parse_shell(text, ENVIRONMENT),
        lambda text: parse_variables(text, ENVIRONMENT),
        lambda text: parse_manager_keys(f"[Manager]\n{text}", MANAGER),
    ):
        with refused():
            parse(text)


TARGETS: Mapping[str, Target] = {
    target.__name__.removeprefix("fuzz_"): target
    for target in (
        fuzz_archive,
        fuzz_tar,
        fuzz_hwloc,
        fuzz_tree,
        fuzz_plan_file,
        fuzz_config,
        fuzz_facts,
        fuzz_texts,
    )
}
