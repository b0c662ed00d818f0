"""Supervises the ranks of a run: starts them, passes signals on, ends them when they make no progress."""

import getpass
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from common.errors import EXIT_INTERRUPTED
from common.machine.load import threads_of_rank
from common.processes import (
    Exit,
    Processes,
    delay_signals,
    handle_ending_signals,
    ignore_ending_signals,
    process_status,
    raise_interrupt,
    wait_for_handler,
)
from common.repository import WORKSPACE
from common.run.heartbeat import COUNT, POSITION, Heartbeat
from common.training.ranks import STORE

TEMPORARY = "TTT_TEMPORARY"  # names the folder of a run's temporary files
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
GRACE_S = 15  # how long a run may take to close its log when it is told to end
PEERS_GRACE_S = 5  # how long the other ranks may take after one has failed
POLL_S = 1.0
START_S = 1800.0  # before every rank has taken a step: MLPerf's limit for initialization, closed division
DUMP_S = 5.0  # at most, for a rank to write its stack
DUMP = signal.SIGUSR1  # on which a rank writes its stack
STUCK = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP)


def rank_environments(num_ranks: int, folder: Path) -> list[dict[str, str]]:
    """Return the environment variables of each rank of this machine, as torchrun would set them.

    The ranks meet in a file in `folder`: torchrun opens a port on every interface, whose messages it
    unpickles. gloo and NCCL listen on the loopback interface. A single rank needs no variables.
    """
    if num_ranks == 1:
        return [{}]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        STORE: str(folder / "store"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or LOOPBACK,
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME") or f"={LOOPBACK}",  # =: this name exactly
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_of_rank(num_ranks)),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def temporary_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that put temporary files of a rank and its workers in `folder`.

    A killed process leaves its files there. Kernels that torch compiles stay in its usual cache, for the next
    run.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        user = f"uid_{os.getuid()}"
    kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    kernels = kernels or os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return {"TMPDIR": str(folder), TEMPORARY: str(folder), "TORCHINDUCTOR_CACHE_DIR": kernels}


def supervise(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]] = ({},),
    watchdog: "Watchdog | None" = None,
    folder: Path = WORKSPACE,
) -> Exit:
    """Run `python ARGUMENTS` in a folder, in each environment, to the end; returns the first failure, or 0.

    An interruption is passed on as SIGTERM; the processes get time to close their log, and the code is
    EXIT_INTERRUPTED. When this process dies, the kernel sends them SIGTERM. A rank in uninterruptible sleep,
    which no signal ends, is left behind.
    """
    processes, grace_s = None, float(PEERS_GRACE_S)
    with handle_ending_signals(raise_interrupt):
        try:
            with delay_signals():  # a start is whole or has not begun
                processes = Processes(arguments, environments, cwd=folder)
            while (ended := processes.wait(POLL_S)) is None:
                if watchdog and watchdog.check(processes):
                    return Exit(0, -signal.SIGKILL)
            return ended
        except KeyboardInterrupt:  # the only one: raise_interrupt ignores further signals
            grace_s = GRACE_S
            return Exit(0, EXIT_INTERRUPTED)
        finally:
            ignore_ending_signals()
            if watchdog:
                watchdog.heartbeat.announce_shutdown()
            if processes:
                processes.end(grace_s)


class Watchdog:
    """Ends the `local_ranks` when none of them has made progress for `limit_s`.

    `check` is called once a second, and the calls are counted: a rank does not hang while its machine sleeps.
    """

    def __init__(self, heartbeat: Heartbeat, local_ranks: Sequence[int], limit_s: float) -> None:
        self.heartbeat, self.local_ranks, self.limit_s = heartbeat, local_ranks, limit_s
        self.seen: list[list[int]] = []
        self.quiet_s = 0.0

    def check(self, processes: Processes) -> bool:
        """Compare the slots with those of the check before, and end ranks that hang; True if they did."""
        words = [self.heartbeat.slots[rank].words[: COUNT + 1].tolist() for rank in self.local_ranks]
        self.quiet_s = self.quiet_s + POLL_S if words == self.seen else 0.0
        self.seen = words
        if self.quiet_s < self.allowed_s():
            return False
        self.end(processes)
        return True

    def allowed_s(self) -> float:
        """The longest time without progress: more until every rank has taken a step."""
        is_running = all(self.heartbeat.slots[rank].step for rank in self.local_ranks)
        return self.limit_s if is_running else max(self.limit_s, START_S)

    def end(self, processes: Processes) -> None:
        """Dump the stacks of the ranks, record which was late, and kill all: hung ranks ignore SIGTERM."""
        slots = self.heartbeat.slots
        running = dict(zip(self.local_ranks, processes.processes, strict=True))
        states = {rank: process_status(process.pid) for rank, process in running.items()}
        late = self.late(states)
        is_stuck = f"{states[late[0]]}, " if states[late[0]] in STUCK else ""
        cause = f"no progress for {self.quiet_s:.0f} s (--hung-after), {is_stuck}{slots[late[0]].phase}"
        if len(late) > 1:
            cause += f"; {len(late)} ranks stand there, their stacks are above"
        self.heartbeat.record_death(late[0], cause)
        # Stopped ranks come last: SIGCONT wakes them.
        for rank in sorted(running, key=lambda number: states[number] in STUCK):
            who = f"rank {rank}, after step {slots[rank].step}, {slots[rank].phase}, {states[rank]}"
            print(f"--- stack of {who}", file=sys.stderr, flush=True)
            for number in (DUMP, signal.SIGCONT):
                running[rank].send_signal(number)
            wait_for_handler(running[rank].pid, DUMP, limit_s=DUMP_S)
        processes.signal(signal.SIGKILL)

    def late(self, states: dict[int, str]) -> list[int]:
        """Return the ranks that the others wait for: the ones with the least progress, or their stopped ones.

        Ranks meet in every step, so a waiting rank has taken at least as many steps as the one that it waits
        for.
        """
        last = min(self.heartbeat.slots[rank].words[POSITION] for rank in self.local_ranks)
        behind = [rank for rank in self.local_ranks if self.heartbeat.slots[rank].words[POSITION] == last]
        return [rank for rank in behind if states[rank] in STUCK] or behind
