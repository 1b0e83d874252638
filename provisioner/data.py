"""Finds the files that ship beside the code: templates and static units."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from provisioner.errors import ProvisionError

DataFolder = Literal["templates", "units"]

_PACKAGE = Path(__file__).resolve().parent


def find_data(name: DataFolder) -> Path:
    """The folder of that name.

    Source: `provisioner/NAME` in an installed wheel, `NAME` beside the package in the source tree.
    The wheel's place comes first: what lies beside an installed package is not ours.
    Raises: ProvisionError if neither is there.
    """
    for base in (_PACKAGE, _PACKAGE.parent):
        folder = base / name
        if folder.is_dir():
            return folder
    raise ProvisionError(
        f"{_PACKAGE}: the folder '{name}' is missing: expected it in the package or beside it",
        "Install provision again",
    )
