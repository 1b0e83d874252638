"""A snapshot: what is read of a machine to plan for it and to look at it, in one file that can be handed on.

It holds no serial number, UUID, MAC address or host name (see `scrub`), and a plan made from it is
the machine's own, byte for byte.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from provisioner.archive import MAX_ARCHIVE_BYTES, pack_tree, unpack_tree
from provisioner.cgroup import WITHIN_ROOT, WITHIN_SELF
from provisioner.discovery import discover
from provisioner.errors import InputError, ReadError, WriteError
from provisioner.fingerprint import machine_fingerprint
from provisioner.hostfs import read_settings
from provisioner.recording import RecordingRoot
from provisioner.root import MemoryRoot, Root
from provisioner.scrub import find_host_name, holds_identifier, scrub
from provisioner.wholefile import write_output


class Snapshot(NamedTuple):
    """A snapshot that was taken."""

    data: bytes  # the archive
    tree: MemoryRoot  # what is in it
    fingerprint: str  # of what is in it, which is the machine's unless an RDMA device was renamed
    renamed: Mapping[str, str]  # names of devices that held an identifier -> what stands for them


def take_snapshot(root: Root, within: str = WITHIN_ROOT) -> Snapshot:
    """The snapshot of a machine; the same machine in the same state gives the same bytes.

    Args:
        root: the machine.
        within: a cgroup to plan for; root and self are always in it.

    Raises InputError for a cgroup whose name is an identifier, and what `discover` raises: a machine
    that can't be read has no snapshot.
    """
    host = find_host_name(root)
    if holds_identifier(within) or (host and host in within.lower()):
        raise InputError(
            f"--within '{within}' holds an identifier or the host's name, which no snapshot does",
            "Run it in that cgroup, and read the snapshot with --within self",
        )
    recorder = RecordingRoot(root)
    asked = dict.fromkeys((WITHIN_ROOT, WITHIN_SELF, within))
    found, unreadable = _read_all(recorder, asked)
    tree, renamed = scrub(
        root,
        recorder.recorded(),
        "snapshot",
        asked.keys() - {WITHIN_ROOT, WITHIN_SELF},
        unreadable,
    )
    replay = RecordingRoot(tree)
    kept, _ = _read_all(replay, asked)
    tree = _drop_unasked(tree, replay.recorded().folders)
    if kept != found and not renamed:
        raise RuntimeError("the snapshot would give another fingerprint than its machine")
    return Snapshot(pack_tree(tree), tree, kept[0], renamed)


def _read_all(root: Root, asked: Iterable[str]) -> tuple[list[str], list[str]]:
    """(the fingerprint within each cgroup, the files of settings that can't be read).

    All that any command reads of a recording has then been read.
    """
    machines = [discover(root, one) for one in asked]
    settings = read_settings(root, machines[0])
    unreadable = [path for paths in settings.unreadable.values() for path in paths]
    return [machine_fingerprint(machine) for machine in machines], unreadable


def _drop_unasked(tree: MemoryRoot, asked: Mapping[str, Sequence[str]]) -> MemoryRoot:
    """The tree less the empty folders that no reader of it asks for, nor finds by a name that it lists.

    Of such a folder all that was in it was dropped, and a snapshot of the snapshot would not have it.
    """
    needed = {
        path
        for path in tree.empty_folders
        if posixpath.basename(path) in asked.get(posixpath.dirname(path), ())
    }
    # One whose being there says something may have held nothing but such folders.
    needed |= {path for path in asked if tree.resolve(path) == path}
    return MemoryRoot(tree.name, tree.files, tree.links, needed)


def read_snapshot(path: str | os.PathLike[str]) -> MemoryRoot:
    """The tree that a snapshot's file holds.

    Raises ReadError if it can't be read, or is no snapshot that is whole and harmless.
    """
    name = os.fspath(path)
    try:
        # Not blocking: a fifo would hang the open.
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            data = file.read(MAX_ARCHIVE_BYTES + 1)
    except OSError as error:
        raise ReadError(f"{name}: can't be read: {error.strerror}") from error
    if len(data) > MAX_ARCHIVE_BYTES:
        raise ReadError(f"{name}: is over {MAX_ARCHIVE_BYTES} bytes: no snapshot is")
    return unpack_tree(data, name)


def save_snapshot(data: bytes, path: str | os.PathLike[str]) -> None:
    """Writes a snapshot's file whole or not at all. Raises WriteError; then what was there still is."""
    try:
        write_output(os.fspath(path), data)
    except OSError as error:
        raise WriteError(f"{os.fspath(path)}: can't be written: {error.strerror}") from error


def list_snapshots(paths: Sequence[str]) -> list[str]:
    """The files that the paths name: each file itself, and of a folder all files in it, sorted.

    Raises:
        ReadError: a folder can't be read.
        InputError: there is no file in a folder.
    """
    found: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            found.append(path)
            continue
        try:
            with os.scandir(path) as entries:
                files = sorted(entry.path for entry in entries if entry.is_file())
        except OSError as error:
            raise ReadError(f"{path}: can't be read: {error.strerror}") from error
        if not files or os.path.isdir(os.path.join(path, "sys")):
            raise InputError(
                f"{path}: is no folder of snapshots: there {'is a machine' if files else 'are no files'} in it",
                "Give the folder that the snapshots lie in; an unpacked one is read with --root",
            )
        found += files
    return found
