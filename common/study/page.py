"""Generate the findings and tables in this folder's pages: nobody types a number between their marks.

`python -m common.study.page --write` makes them again: in README.md the findings of the committed studies,
from their files, in SIMULATIONS.md the tables of simulations; in the README of the repository the speed-ups
after a search. Tests compare them with the pages.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from common.evidence.ledger import Ledger, ratio, read_ledger, unless_shown
from common.evidence.log import read_log
from common.evidence.page import fill_block, fill_blocks
from common.evidence.records import counted
from common.evidence.score import BASELINE
from common.evidence.text import spread_of
from common.files import save_text
from common.repository import ROOT
from common.study import simulations, trials
from common.study.ablation.measurements import Groups, log_samples
from common.study.compare.report import Comparison, limits_of
from common.study.curves import Answers, Level, Value
from common.study.sweep import describe_comparisons, with_bound

FRONT, PAGE = ROOT / "README.md", Path(__file__).with_name("README.md")
TABLE_PAGE = PAGE.with_name("SIMULATIONS.md")
STUDIES = ROOT / "results" / "study"
SWEEPS = {"BERT": "bert-mini", "The ResNet proxy": "resnet-mini"}
ABLATIONS = {"BERT": "bert-mini", "ResNet": "resnet-mini"}
MUON = "compare-baseline-optimized_muon"
COMPARED = {"BERT in float32": f"{MUON}/bert-mini", "BERT in bfloat16": f"{MUON}-bf16/bert-mini"}
TUNED = {"BERT": "bert", "ResNet": "resnet"}
KEPT = re.compile(
    r"^#   (\S.*?)  +(\S+x \([^)]*\))  .*  kept  ", re.M
)  # a row of the table in a file of `-O1`
SECONDS = "{:.1f}".format
NOT_SHOWN = ", not shown to differ from 1"


def list_items(names: Mapping[str, str], describe: Callable[[str], str]) -> str:
    return "".join(f"- {name}{describe(stem)}\n" for name, stem in names.items())


def describe_sweep(stem: str) -> str:
    """Describe a committed sweep from the JSON beside its logs."""
    return f" {' '.join(describe_answers(read_sweep(stem)))} ([curves](../../results/study/sweep/{stem}.svg))"


def read_sweep(stem: str) -> Answers:
    return TypeAdapter(Answers).validate_json((STUDIES / f"sweep/{stem}.json").read_bytes())


def describe_answers(answers: Answers) -> Iterator[str]:
    """Yield the times to the target, their ratio, and where one curve is shown to be ahead."""
    level = at_target(answers)
    times = [f"{with_bound(value, SECONDS, ' s')}, as `{name}`" for name, value in level.seconds.items()]
    yield f"reaches {answers.target:.2f} in {' and in '.join(times)};"
    for name, value in level.times_faster.items():
        could = f", which is not shown to differ from 1: {1 + (value.detectable or 0):.2f}x could be"
        factor, is_shown = factor_of(value)
        yield f"`{name}` is {factor} as fast{'' if is_shown else could}."
    yield from (line.strip() for line in describe_comparisons(answers))


def at_target(answers: Answers) -> Level:
    return next(level for level in answers.equal_quality if level.quality == answers.target)


def factor_of(value: Value) -> tuple[str, bool]:
    """Write a ratio with its interval; also whether it is shown to differ from 1."""
    assert value.estimate is not None
    limits = value.estimate.interval
    return spread_of(value.estimate, unit="x"), limits is not None and not limits.holds(1)


def describe_trials(stem: str) -> str:
    """Describe a committed search of hyperparameters: what was best, and the gain at the best."""
    by_configuration = trials.read(STUDIES / f"trials/{stem}.json")
    best = (
        f"of `{configuration}` "
        + (f"`{' '.join(some[0].settings)}`" if some[0].settings else "the recipe as it is")
        for configuration, some in by_configuration.items()
    )
    gains = " ".join(trials.describe_best(by_configuration)).removesuffix(".")
    link = f"([trials](../../results/study/trials/{stem}.json))"
    return f": the best trial is {' and '.join(best)}. {gains} {link}."


def describe_searched() -> str:
    """Describe the speed-ups after the same search on both sides, for the README of the repository."""
    parts, budgets, numbers = [], [], set()
    for name, stem in ABLATIONS.items():
        sides = trials.read(STUDIES / f"trials/{stem}.json")
        best = {side: some[0] for side, some in sides.items()}
        numbers |= {(len(some), len(some[0].minutes)) for some in sides.values()}
        factor, is_shown = trials.compare(*best.values())
        unsure = "" if is_shown else NOT_SHOWN
        changed = any(trial.settings for trial in best.values())
        unchanged = "" if changed else ", where no trial beat the recipes"
        parts.append(f"{name} {factor}{unsure}{unchanged}{trials.note_disturbed(best, *best)}")
        (faster,) = at_target(read_sweep(stem)).times_faster.values()
        factor, is_shown = factor_of(faster)
        budgets.append(f"{name} {factor}{'' if is_shown else NOT_SHOWN}")
    ((num_trials, num_runs),) = numbers
    where = "[findings](common/study/README.md#findings-at-size-mini)"
    what = f"The best of {num_trials} trials of hyperparameters on both sides, {num_runs} runs each"
    swept = f"The best budget of `ttt sweep` on both sides: {'; '.join(budgets)}"
    return f"{what}, by training time: {'; '.join(parts)}. {swept} ({where}).\n"


def describe_ablation(stem: str) -> str:
    """Describe a committed ablation: gains of throughput, and the least effect on samples."""
    path = STUDIES / f"ablate-optimized/{stem}.ledger.json"
    ledger = read_ledger(path)
    if isinstance(ledger, str):
        raise ValueError(f"{path}: {ledger}")
    link = f"([ledger](../../results/study/ablate-optimized/{stem}.ledger.json))"
    figures = f"{describe_gains(ledger)} {describe_samples(ledger)}. {describe_pairs(ledger)}"
    return f": {figures}{describe_warnings(ledger)} {link}."


def describe_warnings(ledger: Ledger) -> str:
    """Count the warnings among the notes of a ledger; '' without one (`cells.list_warnings`)."""
    number = sum(note.startswith("warning: ") for note in ledger.notes)
    return f"; {counted(number, 'warning')} of mixed code and disturbed runs" * bool(number)


def describe_compared(stem: str) -> str:
    """Describe a committed comparison of time and samples, by runs to the target."""
    path = STUDIES / f"{stem}.json"
    comparison = TypeAdapter(Comparison).validate_json(path.read_bytes())
    one, other = comparison.names
    parts = " and ".join(
        f"{limits_of(result)} of the {result.measure.what} of `{one}` ({result.verdict})"
        for result in comparison.results
    )
    time = comparison.results[0].value
    assert time is not None
    pairs = f"by {counted(comparison.num_pairs, 'pair')} of runs"
    link = f"([comparison](../../results/study/{stem}.json))"
    return f": `{other}` reaches the target in {parts}, so {1 / time:.2f}x as fast, {pairs} {link}."


def describe_tuned(benchmark: str) -> str:
    """Describe what `-O1` kept, and how long its runs and those of `-O0` took."""
    (chosen,) = STUDIES.glob(f"tuned/*-mini-{BASELINE}-O1/{benchmark}/*.yaml")
    text = chosen.read_text(encoding="utf-8")
    kept = [f"`{change}` with {gain}" for change, gain in KEPT.findall(text)]
    largest = re.search(r"largest difference: (\S+) of the loss", text)
    times = []
    for level in ("-O1", ""):
        results = STUDIES.glob(f"tuned/*-mini-{BASELINE}{level}/{benchmark}/result_*.txt")
        minutes = [log.minutes if log.is_converged else None for log in map(read_log, sorted(results))]
        times.append(" and ".join(f"{60 * m:.1f} s" if m else "no time: it missed" for m in minutes))
    took = f"runs took {times[0]}, with `-O0` {times[1]}"
    if kept and largest:
        took += f"; in ten steps the losses differ by {largest[1]} of the loss at most"
    gains = f"{', '.join(kept)} (99 % intervals)" if kept else "nothing"
    return f": `-O1` kept {gains} ([YAML](../../{chosen.relative_to(ROOT)})); {took}."


def describe_gains(ledger: Ledger) -> str:
    """Describe the gain of throughput, and what each method brings of it on top of the others."""
    (whole,) = (ratio(entry.measured) for entry in ledger.compositions if entry.of == "throughput")
    shown, rest = [], []
    for row in sorted(ledger.rows, key=lambda row: -row.left_out.throughput.value):
        effect, name = row.left_out, f"`{row.name}`"
        if effect.tests["throughput"].is_shown:
            others = " and ".join(f"`{other}`" for other in effect.together)
            needing = f" with {others}" * bool(others)
            shown.append(f"{name}{needing} brings {ratio(effect.throughput)}")
        else:
            could = effect.tests["throughput"].detectable
            rest.append(f"{name}{f' ({1 + could:.2f}x could be)' if could else ''}")
    unknown = f"; of {', '.join(rest)} no effect is shown" * bool(rest)
    gain = f"`{ledger.configuration}` trains {whole} as fast as `{ledger.base}`."
    return f"{gain} On top of the others {', '.join(shown)}{unknown}."


def describe_samples(ledger: Ledger) -> str:
    """Describe the least effect of a method on samples to the target that the runs could show."""
    samples = Groups({state.name: log_samples(state.runs) for state in ledger.states})
    effects = [effect for row in ledger.rows for effect in (row.alone, row.left_out)]
    steps = [(effect.before, effect.after) for effect in effects if effect.samples and not effect.together]
    contrasts = {step: samples.contrast(dict(zip(step, (-1.0, 1.0), strict=True))) for step in steps}
    known = {step: contrast for step, contrast in contrasts.items() if contrast and contrast.error}
    least, step = min((contrast.detectable(len(ledger.rows)), step) for step, contrast in known.items())
    few, many = sorted(len(samples.values[state]) for state in step)
    runs = f"at most {many} runs against {few}, a spread from {samples.freedom} degrees of freedom"
    shown = [
        f"`{row.name}`"
        for row in ledger.rows
        if any(test.is_shown for e in (row.alone, row.left_out) if (test := e.tests.get("samples")))
    ]
    return (
        f"An effect on samples to the target is shown of {', '.join(shown) or 'no method'}; one of "
        f"{math.exp(least):.3g}x would be shown with 80 % probability, with {runs} and Holm's correction for "
        f"{len(ledger.rows)} methods, in each of two tables (alone, put back)"
    )


def describe_pairs(ledger: Ledger) -> str:
    """Describe which pairs of methods change a figure together otherwise than one by one."""
    parts = []
    for figure, what in {"samples": "samples to the target", "quality": "quality"}.items():
        pairs = [pair for pair in ledger.pairs if figure in pair.tests]
        if not pairs:
            continue
        names = [" with ".join(f"`{name}`" for name in p.names) for p in pairs if p.tests[figure].is_shown]
        most = max((p.tests for p in pairs), key=lambda tests: tests[figure].detectable or 0)
        could = "" if names else unless_shown(most, figure).removeprefix(", not shown")
        parts.append(f"in {what} of {' and of '.join(names) or 'none'}{could}")
    if not parts:
        return "No pair of methods was trained"
    has_aliases = any(pair.aliases for pair in ledger.pairs)
    others = ", each of which stands for others that this design cannot tell from it," if has_aliases else ""
    has_samples = any("samples" in pair.tests for pair in ledger.pairs)
    missed = "" if has_samples else "; runs missed the target, so samples are not compared"
    shown = f"an interaction is shown {' and '.join(parts)}"
    return f"Of {len(ledger.pairs)} pairs of methods{others} {shown}{missed}"


BLOCKS = {
    "sweeps": partial(list_items, SWEEPS, describe_sweep),
    "trials": partial(list_items, SWEEPS, describe_trials),
    "ablations": partial(list_items, ABLATIONS, describe_ablation),
    "compared": partial(list_items, COMPARED, describe_compared),
    "tuned": partial(list_items, TUNED, describe_tuned),
}
SIMULATED = {"simulations": simulations.TRUTHS, "limits": simulations.LIMITS}


def write() -> None:
    save_text(FRONT, fill_block(FRONT.read_text(encoding="utf-8"), "searched", describe_searched()))
    save_text(PAGE, fill_blocks(PAGE.read_text(encoding="utf-8"), BLOCKS))
    text = TABLE_PAGE.read_text(encoding="utf-8")
    for name, truths in SIMULATED.items():
        text = fill_block(text, name, simulations.write_table(truths, simulations.simulate_all(truths)))
    save_text(TABLE_PAGE, text)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
