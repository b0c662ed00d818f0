"""Small trainings of both benchmarks that write checkpoints.

As a script: `checkpointed.py FOLDER BENCHMARK` is killed by itself between two micro-batches; started with
torchrun, `checkpointed.py FOLDER` says on two ranks whether a resumed training ends as one that was not
interrupted.
"""

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from common.repository import benchmark_module
from common.run.loop import TrainingRun, resume_run, save
from common.run.mllog import RunLog
from common.run.run_set import Spec
from common.run.worker import leave
from common.training import checkpoint, distributed, ranks
from common.training.checkpoint_header import checkpoint_of
from common.training.load import load_config
from common.training.ranks import SINGLE_RANK

NUM_STEPS, DIES_IN_STEP, DIES_IN_CALL = 6, 4, 2
EMA = "methods.ema={half_life_steps: 4, every_steps: 2}"  # it starts after the second step
SETTINGS = {
    "language_bert": ["global_batch_size=7", "micro_batch_size=2", "model.dropout=0.1", EMA],
    "image_classification": [
        "global_batch_size=8",
        "micro_batch_size=2",
        "data.train_crop_px=32",
        "data.evaluation_resize_px=32",
        "data.evaluation_crop_px=32",
        "methods.mixup={}",
        "methods.stochastic_depth={drop_rate: 0.5}",
        EMA,
    ],
}
RANKS_TRAIN = "image_classification"  # whose buffers are each rank's own


class Dying(TrainingRun):
    """A run that is killed with half of its micro-batches done."""

    num_calls = 0

    def add_gradients(self, batch, step, **named):
        loss = super().add_gradients(batch, step, **named)
        self.num_calls += step == DIES_IN_STEP
        if self.num_calls == DIES_IN_CALL:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


def start(name, folder, *, source=None, rank_info=SINGLE_RANK, kind=TrainingRun, settings=None):
    """Return an initialized run with its result in `folder`; it goes on from the checkpoint `source`.

    `settings` stand in the place of the benchmark's above.
    """
    short = ["precision=fp32", "max_duration=40ba", "schedule.warmup=2ba", *(settings or SETTINGS[name])]
    config = load_config(name, "baseline", size="mini", settings=short).config
    result = folder / "result_0.txt"
    spec = Spec(config={}, seed=3, system="test", result=str(result), expected_s=None)
    log = RunLog(result if rank_info.rank == 0 else Path(os.devnull), state="block")
    run = kind(spec, config, benchmark_module(name).Benchmark(config, seed=3, rank_info=rank_info), log)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)  # its scale has to be kept
    run.initialize()
    random.seed(3), np.random.seed(3)  # a run does not: nothing in it draws from them
    if source is not None:
        resume_run(run, source, result if rank_info.rank == 0 else Path(os.devnull))
    return run


def train(run, keep=()):
    """Train to the end and return all that a checkpoint would hold.

    Before the steps `keep` a checkpoint is written, and copied to STEP.safetensors beside it.
    """
    batches = run.benchmark.train_batches(run.first_step)
    for step in range(run.first_step, NUM_STEPS):
        if step in keep:
            save(run, step)
            if run.rank_info.rank == 0:
                written = checkpoint_of(Path(run.spec.result))
                shutil.copy(written, written.with_stem(str(step)))
        run.train_step(next(batches), step)
        random.random(), np.random.random(), torch.rand(1)
    run.log.close()
    return (*checkpoint.capture(run), run.scaler.state_dict())


def are_equal(one, other):
    """Whether two trainings ended with the same tensors, random states and loss scale, to the last bit."""
    (tensors, *rest), (other_tensors, *other_rest) = one, other
    same = tensors.keys() == other_tensors.keys() and rest == other_rest
    return same and all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)


def main():
    folder, *names = map(Path, sys.argv[1:])
    if names:
        train(start(str(names[0]), folder, kind=Dying), keep=range(NUM_STEPS))
        return
    rank_info = ranks.read_rank_info()
    with distributed.process_group(rank_info):
        whole = train(start(RANKS_TRAIN, folder, rank_info=rank_info), keep=[3])
        distributed.barrier()
        again = train(start(RANKS_TRAIN, folder, rank_info=rank_info, source=folder / "3.safetensors"))
        one, other = (whole[0][f"rank{rank}.random.cpu"] for rank in range(2))
        # One write: ranks share standard output, and `print` may write a line in pieces.
        sys.stdout.write(f"{are_equal(whole, again)} {torch.equal(one, other)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
    leave(0)  # as a rank does: gloo may abort a process that ends in another way
