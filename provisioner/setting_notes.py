"""What a host is set to that costs its ranks something, each with what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from provisioner.errors import shorten
from provisioner.plan import Note
from provisioner.sentences import name_some
from provisioner.settings import (
    CARD_CHOICE,
    CARD_ORDER,
    CONTAINER_ENGINES,
    CPU_MANAGERS,
    NIC_CHOICE,
    OWN_BINDING,
    THREAD_BINDING,
    HostSettings,
    HugePages,
    Setting,
)
from provisioner.topology import Machine

_OFF = ("0", "false", "no", "off", "none", "disable", "disabled")
# (variables, the values that do no harm, what any other does, what to do)
_VARIABLES: tuple[tuple[tuple[str, ...], tuple[str, ...], str, str], ...] = (
    (
        CARD_ORDER,
        ("pci_bus_id", ""),
        "CUDA then counts cards otherwise than by their place on the PCI bus, and numbers mean other cards",
        "Set it to PCI_BUS_ID, as a rank's own environment does",
    ),
    (
        CARD_CHOICE,
        ("all",),
        "it hides or renumbers cards for every process",
        "Take it out: a rank's own environment names its cards",
    ),
    (
        THREAD_BINDING,
        (*_OFF, ""),
        "threads bind themselves by it inside of every rank, and may all end on a few of its CPUs",
        "Take it out, and set it for the programs that need it",
    ),
    (
        OWN_BINDING,
        (*_OFF, ""),
        "the library or engine then binds threads by rules of its own",
        "Take it out: the slice binds them",
    ),
    (
        NIC_CHOICE,
        ("",),
        "every rank then uses these network devices, near or far",
        "Take it out, and name each rank's own with nic_environment=",
    ),
)


def note_variables(settings: Iterable[Setting]) -> Iterator[Note]:
    """The notes on variables of the system's environment; none on one whose value does no harm."""
    # Debian has a link to /etc/environment among the files of environment.d.
    places: dict[tuple[str, str], list[str]] = {}
    for one in settings:
        places.setdefault((one.name, one.value), []).append(one.place)
    for (name, value), listed in places.items():
        for names, fine, what, hint in _VARIABLES:
            if name in names and value.lower() not in fine:
                yield Note(
                    "cuda_device_order" if name in CARD_ORDER else "system_environment",
                    f"{name_some(listed)} {'sets' if len(listed) == 1 else 'set'} {name}={shorten(value)}: {what}.",
                    hint,
                )


def note_running(settings: HostSettings) -> Iterator[Note]:
    """The notes on a host where systemd can't bring a plan into force."""
    if settings.container is not None:
        yield Note(
            "container",
            f"This is inside of a container, by {settings.container}: slices belong on its host.",
            "Apply the plan on the host, and have workers in here bind themselves: docs/worker.md",
        )
    elif settings.has_systemd is False:
        yield Note(
            "no_systemd",
            "systemd does not run here: no slice can be made.",
            "Have the workers bind themselves: docs/worker.md",
        )
    elif settings.cgroup_version == 0:
        yield Note(
            "no_cpuset",
            "No cgroup hierarchy has the cpuset controller: systemd would accept AllowedCPUs= and nothing enforce it.",
            "Boot without cgroup_disable=cpuset",
        )
    elif settings.cgroup_version == 1:
        yield Note(
            "cgroup_v1",
            "The cpuset controller is on a cgroup v1 hierarchy, where systemd enforces no AllowedCPUs=.",
            "Boot with systemd.unified_cgroup_hierarchy=1",
        )


def note_manager(settings: Sequence[Setting], kernel: tuple[int, int] | None) -> Iterator[Note]:
    """The notes on what systemd itself is told for every service."""
    affinity = [one for one in settings if one.name == "CPUAffinity"]
    if affinity:
        value = shorten(" ".join(one.value for one in affinity))
        places = name_some(list(dict.fromkeys(one.place for one in affinity)))
        old = kernel is not None and kernel < (6, 2)
        yield Note(
            "manager_affinity",
            f"CPUAffinity={value} is set for every service, in {places}: "
            + (
                "this kernel forgets it when the cpuset controller is enabled, as a plan does."
                if old
                else "a rank's service keeps only what its slice and this have in common, if they have anything."
            ),
            "Take it out and keep the system off the ranks' cores with confine=",
        )
    policy = [one for one in settings if one.name == "NUMAPolicy"][-1:]  # the last one counts
    if policy and policy[0].value != "default":
        yield Note(
            "manager_policy",
            f"{policy[0].place} sets NUMAPolicy={shorten(policy[0].value)} for every service, the ranks' too.",
            "Take it out, and set it for the services that need it",
        )


def note_services(services: frozenset[str]) -> Iterator[Note]:
    """The notes on services that start containers or give CPUs away."""
    runtimes = sorted(services.intersection(CONTAINER_ENGINES))
    if runtimes:
        yield Note(
            "containers",
            f"{name_some(runtimes)} {_run(runtimes)}: a container that a rank starts does not land in its slice.",
            "Start it with --cgroup-parent=NAME-rankN.slice (systemd's cgroup driver), or have its worker bind itself",
        )
    managers = sorted(services.intersection(CPU_MANAGERS))
    if managers:
        yield Note(
            "other_manager",
            f"{name_some(managers)} {_run(managers)}, and may give CPUs away.",
            "Keep cores for that apart: exclude_cpus= here, its own setting there (reservedSystemCPUs, CpuSpecList=)",
        )


def note_huge_pages(machine: Machine, sizes: Sequence[HugePages]) -> Iterator[Note]:
    """The notes on sizes of which some nodes with CPUs have less than two thirds of what another has.

    Huge pages honour cpusets: where a node has none left, mapping one fails though others have some.
    """
    for pages in sizes:
        counts = {
            node.id: pages.by_node[node.id]
            for node in machine.nodes
            if node.cpus and node.kind != "none" and node.id in pages.by_node
        }
        if counts and 3 * min(counts.values()) < 2 * max(counts.values()):
            said = ", ".join(f"{number} on node {node}" for node, number in counts.items())
            yield Note(
                "huge_pages",
                f"Huge pages of {pages.size_kib} KiB are set aside unevenly: {said}. A worker that is bound to a "
                "node that has none left gets none.",
                "Set as many aside on each: /sys/devices/system/node/nodeN/hugepages/"
                f"hugepages-{pages.size_kib}kB/nr_hugepages",
            )


def _run(names: Sequence[str]) -> str:
    return "runs" if len(names) == 1 else "run"
