"""One timed run: the head of its log, the loop, the end of its log; or a run resumed from a checkpoint."""

import os
import platform
import time
from pathlib import Path

import torch

from common.data import page_cache
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.files import write_whole
from common.machine.system import version_of
from common.repository import ROOT, benchmark_module
from common.run.heartbeat import Slot
from common.run.loop import Spec, TrainingRun
from common.run.mllog import RunLog
from common.training import distributed
from common.training.checkpoint import restore
from common.training.checkpoint_header import read_facts
from common.training.optim import optimizer_name
from common.training.ranks import RankInfo


def log_head(log: RunLog, run: TrainingRun) -> None:
    """Log what is known before the clock starts: submission, recipe, hardware."""
    config, spec = run.config, run.spec
    group = run.optimizer.param_groups[0]
    for key, value in {
        "submission_benchmark": run.benchmark.names.mlperf,
        "submission_division": "open",
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
    }.items():
        log.event(key, value)
    log_loaded(log, run)


def log_loaded(log: RunLog, run: TrainingRun) -> None:
    """Record the code that computes: optimizer, methods and backends, with the versions of their packages."""
    kind = type(run.optimizer)
    log.event("optimizer_class", kind.__qualname__, module=kind.__module__, **version_of(kind.__module__))
    for method in run.methods:
        log.event("method", method.name, settings=method.settings.model_dump(), sha256=method.digest)
    for part, backend in run.benchmark.backends().items():
        log.event("form_used", backend.name, part=part, **version_of(backend.module))


def timed_run(spec: Spec, rank_info: RankInfo, slot: Slot) -> int:
    """Run once. Returns the exit code: 1 when the run should reach its target and did not, else 0.

    When the run fails, the launcher closes the log and states the reason.
    """
    module = benchmark_module(spec.config["benchmark"])
    config = module.Config.model_validate(spec.config)
    result = ROOT / spec.result if rank_info.rank == 0 else Path(os.devnull)
    log = RunLog(Path(os.devnull) if spec.checkpoint else result)  # its first start is in the log already
    benchmark = module.Benchmark(config, seed=spec.seed, rank_info=rank_info)
    run = TrainingRun(spec, config, benchmark, log, slot)
    if spec.needs_gpu and not torch.cuda.is_available():
        hint = "install a build for it, or run on the CPU with CUDA_VISIBLE_DEVICES="
        raise UserError(
            "PyTorch cannot use the GPU of this machine", where=f"torch {torch.__version__}", hint=hint
        )
    dropped, how = False, ""
    if rank_info.local_rank == 0:
        dropped, how = page_cache.drop(benchmark.directory, whole=spec.drops_caches)
    log.event("cache_clear", dropped, how=how)
    log.start("init_start")
    with distributed.raise_on_all_ranks():
        benchmark.prepare_loader()
    run.initialize()
    log_head(log, run)
    log.stop("init_stop")
    gone_s = resume_run(run, Path(spec.checkpoint), result) if spec.checkpoint else 0.0
    if not spec.checkpoint:
        log.start("run_start")
    wall, run.started = time.time() - gone_s, time.monotonic() - gone_s
    try:
        distributed.barrier()  # no rank opens the data before the clock runs
        status = "success" if run.train() else "aborted"
        duration = time.monotonic() - run.started
        run.log.stop(
            "run_stop",
            status=status,
            samples=run.num_samples,
            duration_ms=round(duration * 1e3),
            clock_drift_ms=round((time.time() - wall - duration) * 1e3),
        )
    finally:
        run.log.close()
        run.clock.close()
    distributed.barrier()  # the log is whole before any rank is seen to end
    return EXIT_OK if status == "success" or not config.stop_at_target else EXIT_FINDINGS


def resume_run(run: TrainingRun, checkpoint: Path, result: Path) -> float:
    """Set an initialized run to the state in a checkpoint; returns the seconds since its first run_start.

    `result` becomes the log up to there, then the head of the command that goes on, then `resumed`.
    """
    with distributed.raise_on_all_ranks():
        facts = read_facts(checkpoint)
        restore(run, checkpoint, facts)
    run.first_step, run.epoch, run.quality = facts.step, facts.epoch, facts.quality
    run.num_samples = facts.step * run.config.global_batch_size
    now, evaluated = (
        time.time(),
        [0, *(number for number in run.plan.evaluation_steps if number <= facts.step)],
    )
    run.clock.num_steps, run.clock.steps_before_block = facts.step, evaluated[-1]
    run.clock.block_start = time.monotonic() - (now - facts.block_started)
    run.log.close()
    if run.rank_info.rank == 0:
        head = result.read_text("ascii")
        with write_whole(result) as draft:
            draft.write_text(f"{facts.log}# --- resumed by\n{head}", "ascii")
            log = RunLog(draft, state=facts.log_state)
            log.event("resumed", facts.step, samples=run.num_samples, gap_ms=round((now - facts.saved) * 1e3))
            log.close()
    run.log = RunLog(result, state=facts.log_state)
    run.clock.line(
        f"  goes on with step {facts.step + 1} of {run.plan.num_steps} from {checkpoint.name}, "
        f"saved {now - facts.saved:.0f} s ago, {now - facts.started:.0f} s after the first start"
    )
    return now - facts.started
