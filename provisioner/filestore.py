"""Files at absolute paths: what is there, and putting whole ones there that outlive a power cut.

Each file is written beside its place, forced to the disk and renamed: systemd, which may read at any
moment, finds the old one or the new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from provisioner.errors import WriteError
from provisioner.render import RenderedFile, is_ours
from provisioner.wholefile import TEMPORARY, write_whole

_LOCK = "/run/provision.lock"


class Entry(NamedTuple):
    """What is, or is to be, at a path."""

    kind: int  # stat.S_IFMT: S_IFREG, S_IFLNK, another kind that is never written; 0: nothing
    data: bytes = b""  # a file's contents, a link's target
    mode: int = 0o644  # permission bits of a file

    @property
    def is_ours(self) -> bool:
        """Whether it is a file that provision made."""
        return self.kind == stat.S_IFREG and is_ours(self.data.decode("utf-8", "replace"))


NOTHING = Entry(0)


def file_entry(file: RenderedFile) -> Entry:
    """A rendered file as an entry."""
    return Entry(stat.S_IFREG, file.text.encode(), 0o755 if file.executable else 0o644)


def link_entry(target: str) -> Entry:
    """A symbolic link as an entry."""
    return Entry(stat.S_IFLNK, os.fsencode(target))


def look(path: str) -> Entry:
    """What is at a path; links are not followed. Raises: WriteError if it can't be told."""
    place = Path(path)
    try:
        status = place.lstat()
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFREG:
            return Entry(kind, place.read_bytes(), stat.S_IMODE(status.st_mode))
        if kind == stat.S_IFLNK:
            return Entry(kind, os.fsencode(place.readlink()))
    except (FileNotFoundError, NotADirectoryError):
        return NOTHING
    except OSError as error:
        raise WriteError(f"{path}: can't be read: {error.strerror or error}") from error
    return Entry(kind)


def same(found: Entry, wanted: Entry) -> bool:
    """Whether nothing needs to be done to have what is wanted."""
    if found.kind != wanted.kind or found.data != wanted.data:
        return False
    return wanted.kind != stat.S_IFREG or found.mode == wanted.mode


def digest(entry: Entry) -> str:
    """What tells a file's or a link's contents from others; empty for what is neither."""
    if entry.kind == stat.S_IFLNK:
        return f"-> {os.fsdecode(entry.data)}"
    return hashlib.sha256(entry.data).hexdigest() if entry.kind == stat.S_IFREG else ""


def put(entries: Mapping[str, Entry]) -> tuple[str, ...]:
    """Makes each path hold its entry; NOTHING removes what is there.

    Removals come last, so that what other files name is there as long as they are.

    Returns: the folders that had to be made, outermost first.
    Raises: WriteError; what was done until then stays done.
    """
    made: list[str] = []
    ordered = sorted(entries.items(), key=lambda item: item[1].kind == 0)
    for path, entry in ordered:
        if same(look(path), entry):
            continue
        place = Path(path)
        try:
            if entry.kind == 0:
                place.unlink()
            else:
                _make_folder(place.parent, made)
                _put_one(place, entry)
            _sync_folder(place.parent)
        except OSError as error:
            raise WriteError(
                f"{path}: can't be written: {error.strerror or error}",
                "Free or remount what is full or read-only, then try again",
            ) from error
    return tuple(made)


def remove_leftovers(paths: Iterable[str]) -> None:
    """Removes what killed runs left beside the paths."""
    for folder in {Path(path).parent for path in paths}:
        for leftover in folder.glob(TEMPORARY + "*"):
            with suppress(OSError):
                leftover.unlink()


def remove_folders(folders: Iterable[str]) -> tuple[str, ...]:
    """Removes the folders that are empty, innermost first. Returns: those that are not."""
    kept: list[str] = []
    for folder in sorted(folders, key=lambda path: path.count("/"), reverse=True):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError:
            kept.append(folder)
    return tuple(kept)


@contextmanager
def locked(waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the one lock for changing this system, for as long as the process or its children live.

    It is root's alone, for who may open it may hold it. `waiting` is called if someone else has it.
    Source: flock(2). Raises: WriteError if there can be none.
    """
    try:
        fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise WriteError(f"{_LOCK}: can't be opened: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def wait_unlocked(seconds: float) -> bool:
    """Whether nobody is changing this system, now or after some seconds at most."""
    end = time.monotonic() + seconds
    while is_locked():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def is_locked() -> bool:
    """Whether someone is changing this system just now, as far as one may know."""
    try:
        fd = os.open(_LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _put_one(place: Path, entry: Entry) -> None:
    if entry.kind == stat.S_IFREG:
        write_whole(str(place), entry.data, entry.mode)
        return
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=place.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        temporary.unlink()
        temporary.symlink_to(os.fsdecode(entry.data))
        os.replace(temporary, place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _make_folder(folder: Path, made: list[str]) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent, made)
        folder.mkdir()
        folder.chmod(0o755)  # whatever the umask: who may not act may look
        made.append(str(folder))


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every file system can
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
