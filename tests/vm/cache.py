"""Where images are kept between runs, and how many machines run at a time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.vm import image

CACHE_VARIABLE = "PROVISION_VM_CACHE"
_UNUSED_SECONDS = 14 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Image:
    """The files to boot a machine of SUITE from."""

    suite: image.Suite
    kernel: Path
    initramfs: Path


def directory() -> Path:
    """The cache: $PROVISION_VM_CACHE or ~/.cache/provision-vm."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache/provision-vm"


def key(suite: image.Suite) -> str:
    """A name for the image of SUITE that changes with all that it is made of."""
    recipe = [Path(image.__file__), *sorted(image.FAKECARDS.iterdir())]
    digest = hashlib.sha256(suite.name.encode())
    for path in recipe:
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return f"{suite.name}-{digest.hexdigest()[:16]}"


def is_cached(suite: image.Suite) -> bool:
    """Whether the image of SUITE is there, so that nothing is needed to make it."""
    return (directory() / key(suite)).is_dir()


@contextmanager
def lock() -> Iterator[None]:
    """Hold the one lock for building."""
    directory().mkdir(parents=True, exist_ok=True)
    with (directory() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def slot() -> Iterator[None]:
    """Hold one of the places for a running machine, of which there are as many as processors.

    An emulated machine takes a whole processor, and its checks have time limits: more at once, of
    this run or of another, would make each other late.
    """
    directory().mkdir(parents=True, exist_ok=True)
    while True:
        for number in range(len(os.sched_getaffinity(0))):
            with (directory() / f"slot-{number}").open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield
                return
        time.sleep(1)


def get(suite: image.Suite) -> Image:
    """The image of SUITE, made if it is not there yet (one to three minutes)."""
    place = directory() / key(suite)
    if place.is_dir():
        os.utime(place)
        return Image(suite, place / "kernel", place / "initramfs")
    with lock():
        if not place.is_dir():
            # What a killed build left; no other one is under way while the lock is held.
            for left in directory().glob("new-*"):
                shutil.rmtree(left)
            # Made aside and renamed: an interrupted build leaves nothing that looks whole.
            with tempfile.TemporaryDirectory(prefix="new-", dir=directory()) as name:
                made = Path(name) / "image"
                made.mkdir()
                image.build(suite, made)
                made.rename(place)
        os.utime(place)
        _prune()
    return Image(suite, place / "kernel", place / "initramfs")


def _prune() -> None:
    """Drop images that no run has used for two weeks: each recipe leaves one behind."""
    names = tuple(f"{suite.name}-" for suite in image.SUITES)
    for path in directory().iterdir():
        if path.name.startswith(names) and time.time() - path.stat().st_mtime > _UNUSED_SECONDS:
            shutil.rmtree(path)
