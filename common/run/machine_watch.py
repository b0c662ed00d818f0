"""Watches the machine during a run: logs its load in each block, and lowers the number of threads."""

from typing import Any

import torch

from common.evidence.disturbance import SPARE
from common.machine.load import Load, Meter, load_of, may_choose_threads, own_gpu, read_alone
from common.run.mllog import RunLog
from common.training import distributed
from common.training.ranks import RankInfo

BETWEEN_LOOKS_S = 1.0
NUM_CROWDED = 2  # measurements in a row, after which other programs are expected to stay


class MachineWatch:
    """The watch of one rank. `most_threads` is the number that the launcher chose; None: torch's default.

    The number of threads is lowered during the run only where a single rank trains on a CPU and
    OMP_NUM_THREADS is not set. It never rises again: rounding differs between numbers of threads, and each is
    logged.
    """

    def __init__(self, most_threads: int | None, rank_info: RankInfo, device: torch.device) -> None:
        if most_threads is not None and most_threads < torch.get_num_threads():
            torch.set_num_threads(most_threads)
        self.rank_info = rank_info
        self.can_lower = rank_info.world_size == 1 and device.type == "cpu" and may_choose_threads()
        own_gpu()  # NVML starts before the clock does
        self.start_block()

    def start_block(self) -> None:
        self.block, self.looks, self.num_crowded = Meter(), Meter(), 0

    def step(self, log: RunLog, step: int) -> None:
        """Measure the load once a second; lower the number of threads when other programs need the cores."""
        if not self.can_lower or self.looks.seconds < BETWEEN_LOOKS_S:
            return
        load, num_threads = read_alone(self.looks), torch.get_num_threads()
        if load is None or load.taken <= SPARE or load.threads() >= num_threads:
            self.num_crowded = 0
            return
        self.num_crowded += 1
        if self.num_crowded >= NUM_CROWDED:
            self.num_crowded = 0
            torch.set_num_threads(load.threads())
            facts = {"before": num_threads, "step": step, "others": round(load.taken, 2)}
            log.event("threads_lowered", load.threads(), **facts)

    def log_block(self, log: RunLog, **where: Any) -> None:
        """Log the load of the processors and GPUs of all ranks since the block began."""
        readings = distributed.all_gather((self.rank_info.local_rank, self.block.read(), own_gpu()))
        ranks = [reading for _, reading, _ in readings if reading]
        machines = [reading for local_rank, reading, _ in readings if reading and local_rank == 0]
        load = load_of(machines, ranks) if machines else Load(cores=0.0, others=0.0, steal=0.0)
        gpus = [gpu for _, _, gpu in readings if gpu]
        log.event(
            "machine_load",
            round(load.others, 3),
            cores=load.cores,
            steal=round(load.steal, 3),
            threads=torch.get_num_threads() * len(readings),
            involuntary_switches=[rank.switches for rank in ranks],
            **({"gpus": gpus} if gpus else {}),
            **where,
        )
