"""The search for speed-ups: each change is tried on top of what was kept, compared and timed in turns.

A gain counts when the 99 % interval of the median of paired ratios (before over after, turns in the order
ABBA) lies above 1: order statistics, no assumption about the noise of turns. It leaves out differences of two
processes from their start, such as the place of their memory: a gain has to show again between two new
processes; that with the lower bound is stated. A change leaves the mathematics alone when loss,
gradients and the first step's changes of parameters and buffers equal those of the unchanged model in float64
(float32 on a GPU), and in the precision of the training are at most twice as far from these as those of the
unchanged model. A model that does not run so is compared in the training's precision only.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple, Protocol

import torch

from common.errors import UserError
from common.evidence import intervals
from common.study.tuning.subjects import Subject, describe_error, take_pairs
from common.study.tuning.traces import Trace, distance

CONFIDENCE = 0.99
NUM_PAIRS = (12, 30)  # at least, at most
RACE_S = 8.0  # to time a change, unless the fewest pairs take longer
TOLERANCE = {  # relative; the loss itself is computed in float32; in 16 bits the root of one rounding
    torch.float64: 1e-4,
    torch.float32: 1e-2,
    torch.bfloat16: 9e-2,
    torch.float16: 3e-2,
}
AGAIN_S = 0.01  # until TimeUpError is tried again, in code where Python drops exceptions:
DROPPING = ("__del__", "<lambda>", "_remove", "remove")  # destructors, and callbacks of weak references
IMPORTING = "<frozen importlib"  # the files of Python's imports; an interrupted one leaves half a module
ROUNDING = 2.0  # times as far from the exact values as the unchanged model, in the training's precision
KEPT, REFUSED, NOT_TRIED = "kept", "refused", "not tried"  # REFUSED: compared and timed, or failed then

State = tuple[str, ...]  # the additions of the changes that were kept, in their order


class Gain(NamedTuple):
    """Time before over time after: the median of paired ratios and its interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f}x ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A small change with a name; `adds` are the settings or names that it adds to the state.

    `evidence` says why a change that promises no time is worth its cost. `is_of_loader`: it is timed with the
    loader, which takes long, and so compared first. `missing` says why it is not tried.
    """

    name: str
    adds: State = ()
    is_exact: bool = True
    evidence: str = ""
    is_of_loader: bool = False
    missing: str = ""
    conflicts_with: tuple[str, ...] = ()  # alternatives: not together with one of these


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A change with its outcome, and why."""

    change: Change
    outcome: str
    why: str
    gain: Gain | None = None
    difference: str = ""


class TimeUpError(Exception):
    """The seconds of a search are over."""


class Refused(Exception):  # an outcome, not a mistake
    """A change that differs from the unchanged model, with its gain and difference if known."""

    def __init__(self, why: str, gain: Gain | None = None, difference: str = "") -> None:
        super().__init__(why)
        self.gain, self.difference = gain, difference


class Bench(Protocol):
    """Builds subjects to time, and traces to compare, from a state."""

    def build(self, state: State, *, has_loader: bool) -> Subject:
        """Return a subject that is timed with its loader or without."""

    def trace(self, state: State, *, is_exact: bool) -> Trace:
        """Return the first steps in the training's precision, or exactly, from the same weights."""


class Search:
    """Tries changes in their order within `seconds`; `report` is given each outcome."""

    def __init__(self, bench: Bench, *, seconds: float, report: Callable[[Tried], None]) -> None:
        self.bench, self.report, self.seconds = bench, report, seconds
        self.state: State = ()  # with all that was kept
        self.tried: list[Tried] = []
        self.took_s = 0.0
        self.start: State = ()  # the unchanged training
        self.references: dict[bool, Trace | None] = {}
        self.current: tuple[State, bool, Subject] | None = None  # of the kept state, ready to be timed
        self.candidate: Subject | None = None

    def run(self, changes: Sequence[Change]) -> "Search":
        before = time.monotonic()
        with ExitStack() as stack:
            stack.callback(self.replace_current, None)
            stack.callback(self.close_candidate)
            for change in changes:
                tried = self.attempt(change, before + self.seconds - time.monotonic())
                self.tried.append(tried)
                self.report(tried)
        self.took_s = time.monotonic() - before
        return self

    def attempt(self, change: Change, seconds: float) -> Tried:
        """Compare and time a change, and keep it where it is good; whatever it raises refuses it."""
        try:
            with time_limit(seconds):
                tried = self.examine(change)
        except TimeUpError:
            why = "the time for tuning was up" + (" before it was measured" if seconds > 0 else "")
            tried = Tried(change=change, outcome=NOT_TRIED, why=why)
        except Refused as refused:
            gain, difference = refused.gain, refused.difference
            tried = Tried(change=change, outcome=REFUSED, why=str(refused), gain=gain, difference=difference)
        except Exception as error:  # noqa: BLE001 - whatever a compiler or a kernel raises
            is_untimed = isinstance(error, UserError) and self.candidate is None
            why = f"not available: {describe_error(error)}"
            tried = Tried(change=change, outcome=NOT_TRIED if is_untimed else REFUSED, why=why)
        if tried.outcome == KEPT:
            self.keep(change)
        self.close_candidate()
        return tried

    def keep(self, change: Change) -> None:
        """Add a change to the state; its subject stands ready for the next one."""
        assert self.candidate is not None  # it was timed
        self.state += change.adds
        self.replace_current((self.state, change.is_of_loader, self.candidate))
        self.candidate = None
        if not change.is_exact:  # later changes are compared with the training as it is now
            self.start, self.references = self.state, {}

    def examine(self, change: Change) -> Tried:
        """Compare and time a change. Raises Refused where it differs too much."""
        if change.missing:
            return Tried(change=change, outcome=NOT_TRIED, why=change.missing)
        kept = [tried.change.name for tried in self.tried if tried.outcome == KEPT]
        if taken := [name for name in kept if name in change.conflicts_with]:
            why = f"an alternative to {taken[0]}, which is kept"
            return Tried(change=change, outcome=NOT_TRIED, why=why)
        state, difference = (*self.state, *change.adds), ""
        if change.is_exact:
            difference = self.compare(state, is_exact=False)
            if change.is_of_loader:
                difference += f"; {self.compare(state, is_exact=True)}"
        gain = self.measure_gain(state, has_loader=change.is_of_loader)
        if gain.low > 1:
            self.replace_current(None)
            again = self.measure_gain(state, has_loader=change.is_of_loader)
            gain = min(gain, again, key=lambda gain: gain.low)
        outcome, why = KEPT, "faster" if gain.low > 1 else f"by its card: {change.evidence}"
        if gain.low <= 1 and not change.evidence:
            outcome, why = REFUSED, "slower" if gain.high < 1 else "no gain beyond noise"
        elif change.is_exact and not change.is_of_loader:
            difference += f"; {self.compare(state, is_exact=True, gain=gain)}"
        return Tried(change=change, outcome=outcome, why=why, gain=gain, difference=difference)

    def measure_gain(self, state: State, *, has_loader: bool) -> Gain:
        """Return the gain of a state over what was kept; its new subject is then the candidate."""
        self.close_candidate()
        if self.current is None or self.current[:2] != (self.state, has_loader):
            self.replace_current(None)
            subject = self.bench.build(self.state, has_loader=has_loader)
            self.current = (self.state, has_loader, subject)
        self.candidate = self.bench.build(state, has_loader=has_loader)
        try:
            turns = take_pairs(self.current[2], self.candidate, seconds=RACE_S, num_pairs=NUM_PAIRS)
            return median_gain([before / after for before, after in turns])
        except Exception:
            self.replace_current(None)  # either of the two may have died
            raise

    def replace_current(self, current: tuple[State, bool, Subject] | None) -> None:
        if self.current:
            self.current[2].close()
        self.current = current

    def close_candidate(self) -> None:
        if self.candidate:
            self.candidate.close()
        self.candidate = None

    def reference(self, *, is_exact: bool) -> Trace | None:
        """Return the unchanged model's trace; None if it does not run exactly."""
        if is_exact not in self.references:
            self.references[is_exact] = self.trace(self.start, is_exact=is_exact)
        return self.references[is_exact]

    def trace(self, state: State, *, is_exact: bool) -> Trace | None:
        """Return the trace of a state; None if it does not run exactly."""
        try:
            return self.bench.trace(state, is_exact=is_exact)
        except UserError:
            if is_exact:
                return None
            raise

    def compare(self, state: State, *, is_exact: bool, gain: Gain | None = None) -> str:
        """Return how far a state is from the unchanged model; raises Refused when it is too far."""
        unchanged = self.reference(is_exact=is_exact)
        trace = unchanged and self.trace(state, is_exact=is_exact)
        if unchanged is None or trace is None:
            return "not compared exactly"
        relative = distance(trace, unchanged)
        precision = str(trace.dtype).removeprefix("torch.")
        difference = f"{precision} " + ("same bits" if relative == 0 else f"{relative:.0e}")
        exact = self.reference(is_exact=True)
        if exact is None or exact.dtype == unchanged.dtype:
            allowed, away = TOLERANCE[unchanged.dtype], relative
        else:
            allowed, away = ROUNDING * distance(unchanged, exact), distance(trace, exact)
        if not (relative == 0 or away <= allowed):  # NaN is too far
            raise Refused(f"differs: by {away:.1e}, {allowed:.1e} allowed", gain, difference)
        return difference


def median_gain(ratios: Sequence[float]) -> Gain:
    estimate = intervals.median(ratios, CONFIDENCE)
    low, high = (estimate.interval.low, estimate.interval.high) if estimate.interval else (0.0, math.inf)
    return Gain(estimate.value, low, high)


def is_importing(frame: FrameType | None) -> bool:
    """True if a module is being imported in a frame or in one that called it."""
    while frame is not None and not frame.f_code.co_filename.startswith(IMPORTING):
        frame = frame.f_back
    return frame is not None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUpError in a block that takes longer; only the main thread can be interrupted."""
    if seconds <= 0:
        raise TimeUpError
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_over
        if frame is not None and (frame.f_code.co_name in DROPPING or is_importing(frame)):
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


def write_table(search: Search) -> str:
    rows = [("change", "gain (99 %)", "largest difference", "outcome", "why")]
    for tried in search.tried:
        difference = tried.difference or ("-" if tried.change.is_exact else "CHANGES TRAINING")
        rows.append((tried.change.name, str(tried.gain or "-"), difference, tried.outcome, tried.why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(f"  {line}" for line in [*lines, f"tuning took {search.took_s:.0f} s"])
