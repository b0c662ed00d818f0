"""The parts of this folder's pages that figures make: no number in them is typed.

`python -m common.study.page --write` makes them again: in README.md the findings of the committed studies,
from their JSON, in SIMULATIONS.md the table of simulations. Tests compare them with the pages.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from common.evidence.ledger import Ledger, ratio, read_ledger
from common.evidence.page import fill_block
from common.evidence.text import spread_of
from common.files import save_text
from common.repository import ROOT
from common.study import simulations, trials
from common.study.ablation.measurements import Groups, log_samples
from common.study.curves import Answers, Comparison, Crossing
from common.study.sweep import with_bound

PAGE = Path(__file__).with_name("README.md")
TABLE_PAGE = PAGE.with_name("SIMULATIONS.md")
SWEEPS = {"BERT": "bert-mini", "The ResNet proxy": "resnet-mini"}
ABLATIONS = {"BERT": "bert-mini", "ResNet": "resnet-mini"}
SECONDS = "{:.1f}".format


def describe_sweeps() -> str:
    """Write an item for each committed sweep, from the JSON beside its logs."""
    folder = ROOT / "results" / "study" / "sweep"
    items = []
    for name, stem in SWEEPS.items():
        answers = TypeAdapter(Answers).validate_json((folder / f"{stem}.json").read_bytes())
        link = f"([curves](../../results/study/sweep/{stem}.svg))"
        items.append(f"- {name} {' '.join(describe_sweep(answers))} {link}.\n")
    return "".join(items)


def describe_sweep(answers: Answers) -> Iterator[str]:
    """Yield the times to the target, their ratio, and where one curve is shown to be ahead."""
    level = next(level for level in answers.equal_quality if level.quality == answers.target)
    times = [
        f"{with_bound(value, SECONDS, ' s')} as `{name}`" if value.estimate else "no time that all runs need"
        for name, value in level.seconds.items()
    ]
    yield f"reaches {answers.target:.2f} in {' and in '.join(times)};"
    for name, value in level.times_faster.items():
        assert value.estimate is not None
        limits = value.estimate.interval
        is_shown = limits is not None and not limits.holds(1)
        could = f", which is not shown to differ from 1: {1 + (value.detectable or 0):.2f}x could be"
        yield f"`{name}` is {spread_of(value.estimate, unit='x')} as fast{'' if is_shown else could}."
    for pair in answers.comparisons:
        yield from describe_pair(pair, answers.crossings)


def describe_trials() -> str:
    """Write an item for each committed search of hyperparameters: what was best, and the gain at the best."""
    folder = ROOT / "results" / "study" / "trials"
    items = []
    for name, stem in SWEEPS.items():
        by_configuration = trials.read(folder / f"{stem}.json")
        best = (
            f"of `{configuration}` "
            + (f"`{' '.join(some[0].settings)}`" if some[0].settings else "the recipe as it is")
            for configuration, some in by_configuration.items()
        )
        gains = " ".join(trials.describe_best(by_configuration)).removesuffix(".")
        link = f"([trials](../../results/study/trials/{stem}.json))"
        items.append(f"- {name}: the best trial is {' and '.join(best)}. {gains} {link}.\n")
    return "".join(items)


def describe_ablations() -> str:
    """Return an item for each committed ablation: gains of throughput, and the least effect on samples."""
    items = []
    for name, stem in ABLATIONS.items():
        path = ROOT / "results" / "study" / "ablate-optimized" / f"{stem}.ledger.json"
        ledger = read_ledger(path)
        if isinstance(ledger, str):
            raise ValueError(f"{path}: {ledger}")
        link = f"([ledger](../../results/study/ablate-optimized/{stem}.ledger.json))"
        items.append(f"- {name}: {describe_gains(ledger)} {describe_samples(ledger)} {link}.\n")
    return "".join(items)


def describe_gains(ledger: Ledger) -> str:
    """Describe the gain of throughput, and what each method brings of it on top of the others."""
    (whole,) = (ratio(entry.measured) for entry in ledger.compositions if entry.of == "throughput")
    shown, rest = [], []
    for row in sorted(ledger.rows, key=lambda row: -row.left_out.throughput.value):
        effect, name = row.left_out, f"`{row.name}`"
        limits, test = effect.throughput.interval, effect.tests.get("throughput")  # earlier ledgers: no tests
        if test.is_shown if test else limits is not None and not limits.holds(1):
            others = " and ".join(f"`{other}`" for other in effect.together)
            needing = f" with {others}" * bool(others)
            shown.append(f"{name}{needing} brings {ratio(effect.throughput)}")
        else:
            rest.append(name)
    unknown = f"; of {', '.join(rest)} no effect is shown" * bool(rest)
    gain = f"`{ledger.configuration}` trains {whole} as fast as `{ledger.base}`."
    return f"{gain} On top of the others {', '.join(shown)}{unknown}."


def describe_samples(ledger: Ledger) -> str:
    """Describe the least effect of a method on samples to the target that the runs could show."""
    samples = Groups({state.name: log_samples(state.runs) for state in ledger.states})
    effects = [effect for row in ledger.rows for effect in (row.alone, row.left_out)]
    steps = [(effect.before, effect.after) for effect in effects if effect.samples and not effect.together]
    contrasts = {step: samples.contrast(dict(zip(step, (-1.0, 1.0), strict=True))) for step in steps}
    least, step = min(
        (contrast.detectable(len(ledger.rows)), step) for step, contrast in contrasts.items() if contrast
    )
    few, many = sorted(len(samples.values[state]) for state in step)
    runs = f"at most {many} runs against {few}, a spread from {samples.spread[1]} degrees of freedom"
    return (
        f"No effect of a method on samples to the target below {math.exp(least):.3g}x could be shown, with "
        f"{runs} and Holm's correction for {len(ledger.rows)} methods"
    )


def describe_pair(pair: Comparison, crossings: Sequence[Crossing]) -> Iterator[str]:
    for name, sign in ((pair.one, 1), (pair.other, -1)):
        if ahead := [SECONDS(gap.seconds) for gap in pair.gaps if gap.sign == sign]:
            yield f"Of equal times `{name}` is shown to be ahead at {', '.join(ahead)} s."
    undecided = [gap.difference.detectable for gap in pair.gaps if not gap.sign]
    if known := [detectable for detectable in undecided if detectable]:
        could = f"the runs could show {100 * min(known):.1f} points or more"
        yield f"At {len(known)} of {len(pair.gaps)} times no difference is shown; {could}."
    crossed = [entry for entry in crossings if {entry.leader, entry.other} == {pair.one, pair.other}]
    for entry in crossed:
        yield f"`{entry.leader}` overtakes after {SECONDS(entry.seconds)} s."
    if not crossed:
        yield "No crossing is shown"


def write() -> None:
    text = fill_block(PAGE.read_text(encoding="utf-8"), "sweeps", describe_sweeps())
    text = fill_block(text, "trials", describe_trials())
    save_text(PAGE, fill_block(text, "ablations", describe_ablations()))
    table = simulations.write_table(simulations.simulate_all())
    text = TABLE_PAGE.read_text(encoding="utf-8")
    save_text(TABLE_PAGE, fill_block(text, "simulations", table))


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
