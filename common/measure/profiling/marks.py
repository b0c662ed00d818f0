"""Marks between the parts of a training step, set from outside the loop.

The loop itself has no timing code: while a step is marked, the calls at the borders of its parts are wrapped.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from common.measure.clock import synchronize
from common.run.loop import TrainingRun
from common.training.method import Batch
from common.training.step import Training

PARTS = ("data wait", "batch methods", "host to device", "forward", "backward", "optimizer", "logging")


class Marks:
    """Moments of a step, each named after the part that ends there; so the parts add up to the step.

    On a GPU the moments are events in its queue: a part takes what the device spends between two of them, and
    a loader that is late while the device still has work costs nothing. Elsewhere they are the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.steps: list[list[tuple[str, Any]]] = []

    def start(self) -> None:
        self.steps.append([("", self.now())])

    def end(self, part: str) -> None:
        self.steps[-1].append((part, self.now()))

    def now(self) -> Any:
        """Return the time in seconds, or an event that will have one."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def mean_seconds(self) -> dict[str, float]:
        """Average the seconds of each part over the steps; the device is idle."""
        totals = dict.fromkeys(PARTS, 0.0)
        for moments in self.steps:
            for (_, before), (part, after) in itertools.pairwise(moments):
                totals[part] += before.elapsed_time(after) / 1e3 if self.is_gpu else after - before
        return {part: seconds / len(self.steps) for part, seconds in totals.items()}


@contextmanager
def mark_parts(run: Training, marks: Marks) -> Iterator[None]:
    """Set marks at the borders inside `run.train_step` while the block runs.

    Clearing gradients and what methods do after a step (averages) count as optimizer.
    """
    with ExitStack() as stack:

        def wrap(target: Any, name: str, *, follows_part: bool = False, part: str = "") -> None:
            function = getattr(target, name)

            def call(*arguments: Any, **named: Any) -> Any:
                if follows_part:  # a backward pass, unless gradients are cleared for the first one
                    last_part = marks.steps[-1][-1][0]
                    marks.end("backward" if last_part == "forward" else "optimizer")
                result = function(*arguments, **named)
                if part:
                    marks.end(part)
                return result

            stack.enter_context(mock.patch.object(target, name, call))

        wrap(run, "prepare_batch", follows_part=True, part="host to device")
        wrap(run.scaler, "step", follows_part=True)
        wrap(run, "loss", part="forward")
        if run.methods:
            wrap(run.methods[-1], "batch", part="batch methods")
        yield


def time_parts(
    run: TrainingRun, next_batch: Callable[[], Batch], steps: Iterator[int], *, settling: int, num_steps: int
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and of each of its parts; the first `settling` steps do not count."""
    marks = Marks(run.device)
    run.clock.console, run.clock.live = Console(quiet=True), None
    with mark_parts(run, marks):
        for number in range(settling + num_steps):
            if number == settling:
                synchronize(run.device)
                marks.steps = []
                before = time.perf_counter()
            marks.start()
            batch = next_batch()
            marks.end("data wait")
            loss = run.train_step(batch, next(steps))
            marks.end("optimizer")
            run.clock.step(loss)
            marks.end("logging")
        synchronize(run.device)
        seconds = time.perf_counter() - before
    return seconds / num_steps, marks.mean_seconds()
