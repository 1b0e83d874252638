"""Writing rendered files into a folder, and comparing it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from provisioner.errors import ProblemsError, WriteError
from provisioner.output import check_files, write_files
from provisioner.planfile import format_plan
from provisioner.render import RenderedFile, render
from tests.hosts import make_host, plan_for


def files_for(cards: int) -> dict[str, RenderedFile]:
    """The rendered files of a machine with so many cards."""
    plan = plan_for(make_host({0: "0-7"}, [0] * cards))
    return render(plan, format_plan(plan))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_written_whole(tmp_path: Path) -> None:
    """Every file is there as rendered, with its mode, and a second run changes nothing."""
    files = files_for(2)
    folder = tmp_path / "new" / "units"
    result = write_files(files, str(folder))
    assert sorted(result.written) == sorted(files)
    assert snapshot(folder) == {name: file.text.encode() for name, file in files.items()}
    assert {name for name in files if os.access(folder / name, os.X_OK)} == {"provision-run"}
    again = write_files(files, str(folder))
    assert (again.written, again.removed) == ((), ())
    assert check_files(files, str(folder)) == ""


def test_stale_files_go(tmp_path: Path) -> None:
    """Files of ours that a new plan does not have are removed, and others' are left alone."""
    write_files(files_for(2), str(tmp_path))
    (tmp_path / "mine.txt").write_text("keep")
    (tmp_path / "provision" / "mine.env").write_text("keep")
    result = write_files(files_for(1), str(tmp_path))
    assert result.removed == ("provision-rank1.slice", "provision/rank1.env")
    assert (tmp_path / "mine.txt").read_text() == "keep"
    assert (tmp_path / "provision" / "mine.env").read_text() == "keep"


def test_foreign_folder_is_refused(tmp_path: Path) -> None:
    """A folder with things that provision did not make is refused, each file named, and untouched."""
    (tmp_path / "provision.slice").write_text("[Slice]\n")
    (tmp_path / "plan.json").write_text('{"schema": "other"}')
    before = snapshot(tmp_path)
    with pytest.raises(ProblemsError) as caught:
        write_files(files_for(1), str(tmp_path))
    assert {problem.code for problem in caught.value.problems} == {"foreign_folder", "foreign_file"}
    assert any("provision.slice" in problem.message for problem in caught.value.problems)
    assert snapshot(tmp_path) == before
    write_files(files_for(1), str(tmp_path), force=True)
    assert check_files(files_for(1), str(tmp_path)) == ""


def test_links_are_refused(tmp_path: Path) -> None:
    """A link in the place of a file or of its folder is not written through."""
    folder, target = tmp_path / "units", tmp_path / "target"
    target.mkdir()
    write_files(files_for(1), str(folder))
    (folder / "provision.slice").unlink()
    (folder / "provision.slice").symlink_to(target / "stolen")
    (folder / "provision" / "rank0.env").unlink()
    (folder / "provision").rmdir()
    (folder / "provision").symlink_to(target)
    with pytest.raises(ProblemsError) as caught:
        write_files(files_for(1), str(folder))
    assert [problem.code for problem in caught.value.problems] == ["foreign_link", "foreign_link"]
    assert list(target.iterdir()) == []


def test_failure_leaves_everything(tmp_path: Path) -> None:
    """Where a file can't be written, all files are as before, and no temporary one stays."""
    write_files(files_for(1), str(tmp_path))
    before = snapshot(tmp_path)
    files = dict(files_for(2))
    files["provision-run/x"] = RenderedFile("can't be: provision-run is a file\n")
    with pytest.raises((WriteError, ProblemsError)):
        write_files(files, str(tmp_path), force=True)
    assert snapshot(tmp_path) == before


def test_check_shows_every_difference(tmp_path: Path) -> None:
    """The diff has edited, missing, superfluous and wrongly executable files, as diff -u writes them."""
    write_files(files_for(2), str(tmp_path))
    slice_file = tmp_path / "provision-rank0.slice"
    slice_file.write_text(slice_file.read_text().replace("AllowedCPUs=0-3", "AllowedCPUs=0-2"))
    (tmp_path / "provision.slice").unlink()
    (tmp_path / "provision-run").chmod(0o644)
    difference = check_files(files_for(2), str(tmp_path))
    assert "-AllowedCPUs=0-2\n+AllowedCPUs=0-3\n" in difference
    assert f"--- {os.devnull}\n+++ rendered/provision.slice\n" in difference
    assert "provision-run: mode is 644, rendered 755" in difference
    superfluous = check_files(files_for(1), str(tmp_path))
    assert f"--- {tmp_path}/provision-rank1.slice\n+++ {os.devnull}\n" in superfluous


def test_check_of_nothing(tmp_path: Path) -> None:
    """Against a folder that is not there every file is new."""
    difference = check_files(files_for(1), str(tmp_path / "none"))
    assert difference.count(f"--- {os.devnull}") == len(files_for(1))
    assert not (tmp_path / "none").exists()
