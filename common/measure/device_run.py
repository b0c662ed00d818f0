"""Runs whose steps are measured, on one device with its share of the batch, or on some ranks."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from common.config import schema as configs
from common.config.names import split_name
from common.files import temporary_folder
from common.machine.hardware import count_gpus
from common.repository import benchmark_module
from common.training.load import load_open
from common.training.ranks import SINGLE_RANK, RankInfo

if TYPE_CHECKING:
    from common.run.loop import TrainingRun

WHOLE_STEP = 1.5  # of the time of forward and backward alone
NUM_DEVICES = 8  # of the published systems; one of them, here, takes its share of the batch


def warn_without_gpu(size: str, console: Console) -> None:
    """Say before steps of size full that they take minutes where there is no GPU."""
    if size == "full" and not count_gpus():
        console.print("no GPU was found: a step at size full may take minutes here; for CPUs: --size mini")


def load(
    benchmark: str,
    name: str,
    *,
    size: str,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
) -> configs.RunConfig:
    """Return the configuration of a full name, see common/config/names.py, with the batch of one device."""
    configuration, settings = split_name(benchmark, name, size=size)
    parts = [] if micro_batch_size is None else [f"micro_batch_size={micro_batch_size}"]
    return load_for_ranks(
        benchmark, configuration, parts, size=size, settings=settings, batch_size=batch_size, num_ranks=1
    ).config


def load_for_ranks(
    benchmark: str,
    configuration: str,
    more: Sequence[str] = (),
    *,
    size: str,
    settings: Sequence[str] = (),
    batch_size: int | None = None,
    num_ranks: int,
) -> configs.Loaded:
    """Return a configuration with `more` settings and the batch of so many ranks, `batch_size` on each."""
    if batch_size is None:
        whole = load_open(benchmark, configuration, size=size, settings=settings).config
        batch_size = max(1, whole.global_batch_size // (NUM_DEVICES if size == "full" else num_ranks))
    sizes = [f"global_batch_size={batch_size * num_ranks}", "micro_batch_size=null"]
    others = [setting for setting in settings if not setting.startswith("global_batch")]
    return load_open(benchmark, configuration, size=size, settings=[*sizes, *others, *more])


def of_all_devices(config: configs.RunConfig, num_ranks: int) -> configs.RunConfig:
    """Return the configuration of the whole run on all devices, whose durations count its steps."""
    if config.size != "full":
        return config
    return config.replaced(global_batch_size=config.global_batch_size // num_ranks * NUM_DEVICES)


def build(
    config: configs.RunConfig, directory: Path, rank_info: RankInfo = SINGLE_RANK, *, warms_up: bool = True
) -> "TrainingRun":
    """Return an initialized run whose log goes to a folder that nobody keeps."""
    from common.run.loop import TrainingRun
    from common.run.mllog import RunLog
    from common.run.run_set import Spec

    log = RunLog(directory / "result_0.txt", state="run")
    spec = Spec(config={}, seed=0, system="bench", result="", expected_s=None)
    benchmark = benchmark_module(config.benchmark).Benchmark(config, seed=0, rank_info=rank_info)
    run = TrainingRun(spec, config, benchmark, log)
    try:
        run.initialize(from_scratch=True, warms_up=warms_up)
    except BaseException:
        log.close()
        raise
    return run


@contextmanager
def open_run(
    config: configs.RunConfig, rank_info: RankInfo = SINGLE_RANK, *, warms_up: bool = True
) -> Iterator["TrainingRun"]:
    """Initialize a run for the block; its log is in a folder that goes with it."""
    with temporary_folder() as directory:
        run = build(config, directory, rank_info, warms_up=warms_up)
        with closing(run.log):
            yield run


def expect_step_s(run: "TrainingRun") -> float:
    """Estimate the seconds of a whole step of a run that is warmed up, from its forward and backward pass."""
    return WHOLE_STEP * run.step_s * run.num_micro_batches
