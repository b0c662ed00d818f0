"""A study: cells that are trained to the end of their budget; finished runs outlast the command.

A cell is a configuration with settings and a budget; its runs, one a seed, are a run set like any other, in
results/study/<study>/<hardware>[-mini]-<cell>/<resnet|bert>/result_N.txt. Every cell has the same seeds;
a run that a fault ended is replaced by one of the next seed. Runs do not stop at the target, and are
evaluated equally often whatever the budget, so that each log holds a curve; no score counts them. What is
finished is never run again.
"""

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.arguments import add_shared, seed, whole_number
from common.config.names import find_base, short_name
from common.config.schema import Loaded, RunConfig
from common.data.preparation import check_data
from common.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from common.evidence.disturbance import disturbed_runs
from common.evidence.log import Log, read_log
from common.evidence.paths import STUDY
from common.evidence.records import counted
from common.evidence.text import make_table, open_console, size_title
from common.machine import system
from common.machine.preflight import preflight
from common.processes import output_to_stderr
from common.repository import FOLDER, MAX_NAME, NAME, WORKSPACE, build_probes, mlperf_name
from common.run import launch, run_sets
from common.run.run_set import RunSet
from common.study.predict.sources import max_samples, newest_bench
from common.training import ranks
from common.training.load import load_open

MAX_SEEDS = 100
TABLE_WIDTH = 110  # columns, where there is no terminal to ask
NO_ANSWERS = "leave out --answers, or read those of another machine: --set submission.hardware=NAME"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A configuration in a study. `settings` are as in --set and override the study's own.

    Without a `budget` a cell has that of its configuration.
    """

    name: str
    configuration: str
    settings: tuple[str, ...] = ()
    budget: float | None = None


@dataclass(frozen=True, kw_only=True)
class Study:
    """Cells of one benchmark at one size; `results` is the folder that holds those of every study."""

    name: str
    benchmark: str
    size: str
    cells: tuple[Cell, ...]
    num_seeds: int = 3
    first_seed: int = 1
    num_evaluations: int = 6  # of a run
    results: Path = WORKSPACE / "results"

    @property
    def title(self) -> str:
        return f"{self.benchmark} {size_title(self.size)}"

    @property
    def folder(self) -> Path:
        return self.results / STUDY / self.name

    @property
    def report(self) -> Path:
        """Path of the study's reports without their suffix: <folder>/<resnet|bert>-<size>."""
        return self.folder / f"{mlperf_name(self.benchmark)}-{self.size}"

    def directory(self, cell: Cell) -> Path:
        config = load_cell(self, cell).config
        return self.folder / system.system_id(config, cell.name) / mlperf_name(self.benchmark)


def add_options(
    parser: argparse.ArgumentParser,
    *,
    study: str,
    runs: str = "--seeds",
    num_runs: int = 3,
    of_runs: str = "runs of each cell",
) -> None:
    """Declare the options of every study; `study` is its default name.

    `runs` is the option for the number of runs of a cell, `num_runs` its default, `of_runs` its help.
    """
    seeds = whole_number(1, MAX_SEEDS)
    name = "results/study/NAME; other settings, another name"
    first = "the first seed, the next ones count up"
    add_shared(parser, "--size")
    parser.add_argument(runs, dest="seeds", type=seeds, default=num_runs, metavar="N", help=of_runs)
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help=first)
    parser.add_argument("--study", default=study, metavar="NAME", help=name)
    add_shared(parser, "--set", help="change a key of every cell")
    plan = "say what is there, what would run and how long, then stop"
    parser.add_argument("--dry-run", action="store_true", help=plan)
    add_shared(parser, "--nproc")
    run_sets.add_options_of_runs(parser)
    add_shared(parser, "--json", "--data", "--results")


def from_arguments(args: argparse.Namespace, cells: Sequence[Cell]) -> Study:
    """Return the study that the options describe: `cells`, each with the changes of --set at the end."""
    return Study(
        name=args.study,
        benchmark=args.benchmark,
        size=args.size,
        cells=tuple(replace(cell, settings=(*cell.settings, *args.set)) for cell in cells),
        num_seeds=args.seeds,
        first_seed=args.seed,
        results=args.results.resolve(),
    )


def run(study: Study, args: argparse.Namespace) -> int:
    """Show the cells and how long they will take, then make the missing runs; returns the exit code.

    If nothing tells how long a run takes, the first one is made before the table is shown again.
    """
    planned = plan_run_sets(study, args)  # raises before a folder is made
    if args.dry_run:
        names = [cell.configuration for cell in study.cells]
        configs = [run_set.loaded.config for run_set in planned]
        check_builds(dict(zip(names, configs, strict=True)))
        show(study, planned)
        return EXIT_OK
    with run_sets.lock_folders([study.folder]):
        planned = plan_run_sets(study, args)  # another command may have added some runs
        run_s = show(study, planned)
        config = planned[0].loaded.config
        system.write_description(config, study.folder, system.machine_id(config))
        code = EXIT_OK
        unknown = [run_set for run_set in planned if missing(run_set) and run_s[run_set.cell] is None]
        if unknown:
            least = min(unknown, key=lambda run_set: max_samples(run_set.loaded.config))
            first = replace(least, num_runs=least.num_done + 1)
            code = run_sets.run_all([first], sys.argv[1:], fail_fast=True)
            if code == EXIT_INTERRUPTED or (code and args.fail_fast):
                return code
            planned = plan_run_sets(study, args)
            show(study, planned)
        if unfinished := [run_set for run_set in planned if missing(run_set)]:
            code = max(code, run_sets.run_all(unfinished, sys.argv[1:], fail_fast=args.fail_fast))
    return code


def check_builds(configs: Mapping[str, RunConfig]) -> None:
    """Build a model of each configuration, as a run does. Raises UserError where a method refuses."""
    from common.measure.steptime import buildable

    for name, config in configs.items():
        try:
            buildable(config)
        except UserError as error:
            raise UserError(f"cannot be built: {error}", where=name) from None


def name_cell(benchmark: str, configuration: str, mark: str) -> str:
    """Return a name for a cell; the mark stands before what the configuration changes: `baseline-0.5+ema`."""
    base = find_base(benchmark, configuration)
    return f"{short_name(base)}-{mark}{configuration.removeprefix(base)}"


def print_report(
    args: argparse.Namespace, make: Callable[[argparse.Namespace], tuple[int, Path | None]]
) -> int:
    """Call `make`, which returns the exit code and the path of its figures; with --json print them alone.

    The output of `make` and its runs then goes to the standard error.
    """
    if not args.json:
        return make(args)[0]
    if args.dry_run:
        raise UserError("--dry-run makes no figures for --json", hint="leave one of them out")
    with output_to_stderr():
        code, path = make(args)
    if path is not None:
        print(path.read_text(), end="")
    return code


def plan_run_sets(study: Study, args: argparse.Namespace) -> list[RunSet]:
    """Return the run set of each cell without the finished runs.

    Raises UserError for results of other settings, two cells of one name, or a fault of this machine.
    """
    if ranks.read_rank_info().world_size > 1:
        raise UserError("a study starts its ranks itself", hint="use --nproc, not torchrun or srun")
    check_names(study)
    recipes = [launch.verify_recipe(load_cell(study, cell), args.nproc) for cell in study.cells]
    of_directories = {loaded.config.data.directory: loaded for loaded, _ in recipes}  # type: ignore[attr-defined]
    for loaded in of_directories.values():
        check_data(loaded)
    planned = []
    for cell, (loaded, num_ranks) in zip(study.cells, recipes, strict=True):
        run_set = launch.plan_run_set(
            loaded,
            results=study.folder,
            runs=str(study.num_seeds),
            seed=study.first_seed,
            num_ranks=num_ranks,
            cell=cell.name,
        )
        planned.append(run_sets.find_missing_runs(run_set, study.first_seed))
    notes = preflight(planned[0].loaded.config, study.folder, is_forced=args.force)
    options = {"hung_after_s": args.hung_after, "drops_caches": args.drop_caches, "anchor": args.anchor}
    return [replace(run_set, **options, preflight=notes) for run_set in planned]


def check_names(study: Study) -> None:
    """Raise UserError for a name of a study or a cell that cannot be a folder's, and for two equal ones."""
    names = [cell.name for cell in study.cells]
    for kind, name, more in (("study", study.name, ""), *(("cell", name, " + =") for name in names)):
        pattern = FOLDER if more else NAME
        if not pattern.fullmatch(name) or name == STUDY or not name.strip("."):
            hint = f"a name has 1 to {MAX_NAME} letters, digits and . _ -{more}, and is not '{STUDY}'"
            raise UserError(f"'{name}' cannot name a {kind}", hint=hint)
        if names.count(name) > 1:
            raise UserError(f"two cells are named '{name}'", hint="rename a YAML file, or leave one out")


def settings(study: Study, cell: Cell) -> list[str]:
    """Return the changes of a cell to its configuration, as in --set.

    The cadence of evaluation and `stop_at_target=false` come first: the cell's own settings override them.
    """
    budget = [] if cell.budget is None else [f"budget={cell.budget}"]
    changes = ["stop_at_target=false", *budget, *cell.settings]
    config = load_open(study.benchmark, cell.configuration, size=study.size, settings=changes).config
    every = math.ceil(config.plan().num_steps / study.num_evaluations)
    return [f"evaluate_every={every}ba", "evaluate_offset=0sp", "evaluate_from=0sp", *changes]


def load_cell(study: Study, cell: Cell) -> Loaded:
    return load_open(study.benchmark, cell.configuration, size=study.size, settings=settings(study, cell))


def missing(run_set: RunSet) -> int:
    return run_set.num_runs - run_set.num_done


def finished_runs(directory: Path) -> tuple[Log, ...]:
    """Return the logs of a cell's folder that came to their end, by seed."""
    logs = [read_log(path) for path in sorted(directory.glob("result_*.txt"))]
    ended = (log for log in logs if log.came_to_its_end and log.curve)
    return tuple(sorted(ended, key=lambda log: str(log.value("seed")).zfill(10)))


def finished_cells(study: Study) -> dict[str, tuple[Log, ...]]:
    return {cell.name: finished_runs(study.directory(cell)) for cell in study.cells}


def list_codes(logs: Mapping[str, Sequence[Log]]) -> dict[str, tuple[str, ...]]:
    """Map each cell to the codes of its runs, as their heads state them."""
    return {
        name: tuple(sorted({log.header("code") or log.header("commit") or "unknown" for log in runs}))
        for name, runs in logs.items()
    }


def describe_codes(logs: Mapping[str, Sequence[Log]]) -> list[str]:
    """Warn in one line of cells with runs of other code than most cells; [] if all are of one code."""
    codes = list_codes(logs)
    counts = Counter(code for of_cell in codes.values() for code in of_cell)
    if len(counts) < 2:
        return []
    (most, _), *_ = counts.most_common(1)
    others = [f"{name} ({', '.join(some)})" for name, some in codes.items() if {*some} - {most}]
    than = f"other code than {most}, and differences may be the code's"
    return [f"warning: some runs of these cells are of {than}: {', '.join(others)}"]


def list_warnings(logs: Mapping[str, Sequence[Log]]) -> list[str]:
    """Warn of cells of other code, in one line, and of disturbed runs, in a line each; all of them count."""
    disturbed = [
        f"warning: {name}, run {index}: {text}; it counts"
        for name, runs in logs.items()
        for index, text in disturbed_runs(runs).items()
    ]
    return [*describe_codes(logs), *disturbed]


def show(study: Study, planned: Sequence[RunSet]) -> dict[str, float | None]:
    """Print a table of the cells, and the compute that is still to be spent.

    Returns the seconds that a run of each cell takes; None where nothing says so.
    """
    expected = {cell.name: expect(study, cell, planned) for cell in study.cells}
    rows = []
    for cell, run_set in zip(study.cells, planned, strict=True):
        seconds, source = expected[cell.name]
        time = "?" if seconds is None else f"{seconds:.0f}"
        config = run_set.loaded.config
        counts = max_samples(config), run_set.num_done, missing(run_set)
        rows.append([cell.name, f"{config.budget:g}", *(f"{count:,}" for count in counts), time, source])
    columns = ("cell", "budget", "samples", "there", "to run", "s a run", "estimate from")
    console = open_console(TABLE_WIDTH)
    console.print(make_table("", columns, rows, left=("cell", "estimate from")))
    run_s = {name: seconds for name, (seconds, _) in expected.items()}
    todo = [(missing(run_set), run_s[run_set.cell]) for run_set in planned]
    minutes = sum(number * (seconds or 0) for number, seconds in todo) / 60
    takes = f", about {minutes:.1f} minutes of this machine"
    if any(seconds is None for _, seconds in todo):
        takes = "; the first one will tell how long they take"
    total = sum(number for number, _ in todo)
    console.print(
        f"to run: {counted(total, 'run')}{takes}" if total else "nothing is missing: every cell has its runs"
    )
    return run_s


def expect(study: Study, cell: Cell, planned: Sequence[RunSet]) -> tuple[float | None, str]:
    """Estimate the seconds of a run of a cell from the nearest measurement; return its name, too."""
    this = planned[study.cells.index(cell)]
    config, num_samples = this.loaded.config, max_samples(this.loaded.config)
    alike = [
        run_set.directory
        for other, run_set in zip(study.cells, planned, strict=True)
        if (other.configuration, other.settings) == (cell.configuration, cell.settings)
    ]
    scored = study.results / system.system_id(config) / this.directory.name
    for source, directories in (
        ("its finished runs", [this.directory]),
        ("other budgets", alike),
        ("ttt run", [scored]),
        ("ttt bench, without evaluation", []),
        ("other cells", [run_set.directory for run_set in planned]),
    ):
        pace = read_pace(directories) if directories else bench_pace(study, cell, this)
        if pace:
            start_s, sample_s = pace
            return start_s + sample_s * num_samples, source
    return None, "known after the first run"


def read_pace(directories: Sequence[Path]) -> tuple[float, float] | None:
    """Compute the median seconds before the clock starts and per sample after it, of runs in some folders."""
    starts, samples = [], []
    for log in (log for directory in directories for log in finished_runs(directory)):
        start, consumed = log.first("run_start"), log.curve[-1].samples
        if start and log.minutes and consumed:
            starts.append((start.time_ms - log.records[0].time_ms) / 1000)
            samples.append(60 * log.minutes / consumed)
    return (statistics.median(starts), statistics.median(samples)) if samples else None


def bench_pace(study: Study, cell: Cell, run_set: RunSet) -> tuple[float, float] | None:
    """Read the pace of all ranks from the latest `ttt bench` of a cell's configuration."""
    name, config = "+".join([cell.configuration, *cell.settings]), run_set.loaded.config
    probes = build_probes(config)
    rates = newest_bench(study.results, system.hardware_name(), probes, name)
    return (0.0, rates.sample_s(probes.shape_shares()) / run_set.num_ranks) if rates else None
