"""The measurements of an ablation, Amdahl's bounds, and tests of what is shown, with Holm's correction.

Times are tested by the signs of the turns, samples and quality by contrasts of states with a common spread.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from common.evidence import intervals
from common.evidence.intervals import ALPHA, Estimate, Interval
from common.evidence.ledger import EffectTest, Row, Trained
from common.measure.profiling.verdict import max_speedup
from common.study.ablation.switches import State, Switches
from common.training.card import RELIEVES

PARTS = RELIEVES[:6]  # of a step
LOADING = PARTS[0]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A sum of means, each times its factor, with its standard error; `freedom` is 0 without a spread."""

    value: float
    error: float
    freedom: int

    @property
    def estimate(self) -> Estimate:
        if not self.freedom:
            return Estimate(value=self.value, interval=None)
        half = intervals.student_t(self.freedom) * self.error
        method = f"Student-t, common spread of {self.freedom} degrees"
        limits = Interval(low=self.value - half, high=self.value + half, method=method)
        return Estimate(value=self.value, interval=limits)

    @property
    def p_value(self) -> float:
        """Two-sided, of a contrast of 0, uncorrected."""
        return intervals.two_sided_p(self.value, self.error, self.freedom)

    def detectable(self, num_tests: int) -> float:
        """Return the least contrast with 80 % power at 5 % over so many tests, Holm's strictest step."""
        return intervals.detectable_shift(self.freedom, ALPHA / num_tests) * self.error


@dataclass(frozen=True)
class Groups:
    """The values of each state by seed, with a common spread.

    A value is modelled as state + seed + chance: a seed is good or bad for all states alike and drops out of
    their differences. States whose runs are equal to the bit count once for the spread.
    """

    values: Mapping[Any, Mapping[str, float]]

    @cached_property
    def columns(self) -> dict[Any, int]:
        """The column of each state with values in the design matrix of the fit."""
        distinct: dict[tuple[tuple[str, float], ...], int] = {}
        return {
            state: distinct.setdefault(tuple(sorted(values.items())), len(distinct))
            for state, values in self.values.items()
            if values
        }

    @cached_property
    def fit(self) -> tuple[np.ndarray, np.ndarray, int]:
        """The fitted values of the states, their covariance, and its degrees of freedom."""
        groups = {column: self.values[state] for state, column in self.columns.items()}
        seeds = sorted({seed for group in groups.values() for seed in group})
        runs = [(column, seed, value) for column, group in groups.items() for seed, value in group.items()]
        fitted = np.array([value for _, _, value in runs])
        of_state = np.array([[float(column == other) for other in groups] for column, _, _ in runs])
        of_seed = np.array([[float(seed == other) for other in seeds] for _, seed, _ in runs])
        design = np.hstack([of_state, of_seed[:, :-1] - of_seed[:, -1:]])
        solution, _, rank, _ = np.linalg.lstsq(design, fitted, rcond=None)
        freedom = len(fitted) - int(rank)
        squares = float(np.sum((fitted - design @ solution) ** 2))
        covariance = np.linalg.pinv(design.T @ design) * (squares / freedom if freedom else 0.0)
        return solution[: len(groups)], covariance[: len(groups), : len(groups)], freedom

    @cached_property
    def linked_seeds(self) -> list[set[str]]:
        """The seeds in parts that no state links: between two of them nothing tells states from seeds."""
        parts: list[set[str]] = []
        for values in filter(None, self.values.values()):
            whole = set(values).union(*(part for part in parts if part & values.keys()))
            parts = [part for part in parts if not part & whole] + [whole]
        return parts

    @property
    def freedom(self) -> int:
        return self.fit[2] if self.columns else 0

    def contrast(self, factors: Mapping[Any, float]) -> Contrast | None:
        """Return the sum of states' fitted values, each times its factor.

        None where a state has no values, or no seed links it with the others. The factors' sum is 0, or near
        it: what the seeds have in common is not in the error.
        """
        seeds = {seed for state in factors for seed in self.values.get(state, ())}
        are_linked = any(seeds <= part for part in self.linked_seeds)
        if not are_linked or not all(self.values.get(state) for state in factors):
            return None
        values, covariance, freedom = self.fit
        weights = np.zeros(len(values))
        for state, factor in factors.items():
            weights[self.columns[state]] += factor
        error = math.sqrt(max(0.0, float(weights @ covariance @ weights)))
        return Contrast(value=float(weights @ values), error=error, freedom=freedom)

    def estimate(self, factors: Mapping[Any, float]) -> Estimate | None:
        contrast = self.contrast(factors)
        return contrast.estimate if contrast else None


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

    @cached_property
    def log_samples(self) -> Groups:
        return Groups({state: log_samples(runs) for state, runs in self.runs.items()})

    @cached_property
    def qualities(self) -> Groups:
        return Groups({state: {run.seed: run.quality for run in runs} for state, runs in self.runs.items()})


def log_samples(runs: Sequence[Trained]) -> dict[str, float]:
    """Take the logarithms of samples to the target, by seed; none where they are not known of all runs."""
    known = {run.seed: math.log(run.samples) for run in runs if run.samples and not run.is_bound}
    return known if len(known) == len(runs) else {}


def test_contrasts(
    measured: Measurements,
    contrasts: Sequence[Mapping[State, float]],
    figure: str,
    turns: Sequence[Sequence[float]],
) -> list[dict[str, EffectTest]]:
    """Test each contrast of states, by figure: samples, quality, and a figure of step times by its turns.

    The p values of a figure are corrected for the contrasts that have it (Holm). `detectable` is a fraction
    for samples and throughput.
    """
    raw = defaultdict[str, dict[int, tuple[float, float | None]]](dict)  # by row: p and detectable
    for row, (factors, of_turns) in enumerate(zip(contrasts, turns, strict=True)):
        samples, quality = measured.log_samples.contrast(factors), measured.qualities.contrast(factors)
        if samples and samples.freedom:
            raw["samples"][row] = samples.p_value, math.expm1(samples.detectable(len(contrasts)))
        if quality and quality.freedom:
            raw["quality"][row] = quality.p_value, quality.detectable(len(contrasts))
        could_show = intervals.sign_detectable(of_turns, ALPHA / len(contrasts))
        if could_show is not None and figure == "throughput":
            could_show = math.expm1(could_show)
        raw[figure][row] = intervals.sign_p_value(of_turns), could_show
    tests: list[dict[str, EffectTest]] = [{} for _ in contrasts]
    for name, of_rows in raw.items():
        p_values, effects = zip(*of_rows.values(), strict=True)
        for row, p_value, detectable in zip(of_rows, intervals.holm(p_values), effects, strict=True):
            tests[row][name] = EffectTest(p_value=p_value, detectable=detectable)
    return tests


def bound(resources: Sequence[str], shares: Mapping[str, float]) -> float | None:
    """Return Amdahl's bound of the speed-up of a step that waits for no loader.

    A method that relieves a part of the step cannot save more than that part; one that relieves none leaves
    the time as it is. None if a share was not measured, or if the method relieves the waiting itself.
    """
    parts = [resource for resource in resources if resource in PARTS]
    unknown = not resources or "everything" in resources or any(part not in shares for part in parts)
    if unknown or LOADING in parts:
        return None
    return max_speedup(math.fsum(shares[part] for part in parts) / (1 - shares.get(LOADING, 0.0)))


def transform(estimate: Estimate, function: Callable[[float], float]) -> Estimate:
    """Return the estimate of a function, rising or falling, of what was estimated."""
    limits = estimate.interval
    if limits is not None:
        low, high = sorted(map(function, (limits.low, limits.high)))
        limits = Interval(low=low, high=high, method=limits.method)
    return Estimate(value=function(estimate.value), interval=limits)


def combine_errors(value: float, errors: Sequence[Estimate]) -> Estimate:
    """Return a value with the interval of independent errors, all known: half-widths add as squares."""
    known, limits = [error.interval for error in errors if error.interval is not None], None
    if len(known) == len(errors):
        half = math.sqrt(math.fsum(((interval.high - interval.low) / 2) ** 2 for interval in known))
        limits = Interval(low=value - half, high=value + half, method="half-widths added as squares")
    return Estimate(value=value, interval=limits)


def add_estimates(*estimates: Estimate) -> Estimate:
    return combine_errors(math.fsum(estimate.value for estimate in estimates), estimates)


def turns_to_show(num_switches: int) -> int:
    """Return the fewest turns whose signs, all equal, are below 5 % after Holm's correction."""
    return 1 + math.ceil(math.log2(num_switches / ALPHA))


def exceed_bounds(measured: Measurements, switches: Switches, rows: Sequence[Row]) -> list[str]:
    """Return the switches that gain more than their bound: the signs of the turns, Holm for all bounds."""
    bounded = [row for row in rows if row.bound is not None and math.isfinite(row.bound)]
    steps = {switch.name: switches.alone(switch) for switch in switches.switches}
    p_values = []
    for row in bounded:
        gains = [-log for log in measured.log_ratios(steps[row.name].after, steps[row.name].before)]
        p_values.append(intervals.sign_p_value(gains, math.log(row.bound or 1.0), is_above=True))
    return [row.name for row, p in zip(bounded, intervals.holm(p_values), strict=True) if p < ALPHA]
