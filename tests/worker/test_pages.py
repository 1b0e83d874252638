"""Where pages lie: numa_maps texts made here, and the running kernel's own."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator

import pytest

from provisioner.errors import ParseError, ReadError
from provisioner.idset import NodeSet
from provisioner.root import MemoryRoot
from provisioner.worker.pages import page_placement, parse_numa_maps, share_on
from tests.worker.children import run_child

KIB, MIB = 1 << 10, 1 << 20

TEXT = """\
00400000 default file=/usr/bin/python3 mapped=60 N1=60 kernelpagesize_kB=4
00a00000 default file=/usr/bin/python3 anon=3 dirty=3 mapped=5 N0=5 kernelpagesize_kB=4
01c3c000 bind:0 heap anon=100 dirty=100 active=0 N0=75 N1=25 kernelpagesize_kB=4
7f1000000000 bind:0 file=/anon_hugepage\\040(deleted) huge anon=2 dirty=2 N0=2 kernelpagesize_kB=2048
7f2000000000 default file=/dev/shm/ring\\012N7=9 dirty=8 N0=8 kernelpagesize_kB=4
7f3000000000 default file=/opt/lib.so anon=4 dirty=4 mapped=9 N0=6 N1=7 kernelpagesize_kB=4
7f4000000000 prefer:1
7f5000000000 default
7ffc00000000 default stack anon=2 dirty=2 swapcache=1 N1=2 kernelpagesize_kB=4
"""


def test_pages_are_counted_by_kind_and_node() -> None:
    """Anonymous and file pages are apart, huge ones count at their size, and the undecidable are mixed."""
    found = parse_numa_maps(TEXT.splitlines())
    assert found.anonymous == {0: (3 + 75) * 4 * KIB + 4 * MIB, 1: (25 + 2) * 4 * KIB}
    assert found.file == {0: (2 + 8) * 4 * KIB, 1: 60 * 4 * KIB}
    assert found.mixed == {0: 6 * 4 * KIB, 1: 7 * 4 * KIB}
    assert found.total == {0: 94 * 4 * KIB + 4 * MIB, 1: 94 * 4 * KIB}


def test_local_share_is_of_bytes() -> None:
    """The local share is a share of bytes, so two huge pages outweigh 375 small ones."""
    found = parse_numa_maps(TEXT.splitlines())
    assert found.local_share(NodeSet((0,))) == (94 * 4 + 4096) / (188 * 4 + 4096)
    assert found.local_share(NodeSet((0, 1))) == 1
    assert found.local_share(NodeSet((5,))) == 0
    assert share_on(found.file, NodeSet((1,))) == 60 / 70


def test_no_pages_have_no_share() -> None:
    """A process without a resident page has no local share, which is not a share of 0."""
    assert parse_numa_maps(["7f5000000000 default"]).local_share(NodeSet((0,))) is None


@pytest.mark.parametrize(
    "line, message",
    [
        ("7f00 default anon=x N0=1 kernelpagesize_kB=4", "line 2: 'anon=x' has no count"),
        ("7f00 default anon=1 N0= kernelpagesize_kB=4", "line 2: 'N0=' has no count"),
        ("7f00 default anon=1 N0=1", "line 2: pages without their size"),
        ("7f00 default anon=1 N0=1 kernelpagesize_kB=0", "line 2: pages without their size"),
        ("7f00 default anon=1 N0=" + "9" * 30, "has no count"),
    ],
)
def test_malformed_line_is_named(line: str, message: str) -> None:
    """A line that is not of the form is an error with its number."""
    with pytest.raises(ParseError, match=message):
        parse_numa_maps(["7f5000000000 default", line])


def test_large_file_is_streamed() -> None:
    """Lines are taken one at a time, so a process with many mappings costs no memory of its file's size."""

    def make_lines() -> Iterator[str]:
        for address in range(5_000):
            yield f"{address << 12:x} default anon=1 dirty=1 N0=1 kernelpagesize_kB=4"

    tracemalloc.start()
    try:
        assert parse_numa_maps(make_lines()).anonymous == {0: 5_000 * 4 * KIB}
        assert tracemalloc.get_traced_memory()[1] < 64 * KIB
    finally:
        tracemalloc.stop()


def test_recording_is_read() -> None:
    """A recorded machine's numa_maps is read through its root, with the path in front of what is wrong."""
    root = MemoryRoot("box", {"proc/self/numa_maps": TEXT, "proc/7/numa_maps": "1 default N0=1\n"})
    assert page_placement(root=root).mixed == {0: 6 * 4 * KIB, 1: 7 * 4 * KIB}
    with pytest.raises(ParseError, match=r"box:/proc/7/numa_maps: line 1: pages without"):
        page_placement(7, root=root)
    with pytest.raises(ReadError, match=r"box:/proc/8/numa_maps: is not in the recording"):
        page_placement(8, root=root)


@pytest.fixture
def numa_maps() -> None:
    """Skips where the kernel has no NUMA."""
    if not os.path.exists("/proc/self/numa_maps"):
        pytest.skip("this kernel has no /proc/self/numa_maps")


@pytest.mark.usefixtures("numa_maps")
def test_running_process_is_read() -> None:
    """Memory that a process touches appears among its anonymous bytes, a file that it maps among its file bytes."""
    found = run_child(
        """
        import mmap, tempfile
        from provisioner.worker.pages import page_placement
        sums = lambda: [sum(page_placement().anonymous.values()), sum(page_placement().file.values())]
        before = sums()
        memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, 64 << 20, 4096):
            memory[page] = 1
        with tempfile.TemporaryFile() as file:
            file.write(bytes(16 << 20))
            file.flush()
            mapped = mmap.mmap(file.fileno(), 16 << 20, access=mmap.ACCESS_READ)
            sum(mapped[page] for page in range(0, 16 << 20, 4096))
            answer([after - was for was, after in zip(before, sums())])
        """
    )
    anonymous, file = found
    assert 64 * MIB <= anonymous < 80 * MIB
    assert 16 * MIB <= file < 20 * MIB


@pytest.mark.usefixtures("numa_maps")
def test_unreadable_file_is_an_error_with_its_path() -> None:
    """Another user's process, and one that is not there, is an error that names the file and says why."""
    found = run_child(
        """
        from provisioner.errors import ReadError
        from provisioner.worker.pages import page_placement
        if os.getuid() == 0:
            os.setgid(65534); os.setuid(65534)
        messages = []
        for pid in (1, 2**22 + 1):
            try:
                page_placement(pid)
            except ReadError as error:
                messages.append(error.message)
        answer(messages)
        """
    )
    assert found == [
        "/proc/1/numa_maps: can't be read: Permission denied",
        "/proc/4194305/numa_maps: can't be read: No such file or directory",
    ]


def test_share_is_against_what_the_process_was_bound_to(memory_node: int) -> None:
    """The local share goes by the environment that a process was started with, and by what it bound itself to."""
    found = run_child(
        """
        import subprocess, sys
        from provisioner.worker import bind_local_rank, page_placement
        def ask(pid=None):
            found = page_placement(pid)
            return [str(found.planned_nodes), found.planned_share]
        code = "import sys; print(flush=True); sys.stdin.read()"
        other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 env={**os.environ, "PROVISION_MEMORY_NODES": "900"})
        other.stdout.readline()
        own, others = ask(), ask(other.pid)
        other.communicate()
        os.environ.pop("PROVISION_MEMORY_NODES")
        unknown = ask()
        answer([own, others, unknown, ask(os.getpid())])
        """,
        environ={"PROVISION_MEMORY_NODES": str(memory_node)},
    )
    own, others, unknown, _ = found
    assert own == [str(memory_node), 1.0]
    assert others == ["900", 0.0]
    assert unknown == ["None", None]
