"""Applying, verifying and undoing on a simulated systemd and kernel; tests/vm has the real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.applied import Applied, parse_applied
from provisioner.apply import Extras, Job, _carry_out, carry_out, prepare
from provisioner.bus import ListedUnit
from provisioner.data import find_data
from provisioner.errors import BusError, ProblemsError, WriteError
from provisioner.idset import CpuSet, NodeSet
from provisioner.observe import observe
from provisioner.plan import Plan
from provisioner.preflight import Permissions
from provisioner.render import is_ours
from provisioner.root import MemoryRoot
from provisioner.undo import undo
from provisioner.verify import Report, verify
from tests.rendering import FINGERPRINT, make_plan, make_rank, make_service
from tests.simulated import NODES, Group, SimulatedHost

SYSTEM = ("/system.slice", "/user.slice", "/init.scope")
OLD = make_plan(confine=True)
NEW = make_plan(
    make_service(make_rank(0, cpus="0-2"), make_rank(1, cpus="3-7")), reserved="8-9", confine=True
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated host does at once what it does at all."""
    monkeypatch.setattr("provisioner.enforce.SETTLE_SECONDS", 0.0)


@pytest.fixture(params=[True, False], ids=["reload reaches cgroups", "reload leaves cgroups"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> SimulatedHost:
    return SimulatedHost(tmp_path, follows=request.param)


def applied_on(host: SimulatedHost) -> Applied | None:
    """The record on a host."""
    path = Path(host.layout.applied_path)
    return parse_applied(path.read_text(), str(path)) if path.exists() else None


def prepared(
    host: SimulatedHost,
    plan: Plan = OLD,
    *,
    extras: Extras | None = None,
    allowed: Permissions | None = None,
) -> Job:
    """What an apply would do there."""
    return prepare(
        plan,
        host.layout,
        host,
        host.root,
        applied=applied_on(host),
        fingerprint=FINGERPRINT,
        extras=extras or Extras(),
        allowed=allowed or Permissions(),
        program="/opt/provision/bin/provision",
    )


def apply(
    host: SimulatedHost, plan: Plan = OLD, tell: Callable[[str], None] = lambda _: None
) -> Report:
    """An apply, carried out."""
    return carry_out(prepared(host, plan), host, host.root, tell)


def look(host: SimulatedHost, plan: Plan = OLD) -> Report:
    """What verify says there."""
    seen = observe(plan, host, host.root, fingerprint=FINGERPRINT, applied=applied_on(host))
    return verify(plan, seen)


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


def tree(host: SimulatedHost) -> dict[str, str]:
    """Every file and folder that an apply may touch."""
    base = Path(host.layout.units).parent
    return {str(path): path.read_text() if path.is_file() else "folder" for path in base.rglob("*")}


def granted(host: SimulatedHost) -> dict[str, tuple[CpuSet, NodeSet]]:
    return {path: host.effective(path) for path in host.groups}


def test_plan_is_in_force_after_apply(host: SimulatedHost) -> None:
    report = apply(host)
    assert report.ok, report.findings
    assert host.effective("/provision.slice/provision-rank1.slice") == (
        CpuSet.parse_list("4-7"),
        NodeSet([1]),
    )
    assert [str(host.effective(path)[0]) for path in SYSTEM] == ["8-9"] * 3


def test_second_apply_has_nothing_to_do(host: SimulatedHost) -> None:
    apply(host)
    assert prepared(host).is_done


def test_another_plan_replaces_the_first_and_keeps_workers(host: SimulatedHost) -> None:
    apply(host)
    host.spawn("/provision.slice/provision-rank0.slice", 100)
    report = apply(host, NEW)
    assert "process_cpus" in codes(report)  # the simulated process does not follow its cgroup
    assert str(host.effective("/provision.slice/provision-rank0.slice")[0]) == "0-2"
    assert not [call for call in host.calls if call.startswith("stop")]


def test_where_a_reload_does_not_reach_cgroups_they_are_set_once_more(tmp_path: Path) -> None:
    """systemd#40438: what a reload makes of running cgroups is not believed, but set and looked at."""
    host = SimulatedHost(tmp_path, follows=False)
    apply(host)
    host.calls.clear()
    apply(host, NEW)
    assert "set provision-rank0.slice 0-2 0" in host.calls
    assert host.calls.count("reload") == 2  # the second tells systemd that the drop-ins are gone


@pytest.mark.parametrize("first", [None, OLD], ids=["at first", "over another plan"])
def test_failure_at_any_step_leaves_what_was_before(
    first: Plan | None, host: SimulatedHost, tmp_path: Path
) -> None:
    """Whichever step fails, files and cgroups are as before, and the next apply succeeds."""
    steps: list[str] = []
    apply(_start(host, first), NEW, steps.append)
    assert steps[0] == "record what was before"
    assert steps[-1] == "complete the record"
    for number, step in enumerate(steps):
        base = tmp_path / str(number)
        base.mkdir()
        other = _start(SimulatedHost(base, follows=host.follows), first)
        before, sets = tree(other), granted(other)
        told: list[str] = []

        def fail(step: str, told: list[str] = told, at: int = number) -> None:
            told.append(step)
            if len(told) == at + 1:
                raise WriteError(f"{step}: can't be done")

        with pytest.raises(ProblemsError) as failed:
            apply(other, NEW, fail)
        assert "what was before is in force again" in failed.value.problems[-1].message
        assert tree(other) == before, step
        assert granted(other) == sets, step
        assert apply(other, NEW).ok


def _start(host: SimulatedHost, first: Plan | None) -> SimulatedHost:
    if first is not None:
        apply(host, first)
    return host


def test_undo_leaves_files_and_effective_sets_as_before(host: SimulatedHost) -> None:
    before, sets = tree(host), granted(host)
    apply(host)
    applied = applied_on(host)
    assert applied is not None
    undo(applied, host.layout, host, host.root, lambda _: None)
    assert tree(host) == before
    assert granted(host) == sets


def test_undo_gives_back_what_the_operator_had_confined(host: SimulatedHost) -> None:
    own = Path(host.layout.units, "system.slice.d/10-mine.conf")
    own.parent.mkdir()
    own.write_text("[Slice]\nAllowedCPUs=0-3\n")
    host.reload()
    host.write("/system.slice", CpuSet.parse_list("0-3"), NodeSet())
    apply(host)
    assert str(host.effective("/system.slice")[0]) == "8-9"
    applied = applied_on(host)
    assert applied is not None
    undo(applied, host.layout, host, host.root, lambda _: None)
    assert str(host.effective("/system.slice")[0]) == "0-3"
    assert own.read_text() == "[Slice]\nAllowedCPUs=0-3\n"


def test_undo_releases_workers_and_stops_none(host: SimulatedHost) -> None:
    """systemd#43846: a cgroup that keeps its set while workers are in it is written the machine's whole one."""
    apply(host)
    host.spawn("/provision.slice/provision-rank0.slice", 100)
    applied = applied_on(host)
    assert applied is not None
    done = undo(applied, host.layout, host, host.root, lambda _: None)
    assert done.released == ("provision.slice", "provision-rank0.slice")
    assert host.effective("/provision.slice/provision-rank0.slice") == (host.online, NODES)


def test_undo_keeps_what_is_no_longer_ours(host: SimulatedHost) -> None:
    apply(host)
    path = Path(host.layout.units, "provision-rank0.slice")
    path.write_text("[Slice]\nMemoryHigh=1G\n")
    applied = applied_on(host)
    assert applied is not None
    done = undo(applied, host.layout, host, host.root, lambda _: None)
    assert done.kept_files == (str(path),)
    assert path.read_text() == "[Slice]\nMemoryHigh=1G\n"


def test_confinement_that_is_no_longer_planned_is_lifted(host: SimulatedHost) -> None:
    apply(host)
    apply(host, make_plan())
    assert [host.effective(path)[0] for path in SYSTEM] == [host.online] * 3
    applied = applied_on(host)
    assert applied is not None
    assert applied.before == {}
    assert prepared(host, make_plan()).is_done


def test_rank_that_is_no_longer_planned_goes_unless_it_runs(host: SimulatedHost) -> None:
    smaller = make_plan(make_service(make_rank(0)), confine=True)
    apply(host)
    host.spawn("/provision.slice/provision-rank1.slice", 100)
    with pytest.raises(ProblemsError) as refused:
        prepared(host, smaller)
    assert "provision-rank1.slice is not in the new plan" in refused.value.problems[0].message
    host.groups["/provision.slice/provision-rank1.slice"].processes.clear()
    apply(host, smaller)
    assert "/provision.slice/provision-rank1.slice" not in host.groups
    assert not Path(host.layout.units, "provision-rank1.slice").exists()


def test_memory_nodes_of_running_workers_change_only_when_told(host: SimulatedHost) -> None:
    other = make_plan(make_service(make_rank(0, nodes="1"), make_rank(1)), confine=True)
    apply(host)
    host.spawn("/provision.slice/provision-rank0.slice", 100)
    with pytest.raises(ProblemsError) as refused:
        prepared(host, other)
    assert "--migrate-memory" in refused.value.problems[0].hint
    prepared(host, other, allowed=Permissions(migrate_memory=True))


def test_static_units_stay_until_told_otherwise(host: SimulatedHost) -> None:
    carry_out(
        prepared(host, extras=Extras(boot_check=True, verify_timer=True)),
        host,
        host.root,
        lambda _: None,
    )
    units = Path(host.layout.units)
    program = (units / "provision-check.service.d/10-provision-program.conf").read_text()
    assert "\nExecStart=\nExecStart=/opt/provision/bin/provision verify --boot\n" in program
    link = units / "timers.target.wants/provision-verify.timer"
    assert str(link.readlink()) == str(units / "provision-verify.timer")
    assert prepared(host).is_done
    job = prepared(host, extras=Extras(boot_check=False))
    assert str(units / "provision-check.service") in job.stale
    assert str(units / "provision-verify.timer") not in job.stale


def test_everything_that_speaks_against_it_is_said_at_once(host: SimulatedHost) -> None:
    units = Path(host.layout.units)
    (units / "provision-rank0.slice").write_text("[Slice]\n")
    (units / "provision-rank1.slice").symlink_to("/dev/null")
    host.units["-.slice"] = host.units.get("-.slice") or type(host.units["system.slice"])(
        disabled=("cpuset",)
    )
    with pytest.raises(ProblemsError) as refused:
        prepared(host)
    found = [problem.code for problem in refused.value.problems]
    assert found == ["controller_disabled", "foreign_file", "foreign_file"]


def test_need_of_memory_is_held_against_what_is_free(host: SimulatedHost) -> None:
    needy = replace(make_service(), memory_need_bytes=2 << 30)
    with pytest.raises(ProblemsError) as refused:
        prepared(host, make_plan(needy))
    assert [problem.code for problem in refused.value.problems] == ["memory_taken"] * 2
    assert "NUMA node 0 has 1024 MiB free" in refused.value.problems[0].message


def test_static_cpu_manager_is_only_named_where_it_is(host: SimulatedHost) -> None:
    host.listed = [ListedUnit("slurmd.service", "active", "running")]
    assert [note.code for note in prepared(host).notes] == ["other_manager"]


def test_systemd_that_refuses_is_named_and_nothing_stays(host: SimulatedHost) -> None:
    before, sets = tree(host), granted(host)
    host.refuse["start provision-rank1"] = BusError("systemd: StartUnit: Failed", name="Failed")
    with pytest.raises(ProblemsError) as refused:
        apply(host)
    assert refused.value.problems[0].message == "systemd: StartUnit: Failed"
    assert tree(host) == before
    assert granted(host) == sets


# Verify ------------------------------------------------------------------------------------------

_RANK0 = "/provision.slice/provision-rank0.slice"


def _kernel_cpus(host: SimulatedHost) -> None:
    host.groups[_RANK0].cpus = CpuSet.parse_list("0-1")


def _kernel_nodes(host: SimulatedHost) -> None:
    host.groups[_RANK0].nodes = NodeSet([0, 1])


def _offline(host: SimulatedHost) -> None:
    host.online = CpuSet.parse_list("0-2,4-9")


def _all_offline(host: SimulatedHost) -> None:
    host.online = CpuSet.parse_list("4-9")


def _stopped(host: SimulatedHost) -> None:
    host.stop("provision-rank0.slice")


def _partition(host: SimulatedHost) -> None:
    host.groups[_RANK0].partition = "isolated invalid (Parent is not a partition root)"


def _overlap(host: SimulatedHost) -> None:
    host.groups["/other.slice"] = Group(cpus=CpuSet.parse_list("3-4"))


def _unconfined(host: SimulatedHost) -> None:
    host.groups["/user.slice"].cpus = CpuSet()


def _parent(host: SimulatedHost) -> None:
    host.groups["/provision.slice"].cpus = CpuSet.parse_list("8-9")


def _drop_in(host: SimulatedHost) -> None:
    path = Path(host.layout.units, "provision-.slice.d/99-foreign.conf")
    path.parent.mkdir()
    path.write_text("[Slice]\nAllowedCPUs=9\n")
    host.reload()


def _edited(host: SimulatedHost) -> None:
    path = Path(host.layout.units, "provision-rank0.slice")
    path.write_text(path.read_text().replace("AllowedCPUs=0-3", "AllowedCPUs=0-1"))


def _removed(host: SimulatedHost) -> None:
    Path(host.layout.units, "provision-rank0.slice").unlink()
    host.reload()


def _foreign_process(host: SimulatedHost) -> None:
    host.spawn(_RANK0, 100)
    host.processes[100].cpus = CpuSet.parse_list("8")


def _foreign_nodes(host: SimulatedHost) -> None:
    host.spawn(_RANK0, 100)
    host.processes[100].nodes = NODES


def _pages(host: SimulatedHost) -> None:
    host.spawn(_RANK0, 100, numa_maps="7f00 default anon=3 N0=2 N1=1 kernelpagesize_kB=4\n")


@pytest.mark.parametrize(
    "change, expected",
    [
        (_kernel_cpus, {"kernel_cpus", "effective_cpus"}),
        (_kernel_nodes, {"kernel_nodes", "effective_nodes"}),
        (_offline, {"offline_cpus"}),
        (_all_offline, {"offline_cpus", "effective_cpus", "overlap"}),
        (_stopped, {"not_active", "no_cgroup"}),
        (_partition, {"partition"}),
        (_overlap, {"overlap"}),
        (_unconfined, {"not_confined"}),
        (_parent, {"kernel_cpus", "effective_cpus"}),
        (_drop_in, {"foreign_drop_in", "configured_cpus"}),
        (_edited, {"file_changed", "needs_reload"}),
        (_removed, {"file_missing", "no_unit_file", "configured_cpus", "configured_nodes"}),
        (_foreign_process, {"process_cpus"}),
        (_foreign_nodes, {"process_nodes"}),
        (_pages, {"pages"}),
    ],
)
def test_each_difference_is_found(
    change: Callable[[SimulatedHost], None], expected: set[str], tmp_path: Path
) -> None:
    host = SimulatedHost(tmp_path)
    apply(host)
    assert look(host).ok
    change(host)
    found = codes(look(host))
    # What the simulated kernel grants follows a file that a reload has brought, as the real one does.
    follow = {"kernel_cpus", "effective_cpus", "kernel_nodes", "effective_nodes", "overlap"}
    assert expected <= found, found
    assert found - expected <= follow if change in {_drop_in, _removed} else found == expected


def test_slice_without_the_controller_is_found(tmp_path: Path) -> None:
    """systemd#38310, flux-core#7544: a slice that cpuset is not enabled for is named, though it is active."""
    host = SimulatedHost(tmp_path)
    apply(host)
    files = host.files()
    cpuset = [path for path in files if path.startswith(f"sys/fs/cgroup{_RANK0}/cpuset.")]
    assert len(cpuset) == 5
    root = MemoryRoot("no cpuset", {path: files[path] for path in files.keys() - set(cpuset)})
    seen = observe(OLD, host, root, fingerprint=FINGERPRINT, applied=applied_on(host))
    assert codes(verify(OLD, seen)) == {"no_controller"}


def test_apply_mends_what_verify_finds(tmp_path: Path) -> None:
    for number, change in enumerate(
        (_kernel_cpus, _stopped, _unconfined, _parent, _edited, _removed)
    ):
        base = tmp_path / str(number)
        base.mkdir()
        host = SimulatedHost(base, follows=bool(number % 2))
        apply(host)
        change(host)
        assert not look(host).ok
        assert apply(host).ok
        assert look(host).ok


def test_interrupted_apply_is_told(host: SimulatedHost) -> None:
    apply(host)
    path = Path(host.layout.applied_path)
    path.write_text(path.read_text().replace('"complete": true', '"complete": false'))
    assert codes(look(host)) == {"interrupted"}


def test_narrowed_process_is_a_note_and_no_difference(tmp_path: Path) -> None:
    host = SimulatedHost(tmp_path)
    apply(host)
    host.spawn(_RANK0, 100)
    host.processes[100].cpus = CpuSet.parse_list("1")
    report = look(host)
    assert report.ok
    assert [note.code for note in report.notes] == ["narrowed"]
    assert "leave CPUs 0,2-3 of 0-3 unused" in report.notes[0].message


def test_ranks_are_reported_from_the_plan_to_the_pages(tmp_path: Path) -> None:
    host = SimulatedHost(tmp_path)
    apply(host)
    maps = (
        "7f00 default anon=4 N0=4 kernelpagesize_kB=4\n"
        "7f10 default file=/lib/x mapped=2 N1=2 kernelpagesize_kB=4\n"
        "7f20 default huge anon=1 N0=1 kernelpagesize_kB=2048\n"
    )
    host.spawn(_RANK0, 100, numa_maps=maps)
    rank = look(host).ranks[0]
    assert rank.anonymous_bytes == {0: 4 * 4096 + (2 << 20)}
    assert rank.file_bytes == {1: 2 * 4096}
    assert rank.local_share == 1.0
    assert (rank.processes, rank.threads, rank.ok) == (1, 1, True)


# What a reviewer found ---------------------------------------------------------------------------


def test_dropped_confinement_is_no_overlap(host: SimulatedHost) -> None:
    """What the system's own slices were given back explicitly is no stranger's claim on ranks' CPUs."""
    apply(host)
    assert apply(host, make_plan()).ok
    assert look(host, make_plan()).ok


def test_slices_that_are_to_go_stay_known_until_they_are_gone(host: SimulatedHost) -> None:
    """An apply that was killed before it stopped a slice leaves a record that names it."""
    smaller = make_plan(make_service(make_rank(0)), confine=True)
    apply(host)

    def kill(step: str) -> None:
        if step == "stop provision-rank1.slice":
            raise SystemExit  # as if killed: what follows is not done, and nothing goes back

    with pytest.raises(SystemExit):
        _carry_out(prepared(host, smaller), host, host.root, kill)
    assert "/provision.slice/provision-rank1.slice" in host.groups
    assert apply(host, smaller).ok
    assert "/provision.slice/provision-rank1.slice" not in host.groups
    applied = applied_on(host)
    assert applied is not None
    assert applied.slices == ("provision.slice", "provision-rank0.slice")


def test_going_back_says_what_is_not_as_it_was(tmp_path: Path) -> None:
    """Restored is what the kernel says, and not what was asked for."""
    host = SimulatedHost(tmp_path, follows=False)
    apply(host)

    def fail(step: str) -> None:
        if step.startswith("read back"):
            host.deaf = True
            raise WriteError("x: can't be written")

    with pytest.raises(ProblemsError) as failed:
        apply(host, NEW, fail)
    found = [problem.code for problem in failed.value.problems]
    assert found[0] == "unwritable"
    assert found[-1] == "not_gone_back"
    assert "not_restored" in found
    assert codes(look(host)) >= {"interrupted"}


def test_memory_nodes_of_the_system_are_left_alone(host: SimulatedHost) -> None:
    """Confining says CPUs, and an operator's memory nodes for the system stay."""
    host.units["system.slice"].nodes = NodeSet([0])
    host.write("/system.slice", CpuSet(), NodeSet([0]))
    own = Path(host.layout.units, "system.slice.d/10-mine.conf")
    own.parent.mkdir()
    own.write_text("[Slice]\nAllowedMemoryNodes=0\n")
    apply(host)
    assert host.effective("/system.slice") == (CpuSet((8, 9)), NodeSet([0]))


def test_memory_of_a_launcher_is_not_moved_unasked(host: SimulatedHost) -> None:
    """What runs in the service's own slice counts as the ranks' workers do."""
    other = make_plan(make_service(make_rank(0, nodes="1"), make_rank(1, nodes="1")), confine=True)
    apply(host)
    host.spawn("/provision.slice", 100)
    with pytest.raises(ProblemsError) as refused:
        prepared(host, other)
    assert refused.value.problems[0].message.startswith("provision.slice holds 1 processes")


def test_unit_of_a_rank_elsewhere_is_found(tmp_path: Path) -> None:
    """A worker's unit that was moved to another slice is named, though the rank's slice is right."""
    host = SimulatedHost(tmp_path)
    apply(host)
    host.listed = [ListedUnit("provision@1.service", "active", "running")]
    host.groups_of["provision@1.service"] = "/other.slice/provision@1.service"
    assert codes(look(host)) == {"elsewhere"}
    host.groups_of["provision@1.service"] = (
        "/provision.slice/provision-rank1.slice/provision@1.service"
    )
    assert look(host).ok


def test_pages_that_cannot_be_seen_are_said(tmp_path: Path) -> None:
    """That nothing was found is not the same as that nothing was looked at."""
    host = SimulatedHost(tmp_path)
    apply(host)
    host.spawn(_RANK0, 100)
    seen = observe(
        OLD, host, host.root, fingerprint=FINGERPRINT, applied=applied_on(host), pages=False
    )
    report = verify(OLD, seen)
    assert report.ok
    assert [note.code for note in report.notes] == ["pages_unknown"]


def test_plan_of_ones_own_session_is_refused(host: SimulatedHost) -> None:
    """A plan within the caller's own cgroup can't be verified from elsewhere."""
    with pytest.raises(ProblemsError) as refused:
        prepared(host, replace(OLD, within="self"))
    assert [problem.code for problem in refused.value.problems] == ["within_self"]


def test_every_static_unit_is_known_for_ours() -> None:
    """What can't be told from the operator's own files could neither be replaced nor taken away."""
    found = [path for path in find_data("units").iterdir() if path.suffix != ".md"]
    assert len(found) == 4
    assert [path.name for path in found if not is_ours(path.read_text())] == []


def test_undo_takes_the_static_units_too(host: SimulatedHost) -> None:
    before = tree(host)
    job = prepared(host, extras=Extras(boot_check=True, verify_timer=True))
    carry_out(job, host, host.root, lambda _: None)
    applied = applied_on(host)
    assert applied is not None
    done = undo(applied, host.layout, host, host.root, lambda _: None)
    assert done.kept_files == ()
    assert tree(host) == before
    assert "stop provision-verify.timer" in host.calls
