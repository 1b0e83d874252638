"""What the guest scripts about `apply` share: the plan they apply, and looking at what is in force.

Only run inside the machine.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from provisioner import cli

from .guest import read

_COMMAND = "/usr/local/bin/provision"

CGROUPS = Path("/sys/fs/cgroup")
UNITS = Path("/etc/systemd/system")
CONFIG = "/run/provision.toml"
SYSTEM_UNITS = ("system.slice", "user.slice", "init.scope")

_TEXT = """\
[placement]
confine = true
[locality]
"10000:01:00.0" = 1
[worker]
command = ["/usr/bin/python3", "/run/hold.py"]
"""

# A worker: says what its first instruction may use, then holds memory until it is stopped.
_HOLD = """\
import os, sys, time
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
first = [status["Cpus_allowed_list"].strip(), status["Mems_allowed_list"].strip()]
block = bytearray(int(os.environ.get("HOLD_MIB", "24")) << 20)
for at in range(0, len(block), 4096):
    block[at] = 1
name = os.environ.get("HOLD_NAME") or os.environ.get("PROVISION_RANK", "x")
told = [os.environ.get(key, "") for key in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")]
text = " ".join([str(os.getpid()), *first, *told])
open(f"/run/held-{name}.new", "w").write(text)
os.rename(f"/run/held-{name}.new", f"/run/held-{name}")
time.sleep(600)
"""


def write_inputs(text: str = _TEXT) -> None:
    """The configuration and the worker's program."""
    load()
    Path(CONFIG).write_text(text)
    Path("/run/hold.py").write_text(_HOLD)


class Started:
    """A provision command in a process of its own, forked from this one, and a session of its own.

    An emulated processor takes seconds to start Python and to load what a command needs, which is a
    fifth of what it then does: here all of it is loaded already. What is started otherwise, as
    an operator would, is started by `run`.
    """

    def __init__(self, *words: str, out: int, err: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.words = words
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, out, err)

    def wait(self, seconds: float = 200) -> int:
        """The exit status, negative for a signal's number."""
        end = time.monotonic() + seconds
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.killpg(self.pid, signal.SIGKILL)
                raise AssertionError(f"provision {' '.join(self.words)}: not within {seconds} s")
            else:
                time.sleep(0.02)
        return self.returncode


def _become(words: tuple[str, ...], out: int, err: int) -> NoReturn:
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.argv = [_COMMAND, *words]
        sys.stdin = open(0)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")
        code = cli.run_command(list(words))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def provision(
    *words: str, status: int | None = 0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A provision command, as guest.run would have run it."""
    print("$ provision", *words, flush=True)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        before = dict(os.environ)
        os.environ.update(env or {})
        try:
            code = Started(*words, out=out.fileno(), err=err.fileno()).wait()
        finally:
            os.environ.clear()
            os.environ.update(before)
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(words, code, out.read(), err.read())
    print(done.stdout, done.stderr, sep="", end="", flush=True)
    if status is not None and code != status:
        raise AssertionError(
            f"provision {' '.join(words)}: expected status {status}, found {code}\n"
            f"{done.stdout}{done.stderr}"
        )
    return done


def load() -> None:
    """Loads what commands need, once for all that are forked."""
    for name in ("apply", "verify", "undo", "run", "launch", "status"):
        importlib.import_module(f"provisioner.cli.{name}")
    for name in ("apply", "undo", "run", "guard", "bus", "verify_report", "config", "discovery"):
        importlib.import_module(f"provisioner.{name}")
    for name in ("msgspec", "psutil", "pystemd.dbuslib", "pystemd.systemd1", "pystemd.dbusexc"):
        importlib.import_module(name)
    # The templates are compiled too.
    environment = importlib.import_module("provisioner.render")._environment()
    for name in environment.list_templates():
        environment.get_template(name)


def apply(*options: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Provision apply with the configuration."""
    return provision("apply", "--config", CONFIG, "--yes", *options, status=status)


def verify(status: int | None = 0) -> dict[str, Any]:
    """The report of provision verify."""
    done = provision("verify", "--json", status=status)
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def codes(report: dict[str, Any]) -> set[str]:
    """The kinds of difference in a report."""
    return {finding["code"] for finding in report["findings"]}


def ranks(path: str = "/etc/provision/plan.json") -> list[dict[str, Any]]:
    """The ranks of the plan in force."""
    plan = json.loads(Path(path).read_text())
    return [rank for service in plan["services"] for rank in service["ranks"]]


def group(slice_name: str) -> Path:
    """The cgroup of a rank's slice."""
    return (
        CGROUPS
        / f"{slice_name.split('-', maxsplit=1)[0].removesuffix('.slice')}.slice"
        / slice_name
    )


def granted(slice_name: str) -> tuple[str, str]:
    """The CPUs and memory nodes that the kernel grants a rank's slice."""
    folder = group(slice_name)
    return read(f"{folder}/cpuset.cpus.effective"), read(f"{folder}/cpuset.mems.effective")


def allowed(pid: int) -> tuple[str, str]:
    """The CPUs and memory nodes that a process may use."""
    text = Path(f"/proc/{pid}/status").read_text()
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return lines["Cpus_allowed_list"].strip(), lines["Mems_allowed_list"].strip()


def system_sets(*, there: bool = False) -> dict[str, tuple[str, str]]:
    """The effective sets of the system's own units; what has no cgroup or no cpuset has the root's.

    THERE leaves out those that have no cgroup just now, as user.slice while nobody is logged in.
    """
    found: dict[str, tuple[str, str]] = {}
    for name in SYSTEM_UNITS:
        folder = CGROUPS / name
        if there and not folder.exists():
            continue
        sets = []
        for leaf in ("cpuset.cpus.effective", "cpuset.mems.effective"):
            path = folder / leaf if (folder / leaf).exists() else CGROUPS / leaf
            sets.append(read(str(path)))
        found[name] = (sets[0], sets[1])
    return found


def files() -> dict[str, str]:
    """Every file and link below the folders that apply may write to, with a digest."""
    found: dict[str, str] = {}
    for top in ("/etc/systemd", "/etc/provision", "/usr/local/bin", "/run/systemd/system"):
        found |= _files(top)
    return found | _files("/run/systemd/system.control") | _files("/run/provision")


def changes(before: object) -> list[str]:
    """What is not as in what `files` gave before: path, then and now."""
    assert isinstance(before, dict)
    now = files()
    return [
        f"{path}: {before.get(path)} -> {now.get(path)}"
        for path in sorted({*before, *now})
        if before.get(path) != now.get(path)
    ]


def _files(top: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder, _, names in os.walk(top):
        found[folder] = "folder"
        for name in names:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                found[path] = f"-> {os.readlink(path)}"
            else:
                found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


def held(name: str) -> list[str] | None:
    """What a worker said: process id, CPUs, memory nodes, visible cards, local rank."""
    path = Path(f"/run/held-{name}")
    return path.read_text().split(" ") if path.exists() else None


def forget(name: str) -> None:
    """Removes what a worker said, for the next one."""
    Path(f"/run/held-{name}").unlink(missing_ok=True)
