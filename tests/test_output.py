"""Writing rendered files into a folder, and comparing it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.errors import ProblemsError, ReadError, WriteError
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


# A second write of six files, one of them new and one to be removed, in a process of its own.
SECOND_WRITE = """
import sys
sys.path.insert(0, sys.argv[1])
from provisioner.errors import WriteError
from provisioner.output import write_files
from provisioner.render import RenderedFile
from tests.test_output import files_for
files = {name: RenderedFile(file.text + "# more\\n") for name, file in files_for(1).items()}
files["plan.json"] = RenderedFile(files["plan.json"].text.replace("# more\\n", " "))
files["new/rank0.env"] = RenderedFile("# Made by provision \\n" + "x" * 100_000)
{before}
try:
    write_files(files, sys.argv[2])
except WriteError as error:
    print(error.message)
"""


def write_again(folder: Path, before: str, *prefix: str) -> str:
    """What the second write is refused with; `before` is done right before it."""
    root = str(Path(__file__).resolve().parent.parent)
    return subprocess.run(
        [
            *prefix,
            sys.executable,
            "-c",
            SECOND_WRITE.replace("{before}", before),
            root,
            str(folder),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Each file and folder below a folder, with its mode and bytes."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in folder.rglob("*")
    }


def test_full_disk_leaves_everything(tmp_path: Path) -> None:
    """Where a file can't be written to its end none is changed, and neither folder nor file stays."""
    write_files(files_for(2), tmp_path)
    (tmp_path / "provision.slice").chmod(0o600)
    before = everything(tmp_path)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    assert "can't be written: File too large" in write_again(tmp_path, limit)
    assert everything(tmp_path) == before


def test_failure_on_the_way_is_taken_back(tmp_path: Path) -> None:
    """Where a file can't be renamed into place those renamed before it are as they were."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--mount", "true"], check=False).returncode
    ):
        pytest.skip("needs the right to mount")
    write_files(files_for(2), tmp_path)
    before = everything(tmp_path)
    # Nothing can take the place of a file that something is mounted on. It is not the first one.
    busy = str(tmp_path / "provision-run")
    script = 'mount --bind "$1" "$1" && shift && exec "$@"'
    prefix = ("unshare", "--mount", "/bin/sh", "-c", script, "sh", busy)
    assert f"{busy}: can't be written" in write_again(tmp_path, "", *prefix)
    assert everything(tmp_path) == before


def test_killed_write_does_not_stand_in_the_way(tmp_path: Path) -> None:
    """What a killed run leaves, in a new folder or an old one, is removed by the next."""
    (tmp_path / ".provision-tmp-abc").write_text("half")
    write_files(files_for(1), tmp_path)
    (tmp_path / "provision" / ".provision-tmp-def").write_text("half")
    assert check_files(files_for(1), tmp_path) == ""
    result = write_files(files_for(1), tmp_path)
    assert (result.written, result.removed) == ((), ())
    assert set(snapshot(tmp_path)) == set(files_for(1))


# Kills the process at a rename or a removal of a file, counted from 1.
KILL = """
import os, signal
left = [NUMBER]
def audit(event, arguments):
    if event in {'os.rename', 'os.remove'}:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
"""


@pytest.mark.parametrize("cards", [0, 2])
def test_kill_at_any_time_is_mended_by_the_next_run(tmp_path: Path, cards: int) -> None:
    """After a kill at each rename every file is whole, and a next run, not forced, succeeds."""
    old = tmp_path / "old"
    old.mkdir()
    if cards:
        write_files(files_for(cards), old)
    before = snapshot(old)
    kills = 0
    for number in range(1, 60):
        folder = tmp_path / str(number)
        shutil.copytree(old, folder)
        try:
            write_again(folder, KILL.replace("NUMBER", str(number)))
        except subprocess.CalledProcessError:
            kills += 1
        else:
            break
        for name, data in snapshot(folder).items():
            if ".provision-tmp-" not in name:
                assert data == before.get(name) or data.endswith((b"# more\n", b"x", b" "))
        write_files(files_for(1), folder)
        assert check_files(files_for(1), folder) == ""
        assert not any(".provision-tmp-" in name for name in snapshot(folder))
    assert kills > len(files_for(1))


def test_copies_that_someone_made_are_left_alone(tmp_path: Path) -> None:
    """A file of ours under a name that is never rendered is someone's copy."""
    write_files(files_for(2), tmp_path)
    shutil.copy(tmp_path / "provision-rank1.slice", tmp_path / "provision-rank1.slice.bak")
    shutil.copy(tmp_path / "plan.json", tmp_path / "plan-old.json")
    write_files(files_for(1), tmp_path)
    assert (tmp_path / "provision-rank1.slice.bak").exists()
    assert (tmp_path / "plan-old.json").exists()


def test_same_name_by_someone_else_stays(tmp_path: Path) -> None:
    """A file with a name like ours that does not say it is ours is not removed."""
    write_files(files_for(1), tmp_path)
    (tmp_path / "other.slice").write_text("[Slice]\n")
    assert write_files(files_for(1), tmp_path).removed == ()
    assert "other.slice" not in check_files(files_for(1), tmp_path)


def test_emptied_folders_go(tmp_path: Path) -> None:
    """A folder whose last file is removed goes with it."""
    files = files_for(1)
    more = {**files, "gone/rank0.env": files["provision/rank0.env"]}
    write_files(more, tmp_path)
    assert write_files(files, tmp_path).removed == ("gone/rank0.env",)
    assert not (tmp_path / "gone").exists()


def test_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    """The folder itself may be no link either, unless forced."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ProblemsError, match="is a link to"):
        write_files(files_for(1), tmp_path / "link")
    write_files(files_for(1), tmp_path / "link", force=True)
    assert set(snapshot(tmp_path / "real")) == set(files_for(1))


def test_force_takes_the_place_of_a_link(tmp_path: Path) -> None:
    """Forced, a link is replaced by the file, and what it led to is not written."""
    write_files(files_for(1), tmp_path / "units")
    place = tmp_path / "units" / "provision.slice"
    place.rename(tmp_path / "target")
    place.symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("theirs")
    write_files(files_for(1), tmp_path / "units", force=True)
    assert not place.is_symlink()
    assert (tmp_path / "target").read_text() == "theirs"


@pytest.mark.parametrize("name", ["../x", "/x", "a/../x", "a//x", "."])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    """No name of a file leads out of the folder."""
    with pytest.raises(ProblemsError, match="leads out of the folder"):
        write_files({name: RenderedFile("x")}, tmp_path / "units", force=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, force: bool) -> None:
    """Folders and pipes in the place of files are refused, all named, forced or not."""
    write_files(files_for(1), tmp_path)
    for name in ("provision.slice", "provision-run"):
        (tmp_path / name).unlink()
    (tmp_path / "provision.slice").mkdir()
    os.mkfifo(tmp_path / "provision-run")
    with pytest.raises(ProblemsError) as caught:
        write_files(files_for(1), tmp_path, force=force)
    assert [problem.code for problem in caught.value.problems] == ["not_a_file", "not_a_file"]
    difference = check_files(files_for(1), tmp_path)
    assert difference.count("is no regular file") == 2


def test_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    """A file where the folder should be is an error for writing and for checking."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ProblemsError, match="is no folder"):
        write_files(files_for(1), tmp_path / "file", force=True)
    with pytest.raises(ReadError, match="Not a directory"):
        check_files(files_for(1), tmp_path / "file")


def test_diff_is_one_that_patch_takes(tmp_path: Path) -> None:
    """The diff is a unified one, down to a missing end of line and bytes that are no text."""
    files = files_for(1)
    write_files(files, tmp_path)
    place = tmp_path / "provision.slice"
    place.write_bytes(place.read_bytes().removesuffix(b"\n") + b" \x85\xff")
    difference = check_files(files, tmp_path)
    assert re.fullmatch(
        r"--- .*/provision\.slice\n\+\+\+ rendered/provision\.slice\n@@ .* @@\n"
        r"( .*\n)+-.* \\x85\\xff\n\\ No newline at end of file\n\+.*\n",
        difference,
    )
    place.write_text(files["provision.slice"].text.removesuffix("\n"))
    if patch := shutil.which("patch"):
        edit = check_files(files, tmp_path)
        subprocess.run([patch, "--silent", str(place)], input=edit, text=True, check=True)
        assert check_files(files, tmp_path) == ""


def test_mode_set_by_the_operator_stays(tmp_path: Path) -> None:
    """A file that is as rendered is not touched, so that secrets may be kept from other users."""
    write_files(files_for(1), tmp_path)
    (tmp_path / "provision" / "rank0.env").chmod(0o600)
    assert check_files(files_for(1), tmp_path) == ""
    write_files(files_for(1), tmp_path)
    assert (tmp_path / "provision" / "rank0.env").stat().st_mode & 0o777 == 0o600
