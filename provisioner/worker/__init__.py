"""The worker half: binds this process in place, on the standard library alone.

Where a cgroup holds a rank, nothing here is needed but a check; where there is none to ask, these
modules bind the threads and the memory policy of the process itself and say what really holds:

    from provisioner.worker import bind_local_rank
    print(bind_local_rank().describe())

Importing this does nothing and costs little, since an engine imports it before everything else: each
name is loaded when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from provisioner.numa_maps import PagePlacement
    from provisioner.worker.binding import (
        BindError,
        BindResult,
        bind_local_rank,
        last_result,
    )
    from provisioner.worker.dropin import (
        NumaResult,
        bind_cpu,
        bind_numa,
        device_numa_node,
        get_idle_cpus,
        physical_core_cpus_by_numa,
        set_cpu_affinity,
        which_numa,
    )
    from provisioner.worker.machine import accelerator_kind
    from provisioner.worker.npusmi import parse_npu_affinity
    from provisioner.worker.nvml import (
        compute_capability,
        get_bf16_tflops_limit,
        is_sm_major_10,
    )
    from provisioner.worker.pages import page_placement
    from provisioner.worker.platform import Platform, configure_worker_environment, get_platform
    from provisioner.worker.pool import CompilePool, compile_pool
    from provisioner.worker.target import Target, find_target
    from provisioner.worker.visible import (
        assign_visible_devices,
        physical_device_id,
        set_visible_devices,
        visible_device_ids,
    )

_HOMES = {
    "binding": ("BindError", "BindResult", "bind_local_rank", "last_result"),
    "dropin": (
        "NumaResult",
        "bind_cpu",
        "bind_numa",
        "device_numa_node",
        "get_idle_cpus",
        "physical_core_cpus_by_numa",
        "set_cpu_affinity",
        "which_numa",
    ),
    "machine": ("accelerator_kind",),
    "npusmi": ("parse_npu_affinity",),
    "nvml": ("compute_capability", "get_bf16_tflops_limit", "is_sm_major_10"),
    "pages": ("PagePlacement", "page_placement"),
    "platform": ("Platform", "configure_worker_environment", "get_platform"),
    "pool": ("CompilePool", "compile_pool"),
    "target": ("Target", "find_target"),
    "visible": (
        "assign_visible_devices",
        "physical_device_id",
        "set_visible_devices",
        "visible_device_ids",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # loaded by __getattr__
    "BindError",
    "BindResult",
    "CompilePool",
    "NumaResult",
    "PagePlacement",
    "Platform",
    "Target",
    "accelerator_kind",
    "assign_visible_devices",
    "bind_cpu",
    "bind_local_rank",
    "bind_numa",
    "compile_pool",
    "compute_capability",
    "configure_worker_environment",
    "device_numa_node",
    "find_target",
    "get_bf16_tflops_limit",
    "get_idle_cpus",
    "get_platform",
    "is_sm_major_10",
    "last_result",
    "page_placement",
    "parse_npu_affinity",
    "physical_core_cpus_by_numa",
    "physical_device_id",
    "set_cpu_affinity",
    "set_visible_devices",
    "visible_device_ids",
    "which_numa",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    # importlib costs milliseconds; a submodule's own name comes with its import.
    module = __import__(f"{__name__}.{home}", fromlist=(name,))
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
