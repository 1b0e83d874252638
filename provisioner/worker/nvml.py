"""What NVIDIA's management library says of a card, without a CUDA context.

Source: nvml.h of the CUDA toolkit. NVML counts the cards in PCI order, whatever CUDA_VISIBLE_DEVICES
says. It takes no memory of a card and starts no context, so it may be asked before the engine has
chosen its device, which `torch.cuda` may not.
"""

from __future__ import annotations

import os

from provisioner.errors import InputError, ProvisionError, shorten

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

_LIBRARY = "libnvidia-ml.so.1"
# nvmlReturn_t
_UNINITIALIZED = 1
_NOT_FOUND = 6
_DRIVER_NOT_LOADED = 9
_LIBRARY_NOT_FOUND = 12
_IS_ABSENT = (_UNINITIALIZED, _DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND)
# NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE are 96.
_TEXT_BYTES = 96

_ASCEND_TFLOPS = 432.0
# SM 10.x, by the host that it is sold with: Grace (GB200, GB300), or another (B200, B300).
_SM10_GRACE_TFLOPS = 2500.0
_SM10_TFLOPS = 2250.0
# Peak dense BF16 of the makers' data sheets, in TFLOPS, by words of the model's name; the first row whose
# words are all in the name counts.
_MODEL_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("H100", "PCIe"), 756.0),
    (("H100", "NVL"), 835.0),
    (("H100",), 989.0),
    (("H200", "NVL"), 835.0),
    (("H200",), 989.0),
    (("GH200",), 989.0),
    (("H800",), 989.0),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("L40S",), 362.0),
    (("L40",), 181.0),
    (("L20",), 119.5),
    (("L4",), 121.0),
    (("A40",), 149.7),
    (("A30",), 165.0),
    (("A10",), 125.0),
    (("MI355X",), 2500.0),
    (("MI350X",), 2300.0),
    (("MI325X",), 1307.0),
    (("MI300X",), 1307.0),
    (("MI250X",), 383.0),
)


class NvmlError(ProvisionError):
    """NVML is there and fails."""

    code = "nvml"


def compute_capability(card: int | str = 0) -> tuple[int, int] | None:
    """(major, minor) of a card's compute capability; None if NVML is absent.

    Args:
        card: its number in PCI order, or its PCI address.

    Raises:
        NvmlError: there is no such card, or NVML fails.
    """

    def ask(library: ctypes.CDLL) -> tuple[int, int]:
        import ctypes

        major, minor = ctypes.c_int(), ctypes.c_int()
        _check(
            library,
            f"compute capability of card {card}",
            library.nvmlDeviceGetCudaComputeCapability(
                _open_card(library, card), ctypes.byref(major), ctypes.byref(minor)
            ),
        )
        return major.value, minor.value

    return _with_nvml(ask)


def is_sm_major_10(card: int | str = 0) -> bool:
    """Whether a card's compute capability is 10.x; False if NVML is absent.

    Raises:
        NvmlError: there is no such card, or NVML fails.
    """
    capability = compute_capability(card)
    return capability is not None and capability[0] == 10


def find_model(card: int | str = 0) -> str | None:
    """A card's model, e.g. ``NVIDIA H200``; None if NVML is absent.

    Raises:
        NvmlError: there is no such card, or NVML fails.
    """
    return _with_nvml(
        lambda library: _read_text(
            library, library.nvmlDeviceGetName, _open_card(library, card), f"name of card {card}"
        )
    )


def find_mig_parent(uuid: str) -> str | None:
    """The UUID of the card that a MIG instance is a part of; None if NVML is absent or knows no such one.

    Raises:
        NvmlError: NVML fails.
    """

    def ask(library: ctypes.CDLL) -> str | None:
        import ctypes

        what = f"MIG instance '{shorten(uuid)}'"
        instance, parent = ctypes.c_void_p(), ctypes.c_void_p()
        code = library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(instance))
        if code == _NOT_FOUND:
            return None
        _check(library, what, code)
        _check(
            library,
            f"card of {what}",
            library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance, ctypes.byref(parent)),
        )
        return _read_text(library, library.nvmlDeviceGetUUID, parent, f"UUID of the card of {what}")

    return _with_nvml(ask)


def get_bf16_tflops_limit(kind: str | None = None, card: int | str = 0) -> float:
    """The peak dense BF16 rate of a card of this machine, in TFLOPS.

    Args:
        kind: nvidia, ascend, amd or intel; None is that of the machine's cards.
        card: its number in PCI order, or its PCI address.

    Raises:
        InputError: the rate of the device found is not known here.
        NvmlError: there is no such card, or NVML fails.
    """
    if kind is None:
        from provisioner.worker.machine import accelerator_kind

        kind = accelerator_kind()
    if kind != "nvidia":
        return bf16_tflops(kind, None, None, os.uname().machine)
    return bf16_tflops(kind, find_model(card), compute_capability(card), os.uname().machine)


def bf16_tflops(
    kind: str, model: str | None, capability: tuple[int, int] | None, machine: str
) -> float:
    """The peak dense BF16 rate of a device, in TFLOPS.

    Args:
        kind: nvidia, ascend, amd …
        model: its maker's name for it; None if not known.
        capability: its compute capability; None if it has none or it is not known.
        machine: the host's architecture, as `uname -m` says it.

    Raises:
        InputError: its rate is not known here; the message says what was found.
    """
    if kind == "ascend":
        return _ASCEND_TFLOPS
    if capability is not None and capability[0] == 10:
        return _SM10_GRACE_TFLOPS if machine == "aarch64" else _SM10_TFLOPS
    words = (model or "").replace("-", " ").split()
    for wanted, tflops in _MODEL_TFLOPS:
        if all(word in words for word in wanted):
            return tflops
    named = f"'{shorten(model)}'" if model else "a device whose model is not known"
    sm = f" of compute capability {capability[0]}.{capability[1]}" if capability else ""
    raise InputError(
        f"BF16 limit: no rate is known for {named}{sm} (kind '{shorten(kind)}', {machine})"
    )


def _with_nvml(ask: Callable[[ctypes.CDLL], T]) -> T | None:
    """What `ask` makes of NVML; None if the library or the driver is not there."""
    import ctypes

    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    code = library.nvmlInit_v2()
    if code in _IS_ABSENT:
        return None
    _check(library, "start", code)
    try:
        return ask(library)
    finally:
        library.nvmlShutdown()


def _open_card(library: ctypes.CDLL, card: int | str) -> ctypes.c_void_p:
    import ctypes

    handle = ctypes.c_void_p()
    if isinstance(card, int):
        code = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(card), ctypes.byref(handle))
    else:
        code = library.nvmlDeviceGetHandleByPciBusId_v2(card.encode(), ctypes.byref(handle))
    _check(library, f"card {card}", code)
    return handle


def _read_text(
    library: ctypes.CDLL, function: Callable[..., int], handle: ctypes.c_void_p, what: str
) -> str:
    import ctypes

    text = ctypes.create_string_buffer(_TEXT_BYTES)
    _check(library, what, function(handle, text, ctypes.c_uint(_TEXT_BYTES)))
    return text.value.decode("utf-8", "replace")


def _check(library: ctypes.CDLL, what: str, code: int) -> None:
    import ctypes

    if code:
        describe = library.nvmlErrorString
        describe.restype = ctypes.c_char_p
        text = (describe(code) or b"").decode("utf-8", "replace")
        raise NvmlError(f"NVML: {what}: {text} (code {code})")
