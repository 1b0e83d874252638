"""What npu-smi prints, held against the machine: numbers, nodes, and contradictions."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.cli import run_command
from provisioner.discovery import discover
from provisioner.errors import InputError, ParseError
from provisioner.facts import build_tree
from provisioner.facts.values import UbFacts
from provisioner.fingerprint import machine_fingerprint
from provisioner.npu_smi import apply_npu_smi, parse_npu_smi
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.root import MemoryRoot
from provisioner.samples import read_sample
from provisioner.topology import Machine
from tests.hosts import make_host

# By NPU number, as such a host has them: pairs on a package, and the packages in turn.
BUSES = ("c1", "01", "c2", "02", "81", "41", "82", "42")
CPUS = ("144-167", "0-23", "144-167", "0-23", "96-119", "48-71", "96-119", "48-71")


def info(buses: tuple[str, ...] = BUSES) -> str:
    """The table of `npu-smi info` for one chip an NPU."""
    line = "+" + "-" * 27 + "+" + "-" * 15 + "+" + "-" * 52 + "+\n"
    rows = "".join(
        f"| {number}     910B4               | OK            | 88.2        36                0    / 0             |\n"
        f"| 0                         | 0000:{bus.upper()}:00.0  | 0           0 / 0          2825 / 32768         |\n"
        + line
        for number, bus in enumerate(buses)
    )
    head = (
        "| npu-smi 24.1.rc2                 Version: 24.1.rc2                                              |\n"
        "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|\n"
        "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |\n"
    )
    processes = (
        "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
        "| 0       0                 | 4711          | python                   | 60000                   |\n"
    )
    return line + head + line + rows + processes + line


def topo(cpus: tuple[str, ...] = CPUS, word: str = "NPU") -> str:
    """The table of `npu-smi info -t topo`."""
    names = [f"{word}{number}" for number in range(len(cpus))]
    rows = [
        "\t".join([name, *("X" if other == name else "HCCS" for other in names), cpus[number]])
        for number, name in enumerate(names)
    ]
    legend = "Legend:\n\n  X    = Self\n  HCCS = Connection traversing HCCS.\n  NA   = Unknown relationship.\n"
    return "\t" + "\t".join([*names, "CPU Affinity"]) + "\n" + "\n".join(rows) + "\n\n" + legend


def sample() -> Machine:
    """Eight NPUs in pairs on the even nodes."""
    return discover(build_tree(read_sample("ascend-8npu")))


def numbers(machine: Machine) -> list[tuple[int, ...]]:
    """Each card's numbers, in PCI order."""
    return [card.numbers for card in machine.accelerators]


# Reading --------------------------------------------------------------------------------------------


def test_bus_ids_are_read() -> None:
    """Each NPU's Bus-Id is read, and a process's row is none of an NPU."""
    tables = parse_npu_smi(info())
    assert [str(tables.addresses[number]) for number in range(8)] == [
        f"0000:{bus}:00.0" for bus in BUSES
    ]
    assert tables.cpus == {}


def test_several_chips_an_npu_are_numbered_through() -> None:
    """Where an NPU has two chips the number among all chips is the second in the cell."""
    text = (
        "| NPU   Name                | Health        | Power(W)  |\n"
        "| Chip  Phy-ID              | Bus-Id        | AICore(%) |\n"
        "| 0     Ascend910           | OK            | 180       |\n"
        "| 0     0                   | 0000:9D:00.0  | 0         |\n"
        "| 0     Ascend910           | OK            | -         |\n"
        "| 1     1                   | 0000:9F:00.0  | 0         |\n"
        "| 1     Ascend910           | OK            | 180       |\n"
        "| 0     2                   | 0000:99:00.0  | 0         |\n"
        "| 1     3                   | 0000:9B:00.0  | 0         |\n"
    )
    found = parse_npu_smi(text).addresses
    assert {number: str(one)[5:7] for number, one in found.items()} == {
        0: "9d",
        1: "9f",
        2: "99",
        3: "9b",
    }


@pytest.mark.parametrize("word", ["NPU", "Phy-ID"])
def test_cpu_affinity_is_read(word: str) -> None:
    """The CPUs behind the links are read, by either name of the rows, and the legend is not."""
    tables = parse_npu_smi(topo(word=word))
    assert {number: str(cpus) for number, cpus in tables.cpus.items()} == dict(enumerate(CPUS))


def test_blank_after_a_comma() -> None:
    """A list of several ranges may have blanks in it."""
    tables = parse_npu_smi(topo(("0-3, 8-11", "4-7,12-15")))
    assert [str(cpus) for cpus in tables.cpus.values()] == ["0-3,8-11", "4-7,12-15"]


@pytest.mark.parametrize(
    "text, found",
    [
        ("", "holds no table"),
        ("NPU0 NPU1\nNPU0 X HCCS\nNPU1 HCCS X\n", "holds no table"),  # without the CPUs
        (topo().replace("NPU7\tHCCS", "NPU6\tHCCS"), "'NPU6' is there twice"),
        (topo().replace("\t144-167", "", 1), "'NPU0' has 8 columns"),
        (topo().replace("144-167", "167-144"), "runs backwards"),
        (topo().replace("144-167", "PHB"), "'PHB' is no CPU list"),
        (info(("c1", "c1")), "Bus-Id 0000:c1:00.0 is there twice"),
        (info().replace("| 1     910B4 ", "| 0     910B4 "), "NPU 0 is there twice"),
        ("| 0 | 0000:C1:00.0 |\n", "no row of an NPU before it"),
    ],
)
def test_text_of_another_form(text: str, found: str) -> None:
    """What is not npu-smi's, or contradicts itself, is refused with the reason."""
    with pytest.raises(ParseError, match=re.escape(found)):
        parse_npu_smi(text)


WORDS = st.sampled_from(
    [
        "NPU0",
        "NPU1",
        "Phy-ID2",
        "CPU",
        "Affinity",
        "X",
        "HCCS",
        "0-3",
        "9,",
        "|",
        "0",
        "1",
        "0000:C1:00.0",
    ]
)


@given(st.text() | st.lists(st.lists(WORDS).map(" ".join)).map("\n".join))
def test_text_of_any_form(text: str) -> None:
    """Whatever the text, it is npu-smi's with something in it, or refused as no such text."""
    with suppress(ParseError):
        tables = parse_npu_smi(text)
        assert tables.addresses or tables.cpus
        assert len(set(tables.addresses.values())) == len(tables.addresses)


# Holding it against the machine ---------------------------------------------------------------------


@pytest.mark.parametrize("text", [info(), topo(), info() + topo()])
def test_numbers_go_to_their_cards(text: str) -> None:
    """By Bus-Ids, or by the CPUs alone, the numbers are those that the driver gave."""
    machine, stated = apply_npu_smi(sample(), text, "npu-smi")
    assert numbers(machine) == [(1,), (3,), (5,), (7,), (4,), (6,), (0,), (2,)]
    assert stated == {}
    assert machine.oddities == ()
    plan = make_plan(machine, PlacementRequest())
    assert [rank.visible_numbers[0] for rank in plan.services[0].ranks] == [1, 3, 5, 7, 4, 6, 0, 2]
    assert "npu_numbers" not in {note.code for note in plan.notes}


def test_fingerprint_is_the_machines_own() -> None:
    """A plan made with npu-smi's text at hand fits the machine when the text is not."""
    machine, _ = apply_npu_smi(sample(), info(), "npu-smi")
    assert machine_fingerprint(machine) == machine_fingerprint(sample())


def test_other_cards_than_the_machines() -> None:
    """Bus-Ids that are not all the machine's are refused: no number is guessed from half a text."""
    for buses in ((*BUSES[:7], "f1"), BUSES[:7]):
        with pytest.raises(
            InputError, match="the text: is another machine's, or cut: it names NPUs at"
        ):
            apply_npu_smi(sample(), info(buses), "the text")


def test_cpus_of_other_nodes_than_the_machines() -> None:
    """Where the counts on nodes differ nothing is guessed, and the difference is told."""
    moved = ("0-23", *CPUS[1:])
    with pytest.raises(InputError) as caught:
        apply_npu_smi(sample(), topo(moved), "the text")
    assert caught.value.message == (
        "the text: is another machine's, or cut: it puts 3 on node 0, 2 on node 2, 2 on node 4, 1 on node 6, "
        "and the machine has 2 on node 0, 2 on node 2, 2 on node 4, 2 on node 6"
    )


def test_numbers_that_contradict_the_nodes() -> None:
    """A Bus-Id on one package and CPUs of another for the same number are told of."""
    swapped = (CPUS[1], CPUS[0], *CPUS[2:])
    machine, _ = apply_npu_smi(sample(), info() + topo(swapped), "the text")
    assert [sentence.split(" is near")[0] for sentence in machine.oddities] == [
        "the text says that NPU 1 (0000:01:00.0)",
        "the text says that NPU 0 (0000:c1:00.0)",
    ]


def test_nodes_of_npus_that_say_none() -> None:
    """NPUs known from /dev alone get their nodes from the CPUs of their numbers."""
    root = build_tree(read_sample("ascend-8npu"))
    files = {path: text for path, text in root.files.items() if "/pci" not in path}
    machine, stated = apply_npu_smi(discover(MemoryRoot("trimmed", files)), topo(), "the text")
    assert stated == {
        f"ascend{number}": node for number, node in enumerate((6, 0, 6, 0, 4, 2, 4, 2))
    }
    plan = make_plan(machine, PlacementRequest(locality=stated))
    assert [rank.cpu_nodes.first for rank in plan.services[0].ranks] == [6, 0, 6, 0, 4, 2, 4, 2]


def test_folded_nodes_are_no_contradiction() -> None:
    """npu-smi names the first node of a group, where the NPUs take the group's nodes in turn."""
    machine = make_host(
        {0: "0-7", 1: "8-15", 2: "16-23", 3: "24-31"},
        packages=("0-15", "16-31"),
        ub_devices=tuple(UbFacts(name=f"udma{at}", numa=at // 2 * 2) for at in range(4)),
    )
    assert apply_npu_smi(machine, topo(("0-7", "0-7", "16-23", "16-23")), "-")[0].oddities == ()
    (sentence,) = apply_npu_smi(machine, topo(("0-7", "16-23", "16-23", "16-23")), "-")[0].oddities
    assert "NPU 1 (ascend1)" in sentence


def test_machine_without_an_npu() -> None:
    """The text is refused for a machine that has no NPU."""
    with pytest.raises(InputError, match="this machine has none"):
        apply_npu_smi(make_host({0: "0-7"}, [0]), info(), "the text")


def test_option_numbers_the_npus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--npu-smi FILE shows and plans with the driver's numbers; a bad file is named in the refusal."""
    file = tmp_path / "npu-smi.txt"
    file.write_text(info())
    where = ("--sample", "ascend-8npu", "--npu-smi", str(file), "--json")
    assert run_command(["topology", *where]) == 0
    cards = json.loads(capsys.readouterr().out)["accelerators"]
    assert [card["runtime_numbers"] for card in cards] == [[1], [3], [5], [7], [4], [6], [0], [2]]
    assert run_command(["plan", "--sample", "ascend-8npu", "--npu-smi", str(file), "--json"]) == 0
    assert '"runtime_numbers"' in capsys.readouterr().out
    file.write_text("nothing")
    assert run_command(["plan", "--sample", "ascend-8npu", "--npu-smi", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
