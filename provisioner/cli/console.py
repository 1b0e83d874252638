"""What commands print: tables as wide as the terminal, notes, errors, JSON. The only printing module."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from provisioner.errors import Problem, ProvisionError
from provisioner.plan import Note

PROBLEMS_SCHEMA = "provision.problems/1"

# Below this a wrapped column can't be read.
_NARROWEST = 16
_GAP = "  "


def print_line(text: str = "") -> None:
    """Prints one line, without colour where there is no terminal or NO_COLOR is set."""
    click.echo(text, color=None if _may_colour() else False)


def print_json(value: Any) -> None:
    """Prints a value as JSON."""
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def bold(text: str) -> str:
    """The text, to be shown bold on a terminal."""
    return click.style(text, bold=True)


def print_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, wrapped: Sequence[str] = ()
) -> None:
    """Prints a table with aligned columns.

    Args:
        heads: the columns' names.
        rows: the cells; '-' stands for what is not known or not there.
        wrapped: the columns to be broken at commas where a terminal is too narrow.
    """
    body = [[printable(cell) or "-" for cell in row] for row in rows]
    widths = [max(len(line[at]) for line in (heads, *body)) for at in range(len(heads))]
    flexible = [at for at, head in enumerate(heads) if head in wrapped]
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - _terminal_width()
    while excess > 0 and flexible:
        at = max(flexible, key=lambda column: widths[column])
        if widths[at] <= _NARROWEST:
            break
        widths[at] -= 1
        excess -= 1
    print_line(
        bold(
            _GAP.join(head.ljust(width) for head, width in zip(heads, widths, strict=True)).rstrip()
        )
    )
    for row in body:
        cells = [_break(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in range(max(len(cell) for cell in cells)):
            parts = [(cell[line] if line < len(cell) else "") for cell in cells]
            print_line(
                _GAP.join(
                    part.ljust(width) for part, width in zip(parts, widths, strict=True)
                ).rstrip()
            )


def print_notes(title: str, notes: Iterable[Note]) -> None:
    """Prints notes, each with its hint on a line of its own; nothing if there is none."""
    listed = list(notes)
    if not listed:
        return
    print_line()
    print_line(bold(title))
    for note in listed:
        print_line(f"  {click.style(note.code, fg='yellow')}: {printable(note.message)}")
        if note.hint:
            print_line(f"    ({printable(note.hint)})")


def print_error(error: ProvisionError, *, as_json: bool) -> None:
    """Prints every problem that an error carries, to standard error, or as JSON to standard output."""
    if as_json:
        problems = [
            {"code": one.code, "message": one.message, "hint": one.hint} for one in error.problems
        ]
        print_json({"schema": PROBLEMS_SCHEMA, "problems": problems})
        return
    for problem in error.problems:
        print_problem(problem)


def print_problem(problem: Problem) -> None:
    """Prints one problem and its hint to standard error."""
    label = click.style("Error:", fg="red", bold=True)
    text = f"{label} {printable(problem.message)}"
    click.echo(text, err=True, color=None if _may_colour() else False)
    if problem.hint:
        click.echo(f"({printable(problem.hint)})", err=True)


def printable(text: str) -> str:
    """The text with nothing in it that a terminal would act on: a file's or a device's name may hold it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def print_text(text: str) -> None:
    """Prints a text as it is."""
    sys.stdout.write(text)


def _may_colour() -> bool:
    return not os.environ.get("NO_COLOR")


def _terminal_width() -> int:
    # A file or a pipe is as wide as its lines.
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 30


def _break(cell: str, width: int) -> list[str]:
    """The cell in lines of at most `width`, broken after commas where it can be."""
    lines: list[str] = []
    line = ""
    for piece in cell.replace(",", ",\0").split("\0"):
        if line and len(line) + len(piece) > width:
            lines.append(line)
            line = ""
        line += piece
    return [*lines, line]
