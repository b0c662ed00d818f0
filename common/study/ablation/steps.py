"""Step times of an ablation: the states' steps side by side in this process, measured once and kept."""

import argparse
import contextlib
import gc
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from common import repository
from common.config.merge import to_yaml
from common.config.schema import RunConfig
from common.data.preparation import check_data
from common.errors import UserError
from common.files import save_text
from common.machine import system
from common.measure.device_run import NUM_DEVICES, build
from common.repository import ROOT, benchmark_module, relative_path
from common.study.ablation.design import Ablation
from common.study.ablation.switches import State, Switches
from common.study.cells import Study
from common.training.load import load_config

TOGETHER = 8  # models in memory at a time, the base among them


def builder(benchmark: str) -> Callable[[RunConfig], None]:
    """Return a function that builds a configuration once, and raises UserError where that fails."""
    from common.measure.steptime import buildable

    kind = benchmark_module(benchmark).Benchmark
    return lambda config: buildable(kind, config)


def steps_path(study: Study) -> Path:
    return study.report.with_suffix(".steps.json")


def load_steps(ablation: Ablation, study: Study, args: argparse.Namespace, console: Console) -> Any:
    """Return the figures of steps from their file; None unless it is of the same states and versions."""
    path = steps_path(study)
    if args.remeasure or not path.is_file():
        return None
    figures = json.loads(path.read_text())
    if any(figures.get(key) != value for key, value in describe_steps(ablation, args).items()):
        return None
    source = f"{figures['date']}, commit {figures['commit'][:7]},"
    console.print(f"step times of {source} are kept ({relative_path(path)}); --remeasure repeats them")
    return figures


def describe_steps(ablation: Ablation, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "hardware": system.hardware_name(),
        "versions": system.versions(),
        "num_turns": args.turns,
        "configurations": {ablation.name(state): digest(ablation, state) for state in ablation.states},
    }


def digest(ablation: Ablation, state: State) -> str:
    """Return a hash of the merged configuration of a state."""
    text = to_yaml(on_one_device(ablation.switches, state)).replace(f"{ROOT}/", "")
    return hashlib.sha256(text.encode()).hexdigest()


def on_one_device(switches: Switches, state: State) -> RunConfig:
    config = switches.load(state).config
    if switches.size != "full":
        return config
    configuration, settings = switches.recipe(state)
    share = [f"global_batch_size={config.global_batch_size // NUM_DEVICES}", "micro_batch_size=null"]
    loaded = load_config(switches.benchmark, configuration, size=switches.size, settings=[*settings, *share])
    return loaded.config


def measure_steps(
    ablation: Ablation,
    study: Study,
    args: argparse.Namespace,
    console: Console,
    announce: Callable[[Any, float], None],
) -> dict[str, Any]:
    """Time the steps of all states, in groups that hold the base too, and keep the figures.

    `announce` is told of the run of the base, and of the seconds that building it took.
    """
    import torch

    from common.measure import steptime

    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    about = describe_steps(ablation, args) | {"date": date, "commit": repository.commit()}
    base, *others = ablation.states
    turns: dict[str, list[float]] = {}
    base_s: list[float] = []
    groups = [others[first : first + TOGETHER - 1] for first in range(0, len(others), TOGETHER - 1)]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as logs:

        def build_state(state: State, *, warms_up: bool = False) -> Any:
            run = build(on_one_device(ablation.switches, state), Path(directory), warms_up=warms_up)
            logs.callback(run.log.close)
            return run

        before = time.perf_counter()
        first = build_state(base, warms_up=True)
        announce(first, time.perf_counter() - before)
        shares = steptime.measure_parts(first)
        with contextlib.suppress(UserError):  # no data prepared: the share of the loader stays unknown
            check_data(ablation.switches.load(base))
            if (waiting := steptime.measure_waiting(first)) is not None:
                shares = {part: share * (1 - waiting) for part, share in shares.items()}
                shares["data loading"] = waiting
        del first
        gc.collect()
        for number, group in enumerate(groups, 1):
            torch.compiler.reset()  # what was compiled for models that are gone
            runs = {ablation.name(state): build_state(state) for state in (base, *group)}
            title = f"step times: group {number} of {len(groups)}"
            with console.status(title) as status:

                def show_turn(turn: int, title: str = title, update: Any = status.update) -> None:
                    update(f"{title}, turn {turn} of {args.turns}")

                seconds = steptime.measure_turns(runs, args.turns, show_turn)
            reference = seconds[ablation.name(base)]
            base_s += reference
            for name, of_state in seconds.items():
                turns[name] = [one / other for one, other in zip(of_state, reference, strict=True)]
                console.print(f"  {name:46} {1e3 * statistics.median(of_state):9.3f} ms a sample")
            del runs
            gc.collect()  # models of a group make room for those of the next
    figures = about | {"base_s": statistics.median(base_s), "turns": turns, "shares": shares}
    save_text(steps_path(study), json.dumps(figures, indent=1) + "\n")
    return figures
