"""Minutes to target by MLPerf's rule, with their uncertainty, and the two factors behind them.

A score is the mean of the runs without the fastest and the slowest (training_rules, Benchmark Results). A run
that missed its target counts as infinitely slow: one may be the slowest, two leave the set without a score.
Of more runs than needed the window with the median score counts (training_rules, Scoring).
"""

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from common.evidence import intervals, recipes, system
from common.evidence.compare.factors import Factors, TimeSplit, evaluation_minutes, factors, time_split
from common.evidence.disturbance import disturbed_runs
from common.evidence.intervals import Interval
from common.evidence.log import NUM_RUNS, Log, RunSet
from common.evidence.records import counted, finite, printable

BASELINE = "baseline"  # the configuration that speed-ups are measured against
COLOURED_FIRST = (BASELINE, "optimized", "closed")  # have the same colours in all pictures
UNVERIFIED = "unverified: Result not verified by MLCommons Association."


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a score; None where its log does not say. Times in minutes, rates in samples/s."""

    name: str
    minutes: float  # infinite: missed the target
    samples: float | None  # consumed at the first evaluation at or above the target
    samples_per_s: float | None  # without evaluation, if that is logged
    samples_per_s_overall: float | None  # of the whole run
    evaluation: float | None  # all of it
    quality: float | None  # the last accuracy
    split: TimeSplit | None


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a run set; None where the logs do not say. Times in minutes, rates in samples/s."""

    benchmark: str
    system: str
    hardware: str
    configuration: str
    is_proxy: bool
    label: str  # unverified, proxy, provisional, which runs count; or reported and its round
    runs: tuple[Run, ...]  # in the order of launch
    counted: tuple[int, ...]  # indexes in `runs` of those that count
    target: float
    source: str
    mixture: str = ""  # the first difference between the recipes of its runs; then it has no score
    disturbed: tuple[str, ...] = ()  # the disturbed runs, and the cause
    missed: tuple[str, ...] = ()  # the runs without a time to the target, and why
    scaling_factor: float | None = None  # of the scaling.json beside the logs; no figure here has it
    processor: str = ""  # that trained; '' on accelerators, and where nothing states it
    instructions: str = ""  # of that processor, as recorded

    @property
    def group(self) -> tuple[str, bool, str]:
        """The facts that two scores share before they are compared."""
        return self.benchmark, self.is_proxy, self.hardware

    @property
    def machine(self) -> str:
        return f"{self.processor} {self.instructions}".strip()

    def is_of_other_processor(self, other: "Score") -> bool:
        if system.are_processors_others(self.processor, other.processor):
            return True
        return self.instructions != other.instructions and bool(self.instructions and other.instructions)

    @property
    def run_minutes(self) -> tuple[float, ...]:
        return tuple(run.minutes for run in self.runs)

    @property
    def num_converged(self) -> int:
        return sum(map(math.isfinite, self.run_minutes))

    @property
    def counting(self) -> list[Run]:
        """The runs that count, whether they converged or not."""
        return [self.runs[index] for index in self.counted]

    @property
    def converged(self) -> list[Run]:
        return [run for run in self.counting if math.isfinite(run.minutes)]

    @property
    def minutes(self) -> float | None:
        return None if self.mixture else olympic_mean([run.minutes for run in self.counting])

    @property
    def why_none(self) -> str:
        """Why the set has no score; '' if it has one."""
        if self.mixture:
            return f"more than one recipe: {self.mixture}"
        reached = f"{self.num_converged} of {counted(len(self.runs), 'run')} reached the target"
        return "" if self.minutes else reached

    @property
    def scaled_minutes(self) -> float | None:
        """The score times the factor of scaling.json; None without either."""
        return self.minutes * self.scaling_factor if self.minutes and self.scaling_factor else None

    @property
    def interval(self) -> Interval | None:
        """Student's t on the log minutes of the runs that count; None if one of them missed."""
        if not self.minutes or len(self.converged) < len(self.counting):
            return None
        return intervals.student_of_logs([run.minutes for run in self.converged])

    @property
    def samples_to_target(self) -> float | None:
        return mean_of([run.samples for run in self.counting if run.samples])

    @property
    def samples_per_s(self) -> float | None:
        """Mean of the runs that count, without evaluation if the logs time it."""
        rates = [run.samples_per_s or run.samples_per_s_overall for run in self.counting]
        return mean_of([rate for rate in rates if rate])

    @property
    def evaluation_share(self) -> float | None:
        """Minutes of evaluation over minutes, of the converged runs."""
        runs = [run for run in self.converged if run.evaluation is not None]
        return sum(run.evaluation or 0.0 for run in runs) / sum(run.minutes for run in runs) if runs else None

    @property
    def quality(self) -> float | None:
        """Geometric mean of the final accuracies (training_rules, Open division)."""
        values = [run.quality for run in self.counting if run.quality is not None]
        return statistics.geometric_mean(values) if values and min(values) > 0 else None

    @property
    def _splits(self) -> list[TimeSplit]:
        return [run.split for run in self.converged or self.counting if run.split]

    @property
    def split(self) -> TimeSplit | None:
        """Mean over the converged runs, or over all if none converged."""
        splits = self._splits
        if not splits:
            return None
        parts = ("startup", "training", "evaluation", "overshoot")
        means = {part: statistics.fmean(getattr(split, part) for split in splits) for part in parts}
        return TimeSplit(**means, samples=mean_of([split.samples for split in splits if split.samples]))

    @cached_property
    def factors(self) -> Factors | None:
        """The two factors and the other parts of the converged runs' minutes, with intervals."""
        return factors(self._splits)


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The ratio to the baseline of the same hardware, processor, benchmark, size and target.

    The ratio is that of the scores; the interval and the smallest difference that these runs could show (a
    fraction) are those of the geometric means of the runs. None where one of them missed its target.
    """

    ratio: float
    interval: Interval | None
    detectable: float | None


def score(run_set: RunSet, *, include_resumed: bool = False, include_disturbed: bool = True) -> Score:
    """Score one run set. An unreadable log counts as a run that missed its target."""
    lead, num_runs = run_set.lead, NUM_RUNS.get(run_set.lead.benchmark, 0)
    logs = timed_logs(run_set.logs, include_resumed=include_resumed)
    disturbances = {logs[index].path: text for index, text in disturbed_runs(logs).items()}
    if not include_disturbed:
        logs = [log for log in logs if log.path not in disturbances]
    runs = tuple(run_of(log) for log in sort_by_launch(logs))
    window = counting_window([run.minutes for run in runs], num_runs)
    num_study = sum(log.is_study for log in run_set.logs)
    num_resumed = sum(log.is_resumed for log in run_set.logs)
    num_missed = sum(not math.isfinite(runs[index].minutes) for index in window)
    mixture = recipes.mixture(logs)
    factor, scaling = read_scaling(lead.file)
    minutes = None if mixture else olympic_mean([runs[index].minutes for index in window])
    if factor and minutes:
        scaling = f"with scaling.json {factor:g} x {minutes:.3f} = {factor * minutes:.3f}"
    labels = {
        "unverified": True,
        "proxy": run_set.is_proxy,
        "provisional": len(runs) < num_runs,
        f"runs {window.start + 1} to {window.stop} of {len(runs)} by launch": len(window) < len(runs),
        f"{num_study} of a study not counted": num_study,
        f"{num_resumed} resumed{'' if include_resumed else ' not counted'}": num_resumed,
        scaling: scaling,
        f"{len(disturbances)} disturbed{'' if include_disturbed else ' left out'}": disturbances,
        f"{num_missed} missed": num_missed,
        f"more than one recipe: {mixture}": mixture,
    }
    return Score(
        benchmark=lead.benchmark,
        system=lead.system,
        hardware=run_set.hardware,
        configuration=recipes.recipe_name(lead),
        is_proxy=run_set.is_proxy,
        label=", ".join(label for label, applies in labels.items() if applies),
        runs=runs,
        counted=tuple(window),
        target=lead.target,
        source=run_set.folder,
        mixture=mixture,
        scaling_factor=factor,
        processor=system.processor_of(run_set),
        instructions=system.instructions_of(lead),
        disturbed=tuple(f"{printable(path)}: {text}" for path, text in disturbances.items()),
        missed=tuple(f"{printable(log.path)}: {why}" for log in logs if (why := why_missed(log))),
    )


def read_scaling(result: Path | None) -> tuple[float | None, str]:
    """Return the factor, 1 or more, of the scaling.json beside a result, and why there is none."""
    if result is None or not os.path.lexists(path := result.with_name("scaling.json")):
        return None, ""
    try:
        stated = system.read(path)
    except ValueError:
        return None, "scaling.json cannot be read"
    factor = finite(stated.get("scaling_factor")) if isinstance(stated, dict) else None
    if factor is None or factor < 1:
        return None, "scaling.json states no factor from 1 on"
    return factor, ""


def timed_logs(logs: Sequence[Log], *, include_resumed: bool = False) -> list[Log]:
    """Return one log of each run, without the runs of a study.

    A resumed run has several: the interrupted one counts, with `include_resumed` the last one that continued
    it.
    """
    logs = [log for log in logs if not log.is_study]

    def origin(log: Log) -> object:
        start = log.first("run_start")
        return (start.time_ms, repr(log.value("seed"))) if start else id(log)

    if not include_resumed:
        return [log for log in logs if not log.is_resumed]
    last = {origin(log): log for log in logs if log.is_resumed}
    return [log for log in logs if last.get(origin(log), log) is log]


def sort_by_launch(logs: Sequence[Log]) -> list[Log]:
    """Sort by the time of run_start; a log without one stays behind the log before it."""
    times, latest = [], 0
    for log in logs:
        start = log.first("run_start")
        latest = start.time_ms if start else latest
        times.append(latest)
    return [logs[index] for index in sorted(range(len(logs)), key=times.__getitem__)]


def run_of(log: Log) -> Run:
    """Compute the figures of a run from its log."""
    minutes, at_target = log.minutes or 0.0, log.reached.samples if log.reached else None
    evaluation = evaluation_minutes(log) if log.first("eval_stop") else None
    consumed = log.curve[-1].samples if log.curve else None
    return Run(
        name=printable(log.path),
        minutes=minutes if minutes and log.is_converged else math.inf,
        samples=at_target if at_target and at_target > 0 else None,
        samples_per_s=None if evaluation is None else _rate(consumed, minutes - evaluation),
        samples_per_s_overall=_rate(consumed, minutes),
        evaluation=evaluation if minutes else None,
        quality=log.curve[-1].accuracy if log.curve else None,
        split=time_split(log),
    )


def why_missed(log: Log) -> str:
    """Return why a run has no time to its target; '' where it has one."""
    starts, stops = (len(log.events(key)) for key in ("run_start", "run_stop"))
    if not log.is_readable:
        return str(log.problems[0])
    if (starts, stops) != (1, 1):
        return f"{starts} run_start and {stops} run_stop stand in its log; a run has one of each"
    if log.minutes is None:
        return "run_stop is not later than run_start"
    accuracy = f"{log.curve[-1].accuracy:.5f}" if log.curve else "missing"
    missed = f"status {printable(log.status, 40)}; last accuracy {accuracy}, target {log.target:g}"
    return "" if log.is_converged else missed


def _rate(samples: float | None, minutes: float) -> float | None:
    return samples / (60 * minutes) if samples and samples > 0 and minutes > 0 else None


def olympic_mean(minutes: Sequence[float]) -> float | None:
    """Return the mean without the fastest and the slowest run (below three: of all); None if infinite."""
    ordered = sorted(minutes)
    counting = ordered[1:-1] if len(ordered) > 2 else ordered
    return _finite(statistics.fmean(counting)) if counting else None


def counting_window(minutes: Sequence[float], num_runs: int) -> range:
    """Return which runs, in the order of launch, count: all, or a window if there are more than `num_runs`.

    All windows of `num_runs` consecutive runs are scored, misses as infinite; the median one counts. The
    rules do not say which of two middle windows: here the slower, which cannot flatter.
    """
    windows = [range(first, first + num_runs) for first in range(len(minutes) - num_runs + 1)]
    if num_runs < 1 or len(windows) < 2:
        return range(len(minutes))
    windows.sort(key=lambda window: olympic_mean([minutes[index] for index in window]) or math.inf)
    return windows[len(windows) // 2]


def speedup(baseline: Score, other: Score) -> Speedup | None:
    """Return the ratio of two scores, its interval and the detectable difference; None without a score."""
    if not baseline.minutes or not other.minutes:
        return None
    slow, fast = ([run.minutes for run in entry.converged] for entry in (baseline, other))
    has_all = all(len(entry.converged) == len(entry.counting) for entry in (baseline, other))
    means, is_spread = intervals.ratio(slow, fast), has_all and max(np.ptp(slow), np.ptp(fast)) > 0
    return Speedup(
        ratio=baseline.minutes / other.minutes,
        interval=means.interval if is_spread else None,
        detectable=means.detectable if is_spread else None,
    )


def speedups(scores: Sequence[Score]) -> dict[str, Speedup]:
    """Return source -> speed-up over its baseline, for every score that has one."""
    pairs = [(s, baseline_of(s, scores)) for s in scores if s.configuration != BASELINE]
    return {s.source: faster for s, baseline in pairs if baseline and (faster := speedup(baseline, s))}


def baseline_of(entry: Score, scores: Sequence[Score]) -> Score | None:
    """Return the baseline of a score's group, target and processor; of several that beside it, else None."""
    baselines = [s for s in baselines_for(entry, scores) if not s.is_of_other_processor(entry)]
    if len(baselines) > 1:
        folder = Path(entry.source).parents[1:2]
        baselines = [s for s in baselines if Path(s.source).parents[1:2] == folder]
    return baselines[0] if len(baselines) == 1 else None


def baselines_for(entry: Score, scores: Sequence[Score]) -> list[Score]:
    alike = [s for s in scores if (s.group, s.target) == (entry.group, entry.target)]
    return [s for s in alike if s.configuration == BASELINE]


def name_processors(entry: Score, scores: Sequence[Score]) -> str:
    """Say that every baseline of a score's group and target ran on another processor; '' if one did not."""
    baselines = baselines_for(entry, scores)
    if not baselines or not all(s.is_of_other_processor(entry) for s in baselines):
        return ""
    theirs = sorted({s.machine for s in baselines})
    return f"{BASELINE} ran on {' or '.join(theirs)}, {entry.configuration} on {entry.machine}"


def score_json(score: Score, speedup: Speedup | None = None) -> dict[str, object]:
    """Return a score for JSON, where a run that missed its target has null minutes."""
    figures = (
        "benchmark system hardware processor configuration is_proxy label counted source minutes "
        "samples_to_target samples_per_s evaluation_share quality disturbed missed scaling_factor "
        "scaled_minutes"
    )
    parts = {name: getattr(score, name) for name in ("interval", "split", "factors")} | {"speedup": speedup}
    return {
        **{name: getattr(score, name) for name in figures.split()},
        **{name: part and asdict(part) for name, part in parts.items()},
        "run_minutes": [_finite(minutes) for minutes in score.run_minutes],
        "target": _finite(score.target),
        "runs": [asdict(run) | {"minutes": _finite(run.minutes)} for run in score.runs],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def mean_of(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
