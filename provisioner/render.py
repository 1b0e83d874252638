"""(Plan, text of its plan.json) -> the files that put it into force. Pure: templates in, text out.

Every value that a template prints passes the filter (`quoting`) of the place where it stands.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from provisioner.data import find_data
from provisioner.errors import InputError
from provisioner.plan import Plan, Rank, Service
from provisioner.quoting import (
    check_variable,
    format_comments,
    format_is_set,
    is_unit_text,
    quote_env,
    quote_exec,
    quote_shell,
    quote_unit,
)
from provisioner.request import WorkerRequest

if TYPE_CHECKING:
    import jinja2

PLAN_FILE = "plan.json"
FOLDER = "/etc/provision"  # where apply puts what is no unit

_MARK = "Made by provision "
_SCHEMA = "provision.plan/"

# The system's own units that confinement keeps off the ranks' CPUs, and the section of each.
# Source: systemd.special(7); other top-level slices are the operator's.
CONFINED = (
    ("system.slice", "Slice"),
    ("user.slice", "Slice"),
    ("machine.slice", "Slice"),
    ("init.scope", "Scope"),
)

# NCCL: set, its threads leave the rank's CPUs for those that it finds near to the card.
UNSET = "NCCL_IGNORE_CPU_AFFINITY"


class RenderedFile(NamedTuple):
    """One file of a rendered plan."""

    text: str
    executable: bool = False


class VariableGroup(NamedTuple):
    """Variables of a rank that stand together in its file."""

    reasons: tuple[str, ...]  # comment lines
    variables: Mapping[str, str]


class DeviceVariables(NamedTuple):
    """How a vendor's runtime is told which cards a process sees."""

    visible: str  # the variable that lists the numbers by which the runtime counts cards
    fixed: Mapping[str, str] = {}  # what makes the runtime count cards as provision does
    unset: tuple[str, ...] = ()  # what would make it count otherwise, and is taken away
    modules: str | None = None  # the variable that lists the cards' places on their board


# HIP_VISIBLE_DEVICES chooses among what ROCR_VISIBLE_DEVICES leaves, and counts that from 0: with
# both set, a rank gets another card or none. HIP's is the one that frameworks read and set
# (PyTorch, vLLM, Ray), so ROCR's goes, and GPU_DEVICE_ORDINAL, a third filter of the same kind.
_HIP = DeviceVariables("HIP_VISIBLE_DEVICES", unset=("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"))
DEVICE_VARIABLES: Mapping[str, DeviceVariables] = {
    "nvidia": DeviceVariables("CUDA_VISIBLE_DEVICES", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
    "amd": _HIP,
    "hygon": _HIP,
    # Without COMPOSITE a number is a tile, and a card may have two of them.
    # Source: Level Zero's core programming guide, environment variables.
    "intel": DeviceVariables(
        "ZE_AFFINITY_MASK",
        {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"},
    ),
    # The first is read by container runtimes and counts accelN, the second by the process itself.
    "habana": DeviceVariables("HABANA_VISIBLE_DEVICES", modules="HABANA_VISIBLE_MODULES"),
    "ascend": DeviceVariables("ASCEND_RT_VISIBLE_DEVICES"),
}


def render(plan: Plan, plan_text: str, folder: str = FOLDER) -> dict[str, RenderedFile]:
    """Every file of a plan by its name, `/` between folder and file; plan.json comes first.

    Args:
        plan: what is rendered.
        plan_text: the text of its plan.json.
        folder: where plan.json and the environment files will lie, as units and wrapper name it.

    Raises:
        InputError: a value can't be written where it belongs, or two files would have one name.
    """
    plan_id = hashlib.sha256(plan_text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    header = (
        f"{_MARK}from plan {plan_id} (sha256 of plan.json) for the machine",
        f"{plan.fingerprint}.",
        "'provision undo' removes it. Edits are lost: change provision.toml and render again.",
    )
    files = {PLAN_FILE: RenderedFile(plan_text)}
    for service in plan.services:
        files |= _render_slices(service, header)
        if service.worker is not None:
            files |= _render_worker(service, service.worker, header, folder)
        files |= _render_environments(plan, service, header, folder)
        files[f"{service.name}-run"] = _render_wrapper(service, header, folder)
    if plan.confine:
        for unit_name, section in CONFINED:
            files[f"{unit_name}.d/50-provision-confine.conf"] = _fill(
                "confine.conf.j2",
                about=(
                    *header,
                    f"Keeps {unit_name} on the CPUs that no rank has: a slice alone is not exclusive.",
                ),
                section=section,
                cpus=plan.system_cpus,
            )
    for name in files:
        folder = name.rpartition("/")[0]
        if folder in files:
            raise InputError(
                f"service '{folder}': its folder has the name of another file of the plan",
                "Choose another name for the service",
            )
    return files


def rank_environment(
    plan: Plan, service: Service, rank: Rank, folder: str = FOLDER
) -> dict[str, str]:
    """The environment of a rank, as its rendered file says it."""
    environment: dict[str, str] = {}
    for group in _environment_groups(plan, service, rank, folder):
        environment |= group.variables
    return environment


def render_program(unit: str, command: tuple[str, ...]) -> RenderedFile:
    """The drop-in that gives a static service the command to run."""
    about = (f"{_MARK}for {unit}: the command by the path that it was applied with.",)
    return _fill("program.conf.j2", about=about, command=command)


def is_ours(text: str) -> bool:
    """Whether a file's text says that provision made it."""
    if text.startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and str(value.get("schema")).startswith(_SCHEMA)
    first, _, rest = text.partition("\n")
    return (rest if first.startswith("#!") else first).startswith(f"# {_MARK}")


def _render_slices(service: Service, header: tuple[str, ...]) -> dict[str, RenderedFile]:
    wall = service.memory == "bind"
    files = {
        service.slice: _fill(
            "provision.slice.j2",
            about=(
                *header,
                "The CPUs and memory nodes of all ranks: for a launcher that starts them itself.",
            ),
            description=f"{service.name}: all ranks",
            cpus=service.cpus,
            memory_nodes=service.memory_nodes if wall else None,
        )
    }
    for rank in service.ranks:
        files[rank.slice] = _fill(
            "provision.slice.j2",
            about=(
                *header,
                f"The CPUs and memory nodes of rank {rank.rank}: {', '.join(rank.devices)}.",
            ),
            description=f"{service.name} rank {rank.rank}",
            cpus=rank.cpus,
            memory_nodes=rank.memory_nodes if wall else None,
        )
    return files


def _render_worker(
    service: Service, worker: WorkerRequest, header: tuple[str, ...], folder: str
) -> dict[str, RenderedFile]:
    command, directory = _worker_command(worker, service.name)
    files = {
        f"{service.name}@.service": _fill(
            "provision@.service.j2",
            about=(
                *header,
                f"Starts one rank in its slice, rank 0 by: systemctl start {service.name}@0",
            ),
            name=service.name,
            folder=folder,
            worker=worker,
            command=command,
            directory=directory,
            # UnsetEnvironment= undoes what EnvironmentFile= says too, so that where the operator
            # sets a variable it must stay out.
            unset=[name for name in unset_variables(service) if name not in worker.environment],
        )
    }
    if service.memory == "prefer":
        for rank in service.ranks:
            node = preferred_node(rank)
            files[f"{service.name}@{rank.rank}.service.d/10-provision-memory.conf"] = _fill(
                "memory.conf.j2",
                about=(
                    *header,
                    f"Rank {rank.rank} takes memory from node {node}, and from others when it is full.",
                    "One node: systemd refuses more for this policy.",
                ),
                node=node,
            )
    return files


def _render_environments(
    plan: Plan, service: Service, header: tuple[str, ...], folder: str
) -> dict[str, RenderedFile]:
    about = (*header, "Systemd (EnvironmentFile=) and POSIX shells read it to the same values.")
    return {
        f"{service.name}/rank{rank.rank}.env": _fill(
            "rank.env.j2", about=about, groups=_environment_groups(plan, service, rank, folder)
        )
        for rank in service.ranks
    }


def _render_wrapper(service: Service, header: tuple[str, ...], folder: str) -> RenderedFile:
    about = [
        *header,
        "Runs a command as one rank: in the rank's slice, with the rank's environment. Process id,",
        "signals, exit status, standard streams and working directory are the command's own.",
    ]
    if service.memory == "prefer":
        about += [
            'Memory is not walled in (memory = "prefer"), and only a service can prefer a node: from',
            "here a page lies on the node of the CPU that first touches it.",
        ]
    wall = service.memory == "bind"
    last = len(service.ranks) - 1
    return _fill(
        "run.sh.j2",
        executable=True,
        about=about,
        service=service,
        folder=folder,
        rank_range=f"0 to {last}" if last else "0",
        table=[(rank.rank, rank.cpus, rank.memory_nodes if wall else "") for rank in service.ranks],
        # LOCAL_RANK counts one vendor's ranks, and in a service of several it does not say which.
        is_mixed=is_mixed(service),
        kept=[(one.visible, kept_variables(one)) for one in device_variables(service)],
        unset=unset_variables(service),
    )


def device_variables(service: Service) -> list[DeviceVariables]:
    """Those of each runtime that the service's ranks have, each once."""
    vendors = sorted({rank.vendor for rank in service.ranks} & DEVICE_VARIABLES.keys())
    return list({DEVICE_VARIABLES[one].visible: DEVICE_VARIABLES[one] for one in vendors}.values())


def kept_variables(devices: DeviceVariables) -> tuple[str, ...]:
    """What a caller that lists the visible cards itself keeps: the list and all that counts by it."""
    modules = (devices.modules,) if devices.modules else ()
    return (devices.visible, *devices.fixed, *modules, "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def is_mixed(service: Service) -> bool:
    """Whether a service's ranks have cards of several vendors, of which LOCAL_RANK counts one."""
    return len({rank.vendor for rank in service.ranks}) > 1


def unset_variables(service: Service) -> list[str]:
    """What is taken out of the environment of the service's ranks."""
    return [UNSET, *(name for one in device_variables(service) for name in one.unset)]


def preferred_node(rank: Rank) -> int:
    """The one memory node that a rank's pages go to first: the lowest that has its CPUs too."""
    return (rank.memory_nodes & rank.cpu_nodes or rank.memory_nodes).first


def _environment_groups(
    plan: Plan, service: Service, rank: Rank, folder: str
) -> tuple[VariableGroup, ...]:
    """The environment of a rank in the order of its file; a later group wins."""
    devices = DEVICE_VARIABLES.get(rank.vendor)
    # Whom the rank shares the list of visible cards with. Numbers count the cards of one vendor.
    mates = [rank]
    reason = "The rank's own cards alone: "
    if service.visible_devices == "service":
        mates = [one for one in service.ranks if one.vendor == rank.vendor]
        reason = "All cards of the service, in rank order: "
    cards = [str(number) for mate in mates for number in mate.visible_numbers]
    entries = "an engine takes entry LOCAL_RANK."
    # LOCAL_RANK counts ranks, and the list counts cards, or the partitions of cards.
    if any(len(mate.visible_numbers) > 1 for mate in mates):
        first = sum(len(mate.visible_numbers) for mate in mates[: mates.index(rank)])
        last = first + len(rank.visible_numbers) - 1
        span = f"entries {first} to {last}" if last > first else f"entry {first}"
        entries = f"the rank's are {span}, not LOCAL_RANK."
    modules = [str(module) for mate in mates for module in mate.device_modules]
    groups = [
        VariableGroup(
            ("Whose environment this is.",),
            {
                "PROVISION_SERVICE": service.name,
                "PROVISION_RANK": str(rank.rank),
                # A launcher's ranks inherit this and have another LOCAL_RANK: then nothing here is theirs.
                "PROVISION_LOCAL_RANK": str([mate.rank for mate in mates].index(rank.rank)),
                "PROVISION_PLAN": f"{folder}/{PLAN_FILE}",
                "PROVISION_FINGERPRINT": plan.fingerprint,
            },
        ),
        VariableGroup(
            ("The rank's place: CPUs and memory nodes as kernel lists, the nearest RDMA devices.",),
            {
                "PROVISION_CPUS": str(rank.cpus),
                "PROVISION_MAIN_CPUS": str(rank.main_cpus),
                "PROVISION_COMPILE_CPUS": str(rank.compile_cpus),
                "PROVISION_MEMORY": service.memory,
                "PROVISION_MEMORY_NODES": str(rank.memory_nodes),
                "PROVISION_NICS": ",".join(rank.nics),
            },
        ),
        VariableGroup(
            (
                reason + entries,
                "A card's number is its position in PCI order."
                if not any(mate.runtime_numbers for mate in mates)
                else "The numbers are those of the cards' own runtime, not positions in PCI order.",
            ),
            {
                "LOCAL_RANK": str([mate.rank for mate in mates].index(rank.rank)),
                "LOCAL_WORLD_SIZE": str(len(mates)),
                **(devices.fixed if devices else {}),
                **({devices.visible: ",".join(cards)} if devices else {}),
                **(
                    {devices.modules: ",".join(modules)}
                    if devices and devices.modules and modules
                    else {}
                ),
            },
        ),
        VariableGroup(
            ("One thread for each core: libraries count the machine's CPUs, not the slice's.",),
            dict.fromkeys(
                ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(rank.main_cores)
            ),
        ),
    ]
    if rank.compile_cpus:
        groups.append(
            VariableGroup(
                ("How many CPUs background compilation has: those of PROVISION_COMPILE_CPUS.",),
                {"DEEPINFER_SO_BUILDER_CPUS": str(len(rank.compile_cpus))},
            )
        )
    groups.append(
        VariableGroup(
            ("Engines leave affinity alone: the slice has set it.",),
            {"TLLM_NUMA_AWARE_WORKER_AFFINITY": "0", "SGLANG_SET_CPU_AFFINITY": "0"},
        )
    )
    if service.nic_environment and rank.nics:
        groups.append(_nic_group(rank))
    if service.worker is not None and service.worker.environment:
        groups.append(
            VariableGroup(
                ("From provision.toml: the last word on a variable wins.",),
                service.worker.environment,
            )
        )
    return tuple(groups)


def _nic_group(rank: Rank) -> VariableGroup:
    """The RDMA devices by NCCL's and UCX's names for them.

    Source: NCCL's environment variables, NCCL_IB_HCA (without "=" a name is a prefix, and mlx5_1
    means mlx5_10 too); UCX, UCX_NET_DEVICES (a device and its port).
    """
    variables = {"NCCL_IB_HCA": f"={','.join(rank.nics)}"}
    with_ports = {port.rpartition(":")[0] for port in rank.nic_ports}
    if with_ports == set(rank.nics):
        variables["UCX_NET_DEVICES"] = ",".join(rank.nic_ports)
    return VariableGroup(("The nearest RDMA devices, to NCCL and to UCX.",), variables)


# What systemd takes as a program: no quote, backslash or control character, and $ stays as it is
# there while the arguments double it. Source: string_is_safe in config_parse_exec.
_PROGRAM = re.compile(r"""/[^\x00-\x1f\x7f"'\\$]*""")


def _worker_command(worker: WorkerRequest, name: str) -> tuple[tuple[str, ...], str | None]:
    """The words of ExecStart= and the WorkingDirectory=, or None for none.

    Neither setting can say every path: WorkingDirectory= has no quoting at all. Where one can't,
    a shell that gets the paths as arguments changes the directory and becomes the program.
    """
    directory = worker.working_directory
    plain = directory is None or (is_unit_text(directory) and ".." not in directory.split("/"))
    if plain and _PROGRAM.fullmatch(worker.command[0]):
        return worker.command, directory
    script = 'cd -- "$1" && shift && exec "$@"'
    return ("/bin/sh", "-c", script, name, directory or "/", *worker.command), None


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(find_data("templates")),
        autoescape=False,  # noqa: S701  # no HTML: each place has a filter, and a test looks for it
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    environment.filters = {
        "comments": format_comments,
        "env": quote_env,
        "exec": quote_exec,
        "is_set": format_is_set,
        "shell": quote_shell,
        "unit": quote_unit,
        "variable": check_variable,
    }
    return environment


def _fill(template: str, *, executable: bool = False, **values: object) -> RenderedFile:
    return RenderedFile(_environment().get_template(template).render(values), executable)
