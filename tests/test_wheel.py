"""The wheel, built and installed away from the source tree, as a user gets it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import provisioner

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = "two-socket-8gpu"

# All of these on one xdist worker, so that the wheel is built once.
pytestmark = pytest.mark.xdist_group("wheel")


def run(*command: str | Path, cwd: Path) -> str:
    """The standard output of a command that sees nothing of the source tree."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}", False)
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel. Built without isolation: what it takes is in the environment already."""
    out = tmp_path_factory.mktemp("dist")
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT),
        cwd=out,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of an environment that holds the wheel.

    The dependencies are those of the environment that runs the tests, by a path file. Path files
    of a folder that was itself added so are not read, so the editable install there is not seen.
    """
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, symlinks=True)
    run(
        *(sys.executable, "-m", "pip", "--python", home / "bin/python"),
        *("install", "--quiet", "--no-deps", "--no-index", wheel),
        cwd=home,
    )
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_wheel_carries_templates_units_and_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    in_tree = {
        f"provisioner/{path.relative_to(base)}"
        for base, folder in ((ROOT, "templates"), (ROOT, "units"), (ROOT / "provisioner", "."))
        for path in (base / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert in_tree <= names
    assert "provisioner/py.typed" in names
    assert any(name.endswith(".j2") for name in names)
    assert any(name.startswith("provisioner/sample_facts/") for name in names)


def test_wheel_carries_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert tops == {"provisioner", f"provision-{provisioner.__version__}.dist-info"}


def test_installed_package_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    where = run(
        installed / "python", "-c", "import provisioner; print(provisioner.__file__)", cwd=tmp_path
    )
    assert Path(where).is_relative_to(installed.parent)


def test_installed_program_tells_its_version(installed: Path, tmp_path: Path) -> None:
    assert provisioner.__version__ in run(installed / "provision", "--version", cwd=tmp_path)


def test_installed_program_finds_its_samples(installed: Path, tmp_path: Path) -> None:
    assert SAMPLE in run(installed / "provision", "samples", cwd=tmp_path)


def test_installed_program_renders_by_its_own_templates(installed: Path, tmp_path: Path) -> None:
    units = tmp_path / "units"
    run(installed / "provision", "render", "--sample", SAMPLE, "--output", units, cwd=tmp_path)
    text = (units / "provision-rank7.slice").read_text()
    assert "\nAllowedCPUs=\nAllowedCPUs=" in text
    assert "\nAllowedMemoryNodes=\nAllowedMemoryNodes=" in text
