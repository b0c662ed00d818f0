"""A log names the code that computed: optimizer, methods, kernels."""

import hashlib
from importlib import metadata

import pytest
import torch

from common.config import names
from common.measure.device_run import build
from common.run.loop import log_head
from common.run.mllog import RunLog
from common.training.load import load_config
from common.training.optim import DecoupledSGD, optimizer_name
from tests.runs import records

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
    settings = ["global_batch_size=4", *settings]
    config = load_config(benchmark, "optimized", size="mini", settings=settings).config
    run = build(config.model_copy(update={"methods": config.methods | more}), folder, warms_up=False)
    run.log.close()
    log = RunLog(folder / "head.txt", state="init")
    log_head(log, run)
    log.close()
    by_key = {}
    for record in records(folder / "head.txt"):
        by_key.setdefault(record["key"], []).append((record["value"], record["metadata"]))
    return by_key


@pytest.fixture
def lion(tmp_path, monkeypatch):
    """A method in a file of a person's own."""
    path = tmp_path / "own" / "lion.py"
    path.parent.mkdir()
    path.write_text(LION)
    monkeypatch.syspath_prepend(path.parent)
    available = names.available_methods
    monkeypatch.setattr(names, "available_methods", lambda name: available(name) | {"lion": "lion"})
    return path


def test_a_log_names_the_optimizer_that_steps_and_the_files_of_the_methods(tmp_path, lion):
    found = head(tmp_path, "language_bert", lion={})
    assert [value for value, _ in found["opt_name"]] == ["signed_descent"]
    assert [value for value, _ in found["opt_base_learning_rate"]] == [0.125]
    ((name, where),) = found["optimizer_class"]
    assert (name, where["module"]) == ("SignedDescent", "lion")
    assert {more["part"] for _, more in found["form_used"]} == {"attention", "cross entropy"}
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
        "blur": ("convolution", torch.__version__),
    }
    ((name, where),) = found["optimizer_class"]
    assert (name, where["module"]) == ("DecoupledSGD", "common.training.optim") and "version" not in where


def test_known_optimizers_keep_their_names():
    apex = type("FusedLAMB", (), {})  # MLPerf has one word for every LAMB
    kinds = torch.optim.SGD, torch.optim.AdamW, DecoupledSGD, torch.optim.SparseAdam, torch.optim.NAdam, apex
    names = [optimizer_name(kind.__new__(kind)) for kind in kinds]
    assert names == ["sgd", "adamw", "decoupled_sgd", "sparse_adam", "nadam", "lamb"]
