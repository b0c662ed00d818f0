"""The minutes of a run to its target, from measured rates and samples, with an interval.

    minutes = (samples / rate + first pass + evaluations) / 60 + start-up, shape by shape in their order

The interval is for one further run, 95 %, on logarithms: Student's t for the samples, from their spread over
the seeds of n runs, and for the rate, from its deviation over n turns of steps (not that of their mean,
because drift lasts as long as a run). The two are independent: their squares are added. If the spread over
seeds is unknown, it is an interval of the rate only. No torch is loaded.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.config.duration import evaluation_seconds
from common.config.schema import RunConfig
from common.evidence.intervals import prediction_half_width

ASSUMED_NOISE = 0.05  # where figures state none
STARTUP_S = 3.0  # from run_start to the first step; published: 0.9 to 2.6 s


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Samples/s by shape and their relative deviation; seconds of the first evaluation and of a later one.

    Without measured evaluations `evaluation_seconds` calculates them. `first_pass_s` is what reading the
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
        """Half of the interval of one further run, on logarithms; Student's t, normal for unknown turns."""
        return prediction_half_width(self.noise, self.num_turns or math.inf)

    def sample_s(self, shares: Mapping[str, float]) -> float:
        """Return the seconds of a mean sample, where each shape has its share of the samples."""
        return sum(share / self.per_s[shape] for shape, share in shares.items())


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples at the evaluation that reached the target, of each run; `startup_s` before the first step."""

    source: str
    values: tuple[float, ...]
    startup_s: float = STARTUP_S
    num_missed: int = 0

    @property
    def typical(self) -> float:
        return statistics.geometric_mean(self.values)

    @property
    def half_width(self) -> float | None:
        """Half of the interval of one further run, on logarithms, by Student's t; None for a single run."""
        if len(self.values) < 2:
            return None
        return prediction_half_width(statistics.stdev(map(math.log, self.values)), len(self.values))


def training_seconds(phases: Sequence[tuple[str, range]], batch: int, samples: float, rates: Rates) -> float:
    """Return the seconds of `samples`, each shape at its own rate; the last shape has no end."""
    left, seconds = samples, 0.0
    for number, (shape, steps) in enumerate(phases, 1):
        num_samples = left if number == len(phases) else min(left, len(steps) * batch)
        seconds += num_samples / rates.per_s[shape]
        left -= num_samples
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
) -> dict[str, float]:
    """Return the minutes of a run of `batch` samples a step, evaluated after the steps `evaluated_at`.

    `low` and `high` hold 95 % of runs if the spread over seeds is known; the other entries are parts.
    `slower` is the time of a step on all devices over the measured one; the devices share the evaluation.
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
    return {
        "minutes": (run_s + samples.startup_s) / 60,
        "low": (run_s * math.exp(-half) + samples.startup_s) / 60,
        "high": (run_s * math.exp(half) + samples.startup_s) / 60,
        "training_s": training_s,
        "evaluation_s": evaluation_s,
        "startup_s": samples.startup_s,
        "num_evaluations": count,
    }


def estimate_run(
    config: RunConfig,
    phases: Sequence[tuple[str, range]],
    *,
    rates: Rates,
    samples: Samples,
    slower: float = 1.0,
    devices: int = 1,
) -> dict[str, float]:
    return estimate(
        phases,
        batch=config.global_batch_size,
        evaluated_at=config.plan().evaluation_steps,
        num_evaluated=config.data.num_evaluation_samples,  # type: ignore[attr-defined]
        rates=rates,
        samples=samples,
        slower=slower,
        devices=devices,
    )


def name_devices(hardware: str, num_devices: int) -> str:
    """Name so many of a hardware's devices: 8xH100 for 8 times 1xH100, 1xH100 for one of 8xH100."""
    name, count = re.subn(r"^[0-9]+x", f"{num_devices}x", hardware)
    return name if count or num_devices == 1 else f"{num_devices}x{hardware}"
