"""The speed of training steps with each method over that without it: the figures on the methods' cards.

A method is compared with the baseline, to which the methods that it needs are added; a method of the baseline
is left out of it instead. A pair times both in new processes, in turns (compare/step_pairs.py). The number of
pairs is fixed beforehand, so that Student's interval of their ratios holds.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console

from common import repository
from common.config.schema import RunConfig
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.intervals import student_of_logs
from common.evidence.paths import STUDY
from common.evidence.score import BASELINE
from common.evidence.text import line_console
from common.files import save_text
from common.machine import system
from common.measure import device_run
from common.repository import available_methods, benchmarks, mlperf_name, relative_path
from common.run import run_sets
from common.study.compare import step_pairs
from common.training.card import MEASURED, Card, Measured, cards, find_card, read_measured

NUM_PAIRS = 4
START_S = 12.0  # of the two processes of a pair, by the starts of `ttt inspect`: an estimate
CALLS_OF_POINT = 4  # warm-up, trial and first turn: steps of each point before the turns count

Pairs = list[tuple[float, float]]  # samples/s without and with a method


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A method and the names of the two configurations that show it: without it, and with it."""

    method: str
    benchmark: str
    size: str
    names: tuple[str, str]

    @property
    def configs(self) -> tuple[RunConfig, RunConfig]:
        one, other = (device_run.load(self.benchmark, name, size=self.size) for name in self.names)
        return one, other

    def path(self, results: Path) -> Path:
        stem = f"{mlperf_name(self.benchmark)}-{self.size}-{self.method}"
        return results / STUDY / MEASURED.name / f"{stem}.json"


def choose_subjects(size: str, only: str | None) -> tuple[list[Subject], dict[str, str]]:
    """Return the methods that can act here, and why the others cannot, by method.

    A method that fits any model is measured on the last benchmark that can build it.
    """
    subjects, reasons = [], dict[str, str]()
    for card in [find_card(only)] if only else cards():
        for benchmark in reversed(benchmarks()):
            if available_methods(benchmark).get(card.name) != card.module:
                continue
            try:
                subjects.append(build_subject(card, benchmark, size))
            except UserError as error:
                reasons[card.name] = error.what
            else:
                reasons.pop(card.name, None)
                break
    return subjects, reasons


@cache
def build_once(benchmark: str, name: str, size: str) -> None:
    """Build a configuration, of many subjects once. Raises UserError where that fails."""
    from common.measure.steptime import buildable

    buildable(device_run.load(benchmark, name, size=size))


def build_subject(card: Card, benchmark: str, size: str) -> Subject:
    """Return the comparison of a method on a benchmark. Raises UserError where it cannot be built."""
    from common.training.registry import kind_of

    if kind_of(card.name, card.module).compiles:
        raise UserError("a compiler's gain is measured on the device that it is for")
    plain = device_run.load(benchmark, BASELINE, size=size)
    base = "+".join([BASELINE, *(name for name in card.after if name not in plain.methods)])
    is_on = card.name in plain.methods
    names = (f"{base}-{card.name}", base) if is_on else (base, f"{base}+{card.name}")
    subject = Subject(method=card.name, benchmark=benchmark, size=size, names=names)
    for name in names:
        build_once(benchmark, name, size)
    if card.name not in subject.configs[1].methods:
        raise UserError("the configuration drops it at this size")
    return subject


def measure(args: argparse.Namespace) -> int:
    """Measure the methods that can act at a size, a pair of each in turn; returns the exit code.

    Files that have their pairs are kept, whatever their commit; others are continued on the same one.
    """
    size, num_pairs, results = args.measure, args.pairs or NUM_PAIRS, args.results.resolve()
    console = line_console()
    with console.status("finding out what can be built"):
        subjects, reasons = choose_subjects(size, args.name)
    for method, reason in reasons.items():
        console.print(f"not measured: {method}: {reason}")
    pairs = {subject: read_pairs(subject, num_pairs, results) for subject in subjects}
    missing = {subject: num_pairs - len(there) for subject, there in pairs.items() if len(there) < num_pairs}
    console.print(f"{len(subjects)} methods, {num_pairs} pairs each; {len(missing)} methods lack some")
    if missing:
        seconds = [number * expect_pair_s(subject.benchmark, size) for subject, number in missing.items()]
        console.print(f"about {sum(seconds) / 60:.0f} minutes, by the step time of {BASELINE}")
    if args.dry_run or not missing:
        return EXIT_OK
    folder = results / STUDY / MEASURED.name
    with run_sets.lock_folders([folder]):  # another command may have added some pairs
        pairs = {subject: read_pairs(subject, num_pairs, results) for subject in subjects}
        code = add_pairs(pairs, num_pairs, results, console)
    console.print(f"-> {relative_path(folder)}; then: ttt list methods --out METHODS.md")
    return code


def add_pairs(pairs: dict[Subject, Pairs], num_pairs: int, results: Path, console: Console) -> int:
    """Measure the missing pairs, each kept as soon as it is there; a method that fails is left out."""
    failed = set[Subject]()
    for number in range(num_pairs):
        for subject, there in pairs.items():
            if len(there) > number or subject in failed:
                continue
            try:
                there.append(step_pairs.time_pair(subject.configs, number))
            except UserError as error:
                failed.add(subject)
                console.print(f"{subject.method}: {error.what}")
                continue
            figure = summarize(subject, there)
            save_text(subject.path(results), figure.model_dump_json(indent=1) + "\n")
            console.print(f"{number + 1}/{num_pairs}  {subject.method:24} {figure.speed}")
    return EXIT_FINDINGS if failed else EXIT_OK


def read_pairs(subject: Subject, num_pairs: int, results: Path) -> Pairs:
    """Read the pairs of a method; those of another machine or of other configurations' names are dropped.

    Fewer than `num_pairs` are dropped, too, unless commit and versions are the same.
    """
    path = subject.path(results)
    if not path.is_file():
        return []
    there = read_measured(path)
    now = summarize(subject, there.pairs)
    if (there.hardware, there.names) != (now.hardware, now.names):
        return []
    return list(there.pairs) if len(there.pairs) >= num_pairs or there == now else []


def summarize(subject: Subject, pairs: Sequence[tuple[float, float]]) -> Measured:
    ratios = [other / one for one, other in pairs]
    limits = student_of_logs(ratios)
    return Measured(
        method=subject.method,
        benchmark=subject.benchmark,
        size=subject.size,
        names=subject.names,
        pairs=tuple(pairs),
        ratio=statistics.geometric_mean(ratios),
        low=limits.low if limits else None,
        high=limits.high if limits else None,
        hardware=system.hardware_name(),
        versions=system.versions(),
        commit=repository.commit(),
    )


@cache
def expect_pair_s(benchmark: str, size: str) -> float:
    """Time a step of the baseline here, and estimate the seconds of a pair from it."""
    from common.measure.points import MIN_POINTS
    from common.measure.throughput import steps_of_turn

    config = device_run.load(benchmark, BASELINE, size=size)
    with device_run.open_run(config) as run:
        step_s = device_run.expect_step_s(run)
        lap_s = 2 * MIN_POINTS * steps_of_turn(run.methods, step_s) * step_s
    turns_s = max(step_pairs.TURNS_S, step_pairs.NUM_TURNS[0] * lap_s) + 2 * lap_s
    return START_S + 2 * MIN_POINTS * CALLS_OF_POINT * step_s + turns_s
