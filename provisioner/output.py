"""Writing rendered files into a folder, all or none of them, and comparing a folder with them.

A folder is ours if it holds a plan.json of ours, and a file is ours if it says so in its first
lines. What is not ours is neither written over nor removed, unless the caller insists.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from provisioner.errors import Problem, ProblemsError, ReadError, WriteError
from provisioner.render import PLAN_FILE, RenderedFile, is_ours
from provisioner.wholefile import TEMPORARY

# The names that render gives, so that a copy that someone made of a file of ours is left alone.
_RENDERED_NAME = re.compile(
    r"[^/]+\.slice|[^/]+@\.service|[^/]+-run"
    r"|[^/]+\.d/(?:10-provision-memory|50-provision-confine)\.conf|[^/]+/rank[0-9]+\.env"
)
_FORCE_HINT = "Choose another folder, or give --force to write there all the same"


class WriteResult(NamedTuple):
    """What a write changed, by file names in the order of the rendered files."""

    written: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]  # sorted


class _Found(NamedTuple):
    """What is at a rendered file's place."""

    kind: int  # stat.S_IFMT; 0 if nothing is there
    data: bytes = b""  # a regular file's contents, a link's target
    mode: int = 0

    def holds(self, file: RenderedFile) -> bool:
        """Whether it is the file: the same bytes, as executable."""
        return (
            self.kind == stat.S_IFREG
            and self.data == file.text.encode()
            and bool(self.mode & stat.S_IXUSR) == file.executable
        )

    @property
    def is_ours(self) -> bool:
        """Whether it is a file that provision made."""
        return self.kind == stat.S_IFREG and is_ours(self.data.decode("utf-8", "replace"))


def write_files(
    files: Mapping[str, RenderedFile], directory: str | os.PathLike[str], *, force: bool = False
) -> WriteResult:
    """Makes a folder hold the files, and none that an earlier run made and this one does not.

    1. Everything that is in the way is found before anything is written.
    2. Each new file, and a copy of each that it takes the place of, is written beside its place.
    3. They are renamed into place, plan.json first: a run that is killed here leaves a folder that
       the next run knows for ours. Then the files that are no longer rendered are removed.
    4. The copies are removed. After a failure before this, they are renamed back instead.

    Args:
        files: what to write, by names relative to the folder.
        directory: the folder; it is made if it is not there.
        force: write into a folder or over a file that is not ours, and take the place of links.

    Raises:
        ProblemsError: the folder or files in it are not ours; all of them are named.
        WriteError: the system refuses; what was there before is there still.
    """
    base = Path(directory)
    try:
        with _locked(base):
            found = _find(files, base, force)
            stale = [name for name in _find_made(base) if name not in files]
            _replace(files, base, found, stale)
    except OSError as error:
        place = error.filename2 or error.filename or base
        raise WriteError(
            f"{os.fsdecode(place)}: can't be written: {error.strerror or error}"
        ) from error
    return WriteResult(
        written=tuple(name for name, file in files.items() if not found[name].holds(file)),
        unchanged=tuple(name for name, file in files.items() if found[name].holds(file)),
        removed=tuple(name for name in stale if not _is_temporary(name)),
    )


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Holds the one lock for writing a folder: two runs at once would mix their files.

    It is on the folder above, which is there before and after, and goes with the process.
    Source: flock(2).
    """
    above = base.absolute().parent
    while not above.is_dir():
        above = above.parent
    fd = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def check_files(files: Mapping[str, RenderedFile], directory: str | os.PathLike[str]) -> str:
    """The unified diff from a folder to the files; empty if it holds them and none else of ours.

    Raises: ReadError if the folder or a file in it can't be read.
    """
    base = Path(directory)
    parts: list[str] = []
    try:
        for name, file in files.items():
            found = _look(base / name, follow=True)
            if not found.holds(file):
                parts += _diff(base / name, found, f"rendered/{name}", file)
        for name in _find_made(base):
            if name not in files and not _is_temporary(name):
                parts += _diff(base / name, _look(base / name), os.devnull, None)
    except OSError as error:
        raise ReadError(
            f"{os.fsdecode(error.filename or base)}: can't be read: {error.strerror or error}"
        ) from error
    return "".join(parts)


def _find(files: Mapping[str, RenderedFile], directory: Path, force: bool) -> dict[str, _Found]:
    """What is at each file's place. Raises: ProblemsError for what must not be replaced."""
    problems: list[Problem] = []

    def refuse(code: str, message: str, hint: str = "") -> None:
        problems.append(Problem(code, message, hint))

    folders = {directory: _look(directory)}
    found: dict[str, _Found] = {}
    for name in files:
        parts = name.split("/")
        if any(part in {"", ".", ".."} for part in parts):
            refuse("bad_file_name", f"'{name}': leads out of the folder: expected a name below it")
            continue
        folder = (directory / name).parent
        if folder not in folders:
            folders[folder] = _look(folder)
        found[name] = _look(directory / name)
        if found[name].kind == stat.S_IFDIR:
            refuse("not_a_file", f"{directory / name}: is a folder: expected a file or nothing")
        elif found[name].kind not in {0, stat.S_IFREG, stat.S_IFLNK}:
            refuse("not_a_file", f"{directory / name}: is no regular file: expected one or nothing")
        elif found[name].kind == stat.S_IFLNK and not force:
            target = os.fsdecode(found[name].data)
            refuse("foreign_link", f"{directory / name}: is a link to '{target}'", _FORCE_HINT)
        elif found[name].kind == stat.S_IFREG and not found[name].is_ours and not force:
            refuse("foreign_file", f"{directory / name}: was not made by provision", _FORCE_HINT)
    for folder, what in folders.items():
        if what.kind == stat.S_IFLNK and folder.is_dir():
            if not force:
                target = os.fsdecode(what.data)
                refuse("foreign_link", f"{folder}: is a link to '{target}'", _FORCE_HINT)
        elif what.kind not in {0, stat.S_IFDIR}:
            refuse("not_a_folder", f"{folder}: is no folder: expected one or nothing")
    if not force and folders[directory].kind == stat.S_IFDIR:
        held = sorted(entry.name for entry in directory.iterdir() if not _is_leftover(entry))
        if held and not _look(directory / PLAN_FILE).is_ours:
            more = f" and {len(held) - 1} more" if len(held) > 1 else ""
            refuse(
                "foreign_folder",
                f"{directory}: holds '{held[0]}'{more} and no {PLAN_FILE} of provision",
                _FORCE_HINT,
            )
    if problems:
        raise ProblemsError(problems, subject=os.fspath(directory))
    return found


def _replace(
    files: Mapping[str, RenderedFile],
    directory: Path,
    found: Mapping[str, _Found],
    stale: list[str],
) -> None:
    """Steps 2 to 4 of `write_files`.

    How a step is undone is registered before it is done, and undoing what was not done changes
    nothing, so that an interrupt at any point is undone too.
    """
    changed = [name for name in files if not found[name].holds(files[name])]
    changed.sort(key=lambda name: name != PLAN_FILE)
    copies: dict[Path, Path] = {}  # of what was there before, by its place
    new: list[tuple[Path, Path]] = []  # a new file and its place
    with ExitStack() as undo:
        for name in changed:
            place, file, old = directory / name, files[name], found[name]
            _make_folder(place.parent, undo)
            new.append((_write_beside(place, file.text.encode(), _mode(file), undo), place))
            if old.kind:
                copies[place] = _copy_beside(place, old, undo)
        for name in stale:
            place = directory / name
            copies[place] = _copy_beside(place, _look(place), undo)
        for written, place in new:
            if place in copies:
                undo.callback(os.replace, copies[place], place)
            else:
                undo.callback(place.unlink, missing_ok=True)
            os.replace(written, place)
        for name in stale:
            place = directory / name
            undo.callback(os.replace, copies[place], place)
            place.unlink()
        undo.pop_all()
    # What fails from here on leaves a file too many, which the next run removes.
    with suppress(OSError):
        for copy in copies.values():
            copy.unlink()
    for folder in {(directory / name).parent for name in stale} - {directory}:
        with suppress(OSError):  # it holds something else
            folder.rmdir()


def _make_folder(folder: Path, undo: ExitStack) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent, undo)
        undo.callback(_remove_folder, folder)
        folder.mkdir()


def _remove_folder(folder: Path) -> None:
    with suppress(OSError):  # it was not made, or someone else has put something there
        folder.rmdir()


def _write_beside(place: Path, data: bytes, mode: int, undo: ExitStack) -> Path:
    """A new file in the folder of a place, to be renamed there."""
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=place.parent)
    path = Path(name)
    undo.callback(path.unlink, missing_ok=True)
    with open(handle, "wb") as stream:
        stream.write(data)
        os.fchmod(stream.fileno(), mode)
    return path


def _copy_beside(place: Path, old: _Found, undo: ExitStack) -> Path:
    """A copy of what is at a place, in the same folder, to be renamed back there."""
    copy = _write_beside(place, old.data, stat.S_IMODE(old.mode), undo)
    if old.kind == stat.S_IFLNK:
        copy.unlink()
        copy.symlink_to(os.fsdecode(old.data))
    return copy


def _look(path: Path, *, follow: bool = False) -> _Found:
    try:
        status = path.stat() if follow else path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return _Found(0)
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFREG:
        return _Found(kind, path.read_bytes(), status.st_mode)
    if kind == stat.S_IFLNK:
        return _Found(kind, os.fsencode(path.readlink()))
    return _Found(kind)


def _find_made(directory: Path) -> list[str]:
    """The names, sorted, of what earlier runs made in a folder, or left there when killed."""
    return sorted(
        name
        for name in _list_files(directory)
        if _is_temporary(name)
        or (_RENDERED_NAME.fullmatch(name) and _look(directory / name).is_ours)
    )


def _list_files(directory: Path) -> Iterator[str]:
    """The names of the regular files in a folder and in the folders right below it."""
    if not directory.exists():
        return
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                yield entry.name
            elif entry.is_dir(follow_symlinks=False):
                # A folder that we may not read is none that we wrote into.
                with suppress(PermissionError), os.scandir(entry.path) as below:
                    for one in below:
                        if one.is_file(follow_symlinks=False):
                            yield f"{entry.name}/{one.name}"


def _is_temporary(name: str) -> bool:
    return name.rpartition("/")[2].startswith(TEMPORARY)


def _is_leftover(path: Path) -> bool:
    """Whether a killed run may have left it: a temporary file, or a folder of such at most."""
    if path.is_dir() and not path.is_symlink():
        return all(_is_temporary(one) for one in os.listdir(path))
    return _is_temporary(path.name)


def _diff(place: Path, found: _Found, new_name: str, file: RenderedFile | None) -> list[str]:
    """The lines of diff -u for one file, after those for what it has no words for."""
    import difflib  # not needed to write

    said = []
    old_name, old_text = os.devnull, ""
    if found.kind == stat.S_IFREG:
        old_name, old_text = str(place), found.data.decode("utf-8", "backslashreplace")
        if file and bool(found.mode & stat.S_IXUSR) != file.executable:
            said = [f"{place}: mode is {stat.S_IMODE(found.mode):o}, rendered {_mode(file):o}\n"]
    elif found.kind:
        said = [f"{place}: is no regular file\n"]
    lines = difflib.unified_diff(
        _split_lines(old_text), _split_lines(file.text if file else ""), old_name, new_name
    )
    said += [
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    ]
    return said


def _mode(file: RenderedFile) -> int:
    return 0o755 if file.executable else 0o644


def _split_lines(text: str) -> list[str]:
    """The lines with their ends; str.splitlines would break at characters that end none."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
