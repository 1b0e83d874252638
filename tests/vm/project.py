"""The project as files of a machine: its source tree as it lies here, or an installed wheel.

They are added at each boot and never to the cached image, so an edit is tested at once.
"""

from __future__ import annotations

import configparser
import os
import tomllib
import zipfile
from pathlib import Path

from tests.vm.cpio import File
from tests.vm.image import Suite

ROOT = Path(__file__).resolve().parents[2]
WHEEL_VARIABLE = "PROVISION_VM_WHEEL"
_TREE = "/opt/provision"
_PARTS = ("provisioner", "templates", "units")


def files(suite: Suite) -> dict[str, File]:
    """The wheel that $PROVISION_VM_WHEEL names, or else the source tree."""
    wheel = os.environ.get(WHEEL_VARIABLE)
    return installed(Path(wheel), suite) if wheel else tree(ROOT, suite)


def tree(root: Path, suite: Suite) -> dict[str, File]:
    """The source tree below ROOT, found by every Python in the machine."""
    found: dict[str, File] = {}
    for part in _PARTS:
        for path in sorted((root / part).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                mode = 0o755 if os.access(path, os.X_OK) else 0o644
                target = f"{_TREE}/{path.relative_to(root).as_posix()}"
                found[target] = File(path.read_bytes(), mode)
    # A path file (see the module site) and not PYTHONPATH: services have an environment of
    # their own.
    found[f"{suite.site_packages}/provision.pth"] = File(f"{_TREE}\n".encode())
    settings = root / "pyproject.toml"
    if settings.exists():
        scripts = tomllib.loads(settings.read_text()).get("project", {}).get("scripts", {})
        found |= {f"/usr/local/bin/{name}": _script(entry) for name, entry in scripts.items()}
    return found


def installed(wheel: Path, suite: Suite) -> dict[str, File]:
    """The files of WHEEL where pip would put them in SUITE (the wheel format's own rules).

    https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    """
    found: dict[str, File] = {}
    schemes = {"data": "/usr/local", "scripts": "/usr/local/bin"}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith("/"):
                continue
            top, _, rest = name.partition("/")
            base, data = suite.site_packages, archive.read(name)
            if top.endswith(".data"):
                scheme, _, name = rest.partition("/")
                base = schemes.get(scheme, base)
            elif top.endswith(".dist-info") and rest == "entry_points.txt":
                parser = configparser.ConfigParser()
                parser.read_string(data.decode())
                if parser.has_section("console_scripts"):
                    for script, entry in parser.items("console_scripts"):
                        found[f"/usr/local/bin/{script}"] = _script(entry)
            found[f"{base}/{name}"] = File(data, 0o755 if base.endswith("/bin") else 0o644)
    return found


def _script(entry: str) -> File:
    """A console script for an entry point such as "provisioner.cli:main"."""
    module, _, function = entry.partition(":")
    text = (
        f"#!/usr/bin/python3\nimport sys\nfrom {module.strip()} import {function.strip()}\n"
        f"sys.exit({function.strip()}())\n"
    )
    return File(text.encode(), 0o755)
