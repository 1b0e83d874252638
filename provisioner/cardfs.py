"""The files of vendors' drivers other than NVIDIA's: one read and one parse function each, as `sysfs`.

A module of its own because start-up counts: a host with none of these cards never loads it.

Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c, drivers/gpu/drm/amd/amdgpu/amdgpu_pm.c;
Documentation/ABI/testing/sysfs-driver-habanalabs; openEuler's drivers/ub/ubus/sysfs.c.

Absent and errors are as in `sysfs`.
"""

from __future__ import annotations

from typing import NamedTuple

from provisioner.errors import ParseError
from provisioner.pci import PciAddress, find_pci_address
from provisioner.root import Root, read_parsed
from provisioner.sysfs import is_id, numbers_of, parse_id, parse_int

_PCI = "sys/bus/pci/devices"
_KFD = "sys/class/kfd/kfd/topology/nodes"
_UBCORE = "sys/class/ubcore"


class KfdGpu(NamedTuple):
    """One GPU of the compute topology of AMD's driver, or one partition of a card."""

    domain: int
    location: int  # bus, device and function in the low 16 bits; see parse_kfd_gpu
    vendor: int  # 16 bits
    device: int  # 16 bits
    has_cpus: bool  # one node for the CPU cores and the GPU of an old APU

    @property
    def address(self) -> PciAddress:
        """The PCI function that the node names; of a partition perhaps one that is not on the bus."""
        low = self.location & 0xFFFF
        return PciAddress(self.domain, low >> 8, low >> 3 & 0x1F, low & 7)


def list_kfd_gpus(root: Root) -> list[KfdGpu]:
    """The GPUs in the order of the compute topology, which is the order in which HIP counts them."""
    found: list[KfdGpu] = []
    for node in sorted(int(name) for name in root.list(_KFD) if is_id(name)):
        gpu = read_parsed(root, f"{_KFD}/{node}/properties", parse_kfd_gpu)
        if gpu is not None:
            found.append(gpu)
    return found


def parse_kfd_gpu(text: str) -> KfdGpu | None:
    """What the 'name value' lines of a node say of a GPU; None for a node that has none.

    location_id is the PCI function, and of a card in partitions the partition's number is in it:
    in its top four bits (Linux 6.7 and later) or in place of the function. Kernels before 5.8
    have no line 'domain', and one domain.
    """
    words = [line.split() for line in text.splitlines()]
    lines = {one[0]: one[1] for one in words if len(one) == 2}

    def number(name: str) -> int:
        return parse_int(lines.get(name, "0"))

    if not number("simd_count"):
        return None
    if "location_id" not in lines or "vendor_id" not in lines:
        raise ParseError("has 'simd_count' above 0 and no 'location_id' or 'vendor_id'")
    domain, location = number("domain"), number("location_id")
    if not (0 <= domain < 1 << 32 and 0 <= location < 1 << 32):
        raise ParseError(f"'domain {domain}', 'location_id {location}': expected 32 bits each")
    return KfdGpu(
        domain, location, number("vendor_id"), number("device_id"), number("cpu_cores_count") > 0
    )


def read_product_name(root: Root, address: PciAddress) -> str | None:
    """product_name of AMD's driver. Absent: None, also for an empty one."""
    return (root.read(f"{_PCI}/{address}/product_name") or "").strip() or None


def read_pci_driver(root: Root, address: PciAddress) -> str | None:
    """The name of the kernel's driver that is bound to a function; None if none is."""
    real = root.resolve(f"{_PCI}/{address}/driver")
    return None if real is None else real.rpartition("/")[2]


class Gaudi(NamedTuple):
    """What the driver's class says of one Gaudi card."""

    number: int  # N of accelN
    module: int | None  # module_id, its place on the board


def read_gaudi_cards(root: Root) -> dict[PciAddress, Gaudi]:
    """The cards that Gaudi's driver holds: accelN, and hlN of drivers before Linux 6.2.

    Other drivers' devices (NPUs of laptops) are in the class too: who asks knows the addresses.
    """
    found: dict[PciAddress, Gaudi] = {}
    for kind, prefix in (("accel", "accel"), ("habanalabs", "hl")):
        for name in root.list(f"sys/class/{kind}"):
            if not (name.startswith(prefix) and is_id(name[len(prefix) :])):
                continue
            folder = f"sys/class/{kind}/{name}/device"
            address = find_pci_address((root.resolve(folder) or "").rpartition("/")[2])
            if address is None:
                address = find_pci_address((root.read(f"{folder}/pci_addr") or "").strip())
            if address is not None:
                module = read_parsed(root, f"{folder}/module_id", parse_id)
                found[address] = Gaudi(int(name[len(prefix) :]), module)
    return found


class UbDevice(NamedTuple):
    """One device of the ubcore class."""

    name: str
    entities: int | None  # device/ub_totalues; None: absent
    numa: int | None  # device/numa; None: -1 or absent


def list_ub_devices(root: Root) -> list[UbDevice]:
    """The devices of /sys/class/ubcore, in the order of their names; empty if there is no such bus."""
    return [
        UbDevice(
            name,
            read_parsed(root, f"{_UBCORE}/{name}/device/ub_totalues", parse_int),
            read_parsed(root, f"{_UBCORE}/{name}/device/numa", parse_id),
        )
        for name in root.list(_UBCORE)
    ]


def list_davinci_nodes(root: Root) -> list[int]:
    """N of each /dev/davinciN, ascending."""
    return numbers_of(root.list("dev"), "davinci")
