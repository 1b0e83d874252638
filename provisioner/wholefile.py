"""Writes a file whole or not at all: beside its place, forced to the disk, renamed."""

from __future__ import annotations

import os
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
