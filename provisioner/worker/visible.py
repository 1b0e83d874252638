"""From the variables that hide accelerators to the physical cards that a process can see.

The order of the cards is the PCI order, which CUDA uses only with CUDA_DEVICE_ORDER=PCI_BUS_ID. How
each runtime reads its variable is in `visible_rules`.
"""

from __future__ import annotations

import os

from provisioner.errors import InputError, shorten
from provisioner.record import Record
from provisioner.worker.visible_rules import (
    VisibleDevice,
    find_rules,
    find_variable,
    read_variable,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from provisioner.topology import Accelerator
    from provisioner.worker.visible_rules import FindParent


class VisibleDevices(Record):
    """The devices that the runtime shows, by local rank."""

    kind: str  # nvidia, ascend or amd
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
    kind: str = "nvidia",
    find_mig_parent: FindParent | None = None,
) -> VisibleDevices:
    """The devices that a runtime shows, each with its physical card.

    Args:
        cards: the machine's cards; those of other kinds are passed over.
        environ: the environment; None is this process's.
        kind: whose runtime: nvidia, ascend or amd.
        find_mig_parent: gives the UUID of a MIG instance's card, or None; None asks NVML.

    Raises:
        InputError: there is no such kind.
    """
    environ = os.environ if environ is None else environ
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
    return VisibleDevices(kind, decided, tuple(shown), stopped)


def visible_device_ids(
    environ: Mapping[str, str] | None = None,
    *,
    cards: Sequence[Accelerator],
    kind: str = "nvidia",
) -> tuple[str, ...]:
    """The devices that the runtime shows, as its variable names them; card numbers if none is set."""
    return tuple(one.entry for one in resolve_visible(cards, environ, kind).devices)


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
    cards: Sequence[Accelerator],
    kind: str = "nvidia",
) -> str:
    """The number of the physical card of a local rank, as text, however the variable names it.

    Raises:
        RankError: the rank has no visible device.
        UnknownDeviceError: it has one, and nothing says which card that is.
    """
    return str(card_of_rank(resolve_visible(cards, environ, kind), local_rank).index)


def assign_visible_devices(
    rank: int, devices_per_rank: int = 1, offset: int = 0, *, ids: Sequence[str]
) -> tuple[str, ...]:
    """The consecutive devices of a rank; ranks past the last group begin again with the first.

    Args:
        rank: the rank, in the machine or in all machines alike.
        devices_per_rank: how many devices a rank has.
        offset: how many devices at the start are left to others.
        ids: the devices to divide, as `visible_device_ids` gives them.

    Raises:
        InputError: the devices do not divide evenly, or the rank's would lie past the last one.
    """
    if rank < 0 or devices_per_rank < 1 or offset < 0:
        raise InputError(
            f"rank {rank}, {devices_per_rank} devices a rank, offset {offset}: "
            "expected no negative number and at least one device a rank"
        )
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
    kind: str = "nvidia",
) -> dict[str, str]:
    """Shows a runtime these devices alone; the variables that were set, with their values.

    The variable that decides now is set, so that ids taken from it mean the same in it; and those
    that frameworks expect to agree with it. It must come before the runtime starts.

    Args:
        ids: devices as `visible_device_ids` gives them; none hides all.
        environ: the environment to change; None is this process's.
        kind: whose runtime: nvidia, ascend or amd.

    Raises:
        InputError: an id would not survive in the variable, or there is no such kind.
    """
    environ = os.environ if environ is None else environ
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
    elif kind == "ascend":
        done = {"ASCEND_RT_VISIBLE_DEVICES": value, "CUDA_VISIBLE_DEVICES": value}
    elif decided == ["ROCR_VISIBLE_DEVICES"]:
        done = {"ROCR_VISIBLE_DEVICES": value}
    else:
        done = dict.fromkeys(["HIP_VISIBLE_DEVICES", *decided[-1:]], value)
    environ.update(done)
    return done


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


def _is_ascending(texts: Sequence[str]) -> bool:
    if not all(text.isascii() and text.isdigit() for text in texts):
        return False
    numbers = [int(text) for text in texts]
    return numbers == sorted(set(numbers))


def _ask_nvml_for_parent(uuid: str) -> str | None:
    from provisioner.worker.nvml import find_mig_parent

    return find_mig_parent(uuid)
