"""The recorded machines beside the project, read straight from their archives.

They are third-party data: where the folder is missing, the tests that need it skip.
"""

from __future__ import annotations

import json
import os
import tarfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from provisioner.root import MemoryRoot

FOLDER = Path(
    os.environ.get("PROVISION_MACHINES", Path(__file__).parents[2] / "shared" / "machines")
)
WITHOUT = f"no recorded machines: {FOLDER} is not there"


def machine_names() -> list[str]:
    """Every recorded machine; empty where there are none."""
    return sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz"))


def require_machines() -> None:
    """Skips the test where there are no recorded machines."""
    if not FOLDER.is_dir():
        pytest.skip(WITHOUT)


@cache
def read_machine(name: str) -> MemoryRoot:
    """The tree of a recorded machine."""
    require_machines()
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        for member in archive:
            path = os.path.normpath(member.name)
            if member.issym():
                links[path] = member.linkname
            elif member.isfile():
                file = archive.extractfile(member)
                assert file is not None
                # A few captures hold binary files (PCI config space, ACPI tables): `write_tree` gives
                # their bytes back.
                files[path] = file.read().decode("utf-8", "surrogateescape")
    return MemoryRoot(name, files, links)


def unpack_machine(name: str, directory: Path) -> Path:
    """The tree of a recorded machine, unpacked into a folder."""
    require_machines()
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        extract(archive, directory, "fully_trusted")
    return directory


@cache
def read_expected(name: str) -> dict[str, Any] | None:
    """The right values of a recorded machine; None if it has none."""
    path = FOLDER / f"{name}.expected.json"
    return json.loads(path.read_text()) if path.is_file() else None


def extract(
    archive: tarfile.TarFile,
    place: str | os.PathLike[str],
    kind: Literal["data", "fully_trusted"] = "data",
) -> None:
    """Unpacks an archive; the filter is there since Python 3.11.4, which is newer than Debian 12's."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(place, filter=kind)
    else:
        archive.extractall(place)
