"""Minutes to target by MLPerf's rule, with their uncertainty, and the two factors behind them.

A score is the mean of the runs without the fastest and the slowest (training_rules, Benchmark Results). A run
that missed its target counts as infinitely slow: one may be the slowest, two leave the set without a score.
"""

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy import stats

from common.errors import UserError
from common.evidence.log import NUM_RUNS, Log, RunSet
from common.evidence.records import printable

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "baseline"  # the configuration that speed-ups are measured against
CONFIDENCE = 0.95
DASH = "-"
NUM_RESAMPLES = 9999
UNVERIFIED = "unverified: Result not verified by MLCommons Association."
PROXY = "proxy: size mini trains a small stand-in; its minutes say nothing about the full benchmark."
REPORTED = "reported: published by MLCommons (Open division), from reported.yaml; not measured here."


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A confidence interval of 95 % and how it was made."""

    low: float
    high: float
    method: str


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """Where a run's minutes went: until the first block, evaluation, and the rest: training."""

    startup: float
    training: float
    evaluation: float

    @property
    def total(self) -> float:
        return self.startup + self.training + self.evaluation


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one run set amounts to; None where the logs do not say. Times in minutes, rates in samples/s."""

    benchmark: str
    system: str
    hardware: str
    configuration: str
    is_proxy: bool
    label: str  # unverified, proxy, provisional; or reported and its round
    run_minutes: tuple[float, ...]  # infinite: missed the target
    minutes: float | None
    interval: Interval | None
    samples_to_target: float | None
    samples_per_s: float | None  # of training alone
    split: TimeSplit | None
    quality: float | None  # geometric mean of the final accuracies (training_rules, Open division)
    target: float
    source: str

    @property
    def group(self) -> tuple[str, bool, str]:
        """What must agree before two scores are compared."""
        return self.benchmark, self.is_proxy, self.hardware

    @property
    def num_converged(self) -> int:
        return sum(map(math.isfinite, self.run_minutes))


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How many times faster than the baseline of the same hardware, benchmark and size."""

    ratio: float
    interval: Interval | None


def score(run_set: RunSet) -> Score:
    """Score one run set. An unreadable log counts as a run that missed its target."""
    lead, logs = run_set.lead, run_set.readable
    minutes = tuple(log.minutes if log.minutes and log.is_converged else math.inf for log in run_set.logs)
    labels = ["unverified"] + ["proxy"] * run_set.is_proxy
    labels += ["provisional"] * (len(minutes) < NUM_RUNS.get(lead.benchmark, 0))
    splits = [split for log in logs if (split := time_split(log))]
    rates = [rate for log in logs if (rate := samples_per_s(log))]
    return Score(
        benchmark=lead.benchmark,
        system=lead.system,
        hardware=run_set.hardware,
        configuration=lead.configuration,
        is_proxy=run_set.is_proxy,
        label=", ".join(labels),
        run_minutes=minutes,
        minutes=olympic_mean(minutes),
        interval=interval(minutes),
        samples_to_target=_mean([log.reached.samples for log in logs if log.reached and log.reached.samples]),
        samples_per_s=_mean(rates),
        split=TimeSplit(
            startup=statistics.fmean(split.startup for split in splits),
            training=statistics.fmean(split.training for split in splits),
            evaluation=statistics.fmean(split.evaluation for split in splits),
        )
        if splits
        else None,
        quality=_geometric_mean([log.curve[-1].accuracy for log in logs if log.curve]),
        target=lead.target,
        source=run_set.folder,
    )


def reported(root: Path = ROOT) -> list[Score]:
    """Return the published scores in <root>/<benchmark folder>/reported.yaml, recomputed from their runs."""
    scores = []
    for path in sorted(root.glob("*/reported.yaml")):
        try:
            facts = yaml.safe_load(path.read_text(encoding="utf-8"))
            scores += [_reported(facts, entry) for entry in facts["sets"]]
        except (yaml.YAMLError, LookupError, TypeError, ValueError) as error:
            raise UserError(printable(str(error)), where=f"{path.parent.name}/{path.name}") from error
    return scores


def _reported(facts: dict[str, Any], entry: dict[str, Any]) -> Score:
    minutes, samples = entry["minutes"], statistics.fmean(entry["samples_to_target"])
    total, evaluation = statistics.fmean(minutes), entry["evaluation_s"] / 60
    hardware, _, configuration = entry["system"].rpartition("-")
    return Score(
        benchmark=facts["benchmark"],
        system=entry["system"],
        hardware=hardware,
        configuration=configuration,
        is_proxy=False,
        label=f"reported, {entry['submitter']} {entry['round']} {entry['division']}",
        run_minutes=tuple(minutes),
        minutes=olympic_mean(minutes),
        interval=interval(minutes),
        samples_to_target=samples,
        samples_per_s=samples / (60 * (total - evaluation)),
        split=TimeSplit(startup=0.0, training=total - evaluation, evaluation=evaluation),
        quality=_geometric_mean(entry["quality"]),
        target=facts["quality_target"],
        source=entry["source"],
    )


def olympic_mean(minutes: Sequence[float]) -> float | None:
    """Return the mean without the fastest and the slowest run (below three: of all); None if infinite."""
    ordered = sorted(minutes)
    kept = ordered[1:-1] if len(ordered) > 2 else ordered
    mean = statistics.fmean(kept) if kept else math.inf
    return mean if math.isfinite(mean) else None


def interval(minutes: Sequence[float]) -> Interval | None:
    """Return the uncertainty of the score: BCa bootstrap from 5 runs on, Student-t on log minutes below.

    A run that missed its target has no time, so it leaves only the others to estimate from.
    """
    known = [m for m in minutes if math.isfinite(m)]
    if len(known) < 2 or olympic_mean(minutes) is None:
        return None
    if len(known) < 5 or len(known) < len(minutes) or min(known) == max(known):
        return _student(known)

    def statistic(values: np.ndarray[Any, Any], axis: int) -> Any:
        return np.sort(values, axis=axis)[..., 1:-1].mean(axis=axis)

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # nearly equal runs: the NaN below says it
        bounds = stats.bootstrap(
            (known,),
            statistic,
            n_resamples=NUM_RESAMPLES,
            confidence_level=CONFIDENCE,
            method="BCa",
            rng=np.random.default_rng(0),
        ).confidence_interval
    if not math.isfinite(bounds.low) or not math.isfinite(bounds.high):
        return _student(known)
    return Interval(low=float(bounds.low), high=float(bounds.high), method="BCa bootstrap of the score")


def speedup(baseline: Score, other: Score) -> Speedup | None:
    """Return the ratio of two scores; its interval is Welch's t on the log minutes of converged runs."""
    if not baseline.minutes or not other.minutes:
        return None
    slow, fast = (np.log([m for m in s.run_minutes if math.isfinite(m)]) for s in (baseline, other))
    bounds = None
    if min(len(slow), len(fast)) > 1 and max(np.var(slow), np.var(fast)) > 0:
        test = stats.ttest_ind(slow, fast, equal_var=False).confidence_interval(CONFIDENCE)
        bounds = Interval(low=math.exp(test.low), high=math.exp(test.high), method="Welch-t on log minutes")
    return Speedup(ratio=baseline.minutes / other.minutes, interval=bounds)


def speedups(scores: Sequence[Score]) -> dict[str, Speedup]:
    """Return source -> speed-up over the baseline of its group, for every score that has one."""
    baselines = {s.group: s for s in scores if s.configuration == BASELINE}
    pairs = [(s, baselines[s.group]) for s in scores if s.group in baselines and s.configuration != BASELINE]
    return {s.source: found for s, baseline in pairs if (found := speedup(baseline, s))}


def described(score: Score, speedup: Speedup | None) -> dict[str, str]:
    """Return the columns of a table row as text; a dash where the logs do not say."""
    limits, split = score.interval, score.split
    faster = f"{speedup.ratio:.2f}x" if speedup else DASH
    if speedup and speedup.interval:
        faster += f" ({speedup.interval.low:.2f} to {speedup.interval.high:.2f})"
    return {
        "system": score.system,
        "runs": f"{score.num_converged} of {len(score.run_minutes)}",
        "minutes": duration(score.minutes) if score.minutes else "no score",
        "label": score.label,
        "95 % interval": f"{limits.low:.3f} to {limits.high:.3f}" if limits else DASH,
        "samples to target": number(score.samples_to_target) if score.samples_to_target else DASH,
        "samples/s": number(score.samples_per_s) if score.samples_per_s else DASH,
        "evaluation": f"{split.evaluation / split.total:.1%}" if split else DASH,
        "quality": f"{score.quality:.5f}" if score.quality else DASH,
        "speed-up": faster,
    }


def duration(minutes: float) -> str:
    """Return minutes, and seconds too where those are easier to read."""
    return f"{minutes:.3f} ({minutes * 60:.1f} s)" if minutes < 5 else f"{minutes:.3f}"


def number(value: float) -> str:
    """Return a count or a rate with thousands separated; below 100 with a decimal."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def notes(scores: Sequence[Score]) -> list[str]:
    """Return what must be said beside these scores (MLCommons result messaging guidelines)."""
    marks = {"unverified": UNVERIFIED, "proxy": PROXY, "reported": REPORTED}
    return [note for mark, note in marks.items() if any(mark in s.label for s in scores)]


def time_split(log: Log) -> TimeSplit | None:
    """Split one run's minutes by its log lines; None if the run has none."""
    start = log.first("run_start")
    if start is None or not log.minutes:
        return None
    first = min((e.time_ms for key in ("block_start", "epoch_start") for e in log.events(key)), default=0)
    startup = min(max((first - start.time_ms) / 60000, 0.0), log.minutes)
    evaluation = min(_evaluation_minutes(log), log.minutes - startup)
    return TimeSplit(startup=startup, evaluation=evaluation, training=log.minutes - startup - evaluation)


def samples_per_s(log: Log) -> float | None:
    """Return samples consumed by the last evaluation over the run's time without evaluation."""
    split = time_split(log)
    if split is None or not log.curve or not log.curve[-1].samples or log.minutes == split.evaluation:
        return None
    return log.curve[-1].samples / (60 * (split.training + split.startup))


def _evaluation_minutes(log: Log) -> float:
    total, opened = 0, None
    for event in log.records:
        if event.key == "eval_start":
            opened = opened or event
        elif event.key == "eval_stop" and opened:
            total += max(event.time_ms - opened.time_ms, 0)
            opened = None
    return total / 60000


def _student(minutes: Sequence[float]) -> Interval:
    logs = np.log(minutes)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1) * np.std(logs, ddof=1) / math.sqrt(len(logs))
    centre = float(np.mean(logs))
    return Interval(
        low=math.exp(centre - half), high=math.exp(centre + half), method="Student-t on log minutes"
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _geometric_mean(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values and min(values) > 0 else None
