"""What holds for the plan of any machine: invariants over generated machines and requests."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from provisioner.discovery import discover
from provisioner.errors import ProblemsError
from provisioner.facts import build_tree
from provisioner.facts.values import HostFacts
from provisioner.idset import CpuSet, union_cpus
from provisioner.plan import Plan
from provisioner.planfile import format_plan, parse_plan
from provisioner.planner import make_plan
from provisioner.render import render
from provisioner.request import PlacementRequest, Policy, ServiceRequest
from provisioner.topology import Machine
from tests.trees import host_facts

SLOW = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    """Requests that contradict themselves nowhere; a machine may still not serve them."""
    policies: list[Policy] = ["exclusive", "exclusive", "node", "llc"]
    policy = draw(st.sampled_from(policies))
    return PlacementRequest(
        services=(
            ServiceRequest(
                compile_cores=draw(st.sampled_from([0, 0, 1])),
                memory=draw(st.sampled_from(["bind", "prefer", "off"])),
            ),
        ),
        policy=policy,
        smt=draw(st.sampled_from(["siblings", "first"])),
        reach=draw(st.sampled_from(["node", "package"])),
        remainder="unassigned"
        if policy == "node"
        else draw(st.sampled_from(["unassigned", "spread"])),
        reserve_cores=draw(st.integers(0, 2)),
        exclude_cpus=CpuSet(draw(st.sets(st.integers(0, 7), max_size=2))),
    )


def planned(facts: HostFacts, request: PlacementRequest) -> tuple[Machine, Plan | None]:
    """The machine and its plan; None where it is refused, which needs a reason with a text."""
    machine = discover(build_tree(facts))
    within = CpuSet(
        cpu for cpu in request.exclude_cpus if cpu in machine.online_cpus | machine.offline_cpus
    )
    request = PlacementRequest(
        request.services,
        request.policy,
        request.smt,
        request.reach,
        request.remainder,
        request.reserve_cores,
        request.reserve_cpus,
        within,
    )
    try:
        return machine, make_plan(machine, request)
    except ProblemsError as error:
        problems = error.problems
    assert all(problem.code and problem.message for problem in problems)
    return machine, None


@given(host_facts(), requests())
@SLOW
def test_invariants(facts: HostFacts, request: PlacementRequest) -> None:
    """Every rank is inside the allowed set, of whole local cores, and no core is given twice."""
    machine, plan = planned(facts, request)
    if plan is None:
        return
    ranks = [rank for service in plan.services for rank in service.ranks]
    free = machine.allowed_cpus - request.exclude_cpus
    cores_of = {core.id: core for core in machine.cores}
    core_at = {cpu: core.id for core in machine.cores for cpu in core.cpus}
    for rank in ranks:
        assert rank.cpus
        assert rank.cpus <= free
        touched = {core_at[cpu] for cpu in rank.cpus}
        for core in touched:
            assert cores_of[core].cpus <= free
            assert cores_of[core].node in rank.cpu_nodes
            wanted = 1 if request.smt == "first" else len(cores_of[core].cpus)
            assert len(cores_of[core].cpus & rank.cpus) == wanted
        assert rank.main_cpus | rank.compile_cpus == rank.cpus
        assert rank.main_cpus.isdisjoint(rank.compile_cpus)
        assert rank.main_cpus
        assert rank.memory_nodes <= machine.allowed_nodes
        assert all(machine.node(node).has_memory for node in rank.memory_nodes)
        assert bool(rank.memory_nodes) == (request.services[0].memory != "off")
    assigned = union_cpus(rank.cpus for rank in ranks)
    if request.policy != "node":
        assert len(assigned) == sum(len(rank.cpus) for rank in ranks)
    assert assigned.isdisjoint(plan.reserved_cpus | plan.unassigned_cpus)
    assert plan.reserved_cpus.isdisjoint(plan.unassigned_cpus)
    assert plan.reserved_cpus | plan.unassigned_cpus <= free
    if request.smt == "siblings":
        whole = union_cpus(
            core.cpus for core in machine.cores if core.cpus <= free and core.node is not None
        )
        assert assigned | plan.reserved_cpus | plan.unassigned_cpus == whole


@given(host_facts())
@SLOW
def test_equal_shares(facts: HostFacts) -> None:
    """Cards that draw on the same nodes get the same number of cores by default."""
    _, plan = planned(facts, PlacementRequest())
    if plan is None:
        return
    sizes: dict[str, set[int]] = {}
    for rank in plan.services[0].ranks:
        sizes.setdefault(str(rank.cpu_nodes), set()).add(rank.main_cores)
    assert all(len(counts) == 1 for counts in sizes.values())


@given(host_facts(), requests())
@SLOW
def test_same_bytes(facts: HostFacts, request: PlacementRequest) -> None:
    """The same input gives the same bytes, a plan file is read back whole, and renders."""
    _, plan = planned(facts, request)
    _, again = planned(facts, request)
    assert plan == again
    if plan is not None:
        text = format_plan(plan)
        assert parse_plan(text, "plan.json") == plan
        assert {name: file.text for name, file in render(plan, text).items()} == {
            name: file.text for name, file in render(plan, text).items()
        }
