"""The changes that `ttt run -O1` and `-O2` try on a configuration.

`-O1` tries methods that declare to leave the mathematics alone, switched on or off, and settings of which
the benchmark says so; `-O2` also the methods of the benchmark's other configurations. A state is settings,
as after --set, in the order in which they were kept.
"""

import itertools
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import yaml
from torch import Tensor

from common.config.merge import is_asked
from common.config.names import read_methods
from common.config.schema import Loaded, RunConfig
from common.methods.compile import missing_compiler
from common.repository import available_methods, benchmark_module
from common.study.tuning.subjects import Steps, SubjectProcess
from common.study.tuning.traces import Trace, take_trace
from common.study.tuning.tune import Change, State
from common.training.benchmark import Benchmark
from common.training.card import read_card
from common.training.load import load_config
from common.training.method import Batch, Method
from common.training.probes import probes_of
from common.training.ranks import RankInfo
from common.training.registry import kind_of
from common.training.step import DTYPES, Training

NUM_POINTS = 4  # of a training, evenly spread, at which a turn takes a step
NUM_TRACED = 3  # steps of a comparison, at the peak of the learning rate
NUM_SHOWN = 10  # steps from the start whose losses are shown side by side


@dataclass(frozen=True, kw_only=True)
class Tuner:
    """One configuration on this machine; the share of a rank is computed, what ranks exchange is not."""

    loaded: Loaded
    settings: tuple[str, ...]  # a person's
    seed: int
    num_ranks: int

    def config(self, state: State) -> RunConfig:
        config = self.loaded.config
        settings = [*self.settings, *state]
        return load_config(config.benchmark, self.loaded.source, size=config.size, settings=settings).config

    def benchmark(self, config: RunConfig) -> Benchmark:
        """Return the benchmark of the first rank."""
        kind = benchmark_module(config.benchmark).Benchmark
        rank_info = RankInfo(rank=0, world_size=self.num_ranks, num_local=self.num_ranks)
        built: Benchmark = kind(config, seed=self.seed, rank_info=rank_info)
        return built

    def training(self, config: RunConfig) -> Training:
        """Return an initialized training with its real starting weights."""
        training = Training(config, self.benchmark(config), seed=self.seed)
        training.benchmark.prepare_loader()
        training.build(from_scratch=False)
        training.replica = training.model
        return training

    def build(self, state: State, *, has_loader: bool) -> SubjectProcess:
        return SubjectProcess(partial(self.make_steps, state, has_loader=has_loader))

    def make_steps(self, state: State, *, has_loader: bool) -> Steps:
        """Return a training that takes a step at each of a few points of the whole, on real batches."""
        training = self.training(self.config(state))
        benchmark, num_steps = training.benchmark, training.plan.num_steps
        points = [num_steps * number // NUM_POINTS for number in range(NUM_POINTS)]
        read = [] if has_loader else [next(benchmark.train_batches(point)) for point in points]
        return Steps(
            step=lambda number, batch: training.train_step(batch, points[number]),
            batches=benchmark.train_batches(0) if has_loader else itertools.cycle(read),
            num_steps=NUM_POINTS,
            num_prefetched=probes_of(benchmark).num_batches_ahead if has_loader else 0,
            device=training.device,
            num_turns=num_steps / NUM_POINTS,
        )

    def trace(self, state: State, *, is_exact: bool) -> Trace:
        """Return the first steps on real batches at the peak of the learning rate."""
        config = self.config(state)
        if not is_exact:
            return trace_steps(self.training(config), config)
        plain = config.replaced(precision="fp32")
        start = self.training(plain).model.state_dict()
        dtype = torch.float32 if torch.cuda.is_available() else torch.float64
        with ExitStack() as restored:
            restored.callback(torch.set_default_dtype, torch.get_default_dtype())
            restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_default_dtype(dtype)
            torch.set_float32_matmul_precision("highest")
            training = self.training(plain)
            training.model.load_state_dict(start)
            return trace_steps(training, plain, dtype)

    def losses(self, state: State) -> list[float]:
        training = self.training(self.config(state))
        batches = training.benchmark.train_batches(0)
        return [float(training.train_step(next(batches), step)) for step in range(NUM_SHOWN)]


def trace_steps(training: Training, config: RunConfig, dtype: torch.dtype | None = None) -> Trace:
    """Return the first steps of a training; a `dtype` is that of its model, else that of its precision."""
    peak = training.plan.warmup_steps
    batches = list(itertools.islice(training.benchmark.train_batches(peak), NUM_TRACED))
    if dtype:
        batches = [cast_inputs(batch, dtype) for batch in batches]

    def step(number: int) -> float:
        return float(training.train_step(batches[number], peak + number))

    return take_trace(training.model, step, NUM_TRACED, dtype or DTYPES[config.precision])


def cast_inputs(batch: Batch, dtype: torch.dtype) -> Batch:
    inputs = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.inputs.items()
    }
    return replace(batch, inputs=inputs)


def candidates(tuner: Tuner, level: int) -> list[Change]:
    """Return the changes to try, likely gains first: the time may not suffice for all.

    They are methods that configurations of the benchmark use, loaders, other methods, compilers, other
    settings, and leaving out methods that are on. Methods stay in the order in which they are applied,
    compilers last. Keys that the user set are left alone.
    """
    config = tuner.loaded.config
    chosen = {key for key, origin in tuner.loaded.origins.items() if is_asked(origin)}
    written = list(read_methods(config.benchmark, config.size).values())
    modules = available_methods(config.benchmark)
    longest_first = sorted(written, key=len, reverse=True)
    order = list(dict.fromkeys([*itertools.chain.from_iterable(longest_first), *sorted(modules)]))
    used, others, compilers, without = (list[Change]() for _ in range(4))
    for name in order:
        kind, homes = kind_of(name, modules[name]), [methods for methods in written if name in methods]
        if ("methods", name) in chosen:
            continue
        if name in config.methods:
            if kind.is_exact:
                without.append(Change(name=f"without {name}", adds=(f"methods.{name}=false",)))
        elif kind.is_exact or (level > 1 and homes):
            kinds = compilers if kind.compiles else used if homes else others
            kinds.append(switch_on(name, kind, homes, order))
    settings = [
        Change(name=" ".join(texts), adds=tuple(texts), is_of_loader=texts[0].startswith("data."))
        for texts in probes_of(tuner.benchmark(config)).equal_settings()
        if chosen.isdisjoint(tuple(text.partition("=")[0].split(".")) for text in texts)
    ]
    loaders = [change for change in settings if change.is_of_loader]
    forms = [change for change in settings if not change.is_of_loader]
    fused = Change(name=f"fused {config.optimizer.name}", missing="on already")
    return [fused, *used, *loaders, *others, *compilers, *forms, *without]


def switch_on(name: str, kind: type[Method], homes: list[dict[str, Any]], order: list[str]) -> Change:
    """Return the change that switches a method on with the settings of the first of its `homes`.

    `homes` are the methods of each configuration that has it. One that changes training conflicts with all
    methods that none of these has.
    """
    settings = yaml.safe_dump(homes[0][name] if homes else {}, default_flow_style=True, width=1000).strip()
    allies = set().union(*homes)
    lacks = missing_compiler() if kind.compiles else ""
    return Change(
        name=name,
        adds=(f"methods.{name}={settings}",),
        is_exact=kind.is_exact,
        evidence="" if kind.is_exact else read_promise(name, kind),
        missing=f"not available: {lacks}" if lacks else "",
        conflicts_with=() if kind.is_exact else tuple(other for other in order if other not in allies),
    )


def read_promise(name: str, kind: type[Method]) -> str:
    """Read a card's first sentence on quality, for a method that relieves no part of a step."""
    card = read_card(name, kind.__module__)
    relieves_none = {"nothing", "number of steps"}.issuperset(card.relieves)
    return card.sections.get("Effect on quality", "").partition(". ")[0] if relieves_none else ""


def compare_losses(unchanged: list[float], tuned: list[float], precision: str) -> str:
    """Return the losses of both, their largest difference, and the size of one rounding."""
    lines = [f"loss of the first {len(tuned)} steps, same seed and batches: unchanged, tuned, difference"]
    lines += [
        f"  {step:3}  {a:.9g}  {b:.9g}  {abs(a - b):.1e}"
        for step, (a, b) in enumerate(zip(unchanged, tuned, strict=True))
    ]
    largest = max(abs(a - b) / abs(a) for a, b in zip(unchanged, tuned, strict=True))
    rounding = torch.finfo(DTYPES[precision]).eps
    summary = f"{largest:.1e} of the loss; one rounding in {precision} is {rounding:.1e}"
    return "\n".join([*lines, "  largest difference: " + (summary if largest else "none, the same bits")])
