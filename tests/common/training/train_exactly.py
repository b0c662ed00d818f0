"""Trains a small BERT in float64 on as many ranks as it is started on, on two and on one.

Started with torchrun by test_distributed.py: `train_exactly.py OUTPUT`. Rank 0 saves what came out.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from common.errors import UserError
from common.run.loop import TrainingRun
from common.run.mllog import RunLog
from common.run.run_set import Spec
from common.run.worker import leave
from common.training import distributed, ranks
from common.training.load import load_config
from language_bert.benchmark import Benchmark
from tests.runs import free_port

NUM_STEPS = 20
SMALL = ("hidden_size=16", "intermediate_size=24", "num_hidden_layers=1", "next_sentence=true")
GLOBAL = ("global_batch_size=7", "evaluation_batch_size=50", "precision=fp32", "evaluation_precision=fp32")
LAMB = "optimizer.name=lamb"
EMA = "methods.ema={half_life_steps: 4, every_steps: 2}"
TWICE = "methods.sam={rho: 0.05, every_steps: 3}"  # gradients of the global batch, uphill
CASES = {  # name: configuration and settings
    "whole": ("optimized", [EMA]),
    "chunked, one by one": (
        "optimized",
        [EMA, "methods.chunked_head={chunk_tokens: 32}", "micro_batch_size=1"],
    ),
    "padded, in twos": ("baseline", [EMA, "micro_batch_size=2"]),
    "lamb": ("baseline", [EMA, LAMB]),
    "lamb, in twos": ("baseline", [EMA, LAMB, "micro_batch_size=2"]),
}


class ExactRun(TrainingRun):
    def build(self, *, from_scratch):
        super().build(from_scratch=from_scratch)
        self.model.double()


def train(case, rank_info):
    """Return parameters (of the baseline's names where these differ), losses and the last quality."""
    configuration, settings = CASES[case]
    settings = [*(f"model.{each}" for each in SMALL), *GLOBAL, *settings, TWICE, "schedule.warmup=2ba"]
    settings += ["methods.fused_qkv=false"] if configuration == "optimized" else []
    config = load_config("language_bert", configuration, size="mini", settings=settings).config
    spec = Spec(config={}, seed=3, system="test", result="", expected_s=None)
    log = RunLog(Path(os.devnull), state="run")
    run = ExactRun(spec, config, Benchmark(config, seed=3, rank_info=rank_info), log)
    run.initialize()
    batches = run.benchmark.train_batches()
    losses = [
        distributed.all_reduce_mean(float(run.train_step(next(batches), step))) for step in range(NUM_STEPS)
    ]
    quality = run.evaluate()
    log.close()
    parameters = {name: value.detach() for name, value in run.model.named_parameters()}
    average = dict(next(each for each in run.methods if each.name == "ema").average.named_parameters())
    drift = 0.0
    for value in (*parameters.values(), *average.values()):
        drift = max(drift, abs(distributed.all_reduce_mean(float(value.sum())) - float(value.sum())))
    return {
        "parameters": parameters,
        "average": average,
        "losses": losses,
        "quality": quality,
        "drift": drift,
        "micro_batches": distributed.all_reduce_sum(run.num_micro_batches)[0],
    }


def shared_statistics(rank_info, of):
    """Return what batch norm keeps after sharing, having started at the rank plus one."""
    norm = nn.BatchNorm2d(3)
    norm.running_mean.fill_(rank_info.rank + 1)
    norm.running_var.fill_(2 * rank_info.rank + 2)
    distributed.sync_batch_norm(nn.Sequential(norm), of)
    return [*norm.running_mean.tolist(), *norm.running_var.tolist()]


def agreed_error(rank_info):
    """Return the error that a rank gets for a mistake that only the last rank has met."""
    try:
        with distributed.raise_on_all_ranks():
            if rank_info.rank == rank_info.world_size - 1:
                raise UserError(f"met by rank {rank_info.rank}", where="here")
    except UserError as error:
        return str(error)


def main():
    """Train on all ranks, then on the first two, then on one: each imports torch once."""
    all_ranks, (output,), found = ranks.read_rank_info(), sys.argv[1:], {}
    for world_size in (all_ranks.world_size, 2, 1):
        if all_ranks.rank >= world_size:
            break
        rank_info = replace(all_ranks, world_size=world_size)
        with distributed.process_group(rank_info):
            found[world_size] = {
                "trained": {case: train(case, rank_info) for case in CASES},
                "statistics": {of: shared_statistics(rank_info, of) for of in ("mean", "rank_0")},
                "largest": distributed.all_reduce_max(torch.tensor([rank_info.rank])).tolist(),
                "error": agreed_error(rank_info),
                "told": distributed.broadcast(f"by rank {rank_info.rank}"),
            }
            next_port = distributed.broadcast(free_port())
        os.environ |= {"MASTER_PORT": str(next_port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if all_ranks.rank == 0:
        torch.save(found, output)


if __name__ == "__main__":
    main()
    leave(0)  # as a rank does: gloo may abort a process that ends in another way
