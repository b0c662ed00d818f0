"""Minutes to the target, from rates and samples that were measured: with an interval, and scored later.

    minutes = (samples / rate + first pass + evaluations) / 60 + start-up, shape by shape in their order

Plain numbers in, no torch. The interval is that of one further run, 95 %, on logarithms: Student's t for the
samples, whose spread over seeds is known from n runs, and for the rate, from its deviation over n turns of
steps, not of their mean, because drift lasts as long as a run; the two are independent and combined as the
root of the sum of their squares. Where nothing says how seeds spread, it is an interval of the rate only.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common import yaml_file
from common.config.duration import evaluation_seconds
from common.evidence.intervals import prediction_half_width
from common.evidence.log import Log
from common.evidence.recipes import flat

RECIPE = (
    *("target", "max_duration", "budget", "evaluate_every", "evaluate_from", "global_batch_size"),
    *("precision", "evaluation_precision", "model", "data", "optimizer", "schedule", "methods"),
)
# of `data`, what leaves the samples of each batch as they are
OF_MACHINE = {"directory", "loader", "num_workers", "stored_on", "decoder"}
FREE = {"micro_batch_size", "submission", "checkpoint_every"}  # what a run may decide for its machine
ASSUMED_NOISE = 0.05  # where figures state none


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Samples/s by shape and their relative deviation; seconds of the first evaluation and of a later one.

    Without measured evaluations a sample takes a third of a trained one. `first_pass_s` is what reading the
    data for the first time adds. `num_turns` are those of the deviation; None where they are not known.
    """

    source: str
    per_s: dict[str, float]
    noise: float
    noise_source: str
    num_turns: int | None = None
    evaluation_s: tuple[float, float] | None = None
    first_pass_s: float = 0.0

    @property
    def half_width(self) -> float:
        """On logarithms, of one further run, by Student's t; the normal distribution's for unknown turns."""
        return prediction_half_width(self.noise, self.num_turns or math.inf)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples at the evaluation that reached the target, of each run; `startup_s` before the first step."""

    source: str
    values: tuple[float, ...]
    startup_s: float
    num_missed: int = 0

    @property
    def typical(self) -> float:
        """The geometric mean."""
        return statistics.geometric_mean(self.values)

    @property
    def half_width(self) -> float | None:
        """On logarithms, of one further run, by Student's t; None for a single run."""
        if len(self.values) < 2:
            return None
        return prediction_half_width(statistics.stdev(map(math.log, self.values)), len(self.values))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Minutes of one run to its target, and the parts of them.

    `low` and `high` hold 95 % of runs where the spread over seeds is known.
    """

    minutes: float
    low: float
    high: float
    training_s: float
    evaluation_s: float
    startup_s: float
    num_evaluations: int


def training_seconds(phases: Sequence[tuple[str, range]], batch: int, samples: float, rates: Rates) -> float:
    """Return the seconds of so many samples, each shape at its own rate; the last shape goes on."""
    left, seconds = samples, 0.0
    for number, (shape, steps) in enumerate(phases, 1):
        here = left if number == len(phases) else min(left, len(steps) * batch)
        seconds += here / rates.per_s[shape]
        left -= here
    return seconds


def estimate(
    phases: Sequence[tuple[str, range]],
    *,
    batch: int,
    evaluated_at: Sequence[int],
    num_evaluated: int,
    rates: Rates,
    samples: Samples,
    slower: float = 1.0,
    devices: int = 1,
) -> Estimate:
    """Return the estimate of a run of `batch` samples a step, evaluated after the steps `evaluated_at`.

    `slower` is the time of a step on all devices relative to that of the measured one, which the evaluation
    is divided among too.
    """
    count = sum(1 for step in evaluated_at if step * batch <= samples.typical * (1 + 1e-9))  # it is rounded
    training_s = training_seconds(phases, batch, samples.typical, rates) * slower + rates.first_pass_s
    if rates.evaluation_s is not None:
        evaluation_s = rates.evaluation_s[0] + (count - 1) * rates.evaluation_s[1] if count else 0.0
    else:
        evaluation_s = evaluation_seconds(count, num_evaluated, rates.per_s[phases[-1][0]])
    evaluation_s /= devices
    run_s = training_s + evaluation_s
    half = math.hypot(samples.half_width or 0.0, rates.half_width)
    return Estimate(
        minutes=(run_s + samples.startup_s) / 60,
        low=(run_s * math.exp(-half) + samples.startup_s) / 60,
        high=(run_s * math.exp(half) + samples.startup_s) / 60,
        training_s=training_s,
        evaluation_s=evaluation_s,
        startup_s=samples.startup_s,
        num_evaluations=count,
    )


def settings_of(log: Log) -> dict[str, Any]:
    """Return the configuration that a log states; nothing where it cannot be read."""
    found = yaml_file.parse_head(log.settings)
    return {"budget": 1.0} | found if found else {}  # older ones trained all of it


def agree(there: dict[str, Any], here: dict[str, Any]) -> bool:
    """Return whether two configurations are one; a key that the first, older one, does not know is as it was.

    Methods have to be the same ones.
    """
    if set(there.get("methods") or {}) != set(here.get("methods") or {}):
        return False
    stated = flat(there)
    return all(stated.get(key, value) == value for key, value in flat(here).items())


def picked(values: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return some of the keys."""
    return {key: values[key] for key in keys if key in values}


def same_recipe(log: Log, config: dict[str, Any]) -> bool:
    """Return whether a log is of this benchmark, configuration and size, and trained in the same way."""
    found, names = settings_of(log), ("benchmark", "configuration", "size")
    return picked(found, names) == picked(config, names) and agree(recipe(found), recipe(config))


def recipe(config: dict[str, Any]) -> dict[str, Any]:
    """Return what of a configuration decides how training goes."""
    found = picked(config, RECIPE)
    if isinstance(data := found.get("data"), dict):
        found["data"] = picked(data, data.keys() - OF_MACHINE)
    return found


def same_settings(log: Log, config: dict[str, Any]) -> bool:
    """Return whether a log states this configuration, but for what a run decides for its machine."""
    found, keys = settings_of(log), config.keys() - FREE
    return "benchmark" in found and agree(picked(found, keys), picked(config, keys))


def measured_samples(logs: Sequence[Log], config: dict[str, Any]) -> Samples | None:
    """Return the samples to target of the runs of this recipe, on any system; None without one."""
    runs = [log for log in logs if not log.is_resumed and log.minutes and same_recipe(log, config)]
    reached = [point.samples for log in runs if (point := log.reached) and point.samples]
    if not reached:
        return None
    starts = [min(e.time_ms for e in log.events("block_start")) for log in runs if log.first("block_start")]
    begins = [log.events("run_start")[0].time_ms for log in runs if log.first("block_start")]
    waited = [(start - begin) / 1e3 for start, begin in zip(starts, begins, strict=True)]
    return Samples(
        source=f"{len(reached)} measured runs",
        values=tuple(reached),
        startup_s=statistics.fmean(waited) if waited else 0.0,
        num_missed=len(runs) - len(reached),
    )


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A later run of what an estimate was made for; `minutes` is infinite where the target was missed."""

    path: str
    minutes: float
    ratio: float  # measured over predicted
    is_inside: bool


def check(record: dict[str, Any], logs: Sequence[Log]) -> list[Checked]:
    """Return the runs on the estimate's system and devices that started after it, with its settings only."""
    found = []
    for log in logs:
        start = log.first("run_start")
        if log.system != record["system"] or start is None or start.time_ms <= record["time_ms"]:
            continue
        if log.value("num_ranks") not in (None, record.get("devices", 1)):
            continue
        if not same_settings(log, record["config"]) or log.is_resumed or log.minutes is None:
            continue
        minutes = log.minutes if log.is_converged else math.inf
        found.append(
            Checked(
                path=log.path,
                minutes=minutes,
                ratio=minutes / record["minutes"],
                is_inside=record["low"] <= minutes <= record["high"],
            )
        )
    return found
