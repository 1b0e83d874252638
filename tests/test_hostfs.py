"""What a host is set to, read from its files, and the same from its snapshot."""

from __future__ import annotations

import gzip
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.archive import unpack_tree
from provisioner.discovery import discover
from provisioner.errors import ParseError
from provisioner.facts.values import NicFacts
from provisioner.hostfs import (
    parse_assignments,
    parse_banned,
    parse_is_virtual,
    parse_kernel,
    parse_manager_environment,
    parse_manager_keys,
    read_settings,
)
from provisioner.idset import CpuSet
from provisioner.pci import parse_pci_address
from provisioner.root import DirectoryRoot, MemoryRoot
from provisioner.settings import NOTHING_KNOWN, HostSettings, HugePages, Setting
from provisioner.snapshot import take_snapshot
from tests.hosts import make_tree
from tests.trees import add_files

CARD = parse_pci_address("0000:11:00.0")
NIC = parse_pci_address("0000:12:00.0")


def tree(files: dict[str, str], *folders: str) -> MemoryRoot:
    """A host with a card and a network device below one bridge, and more files."""
    nic = NicFacts(
        path=(parse_pci_address("0000:10:01.0"), NIC), numa_node=0, rdma=("mlx5_0",), net=("ib0",)
    )
    host = make_tree({0: "0-3", 1: "4-7"}, [("0000:11:00.0", 0)], nics=(nic,))
    return add_files(host, files, folders)


def settings_of(root: MemoryRoot) -> HostSettings:
    """What the host is set to."""
    return read_settings(root, discover(root))


def irq(number: int, cpus: str, address: str = str(CARD)) -> dict[str, str]:
    """The files of an interrupt."""
    return {
        f"sys/bus/pci/devices/{address}/msi_irqs/{number}": "msix\n",
        f"proc/irq/{number}/effective_affinity_list": f"{cpus}\n",
        f"proc/irq/{number}/smp_affinity_list": "0-7\n",
    }


FULL = {
    **irq(40, "3"),
    **irq(41, "0-1"),
    **irq(50, "5", str(NIC)),
    "etc/environment": 'PATH=/bin\nCUDA_DEVICE_ORDER="FASTEST_FIRST"\n',
    "etc/profile.d/mpi.sh": "# MPI\nif true; then\n  export I_MPI_PIN=1 # here\nfi\n",
    "etc/profile.d/README": "OMP_PLACES=cores\n",
    "etc/systemd/system.conf": "[Manager]\nLogLevel=info\nCPUAffinity=0-3\n",
    "usr/lib/systemd/system.conf": "[Manager]\nNUMAPolicy=bind\n",
    "etc/systemd/system.conf.d/50-gpu.conf": (
        '[Manager]\nDefaultEnvironment="OMP_PROC_BIND=close" PATH=/bin\n[Other]\nCPUAffinity=9\n'
    ),
    "etc/default/irqbalance": 'IRQBALANCE_ONESHOT=1\nIRQBALANCE_BANNED_CPULIST="4-7"\n',
    "sys/devices/system/cpu/smt/control": "on\n",
    "proc/cpuinfo": "processor : 0\nflags\t\t: fpu hypervisor sse\n",
    "proc/sys/kernel/osrelease": "6.1.0-44-amd64\n",
    "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages": "512\n",
    "sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages": "0\n",
    "sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages": "0\n",
}
FOLDERS = (
    "sys/fs/cgroup/system.slice/irqbalance.service",
    "sys/fs/cgroup/system.slice/docker.service",
    "sys/fs/cgroup/system.slice/ssh.service",
)


def test_everything_is_read() -> None:
    """Each file says what it says: the variables and keys that matter, each with its place."""
    found = settings_of(tree(FULL, *FOLDERS))
    assert found.interrupts is not None
    assert {
        str(address): [(one.number, str(one.cpus)) for one in listed]
        for address, listed in found.interrupts.items()
    } == {str(CARD): [(40, "3"), (41, "0-1")], str(NIC): [(50, "5")]}
    assert found.irqbalance is not None
    assert found.irqbalance == (CpuSet.parse_list("4-7"), "/etc/default/irqbalance")
    assert found.environment == (
        Setting("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "/etc/environment"),
        Setting("I_MPI_PIN", "1", "/etc/profile.d/mpi.sh"),
        Setting("OMP_PROC_BIND", "close", "/etc/systemd/system.conf.d/50-gpu.conf"),
    )
    # The first main file counts alone.
    assert found.manager == (Setting("CPUAffinity", "0-3", "/etc/systemd/system.conf"),)
    assert found.services == frozenset({"docker.service"})
    assert (found.smt_control, found.is_virtual, found.kernel) == ("on", True, (6, 1))
    assert found.huge_pages == (HugePages(2048, {0: 512, 1: 0}),)


def test_snapshot_is_set_to_the_same() -> None:
    """A snapshot keeps all of that, by the same places, and a snapshot of it is it."""
    root = tree(FULL, *FOLDERS)
    data = take_snapshot(root).data
    replayed = unpack_tree(data, "a.tar.gz")
    assert settings_of(replayed) == settings_of(root)
    assert take_snapshot(replayed).data == data


def test_snapshot_of_a_host_without_any() -> None:
    """That a host has no such files is kept too: none of them is not the same as not known."""
    root = tree({"etc/hosts": "127.0.0.1 localhost\n"}, "sys/fs/cgroup/system.slice/ssh.service")
    found = settings_of(root)
    assert (found.environment, found.manager, found.services) == ((), (), frozenset())
    assert settings_of(unpack_tree(take_snapshot(root).data, "a")) == found


def test_snapshot_tells_nothing_else_of_these_files() -> None:
    """Of /etc only those variables and keys are kept, and none with an identifier or the host's name in it."""
    secrets = {
        "proc/sys/kernel/hostname": "orion7\n",
        "etc/environment": (
            "TOKEN=hunter2\nNCCL_IB_HCA=mlx5_orion7\nOMP_PLACES=cores\n"
            "CUDA_VISIBLE_DEVICES=GPU-8dea26ac-1d2b-4f8e-9c1a-0123456789ab\n"
        ),
        "etc/profile.d/orion7.sh": "export KMP_AFFINITY=compact # by jane@orion7\n",
        "etc/systemd/system.conf": (
            "[Manager]\nDefaultEnvironment=SECRET=hunter2 UCX_NET_DEVICES=0c42a1b2c3d4:1 I_MPI_PIN=1\n"
        ),
        "etc/default/irqbalance": "IRQBALANCE_ARGS=--hunter2\n",
        "proc/cpuinfo": "processor : 0\nserial : hunter2\nflags : fpu\n",
        "proc/sys/kernel/osrelease": "6.1.0-orion7\n",
    }
    data = take_snapshot(tree(secrets)).data
    text = gzip.decompress(data).decode()
    for told in ("hunter2", "orion7", "8dea26ac", "0c42a1b2c3d4", "jane"):
        assert told not in text
    found = settings_of(unpack_tree(data, "a"))
    assert [(one.name, one.value) for one in found.environment or ()] == [
        ("OMP_PLACES", "cores"),
        ("KMP_AFFINITY", "compact"),
        ("I_MPI_PIN", "1"),
    ]
    assert (found.is_virtual, found.kernel) == (False, (6, 1))


def test_nothing_is_known_of_a_bare_tree() -> None:
    """A recording of /sys and /proc alone leaves everything unknown that it does not hold."""
    found = settings_of(tree({}))
    assert found == NOTHING_KNOWN._replace(cgroup_version=2)


def test_unreadable_files_are_not_known() -> None:
    """A file of another form, a folder in its place, a link that leads out: not known, and no error."""
    broken = {
        "proc/irq/40/effective_affinity_list": "all\n",
        f"sys/bus/pci/devices/{CARD}/msi_irqs/40": "msix\n",
        f"sys/bus/pci/devices/{CARD}/msi_irqs/default": "x\n",
        "etc/environment/x": "",
        "etc/default/irqbalance": "IRQBALANCE_BANNED_CPULIST=all\n",
        "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages": "many\n",
        "proc/sys/kernel/osrelease": "unknown\n",
    }
    root = add_files(tree(broken, FOLDERS[0]), {}, links={"etc/systemd/system.conf": "../../../x"})
    found = settings_of(root)
    assert found.interrupts is None
    assert (found.environment, found.manager, found.huge_pages, found.kernel) == ((), (), (), None)
    assert found.irqbalance == (None, "/etc/default/irqbalance")


def test_asked_affinity_where_the_kernel_does_not_say_the_real_one() -> None:
    """Kernels that do not say where an interrupt lands say where it may."""
    files = irq(40, "3")
    del files["proc/irq/40/effective_affinity_list"]
    found = settings_of(tree(files)).interrupts
    assert found is not None
    assert [str(one.cpus) for one in found[CARD]] == ["0-7"]


def test_this_systems_interrupts() -> None:
    """Of the running system the interrupts are those that the kernel lists, and land where it says."""
    root = DirectoryRoot()
    machine = discover(root)
    expected = {}
    for nic in machine.nics:
        folder = Path(f"/sys/bus/pci/devices/{nic.address}/msi_irqs")
        if folder.is_dir() and nic.name and not nic.is_virtual:
            numbers = sorted(int(one.name) for one in folder.iterdir())
            expected[nic.address] = [
                (number, Path(f"/proc/irq/{number}/effective_affinity_list").read_text().strip())
                for number in numbers
            ]
    if not expected:
        pytest.skip("no network device of this system has message interrupts")
    found = read_settings(root, machine).interrupts or {}
    assert {
        address: [(one.number, str(one.cpus)) for one in listed]
        for address, listed in found.items()
        if address in expected
    } == expected


def test_irqbalance_that_is_no_unit() -> None:
    """A daemon that somebody started is known by its socket."""
    found = settings_of(tree({"run/irqbalance/irqbalance812.sock": ""}))
    assert found.irqbalance == (None, "/etc/default/irqbalance")


def test_cgroup_v1_owns_the_controller() -> None:
    """A machine whose cpuset controller is on a v1 hierarchy is told from one of v2."""
    mounts = "none /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n"
    root = tree(
        {
            "proc/self/mounts": mounts,
            "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "0-7\n",
            "sys/fs/cgroup/cpuset/cpuset.effective_mems": "0-1\n",
        }
    )
    assert settings_of(root).cgroup_version == 1


def test_later_files_take_earlier_keys_back() -> None:
    """An empty assignment of a drop-in takes back what came before; of equal names the first folder's counts."""
    root = tree(
        {
            "etc/systemd/system.conf": "[Manager]\nCPUAffinity=0-3\nNUMAPolicy=bind\n",
            "usr/lib/systemd/system.conf.d/10-a.conf": "[Manager]\nCPUAffinity=\nCPUAffinity=1\n",
            "usr/lib/systemd/system.conf.d/20-b.conf": "[Manager]\nCPUAffinity=7\n",
            "etc/systemd/system.conf.d/20-b.conf": "[Manager]\nNUMAMask=0\n",
        }
    )
    assert [(one.name, one.value) for one in settings_of(root).manager or ()] == [
        ("NUMAPolicy", "bind"),
        ("CPUAffinity", "1"),
        ("NUMAMask", "0"),
    ]


@pytest.mark.parametrize(
    "text, found",
    [
        ("IRQBALANCE_BANNED_CPULIST=0,4-5", "0,4-5"),
        ("IRQBALANCE_BANNED_CPUS=0000000f,00000001", "0,32-35"),
        ("IRQBALANCE_BANNED_CPUS=0xf0", "4-7"),
        ("IRQBALANCE_BANNED_CPULIST=\nIRQBALANCE_BANNED_CPUS=1", "0"),
        ("#IRQBALANCE_BANNED_CPULIST=0", None),
        ("", None),
    ],
)
def test_banned_cpus(text: str, found: str | None) -> None:
    """The list counts before the mask, and a comment is nothing."""
    banned = parse_banned(text)
    assert (None if banned is None else str(banned)) == found


def test_assignments_as_a_shell_writes_them() -> None:
    """Quotes and a comment behind are taken off, an open quote is not; other names are left out."""
    text = 'export A=\'x y\' # z\nB="1"\nC=x\nA="open\nA=\n'
    assert parse_assignments(text, ("A", "B")) == [
        ("A", "x y"),
        ("B", "1"),
        ("A", '"open'),
        ("A", ""),
    ]


def test_manager_environment() -> None:
    """Of DefaultEnvironment= the variables that matter are read, quoted or not."""
    assert parse_manager_environment('"OMP_PLACES=a b" X=1 KMP_AFFINITY=c NCCL_IB_HCA') == [
        ("OMP_PLACES", "a b"),
        ("KMP_AFFINITY", "c"),
    ]


def test_manager_keys_stand_in_their_section() -> None:
    """A key outside of [Manager], and a comment, are none."""
    text = "CPUAffinity=1\n[Manager]\n#CPUAffinity=2\n CPUAffinity = 3 \n[X]\nCPUAffinity=4\n"
    assert parse_manager_keys(text, ("CPUAffinity",)) == [("CPUAffinity", "3")]


@pytest.mark.parametrize(
    "text, found",
    [
        ("flags : a hypervisor\n", True),
        ("flags\t:\n", False),
        ("CPU part : 0xd4f\n", None),
        ("", None),
    ],
)
def test_hypervisor(text: str, found: bool | None) -> None:
    """Without flags nothing tells whether a hypervisor is below."""
    assert parse_is_virtual(text) is found


@pytest.mark.parametrize("text, found", [("6.12.1\n", (6, 12)), ("5.4-rc1", (5, 4)), ("x", None)])
def test_kernel(text: str, found: tuple[int, int] | None) -> None:
    """A kernel is known by its first two numbers."""
    assert parse_kernel(text) == found


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text of these files makes a parser fail otherwise than by saying that it is not its form."""
    parse_assignments(text, ("A",))
    parse_manager_keys(f"[Manager]\n{text}", ("A",))
    parse_manager_environment(text)
    parse_is_virtual(text)
    parse_kernel(text)
    with suppress(ParseError):
        parse_banned(f"IRQBALANCE_BANNED_CPUS={text}")
