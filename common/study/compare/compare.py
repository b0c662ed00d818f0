"""`ttt compare`: make pairs of two configurations, decide after each, report even after an interruption."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, PositiveFloat
from rich.console import Console

from common import repository
from common.config.names import short_name
from common.config.schema import RunConfig
from common.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from common.evidence.intervals import ALPHA
from common.evidence.log import Log
from common.evidence.recipes import all_differences
from common.evidence.text import line_console
from common.machine import system
from common.measure import device_run
from common.measure.figures import read_figures
from common.repository import benchmark_module, relative_path, shorten_name
from common.run import run_sets
from common.run.set_folder import of_values
from common.study import cells
from common.study.cells import Cell, Study
from common.study.compare import step_pairs
from common.study.compare.comparison import (
    OF_RUNS,
    THROUGHPUT,
    Margins,
    Result,
    Rule,
    Side,
    judge,
    judge_runs,
    judge_targets,
    pair_runs,
)
from common.study.compare.report import Comparison, describe_progress, save, show

NUM_EVALUATIONS = 20  # of a run: the target is crossed between two of them
NO_DIFFERENCES = ("configuration", "methods")  # a name, and whether there are any methods

Logs = tuple[Sequence[Log], Sequence[Log]]
Pair = Annotated[list[PositiveFloat], Field(min_length=2, max_length=2)]


class StepResult(BaseModel):
    pairs: list[Pair]


class StepPairs(BaseModel):
    """The part of the kept pairs of steps with which a command goes on."""

    dependences: dict[str, Any]
    commits: list[str]
    results: list[StepResult] = Field(min_length=1)


@dataclass(frozen=True)
class Command:
    args: argparse.Namespace
    console: Console

    @cached_property
    def names(self) -> tuple[str, str]:
        """The names of both sides; the path of a YAML file is shortened to its name."""
        one, other = map(short_name, (self.args.a, self.args.b))
        return one, other

    @cached_property
    def study(self) -> Study:
        args = self.args
        args.study = args.study or name_study(self.names)
        sides = [
            Cell(name=name, configuration=configuration)
            for name, configuration in zip(self.names, (args.a, args.b), strict=True)
        ]
        return replace(cells.from_arguments(args, sides), num_evaluations=NUM_EVALUATIONS)

    @cached_property
    def path(self) -> Path:
        """The path of JSON and plot, without their suffix."""
        report = self.study.report
        return report.with_name(f"{report.name}.steps") if self.args.steps else report

    @property
    def json_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.json")

    @cached_property
    def configs(self) -> tuple[RunConfig, RunConfig]:
        """The configurations as they run: on one device, for steps. Raises UserError for twice the same."""
        args, study = self.args, self.study
        if args.steps:
            names = ("+".join([name, *args.set]) for name in (args.a, args.b))
            one, other = (device_run.load(args.benchmark, name, size=args.size) for name in names)
            return one, other
        one, other = (cells.load_cell(study, cell).config for cell in study.cells)
        if not list_differences(one, other):
            what = f"{args.a} and {args.b} are the same configuration at size {args.size}"
            raise UserError(what, hint="--steps compares one with itself")
        return one, other

    @property
    def rule(self) -> Rule:
        args = self.args
        margins = Margins(ratio=args.margin, quality=args.quality_margin)
        num_measures = 1 if args.steps else len(set(args.measures))
        return Rule(margins=margins, max_pairs=args.seeds, alpha=ALPHA / num_measures)

    def describe(self, results: Sequence[Result], **more: Any) -> Comparison:
        return Comparison(
            benchmark=self.args.benchmark,
            size=self.args.size,
            names=self.names,
            differences=list_differences(*self.configs),
            quality_name=benchmark_module(self.args.benchmark).Benchmark.names.quality,
            rule=self.rule,
            results=tuple(results),
            **more,
        )

    def report(self, comparison: Comparison) -> None:
        """Print a comparison and keep it; one without pairs leaves nothing."""
        if comparison.num_pairs:
            show(comparison)
            for path in save(comparison, self.path):
                self.console.print(f"-> {relative_path(path)}")

    def show_progress(self, number: int, results: Sequence[Result]) -> None:
        self.console.print(f"after {number} of at most {self.rule.max_pairs} pairs:")
        for result in results:
            self.console.print(describe_progress(result, self.rule))

    def compare_runs(self) -> int:
        planned = cells.plan_run_sets(self.study, self.args)  # raises before a folder is made
        if self.args.dry_run:
            cells.show(self.study, planned)
            return EXIT_OK
        try:
            code = self.make_run_pairs()
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        logs = self.read_runs()
        if unmatched := sum(map(len, logs)) - 2 * len(pair_runs(*logs)):
            self.console.print(f"{unmatched} runs are left out: the other side has none of their seed")
        for line in cells.list_warnings(dict(zip(self.names, logs, strict=True))):
            self.console.print(line)
        commits = {log.header("commit") or "unknown" for runs in logs for log in runs}
        targets = {}
        if "quality" in self.args.measures:
            targets = judge_targets(dict(zip(self.names, logs, strict=True)), self.rule)
        self.report(self.describe(self.judge(logs), targets=targets, commits=tuple(sorted(commits))))
        return code

    def make_run_pairs(self) -> int:
        """Make runs of both sides in turn until they decide, or all are made; returns the exit code.

        The side that begins alternates. A run that fails ends the comparison, and so does an interruption.
        """
        study = self.study
        with run_sets.lock_folders([study.folder]):
            num_there = min(map(len, self.read_runs()))
            for number in range(num_there + 1, study.num_seeds + 1):
                planned = cells.plan_run_sets(replace(study, num_seeds=number), self.args)
                if number > 1 and self.show_state():
                    return EXIT_OK
                config = planned[0].loaded.config
                system.write_description(config, study.folder, system.machine_id(config))
                turns = [run_set for run_set in planned if cells.missing(run_set)]
                turns = turns if number % 2 else turns[::-1]
                if code := run_sets.run_all(turns, sys.argv[1:], fail_fast=True):
                    return code
            self.show_state()
        return EXIT_OK

    def read_runs(self) -> Logs:
        one, other = (cells.finished_runs(self.study.directory(cell)) for cell in self.study.cells)
        return one, other

    def show_state(self) -> bool:
        """Show the results of the runs so far; returns whether all are decided or futile."""
        logs = self.read_runs()
        results = self.judge(logs)
        self.show_progress(len(pair_runs(*logs)), results)
        return all(result.is_over for result in results)

    def judge(self, logs: Logs) -> list[Result]:
        measures = [measure for name, measure in OF_RUNS.items() if name in self.args.measures]
        return judge_runs(measures, logs, self.names, self.rule)

    def compare_steps(self) -> int:
        """Make pairs of steps, each kept as soon as it is there; returns the exit code."""
        dependences = step_pairs.describe_dependences(dict(zip("AB", self.configs, strict=True)))
        dependences["code"] = repository.code_state().digest
        pairs, commits = self.read_step_pairs(dependences)  # raises before a folder is made
        if self.args.dry_run:
            self.console.print(f"{len(pairs)} of at most {self.rule.max_pairs} pairs of steps are there")
            return EXIT_OK

        def decide() -> Comparison:
            results = [judge(THROUGHPUT, pairs, self.rule)]
            sources = tuple(sorted({*commits, repository.commit()}))
            return self.describe(results, commits=sources, dependences=dependences)

        code, comparison = EXIT_OK, decide()
        device_run.warn_without_gpu(self.study.size, self.console)
        try:
            with run_sets.lock_folders([self.study.folder]), self.console.status("") as status:
                pairs, commits = self.read_step_pairs(dependences)  # another command may have added some
                comparison = decide()
                while not comparison.is_over and len(pairs) < self.rule.max_pairs:
                    status.update(f"pair {len(pairs) + 1} of at most {self.rule.max_pairs}")
                    pairs.append(step_pairs.time_pair(self.configs, len(pairs)))
                    comparison = decide()
                    self.show_progress(len(pairs), comparison.results)
                    list(save(comparison, self.path))
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        self.report(comparison)
        return code

    def read_step_pairs(self, dependences: dict[str, Any]) -> tuple[list[Side], set[str]]:
        """Return the pairs of steps in the file and their commits. Raises UserError for other dependences."""
        path = self.json_path
        if not path.is_file():
            return [], set()
        there = read_figures(path, StepPairs)
        for key, value in dependences.items():
            if there["dependences"].get(key) != value:
                hint = "--study NAME begins another comparison"
                raise UserError(f"its pairs are of other {key}", where=relative_path(path), hint=hint)
        return [(one, other) for one, other in there["results"][0]["pairs"]], set(there["commits"])


def compare(args: argparse.Namespace) -> tuple[int, Path | None]:
    """Compare two configurations; returns the exit code, and the path of the figures where there are some."""
    command = Command(args, line_console())
    configs = command.configs  # raises before anything is made
    if args.dry_run:
        cells.check_builds(dict(zip((args.a, args.b), configs, strict=True)))
    code = command.compare_steps() if args.steps else command.compare_runs()
    return code, command.json_path if command.json_path.is_file() else None


def list_differences(one: RunConfig, other: RunConfig) -> tuple[str, ...]:
    changes = all_differences(of_values(one), of_values(other))
    return tuple(change.key for change in changes if change.key not in NO_DIFFERENCES)


def name_study(names: tuple[str, str]) -> str:
    whole = "-".join(["compare", *(re.sub(r"[^A-Za-z0-9._-]", ".", name) for name in names)])
    return shorten_name(whole, whole=" ".join(names))
