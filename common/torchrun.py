"""torchrun with a quiet end: it notes for the launcher which rank died, and returns the code of the run.

`python -m common.torchrun NUM_RANKS BOARD` starts the ranks on this machine; `launch` calls it.
"""

import logging
import os
import signal
import sys
from typing import Any, NoReturn

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from common import mllog
from common.board import Board
from common.config import ROOT
from common.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK
from common.supervision import ENDINGS, heed_no_more

SHUTDOWN_S = "5"  # for the ranks to end; they heed SIGTERM at once unless they are stopped


def main() -> int:
    """Entry point of the process."""
    num_ranks, path = int(sys.argv[1]), sys.argv[2]
    board = Board.open(path, num_ranks)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun would take 1, and say so
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_S)
    logging.disable()  # what a rank had to say it has said itself
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}"]
    options += [f"--log-dir={os.devnull}"]  # else a folder stays behind, empty
    options += ["--signals-to-handle="]  # by torch's handler, which a second signal enters again
    try:
        for number in ENDINGS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, end)
        try:
            run.main([*options, "--module", "common.timed_run", path])
        finally:
            heed_no_more()
    except SignalException:
        logging.disable(logging.NOTSET)  # a launcher that is gone closes no log
        mllog.abort(ROOT / board.orders["result"], reason=board.interruption())
        return EXIT_INTERRUPTED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        board.killed(rank, -failure.exitcode)
        return EXIT_FINDINGS
    return EXIT_OK


def end(number: int, frame: Any) -> NoReturn:
    """Have torchrun end the ranks, and only once."""
    heed_no_more()
    raise SignalException(f"signal {number}", signal.Signals(number))


if __name__ == "__main__":
    sys.exit(main())
