"""Times training steps and shows progress without making the device wait."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

FETCH_EVERY_S = 0.5  # how often the loss is fetched and the progress line redrawn
PRINT_EVERY_S = 10.0  # how often a line is printed where no line can be redrawn
DROPPED = ("rate", "loss", "elapsed", "step", "left", "quality")  # from the progress line, in this order
LOADER_BOUND = 0.1  # of the time is spent waiting: above, the loader is the bottleneck


def bottleneck(
    num_samples: int, *, elapsed_s: float, waited_s: float, computed_s: float, loading_s: float | None
) -> str:
    """Describe the rates of loader and step, alone and together, and name the bottleneck.

    In `elapsed_s` the training took `num_samples`, and waited `waited_s` for them. The step alone takes the
    rest, but not less than `computed_s`, the time of its passes alone: a GPU computes while its host waits.
    The loader worked for `loading_s`; None: unknown, and its rate is at least that of both together.
    """
    is_waiting = waited_s > LOADER_BOUND * elapsed_s
    together = num_samples / elapsed_s
    alone = num_samples / min(elapsed_s, max(elapsed_s - waited_s, computed_s))
    loader = f"{together:.0f}{'' if is_waiting else ' or more'}"
    if loading_s:
        loader = f"alone {num_samples / loading_s:.0f}"
    return (
        f"loader {loader}, step alone {alone:.0f}, together {together:.0f}; {waited_s / elapsed_s:.0%} of "
        f"the time waits: the {'loader' if is_waiting else 'step'} is the bottleneck"
    )


def join_parts(parts: Mapping[str, str], width: int | None) -> str:
    """Join the parts of the progress line in at most `width` columns; None: no limit.

    Parts that do not fit are left out whole, the least important first: no number is cut.
    """
    for num_dropped in range(len(DROPPED) + 1):
        shown = [text for name, text in parts.items() if text and name not in DROPPED[:num_dropped]]
        line = "".join(f"  {text}" for text in shown)
        if width is None or len(line) <= width:
            break
    return line


def time_left(num_steps: int, steps_per_s: float, until_expected_s: float) -> str:
    """Describe the time left: by earlier runs, else to the last step, without evaluations."""
    if until_expected_s > 0:
        return f"about {duration(until_expected_s)} left"
    return f"about {duration(num_steps / max(steps_per_s, 1e-9))} to the last step"


def duration(seconds: float) -> str:
    """Format seconds, as minutes or hours where those are easier to read; never 0."""
    seconds = max(seconds, 1.0)
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36000 else f"{seconds / 3600:.0f} h"


class StepClock:
    """Counts steps; copies the loss asynchronously now and then, and shows the last one that arrived.

    `show(steps, steps_per_s, loss)` makes the text of the progress line. Times are monotonic seconds.
    """

    def __init__(self, show: Callable[[int, float, float], str], console: Console) -> None:
        self.show, self.console = show, console
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self.num_steps, self.loss = 0, float("nan")
        self.copy: Tensor | None = None
        self.copied: Any = None  # a CUDA event
        self.fetched_at = self.printed_at = time.monotonic()
        self.start()

    @property
    def width(self) -> int | None:
        """The columns of the progress line; None where the output is not a terminal.

        The last column stays free: some terminals begin a new line there.
        """
        return self.console.width - 1 if self.live else None

    def start(self) -> None:
        self.block_start = self.paced_from = time.monotonic()
        self.steps_before_block = self.steps_before_pace = self.num_steps

    def resume(self, num_steps: int, steps_before_block: int, block_start: float) -> None:
        """Go on in a block that another process has started."""
        self.num_steps = num_steps
        self.start()
        self.block_start, self.steps_before_block = block_start, steps_before_block

    def step(self, loss: Tensor) -> None:
        """Count a step; `loss` is its scalar loss on the device."""
        self.num_steps += 1
        now = time.monotonic()
        if now - self.fetched_at < FETCH_EVERY_S:
            return
        self._fetch(loss)
        self.fetched_at = now
        text = self.show(self.num_steps, self.pace(), self.loss)
        if self.live:
            self.live.start()
            self.live.update(Text(text), refresh=True)
        else:
            self.print_now_and_then(text)

    def pace(self) -> float:
        """Return the steps per second of this process in the block, without the gap before a resumption."""
        return (self.num_steps - self.steps_before_pace) / max(time.monotonic() - self.paced_from, 1e-9)

    def steps_per_s(self) -> float:
        """Return the steps per second of the whole block."""
        return (self.num_steps - self.steps_before_block) / max(time.monotonic() - self.block_start, 1e-9)

    def finish_loss(self, loss: Tensor) -> float:
        """Return the loss of the last step of a block. Waits for the device, which evaluation does anyway."""
        self.loss = float(loss.detach())
        return self.loss

    def print_line(self, text: str) -> None:
        """Print one lasting line above the progress line."""
        self.console.print(Text(text))

    def print_now_and_then(self, text: str) -> None:
        """Print a lasting line, unless the one before is too recent."""
        if time.monotonic() - self.printed_at >= PRINT_EVERY_S:
            self.printed_at = time.monotonic()
            self.print_line(text)

    def close(self) -> None:
        if self.live:
            self.live.stop()

    def _fetch(self, loss: Tensor) -> None:
        if not loss.is_cuda:
            self.loss = float(loss.detach())
        elif self.copied is None or self.copied.query():
            if self.copy is not None:
                self.loss = float(self.copy)
            self.copy = loss.detach().to("cpu", non_blocking=True)
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()
