"""Immutable values with named fields, for modules that can't afford to import dataclasses.

Importing `dataclasses` or `typing` costs as much CPU as a whole bind may, so the results of the
worker half derive from `Record`. Type checkers take a record for a frozen dataclass.
"""

from __future__ import annotations

TYPE_CHECKING = False  # a checker takes it for True; typing's own would have to be imported
if TYPE_CHECKING:
    from typing import dataclass_transform
else:

    def dataclass_transform(**_options):
        """A decorator that does nothing: only type checkers act on it."""
        return lambda cls: cls


@dataclass_transform(frozen_default=True)
class Record:
    """A value whose fields are the annotations of its class, in order; a class attribute is a default."""

    def __init__(self, *values: object, **named: object) -> None:
        cls = type(self)
        names = tuple(cls.__annotations__)
        fields = {name: vars(cls)[name] for name in names if name in vars(cls)}
        given = dict(zip(names, values, strict=False))
        if len(values) > len(names) or not given.keys().isdisjoint(named):
            raise TypeError(f"{cls.__name__}: expected each of {', '.join(names)} once")
        fields |= given | named
        if fields.keys() != set(names):
            raise TypeError(
                f"{cls.__name__}: expected {', '.join(names)}, found {', '.join(fields)}"
            )
        self.__dict__.update((name, fields[name]) for name in names)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"
