"""The seconds of a run beside its training steps: initialisation, an evaluation, and all that is logged."""

import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from common.config.schema import RunConfig
from common.measure.clock import interleave, synchronize, time_call, warm_up
from common.measure.device_run import of_all_devices, open_run
from common.measure.throughput import bench_batches, loaded_points
from common.run.heartbeat import COMPUTING, LOADING
from common.run.loop import TrainingRun
from common.training.method import Batch


def measure_startup(config: RunConfig) -> dict[str, Any]:
    """Return the seconds of initialisation, with its number of shapes, and of an evaluation.

    The evaluation is of synthetic batches in memory: as many samples as the real one, no loader.
    """
    started = time.perf_counter()
    with open_run(config, warms_up=False) as run:
        run.shows_warm_up = True
        with redirect_stdout(sys.stderr):  # stdout is for the figures
            run.warm_up()
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


def measure_logging(run: TrainingRun) -> dict[str, float]:
    """Return the cost of logging in a step and in a block, and the share of a step that both take."""
    (step_s, layer_s), block_s = time_steps(run), time_block(run)
    config = of_all_devices(run.config, run.rank_info.world_size)
    num_steps = config.steps(config.evaluate_every)
    share = (layer_s + block_s / num_steps) / step_s
    figures = {"step_ms": step_s * 1e3, "layer_us": layer_s * 1e6, "block_us": block_s * 1e6}
    return figures | {"block_steps": num_steps, "share": share}


def time_steps(run: TrainingRun, num_steps: int = 60) -> tuple[float, float]:
    """Return the seconds of a training step on batches in memory, and of the logging layer around it.

    A step is the weighted sum of medians at the points of a training, the layer the mean of its calls.
    """
    points = list(loaded_points(run, bench_batches(run)))
    step_s, layer_s, taken = 0.0, list[float](), list[tuple[int, Tensor]]()

    def log_step() -> None:
        step, loss = taken[-1]
        run.slot.enter(step, LOADING)
        run.slot.enter(step, COMPUTING)
        run.clock.step(loss)
        run.watch.step(run.log, step + 1)

    run.log.start("block_start", first_epoch_num=1, epoch_count=1)
    run.clock.start()
    run.watch.start_block()
    for point, batch in points:
        numbers = cycle(point.window)

        def train(batch: Batch = batch, numbers: Iterator[int] = numbers) -> None:
            step = next(numbers)
            taken.append((step, run.train_step(batch, step)))

        warm_up(train)
        trials = {call: partial(time_call, call, run.device) for call in (train, log_step)}
        times = interleave(trials, rounds=math.ceil(num_steps / len(points)))
        step_s += point.share * statistics.median(times[train])
        layer_s += times[log_step]
    run.clock.close()
    run.log.stop("block_stop", first_epoch_num=1)
    return step_s, statistics.mean(layer_s)


def time_block(run: TrainingRun, repeats: int = 50) -> float:
    """Return the mean seconds of all the log lines of one block and its evaluation."""
    log = run.log

    def log_blocks() -> None:
        for _ in range(repeats):
            log.start("block_start", first_epoch_num=1, epoch_count=1)
            run.watch.start_block()
            log.start("epoch_start", epoch_num=1)
            log.stop("epoch_stop", epoch_num=1)
            log.event("throughput", 1.0, epoch_num=1, samples=1)
            run.watch.log_block(log, epoch_num=1, samples=1)
            log.event("train_loss", 1.0, epoch_num=1, samples=1)
            log.stop("block_stop", first_epoch_num=1)
            log.start("eval_start", epoch_num=1)
            log.stop("eval_stop", epoch_num=1)
            log.event("eval_accuracy", 0.5, epoch_num=1, samples=1, correct=1, total=2)

    return time_call(log_blocks, run.device) / repeats
