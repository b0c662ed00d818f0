"""Steps of a compiled configuration beside the same steps of its eager twin, on synthetic batches.

A captured graph could break losses, averages of weights and the evaluation: these are compared. Counters tell
whether graphs are used: skipped ones, graph breaks, compilation after the warm-up.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from common.config.schema import RunConfig
from common.measure.clock import time_call, time_launching
from common.measure.device_run import open_run
from common.measure.throughput import bench_batches
from common.run.loop import TrainingRun
from common.training.method import Batch

NUM_STEPS = 60
NOTHING_COMPILED = "nothing is compiled in this configuration at this size, so nothing was compared"
TOLERANCE = 0.02  # of a loss: bfloat16, whose sums a compiler takes in another order; an H200 showed 0.002
EVALUATION_TOLERANCE = 0.05  # of the norm of all outputs; an H200 showed 0.029 of BERT, 0.004 of ResNet
GRADIENT_TOLERANCE = 0.1  # of the norm of all gradients; an H200 showed 0.023 of BERT


def compare_with_eager(config: RunConfig, shapes: Sequence[str] = ()) -> dict[str, Any]:
    """Return losses, counters and times of `NUM_STEPS` steps that take turns between the shapes.

    Every compiled step starts from the eager one's weights: free runs of ResNet drift apart by several per
    cent in ten steps, whatever computes them. `is_ok`: the model was compiled, no graph was skipped or
    broken, nothing was compiled after the warm-up, and losses, evaluations and the gradients of each step
    agree within their tolerances. Rounding alone changes the gradients of ResNet by as much as their
    norm in bfloat16 and by a third of it in TF32: compare them in float32. No convolution uses TF32 here.
    """
    from torch._dynamo.utils import counters

    torch.backends.cudnn.allow_tf32 = False
    compiled_by = [name for name in ("compile", "compile_layers") if name in config.methods]
    eager_methods = {name: values for name, values in config.methods.items() if name not in compiled_by}
    eager_config = config.model_copy(update={"methods": eager_methods})
    with open_run(eager_config, warms_up=False) as eager, open_run(config, warms_up=False) as compiled:
        batches = list(bench_batches(eager, shapes).values())
        warm_up(eager, batches)
        counters.clear()
        warm_up(compiled, batches)
        num_graphs = counters["stats"]["unique_graphs"]
        steps = list(take_steps(eager, compiled, batches))
        figures: dict[str, Any] = {
            "compiled_by": compiled_by,
            "num_steps": NUM_STEPS,
            "num_graphs": num_graphs,
            "compiled_late": counters["stats"]["unique_graphs"] - num_graphs,
            "skipped_graphs": counters["inductor"]["cudagraph_skips"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "losses": [loss for loss, _, _ in steps],
            "loss_difference": largest(abs(other - loss) / abs(loss) for loss, other, _ in steps),
            "gradient_difference": largest(difference for _, _, difference in steps),
            "gradient_differences": [difference for _, _, difference in steps],
            "evaluation_difference": compare_evaluations(eager, compiled),
            "eager": time_steps(eager, batches),
            "compiled": time_steps(compiled, batches),
        }
    is_used = num_graphs > 0 and not (figures["compiled_late"] or figures["skipped_graphs"])
    is_equal = (
        figures["loss_difference"] <= TOLERANCE
        and figures["evaluation_difference"] <= EVALUATION_TOLERANCE
        and figures["gradient_difference"] <= GRADIENT_TOLERANCE
    )
    reason = {} if num_graphs else {"reason": NOTHING_COMPILED}
    return figures | {"is_ok": is_used and is_equal and not figures["graph_breaks"]} | reason


def largest(values: Iterable[float]) -> float:
    """Return the largest value, infinite if any is not finite."""
    return max(value if math.isfinite(value) else math.inf for value in values)


def warm_up(run: TrainingRun, batches: list[Batch]) -> None:
    """Warm a run up on the shapes of these batches alone."""
    parts = [part for batch in batches for part in batch.parts(run.num_micro_batches)]
    run.benchmark.synthetic_batches = lambda: iter(parts)  # type: ignore[method-assign]
    run.warm_up()


def take_steps(
    eager: TrainingRun, compiled: TrainingRun, batches: list[Batch]
) -> Iterator[tuple[float, float, float]]:
    """Yield the losses of each step, eager and compiled, from the same weights, and how gradients differ."""
    for step, batch in enumerate(islice(cycle(batches), NUM_STEPS)):
        compiled.model.load_state_dict(eager.model.state_dict())
        losses = float(eager.train_step(batch, step)), float(compiled.train_step(batch, step))
        yield *losses, compare_gradients(eager, compiled)


def compare_gradients(eager: TrainingRun, compiled: TrainingRun) -> float:
    pairs = zip(eager.model.parameters(), compiled.model.parameters(), strict=True)
    gradients = [
        (one.grad, other.grad) for one, other in pairs if one.grad is not None and other.grad is not None
    ]
    difference = get_total_norm([other - one for one, other in gradients])
    return float(difference / get_total_norm([one for one, _ in gradients]))


@torch.no_grad()
def compare_evaluations(eager: TrainingRun, compiled: TrainingRun) -> float:
    """Return by how much the outputs of the evaluated models differ, relative to their norm.

    They are evaluated as in a run, averages of weights included, on one synthetic batch.
    """
    size = min(eager.benchmark.rank_evaluation_batch_size, len(eager.benchmark.rank_evaluation_samples))
    batch = eager.benchmark.synthetic_evaluation_batch(size)

    def evaluate(run: TrainingRun) -> Tensor:
        model, prepared = run.evaluation_model(), run.prepare_batch(batch, None)
        with run.autocast(run.config.evaluation_precision):
            output = model(**prepared.inputs)
        run.model.train()
        return output if isinstance(output, Tensor) else output[0]

    expected = evaluate(eager).float()
    return largest([float((evaluate(compiled).float() - expected).norm() / expected.norm())])


def time_steps(run: TrainingRun, batches: list[Batch]) -> dict[str, float]:
    """Return the milliseconds of a step, and the microseconds that the host takes to launch it."""

    def train() -> None:
        for step, batch in enumerate(islice(cycle(batches), NUM_STEPS)):
            run.train_step(batch, step)

    seconds = time_call(train, run.device)
    host_s = time_launching(lambda: run.train_step(batches[0], NUM_STEPS), run.device)
    return {"step_ms": seconds / NUM_STEPS * 1e3, "host_us_per_step": host_s * 1e6}
