"""The measurements of an ablation, and tests of what they show, with Holm's correction.

Of times the signs of the turns are tested, of samples and quality contrasts of states with a common spread.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.evidence import intervals
from common.evidence.intervals import ALPHA, Estimate
from common.evidence.ledger import EffectTest, Row, Trained
from common.study.ablation import amdahl
from common.study.ablation.switches import State, Step, Switches

Raw = Mapping[str, tuple[float, float | None]]  # figure -> p, uncorrected, and what could be shown


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements of each state.

    `turns` are the seconds of a sample in each turn, over those of the base in the same turn; `base_s` are
    the seconds of the base. `runs` are those of the states that were trained, `shares` the parts of a step.
    """

    base_s: float
    turns: Mapping[State, Sequence[float]]
    runs: Mapping[State, Sequence[Trained]]
    shares: Mapping[str, float]

    def seconds(self, state: State) -> float:
        return self.base_s * statistics.median(self.turns[state])

    def log_ratios(self, after: State, before: State) -> list[float]:
        pairs = zip(self.turns[after], self.turns[before], strict=True)
        return [math.log(one / other) for one, other in pairs]

    def log_samples(self, state: State) -> list[float]:
        """Take the logarithms of samples to the target; none where they are not known of all runs."""
        runs = self.runs.get(state, ())
        known = [math.log(run.samples) for run in runs if run.samples and not run.is_bound]
        return known if len(known) == len(runs) else []

    def qualities(self, state: State) -> list[float]:
        return [run.quality for run in self.runs.get(state, ())]

    def contrast(
        self, values: Callable[[State], list[float]], factors: Mapping[State, float]
    ) -> Estimate | None:
        """Return the sum of states' means, each times its factor; None where a state has no values.

        Its interval is from the spread that the values of all states have in common.
        """
        terms = [(factor, values(state)) for state, factor in factors.items()]
        if not all(of_state for _, of_state in terms):
            return None
        return amdahl.contrast(terms, self.spread(values))

    def test(
        self, values: Callable[[State], list[float]], tests: Sequence[Mapping[State, float]]
    ) -> list[tuple[float, float] | None]:
        """Return of each contrast the p of none, uncorrected, and what could be shown; None if not known."""
        common = self.spread(values)
        results: list[tuple[float, float] | None] = []
        for factors in tests:
            terms = [(factor, values(state)) for state, factor in factors.items()]
            is_known = all(of_state for _, of_state in terms)
            results.append(amdahl.contrast_test(terms, common, len(tests)) if is_known else None)
        return results

    def test_all(self, tests: Sequence[Mapping[State, float]]) -> list[dict[str, tuple[float, float | None]]]:
        """Test samples, as a factor, and quality of each contrast, where they are known."""
        rows: list[dict[str, tuple[float, float | None]]] = [{} for _ in tests]
        for row, samples in zip(rows, self.test(self.log_samples, tests), strict=True):
            if samples:
                row["samples"] = samples[0], math.expm1(samples[1])
        for row, quality in zip(rows, self.test(self.qualities, tests), strict=True):
            if quality:
                row["quality"] = quality
        return rows

    def spread(self, values: Callable[[State], list[float]]) -> tuple[float, int]:
        return amdahl.spread([values(state) for state in self.runs])


def test_effects(measured: Measurements, steps: Sequence[Step]) -> list[dict[str, EffectTest]]:
    """Return the tests of no effect of each switch of a table, by figure, corrected for their number."""
    raw = measured.test_all([{step.after: 1.0, step.before: -1.0} for step in steps])
    for step, tests in zip(steps, raw, strict=True):
        tests["throughput"] = intervals.sign_p_value(measured.log_ratios(step.after, step.before)), None
    return correct(raw)


def turns_to_show(num_switches: int) -> int:
    """Return the fewest turns whose signs, all equal, are below 5 % after Holm's correction."""
    return 1 + math.ceil(math.log2(num_switches / ALPHA))


def correct(raw: Sequence[Raw]) -> list[dict[str, EffectTest]]:
    """Apply Holm's correction to the p values of each figure, for the rows that have it."""
    corrected: list[dict[str, EffectTest]] = [{} for _ in raw]
    for name in dict.fromkeys(name for tests in raw for name in tests):
        rows = [row for row, tests in enumerate(raw) if name in tests]
        for row, p_value in zip(rows, intervals.holm([raw[row][name][0] for row in rows]), strict=True):
            corrected[row][name] = EffectTest(p_value=p_value, detectable=raw[row][name][1])
    return corrected


def test_pairs(
    measured: Measurements, lost_ms: Sequence[Sequence[float]], factors: Sequence[Mapping[State, float]]
) -> list[dict[str, EffectTest]]:
    """Return the tests of no interaction of each pair, by figure, corrected for their number."""
    raw = measured.test_all(factors)
    for tests, of_turns in zip(raw, lost_ms, strict=True):
        tests["lost_ms"] = intervals.sign_p_value(of_turns), None
    return correct(raw)


def exceed_bounds(measured: Measurements, switches: Switches, rows: Sequence[Row]) -> list[str]:
    """Return the switches that gain more than their bound: the signs of the turns, Holm for all bounds."""
    bounded = [row for row in rows if row.bound is not None and math.isfinite(row.bound)]
    steps = {switch.name: switches.alone(switch) for switch in switches.switches}
    p_values = []
    for row in bounded:
        gains = [-log for log in measured.log_ratios(steps[row.name].after, steps[row.name].before)]
        p_values.append(intervals.sign_p_value(gains, math.log(row.bound or 1.0), is_above=True))
    return [row.name for row, p in zip(bounded, intervals.holm(p_values), strict=True) if p < ALPHA]
