"""Subjects of a race: a training that takes turns of a few steps, here or in a process of its own.

In a process of its own, memory, threads and compiled code are those of a run. A ProcessPoolExecutor would not
do: before Python 3.14 it has no public way to end a process that hangs.
"""

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from common.errors import UserError, name_error
from common.measure.clock import interleave, time_call

GRACE_S = 5.0


class Subject(Protocol):
    """A training that is timed."""

    def turn(self) -> float:
        """Take a few steps; returns seconds that are comparable between subjects."""

    def close(self) -> None:
        """Free its memory, and end its processes."""


def take_pairs(
    one: Subject, other: Subject, *, seconds: float, num_pairs: tuple[int, int]
) -> list[tuple[float, float]]:
    """Time two subjects in turns for about `seconds`; returns the seconds of both in every pair of turns.

    `num_pairs` are the fewest and the most. The number is decided before the first pair counts; the subject
    that begins alternates.
    """
    trials = {"one": one.turn, "other": other.turn}
    interleave(trials)  # the first step of a shape, first use of memory
    start = time.monotonic()
    interleave(trials)
    lap_s = time.monotonic() - start
    number = min(max(round(seconds / lap_s), num_pairs[0]), num_pairs[1])
    turns = interleave(trials, rounds=number, rotates=True)
    return [*zip(turns["one"], turns["other"], strict=True)]


@dataclass(kw_only=True)
class Steps:
    """Takes turns of steps on batches that were read before, or of a loader that is timed, too.

    A loader prepared `num_prefetched` batches during the turn of the other subject: they are not timed.
    """

    step: Callable[[int, Any], object]  # takes its number in the turn, and a batch
    batches: Iterator[Any]
    num_steps: int
    num_prefetched: int
    device: torch.device
    num_turns: float = 1.0  # of a whole training

    def turn(self) -> float:
        """Return the seconds of a turn, times `num_turns`."""
        for _ in range(self.num_prefetched):
            next(self.batches)
        return time_call(self.take_steps, self.device) * self.num_turns

    def take_steps(self) -> None:
        for number in range(self.num_steps):
            self.step(number, next(self.batches))

    def close(self) -> None:
        """End the processes of the loader."""
        self.batches = iter(())


class SubjectProcess:
    """Builds a subject in a new process, and passes its turns on."""

    def __init__(self, make: Callable[[], Subject]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make))
        self.process.start()
        theirs.close()
        try:
            self.answer()
        except BaseException:
            self.close()
            raise

    def turn(self) -> float:
        self.pipe.send("turn")
        return self.answer()

    def answer(self) -> float:
        """Wait for a message of the process. Raises UserError with its failure."""
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise UserError("its process died") from None
        if isinstance(answer, str):
            raise UserError(answer)
        return float(answer)

    def close(self) -> None:
        self.pipe.close()
        self.process.join(GRACE_S)  # it ends when nobody listens
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def serve(pipe: Connection, make: Callable[[], Subject]) -> None:
    """Take a turn for every message, until there is nobody to send one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ConnectionError):  # nobody waits for the answer any more
        try:
            subject = make()
            pipe.send(0.0)
            while True:
                pipe.recv()
                pipe.send(subject.turn())
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 - the other end of the pipe reports it
            pipe.send(describe_error(error))


def describe_error(error: Exception) -> str:
    """Return a mistake of the user in its words, another error by its kind and its first line."""
    return error.what if isinstance(error, UserError) else name_error(error, 90)
