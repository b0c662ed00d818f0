"""The rank of this process among those of a run, and its part of a batch. Needs no torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import UserError

STORE = "TTT_STORE"  # names the file (FileStore) through which the ranks of one machine meet

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")  # srun alone sets the last one
HINT = "start the ranks with torchrun or srun"
PORTS = range(20_000, 30_000)  # below the ephemeral ports; a Slurm job takes one by its id


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One process of the `world_size` that train together; `local_rank` counts on its own machine.

    At most `num_local` of them share a machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_local: int = 1

    def part(self, total: int) -> range:
        """Return the indices of `total` samples that this rank takes."""
        return part(total, self.rank, self.world_size)


SINGLE_RANK = RankInfo()


def read_rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Return the rank that torchrun or srun gave this process; `SINGLE_RANK` where neither did.

    Raises UserError for an incomplete environment, and for a rank beyond the world size.
    """
    names = TORCHRUN if TORCHRUN[2] in environment else SLURM
    if names[2] not in environment:
        return SINGLE_RANK
    texts = {name: environment.get(name, "") for name in names}
    wrong = next((name for name, text in texts.items() if not text.isdecimal()), None)
    if wrong is not None:
        raise UserError(
            f"'{texts[wrong]}' is not a number, but {names[2]} is set",
            where=wrong,
            hint=HINT,
        )
    rank, local_rank, world_size = map(int, texts.values())
    if rank >= world_size:
        raise UserError(f"rank {rank} of {world_size}", where=names[0], hint="ranks count from 0")
    shared = environment.get("LOCAL_WORLD_SIZE" if names is TORCHRUN else "SLURM_STEP_TASKS_PER_NODE", "")
    counts = re.findall(r"(?:^|,)([0-9]+)", shared)  # Slurm writes 8(x2),4
    num_local = max(map(int, counts), default=1)
    return RankInfo(rank=rank, local_rank=local_rank, world_size=world_size, num_local=num_local)


def count_all(num_ranks: int) -> int:
    """Count the ranks of a run that starts `num_ranks` here, or that torchrun or srun has started."""
    return max(num_ranks, read_rank_info().world_size)


def meeting_point(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return host and port at which the ranks find each other: torchrun's, or the first host of a Slurm step.

    Raises UserError where the environment names neither, and for an invalid port.
    """
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    job = environment.get("SLURM_JOB_ID", "")
    if host is None and nodes:
        host = first_host(nodes)
    if port is None and job.isdecimal():
        port = str(PORTS[int(job) % len(PORTS)])
    if host is None or port is None:
        raise UserError("MASTER_ADDR and MASTER_PORT are not set", hint=HINT)
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"'{port}' is not a port", where="MASTER_PORT", hint="a number from 1 to 65535")
    return host, port


def first_host(nodes: str) -> str:
    """Expand a Slurm list such as `gpu[003-010,12],login` to its first host."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def part(total: int, number: int, num_parts: int) -> range:
    """Return the indices of one of `num_parts` contiguous parts of range(total); sizes differ by 1 at most.

    For any number of parts they are range(total) when joined.
    """
    return range(total * number // num_parts, total * (number + 1) // num_parts)
