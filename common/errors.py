"""Mistakes that a user can mend, and the exit codes."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

EXIT_OK = 0
EXIT_FINDINGS = 1  # findings in a log, or a run that ended without its target
EXIT_USAGE = 2
EXIT_INTERNAL = 3
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells expect
EXIT_OUTPUT = 141  # 128 + SIGPIPE: the command succeeded, but some output was lost


class UserError(Exception):
    """A mistake that a user can mend. The command line prints it as one line and exits with 2.

    `where` is a file:line, a configuration key or a path; `hint` says what to do.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.hint}" if self.hint else text


def check_share(value: float, where: str) -> None:
    """Raise UserError for a share outside of 0 to 1, such as 15 in place of 0.15."""
    if not 0 <= value <= 1:
        raise UserError(f"a share of {value:g}: expected 0 to 1", where=where)


def refuse_twice(is_applied: bool, where: str) -> None:
    """Raise UserError for a model that a function has changed before."""
    if is_applied:
        raise UserError("this model has been through it before", where=where, hint="call it once")


def name_error(error: Exception, limit: int | None = None) -> str:
    """Name an error that no user can mend: its class, and at most `limit` characters of its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:limit]}"


def first_fault(error: Any) -> str:
    """Describe the first fault of a pydantic ValidationError, place and reason; of another error its text."""
    if not hasattr(error, "errors"):
        return str(error)
    fault = error.errors(include_input=False, include_url=False)[0]
    return ": ".join(filter(None, [".".join(map(str, fault["loc"])), fault["msg"]]))


def list_some(names: Sequence[object], most: int = 1) -> str:
    """List at most so many names, and the number of the others: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest valid name, or list all of them when none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
