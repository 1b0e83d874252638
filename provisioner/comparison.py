"""What came out of holding another reader's text against a machine. Pure."""

from __future__ import annotations

from typing import NamedTuple

from provisioner.plan import Note


class Comparison(NamedTuple):
    """Another reader's text, fact by fact."""

    reader: str  # e.g. 'nvidia-smi topo -m'
    place: str  # the text's name
    facts: int  # how many were compared
    agreed: int  # how many of them are the same
    explained: tuple[str, ...]  # sentences: what differs and need not be wrong
    unsaid: tuple[str, ...]  # sentences: what it leaves out, and was not compared
    differences: tuple[Note, ...]  # what one of the two is wrong about
