"""Seconds that logging and timing take of a step, and of the lines between two evaluations."""

import statistics
from functools import partial
from itertools import cycle

from torch import Tensor

from common.measure.clock import interleave, time_call
from common.run.heartbeat import COMPUTING, LOADING
from common.run.loop import TrainingRun


def measure_logging(run: TrainingRun) -> dict[str, float]:
    """Return the cost of logging in a step and in a block, and the share of a step that both take."""
    (step_s, layer_s), block_s = time_steps(run), time_block(run)
    share = (layer_s + block_s / run.config.steps(run.config.evaluate_every)) / step_s
    return {"step_ms": step_s * 1e3, "layer_us": layer_s * 1e6, "block_us": block_s * 1e6, "share": share}


def time_steps(run: TrainingRun, num_steps: int = 60) -> tuple[float, float]:
    """Return the median seconds of a training step and the mean of the layer's calls around it."""
    batches, numbers = cycle(list(run.benchmark.synthetic_batches())), iter(range(num_steps))
    taken: list[tuple[int, Tensor]] = []

    def train() -> None:
        step = next(numbers)
        taken.append((step, run.train_step(next(batches), step)))

    def log_step() -> None:
        step, loss = taken[-1]
        run.slot.enter(step, LOADING)
        run.slot.enter(step, COMPUTING)
        run.clock.step(loss)
        run.watch.step(run.log, step + 1)

    run.log.start("block_start", first_epoch_num=1, epoch_count=1)
    run.clock.start()
    run.watch.start_block()
    trials = {call: partial(time_call, call, run.device) for call in (train, log_step)}
    times = interleave(trials, rounds=num_steps)
    run.clock.close()
    run.log.stop("block_stop", first_epoch_num=1)
    return statistics.median(times[train]), statistics.mean(times[log_step])


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
