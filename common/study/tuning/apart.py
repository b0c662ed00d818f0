"""A subject of a race in a process of its own: memory, threads and compiled code are those of a run.

A ProcessPoolExecutor would not do: before Python 3.14 it has no public way to end a process that hangs.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from common.errors import UserError

GRACE_S = 5.0


class Subject(Protocol):
    """Something that trains: what is timed."""

    def turn(self) -> float:
        """Take a few steps, the same for every subject; returns the seconds of a whole training of them."""

    def close(self) -> None:
        """Let go of what is held."""


class Apart:
    """Builds a subject in a new process, and hands its turns on."""

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
        """Return the seconds that the turn took there."""
        self.pipe.send("turn")
        return self.answer()

    def answer(self) -> float:
        """Wait for what the process says. Raises UserError with what it failed of."""
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise UserError("its process died") from None
        if isinstance(answer, str):
            raise UserError(answer)
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join(GRACE_S)  # it ends when nobody listens
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def serve(pipe: Connection, make: Callable[[], Subject]) -> None:
    """Take a turn for every message, until there is nobody to send one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ConnectionError):  # whoever asked has gone
        try:
            subject = make()
            pipe.send(0.0)
            while True:
                pipe.recv()
                pipe.send(subject.turn())
        except EOFError:
            return
        except UserError as error:
            pipe.send(error.what)
        except Exception as error:  # noqa: BLE001 - told to who asked
            pipe.send(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:90]}")
