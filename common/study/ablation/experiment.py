"""The measurements of an ablation: step times side by side in this process, then runs as cells of a study.

Both are kept and never made twice.
"""

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveFloat, PositiveInt
from rich.console import Console

from common import repository
from common.config.schema import RunConfig
from common.data.preparation import check_data
from common.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from common.evidence.log import Log
from common.files import save_json
from common.measure.device_run import expect_step_s, load_for_ranks, open_run
from common.measure.figures import check_shape, read_figures
from common.repository import relative_path
from common.run import launch
from common.study import cells
from common.study.ablation.decisions import Decided, decide_switches, describe_decisions, states_in_question
from common.study.ablation.design import Ablation
from common.study.ablation.switches import State, Switches
from common.study.cells import Cell, Study
from common.study.compare.step_pairs import describe_dependences
from common.study.predict.sources import max_samples

TOGETHER = 8  # models in memory at a time, the base among them


class StepTimes(BaseModel):
    """The step times that are kept; the ledger needs them."""

    hardware: str
    versions: dict[str, str]
    date: str
    commit: str
    num_turns: PositiveInt
    base_s: PositiveFloat
    turns: dict[str, list[PositiveFloat]]
    shares: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An ablation, the study that keeps its measurements, and the options of a person."""

    ablation: Ablation
    study: Study
    args: argparse.Namespace
    console: Console

    @property
    def switches(self) -> Switches:
        return self.ablation.switches

    @property
    def num_runs(self) -> dict[State, int]:
        """The number of runs of each state that is trained at all."""
        args = self.args
        counts = dict.fromkeys(self.ablation.factorial, args.factorial_seeds)
        counts |= dict.fromkeys(self.ablation.single, args.seeds)
        counts |= dict.fromkeys(self.ablation.ends, max(args.seeds, args.end_seeds))
        return {state: count for state, count in counts.items() if count}

    @property
    def steps_path(self) -> Path:
        return self.study.report.with_suffix(".steps.json")

    def load_steps(self) -> Any:
        """Return the figures of steps from their file; None unless it is of the same states and versions."""
        if self.args.remeasure or not self.steps_path.is_file():
            return None
        figures = read_figures(self.steps_path)
        if any(figures.get(key) != value for key, value in self.describe_steps().items()):
            return None
        check_shape(figures, StepTimes, self.steps_path)
        path = relative_path(self.steps_path)
        source = f"{figures['date']}, commit {figures['commit'][:7]},"
        self.console.print(f"step times of {source} are kept ({path}); --remeasure repeats them")
        return figures

    def kept_steps(self) -> Any:
        """Return the figures of steps as they are. Raises UserError unless they are of the same states."""
        where = str(relative_path(self.steps_path))
        if not self.steps_path.is_file():
            raise UserError("no step times are kept", where=where, hint=cells.NO_ANSWERS)
        figures = read_figures(self.steps_path, StepTimes)
        names = {self.switches.cell_name(state) for state in self.ablation.states}
        if lacking := sorted(names - figures["turns"].keys()):
            raise UserError(f"no step times of {', '.join(lacking)}", where=where, hint=cells.NO_ANSWERS)
        return figures

    def describe_steps(self) -> dict[str, Any]:
        states = self.ablation.states
        configs = {self.switches.cell_name(state): self.config_on_one_device(state) for state in states}
        return describe_dependences(configs) | {"num_turns": self.args.turns}

    def config_on_one_device(self, state: State) -> RunConfig:
        (name, settings), switches = self.switches.recipe(state), self.switches
        if switches.size != "full":
            return switches.load(state).config
        return load_for_ranks(
            switches.benchmark, name, size=switches.size, settings=settings, num_ranks=1
        ).config

    def measure_steps(self) -> dict[str, Any]:
        """Time the steps of all states, in groups that hold the base too, and keep the figures."""
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        figures = self.describe_steps() | {"date": date, "commit": repository.commit()}
        shares = self.measure_shares()
        base, *others = self.ablation.states
        turns: dict[str, list[float]] = {}
        base_s: list[float] = []
        firsts = range(0, len(others), TOGETHER - 1)
        for number, first in enumerate(firsts, 1):
            gc.collect()  # frees earlier models
            title = f"step times: group {number} of {len(firsts)}"
            seconds = self.time_group(title, [base, *others[first : first + TOGETHER - 1]])
            reference = seconds[self.switches.cell_name(base)]
            base_s += reference
            for name, of_state in seconds.items():
                turns[name] = [one / other for one, other in zip(of_state, reference, strict=True)]
                self.console.print(f"  {name:46} {1e3 * statistics.median(of_state):9.3f} ms a sample")
        gc.collect()
        figures |= {"base_s": statistics.median(base_s), "turns": turns, "shares": shares}
        save_json(self.steps_path, figures)
        return figures

    def measure_shares(self) -> dict[str, float]:
        """Return the share of each part of a step of the base, and of the loader if data are prepared."""
        from common.measure import steptime

        base, before = State(), time.perf_counter()
        with open_run(self.config_on_one_device(base)) as run:
            self.announce(run, time.perf_counter() - before)
            shares = steptime.measure_parts(run)
            with contextlib.suppress(UserError):
                check_data(self.switches.load(base))
                if (waiting := steptime.measure_waiting(run)) is not None:
                    shares = {part: share * (1 - waiting) for part, share in shares.items()}
                    shares["data loading"] = waiting
        return shares

    def time_group(self, title: str, states: Sequence[State]) -> dict[str, list[float]]:
        """Return the seconds of a sample of each state in every turn, by the name of its cell."""
        import torch

        from common.measure import steptime

        torch.compiler.reset()  # drops code that was compiled for earlier models
        num_turns, runs = self.args.turns, {}
        with self.console.status(title) as status, ExitStack() as opened:
            for state in states:
                run = open_run(self.config_on_one_device(state), warms_up=False)
                runs[self.switches.cell_name(state)] = opened.enter_context(run)
            return steptime.measure_turns(
                runs, num_turns, lambda turn: status.update(f"{title}, turn {turn} of {num_turns}")
            )

    def announce(self, run: Any, built_s: float) -> None:
        """Say from the run of the base, and the seconds of building it, about how long everything takes."""
        from common.measure.points import points_of
        from common.measure.throughput import steps_of_turn
        from common.training.registry import build_methods

        num_states, step_s = len(self.ablation.states), expect_step_s(run)
        whole = self.switches.load(self.switches.all).config
        turn_s = len(points_of(run)) * step_s * steps_of_turn(build_methods(whole), step_s)
        minutes = num_states * ((self.args.turns + 1) * turn_s + built_s) / 60
        turns = f"{self.args.turns} turns: about {minutes:.1f} minutes"
        self.console.print(f"step times: {num_states} states, {turns}")
        if self.args.step_only:
            return
        counts, sample_s = self.num_runs, step_s / run.config.global_batch_size
        num_samples = sum(
            count * max_samples(self.switches.load(state).config) for state, count in counts.items()
        )
        minutes = num_samples * sample_s / launch.choose_ranks(whole, self.args.nproc) / 60
        self.console.print(
            f"training: {sum(counts.values())} runs of {len(counts)} cells, {num_samples:,} "
            f"{run.benchmark.names.samples}: about {minutes:.0f} minutes "
            f"if all were as slow as {self.switches.base}; what is finished is not run again"
        )

    def expect_training(self, figures: dict[str, Any]) -> str:
        """Say how long all runs would take by the times of their own states' steps."""
        seconds = sum(
            count
            * max_samples(self.switches.load(state).config)
            * figures["base_s"]
            * statistics.median(figures["turns"][self.switches.cell_name(state)])
            for state, count in self.num_runs.items()
        )
        num_ranks = launch.choose_ranks(self.switches.load(self.switches.all).config, self.args.nproc)
        return (
            f"training: about {seconds / num_ranks / 60:.1f} minutes of steps at these times, if nothing is "
            "there yet; start-up, evaluation and communication add to it"
        )

    def run_cells(self) -> int:
        """Make the runs that are missing, or say which with --dry-run; returns the worst exit code.

        States with the most seeds come first. A failure in one cell keeps no other from being trained, unless
        with --fail-fast.
        """
        counts, worst = self.num_runs, EXIT_OK
        for count in sorted(set(counts.values()), reverse=True):
            states = [state for state in self.ablation.states if counts.get(state) == count]
            worst = max(worst, self.run_states(states, count))
            if worst == EXIT_INTERRUPTED or (worst and self.args.fail_fast):
                return worst
        return worst if self.args.dry_run else max(worst, self.run_more_seeds())

    def run_more_seeds(self) -> int:
        """Make runs of further seeds, up to --max-seeds, of the states that are in question.

        A state is dropped as soon as all comparisons with it are decided, or cannot be. Stops at the first
        exit code that is not 0, and returns it.
        """
        for number in range(self.args.seeds + 1, self.args.max_seeds + 1):
            in_question = states_in_question(self.decide())
            states = [state for state in self.ablation.states if state in in_question]
            if not states:
                self.console.print("no further seed can decide anything about a switch")
                break
            if code := self.run_states(states, number):
                return code
        return EXIT_OK

    def run_states(self, states: Sequence[State], num_seeds: int) -> int:
        study = replace(self.study, cells=tuple(map(self.make_cell, states)), num_seeds=num_seeds)
        return cells.run(study, self.args)

    def decide(self) -> list[Decided]:
        return decide_switches(self.switches, self.read_logs(), self.args.max_seeds, self.target)

    @property
    def target(self) -> float:
        return float(self.args.target or self.switches.load(self.switches.all).config.target)

    def describe_decisions(self) -> list[str]:
        """Describe the decisions, if runs were added until they were made; [] for a fixed number of runs."""
        return [*describe_decisions(self.decide())] if self.args.max_seeds > self.args.seeds else []

    def make_cell(self, state: State) -> Cell:
        configuration, settings = self.switches.recipe(state)
        name = self.switches.cell_name(state)
        return Cell(name=name, configuration=configuration, settings=tuple(settings))

    def read_logs(self) -> dict[State, tuple[Log, ...]]:
        directories = {state: self.study.directory(self.make_cell(state)) for state in self.ablation.states}
        logs = {state: cells.finished_runs(directory) for state, directory in directories.items()}
        return {state: runs for state, runs in logs.items() if runs}
