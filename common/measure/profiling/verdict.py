"""The reading of a profile: the share of each part, the most that its removal saves, the bottleneck.

Plain numbers in, no torch. Times are milliseconds, rates samples/s, shares fractions of a step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from common.evidence import intervals

WAITING = 0.1  # a step that waits for this share of its time or more has its bottleneck there
COMPUTE = ("forward", "backward")
ROUNDING = 1e-9  # of a sum of shares
PEAKS = {"flops_share": "the matrix product", "bytes_share": "the copy"}


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The share of a step that a variant saves, with the 95 % interval of its paired turns."""

    share: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The steps of one shape. `parts_ms` add up to `step_ms` but for `unaccounted_ms`.

    Rates: `loader_per_s` with nothing to wait for, in a later pass over the data unless `is_first_pass`;
    `first_pass_per_s` in the first one, where that differs; `step_per_s` of steps on batches in memory.
    """

    shape: str
    share: float  # of all training samples
    batch: int  # samples of a step, all ranks
    step_ms: float
    deviation: float  # of a turn's steps, relative
    num_turns: int
    parts_ms: dict[str, float]
    unaccounted_ms: float
    loader_per_s: float
    first_pass_per_s: float | None
    step_per_s: float
    savings: dict[str, Saving]
    flops_share: float
    bytes_share: float | None = None
    is_first_pass: bool = False

    @property
    def together_per_s(self) -> float:
        return self.batch / self.step_ms * 1e3

    @property
    def per_sample_ms(self) -> float:
        """The part of this phase in the mean time of a sample of the whole run."""
        return self.share * self.step_ms / self.batch

    @property
    def waiting_share(self) -> float:
        return self.parts_ms["data wait"] / self.step_ms


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All phases of a configuration. `cures` are loader settings, and the rates measured with them."""

    samples_name: str
    phases: tuple[Phase, ...]
    cures: dict[str, float] = field(default_factory=dict)
    is_compressed: bool = False  # the gradients that ranks exchange

    def shares(self) -> dict[str, float]:
        """Return the share of each part in the training time of a whole run."""
        weights = [phase.per_sample_ms for phase in self.phases]
        names = dict.fromkeys(name for phase in self.phases for name in phase.parts_ms)
        return {
            name: fmean([p.parts_ms.get(name, 0.0) / p.step_ms for p in self.phases], weights)
            for name in names
        }

    def saving(self, name: str) -> Saving | None:
        """Return the saving of a variant over a whole run; None where no phase measured it."""
        phases = [phase for phase in self.phases if name in phase.savings]
        if not phases:
            return None
        savings = [phase.savings[name] for phase in phases]
        weights = [phase.per_sample_ms for phase in phases]
        mean = fmean([saving.share for saving in savings], weights)
        halves = [w * (saving.high - saving.low) / 2 for w, saving in zip(weights, savings, strict=True)]
        half = math.hypot(*halves) / sum(weights)
        return Saving(share=mean, low=mean - half, high=mean + half)

    def training_s(self, num_samples: int) -> float:
        return num_samples * sum(phase.per_sample_ms for phase in self.phases) / 1e3


def compute_saving(whole: Sequence[float], without: Sequence[float]) -> Saving:
    """Return the share that is saved, from turns of the two side by side; at least two of each."""
    shares = [1 - less / more for more, less in zip(whole, without, strict=True)]
    mean, half = fmean(shares), intervals.half_width(shares)
    return Saving(share=mean, low=mean - half, high=mean + half)


def max_speedup(share: float) -> float:
    """Return Amdahl's bound: how many times as fast a whole is at most without a share of its time.

    Source: 1967, https://doi.org/10.1145/1465482.1465560.
    """
    return math.inf if share > 1 - ROUNDING else 1 / (1 - max(share, 0.0))


def describe_bottleneck(profile: Profile) -> str:
    """Return the bottleneck of the training, with the evidence, and its cure."""
    shares = profile.shares()
    waiting, exchanged = shares["data wait"], shares.get("communication", 0.0)
    if waiting >= WAITING and waiting >= exchanged:
        return describe_input_bound(profile, waiting)
    if exchanged >= WAITING:
        advice = "" if profile.is_compressed else "; gradient_compression=bf16 halves what is sent"
        return (
            f"communication-bound: {exchanged:.0%} of the step exchanges gradients that the backward pass "
            f"does not hide; without, training is {max_speedup(exchanged):.2f} times as fast at most{advice}"
        )
    computing = sum(shares.pop(name) for name in COMPUTE)
    largest = max(shares, key=lambda name: shares[name])
    rest = shares[largest]
    if rest > computing:
        return f"{largest}-bound: {rest:.0%} of the step; forward and backward take {computing:.0%}"
    return (
        f"compute-bound: forward and backward take {computing:.0%} of the step, "
        f"at {' and '.join(list_peaks(profile.phases))} that this device does at best; "
        f"{waiting:.0%} waits for data, and {describe_headroom(profile)}; "
        f"next is {largest}, {rest:.0%}, at most {max_speedup(rest):.2f} times as fast without"
    )


def list_peaks(phases: Sequence[Phase]) -> Iterator[str]:
    for name, peak in PEAKS.items():
        if known := [phase for phase in phases if getattr(phase, name) is not None]:
            weights = [phase.per_sample_ms for phase in known]
            yield f"{fmean([getattr(phase, name) for phase in known], weights):.0%} of {peak}"


def describe_headroom(profile: Profile) -> str:
    least = min(profile.phases, key=lambda phase: phase.loader_per_s / phase.step_per_s)
    if least.loader_per_s >= least.step_per_s:
        return f"the loader alone is {least.loader_per_s / least.step_per_s:.1f} times as fast as the step"
    return f"at {least.shape}, {least.share:.0%} of the training, {describe_rates(least)}"


def describe_rates(phase: Phase) -> str:
    loader, step = f"{phase.loader_per_s:,.0f}/s", f"{phase.step_per_s:,.0f}/s"
    return f"the loader alone brings {loader}, the step alone takes {step}"


def describe_input_bound(profile: Profile, waiting: float) -> str:
    """Return the verdict on a loader that is too slow, with settings that alone were fast enough."""
    worst = max(profile.phases, key=lambda phase: phase.waiting_share)
    saved, evidence, most = profile.saving("kept batches"), "", waiting
    if saved and saved.low > 0:
        evidence, most = f"; replaying kept batches saves {saved.share:.0%}", max(waiting, saved.share)
    fast = {name: rate for name, rate in profile.cures.items() if rate >= worst.step_per_s}
    if worst.loader_per_s >= worst.step_per_s:
        cure = "alone it keeps up, but it shares the processor with the step"
    elif fast:
        cure = "fast enough alone: " + " or ".join(f"{name} ({rate:,.0f}/s)" for name, rate in fast.items())
    elif profile.cures:
        tried = ", ".join(f"{name} {rate:,.0f}/s" for name, rate in profile.cures.items())
        cure = f"no loader setting that was tried is fast enough ({tried})"
    else:
        cure = "no other loader setting could be tried here: storage or processors limit it"
    causes = [
        f"{name} {saving.share:.0%}"
        for name in ("decoding", "augmentation")
        if (saving := profile.saving(f"no {name}")) is not None and saving.low > 0
    ]
    of_it = f", of which leaving out removes: {', '.join(causes)}" if causes else ""
    return (
        f"input-bound: {waiting:.0%} of the step waits for {profile.samples_name}{of_it} (at {worst.shape} "
        f"{describe_rates(worst)}{evidence}); {cure}; "
        f"without waiting training is {max_speedup(most):.2f} times as fast at most"
    )


def format_phase(phase: Phase, samples_name: str) -> Iterator[str]:
    yield f"{phase.shape}, {phase.share:.0%} of the training; part, ms, share, without it at most"
    for name, ms in sorted(phase.parts_ms.items(), key=lambda item: -item[1]):
        share = ms / phase.step_ms
        yield f"  {name:16} {ms:9.2f} {share:6.1%}  {max_speedup(share):5.2f}x"
    yield f"  {'step':16} {phase.step_ms:9.2f}          {phase.unaccounted_ms:.2f} ms unaccounted for"
    note = ""
    if phase.is_first_pass:
        note = " in its first pass over the data; later passes are faster"
    elif phase.first_pass_per_s:
        note = f" ({phase.first_pass_per_s:,.0f} in the first pass over the data)"
    yield (
        f"  {samples_name}/s: loader alone {phase.loader_per_s:,.0f}{note}, step alone "
        f"{phase.step_per_s:,.0f}, together {phase.together_per_s:,.0f}"
    )
    savings = (
        f"{name} {saving.share:.1%} ({saving.low:.1%} to {saving.high:.1%})"
        for name, saving in phase.savings.items()
    )
    yield f"  saved by: {', '.join(savings)}"
    yield f"  of what this device does at best: {', '.join(list_peaks([phase]))}"
