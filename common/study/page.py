"""The parts of this folder's pages that figures make: no number in them is typed.

`python -m common.study.page --write` makes them again: in README.md the findings of the committed studies,
from their JSON, in SIMULATIONS.md the table of simulations. Tests compare them with the pages.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.evidence import intervals
from common.evidence.intervals import ALPHA, Estimate, Interval
from common.evidence.ledger import read_ledger
from common.evidence.page import fill_block
from common.evidence.text import spread_of
from common.files import save_text
from common.repository import ROOT
from common.study import simulations
from common.study.ablation import amdahl

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
        answers = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
        link = f"([curves](../../results/study/sweep/{stem}.svg))"
        items.append(f"- {name} {' '.join(describe_sweep(answers))} {link}.\n")
    return "".join(items)


def describe_sweep(answers: dict[str, Any]) -> Iterator[str]:
    """Yield the times to the target, their ratio, and where one curve is shown to be ahead."""
    level = next(entry for entry in answers["equal_quality"] if entry["quality"] == answers["target"])
    times = [f"{describe(value)} as `{name}`" for name, value in level["seconds"].items()]
    yield f"reaches {answers['target']:.2f} in {' and in '.join(times)};"
    for name, value in level["times_faster"].items():
        ratio = read(value["estimate"])
        limits = ratio.interval
        is_shown = limits is not None and not limits.low <= 1 <= limits.high
        could = f", which is not shown to differ from 1: {1 + value['detectable']:.2f}x could be"
        yield f"`{name}` is {spread_of(ratio, unit='x')} as fast{'' if is_shown else could}."
    for pair in answers["comparisons"]:
        yield from describe_pair(pair, answers["crossings"])


def describe_ablations() -> str:
    """Return an item for each committed ablation: the effect on samples that its runs could show at all."""
    items = []
    for name, stem in ABLATIONS.items():
        path = ROOT / "results" / "study" / "ablate-optimized" / f"{stem}.ledger.json"
        ledger = read_ledger(path)
        if isinstance(ledger, str):
            raise ValueError(f"{path}: {ledger}")
        logs = {
            state.name: [math.log(run.samples) for run in state.runs if run.samples and not run.is_bound]
            for state in ledger.states
        }
        deviation, freedom = amdahl.spread(logs.values())
        effects = [effect for row in ledger.rows for effect in (row.alone, row.left_out)]
        sides = [
            sorted((len(logs[effect.before]), len(logs[effect.after])))
            for effect in effects
            if effect.samples and not effect.together
        ]
        few, many = min(sides, key=lambda counts: sum(1 / count for count in counts))
        shift = intervals.detectable_shift(freedom, ALPHA / len(ledger.rows))
        least = math.exp(shift * deviation * math.sqrt(1 / few + 1 / many))
        link = f"([ledger](../../results/study/ablate-optimized/{stem}.ledger.json))"
        runs = f"at most {many} runs against {few}, a spread from {freedom} degrees of freedom"
        items.append(
            f"- {name}: no effect of a method on samples to the target below {least:.3g}x could be shown, "
            f"with {runs} and Holm's correction for {len(ledger.rows)} methods {link}.\n"
        )
    return "".join(items)


def describe_pair(pair: dict[str, Any], crossings: list[dict[str, Any]]) -> Iterator[str]:
    names = {pair["one"], pair["other"]}
    shown = [gap for gap in pair["gaps"] if (gap["difference"]["p_value"] or 1) < ALPHA]
    for name, sign in ((pair["one"], 1), (pair["other"], -1)):
        ahead = [SECONDS(gap["seconds"]) for gap in shown if gap["difference"]["value"] * sign > 0]
        if ahead:
            yield f"Of equal times `{name}` is shown to be ahead at {', '.join(ahead)} s."
    open_gaps = [gap for gap in pair["gaps"] if gap not in shown and gap["difference"]["detectable"]]
    if open_gaps:
        least = min(gap["difference"]["detectable"] for gap in open_gaps)
        count = f"{len(open_gaps)} of {len(pair['gaps'])}"
        could = f"the runs could show {100 * least:.1f} points or more"
        yield f"At {count} times no difference is shown; {could}."
    crossed = [entry for entry in crossings if {entry["leader"], entry["other"]} == names]
    for entry in crossed:
        yield f"`{entry['leader']}` overtakes after {SECONDS(entry['seconds'])} s."
    if not crossed:
        yield "No crossing is shown"


def describe(value: dict[str, Any]) -> str:
    if value["estimate"] is None:
        return "no time that all runs need"
    return f"{value['bound']} {spread_of(read(value['estimate']), SECONDS, ' s')}".lstrip()


def read(estimate: dict[str, Any]) -> Estimate:
    limits = estimate["interval"]
    return Estimate(value=estimate["value"], interval=Interval(**limits) if limits else None)


def write() -> None:
    """Make the parts of both pages again; the simulations take about 25 s."""
    text = fill_block(PAGE.read_text(encoding="utf-8"), "sweeps", describe_sweeps())
    save_text(PAGE, fill_block(text, "ablations", describe_ablations()))
    table = simulations.write_table(simulations.simulate_all())
    text = TABLE_PAGE.read_text(encoding="utf-8")
    save_text(TABLE_PAGE, fill_block(text, "simulations", table))


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
