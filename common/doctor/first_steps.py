"""The first steps of a training, and their loss against a stored band.

A benchmark's first_steps.yaml holds, for each configuration at size mini, what several seeds measured: the
loss of the first step and the mean of the last steps. `ttt doctor --store-bands SEEDS` writes it.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common import repository, yaml_file
from common.config.schema import RunConfig, Strict
from common.config.validation import validate
from common.errors import UserError
from common.evidence.intervals import prediction_half_width
from common.files import write_text
from common.machine import system
from common.machine.line import Line, fault, ok
from common.repository import ROOT, benchmark_module

FILE = "first_steps"
FEWEST_SEEDS = 3
NUM_LAST = 20  # steps whose mean loss is compared
UNTIMED = 5  # first steps, in which threads start
FALSE_ALARMS = 1e-4  # of a band: how often an honest training would lie outside
SEED, FIRST_SEED = 1, 100  # of a check; of a band, which does not hold that of the check


class Band(Strict):
    """What honest trainings of a configuration lost: a value for each seed, after so many steps."""

    num_steps: int
    first: list[float]
    last: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The first steps of a training: loss of the first, mean of the last, samples/s."""

    first: float
    last: float
    samples_per_s: float


def stored(benchmark: str) -> dict[str, Band]:
    """Return the bands of a benchmark by configuration. Raises UserError for a file that is not right."""
    path = ROOT / benchmark / f"{FILE}.yaml"
    document = yaml_file.read(path, path.relative_to(ROOT).as_posix())
    return {
        name: validate(Band, values, document.origins, (name,)) for name, values in document.values.items()
    }


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Return between what values the next one lies, but for `FALSE_ALARMS`: Student's prediction interval."""
    if len(values) < FEWEST_SEEDS:
        raise UserError(f"{len(values)} seeds are no band", where=FILE, hint="ttt doctor --store-bands 10")
    middle = statistics.mean(values)
    half = prediction_half_width(statistics.stdev(values), len(values), 1 - FALSE_ALARMS)
    return middle - half, middle + half


def take(config: RunConfig, *, seed: int, num_steps: int) -> Taken:
    """Train so many steps on the prepared data, in this process. Raises UserError as a run does."""
    from common.training.step import Training

    benchmark = benchmark_module(config.benchmark).Benchmark(config, seed=seed)
    benchmark.check_ready()
    training = Training(config, benchmark, seed=seed)
    training.initialize()
    batches, losses, started = benchmark.train_batches(), [], 0.0
    for step in range(num_steps):
        if step == UNTIMED:
            started = time.perf_counter()
        losses.append(float(training.train_step(next(batches), step)))
    seconds = time.perf_counter() - started
    batches.close()
    return Taken(
        first=losses[0],
        last=statistics.mean(losses[-NUM_LAST:]),
        samples_per_s=(num_steps - UNTIMED) * config.global_batch_size / seconds,
    )


def check(name: str, config: RunConfig) -> list[Line]:
    """Train the first steps and compare their loss with the band."""
    band = stored(config.benchmark)[config.configuration]
    return [compared(name, take(config, seed=SEED, num_steps=band.num_steps), band)]


def compared(check: str, taken: Taken, band: Band) -> Line:
    """Return whether the first and the last loss lie in the band."""
    found, is_inside = [], True
    for loss, values in ((taken.first, band.first), (taken.last, band.last)):
        low, high = limits(values)
        is_inside &= low <= loss <= high  # not for NaN
        found.append(f"{loss:.3f} ({low:.3f} to {high:.3f})")
    text = f"loss {found[0]}, after {band.num_steps} steps {found[1]}"
    measured = {"first": taken.first, "last": taken.last, "samples_per_s": taken.samples_per_s}
    if is_inside:
        return ok(check, text, **measured)
    advice = "data, code or arithmetic are not those of the band: ttt data verify, git status, kernels above"
    return fault(check, f"{text}: outside the band", advice, **measured)


def store(benchmark: str, named: dict[str, RunConfig], num_seeds: int) -> str:
    """Measure the bands of a benchmark anew, each as long as its file says, and write them there."""
    lines = [
        "# Loss of the first steps at size mini, by seed: `first` of step 1, `last` the mean of the last",
        f"# {NUM_LAST} of so many steps. `ttt doctor` compares a machine with the interval in which the next",
        f"# seed lies but for {FALSE_ALARMS:g} of the times. Made by: ttt doctor --store-bands {num_seeds}",
        f"# on {system.hardware_name()}, {', '.join(f'{k} {v}' for k, v in system.versions().items())}",
    ]
    for name, config in named.items():
        num_steps = stored(benchmark)[name].num_steps
        losses = []
        for seed in range(FIRST_SEED, FIRST_SEED + num_seeds):
            losses.append(taken := take(config, seed=seed, num_steps=num_steps))
            print(f"{benchmark} {name}, seed {seed}: {taken.first:.4f}, {taken.last:.4f}", flush=True)
        lines += [f"{name}:", f"  num_steps: {num_steps}"]
        lines += [f"  first: [{', '.join(f'{taken.first:.4f}' for taken in losses)}]"]
        lines += [f"  last: [{', '.join(f'{taken.last:.4f}' for taken in losses)}]"]
    path = ROOT / benchmark / f"{FILE}.yaml"
    write_text(path, "\n".join(lines) + "\n")
    return repository.relative_path(path)
