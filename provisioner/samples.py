"""The machines that ship with provision, as fact files of its own making.

No one's recording: the addresses in them are invented, and the rest is what such machines are
publicly known to look like.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from provisioner.errors import InputError
from provisioner.facts import HostFacts, read_facts

__all__ = ["SampleInfo", "list_samples", "read_facts", "read_sample"]

_SUFFIX = ".toml"
# Beside the module, in the source tree as in a wheel; importlib.resources would cost more to import
# than a sample does to read.
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sample_facts")


class SampleInfo(NamedTuple):
    """What a list of samples shows of one."""

    name: str
    title: str
    packages: int
    nodes: int
    cpus: int
    cards: int
    nics: int


def list_samples() -> tuple[SampleInfo, ...]:
    """Every sample, by name."""
    found = []
    for name in _names():
        facts = read_sample(name)
        found.append(
            SampleInfo(
                name,
                facts.title,
                packages=len(facts.packages),
                nodes=len(facts.nodes),
                cpus=len(facts.cpus),
                cards=len(facts.cards),
                nics=len(facts.nics),
            )
        )
    return tuple(found)


def read_sample(name: str) -> HostFacts:
    """The sample of that name. Raises InputError if there is none."""
    names = _names()
    if name not in names:
        raise _unknown(name, names)
    with open(os.path.join(_FOLDER, name + _SUFFIX), encoding="utf-8") as file:
        return read_facts(file.read(), name)


def _names() -> list[str]:
    return sorted(
        name.removesuffix(_SUFFIX) for name in os.listdir(_FOLDER) if name.endswith(_SUFFIX)
    )


def _unknown(name: str, names: list[str]) -> InputError:
    import difflib

    near = difflib.get_close_matches(name, names, 1)
    shown = name[:60] if name.isprintable() else ascii(name[:60])[1:-1]
    return InputError(
        f"sample '{shown}' is unknown: expected one of {', '.join(names)}",
        f"Did you mean {near[0]}?" if near else "List them with: provision samples",
    )
