"""Measure what the logging and timing layer costs, as a share of a training step.

Takes real training steps on synthetic batches, alternating steps with the layer and without it, and times the
layer's own calls; then adds the log lines of an evaluation block, spread over the steps between two
evaluations.

examples:
  ttt bench language_bert optimized --size mini --logging
  ttt bench image_classification optimized --size mini --logging
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from common import config as configs
from common.errors import EXIT_FINDINGS, EXIT_OK

if TYPE_CHECKING:
    from common.mllog import RunLog
    from common.timed_run import TrainingRun

LIMIT = 0.005  # of a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("benchmark", help=f"one of: {', '.join(configs.benchmarks())}")
    parser.add_argument("configuration")
    parser.add_argument("--size", choices=configs.SIZES, default="mini")
    parser.add_argument(
        "--logging", action="store_true", required=True, help="the cost of logging and timing"
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps of each kind")
    parser.add_argument("--json", action="store_true", help="for machines")


def main(args: argparse.Namespace) -> int:
    """Measure, print, and fail when the layer costs more than 0.5 % of a step."""
    from common.mllog import RunLog
    from common.timed_run import Spec, TrainingRun

    config = configs.load(args.benchmark, args.configuration, size=args.size, settings=[]).config
    benchmark = configs.benchmark_module(config.benchmark).Benchmark(config, seed=0)
    with tempfile.TemporaryDirectory() as directory:
        log = RunLog(Path(directory) / "result_0.txt", state="run")
        spec = Spec(config={}, seed=0, system="bench", result="", label="", expected_s=None)
        run = TrainingRun(spec, config, benchmark, log)
        run.initialize()
        steps, layer = time_steps(run, args.steps)
        block = time_block(log)
        log.close()
    between = config.steps(config.evaluate_every)
    share = (layer + block / between) / steps
    found = {"step_ms": steps * 1e3, "layer_us": layer * 1e6, "block_us": block * 1e6, "share": share}
    if args.json:
        print(json.dumps(found))
    else:
        print(
            f"step {steps * 1e3:.2f} ms; logging and timing {layer * 1e6:.1f} us a step "
            f"and {block * 1e6:.0f} us a block of {between} steps: {share:.4%} of a step (limit {LIMIT:.1%})"
        )
    return EXIT_OK if share <= LIMIT else EXIT_FINDINGS


def time_steps(run: "TrainingRun", num_steps: int) -> tuple[float, float]:
    """Return the median seconds of a training step and of the layer's call after it."""
    steps, calls = [], []
    batches = cycle(list(run.benchmark.synthetic_batches()))
    run.clock.start()
    for step in range(num_steps):
        before = time.perf_counter()
        loss = run.train_step(next(batches), step)
        between = time.perf_counter()
        run.clock.step(loss)
        calls.append(time.perf_counter() - between)
        steps.append(between - before)
    run.clock.close()
    return statistics.median(steps), statistics.mean(calls)


def time_block(log: "RunLog", repeats: int = 50) -> float:
    """Return the mean seconds of all the log lines of one block and its evaluation."""
    before = time.perf_counter()
    for _ in range(repeats):
        log.start("block_start", first_epoch_num=1, epoch_count=1)
        log.start("epoch_start", epoch_num=1)
        log.stop("epoch_stop", epoch_num=1)
        log.event("throughput", 1.0, epoch_num=1, samples=1)
        log.event("train_loss", 1.0, epoch_num=1, samples=1)
        log.stop("block_stop", first_epoch_num=1)
        log.start("eval_start", epoch_num=1)
        log.stop("eval_stop", epoch_num=1)
        log.event("eval_accuracy", 0.5, epoch_num=1, samples=1, correct=1, total=2)
    return (time.perf_counter() - before) / repeats
