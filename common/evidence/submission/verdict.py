"""The verdict of an official checker."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer of a checker. verdict: SUCCESS, FAILED, crashed, or not run."""

    path: str
    ruleset: str
    verdict: str
    detail: str = ""
    checker: str = "compliance"  # or system description, package, seeds, repository
    is_applied: bool = True  # False: it refuses nothing
    why: str = ""  # it is not applied

    @property
    def refuses(self) -> bool:
        return self.is_applied and self.verdict != "SUCCESS"

    def __str__(self) -> str:
        text = f"{self.path}: official {self.checker} checker {self.ruleset}: {self.verdict}"
        text += f": {self.detail}" if self.detail else ""
        return text + (f"; does not count: {self.why}" if self.why else "")

    def excused(self, why: str) -> "Verdict":
        """Return the verdict as one that refuses nothing."""
        return replace(self, is_applied=False, why=why)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return e.g. `compliance 2.1.0: 5 of 5 SUCCESS, package 2.1.0: SUCCESS`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.checker, verdict.ruleset), []).append(verdict.verdict)
    parts = []
    for (checker, ruleset), words in groups.items():
        is_one = len(words) == 1 or set(words) == {"not run"}
        text = words[0] if is_one else f"{words.count('SUCCESS')} of {len(words)} SUCCESS"
        parts.append(f"{checker} {ruleset}: {text}")
    return ", ".join(parts) or "not run"
