"""From the variables that hide accelerators to the physical cards that a process can see.

The order of the cards is the PCI order, which CUDA uses only with CUDA_DEVICE_ORDER=PCI_BUS_ID. How
each runtime reads its variable is in `visible_rules`.
"""

from __future__ import annotations

import os

from provisioner.errors import InputError, shorten
from provisioner.record import Record
from provisioner.worker.visible_rules import (
    NO_KIND,
    VisibleDevice,
    find_rules,
    find_variable,
    kind_of,
    read_variable,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Mapping, MutableMapping, Sequence

    from provisioner.topology import Accelerator
    from provisioner.worker.visible_rules import FindParent


class VisibleDevices(Record):
    """The devices that the runtime shows, by local rank."""

    kind: str  # nvidia, ascend, amd or intel
    variable: str | None  # the one that decided; None: none is set
    devices: tuple[VisibleDevice, ...]
    stopped: str = ""  # why the runtime reads no further, or shows nothing


class RankError(InputError, IndexError):
    """A local rank has no visible device; an IndexError too, for callers that expect one."""

    code = "no_device_for_rank"


class UnknownDeviceError(InputError):
    """A device is visible, but nothing says which physical card it is."""

    code = "unknown_device"


def resolve_visible(
    cards: Sequence[Accelerator],
    environ: Mapping[str, str] | None = None,
    kind: str | None = None,
    find_mig_parent: FindParent | None = None,
    tiled: Container[str] = (),
) -> VisibleDevices:
    """The devices that a runtime shows, each with its physical card.

    Args:
        cards: the machine's cards; those of other kinds are passed over.
        environ: the environment; None is this process's.
        kind: whose runtime: nvidia, ascend, amd or intel; None is that of the cards.
        find_mig_parent: gives the UUID of a MIG instance's card, or None; None asks NVML.
        tiled: names of Intel's cards that may be several devices each.

    Raises:
        InputError: there is no such kind.
    """
    environ = os.environ if environ is None else environ
    kind = kind_of(cards) if kind is None else kind
    if kind == NO_KIND:
        return VisibleDevices(kind, None, (), "there is no accelerator")
    find_parent = _ask_nvml_for_parent if find_mig_parent is None else find_mig_parent
    shown = [
        VisibleDevice(str(card.index), card)
        for card in sorted((one for one in cards if one.vendor == kind), key=lambda one: one.index)
    ]
    decided, stopped = None, ""
    for rule in find_rules(kind):
        variable = find_variable(rule, environ)
        if variable is not None:
            shown, stopped = read_variable(rule, environ[variable], shown, find_parent)
            decided = variable
    if kind == "nvidia":
        shown = _doubt_order(shown, cards, environ)
    if kind == "intel":
        # The mask chooses, and the order stays the runtime's.
        shown.sort(key=lambda one: (-1 if one.card is None else one.card.index, one.entry))
        if any(card.name in tiled for card in cards):
            shown = _doubt_tiles(shown, environ)
    return VisibleDevices(kind, decided, tuple(shown), stopped)


def visible_device_ids(
    environ: Mapping[str, str] | None = None,
    *,
    cards: Sequence[Accelerator] | None = None,
    kind: str | None = None,
) -> tuple[str, ...]:
    """The devices that the runtime shows, as its variable names them; card numbers if none is set.

    Args:
        environ: the environment; None is this process's.
        cards: the machine's cards; None discovers those that can be opened here.
        kind: whose runtime: nvidia, ascend, amd or intel; None is that of the cards.

    Raises:
        InputError: there is no such kind, or the machine can't be read.
    """
    return tuple(one.entry for one in _resolve(cards, environ, kind).devices)


def card_of_rank(visible: VisibleDevices, local_rank: int) -> Accelerator:
    """The physical card of a local rank.

    Raises:
        RankError: the rank has no visible device.
        UnknownDeviceError: it has one, and nothing says which card that is.
    """
    if not 0 <= local_rank < len(visible.devices):
        shown = shorten(",".join(one.entry for one in visible.devices)) or "none"
        by = f" by {visible.variable}" if visible.variable is not None else ""
        why = f" ({visible.stopped})" if visible.stopped else ""
        raise RankError(
            f"local rank {local_rank} has no device: visible{by}: {shown}{why}",
            "Start as many ranks as there are visible devices, or correct the variable",
        )
    device = visible.devices[local_rank]
    if device.card is None:
        raise UnknownDeviceError(
            f"device '{shorten(device.entry)}' of local rank {local_rank}: its card is not known: "
            f"{device.unknown}",
            "Name the card in the variable: by its number, with CUDA_DEVICE_ORDER=PCI_BUS_ID, "
            "or by its whole UUID, a MIG instance as MIG-GPU-<UUID of the card>/<GI>/<CI>",
        )
    return device.card


def physical_device_id(
    local_rank: int,
    environ: Mapping[str, str] | None = None,
    *,
    cards: Sequence[Accelerator] | None = None,
    kind: str | None = None,
) -> str:
    """The number of the physical card of a local rank, as text, however the variable names it.

    Args:
        local_rank: the position among the visible devices.
        environ: the environment; None is this process's.
        cards: the machine's cards; None discovers those that can be opened here.
        kind: whose runtime: nvidia, ascend, amd or intel; None is that of the cards.

    Raises:
        RankError: the rank has no visible device.
        UnknownDeviceError: it has one, and nothing says which card that is.
        InputError: there is no such kind, or the machine can't be read.
    """
    return str(card_of_rank(_resolve(cards, environ, kind), local_rank).index)


def assign_visible_devices(
    rank: int, devices_per_rank: int = 1, offset: int = 0, *, ids: Sequence[str] | None = None
) -> tuple[str, ...]:
    """The consecutive devices of a rank; ranks past the last group begin again with the first.

    Args:
        rank: the rank, in the machine or in all machines alike.
        devices_per_rank: how many devices a rank has.
        offset: how many devices at the start are left to others.
        ids: the devices to divide, as `visible_device_ids` gives them; None asks it.

    Raises:
        InputError: the devices do not divide evenly, or the rank's would lie past the last one.
    """
    if rank < 0 or devices_per_rank < 1 or offset < 0:
        raise InputError(
            f"rank {rank}, {devices_per_rank} devices a rank, offset {offset}: "
            "expected no negative number and at least one device a rank"
        )
    ids = visible_device_ids() if ids is None else ids
    if not ids or len(ids) % devices_per_rank:
        raise InputError(
            f"{len(ids)} devices can't be divided among ranks of {devices_per_rank}",
            "Choose a number of devices a rank that divides the number of visible devices",
        )
    start = offset + rank % (len(ids) // devices_per_rank) * devices_per_rank
    if start + devices_per_rank > len(ids):
        raise InputError(
            f"rank {rank} would have devices {start} to {start + devices_per_rank - 1} "
            f"of {len(ids)}, numbered from 0: the offset {offset} leads past the last one",
            "Lower the offset or the number of ranks",
        )
    return tuple(ids[start : start + devices_per_rank])


def set_visible_devices(
    ids: Sequence[str | int],
    environ: MutableMapping[str, str] | None = None,
    kind: str | None = None,
) -> dict[str, str]:
    """Shows a runtime these devices alone; the variables that were set, with their values.

    The variable that decides now is set, so that ids taken from it mean the same in it; and those
    that frameworks expect to agree with it. It must come before the runtime starts.

    Args:
        ids: devices as `visible_device_ids` gives them; none hides all.
        environ: the environment to change; None is this process's.
        kind: whose runtime: nvidia, ascend, amd or intel; None is that of the machine's cards.

    Raises:
        InputError: an id would not survive in the variable, or there is no such kind.
    """
    environ = os.environ if environ is None else environ
    kind = _find_kind() if kind is None else kind
    texts = [str(one) for one in ids]
    for text in texts:
        if not text or "," in text or text != text.strip():
            raise InputError(
                f"'{shorten(text)}' is no device id: expected one, without commas and outer blanks"
            )
    if kind == "ascend" and not _is_ascending(texts):
        raise InputError(
            f"devices {shorten(','.join(texts))}: ASCEND_RT_VISIBLE_DEVICES takes numbers in ascending order only"
        )
    rules = find_rules(kind)
    decided = [one for rule in rules if (one := find_variable(rule, environ)) is not None]
    # An empty HIP_VISIBLE_DEVICES shows all.
    value = ",".join(texts) or "-1"
    if kind == "nvidia":
        done = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    elif kind == "intel":
        # Level Zero takes no number to mean none, and an empty mask to mean all.
        if not texts:
            raise InputError(
                "no devices: ZE_AFFINITY_MASK can't hide them all: expected at least one"
            )
        done = {
            "ZE_AFFINITY_MASK": value,
            "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1",
            "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
        }
    elif kind == "ascend":
        done = {"ASCEND_RT_VISIBLE_DEVICES": value, "CUDA_VISIBLE_DEVICES": value}
    elif decided == ["ROCR_VISIBLE_DEVICES"]:
        done = {"ROCR_VISIBLE_DEVICES": value}
    else:
        done = dict.fromkeys(["HIP_VISIBLE_DEVICES", *decided[-1:]], value)
    environ.update(done)
    return done


def _resolve(
    cards: Sequence[Accelerator] | None, environ: Mapping[str, str] | None, kind: str | None
) -> VisibleDevices:
    if cards is not None:
        return resolve_visible(cards, environ, kind)
    from provisioner.worker.machine import find_machine

    own = find_machine()
    return resolve_visible(own.usable, environ, kind, tiled=own.tiled)


def _find_kind() -> str:
    from provisioner.worker.machine import accelerator_kind

    return accelerator_kind()


def _doubt_order(
    shown: list[VisibleDevice], cards: Sequence[Accelerator], environ: Mapping[str, str]
) -> list[VisibleDevice]:
    """The same devices, without the cards of those numbered in an order that is not known.

    CUDA's default puts the fastest card first. Among cards of one model that is the PCI order.
    """
    models = sorted({one.model for one in cards if one.vendor == "nvidia" and one.model})
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(models) < 2:
        return shown
    why = (
        f"CUDA numbers the cards fastest first, and they differ ({', '.join(models)}): "
        "CUDA_DEVICE_ORDER is not PCI_BUS_ID"
    )
    return [
        one
        if one.entry.strip()[:4].upper() in ("GPU-", "MIG-")
        else VisibleDevice(one.entry, None, one.is_partition, why)
        for one in shown
    ]


def _doubt_tiles(shown: list[VisibleDevice], environ: Mapping[str, str]) -> list[VisibleDevice]:
    """The same devices, without the cards where Level Zero counts tiles: by default every tile is a device."""
    if environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE":
        return shown
    why = "its tiles are counted for devices: ZE_FLAT_DEVICE_HIERARCHY is not COMPOSITE"
    return [VisibleDevice(one.entry, None, one.is_partition, why) for one in shown]


def _is_ascending(texts: Sequence[str]) -> bool:
    if not all(text.isascii() and text.isdigit() for text in texts):
        return False
    numbers = [int(text) for text in texts]
    return numbers == sorted(set(numbers))


def _ask_nvml_for_parent(uuid: str) -> str | None:
    from provisioner.worker.nvml import find_mig_parent

    return find_mig_parent(uuid)
