"""Tests of what a log says of the code that computed: optimizer, methods, kernels."""

import hashlib
import json
from importlib import metadata

import pytest
import torch

from common.measure.device_run import build
from common.run.loop import log_head
from common.run.mllog import RunLog
from common.training import registry
from common.training.load import load_config
from common.training.optim import DecoupledSGD, optimizer_name

LION = '''
"""Another optimizer."""
import torch
from common.training.method import Method

class SignedDescent(torch.optim.SGD):
    pass

class Lion(Method):
    def optimizer(self, optimizer):
        return SignedDescent(optimizer.param_groups[0]["params"], lr=0.125)
'''


def head(folder, benchmark, *settings, **more):
    """Return the records of a run's head, by key."""
    config = load_config(
        benchmark, "optimized", size="mini", settings=["global_batch_size=4", *settings]
    ).config
    methods = {**config.methods, **more}
    run = build(config.model_copy(update={"methods": methods}), folder, warms_up=False)
    run.log.close()
    log = RunLog(folder / "head.txt", state="init")
    log_head(log, run)
    log.close()
    found = {}
    for line in (folder / "head.txt").read_text().splitlines():
        record = json.loads(line.removeprefix(":::MLLOG "))
        found.setdefault(record["key"], []).append((record["value"], record["metadata"]))
    return found


@pytest.fixture
def lion(tmp_path, monkeypatch):
    """A method in a file of a person's own."""
    path = tmp_path / "own" / "lion.py"
    path.parent.mkdir()
    path.write_text(LION)
    monkeypatch.syspath_prepend(path.parent)
    available = registry.available_methods
    monkeypatch.setattr(
        registry, "available_methods", lambda benchmark: {**available(benchmark), "lion": "lion"}
    )
    return path


def test_a_log_names_the_optimizer_that_steps_and_the_files_of_the_methods(tmp_path, lion):
    found = head(tmp_path, "language_bert", lion={})
    assert [value for value, _ in found["opt_name"]] == ["signed_descent"]
    assert [value for value, _ in found["opt_base_learning_rate"]] == [0.125]
    ((name, where),) = found["optimizer_class"]
    assert (name, where["module"]) == ("SignedDescent", "lion")
    digests = {name: more["sha256"] for name, more in found["method"]}
    assert digests["lion"] == hashlib.sha256(lion.read_bytes()).hexdigest()[:12]
    assert len(set(digests.values())) == len(digests) > 1
    assert str(tmp_path) not in (tmp_path / "head.txt").read_text()


def test_a_log_has_the_versions_of_what_computes(tmp_path):
    found = head(tmp_path, "image_classification", "data.loader=resident")
    forms = {more["part"]: (value, more["version"]) for value, more in found["form_used"]}
    assert forms == {
        "decoder": ("threads", metadata.version("pillow")),
        "crops": ("matrix products", torch.__version__),
    }
    ((name, where),) = found["optimizer_class"]
    assert (name, where["module"]) == ("DecoupledSGD", "common.training.optim") and "version" not in where


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (torch.optim.SGD, "sgd"),
        (torch.optim.AdamW, "adamw"),
        (DecoupledSGD, "decoupled_sgd"),
        (torch.optim.SparseAdam, "sparse_adam"),
        (torch.optim.NAdam, "nadam"),
    ],
)
def test_known_optimizers_keep_their_names(kind, name):
    assert optimizer_name(kind.__new__(kind)) == name
