"""A root that remembers what was found in another one, so that just that can be kept."""

from __future__ import annotations

import posixpath
from typing import NamedTuple

from provisioner.root import Root


class Recorded(NamedTuple):
    """What was found: a second reader that asks the same gets the same."""

    files: dict[str, str]  # path -> text
    links: dict[str, str]  # path -> where it leads, relative to the root
    folders: dict[str, list[str]]  # path -> names, of every folder that was listed


class RecordingRoot:
    """Another root, read through; what is not there is not recorded."""

    __slots__ = ("_files", "_folders", "_inner", "_links", "_real")

    def __init__(self, inner: Root) -> None:
        self._inner = inner
        self._files: dict[str, str] = {}
        self._folders: dict[str, list[str]] = {}
        self._links: dict[str, str] = {}
        self._real: dict[str, str] = {}

    @property
    def is_this_system(self) -> bool:
        return self._inner.is_this_system

    def describe(self, path: str) -> str:
        return self._inner.describe(path)

    def read(self, path: str, *, lossy: bool = False) -> str | None:
        text = self._inner.read(path, lossy=lossy)
        if text is not None:
            self._files[path] = text
        return text

    def list(self, path: str) -> list[str]:
        names = self._inner.list(path)
        if names:
            self._folders[path] = names
        return names

    def resolve(self, path: str) -> str | None:
        real = self._inner.resolve(path)
        if real is not None:
            self._trace(path)
            if real not in self._files:
                self._folders.setdefault(real, [])
        return real

    def recorded(self) -> Recorded:
        """What was found so far, each file and folder at the path that links lead to.

        Only links that a reader followed by `resolve` are kept as such. Below any other the file
        lies at the path that it was asked for by, which is all that the reader knows of it.
        """
        files = {self._follow(path): text for path, text in self._files.items()}
        folders: dict[str, list[str]] = {}
        for path, names in self._folders.items():
            folders.setdefault(self._follow(path), []).extend(names)
        for path in files:
            folders.pop(path, None)  # resolved first, then read: a file after all
        return Recorded(files, dict(self._links), folders)

    def _trace(self, path: str) -> None:
        """Records each link on the way to something that is there."""
        done = ""
        for part in path.split("/"):
            step = posixpath.join(done, part)
            real = self._real.get(step)
            if real is None:
                # Something is there, so that each step on the way is too.
                real = self._real[step] = self._inner.resolve(step) or step
            if real != step:
                self._links[step] = real
            done = real

    def _follow(self, path: str) -> str:
        done = ""
        for part in path.split("/"):
            step = posixpath.join(done, part)
            done = self._links.get(step, step)
        return done
