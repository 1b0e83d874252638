"""Writes a file whole or not at all: beside its place, forced to the disk, renamed."""

from __future__ import annotations

import os
import stat
import tempfile

TEMPORARY = ".provision-tmp-"  # starts the name of what a killed run may leave


def write_whole(place: str, data: bytes, mode: int) -> None:
    """Makes a path hold a regular file of these bytes and permissions; who reads finds the old or the new.

    Raises OSError; then what was there still is.
    """
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=os.path.dirname(place))
    try:
        with open(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise


def write_output(place: str, data: bytes) -> None:
    """Writes what a user asked for to a path of his, whole or not at all.

    What a link leads to is written, and a device or a pipe is written into, as a shell does; a file
    keeps its permissions.

    Raises OSError.
    """
    try:
        status = os.stat(place)
    except FileNotFoundError:
        status = None
    if status is not None and not stat.S_ISREG(status.st_mode):
        with open(place, "wb") as stream:
            stream.write(data)
        return
    mode = 0o644 if status is None else stat.S_IMODE(status.st_mode)
    write_whole(os.path.realpath(place), data, mode)
