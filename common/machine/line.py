"""The result of a check of `ttt doctor`: ok, warning or fault, and what a person does about it."""

from dataclasses import dataclass, field
from functools import partial
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


def judge(
    check: str,
    text: str,
    advice: str = "",
    *,
    is_fault: bool = False,
    is_warning: bool = False,
    **values: Any,
) -> Line:
    """Report a fault, else a warning, else that all is well, for which nobody needs advice.

    After a fault a run would fail, or its time or result could not be trusted. After a warning it works, but
    not as well as it could, or the check was not possible.
    """
    state = FAULT if is_fault else WARNING if is_warning else OK
    return Line(check=check, state=state, found=text, advice=advice * (state != OK), values=values)


ok = judge
warning = partial(judge, is_warning=True)
fault = partial(judge, is_fault=True)
