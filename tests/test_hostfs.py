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
    parse_banned,
    parse_is_virtual,
    parse_kernel,
    parse_manager_environment,
    parse_manager_keys,
    parse_shell,
    parse_variables,
    read_settings,
)
from provisioner.idset import CpuSet
from provisioner.pci import parse_pci_address
from provisioner.root import DirectoryRoot, MemoryRoot
from provisioner.scrub import REMOVED
from provisioner.settings import (
    NOTHING_KNOWN,
    HostSettings,
    HugePages,
    Interrupt,
    Irqbalance,
    Setting,
)
from provisioner.snapshot import take_snapshot
from tests.hosts import make_tree
from tests.trees import add_files, interrupt_files, write_tree

CARD = parse_pci_address("0000:11:00.0")
NIC = parse_pci_address("0000:12:00.0")


def tree(files: dict[str, str], *folders: str) -> MemoryRoot:
    """A host with a card and a network device below one bridge, and more files."""
    nic = NicFacts(
        path=(parse_pci_address("0000:10:01.0"), NIC), numa_node=0, rdma=("mlx5_0",), net=("ib0",)
    )
    host = make_tree({0: "0-3", 1: "4-7"}, [("0000:11:00.0", 0)], nics=(nic,))
    # A whole system's root is told by that file.
    whole = {"etc/os-release": ""} if files or folders else {}
    return add_files(host, {**whole, **files}, folders)


def settings_of(root: MemoryRoot) -> HostSettings:
    """What the host is set to."""
    return read_settings(root, discover(root))


FULL = {
    **interrupt_files(40, "3", CARD),
    **interrupt_files(41, "0-1", CARD),
    **interrupt_files(50, "5", NIC),
    "etc/environment": 'PATH=/bin\nCUDA_DEVICE_ORDER="FASTEST_FIRST"\n',
    "etc/profile.d/mpi.sh": "# MPI\nif true; then\n  export I_MPI_PIN=1 # here\nfi\n",
    "etc/profile.d/README": "OMP_PLACES=cores\n",
    "etc/systemd/system.conf": "[Manager]\nLogLevel=info\nCPUAffinity=0-3\n",
    "usr/lib/systemd/system.conf": "[Manager]\nNUMAPolicy=bind\n",
    "etc/systemd/system.conf.d/50-gpu.conf": (
        '[Manager]\nDefaultEnvironment="OMP_PROC_BIND=close" PATH=/bin\n[Other]\nCPUAffinity=9\n'
    ),
    "etc/default/irqbalance": 'IRQBALANCE_ONESHOT=1\nIRQBALANCE_BANNED_CPULIST="4-7"\n',
    "proc/cpuinfo": "processor : 0\nflags\t\t: fpu hypervisor sse\n",
    "proc/sys/kernel/osrelease": "6.1.0-44-amd64\n",
    "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages": "512\n",
    "sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages": "0\n",
    "sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages": "0\n",
}
IRQ_SETTINGS = "IRQBALANCE_BANNED_CPULIST=4\n"
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
    assert found.irqbalance == Irqbalance(CpuSet.parse_list("4-7"), "/etc/default/irqbalance")
    assert found.environment == (
        Setting("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "/etc/environment"),
        Setting("I_MPI_PIN", "1", "/etc/profile.d/mpi.sh"),
        Setting("OMP_PROC_BIND", "close", "/etc/systemd/system.conf.d/50-gpu.conf"),
    )
    # The first main file counts alone.
    assert found.manager == (Setting("CPUAffinity", "0-3", "/etc/systemd/system.conf"),)
    assert found.services == frozenset({"docker.service"})
    assert (found.is_virtual, found.kernel, found.has_systemd) == (True, (6, 1), False)
    assert (found.container, found.unreadable) == (None, {})
    assert found.huge_pages == (HugePages(2048, {0: 512, 1: 0}),)


def test_snapshot_is_set_to_the_same() -> None:
    """A snapshot keeps all of that, with numbers for the names of files that people name, and one of it is it."""
    root = tree(FULL, *FOLDERS)
    data = take_snapshot(root).data
    replayed = unpack_tree(data, "a.tar.gz")
    names = {"50-gpu.conf": "000.conf", "mpi.sh": "001.sh"}
    found = settings_of(root)
    environment = tuple(
        one._replace(place=one.place.replace(old, new))
        for one in found.environment or ()
        for old, new in [
            next((pair for pair in names.items() if one.place.endswith(pair[0])), ("", ""))
        ]
    )
    assert settings_of(replayed) == found._replace(environment=environment)
    assert take_snapshot(replayed).data == data


def test_numbered_files_keep_their_order() -> None:
    """A drop-in that takes a key back still comes where it came, and one that hides another still does."""
    root = tree(
        {
            "proc/sys/kernel/hostname": "gpu01\n",
            "etc/systemd/system.conf.d/a-gpu01.conf": "[Manager]\nCPUAffinity=\n",
            "etc/systemd/system.conf.d/b.conf": "[Manager]\nCPUAffinity=1\n",
            "usr/lib/systemd/system.conf.d/b.conf": "[Manager]\nCPUAffinity=2\n",
            "etc/systemd/system.conf.d/0.conf": "[Manager]\nCPUAffinity=3\n",
        }
    )
    data = take_snapshot(root).data
    assert b"gpu01" not in gzip.decompress(data)
    for one in (root, unpack_tree(data, "a")):
        assert [setting.value for setting in settings_of(one).manager or ()] == ["1"]


def test_recorder_in_a_service() -> None:
    """Taken from within system.slice or one of its services, a snapshot still says which of them run."""
    for own in ("/system.slice/cron.service", "/system.slice/docker.service", "/system.slice"):
        root = add_files(
            tree({}, *FOLDERS),
            {
                "proc/self/cgroup": f"0::{own}\n",
                "proc/self/mounts": "none /sys/fs/cgroup cgroup2 rw 0 0\n",
                f"sys/fs/cgroup{own}/cpuset.cpus.effective": "0-3\n",
                f"sys/fs/cgroup{own}/cpuset.mems.effective": "0\n",
                "sys/fs/cgroup/system.slice/cpuset.cpus.effective": "0-3\n",
                "sys/fs/cgroup/system.slice/cpuset.mems.effective": "0\n",
            },
        )
        found = settings_of(root)
        assert found.services == frozenset({"docker.service"})
        replayed = settings_of(unpack_tree(take_snapshot(root).data, "a"))
        assert (replayed.services, replayed.irqbalance) == (found.services, found.irqbalance)


def test_linked_settings(tmp_path: Path) -> None:
    """A file of settings that is a link, as configuration tools make them, is read and is in the snapshot."""
    host = tree(
        {"opt/system.conf": "[Manager]\nCPUAffinity=0-3\n", "opt/irq": IRQ_SETTINGS}, FOLDERS[0]
    )
    links = {
        "etc/systemd/system.conf": "../../opt/system.conf",
        "etc/default/irqbalance": "../../opt/irq",
    }
    write_tree(add_files(host, {}, links=links), tmp_path)
    (tmp_path / FOLDERS[0]).mkdir(parents=True)
    root = DirectoryRoot(tmp_path)
    found = read_settings(root, discover(root))
    assert found.manager == (Setting("CPUAffinity", "0-3", "/etc/systemd/system.conf"),)
    assert found.irqbalance == Irqbalance(CpuSet([4]), "/etc/default/irqbalance")
    assert settings_of(unpack_tree(take_snapshot(root).data, "a")) == found


def test_snapshot_of_a_host_without_any() -> None:
    """That a host has no such files is kept too: none of them is not the same as not known."""
    root = tree({"etc/hosts": "127.0.0.1 localhost\n"}, "sys/fs/cgroup/system.slice/ssh.service")
    found = settings_of(root)
    assert (found.environment, found.manager, found.services) == ((), (), frozenset())
    assert found.has_systemd is False
    assert settings_of(unpack_tree(take_snapshot(root).data, "a")) == found


def test_snapshot_tells_nothing_else_of_these_files() -> None:
    """Of /etc only those variables and keys are kept, and none with an identifier or the host's name in it."""
    secrets = {
        "proc/sys/kernel/hostname": "orion7\n",
        "etc/environment": (
            "TOKEN=hunter2\nNCCL_IB_HCA=mlx5_orion7\nOMP_PLACES={0:4},{4:4}\n"
            "CUDA_VISIBLE_DEVICES=GPU-8dea26ac-1d2b-4f8e-9c1a-0123456789ab\n"
        ),
        "etc/profile.d/orion7.sh": (
            "export KMP_AFFINITY=granularity=fine,compact,1,0 # by jane@orion7\n"
        ),
        "etc/systemd/system.conf": (
            "[Manager]\nDefaultEnvironment=SECRET=hunter2 UCX_NET_DEVICES=0c42a1b2c3d4:1 I_MPI_PIN=1\n"
            "CPUAffinity=0-3 # ask jane@example.org\nNUMAPolicy=hunter2\n"
        ),
        "etc/systemd/system.conf.d/vendor.conf": "[Manager]\nLogLevel=hunter2\n",
        "proc/irq/40/effective_affinity_list": "fe80::e42:a1ff:feb2:c3d4\n",
        f"sys/bus/pci/devices/{CARD}/msi_irqs/40": "msix\n",
        "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages": "10.1.2.3\n",
        "etc/default/irqbalance": "IRQBALANCE_ARGS=--x\nIRQBALANCE_BANNED_CPULIST=hunter2\n",
        "proc/cpuinfo": "processor : 0\nserial : hunter2\nflags : fpu\n",
        "proc/sys/kernel/osrelease": "6.1.0-orion7\n",
    }
    data = take_snapshot(tree(secrets, FOLDERS[0])).data
    text = gzip.decompress(data).decode()
    for told in (
        *("hunter2", "orion7", "8dea26ac", "0c42a1b2c3d4", "jane", "example", "fe80", "10.1.2.3"),
        *("SECRET", "TOKEN", "vendor.conf"),
    ):
        assert told not in text
    found = settings_of(unpack_tree(data, "a"))
    # That a variable is set is kept, and what it does is found.
    assert [(one.name, one.value) for one in found.environment or ()] == [
        ("NCCL_IB_HCA", REMOVED),
        ("OMP_PLACES", "{0:4},{4:4}"),
        ("CUDA_VISIBLE_DEVICES", REMOVED),
        ("KMP_AFFINITY", "granularity=fine,compact,1,0"),
        ("UCX_NET_DEVICES", REMOVED),
        ("I_MPI_PIN", "1"),
    ]
    assert [(one.name, one.value) for one in found.manager or ()] == [
        ("CPUAffinity", REMOVED),
        ("NUMAPolicy", REMOVED),
    ]
    assert (found.is_virtual, found.kernel) == (False, (6, 1))
    assert found.irqbalance == Irqbalance(None, "/etc/default/irqbalance", is_known=False)
    assert found.unreadable.keys() == {"interrupts", "memory"}


def test_values_that_are_identifiers() -> None:
    """A run of digits as long as an identifier is removed, wherever numbers are kept."""
    identifier = "8dea26ac-1d2b-4f8e-9c1a-0123456789ab"
    files = {
        "etc/environment": "GOMP_CPU_AFFINITY=1234567890123\n",
        "etc/systemd/system.conf": "[Manager]\nCPUAffinity=1234567890123\n",
        "etc/default/irqbalance": f"IRQBALANCE_BANNED_CPULIST={identifier}\n",
    }
    text = gzip.decompress(take_snapshot(tree(files, FOLDERS[0])).data)
    assert b"1234567890123" not in text
    assert b"8dea26ac" not in text


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
    assert (found.environment, found.manager, found.huge_pages, found.kernel) == (
        (),
        (),
        None,
        None,
    )
    assert found.irqbalance == Irqbalance(None, "/etc/default/irqbalance", is_known=False)
    assert found.unreadable == {
        "interrupts": ("/proc/irq/40/effective_affinity_list", "/etc/default/irqbalance"),
        "environment": ("/etc/environment", "/etc/systemd/system.conf"),
        "systemd": ("/etc/systemd/system.conf",),
        "memory": ("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages",),
    }
    # A snapshot can be taken all the same, and knows no more; so does one of it.
    data = take_snapshot(root).data
    replayed = unpack_tree(data, "a")
    assert settings_of(replayed) == found
    assert take_snapshot(replayed).data == data


def test_asked_affinity_where_the_kernel_does_not_say_the_real_one() -> None:
    """Kernels that do not say where an interrupt lands say where it may."""
    files = interrupt_files(40, "3", CARD)
    del files["proc/irq/40/effective_affinity_list"]
    found = settings_of(tree(files)).interrupts
    assert found is not None
    assert found[CARD] == (Interrupt(40, CpuSet(range(8)), is_asked=True),)


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


def test_this_systems_snapshot() -> None:
    """The running system's snapshot is set to what it is, whatever that is."""
    if not Path("/etc/os-release").exists():
        pytest.skip("this system does not say which it is, by which a whole one is told")

    def without_names(found: HostSettings) -> HostSettings:
        # Places are renamed, and values that may tell something are removed.
        settings = tuple(one._replace(place="", value="") for one in found.environment or ())
        manager = tuple(one._replace(place="", value="") for one in found.manager or ())
        return found._replace(environment=settings, manager=manager, unreadable={})

    root = DirectoryRoot()
    found = read_settings(root, discover(root))
    replayed = settings_of(unpack_tree(take_snapshot(root).data, "a"))
    assert None not in (found.environment, found.manager, found.has_systemd)
    assert without_names(replayed) == without_names(found)


def test_irqbalance_that_is_no_unit() -> None:
    """A daemon that somebody started is known by its socket, in a snapshot too."""
    root = tree({"run/irqbalance/irqbalance812.sock": ""})
    found = settings_of(root)
    assert found.irqbalance == Irqbalance(None, "/etc/default/irqbalance")
    assert settings_of(unpack_tree(take_snapshot(root).data, "a")) == found


def test_inside_of_a_container() -> None:
    """What container engines leave inside is found, in a snapshot too; whether systemd runs is known from /run."""
    root = tree({".dockerenv": "", "run/lock/x": ""})
    found = settings_of(root)
    assert (found.container, found.has_systemd) == ("/.dockerenv", False)
    assert settings_of(unpack_tree(take_snapshot(root).data, "a")) == found
    assert settings_of(tree({}, "run/systemd/system")).has_systemd is True


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
            "etc/systemd/system.conf.d/20-b.conf": "[Manager]\n",
        }
    )
    assert [(one.name, one.value) for one in settings_of(root).manager or ()] == [
        ("NUMAPolicy", "bind"),
        ("CPUAffinity", "1"),
    ]


@pytest.mark.parametrize(
    "text, found",
    [
        ("IRQBALANCE_BANNED_CPULIST=0,4-5", "0,4-5"),
        ("IRQBALANCE_BANNED_CPUS=0000000f,00000001", "0,32-35"),
        ("IRQBALANCE_BANNED_CPUS=0xF0", "4-7"),
        ("IRQBALANCE_BANNED_CPULIST=0-15:1/4", "0,4,8,12"),
        ("IRQBALANCE_BANNED_CPULIST=\nIRQBALANCE_BANNED_CPUS=1", "0"),
        ("#IRQBALANCE_BANNED_CPULIST=0", None),
        ("", None),
    ],
)
def test_banned_cpus(text: str, found: str | None) -> None:
    """The list counts before the mask, and a comment is nothing."""
    banned = parse_banned(text)
    assert (None if banned is None else str(banned)) == found


@pytest.mark.parametrize(
    "text, found",
    [
        ("export A='x y' # z\nB=\"1\"\nC=x\n", {"A": "x y"}),
        ("export A=1;\nif true; then export B=2 A=3; fi\n", {"A": "3", "B": "2"}),
        ("declare -x A=1\nA=0 nvidia-smi\nexport C\n", {"A": "1"}),
        ("A=1\nB=2\nexport A\nA=3\n", {"A": "3"}),
        ("export A=1 B=2\nunset A\n", {"B": "2"}),
        ('export A="open\n', {"A": '"open'}),
        ("export A=" + "x " * 9000 + "\n", {"A": "x"}),
    ],
)
def test_what_a_shell_hands_on(text: str, found: dict[str, str]) -> None:
    """What is exported is found wherever it stands, without quotes and comments; one for a command alone is not."""
    assert dict(parse_shell(text, ("A", "B"))) == found


def test_what_pam_sets() -> None:
    """A value is the rest of the line, without the quotes around it."""
    text = 'A=0 1 2\n#A=3\nexport B="x"\nC=x\nA=\'\n'
    assert parse_variables(text, ("A", "B")) == [("A", "0 1 2"), ("B", "x"), ("A", "'")]


def test_a_byte_order_mark_is_nothing() -> None:
    """A file that begins with one is read from its first line on, in a snapshot too."""
    root = tree(
        {
            "etc/environment": "\ufeffOMP_PLACES=cores\n",
            "etc/default/irqbalance": f"\ufeff{IRQ_SETTINGS}",
        },
        FOLDERS[0],
    )
    found = settings_of(root)
    assert found.environment == (Setting("OMP_PLACES", "cores", "/etc/environment"),)
    assert found.irqbalance == Irqbalance(CpuSet([4]), "/etc/default/irqbalance")
    assert settings_of(unpack_tree(take_snapshot(root).data, "a")) == found


def test_hidden_files_say_nothing() -> None:
    """Of files of one name in the folders of environment.d the first hides the others, empty or not."""
    root = tree(
        {
            "usr/lib/environment.d/50-gpu.conf": "CUDA_VISIBLE_DEVICES=0\n",
            "etc/environment.d/50-gpu.conf": "",
        }
    )
    for one in (root, unpack_tree(take_snapshot(root).data, "a")):
        assert settings_of(one).environment == ()


def test_devices_that_do_not_say_all_their_interrupts() -> None:
    """A device of which one interrupt says nothing is not known, and the others are."""
    files = {
        **interrupt_files(40, "3", CARD),
        **interrupt_files(41, "0-1", CARD),
        **interrupt_files(50, "5", NIC),
    }
    del files["proc/irq/41/effective_affinity_list"], files["proc/irq/41/smp_affinity_list"]
    found = settings_of(tree(files)).interrupts
    assert found is not None
    assert found.keys() == {NIC}


def test_captures_of_a_part_of_the_system() -> None:
    """A folder of /etc or /run in a recording of /sys and /proc does not say that the rest is absent."""
    root = add_files(tree({}), {"run/udev/data/x": "", "etc/mtab": ""})
    found = settings_of(root)
    assert (found.environment, found.manager, found.has_systemd) == (None, None, None)


def test_controller_that_no_hierarchy_has() -> None:
    """Where the hierarchy says its controllers, and cpuset is none of them, that is known."""
    files = {"sys/fs/cgroup/cgroup.controllers": "cpu memory\n"}
    assert settings_of(tree(files)).cgroup_version == 0


def test_the_last_assignment_of_a_file_counts() -> None:
    """A variable that a file sets twice has the later value."""
    text = "OMP_PLACES=cores\nOMP_PLACES=\n"
    found = settings_of(tree({"etc/environment": text}))
    assert found.environment == (Setting("OMP_PLACES", "", "/etc/environment"),)


def test_manager_environment() -> None:
    """Of DefaultEnvironment= the variables that matter are read, quoted or not."""
    assert parse_manager_environment('"OMP_PLACES=a b" X=1 KMP_AFFINITY=c NCCL_IB_HCA') == [
        ("OMP_PLACES", "a b"),
        ("KMP_AFFINITY", "c"),
    ]


def test_manager_keys_stand_in_their_section() -> None:
    """A key outside of [Manager], and a comment, are none."""
    text = "CPUAffinity=1\n[Manager]\n#CPUAffinity=2\n CPUAffinity = 3 \\\n# see \\\n 4\n[X]\nCPUAffinity=5\n"
    ((key, value),) = parse_manager_keys(text, ("CPUAffinity",))
    assert (key, value.split()) == ("CPUAffinity", ["3", "4"])


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
    parse_shell(text, ("A",))
    parse_variables(text, ("A",))
    parse_manager_keys(f"[Manager]\n{text}", ("A",))
    parse_manager_environment(text)
    parse_is_virtual(text)
    parse_kernel(text)
    with suppress(ParseError):
        parse_banned(f"IRQBALANCE_BANNED_CPUS={text}")
