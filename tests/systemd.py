"""Systemd's own parsers, asked what they make of files. What is not installed skips the test.

There need be no running systemd: `systemd --test` loads units, prints what it understood and ends,
and the library that systemd's programs share has the reader of environment files.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from provisioner.output import write_files
from provisioner.render import RenderedFile

NOBODY = 65534
_MANAGERS = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")
_LIBRARIES = ("systemd/libsystemd-shared-*.so", "*/systemd/libsystemd-shared-*.so")
_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}

Unit = dict[str, list[str]]  # what `systemd --test` prints of a unit: key -> values


@contextmanager
def unit_folder(files: Mapping[str, RenderedFile]) -> Iterator[Path]:
    """A folder with the files that every user can read; pytest's own are the tester's alone."""
    with tempfile.TemporaryDirectory(prefix="provision-units-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_files(files, folder / "units")
        yield folder / "units"


def verify_units(folder: Path, units: Iterable[str]) -> str:
    """What `systemd-analyze verify` says of units; its exit status proves nothing, so it is not asked."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    # The ':' at the end adds the system's own units, which ours refer to.
    done = subprocess.run(
        [program, "verify", "--man=no", "--recursive-errors=no", *units],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def load_units(folder: Path, units: Iterable[str]) -> dict[str, Unit]:
    """What systemd understands of units, by its own printout."""
    manager = next((path for path in _MANAGERS if os.access(path, os.X_OK)), None)
    if manager is None:
        pytest.skip("systemd is not installed")
    wanted = list(units)
    with tempfile.TemporaryDirectory(prefix="provision-target-") as name:
        target = Path(name) / "default.target"
        target.write_text("[Unit]\n" + "".join(f"Wants={unit}\n" for unit in wanted))
        target.parent.chmod(0o755)
        done = subprocess.run(
            [manager, "--test", "--system", "--no-pager"],
            env={"SYSTEMD_UNIT_PATH": f"{folder}:{name}", "SYSTEMD_LOG_LEVEL": "warning"},
            capture_output=True,
            check=False,
            cwd="/",
            # It refuses to be tested by root.
            user=None if os.geteuid() else NOBODY,
            group=None if os.geteuid() else NOBODY,
            extra_groups=None if os.geteuid() else [],
        )
    found = dict(_parse_units(done.stdout.decode("utf-8", "surrogateescape")))
    if not found:
        pytest.skip(f"systemd --test does not work here: {done.stderr.decode()[-300:]}")
    return {unit: found[unit] for unit in wanted}


def _parse_units(text: str) -> Iterator[tuple[str, Unit]]:
    for block in text.split("\t-> Unit ")[1:]:
        name, _, rest = block.partition(":\n")
        unit: Unit = {}
        for line in rest.split("\n"):
            key, colon, value = line.strip("\t").partition(": ")
            if colon:
                unit.setdefault(key, []).append(value)
        yield name, unit


def read_command(line: str) -> list[str]:
    """The arguments that systemd starts a program with, from its printout of them.

    Source: quote_command_line and shell_escape in systemd's src/basic/escape.c.
    The printout stands before variables are put in, when two dollars become one.
    """
    words = re.findall(r'"((?:[^"\\]|\\.)*)"|([^ ]+)', line, re.DOTALL)
    return [_read_word(quoted or plain).replace("$$", "$") for quoted, plain in words]


def _read_word(word: str) -> str:
    def unescape(match: re.Match[bytes]) -> bytes:
        what = match[1]
        if what[:1].isdigit():
            return bytes([int(what, 8)])
        return bytes([_ESCAPES.get(what.decode(), what[0])])

    raw = word.encode("utf-8", "surrogateescape")
    return re.sub(rb"\\([0-7]{3}|.)", unescape, raw, flags=re.DOTALL).decode()


def read_environment(path: Path) -> dict[str, str]:
    """What systemd reads an EnvironmentFile= to, by its own function."""
    found = sorted(path for pattern in _LIBRARIES for path in Path("/usr/lib").glob(pattern))
    if not found:
        pytest.skip("systemd's shared library is not installed")
    try:
        library = ctypes.CDLL(str(found[0]))
        load, clean = library.load_env_file, library.strv_env_clean_with_callback
    except (OSError, AttributeError) as error:
        pytest.skip(f"systemd's shared library has no load_env_file: {error}")
    strings = ctypes.POINTER(ctypes.c_char_p)
    invalid = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
    load.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(strings)]
    clean.argtypes = [strings, invalid, ctypes.c_void_p]
    clean.restype = strings
    read = strings()
    assert load(None, os.fsencode(path), ctypes.byref(read)) == 0
    dropped: list[bytes] = []
    # As the manager does next: what is no assignment in its eyes is dropped.
    kept = clean(read, invalid(lambda text, _: dropped.append(text)), None)
    assert dropped == []
    environment: dict[str, str] = {}
    for number in range(1 << 16):
        entry = kept[number] if kept else None
        if entry is None:
            break
        name, _, value = entry.decode().partition("=")
        environment[name] = value
    return environment
