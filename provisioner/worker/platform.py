"""The environment that each kind of accelerator's runtime wants, set before the runtime starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from provisioner.errors import InputError
from provisioner.idset import CpuSet
from provisioner.record import Record
from provisioner.root import Root
from provisioner.worker.machine import accelerator_kind
from provisioner.worker.procfs import read_siblings
from provisioner.worker.target import Target, find_target
from provisioner.worker.visible_rules import NO_KIND

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# What keeps engines from binding by themselves, against what was bound.
_ENGINES = {"TLLM_NUMA_AWARE_WORKER_AFFINITY": "0", "SGLANG_SET_CPU_AFFINITY": "0"}
_ASCEND_VISIBLE = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class Platform(Record):
    """A kind of accelerator and what its runtime goes by."""

    kind: str  # nvidia, amd, intel, ascend, or cpu
    visible: str | None  # the variable that chooses devices
    environment: Mapping[str, str]  # what is set unless the operator has set it


# Device order by PCI: CUDA's own is fastest first, Level Zero's is its discovery's. HIP's and
# Ascend's are PCI's already.
PLATFORMS = {
    one.kind: one
    for one in (
        Platform("nvidia", "CUDA_VISIBLE_DEVICES", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        Platform("amd", "HIP_VISIBLE_DEVICES", {}),
        Platform(
            "intel",
            "ZE_AFFINITY_MASK",
            # A device is a card, and not each of its tiles.
            {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"},
        ),
        Platform(
            "ascend",
            "ASCEND_RT_VISIBLE_DEVICES",
            {
                "TASK_QUEUE_ENABLE": "0",
                "HCCL_BUFFSIZE": "16",  # MB a channel
                "HCCL_CONNECT_TIMEOUT": "240",  # seconds
                "HCCL_EXEC_TIMEOUT": "200",  # seconds
            },
        ),
        Platform(NO_KIND, None, {}),
    )
}


def get_platform(root: Root | None = None) -> Platform:
    """The platform of a machine's accelerators; kept, one for each root.

    Raises:
        InputError: the machine can't be read, or its accelerators are of a kind that is not known.
    """
    return _platform_of(accelerator_kind(root))


def configure_worker_environment(
    environ: MutableMapping[str, str] | None = None,
    *,
    kind: str | None = None,
    target: Target | None = None,
) -> dict[str, str]:
    """Sets what the platform's runtime and the thread pools go by, and returns what it has set.

    What is set already is left alone. Libraries count the machine's CPUs and not the cpuset's, so they
    are told one thread for each core of the rank's main CPUs; where nothing says those, of the CPUs that
    this process may run on.

    Args:
        environ: the environment to change; None is this process's.
        kind: nvidia, amd, intel, ascend or cpu; None is that of the machine's cards.
        target: what the rank is bound to; None finds it.

    Raises:
        InputError: there is no such kind, or the machine can't be read.
    """
    environ = os.environ if environ is None else environ
    platform = get_platform() if kind is None else _platform_of(kind)
    wanted = {**platform.environment, **_ENGINES}
    if platform.kind == "ascend":
        wanted |= _agree(environ)
    if any(name not in environ for name in THREAD_VARIABLES):
        wanted |= dict.fromkeys(THREAD_VARIABLES, str(_count_cores(environ, target)))
    done = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(done)
    return done


def _platform_of(kind: str) -> Platform:
    if kind not in PLATFORMS:
        raise InputError(f"accelerator kind '{kind[:60]}': expected {', '.join(PLATFORMS)}")
    return PLATFORMS[kind]


def _agree(environ: Mapping[str, str]) -> dict[str, str]:
    """The one of Ascend's two variables that is not set, with the value of the other."""
    values = [environ[name] for name in _ASCEND_VISIBLE if name in environ]
    return dict.fromkeys(_ASCEND_VISIBLE, values[0]) if values else {}


def _count_cores(environ: Mapping[str, str], target: Target | None) -> int:
    if target is None:
        from provisioner.worker.binding import last_result

        bound = last_result()
        target = find_target(environ=environ) if bound is None else bound.target
    cpus = CpuSet(os.sched_getaffinity(0)) if target.cpus is None else target.main_cpus
    return len({read_siblings(cpu).first for cpu in cpus})
