"""Figures as text: in sentences, in tables, and scores in as many columns as a terminal has room for."""

import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.evidence.compare import masked_accuracy
from common.evidence.intervals import Estimate, Interval
from common.evidence.log import NUM_RUNS
from common.evidence.records import counted, printable
from common.evidence.score import BASELINE, UNVERIFIED, Score, Speedup, name_processors

DASH = "-"
Form = Callable[[float], str]
TWO_DIGITS: Form = "{:.2f}".format
PIPE_WIDTH = 140  # columns of the notes, where there is no terminal to ask
MAX_WIDTH = 10_000  # more than any table needs
TERMS = {  # column -> field of Factors
    "samples": "samples",
    "samples/s": "samples_per_s",
    "evaluation": "evaluation",
    "start-up": "startup",
    "overshoot": "overshoot",
}
TERMS_TITLE = (
    "mean minutes = samples / (60 x samples/s) + evaluation + start-up + overshoot, the last three in minutes"
)
REST = (
    "`ttt score --wide` adds samples to target, samples/s, evaluation, quality, what the runs could show, "
    "and where the minutes went."
)
COLUMNS = (  # of the tables that show everything
    "evaluation, in per cent: share of the time. quality: geometric mean of the last evaluations. samples to "
    "target: up to the evaluation that saw the target, mean of the runs that count. samples: up to where the "
    "curve crosses the target between two evaluations, mean of the runs that converged. overshoot: the "
    "minutes from there to the stop. A run whose first evaluation was past the target is in neither."
)
SPEEDUP = (
    "speed-up: ratio of two scores. Its interval is that of the ratio of geometric means of the runs, where "
    "all converged (Welch-t on log minutes). Runs could show: the smallest difference that they find with "
    "80 % probability in a test at the 5 % level."
)
NOTES = {  # mark in a label -> the note that such a score needs (MLCommons result messaging guidelines)
    "unverified": UNVERIFIED,
    "proxy": "proxy: size mini trains a small stand-in; its minutes say nothing about the full benchmark.",
    "provisional": f"provisional: fewer runs than MLPerf asks for, {NUM_RUNS['resnet']} of ResNet and "
    f"{NUM_RUNS['bert']} of BERT.",
    "by launch": "by launch: more runs than needed, sorted by launch time; of all windows of consecutive "
    "runs the one with the median score counts (of two middle ones the slower).",
    "resumed": "resumed: an interrupted run that went on from a checkpoint is for research. Unless it is "
    "counted (--include-resumed) the interrupted log is, as a run that missed its target.",
    "study": "study: trained to the end of its budget, not timed to the target: no score.",
    "scaling.json": "scaling.json: of a closed submission that took fewer samples than its reference; "
    "MLCommons publishes the score times this factor. All other minutes and intervals are without it.",
    "disturbed": "disturbed: other programs, a host or a slow GPU shared the machine during these runs, or "
    "took threads from them, or their steps were slower than in the other runs of the set; their times "
    "measure that, too. MLPerf's rule counts every run; --leave-out-disturbed shows the score without these.",
    "missed": "missed: the run counts as infinitely slow. A score with one has no interval: one more of them "
    "leaves no score, and the runs do not say how often that happens.",
    "more than one recipe": "more than one recipe: a set is one configuration, made in one way by one code. "
    "Each recipe has a folder of its own; `ttt check` names the results that differ.",
    "reported": "reported: published by MLCommons (Open division), from reported.yaml; not measured here.",
    masked_accuracy.MARK: masked_accuracy.NOTE,
}
COMPACT = ("minutes", "95 % interval", "speed-up", "95 % interval", "runs")
Speedups = Mapping[str, Speedup]


def notes(scores: Sequence[Score]) -> list[str]:
    """Return the notes that must stand beside these scores."""
    lines = [note for mark, note in NOTES.items() if any(mark in s.label for s in scores)]
    lines += [f"disturbed: {text}" for s in scores for text in s.disturbed]
    lines += [f"missed: {text}" for s in scores for text in s.missed]
    others = ((s, name_processors(s, scores)) for s in scores if s.configuration != BASELINE)
    return lines + [f"no speed-up: {printable(s.source)}: {why}." for s, why in others if why]


def number(value: float) -> str:
    """Return a count or a rate with thousands separated; below 100 with a decimal."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def duration(minutes: float, unit: str = "") -> str:
    """Return minutes, with their unit in a sentence; below 5 minutes seconds, too."""
    return f"{minutes:.3f}{unit}" + (f" ({minutes * 60:.1f} s)" if minutes < 5 else "")


def percent(share: float) -> str:
    """Return a share as text: 5 %, 3.7 %."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def between(limits: Interval | None, form: Form = TWO_DIGITS) -> str:
    return f"{form(limits.low)} to {form(limits.high)}" if limits else DASH


def spread(value: float, limits: Interval | None, form: Form = TWO_DIGITS, unit: str = "") -> str:
    """Return a value with its unit and, in brackets, its interval where it has one."""
    return f"{form(value)}{unit}" + (f" ({between(limits, form)})" if limits else "")


def spread_of(estimate: Estimate, form: Form = TWO_DIGITS, unit: str = "") -> str:
    return spread(estimate.value, estimate.interval, form, unit)


def open_console(width: int) -> Console:
    """Return a console of the terminal's width, else of `width` columns."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else width)


def line_console(**options: Any) -> Console:
    """Return a console that prints lines as they are: not highlighted, read as markup or wrapped."""
    return Console(highlight=False, markup=False, soft_wrap=True, **options)


def make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = ()
) -> Table:
    """Return rows of text, which is no markup, as a table; columns in `left` hold words, others numbers."""
    table = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_scores(scores: Sequence[Score], faster: Speedups, notes: Sequence[str], *, is_wide: bool) -> None:
    """Print the scores by benchmark and size. `is_wide`: whole tables even if they do not fit."""

    def kind(score: Score) -> tuple[str, bool]:
        return score.benchmark, score.is_proxy

    groups = [list(group) for _, group in groupby(sorted(scores, key=kind), key=kind)]
    tables = [table for group in groups for table in score_tables(group, faster)]
    console = open_console(PIPE_WIDTH)
    widest = max(Console(width=MAX_WIDTH).measure(table).maximum for table in tables if table)
    if is_wide or not console.is_terminal or widest <= console.width:
        Console(width=max(widest, console.width), highlight=False, markup=False).print(*tables, sep="\n")
        console.print(Text(COLUMNS))
    else:
        for group in groups:
            lines = compact_lines(group, faster, console.width)
            console.print(Text("\n".join([*lines, ""])), soft_wrap=True)
        console.print(Text(REST))
    for line in notes:
        console.print(Text(line))


def score_cells(score: Score, speedup: Speedup | None, beside: Sequence[Score] = ()) -> dict[str, str]:
    """Return the columns of a table row; a dash where the logs do not say.

    The label has the target if a score `beside` it in the table has another.
    """
    share = score.evaluation_share
    return {
        "system": score.system,
        "runs": f"{score.num_converged} of {len(score.runs)}",
        "minutes": duration(score.minutes) if score.minutes else "no score",
        "label": score.label + target_beside(score, beside, ", target"),
        "95 % interval": between(score.interval, "{:.3f}".format),
        "samples to target": number(score.samples_to_target) if score.samples_to_target else DASH,
        "samples/s": number(score.samples_per_s) if score.samples_per_s else DASH,
        "evaluation": f"{share:.1%}" if share is not None else DASH,
        "quality": f"{score.quality:.5f}" if score.quality else DASH,
        "speed-up": spread(speedup.ratio, speedup.interval, unit="x") if speedup else DASH,
        "runs could show": f"{speedup.detectable:.1%}" if speedup and speedup.detectable else DASH,
    }


def target_beside(score: Score, beside: Sequence[Score], name: str) -> str:
    """Return the target of a score after `name`; '' if it is unknown, or the same for all `beside` it."""
    is_alone = score.target < 1 and any(other.target != score.target for other in beside)
    return f"{name} {score.target:g}" if is_alone else ""


def size_title(size: str) -> str:
    """Return a size as it stands over figures: a proxy is called one."""
    return f"{size} (a proxy)" if size == "mini" else size


def score_title(score: Score) -> str:
    return f"{score.benchmark or 'unknown benchmark'}{', mini (proxy)' if score.is_proxy else ''}"


def score_tables(scores: Sequence[Score], faster: Speedups) -> list[Table | str]:
    """Return the scores of one benchmark and size, each with its label, and the parts of their mean minutes.

    An empty line follows.
    """
    rows, terms = [], []
    for score in scores:
        cells = score_cells(score, faster.get(score.source), scores)
        cells["system"] += "\n" + cells.pop("label").replace(", runs ", "\nruns ")
        rows.append(cells)
        if factors := score.factors:
            minutes = f"{factors.minutes.value:.3f}\n{counted(factors.num_runs, 'run')}"
            estimates = {column: getattr(factors, field) for column, field in TERMS.items()}
            terms.append(
                {"system": score.system, "mean minutes": minutes}
                | {
                    column: spread_of(estimate, number if estimate.value >= 50 else "{:.4f}".format)
                    for column, estimate in estimates.items()
                }
            )
    tables = [_fold(score_title(scores[0]), rows)] + ([_fold(TERMS_TITLE, terms)] if terms else [])
    return [*tables, ""]


def _fold(title: str, rows: Sequence[dict[str, str]]) -> Table:
    """Make a narrow table: a header's last word and text in brackets stand on a second line."""
    columns = ["\n".join(name.rsplit(maxsplit=1)) for name in rows[0]]
    folded = [[cell.replace(" (", "\n(") for cell in row.values()] for row in rows]
    return make_table(title, columns, folded, left=("system",))


def compact_lines(scores: Sequence[Score], faster: Speedups, width: int) -> list[str]:
    """Return lines for one benchmark and size: each name and label, below them the figures in columns."""
    rows: list[Sequence[str]] = [COMPACT]
    labels = []
    for score in scores:
        cells = score_cells(score, faster.get(score.source), scores)
        ratio, _, limits = cells["speed-up"].partition(" (")
        limits = limits.rstrip(")") or DASH
        labels.append(cells["label"])
        rows.append((cells["minutes"], cells["95 % interval"], ratio, limits, cells["runs"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *figures = (
        "  " + "  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows
    )
    lines = [score_title(scores[0]), header]
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    for score, label, line in zip(scores, labels, figures, strict=True):
        lines += [*wrapper.wrap(f"{score.system} ({label})"), line]
    return lines
