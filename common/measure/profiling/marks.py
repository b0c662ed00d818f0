"""Where the time of a training step goes: marks between its parts, set from outside the loop.

The loop itself has no timing code: while a step is taken apart, its calls are wrapped, then put back.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
        """Begin a step."""
        self.steps.append([("", self.now())])

    def end(self, part: str) -> None:
        """Say which part ends here."""
        self.steps[-1].append((part, self.now()))

    @property
    def last(self) -> str:
        """The part that ended last."""
        return self.steps[-1][-1][0]

    def now(self) -> Any:
        """Return the time in seconds, or an event that will have one."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, before: Any, after: Any) -> float:
        """Return the seconds between two moments; the device has finished."""
        return float(before.elapsed_time(after)) / 1e3 if self.is_gpu else after - before

    def taken(self) -> dict[str, float]:
        """Return the seconds of each part, all steps together, and forget them."""
        found = dict.fromkeys(PARTS, 0.0)
        for moments in self.steps:
            for (_, before), (part, after) in zip(moments, moments[1:], strict=False):
                found[part] += self.between(before, after)
        self.steps = []
        return found


@contextmanager
def taken_apart(run: Training, marks: Marks) -> Iterator[None]:
    """Set marks at the borders inside `run.train_step` while the block runs.

    Clearing gradients and what methods do after a step (averages) count as optimizer.
    """

    def prepared(*arguments: Any) -> Any:
        marks.end("backward" if marks.last == "forward" else "optimizer")  # of the micro-batch before
        batch = run_prepare_batch(*arguments)
        marks.end("host to device")
        return batch

    def after(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            marks.end(part)
            return result

        return call

    def optimizer_step(*arguments: Any) -> Any:
        marks.end("backward")
        return run_optimizer(*arguments)

    run_prepare_batch, run_optimizer, run_loss = run.prepare_batch, run.scaler.step, run.loss
    last = run.methods[-1] if run.methods else None
    wrapped: Any = run  # its methods are replaced on the instance, and found again on the class
    wrapped.prepare_batch, wrapped.scaler.step, wrapped.loss = (
        prepared,
        optimizer_step,
        after(run_loss, "forward"),
    )
    if last:
        last.batch = after(last.batch, "batch methods")  # type: ignore[method-assign]
    try:
        yield
    finally:
        run.loss = run_loss
        del wrapped.prepare_batch, wrapped.scaler.step
        if last:
            del last.batch
