"""From the variables that hide accelerators to the physical cards that a process can see.

Each runtime reads its variable in its own way, and those ways are followed here:

* CUDA. Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA
  Device Enumeration"; PyTorch's `_parse_visible_devices`, for what the guides leave open. The first
  bad entry ends the list, a repeated one empties it, a number may have letters behind it.
* Ascend. Source: CANN Environment Variable Reference, ASCEND_RT_VISIBLE_DEVICES. Plain numbers in
  ascending order; the first other thing ends the list, a blank too.
* AMD. Source: ROCR-Runtime's amd_filter_device.cpp, clr's rocdevice.cpp. ROCR_VISIBLE_DEVICES chooses
  among the cards; then HIP_VISIBLE_DEVICES (CUDA_VISIBLE_DEVICES where it is empty) among those.

The order of the cards is the PCI order, which CUDA uses only with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

import os

from provisioner.errors import InputError
from provisioner.worker.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence
    from typing import Literal

    from provisioner.topology import Accelerator

    FindParent = Callable[[str], str | None]


class VisibleDevice(Record):
    """One device that the runtime shows: a card, or a partition of one."""

    entry: str  # as the variable names it; the card's number where no variable is set
    card: Accelerator | None  # the physical card it is, or is a part of; None: not known
    is_partition: bool = False  # a MIG instance
    unknown: str = ""  # why the card is not known


class VisibleDevices(Record):
    """The devices that the runtime shows, by local rank."""

    kind: str  # nvidia, ascend or amd
    variable: str | None  # the one that decided; None: none is set
    devices: tuple[VisibleDevice, ...]
    stopped: str = ""  # why the runtime reads no further, or shows nothing; empty: it reads everything


class RankError(InputError, IndexError):
    """A local rank has no visible device; an IndexError too, for callers that expect one."""

    code = "no_device_for_rank"


class UnknownDeviceError(InputError):
    """A device is visible, but nothing says which physical card it is."""

    code = "unknown_device"


class _Rule(Record):
    """How one runtime reads one of its variables."""

    variables: tuple[str, ...]  # the first that is set decides
    is_empty_unset: bool  # whether an empty one counts as not set
    on_repeat: Literal["none", "stop", "skip"]  # show nothing, read no further, or pass it over
    find: Callable[[str, Sequence[VisibleDevice], FindParent], VisibleDevice | str]


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
    shown = [
        VisibleDevice(str(card.index), card)
        for card in sorted((one for one in cards if one.vendor == kind), key=lambda one: one.index)
    ]
    decided, stopped = None, ""
    for rule in _find_rules(kind):
        variable = _find_variable(rule, environ)
        if variable is not None:
            shown, stopped = _read(
                rule, environ[variable], shown, find_mig_parent or _ask_nvml_for_parent
            )
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
        shown = ",".join(one.entry for one in visible.devices) or "none"
        by = f" by {visible.variable}" if visible.variable is not None else ""
        why = f" ({visible.stopped})" if visible.stopped else ""
        raise RankError(
            f"local rank {local_rank} has no device: visible{by}: {shown}{why}",
            "Start as many ranks as there are visible devices, or correct the variable",
        )
    device = visible.devices[local_rank]
    if device.card is None:
        raise UnknownDeviceError(
            f"device '{device.entry}' of local rank {local_rank}: its card is not known: "
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
            raise InputError(f"'{text}' is no device id: expected one, without commas and blanks")
    if kind == "ascend" and not _is_ascending(texts):
        raise InputError(
            f"devices {','.join(texts)}: ASCEND_RT_VISIBLE_DEVICES takes numbers in ascending order only"
        )
    rules = _find_rules(kind)
    decided = [one for rule in rules if (one := _find_variable(rule, environ)) is not None]
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


def _find_rules(kind: str) -> tuple[_Rule, ...]:
    if kind not in _RULES:
        raise InputError(f"accelerator kind '{kind}': expected {', '.join(_RULES)}")
    return _RULES[kind]


def _find_variable(rule: _Rule, environ: Mapping[str, str]) -> str | None:
    for name in rule.variables:
        if name in environ and not (rule.is_empty_unset and not environ[name]):
            return name
    return None


def _read(
    rule: _Rule, text: str, shown: Sequence[VisibleDevice], find_parent: FindParent
) -> tuple[list[VisibleDevice], str]:
    """The devices that a variable leaves of those shown so far, and why it is read no further."""
    if not text:
        return [], "it is empty"
    chosen: list[VisibleDevice] = []
    seen: set[str] = set()
    for entry in text.split(","):
        device = rule.find(entry, shown, find_parent)
        if isinstance(device, str):
            return chosen, device
        known = device.card is not None and not device.is_partition
        identity = str(device.card.index) if device.card and known else entry.strip().upper()
        if identity not in seen:
            seen.add(identity)
            chosen.append(device)
        elif rule.on_repeat == "none":
            return [], f"'{entry}' is a repeated device, for which nothing at all is shown"
        elif rule.on_repeat == "stop":
            return chosen, f"'{entry}' is a repeated device"
    return chosen, ""


def _find_cuda(
    entry: str, shown: Sequence[VisibleDevice], find_parent: FindParent
) -> VisibleDevice | str:
    name = entry.strip()
    upper = name.upper()
    if upper.startswith("MIG-GPU-"):
        # The form of drivers before R470: the card's UUID, its GPU instance, its compute instance.
        return _find_by_uuid(entry, name[4:].partition("/")[0], shown, is_partition=True)
    if upper.startswith("MIG-"):
        return _find_mig_instance(entry, name, shown, find_parent)
    if upper.startswith("GPU-"):
        return _find_by_uuid(entry, name, shown)
    # Like strtoul: a sign, digits, and anything behind them. 'CARD:INSTANCE', which NVIDIA's container
    # tools use, has the card in front.
    sign = name[:1] if name[:1] in ("+", "-") else ""
    digits = name[len(sign) :]
    end = next((i for i, char in enumerate(digits) if not _is_number(char)), len(digits))
    device = _find_by_number(entry, sign.strip("+") + digits[:end], shown)
    if isinstance(device, VisibleDevice) and digits[end : end + 1] == ":":
        return VisibleDevice(entry, device.card, is_partition=True, unknown=device.unknown)
    return device


def _find_ascend(
    entry: str, shown: Sequence[VisibleDevice], _find_parent: FindParent
) -> VisibleDevice | str:
    return _find_by_number(entry, entry, shown)


def _find_rocr(
    entry: str, shown: Sequence[VisibleDevice], _find_parent: FindParent
) -> VisibleDevice | str:
    name = entry.strip()
    return _find_by_uuid(entry, name, shown) if name[:1] in ("G", "g") else _find_by_number(entry, name, shown)


def _find_hip(
    entry: str, shown: Sequence[VisibleDevice], _find_parent: FindParent
) -> VisibleDevice | str:
    if "GPU-" in entry:
        return _find_by_uuid(entry, entry, shown)
    # The number has to be written as the runtime would write it, so '01' and ' 1' are none.
    return _find_by_number(entry, entry if entry == "0" or entry[:1] != "0" else "", shown)


def _find_by_number(entry: str, number: str, shown: Sequence[VisibleDevice]) -> VisibleDevice | str:
    if number[:1] == "-" and _is_number(number[1:]):
        return f"'{entry}' ends the list"
    if not _is_number(number):
        return f"'{entry}' is no device"
    # int() takes time over very long numbers, and refuses longer ones
    position = int(number[:10])
    if position >= len(shown):
        return f"'{entry}' is out of range: there are {len(shown)} devices, numbered from 0"
    return VisibleDevice(entry, shown[position].card, unknown=shown[position].unknown)


def _find_by_uuid(
    entry: str, prefix: str, shown: Sequence[VisibleDevice], *, is_partition: bool = False
) -> VisibleDevice | str:
    """The only device whose UUID begins with the prefix."""
    cards = [one.card for one in shown if one.card is not None]
    found = [one for one in cards if (one.uuid or "").upper().startswith(prefix.upper())]
    if len(found) == 1:
        return VisibleDevice(entry, found[0], is_partition)
    if found:
        return f"'{entry}' is ambiguous: the UUIDs of cards {', '.join(str(one.index) for one in found)} begin so"
    unknown = [str(one.index) for one in cards if one.uuid is None]
    if unknown:
        return VisibleDevice(
            entry, None, is_partition, f"the UUIDs of cards {', '.join(unknown)} are not known"
        )
    return f"'{entry}' is no device: no card's UUID begins so"


def _find_mig_instance(
    entry: str, uuid: str, shown: Sequence[VisibleDevice], find_parent: FindParent
) -> VisibleDevice | str:
    """The card of a MIG instance that is named by a UUID of its own, which only NVML can translate."""
    if len(shown) == 1:
        return VisibleDevice(entry, shown[0].card, is_partition=True, unknown=shown[0].unknown)
    parent = find_parent(uuid)
    if parent is None:
        why = "a MIG instance's UUID does not say its card, NVML can't tell, and there are several"
        return VisibleDevice(entry, None, is_partition=True, unknown=why)
    return _find_by_uuid(entry, parent, shown, is_partition=True)


def _ask_nvml_for_parent(uuid: str) -> str | None:
    from provisioner.worker.nvml import find_mig_parent

    return find_mig_parent(uuid)


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


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_ascending(texts: Sequence[str]) -> bool:
    if not all(_is_number(text) for text in texts):
        return False
    numbers = [int(text) for text in texts]
    return all(a < b for a, b in zip(numbers, numbers[1:], strict=False))


_RULES = {
    "nvidia": (_Rule(("CUDA_VISIBLE_DEVICES",), False, "none", _find_cuda),),
    # What makes the two agree takes CUDA's where only that is set, so a rank can rely on it already.
    "ascend": (
        _Rule(("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), False, "stop", _find_ascend),
    ),
    "amd": (
        _Rule(("ROCR_VISIBLE_DEVICES",), False, "stop", _find_rocr),
        _Rule(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), True, "skip", _find_hip),
    ),
}
