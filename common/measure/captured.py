"""Steps of a compiled configuration beside the same steps of its eager twin, on synthetic batches.

Shows what a captured graph could break: losses, the average of the weights, the evaluation; and what would
show that it is not used: skipped graphs, graph breaks, compilation after the warm-up.
"""

import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from common.commands.bench import build
from common.config import RunConfig
from common.throughput import bench_batches, synchronize
from common.timed_run import TrainingRun

NUM_STEPS = 60
TOLERANCE = 0.02  # of a loss: 60 steps in bfloat16, whose sums a compiler takes in another order


def compare_with_eager(config: RunConfig, directory: Path, shapes: Sequence[str] = ()) -> dict[str, Any]:
    """Return losses, counters and times of `NUM_STEPS` steps that take turns between the shapes.

    `is_ok`: the losses agree within `TOLERANCE`, evaluations differ in at most that share, no graph was
    skipped or broken, nothing was compiled after the warm-up. `directory` holds logs that nobody keeps.
    """
    from torch._dynamo.utils import counters

    methods = dict(config.methods)
    compiled_by = [name for name in ("compile", "compile_layers") if name in methods]
    twin = config.model_copy(update={"methods": {k: v for k, v in methods.items() if k not in compiled_by}})
    eager = take_steps(twin, directory, shapes)
    compiled = take_steps(config, directory, shapes)
    pairs = zip(compiled["losses"], eager["losses"], strict=True)
    figures = {
        "compiled_by": compiled_by,
        "num_steps": NUM_STEPS,
        "loss_difference": max(abs(one - other) / abs(other) for one, other in pairs),
        "evaluation_difference": abs(compiled["num_right"] - eager["num_right"]) / eager["num_evaluated"],
        "skipped_graphs": counters["inductor"]["cudagraph_skips"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "compiled": compiled,
        "eager": eager,
    }
    counts = ("skipped_graphs", "graph_breaks")
    is_ok = max(figures["loss_difference"], figures["evaluation_difference"]) <= TOLERANCE
    is_ok = is_ok and not any(figures[name] for name in counts) and not compiled["compiled_late"]
    return figures | {"is_ok": is_ok}


def take_steps(config: RunConfig, directory: Path, shapes: Sequence[str]) -> dict[str, Any]:
    """Return losses, evaluation and times of a training on each shape in turn, warmed up on these alone."""
    from torch._dynamo.utils import counters

    run = build(config, directory, warms_up=False)
    counters.clear()
    try:
        batches = list(bench_batches(run, shapes).values())
        parts = [part for batch in batches for part in batch.parts(run.num_micro_batches)]
        run.benchmark.synthetic_batches = lambda: iter(parts)  # type: ignore[method-assign]
        run.warm_up()
        num_graphs = counters["stats"]["unique_graphs"]
        return train_and_evaluate(run, batches) | {
            "num_graphs": num_graphs,
            "compiled_late": counters["stats"]["unique_graphs"] - num_graphs,
        }
    finally:
        run.log.close()


def train_and_evaluate(run: TrainingRun, batches: list[Any]) -> dict[str, Any]:
    """Return the losses of `NUM_STEPS` steps, the microseconds that each took of the host and of the device,
    and the right predictions for a synthetic evaluation batch.
    """
    losses, host_s = [], 0.0
    synchronize(run.device)
    started = time.perf_counter()
    for step, batch in enumerate(islice(cycle(batches), NUM_STEPS)):
        before = time.perf_counter()
        losses.append(run.train_step(batch, step).clone())
        host_s += time.perf_counter() - before
    synchronize(run.device)
    step_s = (time.perf_counter() - started) / NUM_STEPS
    size = min(run.benchmark.own_evaluation_batch_size, run.config.data.num_evaluation_samples)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    with torch.no_grad():
        batch = run.benchmark.synthetic_evaluation_batch(size)
        right, counted = run.count_correct(run.evaluation_model(), batch)
    return {
        "losses": torch.stack(losses).tolist(),
        "host_us_per_step": host_s / NUM_STEPS * 1e6,
        "step_ms": step_s * 1e3,
        "num_right": int(right),
        "num_evaluated": int(counted),
    }
