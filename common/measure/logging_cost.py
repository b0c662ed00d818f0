"""Seconds that logging and timing take of a step, and of the lines between two evaluations."""

import statistics
import time
from itertools import cycle

from common.run.heartbeat import COMPUTING, LOADING
from common.run.loop import TrainingRun


def time_steps(run: TrainingRun, num_steps: int = 60) -> tuple[float, float]:
    """Return the median seconds of a training step and the mean of the layer's calls around it."""
    steps, calls = [], []
    batches = cycle(list(run.benchmark.synthetic_batches()))
    run.log.start("block_start", first_epoch_num=1, epoch_count=1)
    run.clock.start()
    run.watch.start_block()
    for step in range(num_steps):
        before = time.perf_counter()
        loss = run.train_step(next(batches), step)
        between = time.perf_counter()
        run.slot.enter(step, LOADING)
        run.slot.enter(step, COMPUTING)
        run.clock.step(loss)
        run.watch.step(run.log, step + 1)
        calls.append(time.perf_counter() - between)
        steps.append(between - before)
    run.clock.close()
    run.log.stop("block_stop", first_epoch_num=1)
    return statistics.median(steps), statistics.mean(calls)


def time_block(run: TrainingRun, repeats: int = 50) -> float:
    """Return the mean seconds of all the log lines of one block and its evaluation."""
    log, before = run.log, time.perf_counter()
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
    return (time.perf_counter() - before) / repeats
