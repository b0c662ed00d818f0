"""The seconds of a run beside its training steps: initialisation with every form compiled, evaluation."""

import time
from typing import Any

import torch
from torch import Tensor

from common.config.schema import RunConfig
from common.measure.clock import synchronize, time_call
from common.measure.device_run import open_run


def measure_startup(config: RunConfig) -> dict[str, Any]:
    """Return the seconds of initialisation, with its number of forms, and of an evaluation.

    The evaluation is of synthetic batches that lie ready: as many samples as the real one, no loader.
    """
    started = time.perf_counter()
    with open_run(config) as run:
        synchronize(run.device)
        initialized_s = time.perf_counter() - started
        num_samples = len(run.benchmark.rank_evaluation_samples)
        size = run.benchmark.rank_evaluation_batch_size
        sizes = [min(size, num_samples - start) for start in range(0, num_samples, size)]
        batches = {size: run.benchmark.synthetic_evaluation_batch(size) for size in set(sizes)}
        model = run.evaluation_model()
        counts: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            evaluated_s = time_call(
                lambda: counts.extend(run.count_correct(model, batches[size]) for size in sizes), run.device
            )
        return {
            "initialization_s": initialized_s,
            "num_forms": sum(1 for _ in run.shapes()),
            "evaluation_s": evaluated_s,
            "num_evaluated": num_samples,
            "evaluated_per_s": num_samples / evaluated_s,
            "num_predictions": sum(int(num_predictions) for _, num_predictions in counts),
        }
