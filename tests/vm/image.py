"""The machines' file systems: Debian with its systemd, packed as an initramfs, and its kernel.

Made by mmdebstrap(1) from the host's own package sources. pystemd has no wheel and msgspec's
depends on the version of Python, so both come through the host's pip and are installed inside
the root, as is the module in fakecards/, which must fit the suite's kernel. What was needed
only to build is then taken away again, with all that no test looks at: the whole file system
has to be unpacked by an emulated processor at each boot.

The archive is the root file system itself: systemd takes an initramfs without
/etc/initrd-release for a normal system (systemd(1), bootup(7)), so no disk, no block driver
and no second kernel image is needed.

Every byte of this file is part of the key that an image is cached under (see cache.py), as
are the sources of the module: change either, and the images are made anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.vm import apt

FAKECARDS = Path(__file__).with_name("fakecards")

_PACKAGES = [
    "systemd",
    "systemd-sysv",
    "dbus",
    "udev",
    "kmod",
    "util-linux",
    "procps",
    "numactl",
    "linux-image-cloud-amd64",
    "python3",
    "python3-jinja2",
    "python3-click",
    "python3-lxml",
    "python3-psutil",
]
_BUILD_PACKAGES = [
    "gcc",
    "make",
    "pkgconf",
    "libsystemd-dev",
    "linux-headers-cloud-amd64",
    "python3-dev",
    "python3-pip",
]

# From the package index of Python: the releases that the project is tested with.
_PYSTEMD = "pystemd==0.15.3"
_MSGSPEC = "msgspec==0.23.0"
# Debian 12's setuptools refuses pystemd's pyproject.toml: its licence is an SPDX expression.
_BUILD_TOOLS = ("setuptools==80.9.0", "wheel==0.45.1")

# They would wait for devices, the network or a login that never come, or run in between.
_MASKED = [
    "getty@.service",
    "serial-getty@.service",
    "systemd-logind.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "systemd-tmpfiles-clean.timer",
    "systemd-hwdb-update.service",
    "systemd-update-utmp.service",
]

# With them a build takes place; without them the machine boots in half the time. There is no
# device to drive here: the consoles, the timers and the interrupt controllers are built in.
_TRIMMED = [
    "boot/*",
    "usr/src/*",
    "usr/include/*",
    "lib/modules/*/kernel",
    "lib/modules/*/build",
    "lib/modules/*/source",
    "usr/lib/udev/hwdb.d",
    "usr/lib/udev/hwdb.bin",
    "etc/udev/hwdb.bin",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/i18n",
    "usr/share/zoneinfo",
    "usr/share/perl",
    "usr/share/bash-completion",
    "usr/share/zsh",
    "usr/share/python-wheels",
    "usr/share/gcc",
    "usr/share/gdb",
    "usr/share/lintian",
    "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/perl",
    "usr/lib/gcc",
    "usr/lib/apt",
    "usr/bin/apt*",
    "usr/bin/perl",
    "usr/lib/x86_64-linux-gnu/libapt-*",
    "usr/lib/python3*/lib2to3",
    "usr/lib/python3*/pydoc_data",
    "usr/lib/python3*/idlelib",
    "var/cache/*",
    "var/lib/apt",
    "var/lib/dpkg/info",
    "var/log/*",
    "tmp/*",
    "etc/resolv.conf",
    "etc/apt",
    "root/.cache",
]

# Somebody without privileges, with a home and a name of his own.
USER = "worker"

SERVICE = "provision-vm.service"
# Not a oneshot: the system counts as started while the checks run, and they are real time.
# The immediate power-off spares the orderly one, and comes even if the script is killed.
_SERVICE = """\
[Unit]
Description=The checks of one test file
After=multi-user.target
SuccessAction=poweroff-immediate
FailureAction=poweroff-immediate

[Service]
ExecStart=/bin/sh /run-checks
TimeoutStartSec=infinity
"""


@dataclass(frozen=True, slots=True)
class Suite:
    """A release of Debian and the versions in it that matter here."""

    name: str
    systemd: int
    python: str

    @property
    def site_packages(self) -> str:
        """Where Debian's Python looks for what was not installed by Debian."""
        return f"/usr/local/lib/python{self.python}/dist-packages"


SUITES = (Suite("bookworm", 252, "3.11"), Suite("trixie", 257, "3.13"))


class BuildError(Exception):
    """An image could not be made."""


def missing() -> list[str]:
    """What this host lacks to make an image, in words for a reader."""
    lacks = [
        f"the command {command}"
        for command in ("mmdebstrap", "apt-config", "zstd", "cpio", "chroot")
        if shutil.which(command, path=_path()) is None
    ]
    if _pip() is None:
        lacks.append("pip")
    if os.geteuid() != 0:
        lacks.append("root")
    try:
        apt.sources(SUITES[0].name)
    except (apt.NoSourcesError, OSError) as error:
        lacks.append(str(error))
    return lacks


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def _pip() -> list[str] | None:
    if (
        subprocess.run(
            [sys.executable, "-m", "pip", "--version"], capture_output=True, check=False
        ).returncode
        == 0
    ):
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    return [found] if found else None


def _run(command: Sequence[str], *, path: str = "", stdin: str | None = None) -> None:
    """Run COMMAND out of the way of other work; its output matters only where it fails."""
    done = subprocess.run(
        ["nice", "-n", "10", *command],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Debian's tools live in sbin, and the words of an error are to be found again.
        env=os.environ | {"PATH": path + _path(), "LC_ALL": "C.UTF-8"},
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-40:])
        raise BuildError(f"{' '.join(command)}: exit status {done.returncode}\n{tail}")


def _chroot(root: Path, *command: str) -> None:
    # The host's Python settings (a home, a start-up file) name paths that are not in the root.
    _run(["env", "-u", "PYTHONHOME", "-u", "PYTHONPATH", "chroot", str(root), *command])


def _bootstrap(root: Path, suite: Suite, work: Path) -> None:
    options = work / "apt.conf"
    options.write_text(apt.options())
    excluded = (f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale"))
    _run(
        [
            "mmdebstrap",
            "--mode=root",
            "--variant=minbase",
            f"--aptopt={options}",
            "--dpkgopt=force-unsafe-io",
            *excluded,
            f"--include={','.join((*_PACKAGES, *_BUILD_PACKAGES))}",
            suite.name,
            str(root),
            "-",
        ],
        stdin=apt.sources(suite.name),
    )


def _install_python_packages(root: Path, suite: Suite, work: Path) -> None:
    pip = _pip()
    if pip is None:
        raise BuildError("pip is missing")
    wheels = root / "wheels"
    wheels.mkdir()
    fetch = [*pip, "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    abi = suite.python.replace(".", "")
    platforms = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
    _run(
        [
            *fetch,
            "--only-binary=:all:",
            "--implementation=cp",
            f"--python-version={suite.python}",
            f"--abi=cp{abi}",
            *(f"--platform={platform}" for platform in platforms),
            _MSGSPEC,
            *_BUILD_TOOLS,
        ]
    )
    # To name a source archive's version pip runs its setup.py, and that one asks for nothing
    # but libsystemd's version. The host need not have the library: the build is in the root.
    shim = work / "bin" / "pkg-config"
    shim.parent.mkdir()
    shim.write_text(f"#!/bin/sh\necho {suite.systemd}\n")
    shim.chmod(0o755)
    _run([*fetch, "--no-binary=pystemd", _PYSTEMD], path=f"{shim.parent}:")
    install = ["python3", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    install += ["--find-links=/wheels", "--root-user-action=ignore", "--no-cache-dir"]
    _chroot(root, *install, "--target=/tools", *_BUILD_TOOLS)
    install += ["--no-build-isolation", f"--target={suite.site_packages}"]
    _chroot(root, "env", "PYTHONPATH=/tools", *install, _MSGSPEC, _PYSTEMD)
    shutil.rmtree(root / "tools")
    shutil.rmtree(wheels)


def _install_module(root: Path) -> str:
    """Build fakecards for the root's kernel; its release."""
    (release,) = (path.name for path in (root / "lib/modules").iterdir())
    source = root / "fakecards"
    shutil.copytree(FAKECARDS, source)
    build = f"/lib/modules/{release}/build"
    _chroot(root, "make", "-C", build, f"M=/{source.name}", "modules")
    target = root / "lib/modules" / release / "updates"
    target.mkdir()
    shutil.copy(source / "fakecards.ko", target)
    shutil.rmtree(source)
    return release


def _configure(root: Path) -> None:
    units = root / "etc/systemd/system"
    for name in _MASKED:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")
    (units / SERVICE).write_text(_SERVICE)
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / SERVICE).symlink_to(f"../{SERVICE}")
    (root / "etc/hostname").write_text("provision-vm\n")
    # An empty one means a first boot, which presets units and asks questions.
    (root / "etc/machine-id").write_text("70726f766973696f6e2d766d00000000\n")
    _chroot(root, "useradd", "--create-home", "--uid=1000", "--shell=/bin/sh", USER)


def _trim(root: Path) -> None:
    for pattern in _TRIMMED:
        for path in root.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for path in (root / "usr").rglob("__pycache__"):
        # Only what Debian's packages of Python left without its source.
        if not any(path.parent.glob("*.py")):
            shutil.rmtree(path)
    # Younger than /usr, or else units that rebuild caches of it run (ConditionNeedsUpdate=
    # in systemd.unit(5)).
    for path in (root / "etc/.updated", root / "var/.updated"):
        path.touch()


def build(suite: Suite, target: Path) -> None:
    """Make the image of SUITE: TARGET/kernel and TARGET/initramfs."""
    with tempfile.TemporaryDirectory(prefix=f"{suite.name}-", dir=target.parent) as name:
        work = Path(name)
        root = work / "root"
        _bootstrap(root, suite, work)
        _install_python_packages(root, suite, work)
        release = _install_module(root)
        (kernel,) = (root / "boot").glob("vmlinuz-*")
        shutil.copy(kernel, target / "kernel")
        _chroot(root, "apt-get", "purge", "--yes", "--autoremove", *_BUILD_PACKAGES)
        _configure(root)
        _trim(root)
        # After the trimming: it took the kernel's own modules away.
        _chroot(root, "depmod", release)
        pack = (
            f"cd {root} && find . -print0 | cpio --null --create --format=newc --quiet "
            f"| zstd --quiet -T0 -9 -o {target / 'initramfs'}"
        )
        _run(["bash", "-o", "pipefail", "-c", pack])
