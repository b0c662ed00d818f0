"""Search of hyperparameters with the same number of quasi-random trials for each configuration.

A speed-up over a baseline that nobody tuned says little. Learning rate, warm-up, weight decay and length of
schedule of a trial are drawn around those of its configuration; the first trial is the recipe as it is; keys
in --set are not drawn. Trials stop at the target. The best has the fewest misses,
then the smallest mean of minutes of training, without start-up and evaluations. AlgoPerf (arXiv 2306.07179)
compares after such a search, and states its budget.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import scipy

from common.config.merge import extend
from common.config.names import short_name, split_name
from common.config.schema import RunConfig
from common.evidence import intervals
from common.evidence.compare.factors import time_split
from common.evidence.disturbance import disturbed_runs
from common.evidence.log import Log
from common.evidence.records import counted
from common.evidence.text import DASH, make_table, open_console, spread
from common.files import save_json, save_text
from common.study.cells import TABLE_WIDTH, Cell, Study, name_cell
from common.training.load import load_config, load_open

MAX_TRIALS = 64
DRAW_SEED = 0
FACTORS = {  # of the recipe's own value, from and to; drawn evenly in their logarithm
    "optimizer.learning_rate": (1 / 4, 4),
    "schedule.warmup": (1 / 4, 2),
    "optimizer.weight_decay": (1 / 10, 10),
    "budget": (1 / 3, 1),  # shortens the whole schedule, the decay of the learning rate with it
}
# of a cell's settings
NOT_OF_RECIPE = ("stop_at_target", "evaluate_every", "evaluate_offset", "budget", "submission.")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The runs of a trial: minutes of training, without start-up and evaluations, and samples to the target.

    Both are None for a miss, samples also for a run whose first evaluation was past the target. `settings`
    are those of --set and the drawn ones, `disturbed` the causes of the disturbed runs, which count.
    """

    settings: tuple[str, ...]
    minutes: tuple[float | None, ...]
    samples: tuple[float | None, ...]
    disturbed: tuple[str, ...] = ()

    @property
    def rank(self) -> tuple[int, float]:
        """Fewer misses are better, then fewer minutes: the geometric mean of the converged runs."""
        converged = [minutes for minutes in self.minutes if minutes]
        mean = statistics.geometric_mean(converged) if converged else math.inf
        return len(self.minutes) - len(converged), mean


def trial_cells(args: argparse.Namespace) -> list[Cell]:
    """Return a cell for each trial and configuration; the trials of one number are made side by side.

    Their settings lack those of --set, which `cells.from_arguments` adds.
    """
    fixed = {key_of(setting) for setting in args.set}
    points = scipy.stats.qmc.Halton(d=len(FACTORS), seed=DRAW_SEED).random(args.trials - 1).tolist()
    cells = []
    for number, point in enumerate([None, *points]):
        for name in dict.fromkeys(args.configurations):
            config = load_open(args.benchmark, name, size=args.size, settings=args.set).config
            cadence = (f"{key}={getattr(config, key)}" for key in ("evaluate_every", "evaluate_offset"))
            stops = ("stop_at_target=true", *cadence)
            drawn = dict(draw_values(config, point)) if point else {}
            drawn = {key: value for key, value in drawn.items() if key not in fixed}
            budget = float(drawn.pop("budget", config.budget))
            settings = (*stops, *(f"{key}={value}" for key, value in drawn.items()))
            cell_name = name_cell(args.benchmark, name, f"trial{number}")
            cells.append(Cell(name=cell_name, configuration=name, settings=settings, budget=budget))
    return cells


def key_of(setting: str) -> str:
    return setting.partition("=")[0]


def draw_values(config: RunConfig, point: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a trial with their values as in --set, from a point of the unit cube."""
    recipe = {
        "optimizer.learning_rate": config.optimizer.learning_rate,
        "schedule.warmup": config.steps(config.schedule.warmup),
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "budget": config.budget,
    }
    for (key, (low, high)), place in zip(FACTORS.items(), point, strict=True):
        value = recipe[key] * low * (high / low) ** place
        yield key, f"{round(value)}ba" if key == "schedule.warmup" else f"{value:.2g}"


def rank_trials(study: Study, logs: Mapping[str, Sequence[Log]]) -> dict[str, list[Trial]]:
    """Return the trials of each configuration that have all their runs, the best first."""
    trials: dict[str, list[Trial]] = {cell.configuration: [] for cell in study.cells}
    for cell in study.cells:
        if len(runs := logs[cell.name][: study.num_seeds]) == study.num_seeds:
            splits = [time_split(run) if run.is_converged else None for run in runs]
            trial = Trial(
                settings=tuple(list_changes(study, cell)),
                minutes=tuple(split.training if split else None for split in splits),
                samples=tuple(split.samples if split else None for split in splits),
                disturbed=tuple(disturbed_runs(runs).values()),
            )
            trials[cell.configuration].append(trial)
    return {name: sorted(some, key=lambda trial: trial.rank) for name, some in trials.items()}


def list_changes(study: Study, cell: Cell) -> Iterator[str]:
    """Yield the hyperparameters that a trial changes, as in --set, without the cadence of evaluation."""
    recipe = load_config(study.benchmark, cell.configuration, size=study.size, settings=[]).config
    if cell.budget is not None and cell.budget != recipe.budget:
        yield f"budget={cell.budget:g}"
    yield from (setting for setting in cell.settings if not key_of(setting).startswith(NOT_OF_RECIPE))


def show(trials: Mapping[str, Sequence[Trial]], title: str) -> None:
    console = open_console(TABLE_WIDTH)
    columns = ["configuration", "settings", "missed", "minutes", "samples"]
    rows = [
        [name, " ".join(trial.settings) or "the recipe", f"{trial.rank[0]}", *describe_runs(trial)]
        for name, some in trials.items()
        for trial in some
    ]
    counts = ", ".join(f"{name}: {len(some)}" for name, some in trials.items())
    heading = f"{title}: trials, the best first ({counts}; one with missing runs is not shown)"
    console.print(make_table(heading, columns, rows, left=columns[:2]))
    for line in describe_best(trials):
        console.print(line)


def describe_best(trials: Mapping[str, Sequence[Trial]]) -> Iterator[str]:
    """Yield the gain of each configuration's best trial over the best trial of the first configuration."""
    best = {name: some[0] for name, some in trials.items() if some}
    first, *others = best or [""]
    for name in others:
        if missed := " and of ".join(side for side in (first, name) if best[side].rank[0]):
            yield f"{name} and {first}: no trial of {missed} reached the target in every run."
            continue
        factor, is_shown = compare(best[first], best[name])
        fast, slow = (
            f"{len(some)} trials of {side} ({sum(not trial.rank[0] for trial in some)} reached the target in "
            "every run)"
            for side, some in ((name, trials[name]), (first, trials[first]))
        )
        yield (
            f"The best of {fast} is {factor} as fast as the best of {slow}, by "
            f"{counted(len(best[name].minutes), 'run')} of each"
            f"{'' if is_shown else '; that is not shown to differ from 1'}"
            f"{note_disturbed(best, first, name)}."
        )


def note_disturbed(best: Mapping[str, Trial], *names: str) -> str:
    """Count the disturbed runs of best trials, as the end of a sentence; '' for none."""
    disturbed = {name: len(best[name].disturbed) for name in names if best[name].disturbed}
    counts = [f"{counted(number, 'disturbed run')} of {name}" for name, number in disturbed.items()]
    return f", counting {' and '.join(counts)}" * bool(counts)


def compare(slow: Trial, fast: Trial) -> tuple[str, bool]:
    """Return how many times as fast `fast` is, with its interval, and whether it is shown to differ from 1.

    All runs of both have reached the target.
    """
    gain = intervals.ratio(slow.minutes, fast.minutes)  # type: ignore[arg-type]
    is_shown = gain.interval is not None and not gain.interval.holds(1)
    return spread(gain.value, gain.interval, unit="x"), is_shown


def describe_runs(trial: Trial) -> tuple[str, str]:
    samples = [number for number in trial.samples if number]
    minutes = f"{trial.rank[1]:.3f}" if any(trial.minutes) else DASH
    return minutes, f"{statistics.fmean(samples):,.0f}" if samples else DASH


def read(path: Path) -> dict[str, list[Trial]]:
    """Return the trials that `save` wrote, by configuration, the best first."""
    document = json.loads(path.read_text())
    return {
        name: [Trial(**{key: tuple(value) for key, value in entry.items()}) for entry in some]
        for name, some in document.items()
        if isinstance(some, list)  # else the number of seeds, or the factors
    }


def save(study: Study, trials: Mapping[str, Sequence[Trial]]) -> Iterator[Path]:
    """Write the trials, and the best of each configuration as a YAML file to run by its path."""
    document = {"num_seeds": study.num_seeds, "factors": FACTORS}
    document |= {name: [asdict(trial) for trial in some] for name, some in trials.items()}
    path = study.report.with_name(f"{study.report.name}.json")
    save_json(path, document)
    yield path
    for name, some in trials.items():
        if some:
            stem = re.sub(r"[^A-Za-z0-9._-]", "-", short_name(name))
            path = study.report.with_name(f"{study.report.name}-{stem}-best.yaml")
            head = f"# The best of {len(some)} trials of {study.num_seeds} runs each: ttt sweep --trials"
            base, changes = split_name(study.benchmark, name, size=study.size)
            save_text(path, extend(base, [*changes, *some[0].settings], head))
            yield path
