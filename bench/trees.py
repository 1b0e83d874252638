"""Made machines on disk, for the benchmarks."""

from __future__ import annotations

from pathlib import Path

from provisioner.facts import build_tree
from provisioner.samples import read_sample
from tests.machines import FOLDER, unpack_machine
from tests.trees import made_host, write_tree


def find_recorded(name: str, directory: Path) -> bool:
    """Unpacks a recorded machine into a folder; False if it is not there."""
    if not (FOLDER / f"{name}.tar.xz").is_file():
        return False
    unpack_machine(name, directory)
    return True


def write_sample(name: str, directory: Path) -> None:
    """Writes a sample's tree into a folder."""
    write_tree(build_tree(read_sample(name)), directory)


def write_made(directory: Path, cpus: int, nodes: int, cards: int = 16) -> None:
    """Writes the tree of a made machine into a folder."""
    write_tree(build_tree(made_host(cpus, nodes, cards)), directory)
