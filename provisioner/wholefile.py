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


def write_output(place: str, data: bytes) -> None:
    """Writes what a user asked for to a path of his, whole or not at all.

    What a link leads to is written, and a device or a fifo is written into, as a shell does.

    Raises OSError.
    """
    place = os.path.realpath(place)
    if os.path.exists(place) and not os.path.isfile(place):
        with open(place, "wb") as stream:
            stream.write(data)
    else:
        write_whole(place, data, 0o644)
