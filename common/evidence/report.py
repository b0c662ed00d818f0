"""One self-contained HTML page about run sets: scores, plots, comparison, findings, systems, differences.

Text from logs reaches the page through jinja2's escaping, or as text of an SVG that matplotlib escapes.
"""

import contextlib
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from common.errors import UserError
from common.evidence.audit import Finding, by_rule, num_errors
from common.evidence.claims import judge
from common.evidence.intervals import Interval
from common.evidence.ledger import Ledger
from common.evidence.log import RunSet
from common.evidence.plots import ascii_name, draw
from common.evidence.records import printable
from common.evidence.reported import Reported
from common.evidence.reproduce import Reproduction, reproduce
from common.evidence.rules.systems import described as with_description
from common.evidence.rules.systems import fields_of
from common.evidence.score import BASELINE, Score, Speedup, described, notes, number, score, speedups


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A run set with its findings, and the official checkers' verdicts in one line."""

    run_set: RunSet
    findings: Sequence[Finding]
    official: str

    @cached_property
    def score(self) -> Score:
        return score(self.run_set)

    @property
    def num_findings(self) -> int:
        return len(self.findings)

    @property
    def num_errors(self) -> int:
        return num_errors(self.findings)

    @property
    def rules(self) -> list[tuple[Finding, int]]:
        """The first finding of each rule that was broken, and how many there are."""
        return [(same[0], len(same)) for same in by_rule(self.findings)]

    @property
    def system(self) -> dict[str, str]:
        """The fields of its system description as text; none where it has no description."""
        found = with_description(self.run_set)
        fields = fields_of(found) if found else {}
        return {printable(name, 64): printable(value) for name, value in fields.items()}


@dataclass(frozen=True, kw_only=True)
class Section:
    """What is shown of one benchmark on one hardware: table rows, plots, configuration differences."""

    title: str
    is_proxy: bool
    rows: Sequence[dict[str, str]]
    plots: Sequence[Markup]
    diffs: Sequence[tuple[str, str]]


def write_report(
    path: Path,
    checked: Sequence[Checked],
    published: Mapping[str, Reported],
    ledgers: Sequence[tuple[str, Ledger | str]] = (),
) -> None:
    """Write the page to `path`, whole or not at all. Raises: UserError if the folder cannot be written."""
    write_whole(path, render(checked, published, path.parent, ledgers), "report")


def write_whole(path: Path, page: str, name: str) -> None:
    """Write a page to `path`, whole or not at all; two writers at once do not meet. Raises: UserError.

    `name` is what the error calls it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise UserError(f"cannot write the {name}: {error.strerror}", where=printable(str(path))) from error


def render(
    checked: Sequence[Checked],
    published: Mapping[str, Reported],
    folder: Path,
    ledgers: Sequence[tuple[str, Ledger | str]] = (),
) -> str:
    """Return the page; its links to logs are relative to `folder`, where it will lie.

    `ledgers` of ablations have the label of their file; one that could not be read is the reason as text.
    """
    scores = [entry.score for entry in checked]
    theirs = [entry.score for facts in published.values() for entry in facts.sets]
    faster = speedups(scores) | speedups(theirs)
    groups = sorted({entry.group for entry in scores})
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "span": span}
    environment.globals["link"] = lambda path: link(path, folder)
    return environment.get_template("report.html").render(
        sections=[_section([c for c in checked if c.score.group == group], faster) for group in groups],
        reported=[row | {"source": s.source} for s in theirs for row in [described(s, faster.get(s.source))]],
        compared=[found for entry in checked if (found := _compared(entry, published))],
        claims=[claim for facts in published.values() for claim in judge(facts)],
        checked=checked,
        ledgers=[(path, found) for path, found in ledgers if isinstance(found, Ledger)],
        unread=[(path, found) for path, found in ledgers if isinstance(found, str)],
        notes=notes([*scores, *theirs]),
    )


def link(path: str, folder: Path) -> str:
    """Return the address of a file as seen from a folder: always a relative path, never a scheme."""
    return quote(os.path.relpath(path, folder))


def span(interval: Interval | None) -> str:
    """Return an interval of a ratio as text."""
    return f"{interval.low:.2f} to {interval.high:.2f}" if interval else "-"


def _compared(entry: Checked, published: Mapping[str, Reported]) -> Reproduction | None:
    """Return a full-size run set against the published one of its configuration, if there is one."""
    facts = published.get(entry.score.benchmark)
    theirs = facts.of_configuration(entry.score.configuration) if facts else None
    found = reproduce(entry.run_set, theirs) if theirs else None
    return found if found and found.factors else None


def _section(checked: Sequence[Checked], faster: dict[str, Speedup]) -> Section:
    checked = sorted(checked, key=lambda c: (c.score.configuration != BASELINE, c.score.configuration))
    scores = [entry.score for entry in checked]
    first = scores[0]
    return Section(
        title=f"{first.benchmark or 'unknown benchmark'} on {first.hardware}",
        is_proxy=first.is_proxy,
        rows=[described(entry, faster.get(entry.source)) for entry in scores],
        plots=draw([entry.run_set for entry in checked], scores),
        diffs=[
            (f"{ascii_name(first.configuration)} -> {ascii_name(other.configuration)}", difference)
            for entry, other in zip(checked[1:], scores[1:], strict=True)
            if (difference := _difference(checked[0].run_set, entry.run_set))
        ],
    )


def _difference(before: RunSet, after: RunSet) -> str:
    lines = difflib.unified_diff(
        before.lead.settings,
        after.lead.settings,
        before.lead.configuration,
        after.lead.configuration,
        n=1,
        lineterm="",
    )
    return "\n".join(lines)
