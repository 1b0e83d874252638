"""AMD's and Hygon's cards, which have one compute driver (KFD) and one runtime (HIP).

HIP counts GPUs in the order of KFD's topology, which need not be the PCI order and which counts
integrated graphics too. A card in partitions (TPX, CPX) has a node there for each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from provisioner.cardfs import KfdGpu, list_kfd_gpus, read_product_name
from provisioner.discovery.pcibus import AMD, HYGON, PciBus
from provisioner.pci import PciAddress
from provisioner.root import Root
from provisioner.sysfs import read_pci_device
from provisioner.topology import Accelerator, Vendor

# VGA, 3D and other display controllers, and processing accelerators (MI300 and later); of Hygon
# co-processors too. Source: include/linux/pci_ids.h.
_AMD_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)
_HYGON_CLASSES = (*_AMD_CLASSES, 0x0B40)
# The device ids of cards: those of amdgpu's table that are no APU's, and what follows them. Others
# are integrated graphics (0x13xx, 0x15xx, 0x16xx, 0x98xx), a BMC's (0x515e) or older than any
# compute driver. Source: drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c, pciidlist.
_CARD_IDS = (
    range(0x6600, 0x6700),
    range(0x6780, 0x6840),
    range(0x6860, 0x6880),
    range(0x6900, 0x7000),
    range(0x7300, 0x7900),
)


def find_amd_cards(root: Root, bus: PciBus, oddities: list[str]) -> tuple[Accelerator, ...]:
    """AMD's cards, without integrated graphics."""
    on_bus = bus.of_vendor(AMD, *_AMD_CLASSES)
    return _find_cards(root, bus, oddities, "amd", AMD, on_bus)


def find_hygon_cards(root: Root, bus: PciBus, oddities: list[str]) -> tuple[Accelerator, ...]:
    """Hygon's DCUs."""
    on_bus = bus.of_vendor(HYGON, *_HYGON_CLASSES)
    return _find_cards(root, bus, oddities, "hygon", HYGON, on_bus)


def _find_cards(
    root: Root,
    bus: PciBus,
    oddities: list[str],
    vendor: Vendor,
    vendor_id: int,
    on_bus: list[PciAddress],
) -> tuple[Accelerator, ...]:
    """The cards that the driver holds; without it those on the PCI bus.

    1. Each GPU of the driver's topology takes the next of HIP's numbers.
    2. It belongs to the function that it names, or, as a partition, to the one of its device that
       is on the bus.
    3. Integrated graphics keep their number and are no card.
    """
    if not on_bus and bus.classes:  # the bus is there, and has none
        return ()
    numbers: dict[PciAddress, list[int]] = defaultdict(list)
    for number, gpu in enumerate(list_kfd_gpus(root)):
        if gpu.vendor != vendor_id or gpu.has_cpus:
            continue
        if on_bus or vendor == "hygon" or _is_card_id(gpu.device):
            numbers[_owner(gpu, on_bus)].append(number)
    cards = [address for address in on_bus if vendor == "hygon" or _is_card(root, bus, address)]
    held = sorted(numbers.keys() & set(cards)) if on_bus else sorted(numbers)
    if not held:
        return tuple(
            Accelerator(vendor, index, bus.take(address).address, "pci")
            for index, address in enumerate(cards)
        )
    strange = [str(address) for address in sorted(numbers) if on_bus and address not in on_bus]
    if strange:
        oddities.append(
            f"The compute driver names {', '.join(strange)}, which the PCI bus does not show as a GPU: "
            "not planned for."
        )
    unheld = [str(address) for address in cards if address not in numbers]
    if unheld:
        oddities.append(
            f"The compute driver does not hold {', '.join(unheld)}, which the PCI bus shows: "
            "not planned for, and not counted."
        )
    return tuple(
        Accelerator(
            vendor,
            index,
            bus.take(address).address if address in bus.classes else address,
            "driver",
            read_product_name(root, address),
            numbers=() if numbers[address] == [index] else tuple(numbers[address]),
        )
        for index, address in enumerate(held)
    )


def _owner(gpu: KfdGpu, on_bus: Iterable[PciAddress]) -> PciAddress:
    """The function that a GPU belongs to."""
    if gpu.address in on_bus:
        return gpu.address
    device = gpu.address._replace(function=0)
    return next((one for one in on_bus if one._replace(function=0) == device), device)


def _is_card(root: Root, bus: PciBus, address: PciAddress) -> bool:
    """Whether a function of AMD's is a card, and not integrated graphics or a BMC's."""
    kind = bus.classes[address] >> 8
    device = read_pci_device(root, address)
    if device is None:  # what is no card is a VGA controller, or has an id
        return kind != 0x0300
    return kind == 0x1200 or _is_card_id(device)


def _is_card_id(device: int) -> bool:
    return any(device in ids for ids in _CARD_IDS)
