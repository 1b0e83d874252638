"""Roots: recorded trees in folders and in memory, and what is wrong with some."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from provisioner.discovery import discover
from provisioner.errors import InputError, ParseError, ReadError, TopologyError
from provisioner.facts import build_tree
from provisioner.root import DirectoryRoot, MemoryRoot
from provisioner.samples import read_sample
from tests.trees import write_tree

CPU = "sys/devices/system/cpu"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A sample's tree in a folder, to be broken."""
    folder = tmp_path / "tree"
    write_tree(build_tree(read_sample("uneven-5-3")), folder)
    return folder


def refusal(tree: Path) -> str:
    """The message by which discovery refuses a tree; one printable line."""
    with pytest.raises((InputError, ReadError, ParseError, TopologyError)) as caught:
        discover(DirectoryRoot(tree))
    assert caught.value.message.isprintable()
    return caught.value.message


def replace_file(tree: Path, path: str, data: bytes) -> None:
    """Puts other bytes into a file of the tree."""
    (tree / path).unlink()
    (tree / path).write_bytes(data)


@pytest.mark.parametrize("name", ["two-socket-8gpu", "nps4-8gpu", "grace-4gpu"])
def test_folder_is_memory(name: str, tmp_path: Path) -> None:
    """A sample read from a folder is the sample read from memory."""
    memory = build_tree(read_sample(name))
    write_tree(memory, tmp_path / "tree")
    left, right = discover(DirectoryRoot(tmp_path / "tree")), discover(memory)
    assert (left.cpus, left.nodes, left.accelerators, left.nics, left.pci) == (
        right.cpus,
        right.nodes,
        right.accelerators,
        right.nics,
        right.pci,
    )


@pytest.mark.parametrize(
    "path, data, found",
    [
        (f"{CPU}/online", b"0-", "'' is no number"),
        (f"{CPU}/online", b"\xff\xfe", "is no text: byte 0 is 0xff"),
        (f"{CPU}/online", b"0-3\x00x", "zero byte"),
        (f"{CPU}/online", b"", "no CPU is online"),
        (f"{CPU}/online", b"0-99999999999999", "is over 65535"),
        (f"{CPU}/cpu3/topology/core_cpus_list", b"\x1b[31mred", "is no number"),
        (f"{CPU}/cpu0/topology/physical_package_id", b"zero", "is no number"),
        (f"{CPU}/cpu0/cache/index3/level", b"", "is no number"),
        ("sys/devices/system/node/node1/meminfo", b"Node 1 MemFree: 1 kB\n", "MemTotal"),
        ("sys/devices/system/node/node0/distance", b"10 21 31\n", "has 3 numbers: expected 2"),
        ("sys/devices/system/node/node0/distance", b"10 far\n", "is no number"),
        ("sys/devices/system/node/node1/cpulist", b"0-31", "is on node 1 and on node 0"),
        (f"{CPU}/cpu1/topology/core_cpus_list", b"0-1", "groups that do not overlap"),
    ],
)
def test_nonsense(tree: Path, path: str, data: bytes, found: str) -> None:
    """Truncated or nonsense text is refused with the file's whole path, the text and what was expected."""
    replace_file(tree, path, data)
    message = refusal(tree)
    assert found in message
    assert str(tree) in message


def test_stale_sibling_list(tree: Path) -> None:
    """A sibling list that lacks the CPU itself is not believed, in any of its forms."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        replace_file(tree, f"{CPU}/cpu2/topology/{name}", b"0,64")
    assert "lacks CPU 2 itself" in refusal(tree)


def test_missing_file_in_the_middle(tree: Path) -> None:
    """Where one core's sibling files are missing and others' are there, the tree is refused."""
    for cpu in (2, 66):
        for name in ("core_cpus_list", "thread_siblings_list"):
            (tree / f"{CPU}/cpu{cpu}/topology/{name}").unlink()
    assert "cpu2/topology" in refusal(tree)


def test_folder_for_file(tree: Path) -> None:
    """A folder where a file should be is named."""
    path = tree / f"{CPU}/online"
    path.unlink()
    path.mkdir()
    assert refusal(tree) == f"{path}: is a folder: expected a file"


def test_file_for_folder(tree: Path) -> None:
    """A file where a folder should be is named."""
    path = tree / "sys/bus/pci/devices"
    for link in path.iterdir():
        link.unlink()
    path.rmdir()
    path.write_text("no folder\n")
    assert refusal(tree) == f"{path}: is no folder: expected one"


def test_fifo_does_not_hang(tree: Path) -> None:
    """A fifo in place of a file is refused and not waited for."""
    path = tree / f"{CPU}/online"
    path.unlink()
    os.mkfifo(path)
    assert "is neither a file nor a folder" in refusal(tree)


def test_socket_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that can't be opened is named with the system's reason."""
    path = tree / f"{CPU}/online"
    path.unlink()
    monkeypatch.chdir(path.parent)  # a socket's path is at most 108 bytes long
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("online")
    assert f"{path}: can't be opened: " in refusal(tree)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_unreadable_file(tree: Path) -> None:
    """A file that the user may not read is named, with the system's reason."""
    path = tree / f"{CPU}/online"
    path.chmod(0)
    for folder in (tree, *tree.parents):
        if folder.stat().st_mode & 0o005 != 0o005 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o005)
    told = refused_to_nobody(f"discover(DirectoryRoot({str(tree)!r}))")
    assert told == f"{path}: can't be opened: Permission denied\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_unreadable_root() -> None:
    """A root that the user may not look into is named, with the system's reason."""
    with tempfile.TemporaryDirectory() as name:  # 0700, below a folder that everybody may enter
        told = refused_to_nobody(f"DirectoryRoot({name!r})")
    assert told == f"root '{name}': can't be read: Permission denied\n"


def refused_to_nobody(call: str) -> str:
    """What an unprivileged user's call is refused with: the message of its ReadError."""
    code = (
        f"import os, sys; sys.path[:] = {[str(Path(__file__).parents[1]), *sys.path]!r}\n"
        "from provisioner.discovery import discover\n"
        "from provisioner.errors import ReadError\n"
        "from provisioner.root import DirectoryRoot\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"try: {call}\n"
        "except ReadError as error: print(error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("target", ["/etc/hostname", "../../../../../../../../../../etc/hostname"])
def test_link_out_of_the_root(tree: Path, target: str) -> None:
    """A link that leads out of the root is refused, and what it leads to is not read."""
    path = tree / f"{CPU}/online"
    path.unlink()
    path.symlink_to(target)
    assert f"{path}: leads out of the root" in refusal(tree)


def test_folder_link_out_of_the_root(tree: Path, tmp_path: Path) -> None:
    """A link to a folder outside the root is refused wherever on the way it stands."""
    elsewhere = tmp_path / "elsewhere"
    (tree / "sys/devices/system/node").rename(elsewhere)
    (tree / "sys/devices/system/node").symlink_to(elsewhere)
    assert "leads out of the root" in refusal(tree)


def test_links_in_circles(tree: Path) -> None:
    """Links that lead in circles are refused."""
    path = tree / f"{CPU}/online"
    path.unlink()
    path.symlink_to("online")
    assert "can't be opened: Too many levels of symbolic links" in refusal(tree)
    memory = MemoryRoot("made", {"sys/x": ""}, {"sys/a": "b", "sys/b": "a"})
    with pytest.raises(ReadError, match="too many links"):
        memory.read("sys/a")


def test_memory_link_out(tmp_path: Path) -> None:
    """A tree in memory refuses links that lead out of it as a folder does."""
    for target in ("/etc/passwd", "../../etc/passwd"):
        with pytest.raises(ReadError, match="leads out of the root"):
            MemoryRoot("made", {"sys/x": ""}, {"sys/a": target}).read("sys/a")


def test_no_root(tmp_path: Path) -> None:
    """A root that is missing, a file, or without sys and proc is refused, saying what was expected."""
    (tmp_path / "file").write_text("")
    for path, found in (
        ("none", "does not exist"),
        ("file", "is no folder"),
        (".", "holds no machine"),
    ):
        with pytest.raises(InputError, match=found):
            DirectoryRoot(tmp_path / path)


def test_huge_file(tree: Path) -> None:
    """A file of a size that no kernel file has is refused before it fills the memory."""
    path = tree / f"{CPU}/online"
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "is over" in refusal(tree)
