"""What of a host bears on its ranks beside the topology, as frozen values. Pure.

None always means that it is not known here, as of a recording that lacks the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from provisioner.idset import CpuSet
from provisioner.pci import PciAddress

# Variables of a process's environment by what they decide, whatever rank it is.
CARD_ORDER = ("CUDA_DEVICE_ORDER",)
CARD_CHOICE = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
    *("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "ASCEND_RT_VISIBLE_DEVICES"),
)
THREAD_BINDING = (
    *("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET"),
    *("I_MPI_PIN", "I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "MV2_CPU_MAPPING"),
)
# Of libraries and engines that bind by rules of their own.
OWN_BINDING = (
    *("NCCL_IGNORE_CPU_AFFINITY", "TLLM_NUMA_AWARE_WORKER_AFFINITY", "SGLANG_SET_CPU_AFFINITY"),
)
NIC_CHOICE = ("NCCL_IB_HCA", "UCX_NET_DEVICES")
# Units that start containers, and units that give CPUs away.
CONTAINER_ENGINES = ("docker.service", "containerd.service", "podman.service", "crio.service")
CPU_MANAGERS = (
    *("kubelet.service", "k3s.service", "k3s-agent.service", "rke2-agent.service"),
    *("rke2-server.service", "slurmd.service", "intel_lpmd.service"),
)


class Interrupt(NamedTuple):
    """One interrupt of a PCI function."""

    number: int  # N of /proc/irq/N
    cpus: CpuSet  # where it lands: effective_affinity_list; empty: it is not in use
    is_asked: bool = False  # that is not said, and these are where it may land: smp_affinity_list


class Irqbalance(NamedTuple):
    """The daemon that moves interrupts about."""

    banned: CpuSet | None  # where it puts none, as its settings say; None: they name no CPUs
    settings: str  # the file that has its settings, e.g. /etc/default/irqbalance
    is_known: bool = True  # whether its settings could be read


class Setting(NamedTuple):
    """One variable or key that a file sets."""

    name: str
    value: str
    place: str  # the file's path, e.g. /etc/environment


class HugePages(NamedTuple):
    """The huge pages of one size that are set aside."""

    size_kib: int
    by_node: Mapping[int, int]  # node -> how many


class HostSettings(NamedTuple):
    """What a host is set to."""

    # Of cards and network devices; a device is missing of which not every interrupt says where it lands.
    interrupts: Mapping[PciAddress, tuple[Interrupt, ...]] | None
    irqbalance: Irqbalance | None  # None: it does not run, or nothing is known of services
    environment: tuple[Setting, ...] | None  # variables that every process gets and that matter
    manager: tuple[Setting, ...] | None  # CPUAffinity= and NUMAPolicy= of systemd itself
    services: frozenset[str] | None  # of `hostfs.SERVICES`, those that run
    cgroup_version: int | None  # of the hierarchy that has the cpuset controller; 0: none has it
    is_virtual: bool | None  # a hypervisor is below
    huge_pages: tuple[HugePages, ...] | None  # of each size of which there is one
    has_systemd: bool | None  # systemd is the process that started all others
    container: str | None  # what says that this is inside of a container, e.g. /.dockerenv
    kernel: tuple[int, int] | None  # of 6.12.1: (6, 12)
    # Paths that are there and can't be read, or are of another form, by what they are about: interrupts,
    # environment, systemd, memory, packages.
    unreadable: Mapping[str, tuple[str, ...]] = MappingProxyType({})


NOTHING_KNOWN = HostSettings(*(None,) * 11)
