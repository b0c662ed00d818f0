"""Each method that no configuration has on, in a real training that is interrupted, and its evaluation."""

import os
from pathlib import Path

import pytest
import torch

from common.commands.data import prepare
from common.run.mllog import RunLog
from common.training import checkpoint
from tests.common.training import checkpointed
from tests.image_classification.loading import config_of

TINY = ["global_batch_size=8", "micro_batch_size=4", "data.train_crop_px=32"]
TINY += ["data.evaluation_resize_px=32", "data.evaluation_crop_px=32"]
METHODS = {
    "none": [],
    "mixup": ["methods.mixup={}"],
    "mixup, binary": [
        "methods.label_smoothing=false",
        "methods.mixup={}",
        "methods.binary_cross_entropy={smoothing: 0.1}",
    ],
    "cutmix": ["methods.cutmix={}"],
    "colout": ["methods.colout={}"],
    "stochastic_depth": ["methods.stochastic_depth={drop_rate: 0.5}"],
    "squeeze_excite": ["methods.squeeze_excite={}"],
    "ghost_batch_norm": ["methods.ghost_batch_norm={samples: 2}"],
    "sam": ["methods.sam={every_steps: 2}"],
    "swa": ["methods.swa={start: 0, every: 2ba}"],
    "randaugment": ["methods.randaugment={}"],
    "augmix": ["methods.augmix={}"],
    "layer_freezing": ["methods.layer_freezing={start: 0}"],
    "selective_backprop": ["methods.selective_backprop={start: 0}"],
    "alternating_flip": ["data.flip_probability=0.5", "methods.alternating_flip={}"],
}
SAME_TRAINING = {"none", "swa"}  # it averages what training passes through


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """The data of size mini, and one thread: the same sums in the same order."""
    prepare(config_of("baseline"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(name, folder, **named):
    return checkpointed.start("image_classification", folder, settings=[*TINY, *METHODS[name]], **named)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What a training without any of them ends with."""
    return checkpointed.train(start("none", tmp_path_factory.mktemp("plain")))[0]


@pytest.mark.on_demand
@pytest.mark.parametrize("name", METHODS)
def test_a_training_with_it_repeats_resumes_and_is_evaluated(name, plain, tmp_path):
    run = start(name, tmp_path)
    ended = checkpointed.train(run, keep=[3])
    resumed = start(name, tmp_path, source=tmp_path / "3.safetensors")
    assert checkpointed.are_equal(checkpointed.train(resumed), ended)
    weights = {key: value for key, value in ended[0].items() if key.startswith("model.")}
    assert all(bool(value.isfinite().all()) for value in weights.values())
    is_same = weights.keys() <= plain.keys() and all(
        torch.equal(plain[key], value) for key, value in weights.items()
    )
    assert is_same == (name in SAME_TRAINING)

    run.log = RunLog(Path(os.devnull), state="run")
    before = {key: value.clone() for key, value in checkpoint.module_tensors(run)[0].items()}
    assert 0 <= run.evaluate() <= 1
    run.log.close()
    after = checkpoint.module_tensors(run)[0]
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert run.model.training
