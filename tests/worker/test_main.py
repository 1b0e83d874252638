"""`python -m provisioner.worker`, in a process of its own with nothing but Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from provisioner.facts.values import CgroupFacts
from provisioner.idset import CpuSet
from tests.hosts import make_tree
from tests.trees import write_tree
from tests.worker.children import ROOT
from tests.worker.test_binding import environment


def run_main(
    *arguments: str, status: int = 0, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command's end, on the bare standard library; fails if its exit status is another."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PROVISION_", "LOCAL_", "CUDA_"))
    }
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-m", "provisioner.worker", *arguments],
        env={**clean, "PYTHONPATH": str(ROOT), **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_text_says_what_and_why(tmp_path: Path) -> None:
    """A recorded machine's rank is shown with its card, CPUs and memory, and what said so."""
    write_tree(make_tree({0: "0-7", 1: "8-15"}, [0, 1]), tmp_path)
    done = run_main("--root", str(tmp_path), "--rank", "1", "--plan", "/none")
    assert done.stdout.splitlines() == [
        "rank     1 (by argument), card 0000:18:00.0, planned by discovery",
        "CPUs     8-15",
        "memory   bind on NUMA node 1",
    ]
    assert done.stderr == ""


def test_json_is_for_programs() -> None:
    """With --json the same is an object with its schema, and what the kernel allows here."""
    done = run_main("--json", environ=environment(0))
    found = json.loads(done.stdout)
    assert found["schema"] == "provision.worker/1"
    assert (found["cpus"], found["source"], found["problems"]) == ("0", "environment", [])
    assert CpuSet((0,)) <= CpuSet.parse_list(found["allowed_cpus"])


def test_problem_is_the_exit_status(tmp_path: Path) -> None:
    """What keeps a rank from being bound is printed with its hint, and the status is 1."""
    tree = make_tree(
        {0: "0-7", 1: "8-15"},
        [0, 1],
        cgroups=(CgroupFacts(path="/box", cpus=CpuSet(range(8))),),
        own_cgroup="/box",
    )
    write_tree(tree, tmp_path)
    done = run_main("--root", str(tmp_path), "--rank", "1", "--plan", "/none", status=1)
    assert "problem  GPU 0000:18:00.0: no local CPU is allowed" in done.stdout
    assert "nothing is known to be right" in done.stdout


def test_wrong_use_is_status_2(tmp_path: Path) -> None:
    """A wrong option, and a root that is no machine, are told on standard error with status 2."""
    assert "--root" not in run_main("--memory", "hard", status=2).stdout
    done = run_main("--root", str(tmp_path / "none"), status=2)
    assert done.stderr.startswith("Error: root ")
    run_main("--locality", "x", status=2)
