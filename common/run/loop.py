"""The training loop of a timed run, from the first step to the target or the last, by MLPerf's rules.

`worker` calls `make_run` in the process of each rank. A run can save checkpoints, and be resumed from one.
"""

import itertools
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from common.config.schema import RunConfig
from common.data import page_cache
from common.data.preparation import data_fingerprint
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.text import line_console
from common.files import explain_os_error, write_whole
from common.machine.system import version_of
from common.repository import WORKSPACE, benchmark_module, config_class
from common.run.closed_keys import closed_keys
from common.run.heartbeat import BETWEEN, COMPUTING, EVALUATED, EVALUATING, LOADING, Slot
from common.run.machine_watch import MachineWatch
from common.run.mllog import RunLog
from common.run.run_set import Spec
from common.run.stepclock import StepClock, bottleneck, duration, join_parts, time_left
from common.training import distributed
from common.training.benchmark import Benchmark
from common.training.checkpoint import capture, modules, restore, write
from common.training.checkpoint_header import Facts, checkpoint_of, read_facts
from common.training.method import Batch
from common.training.optim import optimizer_name
from common.training.ranks import RankInfo
from common.training.step import Training

RATES_BETWEEN_STEPS = (10, 50)  # after threads and workers have started, within the first block


class TrainingRun(Training):
    """One run: training, data, clock and log. Quality is a fraction, times are seconds.

    Every rank takes the same steps and decisions; rank 0 alone logs and prints. `slot` reports the progress
    of this rank to the launcher.
    """

    def __init__(
        self, spec: Spec, config: RunConfig, benchmark: Benchmark, log: RunLog, slot: Slot | None = None
    ) -> None:
        super().__init__(config, benchmark, seed=spec.seed)
        self.spec, self.log, self.slot = spec, log, slot or Slot()
        is_quiet = self.rank_info.rank > 0
        self.clock = StepClock(self.progress_line, line_console(quiet=is_quiet))
        self.watch = MachineWatch(spec.most_threads, self.rank_info, self.device)
        self.rate, self.quality = 0.0, 0.0
        self.started = time.monotonic()  # run_start sets it anew
        self.waited_s, self.loading_s, self.rates_from = 0.0, 0.0, (0.0, 0.0, 0.0)
        self.first_step = 0  # that this process takes
        self.shows_warm_up = False
        self.epoch: int | None = None  # the epoch open in the log
        every = config.checkpoint_every
        self.steps_per_checkpoint = config.steps(every) if every else self.plan.num_steps

    @property
    def num_samples(self) -> int:
        """The samples that all ranks have been trained on."""
        return self.clock.num_steps * self.config.global_batch_size

    def report_warm_up(self, number: int, num_shapes: int) -> None:
        if self.shows_warm_up:
            waited = duration(time.monotonic() - self.started)
            self.clock.print_now_and_then(f"  {waited}: {number} of {num_shapes} shapes are warmed up")

    def train(self) -> bool:
        """Train until an evaluation reaches the target, or to the end; returns whether the last did."""
        if self.first_step == 0:
            self.log.event("dataset_fingerprint", data_fingerprint(self.config))
        batches = self.benchmark.train_batches(self.first_step)
        for first, last in itertools.pairwise((0, *self.plan.evaluation_steps)):
            if 0 < self.first_step >= last:  # this evaluation came before the checkpoint
                continue
            if last > first:  # else the untrained model is evaluated
                self.train_block(batches, first, last)
            self.quality = self.evaluate()
            if self.quality >= self.config.target and self.config.stop_at_target:
                return True
        return self.quality >= self.config.target

    def train_block(self, batches: Iterator[Batch], first: int, last: int) -> None:
        """Take the steps range(first, last) and log them as one block."""
        number = self.benchmark.epoch_number(first * self.config.global_batch_size + 1)
        until = self.benchmark.epoch_number(last * self.config.global_batch_size)
        self.log.check_file()
        if self.log.state == "run":  # else the run is resumed inside this block
            self.clock.start()  # before the record, whose writing may take long
            self.log.start("block_start", first_epoch_num=number, epoch_count=until - number + 1)
            self.watch.start_block()
        for step in range(max(first, self.first_step), last):
            if step > self.first_step and step % self.steps_per_checkpoint == 0:
                self.slot.enter(step, BETWEEN)
                save(self, step)
            self.slot.enter(step, LOADING)
            before = time.perf_counter()
            batch = next(batches)
            self.waited_s += time.perf_counter() - before
            self.loading_s += batch.loading_s or 0.0
            self.slot.enter(step, COMPUTING)
            if self.epoch is None or (self.benchmark.counts_epochs and step % self.plan.steps_per_epoch == 0):
                self.change_epoch(self.benchmark.epoch_number(self.num_samples + 1))
            loss = self.train_step(batch, step)
            self.clock.step(loss)
            self.watch.step(self.log, step + 1)
            if first == self.first_step == 0 and step + 1 in RATES_BETWEEN_STEPS:
                self.report_rates(step + 1)
        self.slot.enter(last, BETWEEN)
        self.change_epoch(None)
        last_loss = self.clock.finish_loss(loss)  # waits for the device, which the host is ahead of
        self.rate = self.clock.pace() * self.config.global_batch_size
        where = {"epoch_num": until, "samples": self.num_samples}
        self.log.event("throughput", self.clock.steps_per_s() * self.config.global_batch_size, **where)
        self.watch.log_block(self.log, **where)
        value = distributed.all_reduce_mean(last_loss)
        if not math.isfinite(value):
            raise UserError(
                f"the loss is {value} at step {last}", where="training", hint="lower the learning rate"
            )
        self.log.event("train_loss", value, **where)
        self.log.stop("block_stop", first_epoch_num=number)

    def report_rates(self, step: int) -> None:
        """After the second of RATES_BETWEEN_STEPS, print the rates of loader and step, and the bottleneck."""
        now = time.perf_counter()
        first_at, first_waited, first_loading = self.rates_from
        self.rates_from = now, self.waited_s, self.loading_s
        first, last = RATES_BETWEEN_STEPS
        if step == last:
            line = bottleneck(
                (last - first) * self.config.global_batch_size,
                elapsed_s=now - first_at,
                waited_s=self.waited_s - first_waited,
                computed_s=(last - first) * self.step_s * self.num_micro_batches,
                loading_s=self.loading_s - first_loading or None,  # None: the loader cannot tell
            )
            self.clock.print_line(f"  {self.benchmark.names.samples}/s: {line}")

    def change_epoch(self, started: int | None) -> None:
        """Log the end of the open epoch and the start of another; the end of a block ends its epoch, too."""
        if self.epoch is not None:
            self.log.stop("epoch_stop", epoch_num=self.epoch)
        if started is not None:
            self.log.start("epoch_start", epoch_num=started)
        self.epoch = started

    @torch.no_grad()
    def evaluate(self) -> float:
        """Evaluate the whole set and log the quality: all correct predictions over all predictions."""
        step = self.clock.num_steps
        self.slot.enter(step, EVALUATING)
        number = self.benchmark.epochs_finished(self.num_samples)
        self.log.start("eval_start", epoch_num=number)
        model = self.evaluation_model()
        distributed.sync_batch_norm(model, self.config.evaluated_statistics)
        correct = total = torch.zeros((), dtype=torch.int64, device=self.device)
        for batch in self.benchmark.evaluation_batches():
            right, counted = self.count_correct(model, batch)
            correct, total = correct + right, total + counted
            self.slot.count_progress()
        self.model.train()
        self.slot.enter(step, EVALUATED)
        num_correct, num_total = distributed.all_reduce_sum(int(correct), int(total))
        if num_total != (expected := self.benchmark.num_evaluation_targets):
            what = f"{num_total} predictions were evaluated, expected {expected}"
            raise UserError(what, where="evaluation set")
        quality = num_correct / num_total
        self.log.stop("eval_stop", epoch_num=number)
        where = {"epoch_num": number, "samples": self.num_samples}
        self.log.event("eval_accuracy", quality, **where, correct=num_correct, total=num_total)
        others = self.benchmark.extra_metrics(num_correct, num_total)
        for name, value in others.items():
            self.log.event(name, value, **where)
        elapsed, names = time.monotonic() - self.started, self.benchmark.names
        trained = f"{self.rate:7.0f}/s  loss {self.clock.loss:6.3f}" if step else "untrained"
        self.clock.print_line(
            f"  {elapsed:6.1f} s  {self.num_samples:>9,} {names.samples}  {trained}"
            f"  {names.quality} {quality:.5f} (target {self.config.target:g})"
            + "".join(f"  {name} {value:.5f}" for name, value in others.items())
        )
        if not step and (doubt := self.benchmark.check_initial_quality(quality)):
            self.log.event("starting_doubt", doubt)
            self.clock.print_line(f"  {doubt}")
        return quality

    def progress_line(self, num_steps: int, steps_per_s: float, loss: float) -> str:
        elapsed = time.monotonic() - self.started
        steps_left = self.plan.num_steps - num_steps
        expected_s = 0.0 if self.first_step else self.spec.expected_s or 0.0  # elapsed includes the gap
        is_evaluated = self.plan.evaluation_steps[0] < num_steps
        quality = f"quality {self.quality:.4f} of {self.config.target:g}"
        parts = {
            "elapsed": f"{elapsed:6.1f} s",
            "step": f"step {num_steps}/{self.plan.num_steps}",
            "rate": f"{steps_per_s * self.config.global_batch_size:.0f} {self.benchmark.names.samples}/s",
            "loss": "" if math.isnan(loss) else f"loss {loss:.3f}",  # not fetched yet
            "quality": quality if is_evaluated else "not evaluated yet",
            "left": time_left(steps_left, steps_per_s, expected_s - elapsed),
        }
        return join_parts(parts, self.clock.width)


def log_head(log: RunLog, run: TrainingRun) -> None:
    """Log submission, recipe and hardware, before the clock starts."""
    config, spec = run.config, run.spec
    group = run.optimizer.param_groups[0]
    for key, value in {
        "submission_benchmark": run.benchmark.names.mlperf,
        "submission_division": config.submission.division,
        "submission_org": config.submission.org,
        "submission_platform": spec.system,
        "submission_status": config.submission.status,
        "quality_target": config.target,
        "stop_at_target": config.stop_at_target,
        "benchmark_size": config.size,
        "configuration_name": config.configuration,
        "seed": spec.seed,
        "global_batch_size": config.global_batch_size,
        "gradient_accumulation_steps": run.benchmark.num_accumulation_steps,
        "opt_name": optimizer_name(run.optimizer),
        "opt_base_learning_rate": float(group["lr"]),
        "opt_weight_decay": float(group.get("weight_decay", 0.0)),
        "opt_learning_rate_warmup_steps": run.plan.warmup_steps,
        "opt_learning_rate_training_steps": run.plan.num_steps,
        "train_samples": config.data.num_train_samples,  # type: ignore[attr-defined]
        "eval_samples": config.data.num_evaluation_samples,  # type: ignore[attr-defined]
        "device": torch.cuda.get_device_name() if run.device.type == "cuda" else platform.machine(),
        "num_ranks": run.rank_info.world_size,
        "num_accelerators": run.rank_info.world_size if run.device.type == "cuda" else 0,
        "distributed_backend": distributed.backend(),
        "gradient_compression": config.gradient_compression,
        "num_threads": torch.get_num_threads(),
        **closed_keys(run),
    }.items():
        log.event(key, value)
    log.event(
        "processor",
        spec.processor,
        capability=torch.backends.cpu.get_cpu_capability(),
        bf16_instructions=list(spec.bf16_instructions),
    )
    log_loaded(log, run)


def log_loaded(log: RunLog, run: TrainingRun) -> None:
    """Record the code that computes: optimizer, methods and backends, with the versions of their packages."""
    kind = type(run.optimizer)
    log.event("optimizer_class", kind.__qualname__, module=kind.__module__, **version_of(kind.__module__))
    for method in run.methods:
        log.event("method", method.name, settings=method.settings.model_dump(), sha256=method.digest)
    for part, backend in run.benchmark.backends().items():
        log.event("form_used", backend.name, part=part, **version_of(backend.module))


def make_run(spec: Spec, rank_info: RankInfo, slot: Slot) -> int:
    """Make one run; returns the exit code: 1 if it had to reach its target and did not, else 0.

    When the run fails, the launcher closes the log and states the reason.
    """
    module = benchmark_module(spec.config["benchmark"])
    config = config_class(spec.config["benchmark"]).model_validate(spec.config)
    result = WORKSPACE / spec.result if rank_info.rank == 0 else Path(os.devnull)
    log = RunLog(Path(os.devnull) if spec.checkpoint else result)  # the log of its first start goes on
    benchmark = module.Benchmark(config, seed=spec.seed, rank_info=rank_info)
    run = TrainingRun(spec, config, benchmark, log, slot)
    if spec.needs_gpu and not torch.cuda.is_available():
        hint = "install a build for it, or run on the CPU with CUDA_VISIBLE_DEVICES="
        what = "PyTorch cannot use the GPU of this machine"
        raise UserError(what, where=f"torch {torch.__version__}", hint=hint)
    dropped, how = False, ""
    with distributed.raise_on_all_ranks():
        if rank_info.local_rank == 0:
            with explain_os_error("cannot be read", benchmark.directory, hint=config.prepared_hint):
                dropped, how = page_cache.drop(benchmark.directory, whole=spec.drops_caches)
        log.event("cache_clear", dropped, how=how)
        log.start("init_start")
        benchmark.prepare_loader()
    run.shows_warm_up = True
    run.initialize()
    log_head(log, run)
    wall, run.started = time.time(), time.monotonic()  # before the records: a slow disk is in the time
    log.stop("init_stop", time_ms=int(wall * 1e3))
    if spec.checkpoint:
        wall = resume_run(run, Path(spec.checkpoint), result)
        run.started = time.monotonic() - (time.time() - wall)
    else:
        log.start("run_start", time_ms=int(wall * 1e3))
    try:
        distributed.barrier()  # no rank opens the data before the clock runs
        status = "success" if run.train() else "aborted"
        stopped, seconds = time.time(), time.monotonic() - run.started
        run.log.stop(
            "run_stop",
            time_ms=int(stopped * 1e3),
            status=status,
            samples=run.num_samples,
            duration_ms=round(seconds * 1e3),
            clock_drift_ms=round((stopped - wall - seconds) * 1e3),
        )
    finally:
        run.log.close()
        run.clock.close()
    distributed.barrier()  # the log is whole before any rank is seen to end
    return EXIT_OK if status == "success" or not config.stop_at_target else EXIT_FINDINGS


def save(run: TrainingRun, step: int) -> None:
    """Write a checkpoint whose next step is `step`. Collective; rank 0 writes the file.

    When it cannot be written, the previous one stays, the log and a line say so, and training continues.
    """
    before, now = time.monotonic(), time.time()
    run.log.check_file()
    tensors, states = capture(run)
    if run.rank_info.rank:
        return
    result = WORKSPACE / run.spec.result
    facts = Facts(
        step=step,
        seed=run.spec.seed,
        world_size=run.rank_info.world_size,
        system=run.spec.system,
        dataset_fingerprint=data_fingerprint(run.config),
        config=run.config.model_dump(mode="json"),
        modules=tuple(modules(run)),
        scaler=run.scaler.state_dict(),
        random=tuple(states),
        log=result.read_text("ascii"),
        log_state=run.log.state,  # type: ignore[arg-type]
        epoch=run.epoch,
        quality=run.quality,
        started=now - (before - run.started),
        block_started=now - (before - run.clock.block_start),
        saved=now,
    )
    try:
        write(checkpoint_of(result), tensors, facts)
    except (OSError, SafetensorError) as error:
        run.clock.print_line(f"  no checkpoint before step {step + 1}, the one before stays: {error}")
        run.log.event("checkpoint_failed", step, reason=str(error).encode("ascii", "replace").decode())
    else:
        run.log.event("checkpoint", step, duration_ms=round((time.monotonic() - before) * 1e3))


def resume_run(run: TrainingRun, checkpoint: Path, result: Path) -> float:
    """Set an initialized run to the state in a checkpoint; returns the time of its first run_start.

    `result` then holds the log up to the checkpoint, the head of the resuming command, and `resumed`.
    """
    with distributed.raise_on_all_ranks():
        facts = read_facts(checkpoint)
        restore(run, checkpoint, facts)
    run.first_step, run.epoch, run.quality = facts.step, facts.epoch, facts.quality
    now, evaluated = time.time(), [step for step in (0, *run.plan.evaluation_steps) if step <= facts.step]
    run.clock.resume(facts.step, evaluated[-1], time.monotonic() - (now - facts.block_started))
    run.watch.start_block()  # the part of it that this process measures
    run.log.close()
    if run.rank_info.rank == 0:
        head = result.read_text("ascii")
        with write_whole(result) as draft:
            draft.write_text(f"{facts.log}# --- resumed by\n{head}", "ascii")
            log = RunLog(draft, state=facts.log_state)
            log.event("resumed", facts.step, samples=run.num_samples, gap_ms=round((now - facts.saved) * 1e3))
            log.close()
    run.log = RunLog(result, state=facts.log_state)
    run.clock.print_line(
        f"  goes on with step {facts.step + 1} of {run.plan.num_steps} from {checkpoint.name}, "
        f"saved {now - facts.saved:.0f} s ago, {now - facts.started:.0f} s after the first start"
    )
    return facts.started
