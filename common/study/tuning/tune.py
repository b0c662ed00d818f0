"""The search for speed-ups: each change is tried on top of what was kept, compared and timed in turns.

A gain counts when the 99 % interval of the median of paired ratios (before over after, turns in the order
ABBA) lies above 1: order statistics, no assumption about the noise of turns. It says nothing of what two
processes differ by from their start, such as where their memory lies: a gain has to show again between two
new ones, and the one with the lower bound is stated. A change leaves the mathematics alone when loss,
gradients, the first step and what it does to buffers equal those of the unchanged model in float64 (float32
on a GPU), and when in the precision of the training they are no further from these than twice what the
unchanged model is. What does not run exactly is compared in the training's own precision only.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Generic, Protocol, TypeVar

import torch

from common.errors import UserError
from common.evidence import intervals
from common.study.tuning.apart import Subject
from common.study.tuning.traces import Trace, distance

CONFIDENCE = 0.99
NUM_PAIRS = (12, 30)  # at least, at most
RACE_S = 8.0  # what a change may take to time, unless the fewest pairs take longer
TOLERANCE = {  # of a whole; the loss itself is taken in float32; 16 bits: the root of one rounding
    torch.float64: 1e-4,
    torch.float32: 1e-2,
    torch.bfloat16: 9e-2,
    torch.float16: 3e-2,
}
AGAIN_S = 0.01  # until the end of a search is tried again, where Python drops what is raised:
DROPPING = ("__del__", "<lambda>")  # in destructors, and in callbacks of weak references
ROUNDING = 2.0  # times as far from the exact values as the unchanged model, in the training's precision

State = TypeVar("State")


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Time before over time after: the median of paired ratios and its interval."""

    median: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f}x ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Change(Generic[State]):
    """A small change with a name; `apply` returns the state with it.

    `evidence` is for what promises no time: why it is worth what it takes, if any. `is_of_loader`: it is
    timed with the loader, which takes long, and so compared first. `missing` says why it is not tried.
    """

    name: str
    apply: Callable[[State], State]
    is_exact: bool = True
    evidence: str = ""
    is_of_loader: bool = False
    missing: str = ""
    conflicts_with: tuple[str, ...] = ()  # alternatives: not together with one of these


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The outcome of a change; `is_finished`: it was compared and timed, or failed when it was."""

    name: str
    is_kept: bool
    why: str
    is_finished: bool = True
    gain: Gain | None = None
    difference: str = ""
    is_exact: bool = True

    @property
    def outcome(self) -> str:
        """One word or two."""
        return "kept" if self.is_kept else "refused" if self.is_finished else "not tried"


@dataclass(kw_only=True)
class Outcome(Generic[State]):
    """The state with all that was kept, and how it was found."""

    state: State
    tried: list[Tried] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kept_names(self) -> list[str]:
        """The names of what was kept."""
        return [tried.name for tried in self.tried if tried.is_kept]


class TimeUpError(Exception):
    """The seconds of a search are over."""


class NotTriedError(Exception):
    """Why a change is passed over."""


class Refused(Exception):  # noqa: N818 - an outcome, not a mistake
    """A change that is not kept, with what is known of it."""

    def __init__(self, why: str, gain: Gain | None = None, difference: str = "") -> None:
        super().__init__(why)
        self.gain, self.difference = gain, difference


class Bench(Protocol[State]):
    """Builds what is timed and compared from a state."""

    def build(self, state: State, change: Change[State]) -> Subject:
        """Return the subject of a state, as is needed to time a change."""

    def trace(self, state: State, *, is_exact: bool) -> Trace:
        """Return the first steps in the training's precision, or exactly, from the same weights."""


class Search(Generic[State]):
    """Tries changes in their order within `seconds`; `report` is told of each."""

    def __init__(
        self, bench: Bench[State], start: State, *, seconds: float, report: Callable[[Tried], None]
    ) -> None:
        self.bench, self.start, self.report, self.seconds = bench, start, report, seconds
        self.outcome = Outcome(state=start)
        self.references: dict[bool, Trace | None] = {}
        self.current: tuple[State, bool, Subject] | None = None  # what is kept, ready to be timed

    def run(self, changes: Sequence[Change[State]]) -> Outcome[State]:
        """Return what was kept."""
        before = time.monotonic()
        try:
            for change in changes:
                tried = self.attempt(change, before + self.seconds - time.monotonic())
                self.outcome.tried.append(tried)
                self.report(tried)
        finally:
            self.replace_current(None)
        self.outcome.seconds = time.monotonic() - before
        return self.outcome

    def attempt(self, change: Change[State], seconds: float) -> Tried:
        """Try one change; whatever it raises refuses it."""
        subjects: list[Subject] = []
        state, gain, difference = self.outcome.state, None, ""
        is_kept, is_finished = False, True
        try:
            with time_limit(seconds):
                state, gain, difference, why = self.examine(change, subjects)
            is_kept = True
        except TimeUpError:
            is_finished = False
            why = "the time for tuning was up" + (" before it was measured" if seconds > 0 else "")
        except NotTriedError as error:
            is_finished, why = False, str(error)
        except Refused as refused:
            why, gain, difference = str(refused), refused.gain, refused.difference
        except UserError as error:
            is_finished, why = bool(subjects), f"not available: {error.what}"
        except Exception as error:  # noqa: BLE001 - whatever a compiler or a kernel raises
            why = f"not available: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:90]}"
        finally:
            if is_kept:
                self.replace_current((state, change.is_of_loader, subjects.pop()))
            for subject in subjects:
                subject.close()
        if is_kept:
            self.outcome.state = state
            if not change.is_exact:  # what follows is compared with the training as it is now
                self.start, self.references = state, {}
        return Tried(
            name=change.name,
            is_kept=is_kept,
            why=why,
            is_finished=is_finished,
            gain=gain,
            difference=difference,
            is_exact=change.is_exact,
        )

    def examine(self, change: Change[State], subjects: list[Subject]) -> tuple[State, Gain | None, str, str]:
        """Return the state with a change, its gain, its difference and why it is kept.

        Raises Refused, or NotTriedError.
        """
        if change.missing:
            raise NotTriedError(change.missing)
        if taken := [name for name in self.outcome.kept_names if name in change.conflicts_with]:
            raise NotTriedError(f"an alternative to {taken[0]}, which is kept")
        state = change.apply(self.outcome.state)
        difference = ""
        if change.is_exact:
            difference = self.compare(state, is_exact=False)
            if change.is_of_loader:
                difference += f"; {self.compare(state, is_exact=True)}"
        gain = self.measure_gain(state, change, subjects)
        if gain.low > 1:
            self.replace_current(None)
            gain = min(gain, self.measure_gain(state, change, subjects), key=lambda gain: gain.low)
        if gain.low <= 1 and not change.evidence:
            raise Refused("slower" if gain.high < 1 else "no gain beyond noise", gain, difference)
        if change.is_exact and not change.is_of_loader:
            try:
                difference += f"; {self.compare(state, is_exact=True)}"
            except Refused as refused:
                raise Refused(str(refused), gain, refused.difference) from None
        why = "faster" if gain.low > 1 else f"by its card: {change.evidence}"
        return state, gain, difference, why

    def measure_gain(self, state: State, change: Change[State], subjects: list[Subject]) -> Gain:
        """Return the gain of a state over what was kept; its new subject is then the only one of the list."""
        while subjects:
            subjects.pop().close()
        before = self.build_current(change)
        subjects.append(self.bench.build(state, change))
        try:
            return race(before, subjects[0])
        except Exception:
            self.replace_current(None)  # either of the two may have died
            raise

    def build_current(self, change: Change[State]) -> Subject:
        """Build the subject of what was kept so far, unless it stands ready from the last change."""
        state = self.outcome.state
        if self.current and self.current[:2] == (state, change.is_of_loader):
            return self.current[2]
        self.replace_current(None)
        subject = self.bench.build(state, change)
        self.replace_current((state, change.is_of_loader, subject))
        return subject

    def replace_current(self, current: tuple[State, bool, Subject] | None) -> None:
        if self.current:
            self.current[2].close()
        self.current = current

    def reference(self, *, is_exact: bool) -> Trace | None:
        """Return the unchanged model's trace; None where it does not run exactly."""
        if is_exact not in self.references:
            self.references[is_exact] = self.trace(self.start, is_exact=is_exact)
        return self.references[is_exact]

    def trace(self, state: State, *, is_exact: bool) -> Trace | None:
        """Return the trace of a state; None where it does not run exactly."""
        try:
            return self.bench.trace(state, is_exact=is_exact)
        except UserError:
            if is_exact:
                return None
            raise

    def compare(self, state: State, *, is_exact: bool) -> str:
        """Return how far a state is from the unchanged model; raises Refused when it is too far."""
        unchanged = self.reference(is_exact=is_exact)
        trace = unchanged and self.trace(state, is_exact=is_exact)
        if unchanged is None or trace is None:
            return "not compared exactly"
        relative = distance(trace, unchanged)
        difference = f"{trace.precision} " + ("same bits" if relative == 0 else f"{relative:.0e}")
        exact = self.reference(is_exact=True)
        if exact is None or exact.dtype == unchanged.dtype:
            allowed, away = TOLERANCE[unchanged.dtype], relative
        else:
            allowed, away = ROUNDING * distance(unchanged, exact), distance(trace, exact)
        if not (relative == 0 or away <= allowed):  # NaN is too far
            raise Refused(f"differs: by {away:.1e}, {allowed:.1e} allowed", difference=difference)
        return difference


def race(before: Subject, after: Subject) -> Gain:
    """Time two subjects in turns; the number of pairs is decided before the first one counts."""
    pair = (before, after)
    for subject in pair:
        subject.turn()  # the first step of a shape, first use of memory
    start = time.monotonic()
    for subject in pair:
        subject.turn()
    lap_s = time.monotonic() - start
    num_pairs = min(max(round(RACE_S / lap_s), NUM_PAIRS[0]), NUM_PAIRS[1])
    ratios = []
    for number in range(num_pairs):
        order = pair if number % 2 else pair[::-1]
        took = {id(subject): subject.turn() for subject in order}
        ratios.append(took[id(before)] / took[id(after)])
    return median_gain(ratios)


def median_gain(ratios: Sequence[float]) -> Gain:
    estimate = intervals.median(ratios, CONFIDENCE)
    low, high = (estimate.interval.low, estimate.interval.high) if estimate.interval else (0.0, math.inf)
    return Gain(median=estimate.value, low=low, high=high, num_pairs=len(ratios))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUpError in what takes longer; only the main thread can be interrupted."""
    if seconds <= 0:
        raise TimeUpError
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_over
        if frame is not None and frame.f_code.co_name in DROPPING:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        is_over = True
        raise TimeUpError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except Exception as error:
        if is_over:
            raise TimeUpError from error  # a compiler wraps it in an error of its own
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def table(tried: Sequence[Tried], seconds: float) -> str:
    """Return what was tried as lines of text."""
    rows = [("change", "gain (99 %)", "largest difference", "outcome", "why")]
    rows += [
        (
            change.name,
            str(change.gain) if change.gain else "-",
            change.difference or ("-" if change.is_exact else "CHANGES TRAINING"),
            change.outcome,
            change.why,
        )
        for change in tried
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows
    ]
    return "\n".join(f"  {line}" for line in [*lines, f"tuning took {seconds:.0f} s"])
