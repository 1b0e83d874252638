"""The pieces that work on the running system, each for itself: bus, layout, files, cgroups, run, guard."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.applied import Applied, Before, format_applied, parse_applied, read_applied
from provisioner.bus import format_mask, open_bus, parse_mask
from provisioner.cpusets import (
    find_unified,
    list_cgroup_processes,
    list_child_cgroups,
    read_cpuset,
    walk_cgroups,
)
from provisioner.errors import (
    BusError,
    InputError,
    Problem,
    ProblemsError,
    ProvisionError,
    WriteError,
)
from provisioner.filestore import (
    NOTHING,
    Entry,
    file_entry,
    link_entry,
    look,
    put,
    remove_folders,
    remove_leftovers,
)
from provisioner.guard import run_guarded
from provisioner.idset import CpuSet, NodeSet
from provisioner.layout import LAYOUTS, drop_in_folders, slice_cgroup, unit_cgroup
from provisioner.observe import read_drop_in
from provisioner.plan import Plan
from provisioner.processes import read_process
from provisioner.render import RenderedFile
from provisioner.root import DirectoryRoot, MemoryRoot
from provisioner.run import (
    CommandError,
    find_program,
    find_rank,
    merge_environment,
    service_properties,
)
from provisioner.sysfs import parse_available
from provisioner.verify import RankReport, Report
from provisioner.verify_report import format_prometheus
from tests.rendering import make_plan, make_rank, make_service

ROOT = Path(__file__).resolve().parent.parent

# Masks -------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.sets(st.integers(0, 8191)))
def test_set_survives_systemds_byte_array(ids: set[int]) -> None:
    data = format_mask(CpuSet(ids))
    assert len(data) % 8 == 0
    assert parse_mask(data, CpuSet) == CpuSet(ids)


def test_byte_array_is_little_endian() -> None:
    """CPU n is bit n % 8 of byte n // 8, and an empty array is an unset property."""
    assert format_mask(CpuSet((0, 1, 9))) == [3, 2, 0, 0, 0, 0, 0, 0]
    assert format_mask(CpuSet()) == []
    assert parse_mask([0, 1], NodeSet) == NodeSet((8,))


def test_missing_systemd_says_what_to_install_or_run() -> None:
    """Without pystemd or without a booted systemd the error names which, and an action."""
    if os.path.isdir("/run/systemd/system"):
        pytest.skip("this system is booted by systemd")
    with pytest.raises(BusError) as refused:
        open_bus()
    assert refused.value.name in {"NoPystemd", "NotBooted"}
    assert refused.value.hint
    expected = "pip install" if refused.value.name == "NoPystemd" else "on the host"
    assert expected in refused.value.hint


# Names and places --------------------------------------------------------------------------------


def test_each_dash_of_a_slice_is_a_level() -> None:
    assert slice_cgroup("provision-rank0.slice") == "/provision.slice/provision-rank0.slice"
    assert slice_cgroup("a-b-c.slice") == "/a.slice/a-b.slice/a-b-c.slice"
    assert slice_cgroup("-.slice") == "/"
    assert (unit_cgroup("init.scope"), unit_cgroup("x.service")) == ("/init.scope", None)


def test_drop_in_folders_are_those_of_systemd() -> None:
    """A type's, each prefix's, a template's and the unit's own, as systemd.unit(5) lists them."""
    assert drop_in_folders("a-b-c.slice") == (
        "slice.d",
        "a-.slice.d",
        "a-b-.slice.d",
        "a-b-c.slice.d",
    )
    assert drop_in_folders("x@3.service") == ("service.d", "x@.service.d", "x@3.service.d")


def test_files_lie_where_systemd_and_people_look() -> None:
    """Units, what is no unit, and programs each have their folder, for a boot or for good."""
    lasting, runtime = LAYOUTS["persistent"], LAYOUTS["runtime"]
    assert lasting.place("provision-rank0.slice") == "/etc/systemd/system/provision-rank0.slice"
    assert lasting.place("chat/rank0.env") == "/etc/provision/chat/rank0.env"
    assert lasting.place("chat-run") == "/usr/local/bin/chat-run"
    assert lasting.plan_path == "/etc/provision/plan.json"
    assert runtime.place("system.slice.d/x.conf") == "/run/systemd/system/system.slice.d/x.conf"
    assert runtime.place("plan.json") == "/run/provision/plan.json"


def test_settings_of_a_drop_in_are_those_about_a_cpuset(tmp_path: Path) -> None:
    path = tmp_path / "x.conf"
    path.write_text(
        "[Slice]\n AllowedCPUs = 1\nMemoryHigh=1G\n#AllowedCPUs=3\nDisableControllers=cpuset\n"
    )
    found = read_drop_in(str(path))
    assert found.settings == ("AllowedCPUs = 1", "DisableControllers=cpuset")
    assert not found.is_ours


def test_drop_in_that_cannot_be_read_may_say_anything(tmp_path: Path) -> None:
    assert read_drop_in(str(tmp_path / "gone.conf")).settings == ("unreadable",)


# The record --------------------------------------------------------------------------------------

APPLIED = Applied(
    mode="runtime",
    complete=False,
    files={"/run/provision/plan.json": "ab" * 32},
    folders=("/run/provision",),
    slices=("provision.slice",),
    before={"system.slice": Before(CpuSet((0, 1)), NodeSet())},
)


def test_record_survives_its_text() -> None:
    assert parse_applied(format_applied(APPLIED), "x") == APPLIED


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "is no JSON"),
        ('{"schema": "provision.plan/1"}', "expected 'provision.applied/1'"),
        (format_applied(APPLIED).replace('"0-1"', "7"), r"\$.before"),
        (format_applied(APPLIED).replace('"runtime"', '"other"'), r"\$.mode"),
    ],
)
def test_record_that_is_none_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        parse_applied(text, "/etc/provision/applied.json")
    assert refused.value.message.startswith("/etc/provision/applied.json")


def test_no_record_means_that_nothing_was_applied() -> None:
    if any(Path(one.applied_path).exists() for one in LAYOUTS.values()):
        pytest.skip("a plan is in force on this system")
    assert read_applied() is None


# Files -------------------------------------------------------------------------------------------


def test_files_are_put_whole_and_taken_away(tmp_path: Path) -> None:
    """New files, links and folders are made, equal ones left alone, and NOTHING removes."""
    script, link, old = (str(tmp_path / name) for name in ("a/b/run", "link", "old"))
    Path(old).write_text("old")
    made = put(
        {
            script: file_entry(RenderedFile("#!/bin/sh\n", executable=True)),
            link: link_entry("a/b/run"),
            old: NOTHING,
        }
    )
    assert made == (str(tmp_path / "a"), str(tmp_path / "a/b"))
    assert Path(script).stat().st_mode & 0o777 == 0o755
    assert look(link) == Entry(stat.S_IFLNK, b"a/b/run")
    assert look(old) == NOTHING
    before = Path(script).stat().st_ino
    put({script: file_entry(RenderedFile("#!/bin/sh\n", executable=True))})
    assert Path(script).stat().st_ino == before
    put({link: file_entry(RenderedFile("text"))})
    assert Path(link).read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link"]


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"file/x: can't be written") as refused:
        put({str(tmp_path / "file/x"): file_entry(RenderedFile("x"))})
    assert refused.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_leftovers_of_killed_runs_go_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".provision-tmp-abc").write_text("")
    (tmp_path / "mine").write_text("")
    remove_leftovers([str(tmp_path / "unit")])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_folders_go_when_they_are_empty(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "c/mine").write_text("")
    kept = remove_folders([str(tmp_path / name) for name in ("a", "a/b", "c", "gone")])
    assert kept == (str(tmp_path / "c"),)
    assert not (tmp_path / "a").exists()


# Cgroups and processes ---------------------------------------------------------------------------

TREE = MemoryRoot(
    "box",
    {
        "proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
        "sys/fs/cgroup/cgroup.controllers": "cpuset cpu\n",
        "sys/fs/cgroup/cgroup.procs": "0\n2\n",
        "sys/fs/cgroup/cpuset.cpus.effective": "0-3\n",
        "sys/fs/cgroup/cpuset.mems.effective": "0\n",
        "sys/fs/cgroup/memory.slice/cgroup.procs": "",
        "sys/fs/cgroup/memory.slice/cpuset.cpus": "1\n",
        "sys/fs/cgroup/memory.slice/cpuset.mems": "\n",
        "sys/fs/cgroup/memory.slice/cpuset.cpus.effective": "1\n",
        "sys/fs/cgroup/memory.slice/cpuset.mems.effective": "0\n",
        "sys/fs/cgroup/memory.slice/cpuset.cpus.partition": "member\n",
        "sys/fs/cgroup/memory.slice/x.scope/cgroup.procs": "12\n7\n12\n",
        "proc/7/task/7/status": "Name:\tpython\nCpus_allowed_list:\t1\nMems_allowed_list:\t0\n",
        "proc/7/task/9/status": "Name:\tNCCL\nCpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n",
    },
)


def test_cgroup_is_read_as_it_is() -> None:
    """What it was told, what it is granted, and a controller that is off is None and not empty."""
    unified = find_unified(TREE)
    assert unified is not None
    assert unified.has_cpuset
    found = read_cpuset(TREE, unified.mount, "/memory.slice")
    assert found is not None
    assert (found.cpus, found.nodes, found.effective_cpus) == (
        CpuSet((1,)),
        NodeSet(),
        CpuSet((1,)),
    )
    below = read_cpuset(TREE, unified.mount, "/memory.slice/x.scope")
    assert below is not None
    assert (below.cpus, below.effective_cpus, below.partition) == (None, None, None)
    assert read_cpuset(TREE, unified.mount, "/gone.slice") is None


def test_cgroups_are_walked_whatever_they_are_called() -> None:
    assert list_child_cgroups(TREE, "sys/fs/cgroup", "/") == ("/memory.slice",)
    assert list(walk_cgroups(TREE, "sys/fs/cgroup"))[-1] == "/memory.slice/x.scope"
    assert list_cgroup_processes(TREE, "sys/fs/cgroup", "/memory.slice/x.scope") == (7, 12)
    assert list_cgroup_processes(TREE, "sys/fs/cgroup", "/") == (2,)


def test_process_is_read_with_each_thread() -> None:
    process = read_process(TREE, 7)
    assert process is not None
    assert process.name == "python"
    assert [(task.id, str(task.cpus)) for task in process.tasks] == [(7, "1"), (9, "0-3")]
    assert read_process(TREE, 8) is None


def test_process_with_a_strange_name_is_read() -> None:
    """A process may call itself what is no text; that is no reason not to look at it."""
    program = (
        "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, b'\\xff\\xfe\\n'); "
        "print('up', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        process = read_process(DirectoryRoot("/"), child.pid)
        assert process is not None
        assert process.tasks[0].cpus
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert read_process(DirectoryRoot("/"), child.pid) is None


def test_available_memory_of_a_node_counts_what_can_be_freed() -> None:
    text = (
        "Node 0 MemTotal: 100 kB\nNode 0 MemFree: 10 kB\nNode 0 Active(file): 3 kB\n"
        "Node 0 Inactive(file): 4 kB\nNode 0 Active(anon): 50 kB\nNode 0 SReclaimable: 2 kB\n"
    )
    assert parse_available(text) == 19 * 1024


# Run ---------------------------------------------------------------------------------------------

PLAN = make_plan()
SERVICE = PLAN.services[0]


def merged(plan: Plan = PLAN, rank: int = 1, **caller: str) -> dict[str, str]:
    service = plan.services[0]
    return merge_environment(plan, service, service.ranks[rank], "/etc/provision", caller)


def test_rank_is_named_by_option_or_environment() -> None:
    assert find_rank(PLAN, None, "1", "0")[1].rank == 1
    assert find_rank(PLAN, None, None, "0")[1].rank == 0
    for number, words in (
        ("2", "expected 0 to 1"),
        ("-1", "expected"),
        ("x", "expected"),
        (None, "neither"),
    ):
        with pytest.raises(InputError, match=words):
            find_rank(PLAN, None, number, None)


def test_service_is_named_where_there_are_several() -> None:
    two = make_plan(
        make_service(make_rank(0, name="chat"), name="chat"),
        make_service(make_rank(0, name="batch", cpus="4-7"), name="batch"),
    )
    with pytest.raises(InputError, match="2 services: chat, batch"):
        find_rank(two, None, "0", None)
    assert find_rank(two, "batch", "0", None)[0].name == "batch"
    with pytest.raises(InputError, match="expected chat or batch"):
        find_rank(two, "x", "0", None)


def test_local_rank_is_no_rank_where_vendors_are_mixed() -> None:
    """It counts the ranks of one vendor, so that the rank has to be given."""
    mixed = make_plan(make_service(make_rank(0), make_rank(1, vendor="amd")))
    with pytest.raises(InputError, match="--rank does not say one"):
        find_rank(mixed, None, None, "0")
    found = merge_environment(
        mixed,
        mixed.services[0],
        mixed.services[0].ranks[1],
        "/etc/provision",
        {"ROCR_VISIBLE_DEVICES": "3", "NCCL_IGNORE_CPU_AFFINITY": "1"},
    )
    assert "ROCR_VISIBLE_DEVICES" not in found
    assert found["HIP_VISIBLE_DEVICES"] == "1"


def test_environment_is_the_callers_with_the_ranks_over_it() -> None:
    """Thread counts are the plan's, for torchrun sets OMP_NUM_THREADS=1 by itself."""
    found = merged(HOME="/h", OMP_NUM_THREADS="1", LOCAL_RANK="0", NCCL_IGNORE_CPU_AFFINITY="1")
    assert found["HOME"] == "/h"
    assert found["OMP_NUM_THREADS"] == "4"
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("1", "0,1")
    assert "NCCL_IGNORE_CPU_AFFINITY" not in found


def test_callers_list_of_cards_keeps_the_callers_numbers() -> None:
    found = merged(CUDA_VISIBLE_DEVICES="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert (found["CUDA_VISIBLE_DEVICES"], found["LOCAL_RANK"]) == ("1", "0")
    assert found["LOCAL_WORLD_SIZE"] == "1"


def test_program_is_found_or_told_as_the_shell_does(tmp_path: Path) -> None:
    assert os.path.isabs(find_program(["sh"]))
    (tmp_path / "text").write_text("")
    for command, status in (
        ("no-such-program", 127),
        ("/no/such", 127),
        (str(tmp_path / "text"), 126),
    ):
        with pytest.raises(CommandError) as refused:
            find_program([command])
        assert refused.value.exit_status == status


def test_service_prefers_one_node_where_there_is_no_wall() -> None:
    soft = make_service(make_rank(0, nodes="1"), memory="prefer")
    found = service_properties(
        soft, soft.ranks[0], ["x", "$y"], "/bin/x", {"A": "b"}, directory="/"
    )
    assert (found["NUMAPolicy"], found["NUMAMask"]) == (1, NodeSet((1,)))
    assert found["ExecStart"] == ["/bin/x", "$$y"]
    assert found["Environment"] == ["A=b"]
    hard = service_properties(SERVICE, SERVICE.ranks[0], ["x"], "/bin/x", {}, directory=None)
    assert "NUMAPolicy" not in hard


# Guard -------------------------------------------------------------------------------------------


def test_guarded_work_returns_its_value() -> None:
    assert run_guarded(lambda: CpuSet((1, 2)), lambda: (), "work") == CpuSet((1, 2))


def test_guarded_work_raises_what_it_raised() -> None:
    def fail() -> None:
        raise ProblemsError([Problem("a", "first"), Problem("b", "second", "hint")], exit_status=1)

    with pytest.raises(ProblemsError) as failed:
        run_guarded(fail, lambda: (), "work")
    assert [one.message for one in failed.value.problems] == ["first", "second"]


def test_killed_work_is_gone_back_on() -> None:
    """If what does the work is killed, who waits for it goes back and says by which signal."""
    done: list[str] = []

    def go_back() -> tuple[Problem, ...]:
        done.append("back")
        return ()

    with pytest.raises(ProvisionError, match=r"work was killed by signal 9: what was before is in"):
        run_guarded(lambda: os.kill(os.getpid(), signal.SIGKILL), go_back, "work")
    assert done == ["back"]
    with pytest.raises(ProblemsError, match="not all that was before") as failed:
        run_guarded(
            lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: (Problem("x", "left"),), "work"
        )
    assert failed.value.problems[1].message == "left"


def test_work_goes_on_when_the_command_is_killed(tmp_path: Path) -> None:
    """If the command is killed, what does the work comes to its end."""
    program = f"""
        import os, pathlib, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from provisioner.guard import run_guarded
        def work():
            print("working", flush=True)
            time.sleep(0.5)
            pathlib.Path({str(tmp_path / "done")!r}).write_text("done")
        run_guarded(work, lambda: (), "work")
    """
    command = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE
    )
    assert command.stdout is not None
    assert command.stdout.readline() == b"working\n"
    command.kill()
    command.wait()
    command.stdout.close()
    end = time.monotonic() + 20
    while not (tmp_path / "done").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert (tmp_path / "done").read_text() == "done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_command_stops_the_work(number: signal.Signals, tmp_path: Path) -> None:
    """The work is told, goes back itself, and the command ends as an interrupted one."""
    program = f"""
        import pathlib, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from provisioner.guard import run_guarded
        def work():
            try:
                print("working", flush=True)
                time.sleep(30)
            except KeyboardInterrupt:
                pathlib.Path({str(tmp_path / "back")!r}).write_text("back")
                raise
        try:
            run_guarded(work, lambda: (), "work")
        except KeyboardInterrupt:
            sys.exit(130)
    """
    command = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE
    )
    assert command.stdout is not None
    assert command.stdout.readline() == b"working\n"
    command.send_signal(number)
    assert command.wait(20) == 130
    command.stdout.close()
    assert (tmp_path / "back").read_text() == "back"


# Prometheus --------------------------------------------------------------------------------------


def test_gauges_name_each_rank_and_escape_labels() -> None:
    rank = RankReport(
        service="chat",
        rank=0,
        slice="chat-rank0.slice",
        planned_cpus=CpuSet((0, 1)),
        configured_cpus=CpuSet((0, 1)),
        effective_cpus=None,
        planned_nodes=NodeSet((0,)),
        configured_nodes=NodeSet((0,)),
        effective_nodes=NodeSet((0,)),
        processes=1,
        threads=3,
        anonymous_bytes={0: 4096, 1: 8192},
        file_bytes=None,
        local_share=1 / 3,
        ok=False,
    )
    text = format_prometheus(Report((rank,), (), ()))
    lines = text.splitlines()
    assert "provision_verify_ok 1" in lines
    assert 'provision_rank_ok{service="chat",rank="0"} 0' in lines
    assert 'provision_rank_anonymous_bytes{service="chat",rank="0",node="1"} 8192' in lines
    assert 'provision_rank_local_ratio{service="chat",rank="0"} 0.333333333333' in lines
    assert not [line for line in lines if line.startswith("provision_rank_effective_cpus{")]
    assert text.endswith("\n")
