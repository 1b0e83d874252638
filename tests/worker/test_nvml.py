"""NVML by ctypes, against a library of the same name that is compiled here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from provisioner.errors import InputError
from provisioner.worker.nvml import bf16_tflops
from tests.worker.children import run_child

NVML = """
from provisioner.worker.nvml import *
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a libnvidia-ml.so.1 with two cards; skips without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a libnvidia-ml.so.1 with")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True
    )
    return str(folder)


def test_compute_capability_needs_no_context(library: str) -> None:
    """compute_capability(): NVML alone is loaded, a card is named by number or address, and NVML is let go."""
    found = run_child(
        NVML,
        """
        import ctypes
        capabilities = [compute_capability(), compute_capability(1), compute_capability("0000:3d:00.0")]
        with open("/proc/self/maps") as file:
            maps = file.read()
        left = ctypes.CDLL("libnvidia-ml.so.1").nvmlShutdown()
        answer([capabilities, "libnvidia-ml" in maps, "libcuda" in maps, left])
        """,
        environ={"LD_LIBRARY_PATH": library},
    )
    assert found == [[[9, 0], [10, 0], [10, 0]], True, False, 1]


@pytest.mark.parametrize("init", [None, "9"], ids=["no_library", "no_driver"])
def test_absent_nvml_is_not_sm10(init: str | None, request: pytest.FixtureRequest) -> None:
    """compute_capability(): without the library or the driver it is None, and then 'not SM10'."""
    environ = {}
    if init is not None:
        environ = {"LD_LIBRARY_PATH": request.getfixturevalue("library"), "FAKE_NVML_INIT": init}
    found = run_child(
        NVML,
        "answer([compute_capability(), is_sm_major_10(), find_model(), find_mig_parent('MIG-1')])",
        environ=environ,
    )
    if init is None and found[0] is not None:
        pytest.skip("this machine has NVML")
    assert found == [None, False, None, None]


def test_sm_major_10_by_card(library: str) -> None:
    """is_sm_major_10(): the card decides, so of an H100 and a B200 only the second is."""
    found = run_child(
        NVML,
        "answer([is_sm_major_10(0), is_sm_major_10(1)])",
        environ={"LD_LIBRARY_PATH": library},
    )
    assert found == [False, True]


@pytest.mark.parametrize(
    "call, environ, message",
    [
        ("compute_capability(5)", {}, "NVML: card 5: Not Found (code 2)"),
        ("compute_capability('0000:99:00.0')", {}, "NVML: card 0000:99:00.0: Not Found (code 6)"),
        (
            "compute_capability()",
            {"FAKE_NVML_LOST": "1"},
            "NVML: compute capability of card 0: GPU is lost (code 15)",
        ),
        ("compute_capability()", {"FAKE_NVML_INIT": "15"}, "NVML: start: GPU is lost (code 15)"),
    ],
)
def test_failing_nvml_is_an_error(
    library: str, call: str, environ: dict[str, str], message: str
) -> None:
    """NVML that is there and fails is an error that names the card, not an absence."""
    found = run_child(
        NVML,
        f"""
        try:
            {call}
        except NvmlError as error:
            answer(error.message)
        """,
        environ={"LD_LIBRARY_PATH": library, **environ},
    )
    assert found == message


def test_mig_instance_has_a_parent(library: str) -> None:
    """A MIG instance's own UUID leads to its card through NVML, also from CUDA_VISIBLE_DEVICES."""
    found = run_child(
        NVML,
        """
        from provisioner.pci import PciAddress
        from provisioner.topology import Accelerator
        from provisioner.worker.visible import physical_device_id
        uuids = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1b5c1f47-0000-1111-2222-333333333333")
        cards = [Accelerator("nvidia", i, None, "driver", uuid=uuid) for i, uuid in enumerate(uuids)]
        mig = "MIG-d9a47cfb-d1f2-d08c-b40e-0812b597ae69"
        answer([find_mig_parent(mig), find_mig_parent("MIG-none"),
                physical_device_id(0, {"CUDA_VISIBLE_DEVICES": mig}, cards=cards)])
        """,
        environ={"LD_LIBRARY_PATH": library},
    )
    assert found == ["GPU-1b5c1f47-0000-1111-2222-333333333333", None, "1"]


def test_bf16_limit_of_this_machines_cards(library: str) -> None:
    """get_bf16_tflops_limit(): a card's rate by what NVML says of it, where the old one was an error."""
    found = run_child(
        NVML,
        """
        answer([get_bf16_tflops_limit("ascend"), get_bf16_tflops_limit("nvidia", 0),
                get_bf16_tflops_limit("nvidia", 1) in (2250, 2500)])
        """,
        environ={"LD_LIBRARY_PATH": library},
    )
    assert found == [432, 989, True]


@pytest.mark.parametrize(
    "kind, model, capability, machine, tflops",
    [
        ("ascend", None, None, "aarch64", 432),
        ("nvidia", "NVIDIA B200", (10, 0), "x86_64", 2250),
        ("nvidia", "NVIDIA GB300", (10, 3), "aarch64", 2500),
        ("nvidia", "NVIDIA H100 PCIe", (9, 0), "x86_64", 756),
        ("nvidia", "NVIDIA H100 80GB HBM3", (9, 0), "x86_64", 989),
        ("nvidia", "NVIDIA A100-SXM4-80GB", (8, 0), "x86_64", 312),
        ("nvidia", "NVIDIA L4", (8, 9), "x86_64", 121),
        ("nvidia", "NVIDIA L40S", (8, 9), "x86_64", 362),
        ("amd", "AMD Instinct MI300X", None, "x86_64", 1307),
    ],
)
def test_bf16_limit_by_device(
    kind: str, model: str | None, capability: tuple[int, int] | None, machine: str, tflops: float
) -> None:
    """get_bf16_tflops_limit(): Ascend 432, SM 10.x 2500 with Grace and 2250 without, others by their model."""
    assert bf16_tflops(kind, model, capability, machine) == tflops


@pytest.mark.parametrize(
    "kind, model, capability, message",
    [
        (
            "nvidia",
            "Tesla T4",
            (7, 5),
            "'Tesla T4' of compute capability 7.5 (kind 'nvidia', x86_64)",
        ),
        ("nvidia", None, None, "a device whose model is not known (kind 'nvidia', x86_64)"),
        ("cpu", None, None, "(kind 'cpu', x86_64)"),
    ],
)
def test_unknown_device_is_named(
    kind: str, model: str | None, capability: tuple[int, int] | None, message: str
) -> None:
    """get_bf16_tflops_limit(): the error names the device that was found."""
    with pytest.raises(InputError) as caught:
        bf16_tflops(kind, model, capability, "x86_64")
    assert message in caught.value.message
