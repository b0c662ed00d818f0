"""THE loop: one timed training, from cache_clear to run_stop, as MLPerf wants it.

Started as a process by `launch`: `python -m common.timed_run SPEC.json`.
"""

import json
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from common.benchmark import Benchmark
from common.config import ROOT, Plan, RunConfig, benchmark_module
from common.errors import EXIT_FINDINGS, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, UserError
from common.method import Batch, Loss, Method, Progress, build_methods
from common.mllog import RunLog
from common.optim import build_optimizer, build_schedule
from common.stepclock import StepClock

WARM_UP_CALLS = 3  # of each shape: compile, record and replay a captured graph
RATES_BETWEEN_STEPS = (10, 60)  # when threads and processes have started
LOADER_BOUND = 0.1  # of the time spent waiting for batches
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What `launch` hands over. `result` is relative to the repository when it lies inside it."""

    config: dict[str, Any]
    seed: int
    system: str
    result: str
    label: str  # for the progress line: "run 2/3"
    expected_s: float | None  # median of the earlier runs of this configuration on this system


class TrainingRun:
    """One run: model, data, methods, clock and log. Quality is a fraction, times are seconds."""

    def __init__(self, spec: Spec, config: RunConfig, benchmark: Benchmark, log: RunLog) -> None:
        self.spec, self.config, self.benchmark, self.log = spec, config, benchmark, log
        self.plan: Plan = config.plan()
        self.methods: list[Method] = build_methods(config)
        self.device = benchmark.device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.clock = StepClock(self.progress_line, Console(highlight=False, soft_wrap=True))
        self.num_samples, self.rate, self.quality, self.started = 0, 0.0, 0.0, 0.0
        self.waited_s, self.rates_from = 0.0, (0.0, 0.0)

    def initialize(self, *, from_scratch: bool = False) -> None:
        """Build everything and run every shape once on random values; nothing here may open the data set.

        With `from_scratch` prepared starting weights are not needed.
        """
        torch.manual_seed(self.spec.seed)
        model = self.benchmark.build_model()
        if not from_scratch:
            self.benchmark.load_weights(model)
        model = model.to(self.device)
        self.model: nn.Module = reduce(lambda built, method: method.model(built), self.methods, model)
        self.loss: Loss = self.benchmark.loss
        for method in self.methods:
            self.loss = method.loss(self.loss)
        optimizer = build_optimizer(self.model, self.config.optimizer)
        self.optimizer = reduce(lambda built, method: method.optimizer(built), self.methods, optimizer)
        self.set_rate = build_schedule(self.optimizer, self.config.schedule, self.plan)
        self.warm_up()

    def warm_up(self) -> None:
        """Take the first steps on synthetic batches, then put weights, buffers and random state back."""
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        random_state = torch.get_rng_state()
        shapes = set()
        self.step_s = math.inf
        for batch in self.benchmark.synthetic_batches():
            for step in range(0, self.plan.num_steps, self.plan.steps_per_epoch):
                inputs = self.prepared(batch, self.progress(step)).inputs.values()
                shape = tuple(value.shape for value in inputs if isinstance(value, Tensor))
                if shape not in shapes:
                    shapes.add(shape)
                    for _ in range(WARM_UP_CALLS):
                        self.optimizer.zero_grad(set_to_none=True)  # the next replay overwrites them
                        before = time.perf_counter()
                        self.forward_backward(batch, step).item()
                        alone_s = time.perf_counter() - before
                    self.step_s = alone_s if len(shapes) == 1 else self.step_s
        self.optimizer.zero_grad(set_to_none=True)
        self.model.load_state_dict(state)
        torch.set_rng_state(random_state)

    def progress(self, step: int) -> Progress:
        """Return where a step counted from 0 stands."""
        per_epoch = self.plan.steps_per_epoch
        num_epochs = math.ceil(self.plan.num_steps / per_epoch)
        return Progress(
            step=step, num_steps=self.plan.num_steps, epoch=step // per_epoch, num_epochs=num_epochs
        )

    def autocast(self, precision: str) -> torch.autocast:
        """Mixed precision: matrix products in 16 bits, parameters in float32."""
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=precision != "fp32")

    def prepared(self, batch: Batch, progress: Progress | None) -> Batch:
        """Move a batch to the device and let each method change it."""
        for method in self.methods:
            batch = method.batch(batch, progress)
        return batch if self.device.type == "cpu" else to_device(batch, self.device)

    def forward_backward(self, batch: Batch, step: int) -> Tensor:
        """Return the loss of a batch, with its gradients added to the parameters'."""
        batch = self.prepared(batch, self.progress(step))
        with self.autocast(self.config.precision):
            outputs = self.model(**batch.inputs)
        loss = self.loss(outputs, batch.targets)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss

    def train_step(self, batch: Batch, step: int) -> Tensor:
        """Take one optimizer step and return the loss."""
        self.set_rate(step)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward_backward(batch, step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for method in self.methods:
            method.after_step(self.model, step + 1)
        return loss

    def train(self) -> bool:
        """Train until an evaluation reaches the target; returns whether one did."""
        self.log.event("dataset_fingerprint", self.benchmark.fingerprint())
        batches = self.benchmark.train_batches()
        step = 0
        for last in self.plan.evaluation_steps:
            if last > step:  # not for an evaluation of the untrained model
                self.train_block(batches, step, last)
            step = last
            self.quality = self.evaluate()
            if self.quality >= self.config.target:
                return True
        return False

    def train_block(self, batches: Iterator[Batch], first: int, last: int) -> None:
        """Take the steps from `first` to `last` and log them as one block."""
        number = self.benchmark.epoch_number(self.num_samples + 1)
        until = self.benchmark.epoch_number(last * self.config.global_batch_size)
        self.log.start("block_start", first_epoch_num=number, epoch_count=until - number + 1)
        self.clock.start()
        epoch = None
        for step in range(first, last):
            before = time.perf_counter()
            batch = next(batches)
            self.waited_s += time.perf_counter() - before
            if epoch is None or (self.benchmark.counts_epochs and step % self.plan.steps_per_epoch == 0):
                self.change_epoch(epoch, epoch := self.benchmark.epoch_number(self.num_samples + 1))
            loss = self.train_step(batch, step)
            self.num_samples += batch.num_samples
            self.clock.step(loss)
            if first == 0 and step + 1 in RATES_BETWEEN_STEPS:  # no evaluation between them
                self.report_rates(step + 1)
        self.rate = self.clock.steps_per_s() * self.config.global_batch_size
        self.change_epoch(epoch, None)
        where = {"epoch_num": until, "samples": self.num_samples}
        self.log.event("throughput", self.rate, **where)
        value = self.clock.finish_loss(loss)
        if not math.isfinite(value):
            raise UserError(
                f"the loss is {value} at step {last}", where="training", hint="lower the learning rate"
            )
        self.log.event("train_loss", value, **where)
        self.log.stop("block_stop", first_epoch_num=number)

    def report_rates(self, step: int) -> None:
        """After the second of two steps, say what holds those between them up: the loader or the step."""
        (first_at, first_waited), now = self.rates_from, time.perf_counter()
        self.rates_from = now, self.waited_s
        first, last = RATES_BETWEEN_STEPS
        if step != last:
            return
        waiting = (self.waited_s - first_waited) / (now - first_at)
        is_waiting = waiting > LOADER_BOUND
        together = (last - first) * self.config.global_batch_size / (now - first_at)
        self.clock.line(
            f"  {self.benchmark.samples_name}/s: loader {together:.0f}{'' if is_waiting else ' or more'}, "
            f"step alone {self.config.global_batch_size / self.step_s:.0f}, together {together:.0f}; "
            f"{waiting:.0%} of the time waits: the {'loader' if is_waiting else 'step'} is the bottleneck"
        )

    def change_epoch(self, ended: int | None, started: int | None) -> None:
        """Log the border between two epochs; one that an evaluation divides is logged in both blocks."""
        if ended is not None:
            self.log.stop("epoch_stop", epoch_num=ended)
        if started is not None:
            self.log.start("epoch_start", epoch_num=started)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the quality over the whole evaluation set: right over all, one division at the end."""
        number = self.benchmark.epochs_finished(self.num_samples)
        self.log.start("eval_start", epoch_num=number)
        model = reduce(lambda used, method: method.evaluation_model(used), self.methods, self.model)
        model.eval()
        correct = total = torch.zeros((), dtype=torch.int64, device=self.device)
        for batch in self.benchmark.evaluation_batches():
            batch = self.prepared(batch, None)
            with self.autocast(self.config.evaluation_precision):
                outputs = model(**batch.inputs)
            right, counted = self.benchmark.count_correct(outputs, batch.targets)
            correct, total = correct + right, total + counted
        self.model.train()
        num_correct, num_total = int(correct), int(total)
        if num_total != self.benchmark.num_evaluation_targets:
            expected = self.benchmark.num_evaluation_targets
            raise UserError(
                f"{num_total} predictions were evaluated, expected {expected}", where="evaluation set"
            )
        quality = num_correct / num_total
        self.log.stop("eval_stop", epoch_num=number)
        self.log.event(
            "eval_accuracy",
            quality,
            epoch_num=number,
            samples=self.num_samples,
            correct=num_correct,
            total=num_total,
        )
        others = self.benchmark.other_qualities(num_correct, num_total)
        for name, value in others.items():
            self.log.event(name, value, epoch_num=number, samples=self.num_samples)
        elapsed = time.monotonic() - self.started
        trained = f"  {self.rate:7.0f}/s  loss {self.clock.loss:6.3f}" if self.num_samples else "  untrained"
        self.clock.line(
            f"  {elapsed:6.1f} s  {self.num_samples:>9,} {self.benchmark.samples_name}"
            f"{trained}  {self.benchmark.quality_name} {quality:.4f}"
            f" (target {self.config.target:g})"
            + "".join(f"  {name} {value:.4f}" for name, value in others.items())
        )
        return quality

    def progress_line(self, num_steps: int, steps_per_s: float, loss: float) -> str:
        """Return the text that stands at the bottom of the screen while training."""
        elapsed = time.monotonic() - self.started
        left = (self.plan.num_steps - num_steps) / max(steps_per_s, 1e-9)
        expected = f"{left:.0f} s left at most"
        if self.spec.expected_s is not None and elapsed < self.spec.expected_s:
            expected = f"about {self.spec.expected_s - elapsed:.0f} s left"
        rate = steps_per_s * self.config.global_batch_size
        return (
            f"  {elapsed:6.1f} s  step {num_steps}/{self.plan.num_steps}"
            f"  {rate:.0f} {self.benchmark.samples_name}/s"
            f"  loss {loss:.3f}  quality {self.quality:.4f} of {self.config.target:g}  {expected}"
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the tensors of a batch to the device without waiting."""

    def moved(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value.to(device, non_blocking=True) for name, value in values.items()}

    return Batch(inputs=moved(batch.inputs), targets=moved(batch.targets), num_samples=batch.num_samples)


def drop_page_cache(directory: Path, *, is_proxy: bool) -> tuple[bool, str]:
    """Drop the page cache, so that data come from storage: all of it, or only the data's below `directory`.

    All of it where the user may; a proxy leaves the rest of a person's machine alone. Returns whether it was
    dropped, and how or why not.
    """
    os.sync()
    try:
        if not is_proxy:
            DROP_CACHES.write_text("3")
            return True, "vm.drop_caches=3"
        why = "a proxy"
    except OSError as error:
        why = f"vm.drop_caches: {error.strerror}"
    if not hasattr(os, "posix_fadvise"):
        return False, f"{why}; no posix_fadvise on this system"
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True, f"{why}; posix_fadvise(DONTNEED) of the {len(files)} files of the data set"


def log_head(log: RunLog, run: TrainingRun) -> None:
    """Record who runs what: everything known before the clock starts."""
    config, spec = run.config, run.spec
    optimizer = config.optimizer
    for key, value in {
        "submission_benchmark": run.benchmark.mlperf_name,
        "submission_division": "open",
        "submission_org": config.submission.org,
        "submission_platform": spec.system,
        "submission_status": config.submission.status,
        "quality_target": config.target,
        "benchmark_size": config.size,
        "configuration_name": config.configuration,
        "seed": spec.seed,
        "global_batch_size": config.global_batch_size,
        "gradient_accumulation_steps": 1,
        "opt_name": optimizer.name,
        "opt_base_learning_rate": optimizer.learning_rate,
        "opt_weight_decay": optimizer.weight_decay,
        "opt_learning_rate_warmup_steps": run.plan.warmup_steps,
        "opt_learning_rate_training_steps": run.plan.num_steps,
        "train_samples": config.data.num_train_samples,  # type: ignore[attr-defined]
        "eval_samples": config.data.num_evaluation_samples,  # type: ignore[attr-defined]
        "device": torch.cuda.get_device_name() if run.device.type == "cuda" else platform.machine(),
        "num_threads": torch.get_num_threads(),
    }.items():
        log.event(key, value)
    for method in run.methods:
        log.event("method", method.name, settings=method.settings.model_dump())


def timed_run(spec: Spec) -> int:
    """Run once, whole. Returns the exit code: 0 when the target was reached, 1 when it was not."""
    module = benchmark_module(spec.config["benchmark"])
    config = module.Config.model_validate(spec.config)
    log = RunLog(ROOT / spec.result)
    benchmark = module.Benchmark(config, seed=spec.seed)
    run = TrainingRun(spec, config, benchmark, log)
    dropped, how = drop_page_cache(benchmark.directory, is_proxy=config.size == "mini")
    log.event("cache_clear", dropped, how=how)
    log.start("init_start")
    benchmark.check_ready()
    run.initialize()
    log_head(log, run)
    log.stop("init_stop")
    log.start("run_start")
    wall, run.started = time.time(), time.monotonic()
    status = "aborted"
    try:
        if run.train():
            status = "success"
    finally:
        duration = time.monotonic() - run.started
        log.stop(
            "run_stop",
            status=status,
            samples=run.num_samples,
            duration_ms=round(duration * 1e3),
            clock_drift_ms=round((time.time() - wall - duration) * 1e3),
        )
        log.close()
        run.clock.close()
    return EXIT_OK if status == "success" else EXIT_FINDINGS


def interrupt(number: int, frame: FrameType | None) -> None:
    """End the run as Ctrl-C does, so that its log is closed."""
    raise KeyboardInterrupt


def main() -> int:
    """Entry point of the process."""
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    signal.signal(signal.SIGTERM, interrupt)
    try:
        return timed_run(spec)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        return EXIT_INTERNAL


if __name__ == "__main__":
    sys.exit(main())
