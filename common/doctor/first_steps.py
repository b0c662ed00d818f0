"""The losses of a training's first steps, compared with a stored band.

A benchmark's first_steps.yaml holds, for each configuration at size mini, the losses of several seeds: of
the first step, and the mean of the last steps. `ttt doctor --store-bands SEEDS` writes it.
"""

import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from common import repository, yaml_file
from common.config.schema import RunConfig, Strict
from common.config.validation import validate
from common.errors import UserError
from common.evidence.intervals import prediction_half_width
from common.files import write_text
from common.machine import system
from common.machine.line import Line, judge
from common.repository import ROOT, benchmark_module, configurations

FILE = "first_steps"
NUM_STEPS = 40  # of a new band
FEWEST_SEEDS = 3
NUM_LAST = 20  # steps whose mean loss is compared
UNTIMED = 5  # first steps, in which threads start
FALSE_ALARMS = 1e-4  # the share of sound trainings that lie outside of a band
SEED, FIRST_SEED = 1, 100  # of a check, and of the first training of a band


class Band(Strict):
    """Losses of sound trainings by seed: of the first step, and the mean of the last of `num_steps`."""

    num_steps: int
    first: list[float]
    last: list[float]


class FirstSteps(NamedTuple):
    """Loss of the first step of a training, the mean of the last ones, and samples/s."""

    first: float
    last: float
    samples_per_s: float


def bands_path(benchmark: str) -> Path:
    return ROOT / benchmark / f"{FILE}.yaml"


def read_bands(benchmark: str) -> dict[str, Band]:
    """Return the bands of a benchmark by configuration. Raises UserError for a file that is not right.

    Where the file is missing or empty, every configuration has a band without seeds.
    """
    path, bands = bands_path(benchmark), {}
    if path.is_file():
        document = yaml_file.read(path, path.relative_to(ROOT).as_posix())
        bands = {
            name: validate(Band, band, document.origins, (name,)) for name, band in document.values.items()
        }
    return bands or {name: Band(num_steps=NUM_STEPS, first=[], last=[]) for name in configurations(benchmark)}


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's prediction interval; a share `FALSE_ALARMS` of sound values lies outside."""
    if len(values) < FEWEST_SEEDS:
        hint = "ttt doctor --size mini --store-bands 10"
        raise UserError(f"{len(values)} seeds are no band", where=FILE, hint=hint)
    middle = statistics.mean(values)
    half = prediction_half_width(statistics.stdev(values), len(values), 1 - FALSE_ALARMS)
    return middle - half, middle + half


def train_first_steps(config: RunConfig, *, seed: int, num_steps: int) -> FirstSteps:
    """Train so many steps on the prepared data, in this process. Raises UserError as a run does."""
    from common.measure.clock import time_call
    from common.training.step import Training

    benchmark = benchmark_module(config.benchmark).Benchmark(config, seed=seed)
    benchmark.prepare_loader()
    training = Training(config, benchmark, seed=seed)
    training.initialize()
    with closing(benchmark.train_batches()) as batches:
        losses = [float(training.train_step(next(batches), step)) for step in range(UNTIMED)]
        rest = (float(training.train_step(next(batches), step)) for step in range(UNTIMED, num_steps))
        seconds = time_call(lambda: losses.extend(rest), training.device)
    return FirstSteps(
        first=losses[0],
        last=statistics.mean(losses[-NUM_LAST:]),
        samples_per_s=(num_steps - UNTIMED) * config.global_batch_size / seconds,
    )


def check(name: str, config: RunConfig) -> list[Line]:
    band = read_bands(config.benchmark)[config.configuration]
    return [compare(name, train_first_steps(config, seed=SEED, num_steps=band.num_steps), band)]


def compare(check: str, steps: FirstSteps, band: Band) -> Line:
    """Return ok if the first and the last loss lie in the band, else a fault."""
    texts, is_inside = [], True
    for loss, values in ((steps.first, band.first), (steps.last, band.last)):
        low, high = limits(values)
        is_inside &= low <= loss <= high  # not for NaN
        texts.append(f"{loss:.3f} ({low:.3f} to {high:.3f})")
    text = f"loss {texts[0]}, after {band.num_steps} steps {texts[1]}"
    text += "" if is_inside else ": outside the band"
    advice = "data, code or arithmetic are not those of the band: ttt data verify, git status, kernels above"
    return judge(check, text, advice, is_fault=not is_inside, **steps._asdict())


def store(benchmark: str, named: dict[str, RunConfig], num_seeds: int) -> str:
    """Measure the bands of a benchmark anew, each as long as its file says, and write them there."""
    lines = [
        "# Loss of the first steps at size mini, by seed: `first` of step 1, `last` the mean of the last",
        f"# {NUM_LAST} of so many steps. `ttt doctor` compares a machine with the interval in which the next",
        f"# seed lies but for {FALSE_ALARMS:g} of the times. "
        f"Made by: ttt doctor --size mini --store-bands {num_seeds}",
        f"# on {system.hardware_name()}, {system.versions_line()}",
    ]
    for name, config in named.items():
        num_steps = read_bands(benchmark)[name].num_steps
        losses = []
        for seed in range(FIRST_SEED, FIRST_SEED + num_seeds):
            losses.append(steps := train_first_steps(config, seed=seed, num_steps=num_steps))
            print(f"{benchmark} {name}, seed {seed}: {steps.first:.4f}, {steps.last:.4f}", flush=True)
        lines += [f"{name}:", f"  num_steps: {num_steps}"]
        for field in ("first", "last"):
            lines.append(f"  {field}: [{', '.join(f'{getattr(steps, field):.4f}' for steps in losses)}]")
    write_text(bands_path(benchmark), "\n".join(lines) + "\n")
    return repository.relative_path(bands_path(benchmark))
