"""Trains the optimized configuration of a benchmark at size mini, eagerly and compiled, side by side.

`train_compiled.py OUTPUT BENCHMARK`, alone or started with torchrun. Rank 0 saves what came out.

A CPU computes BERT's attention in groups whose sizes differ from batch to batch: each would be compiled anew.
The compiled run therefore takes the path of a GPU, through torch's operator for packed sequences, for which
this script registers CPU kernels; the eager run takes the CPU's own path.
"""

import itertools
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch._dynamo.utils import counters

from common.repository import benchmark_module
from common.run.loop import TrainingRun
from common.run.mllog import RunLog
from common.run.run_set import Spec
from common.run.worker import leave
from common.training import distributed, ranks
from common.training.load import load_config
from language_bert import attention

NUM_STEPS = 60
BATCH_SIZE = 16  # of a rank: however many there are, they share what is compiled


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of both runs, and further ones of the compiled run.

    If `is_synchronized`, the compiled run takes every step from the eager run's weights. ResNet needs that:
    free runs whose first losses agree to 2e-7, in float32, differ by several per cent after ten steps.
    """

    settings: tuple[str, ...]
    compiled: tuple[str, ...]
    crosses_epochs: bool = False
    is_synchronized: bool = False


CASES = {
    "image_classification": Case(
        settings=(),
        compiled=("methods.compile={mode: default, counts_batches: false, options: {combo_kernels: true}}",),
        crosses_epochs=True,  # half of the steps at 56 pixels, half at 84
        is_synchronized=True,
    ),
    "language_bert": Case(
        settings=(
            "model.num_hidden_layers=2",  # one computes all tokens, the last one those that are needed
            "methods.unpad.round_to=512",  # few shapes, as at full size
            "methods.sparse_head.round_to=128",
        ),
        compiled=("methods.compile_layers={}",),
    ),
}


def in_turn(offsets, key_offsets):
    """Yield the queries and the keys of each sequence, as slices."""
    for bounds in zip(*(itertools.pairwise(each.tolist()) for each in (offsets, key_offsets)), strict=True):
        yield tuple(slice(*each) for each in bounds)


def by_head(*packed):
    """Return (T, N, H) as (N, T, H) in float32."""
    return [values.transpose(0, 1).float() for values in packed]


def forward_kernel(query, key, value, offsets, key_offsets, *_, **__):
    """Return attended values (T, N, H), the logarithms of the softmax's sums (N, T), and a random state."""
    output, logsumexp = torch.zeros_like(query), torch.zeros(query.shape[1], query.shape[0])
    for queries, keys in in_turn(offsets, key_offsets):
        q, k, v = by_head(query[queries], key[keys], value[keys])
        scores = q @ k.mT * query.shape[2] ** -0.5
        output[queries] = (scores.softmax(dim=-1) @ v).transpose(0, 1).to(query.dtype)
        logsumexp[:, queries] = scores.logsumexp(dim=-1)
    return output, logsumexp, torch.zeros(2, dtype=torch.uint64)


def backward_kernel(grad, query, key, value, output, logsumexp, offsets, key_offsets, *_, **__):
    """Return the gradients of query, key and value."""
    grads, scale = [torch.zeros_like(each) for each in (query, key, value)], query.shape[2] ** -0.5
    for queries, keys in in_turn(offsets, key_offsets):
        q, k, v = by_head(query[queries], key[keys], value[keys])
        into, out = by_head(grad[queries], output[queries])
        shares = (q @ k.mT * scale - logsumexp[:, queries, None]).exp()
        of_scores = shares * (into @ v.mT - (into * out).sum(dim=-1, keepdim=True)) * scale
        for target, part, values in zip(
            grads, (queries, keys, keys), (of_scores @ k, of_scores.mT @ q, shares.mT @ into), strict=True
        ):
            target[part] = values.transpose(0, 1).to(target.dtype)
    return tuple(grads)


def register_kernels():
    """Let torch's attention of packed sequences run on a CPU."""
    import torch.nn.attention.varlen  # defines the operators

    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward_kernel)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward_kernel)


def start(name, rank_info, settings):
    """Return an initialized run."""
    config = load_config(name, "optimized", size="mini", settings=list(settings)).config
    spec = Spec(config={}, seed=3, system="test", result="", expected_s=None)
    log = RunLog(Path(os.devnull), state="run")
    run = TrainingRun(
        spec, config, benchmark_module(name).Benchmark(config, seed=3, rank_info=rank_info), log
    )
    run.initialize()
    return run


@torch.no_grad()
def copy_weights(source, target):
    """Give a model the parameters and buffers of another."""
    for name, value in target.state_dict().items():
        value.copy_(source.state_dict()[name])


def train(name, rank_info):
    """Return losses and quality of both runs, the shapes that they saw, and the number of compiled graphs."""
    case = CASES[name]
    contexts = {
        "eager": nullcontext,
        "compiled": lambda: mock.patch.object(attention, "has_kernel", lambda device: True),
    }
    plain = (*case.settings, f"global_batch_size={BATCH_SIZE * rank_info.world_size}")
    settings = {"eager": plain, "compiled": plain + case.compiled}
    runs, losses, shapes = {}, {kind: [] for kind in contexts}, set()
    for kind, context in contexts.items():
        with context():
            runs[kind] = start(name, rank_info, settings[kind])
    epoch = runs["eager"].config.steps_per_epoch
    first = epoch - NUM_STEPS // 2 if case.crosses_epochs else 0
    batches = runs["eager"].benchmark.train_batches(first)
    for step in range(first, first + NUM_STEPS):
        batch = next(batches)
        if case.is_synchronized:
            copy_weights(runs["eager"].model, runs["compiled"].model)
        for kind, context in contexts.items():
            with context():
                losses[kind].append(distributed.all_reduce_mean(float(runs[kind].train_step(batch, step))))
        inputs = runs["eager"].prepare_batch(batch, runs["eager"].progress(step)).inputs
        shapes.add((*inputs.get("x", inputs.get("input_ids")).shape, len(inputs.get("needed", ()))))
    batches.close()
    quality = {}
    for kind, context in contexts.items():
        with context():
            quality[kind] = runs[kind].evaluate()
    changes = [
        torch.cat([value.detach().flatten() for value in run.model.parameters()]) for run in runs.values()
    ]
    outcome = {
        "losses": losses,
        "quality": quality,
        "difference": float((changes[0] - changes[1]).norm() / changes[0].norm()),
        "shapes": sorted(shapes),
        "num_graphs": counters["stats"]["unique_graphs"],
    }
    for run in runs.values():
        run.log.close()
    return outcome


def main():
    output, name = sys.argv[1:]
    register_kernels()
    rank_info = ranks.read_rank_info()
    with distributed.process_group(rank_info):
        outcome = train(name, rank_info)
        if rank_info.rank == 0:
            torch.save(outcome, output)


if __name__ == "__main__":
    main()
    leave(0)  # as a rank does: gloo may abort a process that ends in another way
