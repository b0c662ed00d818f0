"""Starts processes together, waits for them, and ends them with everything that they started."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import psutil

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

POLL_S = 0.05
KILLED_S = 30.0  # for killed processes to end: a GPU's memory takes seconds, uninterruptible sleep for ever
REST_S = 2.0  # for descendants of the processes to end
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Exit(NamedTuple):
    """The number of a process, from 0, and its exit code; minus the signal that ended it."""

    number: int
    code: int


class Processes:
    """Runs `python ARGUMENTS` once for each of `environments`, each added to that of this process.

    Each process has a session of its own, so that only we signal it, and gets SIGTERM when this process dies.
    `end` ends all of them and everything that they have started: on Linux this process adopts their orphans.
    """

    def __init__(
        self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], **options: Any
    ) -> None:
        if LIBC:
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.others = {child.pid for child in psutil.Process().children(recursive=True)}
        self.processes: list[subprocess.Popen[Any]] = []
        parent = os.getpid()
        try:
            for environment in environments:
                process = subprocess.Popen(
                    [sys.executable, *arguments],
                    env=os.environ | environment,
                    start_new_session=True,
                    preexec_fn=lambda: end_with_parent(parent),
                    **options,
                )
                self.processes.append(process)
        except BaseException:
            self.end(grace_s=0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(grace_s=0)

    def wait(self, timeout_s: float) -> Exit | None:
        """Wait until all have ended with code 0, or one has failed; returns None after `timeout_s`.

        Of several failures it returns the likeliest cause: SIGKILL, then another signal, then a code.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            codes = self.poll()
            if failed := [Exit(number, code) for number, code in enumerate(codes) if code]:
                return min(
                    failed, key=lambda exit: (exit.code != -signal.SIGKILL, exit.code > 0, exit.number)
                )
            if None not in codes:
                return Exit(0, 0)
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)

    def poll(self) -> list[int | None]:
        """Return the exit codes, None of those that run.

        Signals are held back: Ctrl-C could leave the lock of a Popen taken, which would then never end.
        """
        with delay_signals():
            return [process.poll() for process in self.processes]

    def end(self, grace_s: float) -> None:
        """Send SIGTERM, kill after `grace_s`, then end the descendants that are left."""
        if grace_s:
            self.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while None in self.poll() and time.monotonic() < deadline:
                time.sleep(POLL_S)
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + KILLED_S
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        children = psutil.Process().children(recursive=True)
        _, rest = psutil.wait_procs([child for child in children if child.pid not in self.others], REST_S)
        for child in rest:  # stopped, or slow to end
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(rest, REST_S)

    def signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)


def end_with_parent(parent: int) -> None:
    """Make the kernel send SIGTERM when the parent dies (Linux); at once when it has died already."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


def process_status(pid: int) -> str:
    """Return psutil's status of a process (running, sleeping, stopped, ...), gone, or unknown."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:
        return "unknown"


def wait_for_handler(pid: int, number: int, *, limit_s: float) -> None:
    """Wait until a process has handled a signal that it was sent, for `limit_s` at most.

    Until then Linux keeps it pending, and blocked in the thread whose handler runs. Elsewhere this waits
    for the whole time.
    """
    ends, bit = time.monotonic() + limit_s, 1 << number - 1
    while time.monotonic() < ends:
        time.sleep(POLL_S)
        with suppress(OSError):  # a thread that has ended meanwhile
            texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
            masks = [mask for text in texts for mask in re.findall(r"(?:Pnd|Blk):\s*(\w+)", text)]
            if masks and not any(int(mask, 16) & bit for mask in masks):
                return


class Output:
    """A text stream that loses what cannot be written, instead of raising; `error` is the first reason."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        self.attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, action: Callable[[], object]) -> None:
        """Run an action unless the stream has failed before."""
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = error
                with suppress(OSError):  # else Python would flush it again at exit
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def tolerate_lost_output() -> Iterator[Output]:
    """Discard output that cannot be written, instead of failing; yields the standard output.

    A closed standard stream is opened to the null device: else the next file that is opened would get its
    number, and the output.
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


@contextmanager
def output_to_stderr() -> Iterator[None]:
    """Send the output of this process, and of those that it starts, to the standard error."""
    sys.stdout.flush()
    with redirect_stdout(sys.stderr):
        before = os.dup(1)
        try:
            os.dup2(2, 1)
            yield
        finally:
            os.dup2(before, 1)
            os.close(before)


@contextmanager
def handle_ending_signals(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Call `handler` for the signals that end a process until the block ends.

    A signal that is ignored stays so, as SIGHUP under nohup.
    """
    previous = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        for number, before in previous.items():
            if before not in (signal.SIG_IGN, None):
                signal.signal(number, handler)
        yield
    finally:
        for number, before in previous.items():
            if before is not None:  # None: not installed from Python
                signal.signal(number, before)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Hold back the signals that would end this process until the block has ended."""
    received: list[int] = []
    try:
        with handle_ending_signals(lambda number, _: received.append(number)):
            yield
    finally:  # also where the block failed
        if received:
            signal.raise_signal(received[0])


def raise_interrupt(number: int, frame: Any) -> None:
    """Treat SIGTERM, and a closed terminal, as Ctrl-C."""
    ignore_ending_signals()
    raise KeyboardInterrupt


def ignore_ending_signals() -> None:
    """Ignore further signals of a process that is ending: a second Ctrl-C must not leave the log open."""
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
