"""The errors that provision raises, each with a hint and an exit status.

A library function raises one of these and never prints or exits; the command line turns it into
text and a status in one place. Several faults of one input travel together in `ProblemsError`.
"""

from __future__ import annotations

from provisioner.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import ClassVar

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MISMATCH = 3
EXIT_NOT_STARTED = 125  # of run, as env(1) says it: its command was not started
EXIT_INTERRUPTED = 130


class Problem(Record):
    """One reason why an input was refused."""

    code: str  # stable, snake_case, for programs
    message: str  # object, what is wrong: found, expected
    hint: str = ""  # an action


def shorten(text: str) -> str:
    """The text cut to what fits in a message, with nothing that a terminal would act on."""
    shown = text if len(text) <= 60 else text[:57] + "..."
    return shown if shown.isprintable() else ascii(shown)[1:-1]


class ProvisionError(Exception):
    """Base of every error that provision raises on purpose."""

    code: ClassVar[str] = "failed"
    exit_status: ClassVar[int] = EXIT_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Every reason that this error carries, at least one."""
        return (Problem(self.code, self.message, self.hint),)


class InputError(ProvisionError):
    """What the user gave (an option, a file's contents, a root) is wrong."""

    code = "bad_input"
    exit_status = EXIT_USAGE


class ParseError(InputError):
    """A text is not of the form that its format says.

    Raised by parsers, which know no path; who read the text adds it by `at`.
    """

    code = "unparsable"

    def at(self, place: str) -> ParseError:
        """The same error with the place that the text came from in front."""
        return ParseError(f"{place}: {self.message}", self.hint)


class ReadError(InputError):
    """A file of the machine's tree is there but can't be read."""

    code = "unreadable"


class TopologyError(InputError):
    """The machine's files contradict each other, or describe no machine."""

    code = "contradiction"


class ForeignSystemError(ProvisionError):
    """Something acting was asked of a recorded machine or another machine's plan."""

    code = "foreign_system"


class BusError(ProvisionError):
    """Systemd can't be reached, or refused what it was asked for; `name` says which error it was."""

    code = "systemd"

    def __init__(self, message: str, hint: str = "", *, name: str = "") -> None:
        super().__init__(message, hint)
        self.name = name  # e.g. 'AccessDenied': the last part of the D-Bus error's name


class WriteError(ProvisionError):
    """An output could not be written; what stood there before still stands."""

    code = "unwritable"


class ProblemsError(ProvisionError):
    """Several problems of one input, all found before anything was done."""

    code = "problems"

    def __init__(
        self, problems: Iterable[Problem], *, exit_status: int = EXIT_FAILED, subject: str = ""
    ) -> None:
        self._problems = tuple(problems)
        if not self._problems:
            raise ValueError("ProblemsError needs at least one problem")
        self.subject = subject
        super().__init__(self._problems[0].message, self._problems[0].hint)
        self.exit_status = exit_status  # type: ignore[misc]  # this class alone varies by instance

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self._problems
