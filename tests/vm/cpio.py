"""A writer of cpio archives, in the one form that the kernel unpacks as an initramfs.

The format is "newc": Documentation/driver-api/early-userspace/buffer-format.rst in the
kernel's tree. The same document says that archives may follow one another, each packed in
its own way, with zeros in between, and that later files overwrite earlier ones. So what
changes with every boot is a small archive after the large one, which is built once.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True)
class File:
    """A regular file of root's."""

    data: bytes
    mode: int = 0o644


def _member(inode: int, name: str, mode: int, data: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    # ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor,
    # namesize, check. A time of 1 and not 0: zipfile and some others refuse times before 1980
    # but none refuses an old one, and one fixed time makes one input give the same bytes.
    numbers = (inode, mode, 0, 0, links, 1, len(data), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08X" % number for number in numbers) + encoded
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def pack(files: Mapping[str, File]) -> bytes:
    """An archive of FILES by absolute path, with the directories above them."""
    parents = {
        parent.as_posix()
        for path in files
        for parent in PurePosixPath(path).parents
        if parent.as_posix() != "/"
    }
    members: list[bytes] = []
    # A directory sorts before what it holds, and the kernel needs them in this order.
    for path in sorted(parents | set(files)):
        name = path.removeprefix("/")
        if path in files:
            file = files[path]
            members.append(_member(len(members) + 1, name, stat.S_IFREG | file.mode, file.data))
        else:
            members.append(_member(len(members) + 1, name, stat.S_IFDIR | 0o755, b""))
    members.append(_member(0, "TRAILER!!!", 0, b""))
    return b"".join(members)


def join(first: bytes, second: bytes) -> bytes:
    """FIRST and SECOND as one initramfs: an archive begins at a multiple of four bytes."""
    return first + b"\0" * (-len(first) % 4) + second
