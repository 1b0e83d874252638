"""Checks of the harness itself: see test_boot.py."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from .guest import check, equal, machine, note, read, run, until

_NODES = Path("/sys/devices/system/node")
_CGROUPS = Path("/sys/fs/cgroup")


@check
def systemd_version() -> None:
    suite = machine()["suite"]
    words = run("systemctl", "--version").stdout.split()
    note("versions", systemd=words[1], kernel=os.uname().release)
    equal(int(words[1]), suite["systemd"], "systemd's version")


@check
def system_has_started() -> None:
    until(
        lambda: run("systemctl", "is-system-running", status=None).stdout.strip() != "starting",
        "the system has started",
    )
    failed = run("systemctl", "list-units", "--failed", "--plain", "--no-legend").stdout
    equal(failed, "", "failed units")


@check
def cgroup_is_version_2_with_cpuset() -> None:
    equal(run("stat", "-f", "-c", "%T", str(_CGROUPS)).stdout, "cgroup2fs\n")
    controllers = read(f"{_CGROUPS}/cgroup.controllers").split()
    assert "cpuset" in controllers, controllers


@check
def cpus_are_grouped_as_asked() -> None:
    asked = machine()
    count = asked["sockets"] * asked["cores"] * asked["threads"]
    equal(read("/sys/devices/system/cpu/online"), f"0-{count - 1}")
    for cpu in range(count):
        topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        package = cpu // (asked["cores"] * asked["threads"])
        equal(read(f"{topology}/physical_package_id"), str(package), f"package of CPU {cpu}")
        first = cpu - cpu % asked["threads"]
        siblings = f"{first}-{first + asked['threads'] - 1}"
        equal(read(f"{topology}/thread_siblings_list"), siblings, f"siblings of CPU {cpu}")


@check
def caches_are_reported() -> None:
    shared = {
        read(str(index / "shared_cpu_list"))
        for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")
        if read(str(index / "level")) == "3"
    }
    note("last-level cache", shared_with_cpu0=sorted(shared))
    equal(len(shared), 1, "last-level caches of CPU 0")


@check
def nodes_are_as_asked() -> None:
    nodes = machine()["nodes"]
    equal(read(f"{_NODES}/possible"), f"0-{len(nodes) - 1}", "possible nodes")
    equal(read(f"{_NODES}/online"), f"0-{len(nodes) - 1}", "online nodes")
    for index, asked in enumerate(nodes):
        node = f"{_NODES}/node{index}"
        equal(read(f"{node}/cpulist"), asked["cpus"], f"CPUs of node {index}")
        distances = [int(word) for word in read(f"{node}/distance").split()]
        equal(distances, list(asked["distances"]), f"distances of node {index}")
        kilobytes = int(read(f"{node}/meminfo").split("MemTotal:")[1].split()[0])
        # The kernel keeps some of it for itself.
        wanted = asked["memory"] * 1024
        assert wanted * 0.7 <= kilobytes <= wanted, (index, kilobytes, wanted)


@check
def cards_are_on_the_pci_bus() -> None:
    for card in machine()["cards"]:
        device = f"/sys/bus/pci/devices/{card['address']}"
        vendor, model, kind = card["identity"].split(":")
        equal(read(f"{device}/vendor"), f"0x{vendor}")
        equal(read(f"{device}/device"), f"0x{model}")
        equal(read(f"{device}/class"), f"0x{kind}")
        equal(read(f"{device}/numa_node"), str(card["node"]), f"node of {card['address']}")
        if card["node"] >= 0:
            cpus = machine()["nodes"][card["node"]]["cpus"]
            equal(read(f"{device}/local_cpulist"), cpus, f"CPUs of {card['address']}")


@check
def cards_are_known_to_the_driver() -> None:
    cards = [card for card in machine()["cards"] if card["identity"].startswith("10de:")]
    gpus = Path("/proc/driver/nvidia/gpus")
    equal(sorted(path.name for path in gpus.iterdir()), sorted(card["address"] for card in cards))
    for card in cards:
        information = read(f"{gpus}/{card['address']}/information")
        assert f"Bus Location: \t {card['address']}" in information, information
        status = gpus / card["address"] / "numa_status"
        equal(status.exists(), card["memory_node"] is not None)
        if status.exists():
            equal(read(str(status)).split()[:2], ["Node:", str(card["memory_node"])])


@check
def packages_can_be_imported() -> None:
    for name in ("pystemd", "pystemd.systemd1", "msgspec", "jinja2", "click", "psutil"):
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", ""), module.__file__)


@check
def pystemd_reaches_the_manager() -> None:
    manager = importlib.import_module("pystemd.systemd1").Manager(_autoload=True).Manager
    version = manager.Version.decode()
    assert version.startswith(str(machine()["suite"]["systemd"])), version


@check
def transient_slice_is_enforced() -> None:
    show = ["grep", "-E", "^(Cpus|Mems)_allowed_list", "/proc/self/status"]
    run(
        "systemctl",
        "set-property",
        "--runtime",
        "smoke.slice",
        "AllowedCPUs=2-3",
        "AllowedMemoryNodes=1",
    )
    scope = [
        "systemd-run",
        "--scope",
        "--quiet",
        "--collect",
        "--slice=smoke.slice",
        "--unit=smoke",
    ]
    seen = run(*scope, "--", *show).stdout.split()
    equal(seen, ["Cpus_allowed_list:", "2-3", "Mems_allowed_list:", "1"])
    equal(read(f"{_CGROUPS}/smoke.slice/cpuset.cpus.effective"), "2-3")
    run("systemctl", "stop", "smoke.slice")


@check
def pages_lie_on_the_node_of_the_slice() -> None:
    work = (
        "block = bytearray(32 << 20)\n"
        "block[::4096] = b'x' * len(block[::4096])\n"
        "print(open('/proc/self/numa_maps').read())\n"
    )
    command = [
        "systemd-run",
        "--wait",
        "--pipe",
        "--quiet",
        "--collect",
        "-p",
        "AllowedMemoryNodes=1",
    ]
    maps = run(*command, "-p", "AllowedCPUs=4-5", "/usr/bin/python3", "-c", work).stdout
    pages: dict[str, int] = {}
    for line in maps.splitlines():
        words = line.split()
        # Pages of files lie where the first reader had them put.
        if any(word.startswith("anon=") for word in words) and "file=" not in line:
            for node, count in (word.split("=") for word in words if word[0] == "N"):
                pages[node] = pages.get(node, 0) + int(count)
    note("anonymous pages", **pages)
    assert pages["N1"] > 8192, pages
    assert pages["N1"] / sum(pages.values()) > 0.99, pages


@check
def cpu_can_be_unplugged() -> None:
    online = Path("/sys/devices/system/cpu/cpu7/online")
    online.write_text("0")
    equal(read("/sys/devices/system/cpu/online"), "0-6")
    online.write_text("1")
    equal(read("/sys/devices/system/cpu/online"), "0-7")


@check
def another_user_is_refused() -> None:
    command = ["runuser", "-u", "worker", "--", "systemctl", "--no-ask-password"]
    run(*command, "show", "--property=Version")
    done = run(*command, "daemon-reload", status=None)
    assert done.returncode != 0, done


@check
def project_is_there() -> None:
    run("python3", "-c", "import provisioner; print(provisioner.__file__)", env={"PYTHONPATH": ""})
