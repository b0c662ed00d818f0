"""The process of one rank: runs the loop, reports a failure to the launcher, and ends in time.

`launch` starts it as `python -m common.run.worker HEARTBEAT`.
"""

import faulthandler
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from common.errors import EXIT_FINDINGS, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE, UserError, name_error
from common.processes import ignore_ending_signals, raise_interrupt, tolerate_lost_output
from common.repository import WORKSPACE, explain_machine_fault
from common.run import mllog
from common.run.heartbeat import Heartbeat, Slot
from common.run.loop import make_run
from common.run.run_set import Spec
from common.run.supervision import DUMP, TEMPORARY
from common.training import distributed, memory, ranks
from common.training.ranks import RankInfo

WORKERS_END_S = 2.0  # for a loader's workers to end
PEERS_END_S = 2.0  # in which the launcher notices that a rank has died, and ends the others
LOST_PEER = re.compile(
    r"by peer|[Pp]eer closed|Broken pipe|remote process exited|Socket closed"
)  # gloo, NCCL
LOST_PEER_CHARACTERS = 80  # of what the library says
INTERRUPTED_S = 5.0  # for the main thread to end by itself; less than the launcher's patience


def run_rank(rank_info: RankInfo, heartbeat: Heartbeat, slot: Slot) -> int:
    """Run this rank by the specification that rank 0 reads; returns the exit code.

    A failing rank reports its error to the launcher. Ranks other than 0, and ranks that may only have lost a
    peer, then wait, so that the launcher ends them and the original error is reported.
    """
    try:
        try:
            with distributed.process_group(rank_info):
                spec = heartbeat.spec if rank_info.rank == 0 else {}
                code = make_run(Spec(**distributed.broadcast(spec)), rank_info, slot)
                leave(code)  # destroying the process group may abort a rank whose result is whole
        except Exception as raised:
            error = explain_machine_fault(raised) or raised
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else torch raises here when a worker ends
            slot.fail(describe_error(error))
            code = exit_code_of(error)
            if rank_info.world_size > 1 and (rank_info.rank or code != EXIT_USAGE):
                time.sleep(PEERS_END_S)
            if code == EXIT_INTERNAL:
                traceback.print_exc()
            return code  # ending the group would wait for messages that never come
    except KeyboardInterrupt:
        tidy_up(rank_info, heartbeat)
        return EXIT_INTERRUPTED


def tidy_up(rank_info: RankInfo, heartbeat: Heartbeat) -> None:
    """Close the log and remove temporary files of an interrupted run whose launcher is gone."""
    if not heartbeat.is_shutting_down:
        if rank_info.rank == 0:
            with suppress(OSError, UserError):  # the result is gone, or its disk is full
                mllog.abort(WORKSPACE / heartbeat.spec["result"], reason=heartbeat.interruption())
        if TEMPORARY in os.environ:
            shutil.rmtree(os.environ[TEMPORARY], ignore_errors=True)


def end_in_time(rank_info: RankInfo, heartbeat: Heartbeat) -> None:
    """Handle SIGTERM, and end this process even while its main thread waits for a device or a dead peer.

    Python runs signal handlers between two bytecode instructions of the main thread only. The wakeup file
    descriptor is written at once, and a thread reads it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A loader's worker must not write to it.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGTERM, raise_interrupt)

    def watch() -> None:
        while os.read(reader, 1) != bytes([signal.SIGTERM]):
            pass
        time.sleep(INTERRUPTED_S)
        try:
            tidy_up(rank_info, heartbeat)
        finally:  # nothing may keep a rank whose launcher is gone
            leave(EXIT_INTERRUPTED)

    threading.Thread(target=watch, name="end in time", daemon=True).start()


def leave(code: int) -> NoReturn:
    """End this process now: first the loader's workers, then without any exit handler that could fail."""
    if threading.current_thread() is threading.main_thread():
        ignore_ending_signals()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    threading.excepthook = lambda _: None  # silences threads that read from a worker
    workers, deadline = multiprocessing.active_children(), time.monotonic() + WORKERS_END_S
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        worker.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code_of(error: Exception) -> int:
    if isinstance(error, UserError) or memory.is_out_of_memory(error):
        return EXIT_USAGE
    is_killed = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")
    return EXIT_FINDINGS if is_killed or has_lost_peer(error) else EXIT_INTERNAL  # as for a killed rank


def has_lost_peer(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or bool(LOST_PEER.search(str(error)))


def describe_error(error: Exception) -> str:
    """Return the message of a UserError, and the class and first line of any other error.

    The launcher knows why a peer on this machine died; the output of another machine says why its peers did.
    """
    if isinstance(error, UserError):
        return str(error)
    if has_lost_peer(error):
        return f"lost a peer, whose machine says why ({name_error(error, LOST_PEER_CHARACTERS)})"
    return name_error(error)


def main() -> NoReturn:
    rank_info = ranks.read_rank_info()
    heartbeat = Heartbeat.open(sys.argv[1], rank_info.world_size)
    faulthandler.enable()
    faulthandler.register(DUMP, all_threads=True)
    end_in_time(rank_info, heartbeat)
    with tolerate_lost_output():
        leave(run_rank(rank_info, heartbeat, heartbeat.slots[rank_info.rank]))


if __name__ == "__main__":
    main()
