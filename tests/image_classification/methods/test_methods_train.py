"""Each method that no configuration has on, in a real training that is interrupted, and its evaluation."""

import os
import re
from pathlib import Path

import pytest
import torch

from common.run.mllog import RunLog
from common.training import checkpoint
from tests.common.training import checkpointed

TINY = ["global_batch_size=8", "micro_batch_size=4", "data.train_crop_px=32"]
TINY += ["data.evaluation_resize_px=32", "data.evaluation_crop_px=32"]
METHODS = [
    "mixup={}",
    "mixup={} methods.label_smoothing=false methods.binary_cross_entropy={smoothing: 0.1}",
    "cutmix={}",
    "colout={}",
    "stochastic_depth={drop_rate: 0.5}",
    "squeeze_excite={}",
    "ghost_batch_norm={samples: 2}",
    "sam={every_steps: 2}",
    "swa={start: 0, every: 2ba}",
    "randaugment={}",
    "augmix={}",
    "layer_freezing={start: 0}",
    "selective_backprop={start: 0}",
    "alternating_flip={} data.flip_probability=0.5",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread(prepared_data):
    """One thread: the same sums in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(folder, method="", **named):
    settings = re.split(r" (?=methods\.|data\.)", f"methods.{method}") if method else []
    return checkpointed.start("image_classification", folder, settings=[*TINY, *settings], **named)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The outcome of a training without any of them."""
    return checkpointed.train(start(tmp_path_factory.mktemp("plain")))[0]


@pytest.mark.on_demand
@pytest.mark.parametrize("method", METHODS)
def test_a_training_with_it_repeats_resumes_and_is_evaluated(method, plain, tmp_path):
    run = start(tmp_path, method)
    ended = checkpointed.train(run, keep=[3])
    resumed = start(tmp_path, method, source=tmp_path / "3.safetensors")
    assert checkpointed.are_equal(checkpointed.train(resumed), ended)
    weights = {key: value for key, value in ended[0].items() if key.startswith("model.")}
    assert all(bool(value.isfinite().all()) for value in weights.values())
    is_same = weights.keys() <= plain.keys() and all(
        torch.equal(plain[key], value) for key, value in weights.items()
    )
    assert is_same == method.startswith("swa")  # which averages what training passes through

    run.log = RunLog(Path(os.devnull), state="run")
    before = {key: value.clone() for key, value in checkpoint.module_tensors(run)[0].items()}
    assert 0 <= run.evaluate() <= 1
    run.log.close()
    after = checkpoint.module_tensors(run)[0]
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert run.model.training
