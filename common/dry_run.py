"""What a run would do, for any number of ranks: `ttt run --dry-run`. Arithmetic; no process is started."""

import torch

from common import config as configs
from common.benchmark import Benchmark
from common.config import Loaded
from common.optim import schedule_factor
from common.ranks import Place

GIGA = 1e9
STATES_PER_PARAMETER = {"adamw": 2, "sgd": 1, "decoupled_sgd": 1}
BYTES = 4  # of a float32


def describe_run(loaded: Loaded, num_ranks: int) -> str:
    """Return the merged configuration, the origin of each key, and the whole set-up of a run."""
    config = loaded.config
    lines = ["# configuration", *configs.to_yaml(config).splitlines(), "# where each key was written"]
    lines += [f"#   {'.'.join(path)}: {where}" for path, where in sorted(loaded.origins.items()) if path]
    lines += [f"# changed by {change}" for change in loaded.changes]
    kind = configs.benchmark_module(config.benchmark).Benchmark
    places = [Place(rank=rank, local_rank=0, world_size=num_ranks) for rank in range(num_ranks)]
    benchmarks = [kind(config, seed=0, place=place) for place in places]
    lines += [
        "# plan",
        *(f"#   {line}" for line in (*plan(loaded), *shares(benchmarks), *memory(benchmarks))),
    ]
    return "\n".join(lines)


def plan(loaded: Loaded) -> list[str]:
    """Return steps, evaluations and schedule, which no number of ranks changes."""
    config, steps = loaded.config, loaded.config.plan()
    evaluations = steps.evaluation_steps
    shown = sorted({0, steps.warmup_steps, steps.num_steps // 2, steps.num_steps - 1})
    peak = config.optimizer.learning_rate
    rates = [f"{peak * schedule_factor(step, config.schedule, steps):.3g} at step {step:,}" for step in shown]
    return [
        f"steps: {steps.num_steps:,} of {config.global_batch_size} samples; "
        f"{steps.steps_per_epoch:,} per epoch, {steps.warmup_steps:,} of warm-up",
        f"schedule: {config.schedule.name}, learning rate {', '.join(rates)}",
        f"evaluations: {len(evaluations)}, after steps {', '.join(map(str, evaluations[:8]))}"
        + (" ..." if len(evaluations) > 8 else ""),
    ]


def shares(ranks: list[Benchmark]) -> list[str]:
    """Return what each rank takes of a batch and of the evaluation set; `ranks` are the benchmarks of all."""
    config = ranks[0].config
    own = [rank.num_own_samples for rank in ranks]
    evaluated = [len(rank.own_evaluation_samples) for rank in ranks]
    largest = ranks[own.index(max(own))]
    return [
        f"ranks: {len(ranks)} (calculated, none started); gradients exchanged as "
        f"{'bfloat16' if config.gradient_compression == 'bf16' else 'float32'}",
        f"batch per rank: {between(own)} of {sum(own):,} samples, in {largest.num_micro_batches} "
        f"micro-batch(es) of at most {largest.micro_batch_sizes[0]:,}",
        f"evaluation per rank: {between(evaluated)} of {sum(evaluated):,} samples, "
        f"at most {largest.own_evaluation_batch_size:,} at a time",
    ]


def between(counts: list[int]) -> str:
    """Return the smallest and the largest count, once where they are equal."""
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def memory(ranks: list[Benchmark]) -> list[str]:
    """Return what each rank keeps in memory, counted on a model without storage."""
    first, config = ranks[0], ranks[0].config
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in first.build_model().parameters())
    each = parameters * BYTES / GIGA
    states = STATES_PER_PARAMETER[config.optimizer.name]
    parts = f"parameters {each:.2f}, gradients {each:.2f}, optimizer state {states * each:.2f}"
    if len(ranks) > 1:
        parts += ", buckets 0: the gradients lie in them"
    resident, total = first.resident_bytes, (2 + states) * each
    return [
        f"memory: {total:.2f} GB for {parameters:,} parameters with gradients and optimizer state "
        f"on each rank ({parts}); activations come on top"
        + (f"; {resident / GIGA:.0f} GB of decoded data" if resident else "")
    ]
