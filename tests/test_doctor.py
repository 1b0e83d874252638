"""What doctor finds: each check has found something, found nothing, or could not be made."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from provisioner.archive import unpack_tree
from provisioner.cli import run_command
from provisioner.discovery import discover
from provisioner.doctor import Check, Diagnosis, diagnosis_to_json, examine
from provisioner.errors import Problem
from provisioner.facts import build_tree
from provisioner.facts.values import CgroupFacts, NicFacts
from provisioner.hostfs import read_settings
from provisioner.idset import CpuSet
from provisioner.pci import parse_pci_address
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.root import MemoryRoot
from provisioner.samples import list_samples, read_sample
from provisioner.settings import NOTHING_KNOWN, Irqbalance, Setting
from provisioner.snapshot import save_snapshot, take_snapshot
from tests.hosts import make_host, make_tree, plan_for
from tests.test_cli import PROVISION
from tests.trees import add_files, interrupt_files, write_tree

Capture = pytest.CaptureFixture[str]


def tree(files: dict[str, str], *folders: str, **facts: Any) -> MemoryRoot:
    """A host of two nodes with two cards each, network devices beside the first two, and more files."""
    nics = [
        NicFacts(
            path=(parse_pci_address(f"0000:{bus}0:01.0"), parse_pci_address(f"0000:{bus}2:00.0")),
            numa_node=0,
            rdma=(f"mlx5_{bus - 1}",),
        )
        for bus in (1, 2)
    ]
    plain = NicFacts(path=(parse_pci_address("0000:70:00.0"),), numa_node=0, net=("eth0",))
    cards = [("0000:11:00.0", 0), ("0000:21:00.0", 0), ("0000:81:00.0", 1), ("0000:91:00.0", 1)]
    host = make_tree({0: "0-7", 1: "8-15"}, cards, nics=(*nics, plain), numa_balancing=0, **facts)
    # A whole system's root is told by these.
    whole = {"etc/os-release": "", "run/systemd/system/x": ""} if files else {}
    return add_files(host, {**whole, **files}, folders)


def diagnose(root: MemoryRoot, **request: Any) -> Diagnosis:
    """What doctor says of a host by the plan that is made for it."""
    machine = discover(root)
    return examine(machine, read_settings(root, machine), plan_for(machine, **request))


def check_of(diagnosis: Diagnosis, name: str) -> Check:
    """The check of that name."""
    (check,) = [one for one in diagnosis.checks if one.name == name]
    return check


def notes_of(diagnosis: Diagnosis) -> dict[str, list[str]]:
    """Code -> messages of every note."""
    found: dict[str, list[str]] = {}
    for check in diagnosis.checks:
        for note in check.notes:
            found.setdefault(note.code, []).append(note.message)
    return found


CARD0, CARD1, CARD2, NIC, ETH = (
    "0000:11:00.0",
    "0000:21:00.0",
    "0000:81:00.0",
    "0000:12:00.0",
    "0000:70:00.0",
)

# A host of which everything is known and nothing is odd.
GOOD_FILES = {
    **interrupt_files(40, "1", CARD0),
    **interrupt_files(41, "5", CARD1),
    **interrupt_files(42, "8-9", CARD2),
    **interrupt_files(43, "13", "0000:91:00.0"),
    **interrupt_files(50, "0", NIC),
    **interrupt_files(51, "4", "0000:22:00.0"),
    **interrupt_files(60, "", ETH),
    "etc/environment": "CUDA_DEVICE_ORDER=PCI_BUS_ID\n",
    **{
        f"sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages": "0\n"
        for node in (0, 1)
    },
    "proc/cpuinfo": "flags : fpu\n",
    "proc/sys/kernel/osrelease": "6.12.0\n",
}
GOOD_FOLDERS = ("sys/fs/cgroup/system.slice/ssh.service", "run/systemd/system")


def test_nothing_is_odd_about_a_good_host() -> None:
    """Every check of a host of which all is known and well is fine, and says what it saw."""
    found = diagnose(tree(GOOD_FILES, *GOOD_FOLDERS))
    assert notes_of(found) == {}
    assert {check.state for check in found.checks} == {"fine"}
    assert (found.ranks, found.is_this_system) == (4, False)
    assert check_of(found, "cores").why == "16 cores of 1 CPU each, all whole"
    assert check_of(found, "environment").why == "the system sets CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert check_of(found, "interrupts").why.startswith("7 interrupts ")


def test_unknown_is_not_fine() -> None:
    """What a bare recording does not say is not known, each with the reason."""
    found = diagnose(tree({}, absent=("sys/fs/cgroup/*", "proc/sys/*")))
    unknown = {check.name: check.unknown for check in found.checks if check.state == "unknown"}
    assert unknown == {
        "packages": ("whether a hypervisor is below",),
        "memory": ("how many huge pages are set aside on each node",),
        "ceiling": ("no cpuset file says anything",),
        "balancing": ("kernel.numa_balancing",),
        "interrupts": (
            "whether irqbalance runs",
            (
                "where the interrupts of mlx5_0 (0000:12:00.0), mlx5_1 (0000:22:00.0), card 0000:11:00.0 "
                "and 3 more land"
            ),
        ),
        "environment": ("what the system sets for every process: its /etc is not here",),
        "systemd": (
            "whether systemd runs",
            "which hierarchy has the cpuset controller",
            "what system.conf sets",
            "which services run",
        ),
    }
    assert all(check.why for check in found.checks if check.state == "fine")


def test_what_is_found_hides_nothing_that_is_not_known() -> None:
    """A check that found something still says what it could not look at, and nothing of being fine."""
    found = diagnose(
        tree({"etc/systemd/system.conf": "[Manager]\nNUMAPolicy=bind\n"}, "run/systemd/system")
    )
    check = check_of(found, "systemd")
    assert (check.state, check.why) == ("found", "")
    assert check.unknown == ("which services run",)


@pytest.mark.parametrize(
    "path, name",
    [
        ("etc/environment/x", "environment"),
        ("etc/systemd/system.conf/x", "systemd"),
        ("proc/cpuinfo/x", "packages"),
    ],
)
def test_files_that_cannot_be_read(path: str, name: str) -> None:
    """A file that is there and can't be read is not known, by its path; what it would say is not taken for absent."""
    files = {old: text for old, text in GOOD_FILES.items() if not path.startswith(f"{old}/")}
    found = diagnose(tree({**files, path: ""}, *GOOD_FOLDERS))
    check = check_of(found, name)
    assert check.state == "unknown"
    assert f"/{path.removesuffix('/x')}" in check.unknown[-1]


def test_cards_that_say_nothing_are_not_fine() -> None:
    """Where no card names a node, nothing tells whether it is where it should be."""
    machine = discover(make_tree({0: "0-7", 1: "8-15"}, [None, 0]))
    check = check_of(examine(machine, NOTHING_KNOWN, (Problem("no_locality", "x"),)), "locality")
    assert check.unknown == ("0000:10:00.0 do not say their NUMA node themselves",)


# Interrupts -----------------------------------------------------------------------------------------


def test_interrupts_of_a_ranks_network_device_on_anothers_cores() -> None:
    """They are counted, with the ranks that use the device and those that suffer, and where to send them."""
    files = {
        **interrupt_files(50, "0", NIC),
        **interrupt_files(51, "5", NIC),
        **interrupt_files(52, "9-10", NIC),
        **interrupt_files(53, "", NIC),
    }
    found = diagnose(tree(files))
    (message,) = notes_of(found)["foreign_interrupts"]
    assert message == (
        "2 of 3 interrupts of mlx5_0 (0000:12:00.0), used by rank 0, land on CPUs 5,9-10 of rank 1 and rank 2."
    )
    (note,) = check_of(found, "interrupts").notes
    assert note.hint == (
        "Send them to CPUs 0-3, as root in bash: for n in {51..52}; do echo 0-3 > "
        "/proc/irq/$n/smp_affinity_list; done"
    )


def test_interrupts_go_to_the_reserved_cores() -> None:
    """Where cores of the device's node are kept for the system, they belong there, and on a rank's own no more."""
    found = diagnose(tree({**interrupt_files(50, "5", NIC)}), reserve_cores=2)
    (note,) = check_of(found, "interrupts").notes
    assert note.hint.startswith("Send it to CPUs 0-1, ")
    moved = diagnose(tree(interrupt_files(50, "0", NIC)), reserve_cores=2)
    assert check_of(moved, "interrupts").notes == ()


def test_interrupts_of_a_card() -> None:
    """A card's own interrupts count as its network device's do."""
    (message,) = notes_of(diagnose(tree(interrupt_files(40, "12", CARD1))))["foreign_interrupts"]
    assert message == (
        "The interrupt of card 0000:21:00.0, used by rank 1, lands on CPUs 12 of rank 3."
    )


def test_interrupts_off_the_node() -> None:
    """Interrupts on nobody's cores, but far from their device, are told of."""
    found = diagnose(tree(interrupt_files(40, "8", CARD0)), reserve_cores=1)
    (message,) = notes_of(found)["remote_interrupts"]
    assert message == (
        "The interrupt of card 0000:11:00.0, used by rank 0, lands on CPUs 8, off its NUMA node."
    )


def test_node_that_the_operator_stated_is_the_devices() -> None:
    """Where a card's node was stated, its interrupts belong there, and its own word is not doubted any more."""
    root = tree(interrupt_files(40, "8", CARD0))
    found = diagnose(root, locality={CARD0: 1})
    assert "remote_interrupts" not in notes_of(found)
    host = make_tree({0: "0-7", 1: "8-15"}, [0, 0])
    machine = discover(host)
    assert "all_on_one_node" in notes_of(diagnose(host))
    plan = plan_for(machine, locality={machine.accelerators[1].name: 1})
    assert "all_on_one_node" not in notes_of(examine(machine, NOTHING_KNOWN, plan))


def test_interrupts_that_only_may_land_there() -> None:
    """Where the kernel does not say where an interrupt lands, it is said that it may; offline CPUs are nowhere."""
    files = {f"sys/bus/pci/devices/{CARD0}/msi_irqs/{number}": "msix\n" for number in (40, 70000)}
    files |= {f"proc/irq/{number}/smp_affinity_list": "0-15\n" for number in (40, 70000)}
    (note,) = check_of(diagnose(tree(files)), "interrupts").notes
    assert note.message.startswith(
        "All 2 interrupts of card 0000:11:00.0, used by rank 0, may land on"
    )
    assert "for n in 40 70000; do" in note.hint
    offline = diagnose(tree(interrupt_files(40, "15", CARD0), offline_cpus=CpuSet([15])))
    assert check_of(offline, "interrupts").notes == ()


def test_interrupts_of_what_no_rank_uses() -> None:
    """A network device without a rank has its interrupts on somebody's cores: they are named together."""
    found = diagnose(tree({**interrupt_files(60, "3", ETH), **interrupt_files(61, "9", ETH)}))
    assert notes_of(found)["stray_interrupts"] == [
        "Interrupts of eth0 (0000:70:00.0), which no rank uses, land on CPUs 3,9 of rank 0 and rank 2."
    ]


def test_services_are_named_where_there_are_several() -> None:
    """With two services a rank is called by its service too."""
    from provisioner.request import ServiceRequest

    services = (ServiceRequest("chat", ("0", "1")), ServiceRequest("batch", ("2", "3")))
    found = diagnose(tree(interrupt_files(40, "12", CARD0)), services=services)
    (message,) = notes_of(found)["foreign_interrupts"]
    assert "used by rank 0 of service chat, lands on CPUs 12 of rank 1 of service batch" in message


def irqbalance(banned: str | None, **request: Any) -> list[str]:
    """What is said of irqbalance that runs with these CPUs banned."""
    machine = discover(tree({}))
    daemon = Irqbalance(None if banned is None else CpuSet.parse_list(banned), "/etc/x")
    settings = NOTHING_KNOWN._replace(irqbalance=daemon)
    found = examine(machine, settings, plan_for(machine, **request))
    return notes_of(found).get("irqbalance", [])


def test_irqbalance_runs() -> None:
    """It may move interrupts to every rank's CPUs, unless it is banned from all of them."""
    assert irqbalance(None) == [
        "irqbalance runs and may move any interrupt to CPUs 0-15 of the ranks."
    ]
    assert irqbalance("0-11") == [
        "irqbalance runs, banned from CPUs 0-11, and may move any interrupt to CPUs 12-15 of the ranks."
    ]
    assert irqbalance("2-7,10-15", reserve_cores=2) == []


def test_irqbalance_that_is_told_what_nobody_knows() -> None:
    """Settings that can't be read are no settings of none: what it is banned from is not known then."""
    folder = "sys/fs/cgroup/system.slice/irqbalance.service"
    root = tree({"etc/default/irqbalance": "IRQBALANCE_BANNED_CPULIST=$CPUS\n"}, folder)
    for one in (root, unpack_tree(take_snapshot(root).data, "a")):
        check = check_of(diagnose(one), "interrupts")
        assert check.notes == ()
        assert check.unknown[0] == "what irqbalance, which runs, is told in /etc/default/irqbalance"


def test_irqbalance_stays_banned_from_what_it_is() -> None:
    """What the settings ban already is in what is proposed."""
    machine = discover(tree({}))
    daemon = Irqbalance(CpuSet([0]), "/etc/default/irqbalance")
    settings = NOTHING_KNOWN._replace(irqbalance=daemon)
    found = examine(machine, settings, plan_for(machine, reserve_cores=2))
    (note,) = check_of(found, "interrupts").notes
    assert note.hint.startswith("Set IRQBALANCE_BANNED_CPULIST=0,2-7,10-15 ")


def test_silent_devices_of_ranks_are_named() -> None:
    """Where some devices say where their interrupts land, those of ranks that do not are named."""
    found = check_of(diagnose(tree(interrupt_files(40, "1", CARD0))), "interrupts")
    assert found.state == "unknown"
    assert found.unknown[-1].startswith("where the interrupts of mlx5_0 (0000:12:00.0), mlx5_1 ")
    assert CARD0 not in found.unknown[-1]


def test_what_was_asked_for_is_not_odd() -> None:
    """Idle siblings and cards without a rank are not found where they were asked for."""
    machine = make_host({0: "0-7,8-15"}, [0, 0], stride=8)
    found = examine(machine, NOTHING_KNOWN, plan_for(machine, smt="first", devices=("0",)))
    assert not {"idle_siblings", "cards_without_rank"} & notes_of(found).keys()


def test_nothing_is_placed_without_a_card() -> None:
    """A host without a card has no placement that could be fine."""
    machine = make_host({0: "0-7"})
    found = examine(machine, NOTHING_KNOWN, (Problem("no_card", "no card", "Look"),))
    assert check_of(found, "cards").state == "found"
    assert check_of(found, "placement").unknown == (
        "how ranks would be placed, as there is no plan",
    )
    assert check_of(found, "locality").why == "there is no card"


def test_irqbalance_keeps_off_isolated_cpus_by_itself() -> None:
    """Without settings it is banned from isolated CPUs, and settings end that: the hint names them too."""
    machine = discover(tree({}, isolated_cpus=CpuSet([7, 15])))
    settings = NOTHING_KNOWN._replace(irqbalance=Irqbalance(None, "/etc/default/irqbalance"))
    plan = plan_for(machine, reserve_cores=1)
    found = examine(machine, settings, plan)
    (note,) = check_of(found, "interrupts").notes
    assert note.hint.startswith(
        f"Set IRQBALANCE_BANNED_CPULIST={plan.assigned_cpus | CpuSet([7, 15])} (and nohz_full CPUs"
    )


# What the system is set to --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, code",
    [
        ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "cuda_device_order"),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID", None),
        ("CUDA_VISIBLE_DEVICES", "0,1", "system_environment"),
        ("ASCEND_RT_VISIBLE_DEVICES", "", "system_environment"),
        ("OMP_PROC_BIND", "close", "system_environment"),
        ("NCCL_IGNORE_CPU_AFFINITY", "1", "system_environment"),
        ("TLLM_NUMA_AWARE_WORKER_AFFINITY", "0", None),
        ("UCX_NET_DEVICES", "mlx5_0:1", "system_environment"),
    ],
)
def test_variables_of_the_systems_environment(name: str, value: str, code: str | None) -> None:
    """A variable that chooses cards, CPUs or network devices for everybody is named with its file."""
    found = diagnose(tree({"etc/environment": f"{name}={value}\n"}))
    notes = check_of(found, "environment").notes
    assert [note.code for note in notes] == ([] if code is None else [code])
    for note in notes:
        assert note.message.startswith(f"/etc/environment sets {name}={value}: ")
        assert note.hint


def test_variable_that_several_files_set() -> None:
    """One value is one note, however many files say it; Debian has a link to /etc/environment among them."""
    files = {
        "etc/environment": "CUDA_DEVICE_ORDER=FASTEST_FIRST\n",
        "usr/lib/environment.d/99-environment.conf": "CUDA_DEVICE_ORDER=FASTEST_FIRST\n",
    }
    root = tree(files)
    for one in (root, unpack_tree(take_snapshot(root).data, "a")):
        (note,) = check_of(diagnose(one), "environment").notes
        assert note.message.startswith(
            "/etc/environment and /usr/lib/environment.d/99-environment.conf set CUDA_DEVICE_ORDER="
        )


@pytest.mark.parametrize(
    "kernel, words", [((6, 1), "forgets it"), ((6, 12), "in common"), (None, "in common")]
)
def test_affinity_of_systemd_itself(kernel: tuple[int, int] | None, words: str) -> None:
    """CPUAffinity= narrows every service's ranks, or is forgotten by kernels before 6.2."""
    machine = discover(tree({}))
    settings = NOTHING_KNOWN._replace(
        manager=(Setting("CPUAffinity", "0-3", "/etc/systemd/system.conf"),), kernel=kernel
    )
    found = examine(machine, settings, plan_for(machine))
    (message,) = notes_of(found)["manager_affinity"]
    assert message.startswith(
        "CPUAffinity=0-3 is set for every service, in /etc/systemd/system.conf: "
    )
    assert words in message


def systemd(**changed: Any) -> dict[str, list[str]]:
    """The notes on a host whose settings are changed."""
    machine = discover(tree({}))
    return notes_of(examine(machine, NOTHING_KNOWN._replace(**changed), plan_for(machine)))


def test_policy_of_systemd_itself() -> None:
    """A memory policy for every service is the ranks' too."""
    policy = (Setting("NUMAPolicy", "interleave", "/etc/systemd/system.conf"),)
    assert "NUMAPolicy=interleave" in systemd(manager=policy)["manager_policy"][0]
    taken_back = (*policy, Setting("NUMAPolicy", "default", "/etc/systemd/system.conf.d/x.conf"))
    assert "manager_policy" not in systemd(manager=taken_back)


def test_services_that_give_cpus_away() -> None:
    """Container runtimes and managers of CPUs are named, each with what to do."""
    found = systemd(services=frozenset({"docker.service", "kubelet.service", "slurmd.service"}))
    assert found.keys() == {"containers", "other_manager"}
    assert found["other_manager"][0].startswith("kubelet.service and slurmd.service run,")


def test_cgroup_v1() -> None:
    """A controller on a v1 hierarchy enforces nothing that is planned."""
    assert "cgroup_v1" in systemd(cgroup_version=1)


def test_where_systemd_cannot_be_asked() -> None:
    """Inside of a container, and where something else started the system, no slice can be made: that is said first."""
    assert systemd(container="/.dockerenv", has_systemd=False, cgroup_version=1).keys() == {
        "container"
    }
    assert systemd(has_systemd=False).keys() == {"no_systemd"}
    assert systemd(has_systemd=True, cgroup_version=2) == {}


def test_huge_pages_on_some_nodes() -> None:
    """A node without huge pages that others have is where a worker finds none."""
    path = "sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages"
    found = diagnose(tree({path.format(0): "64\n", path.format(1): "0\n"}))
    (message,) = notes_of(found)["huge_pages"]
    assert "64 on node 0, 0 on node 1" in message
    uneven = diagnose(tree({path.format(0): "1000\n", path.format(1): "1\n"}))
    assert "huge_pages" in notes_of(uneven)
    partly = check_of(diagnose(tree({path.format(0): "64\n"})), "memory")
    assert partly.unknown == ("how many huge pages are set aside on each node",)
    even = diagnose(tree({path.format(0): "64\n", path.format(1): "64\n"}))
    assert "huge_pages" not in notes_of(even)


def test_virtual_machine() -> None:
    """Where CPUs really are is not known above a hypervisor."""
    (unknown,) = check_of(
        diagnose(tree({"proc/cpuinfo": "flags : hypervisor\n"})), "packages"
    ).unknown
    assert "this is a virtual machine" in unknown


# With the machine and the plan ----------------------------------------------------------------------


def test_what_the_machine_has_is_found_with_and_without_a_plan() -> None:
    """Isolated CPUs, cores that the ceiling cuts, and the ceiling itself are told of though nothing can be planned."""
    tree_ = make_tree(
        {0: "0-7,16-23", 1: "8-15,24-31"},
        [0, None],
        stride=16,
        isolated_cpus=CpuSet([7, 23]),
        cgroups=(CgroupFacts(path="/", cpus=CpuSet(range(28))),),
    )
    machine = discover(tree_)
    refused = examine(
        machine, NOTHING_KNOWN, (Problem("no_locality", "it has no node", "State it"),)
    )
    assert refused.ranks is None
    assert notes_of(refused)["no_locality"] == ["it has no node"]
    planned = examine(
        machine, NOTHING_KNOWN, plan_for(machine, locality={machine.accelerators[1].name: 1})
    )
    for found in (refused, planned):
        codes = notes_of(found).keys()
        assert {"isolated_cpus", "partial_cores", "ceiling"} <= codes
        assert check_of(found, "cores").state == check_of(found, "ceiling").state == "found"


def test_a_plans_old_notes_of_the_machine_do_not_count() -> None:
    """What was odd when the plan was made, and is not now, is not found."""
    plan = plan_for(make_host({0: "0-7", 1: "8-15"}, [0, 1], numa_balancing=1))
    now = make_host({0: "0-7", 1: "8-15"}, [0, 1], numa_balancing=0)
    assert "numa_balancing" in {note.code for note in plan.notes}
    assert "numa_balancing" not in notes_of(examine(now, NOTHING_KNOWN, plan))


def test_notes_on_ranks_name_them() -> None:
    """A note on one rank says which."""
    machine = make_host({0: "0-7", 1: "8-15"}, [0, 1], memory={1: 0})
    (message,) = notes_of(examine(machine, NOTHING_KNOWN, plan_for(machine)))["remote_memory"]
    assert message.startswith("Rank 1: Node 1 has no memory")


@pytest.mark.parametrize("name", [sample.name for sample in list_samples()])
def test_every_sample_is_looked_at(name: str) -> None:
    """Each sample gets an answer from every check, and each note has a code, a sentence and, but for few, a hint."""
    root = build_tree(read_sample(name))
    machine = discover(root)
    found = examine(machine, read_settings(root, machine), make_plan(machine, PlacementRequest()))
    assert len({check.name for check in found.checks}) == len(found.checks) == 12
    for check in found.checks:
        assert (check.state == "found") == bool(check.notes)
        assert bool(check.why) == (check.state == "fine")
        assert check.state != "unknown" or check.unknown
    value = diagnosis_to_json(found)
    assert value["schema"] == "provision.doctor/1"
    assert value == json.loads(json.dumps(value))


# As its user types it -------------------------------------------------------------------------------


def call(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of one command line."""
    status = run_command(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


ODD_FILES = {
    **GOOD_FILES,
    **interrupt_files(50, "5", NIC),
    "etc/environment": "CUDA_DEVICE_ORDER=FASTEST_FIRST\n",
}


def test_a_folder_and_its_snapshot_say_the_same(capsys: Capture, tmp_path: Path) -> None:
    """A capture carries all that doctor reads: what is found is the same."""
    root = tree(ODD_FILES, *GOOD_FOLDERS)
    write_tree(root, tmp_path / "tree")
    for folder in root.empty_folders:
        (tmp_path / "tree" / folder).mkdir(parents=True, exist_ok=True)
    save_snapshot(take_snapshot(root).data, tmp_path / "host.tar.gz")
    found = {}
    for option, path in (("--root", "tree"), ("--snapshot", "host.tar.gz")):
        status, out, err = call(capsys, "doctor", option, str(tmp_path / path), "--json")
        assert (status, err) == (0, "")
        found[option] = out.replace(f"{tmp_path}/tree/", "PLACE").replace(
            f"{tmp_path}/host.tar.gz:/", "PLACE"
        )
    assert found["--root"] == found["--snapshot"]
    notes = [
        note["code"] for check in json.loads(found["--root"])["checks"] for note in check["notes"]
    ]
    assert notes == ["foreign_interrupts", "cuda_device_order"]


def test_what_people_see(capsys: Capture, tmp_path: Path) -> None:
    """What was found comes first, with its hint; then what is fine, then what is not known."""
    write_tree(tree({**interrupt_files(50, "5", NIC)}), tmp_path)
    status, out, err = call(capsys, "doctor", "--root", str(tmp_path))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[1] == "Judged by the plan that provision plan makes: 4 ranks"
    at = lines.index("Interrupts")
    assert lines[at + 1].startswith("  foreign_interrupts: The interrupt of mlx5_0")
    assert lines[at + 2].startswith("    (Send it to CPUs 0-3")
    assert at < lines.index("Fine") < lines.index("Not known")
    assert lines[-1] == "1 found, 8 checks fine, 5 not known"


def test_snapshot_from_standard_input(tmp_path: Path) -> None:
    """A snapshot comes from a pipe too, and is read once."""
    save_snapshot(take_snapshot(tree({})).data, tmp_path / "s")
    done = subprocess.run(
        [*PROVISION, "doctor", "--snapshot", "-"],
        input=(tmp_path / "s").read_bytes(),
        capture_output=True,
        check=True,
    )
    assert b"Judged by the plan that provision plan makes: 4 ranks" in done.stdout


def test_refused_plan_is_a_finding(capsys: Capture, tmp_path: Path) -> None:
    """Where no plan can be made, that is what is found, and the rest is looked at all the same."""
    write_tree(make_tree({0: "0-7", 1: "8-15"}, [None]), tmp_path)
    status, out, err = call(capsys, "doctor", "--root", str(tmp_path))
    assert (status, err) == (0, "")
    assert "There is no plan for it: placement says why" in out
    assert "no_locality: " in out
    assert "interrupts: whose cores interrupts land on, as there is no plan" in out


def test_plan_by_options_and_by_file(capsys: Capture, tmp_path: Path) -> None:
    """The plan that it judges by is what the options make, or a file's; a stranger's file is refused."""
    write_tree(tree(interrupt_files(50, "5", NIC)), tmp_path / "tree")
    where = ("--root", str(tmp_path / "tree"))
    _, out, _ = call(capsys, "doctor", *where, "--devices", "0,2", "--json")
    assert json.loads(out)["ranks"] == 2
    _, out, _ = call(capsys, "plan", *where, "--reserve-cores", "6", "--json")
    (tmp_path / "plan.json").write_text(out)
    _, out, _ = call(capsys, "doctor", *where, "--plan", str(tmp_path / "plan.json"))
    assert f"Judged by the plan in {tmp_path}/plan.json: 4 ranks" in out
    assert "foreign_interrupts" not in out  # CPU 5 is reserved in it
    status, _, err = call(
        capsys, "doctor", "--sample", "uneven-5-3", "--plan", str(tmp_path / "plan.json")
    )
    assert status == 1
    assert "the plan is for another machine" in err


def test_texts_of_other_readers(capsys: Capture, tmp_path: Path) -> None:
    """What they agree on is counted; a contradiction is found, and is exit status 3."""
    text = "node 0 cpus: 0 1 2 3 4 5 6 7\nnode 1 cpus: 8 9 10 11 12 13 14 15\n"
    (tmp_path / "numactl.txt").write_text(text)
    write_tree(tree({}), tmp_path / "tree")
    where = ("doctor", "--root", str(tmp_path / "tree"), "--numactl", str(tmp_path / "numactl.txt"))
    status, out, _ = call(capsys, *where)
    assert status == 0
    assert f"  numactl: {tmp_path}/numactl.txt: 3 of 3 facts agree\n" in out
    assert (
        f"  numactl: distances of NUMA nodes 0-1 (they are not in {tmp_path}/numactl.txt)\n" in out
    )
    (tmp_path / "numactl.txt").write_text(text.replace("15", "17"))
    status, out, _ = call(capsys, *where)
    assert status == 3
    assert "\nnumactl\n  numactl_cpus: " in out
    topo = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\nGPU0\tX\tPHB\tPIX\tSYS\t0-7\t0\n"
    (tmp_path / "topo.txt").write_text(topo)
    status, out, _ = call(
        capsys,
        "doctor",
        "--root",
        str(tmp_path / "tree"),
        "--nvidia-smi",
        str(tmp_path / "topo.txt"),
    )
    assert status == 3
    assert "nvidia_smi_link: " in out
    assert "GPU0 and GPU1 are PHB, and here they are on one NUMA node; GPU0 and GPU2 are PIX" in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--numactl", "/nonexistent"), "/nonexistent: can't be read"),
        (("--nvidia-smi", __file__), "holds no matrix of GPUs"),
        (("--numactl", "-", "--nvidia-smi", "-"), "standard input can be read once"),
        (("--plan", "x", "--devices", "0"), "--plan and --devices exclude each other"),
        (("--devices", "x"), "--devices: "),
        (("--policy", "best"), "--policy"),
    ],
)
def test_wrong_input(capsys: Capture, arguments: tuple[str, ...], words: str) -> None:
    """Wrong options and texts of another form are refused with exit status 2."""
    status, out, err = call(capsys, "doctor", "--sample", "two-socket-8gpu", *arguments)
    assert (status, out) == (2, "")
    assert words in err


def test_hwloc_says_nothing_of_settings(capsys: Capture, tmp_path: Path) -> None:
    """Of an XML all that it does not hold is not known."""
    from tests.test_hwloc import lstopo

    write_tree(build_tree(read_sample("two-socket-8gpu"), with_masks=True), tmp_path / "tree")
    (tmp_path / "host.xml").write_text(lstopo(tmp_path / "tree", 2))
    status, out, _ = call(capsys, "doctor", "--hwloc", str(tmp_path / "host.xml"), "--json")
    assert status == 0
    states = {check["name"]: check["state"] for check in json.loads(out)["checks"]}
    assert states["interrupts"] == states["environment"] == states["systemd"] == "unknown"
    # The driver is not in it, which is no fault of the host's.
    assert states["cards"] == "fine"
    assert states["data"] == "unknown"


def test_this_system(capsys: Capture) -> None:
    """The running system is looked at, whatever it is, by an ordinary user too."""
    status, out, err = call(capsys, "doctor", "--json")
    assert (status, err) == (0, "")
    value = json.loads(out)
    assert value["is_this_system"] is True
    states = {check["name"]: check["state"] for check in value["checks"]}
    # Of the running system all files are there, or are not.
    assert "unknown" not in (states["environment"], states["memory"], states["ceiling"])
    assert (states["cards"] == "found") == (value["ranks"] is None)
