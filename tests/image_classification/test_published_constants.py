"""Every constant of the published configurations, written out, and those of the model and its crops."""

import math

import pytest
import torch
from torch import nn

from common.training.load import load_config
from common.training.optim import schedule_factor
from image_classification.data import crops
from image_classification.data.loader import MEAN, STD
from image_classification.methods.binary_cross_entropy import apply_log_bias
from image_classification.model import build_resnet

BASELINE = {
    "target": 0.759,
    "max_duration": "90ep",
    "evaluate_every": "4ep",
    "evaluate_from": "0sp",
    "global_batch_size": 2048,
    "micro_batch_size": 256,
    "evaluation_batch_size": 2048,
    "precision": "fp16",
    "evaluation_precision": "fp32",
    "evaluated_statistics": "rank_0",
    "gradient_compression": "none",
    "model": {"name": "resnet50", "num_classes": 1000},
    "data.num_train_samples": 1_281_167,
    "data.num_evaluation_samples": 50_000,
    "data.train_crop_px": 224,
    "data.crop_px_by_epoch": [],
    "data.evaluation_resize_px": 256,
    "data.evaluation_crop_px": 224,
    "data.min_crop_area": 0.08,
    "data.flip_probability": 0.5,
    "data.alternates_flips": False,
    "optimizer.name": "decoupled_sgd",
    "optimizer.learning_rate": 2.048,
    "optimizer.momentum": 0.875,
    "optimizer.nesterov": False,
    "optimizer.weight_decay": 5e-4,
    "schedule.name": "cosine",
    "schedule.warmup": "8ep",
    "methods": {"channels_last": {}, "label_smoothing": {"smoothing": 0.1}},
}
RESIZING = {
    "initial_scale": 0.5,
    "delay_fraction": 0.4,
    "finetune_fraction": 0.2,
    "size_increment_px": 4,
    "interpolation": "nearest",
}
METHODS = {
    "channels_last": {},
    "scale_schedule": {"ratio": 0.32},
    "fixres": {"train_crop_px": 176, "evaluation_resize_px": 232},
    "blurpool": {"min_channels": 16},
    "binary_cross_entropy": {"smoothing": 0.08},
    "progressive_resizing": RESIZING,
    "ema": {"half_life_steps": 100, "every_steps": 20},
}
SHORTER = {
    "max_duration": "28ep",
    "data.train_crop_px": 176,
    "data.evaluation_resize_px": 232,
}
MOSAIC = BASELINE | SHORTER | {"evaluate_every": "3ep", "methods": METHODS}
STATIC = {"progressive_crops": {"sizes_px": [96, 128, 160, 176], "epochs": [14, 5, 3, 6]}}
REBUILT = {name: METHODS[name] for name in METHODS if name != "progressive_resizing"} | STATIC
OPTIMIZED = (
    BASELINE
    | SHORTER
    | {
        "evaluate_every": "1ep",
        "evaluate_from": "24ep",
        "precision": "bf16",
        "evaluation_precision": "bf16",
        "evaluated_statistics": "mean",
        "data.crop_px_by_epoch": [96] * 14 + [128] * 5 + [160] * 3 + [176] * 6,
        "methods": REBUILT | {"compile": {"mode": "reduce-overhead"}},
    }
)
PUBLISHED = {"baseline": BASELINE, "mosaic": MOSAIC, "optimized": OPTIMIZED}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [(name, key, value) for name, values in PUBLISHED.items() for key, value in values.items()],
)
def test_a_configuration_holds_the_published_constant(name, key, value):
    found = load_config("image_classification", name, size="full", settings=[]).config.model_dump()
    for part in key.split("."):
        found = found[part]
    if key == "methods":
        found = {method: settings for method, settings in found.items() if settings is not False}
    assert found == value


def test_methods_are_applied_in_their_order():
    config = load_config("image_classification", "mosaic", size="full", settings=[]).config
    order = ["scale_schedule", "fixres", "blurpool", "binary_cross_entropy", "progressive_resizing", "ema"]
    assert [name for name in config.methods if name in order] == order


@torch.no_grad()
def test_resnet50_starts_as_published():
    torch.manual_seed(0)
    model = build_resnet("resnet50", 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert float(model.fc.weight.std()) == pytest.approx(0.03125, rel=0.01)
    assert float(model.fc.bias.abs().max()) <= 1 / math.sqrt(2048)  # PyTorch's own, of the baseline
    apply_log_bias(model)
    torch.testing.assert_close(model.fc.bias, torch.full((1000,), -6.907755), rtol=0, atol=1e-6)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        assert (norm.momentum, norm.eps) == (0.1, 1e-5) and norm.affine and norm.track_running_stats
    strides = [(block.conv1.stride, block.conv2.stride) for block in (model.layer2[0], model.layer4[0])]
    assert strides == [((1, 1), (2, 2))] * 2  # v1.5: in the 3x3 convolution


def test_random_crops_and_normalisation_have_the_published_constants():
    assert crops.ASPECT_RATIOS == (3 / 4, 4 / 3) and crops.NUM_TRIES == 10
    assert MEAN == (0.485, 0.456, 0.406) and STD == (0.229, 0.224, 0.225)


def test_evaluation_cuts_the_published_share_of_the_shorter_side():
    shares = []
    for name in ("baseline", "mosaic", "optimized"):
        data = load_config("image_classification", name, size="full", settings=[]).config.data
        shares.append(data.evaluation_crop_px / data.evaluation_resize_px)
    assert shares == pytest.approx([0.875, 0.9655, 0.9655], abs=5e-5)


def test_weights_decay_over_a_run_as_published():
    """The sum of the decay over all steps: 4.375 e-folds in 28 epochs, 14.06 in 90."""
    for name, expected in (("mosaic", 4.375), ("baseline", 14.0625)):
        config = load_config("image_classification", name, size="full", settings=[]).config
        plan = config.plan()
        factors = [schedule_factor(step, config.schedule, plan) for step in range(plan.num_steps)]
        assert config.optimizer.weight_decay * sum(factors) == pytest.approx(expected, abs=2e-3)
