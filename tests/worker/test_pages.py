"""Where the pages of recorded and of running processes lie."""

from __future__ import annotations

import os

import pytest

from provisioner.errors import ParseError, ReadError
from provisioner.root import MemoryRoot
from provisioner.worker.pages import page_placement
from tests.test_numa_maps import TEXT
from tests.worker.children import run_child

KIB, MIB = 1 << 10, 1 << 20


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
