"""The set-up of a run on any number of ranks, without the run: `ttt run --dry-run`.

One rank is really set up, in a process group without the other ranks; its forward pass computes no values.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from common.config.merge import as_yaml
from common.config.schema import Loaded
from common.data.preparation import describe_data
from common.evidence.recipes import flat
from common.repository import benchmark_module, relative_path
from common.training import distributed, memory
from common.training.benchmark import Benchmark
from common.training.method import Batch
from common.training.optim import schedule_factor
from common.training.probes import probes_of
from common.training.ranks import RankInfo, read_rank_info
from common.training.step import Training

GIGA = 1e9
BYTES = {"float32": 4, "bfloat16": 2}
STATES_PER_PARAMETER = {"adamw": 2, "sgd": 1, "decoupled_sgd": 1, "lars": 1, "lamb": 2, "fused_lamb": 2}


def describe_run(loaded: Loaded, num_ranks: int) -> str:
    """Describe the merged configuration, the origin of each key, and the set-up of a run."""
    config, values = loaded.config, loaded.config.model_dump()
    read = Path(os.path.normpath(config.data_directory))
    values["data"]["directory"] = relative_path(read)  # which no log names
    lines = ["# configuration", *as_yaml(values).splitlines(), "# where each key was written"]
    lines += [f"#   {key}: {where}" for key, where in list_origins(loaded)]
    lines += [f"# changed by {change}" for change in loaded.changes]
    kind = benchmark_module(config.benchmark).Benchmark
    started = read_rank_info()
    num_local = started.num_local if started.world_size > 1 else num_ranks
    rank_infos = [
        RankInfo(rank=rank, local_rank=0, world_size=num_ranks, num_local=num_local)
        for rank in range(num_ranks)
    ]
    benchmarks = [kind(config, seed=0, rank_info=rank_info) for rank_info in rank_infos]
    largest = max(benchmarks, key=lambda benchmark: benchmark.num_rank_samples)
    plan = [f"data: {describe_data(config)}", *describe_plan(loaded)]
    plan += [*describe_shares(benchmarks, largest), *describe_rank(largest)]
    plan += probes_of(largest).describe_loading()
    lines += ["# plan", *(f"#   {line}" for line in plan)]
    return "\n".join(lines)


def list_origins(loaded: Loaded) -> list[tuple[str, str]]:
    """List each key with the place where it was written; a list is one value."""
    origins = {".".join(path): where for path, where in loaded.origins.items()}
    return [(key, origins[key]) for key in sorted(flat(loaded.config.model_dump())) if key in origins]


def describe_plan(loaded: Loaded) -> list[str]:
    """Describe steps, evaluations and schedule, which do not depend on the number of ranks."""
    config, steps = loaded.config, loaded.config.plan()
    evaluations = steps.evaluation_steps
    shown = sorted({0, steps.warmup_steps, steps.num_steps // 2, steps.num_steps - 1})
    peak = config.optimizer.learning_rate
    rates = [
        f"{peak * schedule_factor(step, config.schedule, steps, peak):.3g} at step {step:,}" for step in shown
    ]
    return [
        f"steps: {steps.num_steps:,} of {config.global_batch_size} samples; "
        f"{steps.steps_per_epoch:,} per epoch, {steps.warmup_steps:,} of warm-up",
        f"schedule: {config.schedule.name}, learning rate {', '.join(rates)}",
        f"evaluations: {len(evaluations)}, after steps {', '.join(map(str, evaluations[:8]))}"
        + (" ..." if len(evaluations) > 8 else ""),
    ]


def describe_shares(ranks: list[Benchmark], largest: Benchmark) -> list[str]:
    """Describe each rank's part of a batch and of the evaluation set."""
    sizes = [rank.num_rank_samples for rank in ranks]
    evaluated = [len(rank.rank_evaluation_samples) for rank in ranks]
    return [
        f"batch per rank: {format_range(sizes)} of {sum(sizes):,} samples, in {largest.num_micro_batches} "
        f"micro-batch{'es' * (largest.num_micro_batches != 1)} of at most {largest.micro_batch_sizes[0]:,}",
        *describe_automatic_size(largest),
        f"evaluation per rank: {format_range(evaluated)} of {sum(evaluated):,} samples, "
        f"at most {largest.rank_evaluation_batch_size:,} at a time",
    ]


def describe_automatic_size(benchmark: Benchmark) -> list[str]:
    """Describe the bytes by which `micro_batch_size: auto` was chosen; [] where a number is set."""
    if benchmark.config.micro_batch_size != "auto":
        return []
    size, num_local = benchmark.micro_batch_sizes[0], benchmark.rank_info.num_local
    needed_gb = benchmark.config.training_bytes(size) / GIGA
    usable_gb = memory.usable_bytes(benchmark.device, num_local) / GIGA
    return [
        f"micro_batch_size auto: {size:,} samples take at most {needed_gb:.1f} GB of the {usable_gb:.1f} "
        "that this machine lets a rank have; the count is for GPUs"
    ]


def format_range(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def describe_rank(benchmark: Benchmark) -> list[str]:
    """Build a rank, and describe its all-reduce and its memory."""
    config, num_ranks = benchmark.config, benchmark.rank_info.world_size
    with fake_process_group(benchmark.rank_info):
        training = Training(config, benchmark, seed=0)
        left_out = [method.name for method in training.methods if method.compiles]
        training.methods = [method for method in training.methods if not method.compiles]
        training.build(from_scratch=True)
        distributed.wrap_ddp(training.model, compression=config.gradient_compression, is_static=True)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    size, states = parameters * BYTES["float32"] / GIGA, STATES_PER_PARAMETER[config.optimizer.name]
    activations = activation_bytes(training, *largest_shape(training)) / GIGA
    parts = {
        "parameters": size,
        "gradients": size,
        "optimizer state": states * size,
        f"activations of {benchmark.micro_batch_sizes[0]:,} samples": activations,
        "decoded data": probes_of(benchmark).resident_bytes / GIGA,
    }
    listed = ", ".join(f"{name} {value:.3g}" for name, value in parts.items() if value)
    dtype = "bfloat16" if config.gradient_compression == "bf16" else "float32"
    exchanged = f"{parameters * BYTES[dtype] / GIGA:.2f} GB of {dtype} gradients exchanged a step"
    return [
        f"ranks: {num_ranks}, "
        + (
            f"one set up in a group without the others; {exchanged}"
            if num_ranks > 1
            else "its model and optimizer were set up"
        ),
        f"memory: {sum(parts.values()):.2f} GB on each rank for {parameters:,} parameters (in GB: {listed}), "
        "and what kernels take for themselves"
        + (f"; counted without {', '.join(left_out)}" if left_out else ""),
    ]


@contextmanager
def fake_process_group(rank_info: RankInfo) -> Iterator[None]:
    """Join a process group whose collective calls return at once, without other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, world_size = rank_info.rank, rank_info.world_size
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def largest_shape(training: Training) -> tuple[Batch, int]:
    """Choose the micro-batch with the most values as its step sees it: its forward pass keeps the most."""

    def count_values(shape: tuple[Batch, int]) -> int:
        batch, step = shape
        return training.prepare_batch(batch, training.progress(step)).num_elements

    return max(training.shapes(), key=count_values)


def activation_bytes(training: Training, batch: Batch, step: int) -> int:
    """Return the bytes that the forward pass of a micro-batch keeps for the backward pass.

    Values are not computed, shapes are (FakeTensorMode), by the operators that this machine would use.
    """
    model, parameters = training.model, {id(parameter) for parameter in training.model.parameters()}
    batch = training.prepare_batch(batch, training.progress(step))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        if id(value) not in parameters:
            kept[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        return value

    def make_fake(values: dict[str, Any]) -> dict[str, Any]:
        return {k: fake.from_tensor(v) if isinstance(v, Tensor) else v for k, v in values.items()}

    with fake, torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        with training.autocast(training.config.precision):
            outputs = model(**make_fake(batch.inputs))
        loss = training.loss(outputs, make_fake(batch.targets))
    del loss
    return sum(kept.values())
