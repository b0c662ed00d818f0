"""The environment of each rank that a launch starts on this machine."""

import getpass
import os
import sys
import tempfile
from pathlib import Path

from common.machine.load import threads_of_rank
from common.training.ranks import STORE

TEMPORARY = "TTT_TEMPORARY"  # names the folder of a run's temporary files
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


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
