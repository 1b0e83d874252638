"""Machines under QEMU: what they are made of, one boot of one, and the report it leaves.

Emulated (TCG), so that they run where /dev/kvm is missing and where a host is itself a guest,
whose nested guests are known to crash. The options are those of qemu-system-x86_64(1); the
files of the machine come in the initramfs (image.py), the report goes out on the second serial
port (guest.py), the kernel's console on the first.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.vm import cache, cpio, guest
from tests.vm.cpio import File

QEMU = "qemu-system-x86_64"
SHOW_VARIABLE = "PROVISION_VM_SHOW"

# Everything that QEMU can emulate, by Intel's name: Linux 6.1 reads the SMT siblings of AMD's from
# a leaf that QEMU does not fill in for this model.
_PROCESSOR = "max,vendor=GenuineIntel,family=6,model=143,stepping=8"

# One thread for all processors: with several, one may still run the breakpoint by which another is
# patching the kernel's code (static keys), and the kernel dies of "Oops: int3". Seen with Linux 6.12
# under QEMU 7.2 on an idle host.
_EMULATION = "tcg,thread=single"

# How often a machine is booted whose kernel panics.
_BOOTS = 3
_PANIC = "Kernel panic - not syncing"

# A machine that has not begun its checks by then is not going to.
_BOOT_SECONDS = 240
_POWER_OFF_SECONDS = 20
_CONSOLE_LINES = 40


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node.

    CPUS is a cpulist of the machine's logical CPUs, "" for a node without any; MEMORY is in
    MiB, 0 for a node without any. DISTANCES are those to all nodes in their order, its own (10)
    among them; where they are not given they are 10 and 20, as QEMU makes them.
    """

    cpus: str = ""
    memory: int = 0
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Card:
    """An accelerator that is not there: see fakecards/fakecards.c.

    NODE is its numa_node, MEMORY_NODE the node of its own memory in NVIDIA's numa_status,
    IDENTITY vendor, device and class in hexadecimal.
    """

    address: str
    node: int
    memory_node: int | None = None
    identity: str = "10de:2330:030200"

    def parameter(self) -> str:
        """The card in the words of the module."""
        memory = "" if self.memory_node is None else f"+{self.memory_node}"
        return f"{self.address}@{self.node}{memory}={self.identity}"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to boot. Node 0 holds the file systems: give it 768 MiB or more."""

    nodes: tuple[Node, ...]
    cards: tuple[Card, ...] = ()
    sockets: int = 2
    cores: int = 2
    threads: int = 2
    parameters: tuple[str, ...] = ()
    """More words for the kernel's command line, such as isolcpus=3."""

    @property
    def cpu_count(self) -> int:
        """How many logical CPUs it has."""
        return self.sockets * self.cores * self.threads


def _kernel_parameters(machine: Machine) -> list[str]:
    words = [
        "console=ttyS0",
        # A panic ends the run (QEMU has -no-reboot) and does not use up the time limit.
        "panic=-1",
        "loglevel=4",
        "rdinit=/lib/systemd/systemd",
        "systemd.unified_cgroup_hierarchy=1",
        # What processors that do not exist need not be protected from, or measured for.
        "mitigations=off",
        "nokaslr",
        "audit=0",
        *machine.parameters,
    ]
    if machine.cards:
        # systemd-modules-load.service(8), as a host's driver is loaded: early, by the system.
        parameter = ",".join(card.parameter() for card in machine.cards)
        words += ["modules_load=fakecards", f"fakecards.cards={parameter}"]
    return words


def command(machine: Machine, image: cache.Image, initramfs: Path, console: Path) -> list[str]:
    """The QEMU command for MACHINE; its standard output is the second serial port."""
    total = sum(node.memory for node in machine.nodes)
    options = [
        *(QEMU, "-nodefaults", "-no-reboot", "-display", "none", "-machine", "q35"),
        *("-accel", _EMULATION, "-cpu", _PROCESSOR, "-m", f"{total}M"),
        "-smp",
        f"{machine.cpu_count},sockets={machine.sockets},cores={machine.cores},threads={machine.threads}",
        *("-kernel", str(image.kernel), "-initrd", str(initramfs)),
        *("-append", " ".join(_kernel_parameters(machine))),
        *("-serial", f"file:{console}"),
        *("-chardev", "stdio,id=report,signal=off", "-serial", "chardev:report"),
    ]
    for index, node in enumerate(machine.nodes):
        words = [f"node,nodeid={index}"]
        words += [f"cpus={part}" for part in node.cpus.split(",") if part]
        if node.memory:
            memory = f"memory-backend-ram,id=memory{index},size={node.memory}M"
            options += ["-object", memory]
            words.append(f"memdev=memory{index}")
        options += ["-numa", ",".join(words)]
    for source, node in enumerate(machine.nodes):
        for target, distance in enumerate(node.distances):
            options += ["-numa", f"dist,src={source},dst={target},val={distance}"]
    return options


@dataclass(frozen=True, slots=True)
class Result:
    """How one check ended: "ok", "fail" or "skip", and what it printed."""

    outcome: str
    detail: str
    seconds: float
    output: str


@dataclass(frozen=True, slots=True)
class Report:
    """What one boot left."""

    results: Mapping[str, Result]
    notes: Sequence[tuple[str, Mapping[str, Any]]]
    seconds: float
    """From the start of QEMU to its end."""
    boot_seconds: float
    """From the start of QEMU to the first check."""
    after: str
    """What was printed after the last check: the journal's warnings where one failed."""


class MachineError(Exception):
    """A machine did not boot, or its checks did not come to their end."""


class KernelPanicError(MachineError):
    """The machine's kernel died, as it now and then does under emulation alone."""


@dataclass(slots=True)
class _Reader:
    """Takes the second serial port's bytes and sorts the records from the output."""

    started: float
    results: dict[str, Result] = field(default_factory=dict)
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    boot_seconds: float | None = None
    current: str = ""
    done: bool = False
    error: str | None = None
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            before, separator, record = text.partition(guest.SEPARATOR)
            if before:
                self.printed.append(before)
                if os.environ.get(SHOW_VARIABLE):
                    sys.stderr.write(before + "\n")
            if separator:
                self._record(json.loads(record))

    def _record(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "hello":
                self.boot_seconds = time.monotonic() - self.started
            case "start":
                self.current = record["name"]
                self.printed.clear()
            case "check":
                self.results[record["name"]] = Result(
                    record["outcome"],
                    record["detail"],
                    record["seconds"],
                    "\n".join(self.printed),
                )
                self.current = ""
                self.printed.clear()
            case "note":
                self.notes.append((record["title"], record["values"]))
            case "done":
                self.done = True
                self.error = record["error"]


def boot(
    machine: Machine,
    image: cache.Image,
    script: Path,
    files: Mapping[str, File],
    *,
    seconds: float = 600,
) -> Report:
    """Boot MACHINE from IMAGE with FILES added, run the checks of SCRIPT, and power off.

    SECONDS limit each boot with its checks. A check that fails is in the report; MachineError is
    for a machine that did not come that far. Where the kernel panicked, all of it is done anew: the
    emulator's faults come and go, and nothing that runs in the machine's user space is at fault. A
    report is always of one whole boot.
    """
    for _ in range(_BOOTS - 1):
        try:
            return _boot_once(machine, image, script, files, seconds)
        except KernelPanicError:
            sys.stderr.write(f"{image.suite.name}, {script.name}: kernel panic, booting again\n")
    return _boot_once(machine, image, script, files, seconds)


def _boot_once(
    machine: Machine, image: cache.Image, script: Path, files: Mapping[str, File], seconds: float
) -> Report:
    asked = asdict(machine) | {"suite": asdict(image.suite)}
    package = "/opt/vm"
    mine = {
        # The scripts import their neighbours as a package's modules here and there.
        f"{package}/__init__.py": File(b""),
        **{
            f"{package}/{path.name}": File(path.read_bytes())
            for path in {*script.parent.glob("guest*.py"), Path(guest.__file__), script}
        },
        guest.MACHINE: File(json.dumps(asked).encode()),
        "/run-checks": File(
            "cd / && export PYTHONPATH=/opt && exec python3 -c "
            f"'from vm.guest import main; main(\"vm.{script.stem}\")'\n".encode()
        ),
    }
    with cache.slot(), tempfile.TemporaryDirectory(prefix="provision-vm-") as name:
        work = Path(name)
        initramfs = work / "initramfs"
        initramfs.write_bytes(cpio.join(image.initramfs.read_bytes(), cpio.pack({**mine, **files})))
        console = work / "console"
        console.touch()
        with (
            (work / "errors").open("w+") as errors,
            subprocess.Popen(
                # The one who waits for the tests still wants to use the computer.
                ["nice", "-n", "10", *command(machine, image, initramfs, console)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            ) as process,
        ):
            reader = _Reader(time.monotonic())
            try:
                fault = _follow(process, reader, seconds)
            finally:
                process.kill()
                process.wait()
            took = time.monotonic() - reader.started
            errors.seek(0)
            complaint = errors.read()
        if fault:
            said = console.read_text(errors="replace")
            tail = _plain(said)[-_CONSOLE_LINES:]
            kind = KernelPanicError if _PANIC in said else MachineError
            raise kind(
                "\n".join(
                    [
                        f"{image.suite.name}, {script.name}: {fault}",
                        *(["--- said by QEMU", complaint] if complaint else []),
                        "--- printed last",
                        *reader.printed[-_CONSOLE_LINES:],
                        "--- end of the console",
                        *tail,
                    ]
                )
            )
    return Report(
        reader.results, reader.notes, took, reader.boot_seconds or 0.0, "\n".join(reader.printed)
    )


def _plain(console: str) -> list[str]:
    """The lines of CONSOLE that say something, without colours and cursor movements."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", console)
    return [line for line in text.splitlines() if line.strip()]


def _follow(process: subprocess.Popen[bytes], reader: _Reader, seconds: float) -> str:
    """Read to the end of the report; what went wrong, "" for nothing."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            now = time.monotonic() - reader.started
            limit = seconds if reader.boot_seconds is not None else min(seconds, _BOOT_SECONDS)
            if reader.done:
                break
            if now > limit:
                where = f"in the check {reader.current}" if reader.current else "booting"
                return f"nothing more after {limit:.0f} s, {where}"
            if selector.select(min(1.0, limit - now + 0.01)):
                data = os.read(process.stdout.fileno(), 65536)
                if not data:
                    where = f"in the check {reader.current}" if reader.current else "on its own"
                    return f"the machine went down {where}, QEMU's status is {process.wait()}"
                reader.feed(data)
    if reader.error is not None:
        return f"the script could not be loaded\n{reader.error}"
    try:
        process.wait(_POWER_OFF_SECONDS)
    except subprocess.TimeoutExpired:
        return "the machine did not power off after its checks"
    return ""


def missing() -> list[str]:
    """What this host lacks to boot a machine from an image it has."""
    return [] if shutil.which(QEMU) else [f"the command {QEMU}"]
