"""The command line as its users type it: output, errors, exit statuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.cli import run_command
from provisioner.facts import build_tree
from provisioner.samples import list_samples, read_sample
from tests.trees import write_tree

Capture = pytest.CaptureFixture[str]
# As the installed program does it; the tests may run without one.
PROVISION = (sys.executable, "-c", "from provisioner.cli import main; main()")


def call(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of one command line."""
    status = run_command(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The tree of a sample in a folder."""
    write_tree(build_tree(read_sample("uneven-5-3")), tmp_path / "tree")
    return tmp_path / "tree"


def test_topology_shows_how_things_hang_together(capsys: Capture) -> None:
    """The text names nodes, cards with their node and what said so, and the RDMA devices beside them."""
    status, out, err = call(capsys, "topology", "--sample", "two-socket-8gpu")
    assert (status, err) == (0, "")
    assert "2 packages, 2 NUMA nodes, 112 cores, 224 CPUs (SMT 2), 8 cards" in out
    (card,) = [line for line in out.splitlines() if line.startswith("0     0000:1a:00.0")]
    assert "numa_node" in card
    assert "mlx5_1" in card
    assert "\x1b" not in out


def test_topology_json_form(capsys: Capture) -> None:
    """The JSON has the keys that its schema says, sets as lists and null for what is unknown."""
    status, out, _ = call(capsys, "topology", "--sample", "uneven-5-3", "--json")
    value = json.loads(out)
    assert status == 0
    assert value["schema"] == "provision.topology/1"
    assert value["is_this_system"] is False
    assert value["fingerprint"].startswith("sha256:")
    assert value["cpus"][65] == {
        "id": 65,
        "core": 1,
        "package": 0,
        "die": 0,
        "llc": value["cpus"][65]["llc"],
        "node": 0,
        "allowed": True,
    }
    assert value["nodes"][1]["distances"] == {"0": 20, "1": 10}
    assert value["accelerators"][5]["numa_node"] == 1
    assert value["accelerators"][5]["node_source"] == "numa_node"
    assert value["allowed_cpus"] == "0-127"


def test_this_system_is_read(capsys: Capture) -> None:
    """Without --root the running system is read, and said to be this one."""
    status, out, _ = call(capsys, "topology", "--json")
    value = json.loads(out)
    assert status == 0
    assert value["is_this_system"] is True
    assert len(value["cpus"]) >= 1


def test_verbose_says_where_facts_came_from(capsys: Capture, tree: Path) -> None:
    """--verbose names the file or the device that each fact came from."""
    _, out, _ = call(capsys, "topology", "--root", str(tree), "--verbose")
    assert f"online CPUs: {tree}/sys/devices/system/cpu/online" in out
    assert f"cores: {tree}/sys/devices/system/cpu/cpu*/topology/core_cpus_list" in out
    assert f"distances: {tree}/sys/devices/system/node/node*/distance" in out
    assert "isolated CPUs: " in out
    assert "named by NVIDIA's driver" in out
    _, out, _ = call(capsys, "plan", "--root", str(tree), "--verbose")
    assert "its numa_node is 1" in out
    assert "whole cores yes, local yes" in out


def test_verbose_says_which_card_was_stated(capsys: Capture) -> None:
    """Of a rank's cards only those whose node the operator stated are said to be stated."""
    pair = ("--devices-per-rank", "2", "--locality", "0000:1a:00.0=0", "--verbose")
    _, out, _ = call(capsys, "plan", "--sample", "two-socket-8gpu", *pair)
    assert "card 0000:1a:00.0 is on node 0: stated by the operator" in out
    assert "card 0000:2c:00.0 is on node 0: its numa_node is 0" in out


def test_plan_table_and_notes(capsys: Capture) -> None:
    """A person sees each rank's cores, and what is not ideal as a sentence with a hint."""
    status, out, err = call(capsys, "plan", "--sample", "uneven-5-3")
    assert (status, err) == (0, "")
    assert "RANK  CARD  PCI" in out
    assert "remainder: On NUMA node 0, 32 cores do not divide evenly among 5 cards" in out
    assert '(Set remainder = "spread" to hand them out' in out
    assert "uneven_shares" in out


def test_plan_json_is_plan_file(capsys: Capture, tmp_path: Path) -> None:
    """What plan --json prints is a plan file that later commands take."""
    _, out, _ = call(capsys, "plan", "--sample", "nps4-8gpu", "--reserve-cores", "1", "--json")
    value = json.loads(out)
    assert value["schema"] == "provision.plan/1"
    assert value["services"][0]["ranks"][0]["alignment"]["whole_cores"] is True
    plan = tmp_path / "plan.json"
    plan.write_text(out)
    status, shown, _ = call(capsys, "plan", "--sample", "nps4-8gpu", "--plan", str(plan), "--json")
    assert (status, shown) == (0, out)
    status, _, _ = call(
        capsys,
        "render",
        "--sample",
        "nps4-8gpu",
        "--plan",
        str(plan),
        "--output",
        str(tmp_path / "u"),
    )
    assert status == 0
    assert json.loads((tmp_path / "u" / "plan.json").read_text()) == value


def test_plan_of_another_machine(capsys: Capture, tmp_path: Path) -> None:
    """A plan made for another machine is refused with both fingerprints."""
    _, out, _ = call(capsys, "plan", "--sample", "nps4-8gpu", "--json")
    (tmp_path / "plan.json").write_text(out)
    status, out, err = call(
        capsys,
        "render",
        "--sample",
        "uneven-5-3",
        "--plan",
        str(tmp_path / "plan.json"),
        "--stdout",
    )
    assert (status, out) == (1, "")
    assert "is for another machine" in err
    assert err.count("sha256:") == 2


def test_refusal_is_text_or_json(capsys: Capture) -> None:
    """A refused plan gives every reason, as text on standard error or as JSON, and status 1."""
    arguments = ("plan", "--sample", "uneven-5-3", "--reserve-cores", "30")
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (1, "")
    assert err.count("Error: ") == 2
    assert "Cannot give 5 cards a core each on NUMA node 0: 2 cores are allowed there" in err
    status, out, err = call(capsys, *arguments, "--json")
    value = json.loads(out)
    assert (status, err) == (1, "")
    assert value["schema"] == "provision.problems/1"
    assert [problem["code"] for problem in value["problems"]] == ["too_few_cores", "too_few_cores"]


def test_render_writes_checks_and_prints(capsys: Capture, tmp_path: Path) -> None:
    """Render writes a folder, finds it unchanged, and shows a diff with status 3 when the request changes."""
    folder = str(tmp_path / "units")
    base = ("render", "--sample", "uneven-5-3")
    status, out, _ = call(capsys, *base, "--output", folder)
    assert status == 0
    assert "files written" in out
    status, out, _ = call(capsys, *base, "--check", folder)
    assert status == 0
    assert "is as rendered" in out
    status, out, _ = call(capsys, *base, "--reserve-cores", "2", "--check", folder)
    assert status == 3
    assert "+AllowedCPUs=2-7,66-71" in out
    status, out, _ = call(capsys, *base, "--stdout")
    assert status == 0
    assert "# ==> provision-rank7.slice" in out


@pytest.mark.parametrize(
    "arguments, found",
    [
        (
            ["nonsense"],
            "there is no command 'nonsense': expected one of topology, plan, doctor, render, apply,",
        ),
        (["plan", "--policy", "best"], "exclusive"),
        (["plan", "--sample", "none"], "two-socket-8gpu"),
        (["plan", "--sample", "uneven-5-3", "--root", "/"], "exclude each other"),
        (["plan", "--root", "/nonexistent"], "does not exist"),
        (["plan", "--config", "/nonexistent.toml"], "can't be read"),
        (["plan", "--plan", "/nonexistent.json"], "can't be read"),
        (["plan", "--plan", "x", "--reserve-cores", "1"], "exclude each other"),
        (["plan", "--sample", "uneven-5-3", "--within", "../x"], "is no cgroup"),
        (["plan", "--sample", "uneven-5-3", "--within", "no.slice"], "there is no such cgroup"),
        (["render", "--sample", "uneven-5-3"], "found none"),
        (["render", "--sample", "uneven-5-3", "--stdout", "--check", "x"], "--stdout and --check"),
        (["render", "--sample", "uneven-5-3", "--stdout", "--force"], "--force goes with --output"),
        (["apply", "--runtime", "--transient"], "exclude each other"),
        (["apply", "--transient", "--boot-check"], "--transient writes no units"),
        (
            ["apply", "--sample", "uneven-5-3"],
            "--sample names a recording: provision apply is about the running system alone",
        ),
        (["apply", "--nonsense"], "No such option"),
        (["plan", "--snapshot", "a", "--snapshot", "b"], "--snapshot is given 2 times"),
        (["topology", "--root", "a", "--root", "b"], "--root is given 2 times"),
        (["plan", "--sample", "uneven-5-3", "--devices", "3-1"], "'3-1' is no range of cards"),
        (["plan", "--sample", "uneven-5-3", "--devices", "0-999999"], "expected up to 1024"),
        (["verify", "--json", "--log"], "--json and --log exclude each other"),
        (["verify", "--output", "x"], "--output goes with --json or --prometheus"),
    ],
)
def test_wrong_usage(capsys: Capture, arguments: list[str], found: str) -> None:
    """Wrong usage and wrong input end in status 2, with what was found and expected, and no traceback."""
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert found in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "--rank", "0"], "no command"),
        (["run", "--snapshot", "x", "--", "true"], "--snapshot names a recording"),
        (["run", "--nonsense", "--", "true"], "No such option"),
        (["run", "--rank", "0", "--", "true"], "no plan is in force"),
    ],
)
def test_run_that_starts_nothing(capsys: Capture, arguments: list[str], words: str) -> None:
    """Whatever keeps run from starting its command, the exit status is none that the command may have."""
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (125, "")
    assert words in err


def test_devices_by_range_and_name(capsys: Capture) -> None:
    """Cards are listed by ranges, by numbers, and by vendor and number, in rank order."""
    _, out, _ = call(
        capsys, "plan", "--sample", "two-socket-8gpu", "--devices", "6-7,nvidia0, 2", "--json"
    )
    ranks = json.loads(out)["services"][0]["ranks"]
    assert [rank["device_indexes"] for rank in ranks] == [[6], [7], [0], [2]]


def test_all_wrong_options_at_once(capsys: Capture) -> None:
    """Every option whose text is wrong is reported in one go."""
    status, _, err = call(
        capsys,
        "plan",
        "--sample",
        "uneven-5-3",
        "--reserve-cpus",
        "3-1",
        "--devices",
        "x",
        "--memory-need",
        "much",
        "--memory-kinds",
        "wood",
        "--locality",
        "1",
    )
    assert status == 2
    for option in ("--reserve-cpus", "--devices", "--memory-need", "--memory-kinds", "--locality"):
        assert f"Error: {option}: " in err


def test_options_win_over_the_file(capsys: Capture, tmp_path: Path) -> None:
    """An option goes before the same setting in provision.toml, and --print-config shows the outcome."""
    file = tmp_path / "provision.toml"
    file.write_text('[placement]\nreserve_cores = 1\nsmt = "first"\n')
    _, out, _ = call(
        capsys, "plan", "--config", str(file), "--reserve-cores", "2", "--print-config"
    )
    assert "\nreserve_cores = 2\n" in out
    assert '\nsmt = "first"\n' in out
    (tmp_path / "again.toml").write_text(out)
    _, again, _ = call(capsys, "plan", "--config", str(tmp_path / "again.toml"), "--print-config")
    assert again == out


def test_wrong_file_has_every_place(capsys: Capture, tmp_path: Path) -> None:
    """Everything that is wrong with a provision.toml is reported at once, each with its place, status 2."""
    file = tmp_path / "provision.toml"
    file.write_text('[placement]\nreserve_cores = "two"\npolicy = "best"\nunknown = 1\n')
    status, out, err = call(capsys, "plan", "--sample", "uneven-5-3", "--config", str(file))
    assert (status, out) == (2, "")
    assert err.count(f"Error: {file}: [placement]") == 3


def test_standard_input() -> None:
    """A dash reads provision.toml from standard input."""
    done = subprocess.run(
        [*PROVISION, "plan", "--sample", "uneven-5-3", "--config", "-", "--json"],
        input="[placement]\nreserve_cores = 2\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["reserved_cpus"] == "0-1,32-33,64-65,96-97"


def test_reader_that_goes_away() -> None:
    """A closed pipe ends the command without a word."""
    command = " ".join(
        ["exec", *(f"'{word}'" for word in PROVISION), "topology --sample nps4-8gpu --json"]
    )
    done = subprocess.run(
        ["sh", "-c", f"({command}; echo status $? >&2) | head -c 10"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_and_width_of_a_terminal(no_color: bool) -> None:
    """On a terminal the table fits its width and has colour, unless NO_COLOR is set."""
    environment = {**os.environ, "COLUMNS": "90", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    if no_color:
        environment["NO_COLOR"] = "1"
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*PROVISION, "plan", "--sample", "two-socket-8gpu", "--policy", "card-range"],
        stdout=follower,
        env=environment,
    ) as process:
        os.close(follower)
        data = b""
        while chunk := read_terminal(leader):
            data += chunk
        assert process.wait() == 0
    os.close(leader)
    text = data.decode()
    assert ("\x1b[" in text) != no_color
    table = text.replace("\x1b[1m", "").replace("\x1b[0m", "").split("Reserved")[0]
    assert max(len(line) for line in table.splitlines()) <= 90


def read_terminal(leader: int) -> bytes:
    """What the terminal holds next; nothing at its end, which Linux tells by an error."""
    try:
        return os.read(leader, 1 << 16)
    except OSError:
        return b""


def test_interrupt_is_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted command ends in status 130."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("provisioner.samples.list_samples", interrupted)
    status, _, err = call(capsys, "samples")
    assert status == 130
    assert "Traceback" not in err


def test_samples(capsys: Capture) -> None:
    """Samples lists every machine that --sample takes, as text and as JSON."""
    _, out, _ = call(capsys, "samples")
    _, listed, _ = call(capsys, "samples", "--json")
    names = [sample.name for sample in list_samples()]
    assert all(name in out for name in names)
    assert [sample["name"] for sample in json.loads(listed)["samples"]] == names


@pytest.mark.parametrize("command", ["topology", "plan", "render", "samples"])
def test_help_has_an_example(capsys: Capture, command: str) -> None:
    """The help of each command says what it does and has an example that works."""
    status, out, _ = call(capsys, command, "--help")
    assert status == 0
    assert "Example: provision " in out


def test_nothing_written_on_failure(capsys: Capture, tmp_path: Path) -> None:
    """A refused plan leaves no folder behind."""
    folder = tmp_path / "units"
    status, _, _ = call(
        capsys, "render", "--sample", "uneven-5-3", "--reserve-cores", "99", "--output", str(folder)
    )
    assert status == 1
    assert not folder.exists()


def test_full_disk_is_told() -> None:
    """Output that can't be written ends in status 1 and the system's reason."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PROVISION, "plan", "--sample", "uneven-5-3"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "Error: the output: can't be written: No space left on device\n"


def test_nothing_that_a_terminal_would_act_on(capsys: Capture, tree: Path, tmp_path: Path) -> None:
    """Control characters of a tree, a plan or an option are shown escaped and never sent on."""
    (card,) = (tree / "proc/driver/nvidia/gpus").glob("0000:17:00.0")
    (card / "information").write_text("Model: \t \x1b[2Jbad\nDevice Minor: \t 0\n")
    _, out, _ = call(capsys, "topology", "--root", str(tree))
    assert "\x1b" not in out
    assert "\\x1b[2Jbad" in out
    _, text, _ = call(capsys, "plan", "--sample", "uneven-5-3", "--json")
    (tmp_path / "p.json").write_text(text.replace('"slice": "', '"slice": "\\u001b[2J'))
    for arguments in (
        ["--plan", str(tmp_path / "p.json")],
        ["--within", "\x1b[2J"],
        ["--service", "\x1b[2J"],
        ["--devices", "\x1b[2J"],
        ["--locality", "\x1b[2J=0"],
    ):
        status, out, err = call(capsys, "plan", "--sample", "uneven-5-3", *arguments)
        assert status in (1, 2)
        assert "\x1b" not in out + err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--reserve-cores", "-1"),
        ("--service", "a-b"),
        ("--devices", "0,0"),
        ("--devices-per-rank", "0"),
    ],
)
def test_contradictions_are_wrong_input(capsys: Capture, arguments: tuple[str, str]) -> None:
    """What no machine could serve is wrong input, status 2; what this one can't is a refusal, status 1."""
    status, out, err = call(capsys, "plan", "--sample", "uneven-5-3", *arguments)
    assert (status, out) == (2, "")
    assert err.count("Error: ") == 1


def test_readme_begins_with_what_is_printed(capsys: Capture) -> None:
    """The first example of the README is what its command prints."""
    text = Path(__file__).parent.parent.joinpath("README.md").read_text("utf-8")
    example = text.split("```\n")[1]
    _, out, _ = call(capsys, "plan", "--sample", "nps4-8gpu")
    assert example == out
