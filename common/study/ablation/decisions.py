"""Decide after each round of runs what is known of each switch, and which states need another seed.

The test and the runs it compares, one of each state with the same seed, are those of `ttt compare`; its 5 %
of false differences are shared among all switches and measures of an ablation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.evidence.intervals import ALPHA
from common.evidence.log import Log
from common.study.ablation.switches import State, Step, Switches
from common.study.compare.comparison import OF_RUNS, Margins, Result, Rule, judge_runs
from common.study.compare.report import limits_of, sentence

MEASURES = (OF_RUNS["samples"], OF_RUNS["quality"])
MARGINS = Margins(ratio=0.05, quality=0.005)


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A switch turned in a state, and what the runs with and without it decide about each measure."""

    title: str
    step: Step
    rule: Rule
    results: Sequence[Result]

    @property
    def is_over(self) -> bool:
        return all(result.is_over for result in self.results)


def decide_switches(
    switches: Switches, logs: Mapping[State, Sequence[Log]], max_seeds: int, target: float
) -> list[Decided]:
    """Return what is known of each switch, alone and left out; a state without runs leaves it undecided."""
    steps = {}
    for switch in switches.switches:
        steps[f"{switch.name} alone"] = switches.alone(switch)
        steps[f"{switch.name} put back"] = switches.left_out(switch)
    rule = Rule(margins=MARGINS, max_pairs=max_seeds, alpha=ALPHA / (len(MEASURES) * len(steps)))
    decided = []
    for title, step in steps.items():
        runs = logs.get(step.before, ()), logs.get(step.after, ())
        names = switches.describe(step.before), switches.describe(step.after)
        results = judge_runs(MEASURES, runs, names, rule, target)
        decided.append(Decided(title=title, step=step, rule=rule, results=results))
    return decided


def states_in_question(decided: Sequence[Decided]) -> set[State]:
    pending = [one.step for one in decided if not one.is_over]
    return {state for step in pending for state in (step.before, step.after)}


def describe_decisions(decided: Sequence[Decided]) -> Iterator[str]:
    """Yield a line for each switch and measure that is decided, and one that names the others."""
    undecided = []
    for one in decided:
        for result in one.results:
            if result.verdict in ("better", "worse", "equivalent"):
                words = sentence(result, one.rule, "it", reference="")
                yield f"{one.title}, {result.measure.what}: {limits_of(result)}: {words}"
            elif result.pairs:
                undecided.append(f"{one.title} ({result.measure.what})")
    if undecided:
        most = max(len(result.pairs) for one in decided for result in one.results)
        yield f"Nothing is shown, with at most {most} pairs of runs, of: {', '.join(undecided)}."
