"""The result of a check of `ttt doctor`: ok, warning or fault, and what a person does about it."""

from dataclasses import dataclass, field
from typing import Any

OK, WARNING, FAULT = "ok", "warning", "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One answer. `advice` says what a person does about it, `values` are its numbers for programs."""

    check: str
    state: str
    found: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"{self.check}: {self.found}"
        return f"{text}; {self.advice}" if self.advice else text


def ok(check: str, text: str, **values: Any) -> Line:
    return Line(check=check, state=OK, found=text, values=values)


def warning(check: str, text: str, advice: str, **values: Any) -> Line:
    """Report that a run works, but not as well as it could, or that a check was not possible."""
    return Line(check=check, state=WARNING, found=text, advice=advice, values=values)


def fault(check: str, text: str, advice: str, **values: Any) -> Line:
    """Report that a run would fail, or that its time or result could not be trusted."""
    return Line(check=check, state=FAULT, found=text, advice=advice, values=values)
