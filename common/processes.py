"""Processes on this machine: started together, waited for, ended with all that they started."""

import ctypes
import getpass
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from common.machine.load import threads_of_rank

POLL_S = 0.05
REST_S = 2.0  # for what the processes started to end after them
TEMPORARY = "TTT_TEMPORARY"  # names the folder of a run's temporary files
STORE = "TTT_STORE"  # names the file in which the ranks of one machine meet
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Exit(NamedTuple):
    """The number of a process, from 0, and its exit code; a signal that ended it is negative."""

    number: int
    code: int


class Processes:
    """`python ARGUMENTS` once for each of `environments`, which are added to that of this process.

    Each has a session of its own, so that only we signal it, and gets SIGTERM when this process dies. `end`
    leaves none of them, and nothing that they have started: on Linux this process adopts their orphans.
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
                    preexec_fn=lambda: end_with(parent),
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

    def wait(self, timeout_s: float = float("inf")) -> Exit | None:
        """Wait until all have ended well, or one has not: returns that one; None when the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            codes = [process.poll() for process in self.processes]
            if failed := [Exit(number, code) for number, code in enumerate(codes) if code]:
                return min(
                    failed, key=lambda exit: (exit.code != -signal.SIGKILL, exit.code > 0, exit.number)
                )
            if None not in codes:
                return Exit(0, 0)
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)

    def end(self, grace_s: float) -> None:
        """Tell those that run to end, kill them after `grace_s`, then what they have left behind."""
        if grace_s:
            self.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        children = psutil.Process().children(recursive=True)
        _, rest = psutil.wait_procs([each for each in children if each.pid not in self.others], REST_S)
        for each in rest:  # stopped, or in no hurry
            with suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(rest, REST_S)

    def signal(self, number: int) -> None:
        """Send a signal to those that run."""
        for process in self.processes:
            process.send_signal(number)


def end_with(parent: int) -> None:
    """Have this process told to end when its parent dies, where Linux can, or has died already."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


def state(pid: int) -> str:
    """Return what the system says of a process: running, sleeping, stopped, ..."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def rank_environments(num_ranks: int, folder: str) -> list[dict[str, str]]:
    """Return what tells each rank of this machine its place, as torchrun would.

    The ranks meet in a file in `folder`: torchrun opens a port on every interface, whose messages it
    unpickles, and one machine needs none. A lone rank needs nothing.
    """
    if num_ranks == 1:
        return [{}]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        STORE: str(Path(folder, "store")),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_of_rank(num_ranks))),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def temporary_environment(folder: str) -> dict[str, str]:
    """Return what makes a rank and its workers keep their temporary files in `folder`.

    A process that is killed leaves its own there. What torch has compiled is for the next run, too, and stays
    where it would be.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in a container
        user = f"uid_{os.getuid()}"
    kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    kernels = kernels or os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return {"TMPDIR": folder, TEMPORARY: folder, "TORCHINDUCTOR_CACHE_DIR": kernels}
