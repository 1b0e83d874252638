"""What is rendered from a plan, and what systemd's own parsers and shells make of it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import jinja2
import pytest

from provisioner.data import find_data
from provisioner.errors import InputError
from provisioner.plan import Plan
from provisioner.render import DEVICE_VARIABLES, RenderedFile, is_ours, rank_environment
from provisioner.request import ServiceRequest
from tests.hosts import make_host, plan_for
from tests.rendering import (
    FINGERPRINT,
    HOSTILE,
    make_plan,
    make_rank,
    make_service,
    make_worker,
    render_plan,
)
from tests.systemd import load_units, unit_folder, verify_units

GOLDEN = Path(__file__).parent / "golden" / "render"


def text_of(plan: Plan, name: str) -> str:
    """A rendered file's text, the plan's id made the same for every plan."""
    text = render_plan(plan)[name].text
    return re.sub(r"from plan [0-9a-f]{12} ", "from plan 000000000000 ", text)


def settings_of(text: str) -> list[tuple[str, str]]:
    """(key, value) of each assignment of a unit or environment file, in order."""
    pairs = [line.partition("=") for line in text.split("\n") if line[:1] not in {"", "#", "["}]
    return [(key, value) for key, _, value in pairs]


def small_plan() -> Plan:
    """The plan of the golden texts."""
    worker = make_worker(
        *("/usr/bin/python3", "-m", "engine", "a b", "50%"),
        environment={"OMP_NUM_THREADS": "1", "MODEL": "a model"},
        user="worker",
        group="gpu",
        directory="/srv/engine",
    )
    return make_plan(
        make_service(make_rank(0), make_rank(1, compile_cpus="6-7"), worker=worker), confine=True
    )


def test_small_plan_renders_to_these_texts() -> None:
    """A plan's files are those of tests/golden/render; PROVISION_GOLDEN=1 pytest FILE writes them anew."""
    plan = small_plan()
    texts = {name: text_of(plan, name) for name in render_plan(plan)}
    if os.environ.get("PROVISION_GOLDEN"):
        shutil.rmtree(GOLDEN, ignore_errors=True)
        for name, text in texts.items():
            (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
            (GOLDEN / name).write_text(text)
    stored = {str(path.relative_to(GOLDEN)): path for path in GOLDEN.rglob("*") if path.is_file()}
    assert texts == {name: path.read_text() for name, path in stored.items()}


def test_files_of_a_plan() -> None:
    """Files are named as the design says, plan.json first, and the wrapper alone is executable."""
    files = render_plan(small_plan())
    assert list(files) == [
        "plan.json",
        "provision.slice",
        "provision-rank0.slice",
        "provision-rank1.slice",
        "provision@.service",
        "provision/rank0.env",
        "provision/rank1.env",
        "provision-run",
        "system.slice.d/50-provision-confine.conf",
        "user.slice.d/50-provision-confine.conf",
        "machine.slice.d/50-provision-confine.conf",
        "init.scope.d/50-provision-confine.conf",
    ]
    assert [name for name, file in files.items() if file.executable] == ["provision-run"]


def test_every_file_says_that_it_is_ours() -> None:
    """Each file says in its first lines which plan and machine made it and what removes it."""
    plan = make_plan(make_service(memory="prefer", worker=make_worker()), confine=True)
    files = render_plan(plan)
    assert all(is_ours(file.text) for file in files.values())
    del files["plan.json"]
    for file in files.values():
        start = file.text.removeprefix("#!/bin/sh\n")
        assert start.startswith("# Made by provision from plan ")
        assert FINGERPRINT in start.split("\n")[1]
        assert "provision undo" in start.split("\n")[2]


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", '{"schema": 1}', '{"schema": "other/1"}', "[Slice]\n"]
)
def test_other_files_are_not_ours(text: str) -> None:
    """What does not say in its first lines that provision made it is not ours."""
    assert not is_ours(text)
    assert not is_ours(f"{text}\n\n# Made by provision from")


def test_same_plan_gives_the_same_bytes() -> None:
    """Rendering is a function of its arguments."""
    assert render_plan(small_plan()) == render_plan(small_plan())


def test_slice_of_a_service_is_the_union_of_its_ranks() -> None:
    """The service's slice holds every rank's CPUs and memory nodes, each reset first."""
    assert settings_of(text_of(make_plan(), "provision.slice"))[1:] == [
        ("AllowedCPUs", ""),
        ("AllowedCPUs", "0-7"),
        ("AllowedMemoryNodes", ""),
        ("AllowedMemoryNodes", "0-1"),
    ]


@pytest.mark.parametrize("memory", ["prefer", "off"])
@pytest.mark.parametrize("name", ["provision.slice", "provision-rank0.slice"])
def test_memory_is_not_walled_in_unless_bound(memory: str, name: str) -> None:
    """In modes prefer and off a slice only resets AllowedMemoryNodes=."""
    plan = make_plan(make_service(memory="prefer" if memory == "prefer" else "off"))
    pairs = settings_of(text_of(plan, name))
    assert [pair for pair in pairs if pair[0] == "AllowedMemoryNodes"] == [
        ("AllowedMemoryNodes", "")
    ]


@pytest.mark.parametrize(
    "memory_nodes, cpu_nodes, expected", [("0-1", "1", "1"), ("2-3", "0", "2"), ("5", "0-5", "5")]
)
def test_preferred_node_is_one_and_the_nearest(
    memory_nodes: str, cpu_nodes: str, expected: str
) -> None:
    """Mode prefer names one node to the service, one with the rank's CPUs if there is any."""
    rank = make_rank(0, nodes=memory_nodes, cpu_nodes=cpu_nodes)
    plan = make_plan(make_service(rank, memory="prefer", worker=make_worker()))
    name = "provision@0.service.d/10-provision-memory.conf"
    assert settings_of(text_of(plan, name)) == [
        ("NUMAPolicy", "preferred"),
        ("NUMAMask", ""),
        ("NUMAMask", expected),
    ]


def test_memory_drop_ins_are_for_services_in_mode_prefer() -> None:
    """There is no memory drop-in in another mode, nor where no service is rendered."""
    for service in (make_service(worker=make_worker()), make_service(memory="prefer")):
        assert not any(".service.d/" in name for name in render_plan(make_plan(service)))


def test_confinement_keeps_the_system_on_the_rest() -> None:
    """Confinement gives the system's own slices the reserved CPUs, and is rendered if asked for."""
    confined = {
        "system.slice.d/50-provision-confine.conf": "[Slice]",
        "user.slice.d/50-provision-confine.conf": "[Slice]",
        "machine.slice.d/50-provision-confine.conf": "[Slice]",
        "init.scope.d/50-provision-confine.conf": "[Scope]",
    }
    plan = make_plan(confine=True)
    for name, section in confined.items():
        text = text_of(plan, name)
        assert f"\n{section}\n" in text
        assert settings_of(text) == [("AllowedCPUs", ""), ("AllowedCPUs", "8-9")]
    assert not confined.keys() & render_plan(make_plan()).keys()


def test_operators_word_on_nccl_stays() -> None:
    """UnsetEnvironment= is left out where the operator sets the variable that it would undo."""
    worker = make_worker(environment={"NCCL_IGNORE_CPU_AFFINITY": "1"})
    text = text_of(make_plan(make_service(worker=worker)), "provision@.service")
    assert "UnsetEnvironment" not in text


def test_rank_that_sees_its_own_cards_is_rank_0_of_1() -> None:
    """With visible_devices "rank" the list holds the rank's own cards, numbered from 0."""
    service = make_service(
        make_rank(0, devices=(4, 5)), make_rank(1, devices=(6, 7)), visible="rank"
    )
    environment = rank_environment(make_plan(service), service, service.ranks[1])
    assert environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert environment["LOCAL_RANK"] == "0"
    assert environment["LOCAL_WORLD_SIZE"] == "1"


def test_list_of_a_service_is_in_rank_order() -> None:
    """With visible_devices "service" entry LOCAL_RANK of the list is the rank's card."""
    service = make_service(*(make_rank(n, devices=(card,)) for n, card in enumerate((3, 6, 5))))
    for rank in service.ranks:
        environment = rank_environment(make_plan(service), service, rank)
        assert environment["CUDA_VISIBLE_DEVICES"] == "3,6,5"
        cards = environment["CUDA_VISIBLE_DEVICES"].split(",")
        assert cards[int(environment["LOCAL_RANK"])] == str(rank.device_indexes[0])
        assert environment["LOCAL_WORLD_SIZE"] == "3"


def test_vendors_count_their_own_cards() -> None:
    """A list never mixes vendors, and a vendor without variables gets none."""
    service = make_service(make_rank(0), make_rank(1, vendor="other", devices=(0,)))
    first, second = (rank_environment(make_plan(service), service, one) for one in service.ranks)
    assert first["CUDA_VISIBLE_DEVICES"] == "0"
    assert first["LOCAL_WORLD_SIZE"] == "1"
    assert not second.keys() & {DEVICE_VARIABLES["nvidia"].visible, "CUDA_DEVICE_ORDER"}
    assert second["LOCAL_RANK"] == "0"


def test_no_compile_budget_is_said_where_there_is_none() -> None:
    """DEEPINFER_SO_BUILDER_CPUS is left out without compile CPUs: 0 would be another thing."""
    plan = make_plan()
    environment = rank_environment(plan, plan.services[0], plan.services[0].ranks[0])
    assert "DEEPINFER_SO_BUILDER_CPUS" not in environment
    assert environment["PROVISION_COMPILE_CPUS"] == ""


def test_memory_nodes_may_be_none() -> None:
    """A rank without memory nodes, in mode off, says so by an empty list."""
    rank = make_rank(0, nodes="")
    plan = make_plan(make_service(rank, memory="off"))
    environment = rank_environment(plan, plan.services[0], rank)
    assert environment["PROVISION_MEMORY_NODES"] == ""


def test_first_of_siblings_and_several_cards_reach_the_files() -> None:
    """Planned with smt first and two cards a rank, files say the few CPUs and count cores as threads."""
    host = make_host({0: "0-15"}, [0, 0, 0, 0], stride=8)
    plan = plan_for(host, smt="first", devices_per_rank=2)
    files = render_plan(plan)
    slices = [dict(settings_of(files[f"provision-rank{n}.slice"].text)) for n in (0, 1)]
    assert [one["AllowedCPUs"] for one in slices] == ["0-3", "4-7"]
    service = plan.services[0]
    environment = rank_environment(plan, service, service.ranks[1])
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("1", "2")
    # Entry LOCAL_RANK is another rank's card here, so the file must not send an engine there.
    text = files["provision/rank1.env"].text
    assert "the rank's are entries 2 to 3, not LOCAL_RANK." in text
    assert "an engine takes entry LOCAL_RANK" not in text


def test_services_have_files_of_their_own() -> None:
    """Two services planned together share no file and no CPU."""
    asked = (ServiceRequest("chat", ("0",)), ServiceRequest("batch", ("1",)))
    plan = plan_for(make_host({0: "0-7"}, [0, 0]), services=asked)
    files = render_plan(plan)
    assert list(files) == ["plan.json"] + [
        f"{name}{end}"
        for name in ("chat", "batch")
        for end in (".slice", "-rank0.slice", "/rank0.env", "-run")
    ]
    cpus = [
        dict(settings_of(files[f"{name}.slice"].text))["AllowedCPUs"] for name in ("chat", "batch")
    ]
    assert cpus == ["0-3", "4-7"]
    cards = [
        rank_environment(plan, service, service.ranks[0])["CUDA_VISIBLE_DEVICES"]
        for service in plan.services
    ]
    assert cards == ["0", "1"]


def test_service_whose_folder_is_another_file_is_refused() -> None:
    """A service named as another rendered file would make one path a file and a folder."""
    with pytest.raises(InputError, match=r"plan\.json"):
        render_plan(make_plan(make_service(name="plan.json")))


def test_every_value_in_a_template_passes_a_filter() -> None:
    """No template prints a value that is not quoted for its place."""
    environment = jinja2.Environment(autoescape=False)
    filters = {"comments", "env", "exec", "is_set", "shell", "unit", "variable"}
    environment.filters |= dict.fromkeys(filters, str)
    bare = [
        f"{path.name}:{node.lineno}"
        for path in find_data("templates").iterdir()
        for output in environment.parse(path.read_text()).find_all(jinja2.nodes.Output)
        for node in output.nodes
        if not isinstance(node, jinja2.nodes.TemplateData)
        and not (isinstance(node, jinja2.nodes.Filter) and node.name in filters)
    ]
    assert bare == []


def test_units_pass_systemd_analyze_without_a_word() -> None:
    """systemd-analyze verify has nothing to say of any unit, drop-ins included, in every mode."""
    services = [
        make_service(name="bound", worker=make_worker("/bin/true", *HOSTILE)),
        make_service(make_rank(0, name="soft"), name="soft", memory="prefer", worker=make_worker()),
        make_service(make_rank(0, name="v1.5_a"), name="v1.5_a", memory="off"),
    ]
    files = render_plan(make_plan(*services, confine=True))
    units = ["bound@0.service", "bound@1.service", "soft@0.service"]
    units += [name for name in files if name.endswith(".slice")]
    with unit_folder(files) as folder:
        for unit in (*(f"{folder}/{name}" for name in units), "system.slice", "user.slice"):
            assert verify_units(folder, [unit]) == ""


def test_systemd_analyze_reads_the_drop_ins() -> None:
    """A wrong line in a drop-in is seen, so that silence means something."""
    files = render_plan(make_plan(make_service(memory="prefer", worker=make_worker())))
    name = "provision@0.service.d/10-provision-memory.conf"
    files[name] = RenderedFile(files[name].text + "NumaMusk=0\n")
    with unit_folder(files) as folder:
        assert "NumaMusk" in verify_units(folder, [f"{folder}/provision@0.service"])


def test_systemd_understands_what_the_plan_says() -> None:
    """Systemd's own printout of the loaded units has the plan's values."""
    worker = make_worker("/bin/true", "x", user="nobody", directory="/srv/a b%i")
    plan = make_plan(
        make_service(
            make_rank(0, cpus="0-3,12,14-15", nodes="0-1"), memory="prefer", worker=worker
        ),
        make_service(make_rank(0, name="wall", cpus="4-7", nodes="2-3"), name="wall"),
        confine=True,
    )
    names = ["provision@0.service", "provision-rank0.slice", "wall-rank0.slice"]
    confined = ["system.slice", "user.slice", "machine.slice", "init.scope"]
    with unit_folder(render_plan(plan)) as folder:
        service, soft, wall, *system = load_units(folder, names + confined).values()
    assert service["Slice"] == ["provision-rank0.slice"]
    assert service["EnvironmentFile"] == ["/etc/provision/provision/rank0.env"]
    assert service["UnsetEnvironment"] == ["NCCL_IGNORE_CPU_AFFINITY"]
    assert service["WorkingDirectory"] == ["/srv/a b%i"]
    assert service["User"] == ["nobody"]
    assert service["KillMode"] == ["mixed"]
    assert service["OOMPolicy"] == ["kill"]
    assert service["ManagedOOMPreference"] == ["avoid"]
    assert service["NUMAPolicy"] == ["preferred"]
    assert service["NUMAMask"] == ["0"]
    assert soft["AllowedCPUs"] == ["0-3 12 14-15"]
    assert soft["AllowedMemoryNodes"] == [""]
    assert wall["AllowedMemoryNodes"] == ["2-3"]
    assert [unit["AllowedCPUs"] for unit in system] == [["8-9"]] * 4
