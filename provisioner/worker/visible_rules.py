"""How each accelerator runtime reads the variables that hide devices from it.

* CUDA. Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA
  Device Enumeration"; PyTorch's `_parse_visible_devices`, for what the guides leave open. The first
  bad entry ends the list, a repeated one empties it, a number may have letters behind it.
* Ascend. Source: CANN Environment Variable Reference, ASCEND_RT_VISIBLE_DEVICES. Plain numbers in
  ascending order; the first other thing ends the list, a blank too.
* AMD. Source: ROCR-Runtime's amd_filter_device.cpp, clr's rocdevice.cpp. ROCR_VISIBLE_DEVICES chooses
  among the cards; then HIP_VISIBLE_DEVICES (CUDA_VISIBLE_DEVICES where it is empty) among those.
* Intel. Source: Level Zero specification, "Environment Variables". ZE_AFFINITY_MASK lists devices, or
  tiles as DEVICE.TILE; an empty one shows all.
"""

from __future__ import annotations

from provisioner.errors import InputError, shorten
from provisioner.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Literal

    from provisioner.topology import Accelerator

    FindParent = Callable[[str], str | None]


# Where a machine has several kinds, the first of these is meant: an NPU beside a display GPU.
KINDS = ("ascend", "nvidia", "amd", "intel")
NO_KIND = "cpu"


class VisibleDevice(Record):
    """One device that the runtime shows: a card, or a partition of one."""

    entry: str  # as the variable names it; the card's number where no variable is set
    card: Accelerator | None  # the physical card it is, or is a part of; None: not known
    is_partition: bool = False  # a MIG instance
    unknown: str = ""  # why the card is not known


class Rule(Record):
    """How one runtime reads one of its variables."""

    variables: tuple[str, ...]  # the first that is set decides
    is_empty_unset: bool  # whether an empty one counts as not set
    # What a repeated device does: nothing is shown, nothing further is read, it is passed over; or, in
    # 'ascend', every device that does not come behind the one before it ends the list.
    on_repeat: Literal["none", "stop", "skip", "ascend"]
    find: Callable[[str, Sequence[VisibleDevice], FindParent], VisibleDevice | str]


def kind_of(cards: Iterable[Accelerator]) -> str:
    """The kind that is meant among cards: the first of KINDS that there is, another vendor's, or cpu."""
    vendors = dict.fromkeys(card.vendor for card in cards)
    return next((kind for kind in (*KINDS, *vendors) if kind in vendors), NO_KIND)


def find_rules(kind: str) -> tuple[Rule, ...]:
    """The rules of a kind's runtime, each choosing among what the one before it leaves.

    Raises:
        InputError: there is no such kind.
    """
    if kind not in RULES:
        raise InputError(f"accelerator kind '{shorten(kind)}': expected {', '.join(RULES)}")
    return RULES[kind]


def find_variable(rule: Rule, environ: Mapping[str, str]) -> str | None:
    """The variable that decides in an environment; None if none of the rule's is set."""
    for name in rule.variables:
        if name in environ and not (rule.is_empty_unset and not environ[name]):
            return name
    return None


def read_variable(
    rule: Rule, text: str, shown: Sequence[VisibleDevice], find_parent: FindParent
) -> tuple[list[VisibleDevice], str]:
    """The devices that a variable leaves of those shown so far, and why it is read no further."""
    if not text:
        return [], "it is empty"
    chosen: list[VisibleDevice] = []
    seen: set[str | int] = set()
    for entry in text.split(","):
        device = rule.find(entry, shown, find_parent)
        if isinstance(device, str):
            return chosen, f"'{shorten(entry)}' {device}"
        if rule.on_repeat == "ascend" and chosen and not _follows(device, chosen[-1]):
            return chosen, f"'{shorten(entry)}' is not in ascending order"
        identity = _identity(device)
        if identity not in seen:
            seen.add(identity)
            chosen.append(device)
        elif rule.on_repeat == "none":
            return [], f"'{shorten(entry)}' is a repeated device, for which nothing at all is shown"
        elif rule.on_repeat == "stop":
            return chosen, f"'{shorten(entry)}' is a repeated device"
    return chosen, ""


def _identity(device: VisibleDevice) -> str | int:
    # Two instances of one card are two devices, and only their names tell them apart.
    if device.card is None or device.is_partition:
        return device.entry.strip().upper()
    return device.card.index


def _follows(device: VisibleDevice, before: VisibleDevice) -> bool:
    return device.card is None or before.card is None or before.card.index < device.card.index


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
    if name[:1] not in ("G", "g"):
        return _find_by_number(entry, name, shown)
    # 'GPU-' and up to 16 digits.
    return _find_by_uuid(entry, name, shown) if 5 <= len(name) <= 20 else "is no device"


def _find_hip(
    entry: str, shown: Sequence[VisibleDevice], _find_parent: FindParent
) -> VisibleDevice | str:
    if "GPU-" in entry:
        return _find_by_uuid(entry, entry, shown, is_first_enough=True)
    # The number has to be written as the runtime would write it, so '01' and ' 1' are none.
    return _find_by_number(entry, entry if entry == "0" or entry[:1] != "0" else "", shown)


def _find_level_zero(
    entry: str, shown: Sequence[VisibleDevice], _find_parent: FindParent
) -> VisibleDevice | str:
    # 'DEVICE' or 'DEVICE.TILE'.
    number, dot, tile = entry.strip().partition(".")
    device = _find_by_number(entry, number, shown)
    if not dot or isinstance(device, str):
        return device
    if not _is_number(tile):
        return "is no device"
    return VisibleDevice(entry, device.card, is_partition=True, unknown=device.unknown)


def _find_by_number(entry: str, number: str, shown: Sequence[VisibleDevice]) -> VisibleDevice | str:
    if number[:1] == "-" and _is_number(number[1:]):
        return "ends the list"
    if not _is_number(number):
        return "is no device"
    # int() takes long over long numbers, and refuses longer ones; ten digits are past any device.
    position = int(number.lstrip("0")[:10] or "0")
    if position >= len(shown):
        return f"is out of range: there are {len(shown)} devices, numbered from 0"
    return VisibleDevice(entry, shown[position].card, unknown=shown[position].unknown)


def _find_by_uuid(
    entry: str,
    prefix: str,
    shown: Sequence[VisibleDevice],
    *,
    is_partition: bool = False,
    is_first_enough: bool = False,
) -> VisibleDevice | str:
    """The only device whose UUID begins with the prefix; the first one where that is enough."""
    cards = [one.card for one in shown if one.card is not None]
    found = [one for one in cards if (one.uuid or "").upper().startswith(prefix.upper())]
    if len(found) == 1 or (found and is_first_enough):
        return VisibleDevice(entry, found[0], is_partition)
    if found:
        return f"is ambiguous: the UUIDs of cards {_list_cards(found)} begin so"
    unknown = [one for one in cards if one.uuid is None]
    if unknown:
        why = f"the UUIDs of cards {_list_cards(unknown)} are not known"
        return VisibleDevice(entry, None, is_partition, why)
    return "is no device: no card's UUID begins so"


def _find_mig_instance(
    entry: str, uuid: str, shown: Sequence[VisibleDevice], find_parent: FindParent
) -> VisibleDevice | str:
    """The card of a MIG instance that has a UUID of its own, which says nothing of the card's."""
    if len(shown) == 1:
        return VisibleDevice(entry, shown[0].card, is_partition=True, unknown=shown[0].unknown)
    parent = find_parent(uuid)
    if parent is None:
        why = f"a MIG instance's UUID does not say which of {len(shown)} cards it is on, nor does NVML"
        return VisibleDevice(entry, None, is_partition=True, unknown=why)
    return _find_by_uuid(entry, parent, shown, is_partition=True)


def _list_cards(cards: Sequence[Accelerator]) -> str:
    return ", ".join(str(one.index) for one in cards)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


RULES: dict[str, tuple[Rule, ...]] = {
    "nvidia": (Rule(("CUDA_VISIBLE_DEVICES",), False, "none", _find_cuda),),
    # What makes the two agree takes CUDA's where only that is set, so a rank can rely on it already.
    "ascend": (
        Rule(("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), False, "ascend", _find_ascend),
    ),
    "amd": (
        Rule(("ROCR_VISIBLE_DEVICES",), False, "stop", _find_rocr),
        Rule(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), True, "skip", _find_hip),
    ),
    "intel": (Rule(("ZE_AFFINITY_MASK",), True, "skip", _find_level_zero),),
}
