"""The configurations against the published recipes, and the constants of the model and its crops."""

import math

import pytest
import torch
import yaml
from torch import nn

from common.evidence.recipes import all_differences, flat
from common.repository import ROOT
from common.training.load import load_config
from common.training.optim import schedule_factor
from image_classification.methods.binary_cross_entropy import apply_log_bias
from image_classification.model import build_resnet

RECIPES = yaml.safe_load((ROOT / "tests/golden/resnet_recipes.yaml").read_text())
BASELINE = RECIPES["8xA100_80GB-baseline"]
OWN = {"evaluate_every", "evaluate_from", "precision", "evaluation_precision", "evaluated_statistics"}
OWN |= {
    "data.crop_px_by_epoch",
    "data.loader",
}  # and methods: what `optimized` changes of the published recipe


def config_of(name):
    return load_config("image_classification", name, size="full", settings=[]).config


@pytest.mark.parametrize(("name", "recipe"), [("baseline", {}), ("mosaic", RECIPES["8xA100_80GB-methods"])])
def test_a_configuration_is_the_published_recipe(name, recipe):
    found = config_of(name).model_dump()
    found["methods"] = {method: each for method, each in found["methods"].items() if each is not False}
    recipe = BASELINE | recipe | {"data": BASELINE["data"] | recipe.get("data", {})}
    for key, value in recipe.items():
        is_partial = key in (
            "data",
            "optimizer",
            "schedule",
        )  # they hold keys that the published recipe has no word for
        assert ({name: found[key][name] for name in value} if is_partial else found[key]) == value, key


def test_optimized_changes_nothing_else_of_the_published_recipe():
    mosaic, optimized = (flat(config_of(name).model_dump()) for name in ("mosaic", "optimized"))
    keys = {change.key for change in all_differences(mosaic, optimized)}
    assert {key for key in keys if not key.startswith("methods.")} - {"configuration"} == OWN
    data = config_of("optimized").data
    assert data.crop_px_by_epoch == [96] * 14 + [128] * 5 + [160] * 3 + [176] * 6


def test_methods_are_applied_in_their_order():
    config = config_of("mosaic")
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


def test_evaluation_cuts_the_published_share_of_the_shorter_side():
    shares = []
    for name in ("baseline", "mosaic", "optimized"):
        data = config_of(name).data
        shares.append(data.evaluation_crop_px / data.evaluation_resize_px)
    assert shares == pytest.approx([0.875, 0.9655, 0.9655], abs=5e-5)


def test_weights_decay_over_a_run_as_published():
    """The sum of the decay over all steps: 4.375 e-folds in 28 epochs, 14.06 in 90."""
    for name, expected in (("mosaic", 4.375), ("baseline", 14.0625)):
        config = config_of(name)
        plan = config.plan()
        factors = [schedule_factor(step, config.schedule, plan) for step in range(plan.num_steps)]
        assert config.optimizer.weight_decay * sum(factors) == pytest.approx(expected, abs=2e-3)
