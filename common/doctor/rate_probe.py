"""One rank of a measurement by `ttt accept`: training steps of a configuration, on synthetic batches.

`python -m common.doctor.rate_probe OUTPUT BENCHMARK CONFIGURATION SIZE SECONDS` runs as each rank, on the
batch of the published runs per GPU, or the whole batch of size mini; rank 0 writes all figures.
"""

import json
import math
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from common.machine.load import Meter, load_of, own_gpu
from common.measure.clock import interleave, synchronize
from common.measure.device_run import load_for_ranks, open_run
from common.measure.throughput import steppers, time_sample
from common.run.loop import TrainingRun
from common.training import distributed, ranks

MIN_ROUNDS = 3


def main() -> None:
    started = time.monotonic()
    output, benchmark, configuration, size, seconds = sys.argv[1:]
    rank_info = ranks.read_rank_info()
    config = load_for_ranks(benchmark, configuration, size=size, num_ranks=rank_info.world_size).config
    with distributed.process_group(rank_info), open_run(config, rank_info, warms_up=False) as run:
        figures = measure_rate(run, float(seconds), started)
        if rank_info.rank == 0:
            Path(output).write_text(json.dumps(figures))


def measure_rate(run: TrainingRun, seconds: float, started: float) -> dict[str, Any]:
    """Return the samples/s of all ranks together, timed for about `seconds`, and the state of the machine.

    All ranks take the same steps: each waits for the others in the all-reduce.
    """
    turns = steppers(run)
    startup_s, meter, before = time.monotonic() - started, Meter(), time.perf_counter()
    if run.rank_info.rank == 0:
        print(f"ready after {startup_s:.1f} s, timing steps for {seconds:g} s", flush=True)
    take = partial(time_sample, turns, run.device)
    take()
    rounds = distributed.broadcast(math.ceil(seconds / (time.perf_counter() - before)))
    (times,) = interleave({0: take}, rounds=max(MIN_ROUNDS, rounds)).values()
    readings = distributed.all_gather(meter.read())
    known = [reading for reading in readings if reading is not None]
    load = load_of(known[:1], known) if known else None
    turns[-1][0]()  # kernels are running while the GPU's state is read
    gpus = distributed.all_gather(own_gpu())
    synchronize(run.device)
    per_rank = distributed.all_gather(1 / statistics.median(times))
    return {
        "size": run.config.size,
        "samples": run.benchmark.names.samples,
        "samples_per_s": sum(per_rank),
        "per_rank": per_rank,
        "deviation": statistics.stdev(times) / statistics.median(times),
        "num_rounds": len(times),
        "batch_size": run.config.global_batch_size,
        "startup_s": startup_s,
        "taken_cores": load.taken if load else 0.0,
        "cores": load.cores if load else 0.0,
        "gpus": gpus,
    }


if __name__ == "__main__":
    main()
