"""Where a machine's files are read from: the root handle.

A root is the running system, a recorded tree in a folder, or files held in memory; readers
(`sysfs`, `cgroup`) can't tell which.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from provisioner.errors import InputError, ParseError, ReadError, shorten

_T = TypeVar("_T")

# The largest file that is read here is /proc/cpuinfo of a few thousand CPUs.
MAX_FILE_BYTES = 16 << 20
# A folder with more entries than this is no machine's.
MAX_ENTRIES = 1 << 17


class Root(Protocol):
    """Where a machine's files are read from. Paths are relative to it, with '/' and without '..'."""

    @property
    def is_this_system(self) -> bool:
        """Whether this is the running system's own root."""

    def describe(self, path: str) -> str:
        """The path as a person would have to type it, for messages."""

    def read(self, path: str, *, lossy: bool = False) -> str | None:
        """The text of a file; None if there is none.

        Lossy: bytes that are no text are replaced, as in what processes call themselves.
        Raises ReadError if it is there and is no readable file of text of bounded size.
        """

    def list(self, path: str) -> list[str]:
        """The sorted names in a folder; empty if there is none.

        Raises ReadError if it is there and is no readable folder.
        """

    def resolve(self, path: str) -> str | None:
        """The path, relative to the root, that links lead to; None if nothing is there.

        Raises ReadError if links lead out of the root or in circles.
        """


class DirectoryRoot:
    """The running system ('/') or a recorded tree in a folder.

    Nothing outside the folder is ever read: where a link leads out of it, reading raises.
    """

    __slots__ = ("_base", "_is_live", "_prefix")

    def __init__(self, path: str | os.PathLike[str] = "/") -> None:
        """Raises InputError if there is no such folder or none that can be read, or it has no sys and proc."""
        text = os.fspath(path)
        if not os.path.isdir(text):
            found = "is no folder" if os.path.lexists(text) else "does not exist"
            raise InputError(f"root '{text}' {found}: expected a folder that holds sys/ and proc/")
        self._base = os.path.realpath(text)
        self._is_live = self._base == "/"
        self._prefix = self._base.rstrip("/") + "/"
        if not any(os.path.isdir(self._prefix + name) for name in ("sys", "proc")):
            try:
                names = ", ".join(sorted(os.listdir(self._base))[:5]) or "nothing"
            except OSError as error:
                raise ReadError(f"root '{text}': can't be read: {error.strerror}") from error
            raise InputError(
                f"root '{text}' holds no machine: found {names}, expected the folders sys and proc",
                "Give the folder that the recorded /sys and /proc were unpacked into",
            )

    @property
    def is_this_system(self) -> bool:
        return self._is_live

    def describe(self, path: str) -> str:
        return self._prefix + path

    def read(self, path: str, *, lossy: bool = False) -> str | None:
        full = self._prefix + path
        try:
            # Not blocking: a fifo that a tree may hold would hang the open.
            fd = os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ReadError(f"{full}: can't be opened: {os.strerror(error.errno or 0)}") from error
        try:
            self._check_inside(fd, full)
            chunks: list[bytes] = []
            size = 0
            while chunk := os.read(fd, 1 << 16):
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_FILE_BYTES:
                    raise ReadError(
                        f"{full}: is over {MAX_FILE_BYTES} bytes: no file that is read here is"
                    )
        except IsADirectoryError as error:
            raise ReadError(f"{full}: is a folder: expected a file") from error
        except OSError as error:
            if _is_unanswered(error) and self._is_live:
                return None
            raise ReadError(f"{full}: can't be read: {os.strerror(error.errno or 0)}") from error
        finally:
            os.close(fd)
        data = b"".join(chunks)
        return data.decode("utf-8", "replace") if lossy else _decode(data, full)

    def list(self, path: str) -> list[str]:
        full = self._prefix + path
        try:
            fd = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise ReadError(f"{full}: is no folder: expected one") from error
        except OSError as error:
            raise ReadError(f"{full}: can't be opened: {os.strerror(error.errno or 0)}") from error
        try:
            self._check_inside(fd, full)
            names = os.listdir(fd)
        except OSError as error:
            if _is_unanswered(error) and self._is_live:
                return []
            raise ReadError(f"{full}: can't be read: {os.strerror(error.errno or 0)}") from error
        finally:
            os.close(fd)
        if len(names) > MAX_ENTRIES:
            raise ReadError(f"{full}: has {len(names)} entries: expected at most {MAX_ENTRIES}")
        return sorted(names)

    def resolve(self, path: str) -> str | None:
        full = self._prefix + path
        try:
            fd = os.open(full, getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ReadError(
                f"{full}: can't be followed: {os.strerror(error.errno or 0)}"
            ) from error
        try:
            real = _real_path(fd, full)
        finally:
            os.close(fd)
        if not (real + "/").startswith(self._prefix):
            raise _leads_out(full, real)
        return real[len(self._prefix) :]

    def _check_inside(self, fd: int, full: str) -> None:
        if self._is_live:
            return
        real = _real_path(fd, full)
        if not (real + "/").startswith(self._prefix):
            raise _leads_out(full, real)
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ReadError(f"{full}: is neither a file nor a folder")


class MemoryRoot:
    """A tree held in memory: files by path, links by path with their target, and empty folders."""

    __slots__ = ("_files", "_folders", "_links", "name")

    def __init__(
        self,
        name: str,
        files: Mapping[str, str],
        links: Mapping[str, str] = {},
        empty_folders: Iterable[str] = (),
    ) -> None:
        """Args: name for messages; path -> text; path of a link -> target, relative as in a folder."""
        self.name = name
        self._files = dict(files)
        self._links = dict(links)
        folders: dict[str, set[str]] = {"": set()}
        for path in empty_folders:
            folders[path] = set()
        for path in (*self._files, *self._links, *folders):
            while path:
                parent, _, leaf = path.rpartition("/")
                known = parent in folders
                folders.setdefault(parent, set()).add(leaf)
                if known:
                    break
                path = parent
        self._folders = folders

    @property
    def files(self) -> Mapping[str, str]:
        """Path -> text of every file."""
        return self._files

    @property
    def links(self) -> Mapping[str, str]:
        """Path -> target of every link."""
        return self._links

    @property
    def empty_folders(self) -> list[str]:
        """The paths, sorted, of the folders with nothing in them."""
        return sorted(path for path, names in self._folders.items() if path and not names)

    @property
    def is_this_system(self) -> bool:
        return False

    def describe(self, path: str) -> str:
        return f"{self.name}:/{path}"

    def read(self, path: str, *, lossy: bool = False) -> str | None:
        text = self._files.get(path)
        if text is None:
            real = self.resolve(path)
            if real is None:
                return None
            if real in self._folders:
                raise ReadError(f"{self.describe(path)}: is a folder: expected a file")
            text = self._files[real]
        return _checked(text, self.describe(path))

    def list(self, path: str) -> list[str]:
        real = self.resolve(path)
        if real is None:
            return []
        if real not in self._folders:
            raise ReadError(f"{self.describe(path)}: is no folder: expected one")
        return sorted(self._folders[real])

    def resolve(self, path: str) -> str | None:
        if path in self._files or path in self._folders:
            return path
        todo = path.split("/")
        done = ""
        followed = 0
        while todo:
            step = f"{done}/{todo[0]}" if done else todo[0]
            target = self._links.get(step)
            if target is None:
                if step not in self._files and step not in self._folders:
                    return None
                done = step
                del todo[0]
                continue
            followed += 1
            if followed > 40:  # as many as the kernel follows (include/linux/namei.h MAXSYMLINKS)
                raise ReadError(f"{self.describe(path)}: can't be followed: too many links")
            joined = posixpath.normpath(posixpath.join("/", done, target))
            if posixpath.normpath(posixpath.join(done, target)).startswith(
                "../"
            ) or target.startswith("/"):
                raise _leads_out(self.describe(path), target)
            todo = [part for part in (*joined.strip("/").split("/"), *todo[1:]) if part]
            done = ""
        return done


def _real_path(fd: int, full: str) -> str:
    """The path that an open file really has, links followed."""
    try:
        # One system call; walking the path's components would cost one for each.
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # no /proc here, e.g. not Linux
        return os.path.realpath(full)


def _leads_out(path: str, target: str) -> ReadError:
    return ReadError(
        f"{path}: leads out of the root, to '{shorten(target)}'",
        "Record the tree again with its links kept as they are below /sys",
    )


def _is_unanswered(error: OSError) -> bool:
    # A device that does not answer makes its attribute fail to read, and so do a process that has
    # ended since its file was opened, and a GPU of AMD's that the cgroup keeps from this process
    # (EPERM, from kfd_topology.c); on a live system only.
    import errno

    return error.errno in (
        errno.EIO,
        errno.ENODEV,
        errno.ENXIO,
        errno.EOPNOTSUPP,
        errno.EINVAL,
        errno.ENODATA,
        errno.ESRCH,
        errno.EPERM,
    )


def _decode(data: bytes, full: str) -> str:
    try:
        return _checked(data.decode("utf-8"), full)
    except UnicodeDecodeError as error:
        raise ReadError(
            f"{full}: is no text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from error


def _checked(text: str, full: str) -> str:
    # Kernels before 2.6.39 ended some node files with a zero byte (drivers/base/node.c).
    text = text.rstrip("\0")
    if "\0" in text:
        raise ReadError(f"{full}: is no text: it holds a zero byte")
    return text


def read_parsed(
    root: Root, path: str, parse: Callable[[str], _T], *, lossy: bool = False
) -> _T | None:
    """What `parse` makes of a file's text, as `Root.read` gives it; None if there is no such file.

    Raises ReadError, or the parser's ParseError with the file's path in front.
    """
    text = root.read(path, lossy=lossy)
    if text is None:
        return None
    try:
        return parse(text)
    except ParseError as error:
        raise error.at(root.describe(path)) from error
