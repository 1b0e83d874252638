"""Pieces of sentences that several modules say. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from provisioner.plan import Plan, Rank


def name_some(words: Sequence[str], most: int = 8) -> str:
    """'a, b and c'; of very many the first ones and how many more."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "none"


def count(number: int, noun: str) -> str:
    """'1 rank' or '8 ranks'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def named_ranks(plan: Plan) -> Iterator[tuple[str, Rank]]:
    """(name for people, rank) of every rank."""
    for service in plan.services:
        of = f" of service {service.name}" if len(plan.services) > 1 else ""
        for rank in service.ranks:
            yield f"rank {rank.rank}{of}", rank
