"""Scores in a terminal: whole tables where they fit, compact ones where they do not, then the notes."""

import sys
import textwrap
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.evidence.intervals import Estimate
from common.evidence.score import Score, Speedup
from common.evidence.text import DASH, between, duration, number, spread, spread_of

PIPE_WIDTH = 140  # columns of the notes, where there is no terminal to ask
MAX_WIDTH = 10_000  # more than any table needs
TERMS = {  # column -> field of Factors
    "samples": "samples",
    "samples/s": "samples_per_s",
    "evaluation": "evaluation",
    "start-up": "startup",
    "overshoot": "overshoot",
}
TERMS_TITLE = "mean minutes = samples / (60 x samples/s) + evaluation + start-up + overshoot"
REST = (
    "`ttt score --wide` adds samples to target, samples/s, evaluation, quality, what the runs could show, "
    "and where the minutes went."
)
Speedups = Mapping[str, Speedup]


def print_scores(
    measured: Sequence[Score],
    published: Sequence[Score],
    faster: Speedups,
    notes: Sequence[str],
    *,
    is_wide: bool,
) -> None:
    """Print the scores by benchmark and size. `is_wide`: whole tables also where they do not fit."""
    scores = [*measured, *published]
    groups = [[s for s in scores if s.group[:2] == key] for key in sorted({s.group[:2] for s in scores})]
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    whole = []
    for group in groups:
        split = [score for score in group if score in measured and score.factors]
        whole.append([score_table(group, faster), *([factor_table(split)] if split else [])])
    widest = max(Console(width=MAX_WIDTH).measure(table).maximum for tables in whole for table in tables)
    if is_wide or not console.is_terminal or widest <= console.width:
        for tables in whole:
            Console(width=max(widest, console.width), highlight=False).print(*tables, "")
    else:
        for group in groups:
            lines = compact_lines(group, faster, console.width)
            console.print(Text("\n".join([*lines, ""])), soft_wrap=True)
        console.print(Text(REST))
    for line in notes:
        console.print(Text(line))


def score_cells(score: Score, speedup: Speedup | None) -> dict[str, str]:
    """Return the columns of a table row; a dash where the logs do not say."""
    share = score.evaluation_share
    return {
        "system": score.system,
        "runs": f"{score.num_converged} of {len(score.runs)}",
        "minutes": duration(score.minutes) if score.minutes else "no score",
        "label": score.label,
        "95 % interval": between(score.interval, "{:.3f}".format),
        "samples to target": number(score.samples_to_target) if score.samples_to_target else DASH,
        "samples/s": number(score.samples_per_s) if score.samples_per_s else DASH,
        "evaluation": f"{share:.1%}" if share is not None else DASH,
        "quality": f"{score.quality:.5f}" if score.quality else DASH,
        "speed-up": spread(speedup.ratio, speedup.interval, unit="x") if speedup else DASH,
        "runs could show": f"{speedup.detectable:.1%}" if speedup and speedup.detectable else DASH,
    }


def score_title(score: Score) -> str:
    return f"{score.benchmark or 'unknown benchmark'}{', mini (proxy)' if score.is_proxy else ''}"


def score_table(scores: Sequence[Score], faster: Speedups) -> Table:
    """Return the scores of one benchmark and size, each with its label."""
    rows = []
    for score in scores:
        cells = score_cells(score, faster.get(score.source))
        cells["system"] += "\n" + cells.pop("label").replace(", runs ", "\nruns ")
        rows.append(cells)
    return make_table(score_title(scores[0]), rows)


def factor_table(scores: Sequence[Score]) -> Table:
    """Make a table of the two factors and the other parts of the mean run's minutes."""
    rows = []
    for score in scores:
        if factors := score.factors:
            total = f"{factors.minutes.value:.3f}\n{factors.num_runs} runs"
            terms = {column: _term(getattr(factors, field)) for column, field in TERMS.items()}
            rows.append({"system": score.system, "mean minutes": total} | terms)
    return make_table(TERMS_TITLE, rows)


def _term(estimate: Estimate) -> str:
    return spread_of(estimate, number if estimate.value >= 50 else "{:.4f}".format)


def make_table(title: str, rows: Sequence[dict[str, str]]) -> Table:
    table = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for name in rows[0]:
        header = "\n".join(name.rsplit(maxsplit=1))
        table.add_column(header, justify="left" if name == "system" else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*(Text(cell.replace(" (", "\n(")) for cell in cells.values()))
    return table


def compact_lines(scores: Sequence[Score], faster: Speedups, width: int) -> list[str]:
    """Return lines for one benchmark and size: each name and label, below them the figures in columns."""
    header = ("minutes", "95 % interval", "speed-up", "95 % interval", "runs")
    rows = []
    for score in scores:
        cells = score_cells(score, faster.get(score.source))
        ratio, _, limits = cells["speed-up"].partition(" (")
        limits = limits.rstrip(")") or DASH
        rows.append((cells["minutes"], cells["95 % interval"], ratio, limits, cells["runs"]))
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def align(cells: Sequence[str]) -> str:
        return "  " + "  ".join(cell.rjust(size) for cell, size in zip(cells, widths, strict=True))

    lines = [score_title(scores[0]), align(header)]
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    for score, row in zip(scores, rows, strict=True):
        lines += [*wrapper.wrap(f"{score.system} ({score.label})"), align(row)]
    return lines
