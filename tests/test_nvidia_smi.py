"""What `nvidia-smi topo -m` prints, held against the machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.comparison import Comparison
from provisioner.discovery import discover
from provisioner.errors import InputError, ParseError
from provisioner.facts import build_tree
from provisioner.nvidia_smi import compare_topology, parse_topology
from provisioner.samples import read_sample
from provisioner.topology import Machine
from tests.hosts import make_host

GPUS = ("GPU0", "GPU1", "GPU2", "GPU3")
# As the two-socket sample hangs together: a switch for each card and its network device.
ROWS = {
    "GPU0": ("X", "NV18", "NV18", "NV18", "PIX", "SYS"),
    "GPU1": ("NV18", "X", "NV18", "NV18", "NODE", "SYS"),
    "GPU2": ("NV18", "NV18", "X", "NV18", "SYS", "PXB"),
    "GPU3": ("NV18", "NV18", "NV18", "X", "SYS", "NODE"),
}
PLACES = ("0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15")


def host() -> Machine:
    """Two nodes with two cards each, of which the first has a network device below its switch."""
    from provisioner.facts.values import NicFacts
    from provisioner.pci import parse_pci_address

    cards = [("0000:11:00.0", 0), ("0000:21:00.0", 0), ("0000:81:00.0", 1), ("0000:91:00.0", 1)]
    nics = tuple(
        NicFacts(
            path=(parse_pci_address(bridge), parse_pci_address(address)),
            numa_node=node,
            rdma=(name,),
        )
        for bridge, address, node, name in (
            ("0000:10:01.0", "0000:12:00.0", 0, "mlx5_0"),
            ("0000:80:01.0", "0000:82:00.0", 1, "mlx5_1"),
        )
    )
    return make_host({0: "0-3,8-11", 1: "4-7,12-15"}, cards, stride=8, nics=nics)


def topo(
    gap: str = "\t",
    *,
    rows: Mapping[str, tuple[str, ...]] = ROWS,
    cpus: tuple[str, ...] = PLACES,
    nodes: tuple[str, ...] = ("0", "0", "1", "1"),
    own: str | None = "N/A",
    heads: tuple[str, ...] = (*GPUS, "NIC0", "NIC1"),
) -> str:
    """The matrix, its columns apart by tabs or blanks."""
    last = ["CPU Affinity", "NUMA Affinity", *(["GPU NUMA ID"] if own is not None else [])]
    lines = [gap.join(("", *heads, *last))]
    for number, (name, links) in enumerate(rows.items()):
        more = [own] if own is not None else []
        lines.append(gap.join((name, *links, cpus[number], nodes[number], *more)))
    lines += [gap.join((name, *("SYS",) * 6)) for name in heads[4:]]
    legend = (
        "\nLegend:\n\n  X    = Self\n  PIX  = Connection traversing at most a single PCIe bridge\n"
    )
    return "\n".join(lines) + legend + "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"


def compare(text: str, machine: Machine | None = None) -> Comparison:
    """The comparison with the host."""
    return compare_topology(machine or host(), text, "topo.txt")


@pytest.mark.parametrize("gap", ["\t", "    "])
def test_the_same_machine_agrees(gap: str) -> None:
    """Cards, CPUs, nodes and links are all compared, and agree; NVLinks say nothing of the PCI bus."""
    found = compare(topo(gap))
    assert found.differences == ()
    assert found.explained == ()
    assert found.facts == 1 + 4 * 2 + 4 * 2


def test_older_matrix_agrees() -> None:
    """Without the last columns, with network devices by name, underlined heads and heads that ran together."""
    text = topo(own=None, heads=(*GPUS, "mlx5_0", "mlx5_1"))
    assert compare("\x1b[4m" + text.replace("\n", "\x1b[0m\n", 1)).differences == ()
    odd = "\ufeff\x1b]0;title\x07" + topo("\xa0\xa0").replace("SYS", "SOC")
    assert compare(odd).differences == ()
    pasted = topo("  ").replace("NIC0  NIC1", "NIC0NIC1", 1)
    assert compare(pasted).facts == compare(topo()).facts


def test_excerpt_is_compared_as_far_as_it_goes() -> None:
    """A matrix that was cut after some rows is compared in those."""
    found = compare(topo(rows=dict(list(ROWS.items())[:2])))
    assert found.differences == ()
    assert found.unsaid == ("what it says of GPUs 2-3 (their rows are not in topo.txt)",)


def test_cut_list_is_no_difference() -> None:
    """A list of CPUs that the tool cut, in the midst of a number too, is explained."""
    cpus = ("0-3,8-1", "0-3,8-11", "4-7,", "4-7,12-15")
    found = compare(topo(cpus=cpus))
    assert found.differences == ()
    assert found.explained == ("it cuts the lists of CPUs of GPUs 0,2",)
    assert found.agreed == found.facts - 2


@pytest.mark.parametrize("text", ["0", "9", "9-1", "0-3,8-12"])
def test_what_only_looks_cut(text: str) -> None:
    """A number that may be the beginning of ours and is a CPU of another node, and a longer list, are not cut ones."""
    found = compare(topo(cpus=(*PLACES[:2], "4-7,12-15", text)))
    assert [note.code for note in found.differences] == ["nvidia_smi_cpus"]


def test_narrow_and_cut() -> None:
    """A list may be the caller's part, and cut."""
    found = compare(topo(cpus=("1-2,8-10,1", *PLACES[1:])))
    assert found.differences == ()
    assert "caller's cpuset" in found.explained[0]


def test_callers_cpuset_is_no_difference() -> None:
    """A list that is a part of the node's is the caller's cpuset."""
    cpus = ("1-2", "1-2", "4-7,12-15", "4-7,12-15")
    found = compare(topo(cpus=cpus))
    assert found.differences == ()
    assert found.explained == (
        "it shows a part of the CPUs of GPUs 0-1: those of its caller's cpuset",
    )


def test_unsaid_is_not_compared() -> None:
    """N/A and an empty column are nothing that could differ."""
    unsaid = ("N/A",) * 4
    found = compare(topo(cpus=unsaid, nodes=unsaid))
    assert (found.differences, found.facts) == ((), 1 + 4 * 2)
    assert found.unsaid == (
        "the CPUs of GPUs 0-3 (topo.txt does not say them)",
        "the NUMA nodes of GPUs 0-3 (topo.txt does not say them)",
    )
    # With blanks between the columns nothing tells which of them is empty.
    assert compare(topo(cpus=("",) * 4)).differences == ()


@pytest.mark.parametrize(
    "changed, code, words",
    [
        (
            {"cpus": ("4-7", *PLACES[1:])},
            "nvidia_smi_cpus",
            "topo.txt: GPU0 has CPUs 4-7, and card 0000:11:00.0 here 0-3,8-11.",
        ),
        (
            {"nodes": ("0", "0", "0-1", "1")},
            "nvidia_smi_node",
            "topo.txt: GPU2 is on node 0-1, and card 0000:81:00.0 here on node 1.",
        ),
        (
            {"rows": {**ROWS, "GPU1": ("NV18", "X", "NV18", "NV18", "PIX", "SYS")}},
            "nvidia_smi_link",
            "topo.txt: GPU1 and mlx5_0 are PIX, and here they are on one NUMA node.",
        ),
        (
            {"rows": {**ROWS, "GPU0": ("X", "NV18", "PHB", "NV18", "SYS", "SYS")}},
            "nvidia_smi_link",
            (
                "topo.txt: GPU0 and GPU2 are PHB, and here they are on different NUMA nodes; "
                "GPU0 and mlx5_0 are SYS, and here they are below one switch."
            ),
        ),
    ],
)
def test_a_difference_is_named(changed: dict[str, object], code: str, words: str) -> None:
    """What they say and what the machine says stand in one sentence."""
    (note,) = compare(topo(**changed)).differences  # type: ignore[arg-type]
    assert (note.code, note.message) == (code, words)


def test_many_differences_are_one_note() -> None:
    """Differences of one kind are one note with the first of them."""
    (note,) = compare(topo(nodes=("1", "1", "0", "0"))).differences
    assert note.message.endswith(
        "GPU2 is on node 0, and card 0000:81:00.0 here on node 1; and 1 more."
    )


def test_far_links_on_one_node_are_explained() -> None:
    """Some hosts' drivers say SYS of devices on one node: that is no contradiction."""
    rows = {
        name: tuple("SYS" if link in ("NODE", "NV18") else link for link in links)
        for name, links in ROWS.items()
    }
    found = compare(topo(rows=rows))
    assert found.differences == ()
    assert found.explained == ("it says SYS of devices on one NUMA node, as it does on some hosts",)
    assert found.agreed == found.facts - 4


def test_devices_that_are_not_here_are_told() -> None:
    """Links of RDMA devices that the machine does not have can't be compared, and that is said."""
    found = compare(topo().replace("NIC1: mlx5_1", "NIC1: mlx5_77"))
    assert found.differences == ()
    assert found.unsaid == ("how near mlx5_77 of topo.txt are: no such device is here",)


def test_long_texts_are_read_at_once() -> None:
    """Many lines and many words of nothing take no longer than their length."""
    with pytest.raises(InputError, match="holds no matrix"):
        compare("X CPU Affinity\n" + "\n" * 300_000)
    assert parse_topology("\tGPU0\tCPU Affinity\nGPU0\tX\t" + "1, " * 300_000)


def test_other_number_of_cards() -> None:
    """With fewer cards in the text nothing else is compared: numbers name other cards then."""
    rows = {name: links[:2] for name, links in list(ROWS.items())[:2]}
    found = compare(topo(rows=rows, heads=GPUS[:2]))
    assert [note.code for note in found.differences] == ["nvidia_smi_cards"]
    assert found.facts == 1


def test_grace_hopper_memory_nodes() -> None:
    """A card's own memory node is compared, and its CPUs are those of the nearest node that has some."""
    machine = discover(build_tree(read_sample("grace-4gpu")))
    rows = {f"GPU{number}": ("X",) * 4 for number in range(4)}
    heads = ("GPU0", "GPU1", "GPU2", "GPU3")
    cpus = ("0-71", "0-71", "72-143", "72-143")
    text = topo(rows=rows, heads=heads, cpus=cpus, nodes=("0", "0", "1", "1"))
    lines = text.splitlines()
    for number, node in enumerate((2, 10, 18, 26)):
        lines[number + 1] = lines[number + 1].removesuffix("N/A") + str(node)
    assert compare("\n".join(lines), machine).differences == ()
    # Drivers list the cards' memory and empty nodes among a card's.
    wide = "\n".join(lines).replace("\t0\t2\n", "\t0,2-9,11-17\t2\n")
    assert compare(wide, machine).differences == ()
    lines[1] = lines[1].removesuffix("2") + "10"
    (note,) = compare("\n".join(lines), machine).differences
    assert note.code == "nvidia_smi_memory"
    assert "GPU0 has its memory as node 10" in note.message


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no matrix of GPUs with a column 'CPU Affinity'"),
        ("GPU 0: NVIDIA H100 (UUID: GPU-1)\n", "holds no matrix"),
        (
            topo().replace("GPU1\t", "GPU0\t").replace("GPU0\tGPU0", "GPU0\tGPU1", 1),
            "row 'GPU0' is there twice",
        ),
        (
            topo(rows={"GPU0": ("X", "PIX")}, heads=GPUS),
            "row 'GPU0': found '0-3,8-11': expected 4 links",
        ),
        (topo("    ").replace("    CPU Affinity", "\nCPU Affinity", 1), "is wrapped"),
        (topo().replace("GPU3\tNV18", "GPU9\tNV18"), "row 'GPU9' has no column"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\n", "row 'GPU0': found 1: expected 2 links"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    """A text that is no such matrix is named with what is wrong about it."""
    with pytest.raises(InputError) as caught:
        compare(text)
    assert caught.value.message.startswith("topo.txt: ")
    assert message in caught.value.message


def test_host_without_their_cards() -> None:
    """A matrix of NVIDIA's cards is refused for a host of another vendor's."""
    with pytest.raises(InputError, match="this machine has none"):
        compare(topo(), make_host({0: "0-7"}, [0], vendor="amd"))


@given(st.text(alphabet="GPUNIC0123 \t\nX,-SYPHB/AfinityMmlx5_:", max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text makes the parser fail otherwise than by saying that it is not its form."""
    with suppress(ParseError):
        parse_topology("\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n" + text)
