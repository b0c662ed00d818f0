"""torchrun with a quiet end: one line says which rank ended a run, its exit code becomes that of the run.

`python -m common.torchrun NUM_RANKS SPEC.json` starts the ranks on this machine; `launch` calls it.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from common import mllog
from common.config import ROOT
from common.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK


def main() -> int:
    """Entry point of the process."""
    num_ranks, file = int(sys.argv[1]), sys.argv[2]
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun would take 1, and say so
    logging.disable()  # what a rank had to say it has said itself
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}"]
    try:
        run.main([*options, "--module", "common.timed_run", file])
    except SignalException:
        return EXIT_INTERRUPTED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        reason = f"rank {rank} of {num_ranks} was ended by {signal.Signals(-failure.exitcode).name}"
        print(f"error: {reason}", file=sys.stderr)
        logging.disable(logging.NOTSET)
        mllog.abort(ROOT / json.loads(Path(file).read_text())["result"], reason=reason)
        return EXIT_FINDINGS
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
