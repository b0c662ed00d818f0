"""Keeps the work going when its output cannot be written: a console may be gone, a disk full."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import IO, Any


class Output:
    """A text stream that loses what cannot be written, instead of raising; `error` is the first reason."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write the text, or lose it."""
        self.attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what is held back, or lose it."""
        self.attempt(self.stream.flush)

    def attempt(self, action: Callable[[], object]) -> None:
        """Do something unless the stream has failed before."""
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = error
                with suppress(OSError):  # a stream without a file; else it would try again at exit
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def lasting_output() -> Iterator[Output]:
    """Have what is printed lost where it cannot be written; gives the standard output.

    A standard stream that was closed is opened, to nowhere: the next file would take its number, and get
    what is printed.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    streams = [Output(stream or open(os.devnull, "w")) for stream in (sys.stdout, sys.stderr)]  # noqa: SIM115
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            yield streams[0]
        finally:
            for stream in streams:
                stream.flush()
