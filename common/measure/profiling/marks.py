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
        """Set the mark at which a part ends."""
        self.steps[-1].append((part, self.now()))

    def now(self) -> Any:
        """Return the time in seconds, or an event that will have one."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) / 1e3 if self.is_gpu else after - before

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds of each part, all steps together, and forget them; the device is idle."""
        totals = dict.fromkeys(PARTS, 0.0)
        for moments in self.steps:
            for (_, before), (part, after) in itertools.pairwise(moments):
                totals[part] += self.seconds_between(before, after)
        self.steps = []
        return totals


@contextmanager
def mark_parts(run: Training, marks: Marks) -> Iterator[None]:
    """Set marks at the borders inside `run.train_step` while the block runs.

    Clearing gradients and what methods do after a step (averages) count as optimizer.
    """

    def prepare_batch(*arguments: Any) -> Any:
        last_part = marks.steps[-1][-1][0]
        marks.end("backward" if last_part == "forward" else "optimizer")  # of the micro-batch before
        batch = run_prepare_batch(*arguments)
        marks.end("host to device")
        return batch

    def end_after(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            marks.end(part)
            return result

        return call

    def step_optimizer(*arguments: Any) -> Any:
        marks.end("backward")
        return run_optimizer(*arguments)

    run_prepare_batch, run_optimizer = run.prepare_batch, run.scaler.step
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(run, "prepare_batch", prepare_batch))
        stack.enter_context(mock.patch.object(run.scaler, "step", step_optimizer))
        stack.enter_context(mock.patch.object(run, "loss", end_after(run.loss, "forward")))
        if run.methods:
            last = run.methods[-1]
            stack.enter_context(mock.patch.object(last, "batch", end_after(last.batch, "batch methods")))
        yield
