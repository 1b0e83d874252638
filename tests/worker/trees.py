"""What a worker sees of a machine: made trees with a container's cuts in them, and plans of them."""

from __future__ import annotations

from pathlib import Path

from provisioner.discovery import discover
from provisioner.planfile import format_plan
from provisioner.planner import make_plan
from provisioner.request import PlacementRequest
from provisioner.root import MemoryRoot, Root

_GPUS = "proc/driver/nvidia/gpus/"
_DRIVER = "sys/bus/pci/drivers/nvidia"


def with_drivers(root: MemoryRoot) -> MemoryRoot:
    """The tree with the folder of NVIDIA's PCI driver, which links to every card that it holds."""
    links = {
        f"{_DRIVER}/{address}": f"../../../../bus/pci/devices/{address}"
        for address in _shown_cards(root)
    }
    return MemoryRoot(root.name, {**root.files, f"{_DRIVER}/bind": ""}, {**root.links, **links})


def show_cards(root: MemoryRoot, *cards: str) -> MemoryRoot:
    """The tree as a container shows it that was given these cards: the others miss in the driver's folder."""
    hidden = [_GPUS + address for address in _shown_cards(root) if address not in cards]
    return without(with_drivers(root), *(f"{folder}/" for folder in hidden))


def without(root: MemoryRoot, *prefixes: str) -> MemoryRoot:
    """The tree without what lies below some paths."""
    return MemoryRoot(
        root.name,
        {path: text for path, text in root.files.items() if not path.startswith(prefixes)},
        {path: target for path, target in root.links.items() if not path.startswith(prefixes)},
    )


def write_plan(root: Root, folder: Path, request: PlacementRequest | None = None) -> str:
    """The path of the plan.json of a tree's machine, in a folder."""
    path = folder / "plan.json"
    plan = make_plan(discover(root), request or PlacementRequest())
    path.write_text(format_plan(plan))
    return str(path)


def _shown_cards(root: MemoryRoot) -> list[str]:
    return root.list(_GPUS.rstrip("/"))
