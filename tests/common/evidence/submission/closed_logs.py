"""Logs of closed runs of size full: the loop that times runs writes them, its steps compute nothing.

Model, optimizer and plan are those of the run, as tensors without values.
"""

import itertools
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from common.repository import benchmark_module, mlperf_name
from common.run import launch, loop
from common.training.load import load_config
from common.training.method import Batch
from common.training.ranks import SINGLE_RANK

MASKED = {"num_evaluation_masked_tokens": 428_235, "num_evaluation_short": 6_946}
EMPTY = Batch(inputs={}, targets={}, num_samples=1)


class EmptyRun(loop.TrainingRun):
    """A run that reaches its target with evaluation number `reached_at`, from 1."""

    reached_at = 1

    def initialize(self):
        stays = mock.patch.object(nn.Module, "to", lambda model, *_, **__: model)  # no fake tensors move
        with FakeTensorMode(), stays:
            super().initialize(from_scratch=True, warms_up=False)

    def train_step(self, batch, step):
        return torch.full((), 1 / (step + 1 + self.seed % 1000))

    def evaluation_model(self):
        return nn.Identity()

    def count_correct(self, model, batch):
        number = self.plan.evaluation_steps.index(self.clock.num_steps) + 1
        short = 0.01 * (self.reached_at - number) if number < self.reached_at else -1e-4
        total = self.benchmark.num_evaluation_targets
        return torch.tensor(round(total * (self.config.target - short))), torch.tensor(total)


def write_log(monkeypatch, folder, benchmark, configuration, *settings, reached_at, seed=1):
    """Write results/<system>/<benchmark>/result_N.txt below a folder; return the file."""
    sets = ["submission.org=Example", "submission.hardware=8xA100", *settings]
    loaded = load_config(benchmark, configuration, size="full", settings=sets)
    kind = benchmark_module(benchmark).Benchmark
    monkeypatch.setattr(loop, "TrainingRun", EmptyRun)
    monkeypatch.setattr(EmptyRun, "reached_at", reached_at)
    monkeypatch.setattr(loop.page_cache, "drop", lambda directory, whole: (True, "test"))
    monkeypatch.setattr(loop, "data_fingerprint", lambda config: "00ff00ff")
    monkeypatch.setattr(kind, "manifest", {"facts": MASKED}, raising=False)
    monkeypatch.setattr(kind, "train_batches", lambda self, start_step: itertools.repeat(EMPTY))
    monkeypatch.setattr(kind, "evaluation_batches", lambda self: [EMPTY])
    system = f"8xA100-{configuration}"
    results = folder / "results" / system / mlperf_name(benchmark)
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"result_{len(list(results.iterdir()))}.txt"
    run_set = launch.plan_run_set(loaded, results=folder / "results", runs="1", seed=None)
    path.write_text(launch.compose_head(run_set, ["run", benchmark, configuration]))
    spec = loop.Spec(
        config=loaded.config.model_dump(),
        seed=seed,
        system=system,
        result=str(path),
        expected_s=None,
    )
    assert loop.make_run(spec, SINGLE_RANK, loop.Slot()) == 0
    return path
