"""The configurations, the initial weights and the work of the model against the published recipes."""

import math
from functools import cache

import pytest
import torch
import torchvision
import yaml
from torch import nn

from common.evidence.recipes import all_differences, flat
from common.repository import ROOT
from common.training.optim import schedule_factor
from image_classification.benchmark import Benchmark
from image_classification.methods.binary_cross_entropy import apply_log_bias
from image_classification.model import build_resnet
from image_classification.probes import Probes, training_work
from tests.image_classification.loading import config_of

RECIPES = yaml.safe_load((ROOT / "tests/golden/resnet_recipes.yaml").read_text())
BASELINE = RECIPES["8xA100_80GB-baseline"]
PARTIAL = ("data", "optimizer", "schedule")  # they hold keys that the published recipe has no word for
OWN = {"evaluate_every", "evaluate_from", "precision", "evaluation_precision", "evaluated_statistics"}
OWN |= {
    "data.crop_px_by_epoch",
    "data.loader",
    "data.stored_px_if_it_fits",
}  # and methods: what `optimized` changes of the recipe
GFLOPS = {224: 24.3, 192: 17.9, 176: 15.5, 160: 12.4, 128: 7.9, 96: 4.5}
MEGABYTES = {224: 360, 176: 224, 160: 184, 128: 118, 96: 66}


def probes_of(name, *settings):
    return Probes(Benchmark(config_of(name, "full", *settings), seed=0))


@cache
def work(size_px):
    """Return the work of an image for ResNet-50."""
    with torch.device("meta"):
        return training_work(build_resnet("resnet50", 1000), size_px)


@pytest.mark.parametrize(("name", "recipe"), [("baseline", {}), ("mosaic", RECIPES["8xA100_80GB-methods"])])
def test_a_configuration_is_the_published_recipe(name, recipe):
    values = config_of(name, "full").model_dump()
    values["methods"] = {key: value for key, value in values["methods"].items() if value is not False}
    recipe = BASELINE | recipe | {"data": BASELINE["data"] | recipe.get("data", {})}
    for key, value in recipe.items():
        assert ({name: values[key][name] for name in value} if key in PARTIAL else values[key]) == value, key


def test_optimized_changes_nothing_else_of_the_published_recipe():
    mosaic, optimized = config_of("mosaic", "full"), config_of("optimized", "full")
    keys = {change.key for change in all_differences(flat(mosaic.model_dump()), flat(optimized.model_dump()))}
    assert {key for key in keys if not key.startswith("methods.")} - {"configuration"} == OWN
    for method in ("scale_schedule", "fixres", "binary_cross_entropy", "ema"):
        assert optimized.methods[method] == mosaic.methods[method]
    assert optimized.methods["blurpool"] | {"fuses_max_pool": False} == mosaic.methods["blurpool"]
    order = ["scale_schedule", "fixres", "blurpool", "binary_cross_entropy", "progressive_resizing", "ema"]
    assert [name for name in mosaic.methods if name in order] == order


def test_the_short_configuration_says_that_nobody_has_run_it():
    header = (ROOT / "image_classification/optimized_short.yaml").read_text().splitlines()[0]
    assert "NEVER RUN ON IMAGENET" in header and "HYPERPARAMETERS DIFFER" in header
    page = (ROOT / "image_classification/README.md").read_text()
    assert "`optimized_short` was **never run on ImageNet**" in page
    short, optimized = config_of("optimized_short", "full"), config_of("optimized", "full")
    assert len(short.data.crop_px_by_epoch) == short.num_epochs == 22
    pixels = [sum(size**2 for size in config.data.crop_px_by_epoch) for config in (short, optimized)]
    assert pixels[0] == pytest.approx(0.70 * pixels[1], rel=0.01)


@pytest.mark.parametrize(
    ("name", "num_steps", "evaluated", "share", "decay"),
    [
        ("baseline", 56_250, None, 0.875, 14.0625),
        ("mosaic", 17_500, [*range(3, 28, 3), 28], 0.9655, 4.375),
        ("optimized", 17_500, [24, 25, 26, 27, 28], 0.9655, 4.375),
    ],
)
def test_steps_crops_and_decay_are_the_published_ones(name, num_steps, evaluated, share, decay):
    """The share of the shorter side that evaluation sees; the sum of the weight decay, in e-folds."""
    config = config_of(name, "full")
    plan, data = config.plan(), config.data
    assert (plan.num_steps, plan.steps_per_epoch, plan.warmup_steps) == (num_steps, 625, 5_000)
    assert evaluated is None or plan.evaluation_steps == tuple(625 * epoch for epoch in evaluated)
    assert evaluated or 84 * 625 in plan.evaluation_steps
    assert data.evaluation_crop_px / data.evaluation_resize_px == pytest.approx(share, abs=5e-5)
    factors = [schedule_factor(step, config.schedule, plan) for step in range(plan.num_steps)]
    assert config.optimizer.weight_decay * sum(factors) == pytest.approx(decay, abs=2e-3)


@pytest.mark.parametrize(
    ("name", "step", "rate"),
    [
        ("optimized", 0, 0.0),
        ("optimized", 1, 4.096e-4),
        ("optimized", 5_000, 2.048),
        ("optimized", 11_250, 1.024),
        ("optimized", 15_000, 0.195567),
        ("optimized", 16_875, 0.012607),
        ("baseline", 30_625, 1.024),
        ("baseline", 52_500, 0.026936),
    ],
)
def test_learning_rates_are_the_published_ones(name, step, rate):
    config = config_of(name, "full")
    factor = schedule_factor(step, config.schedule, config.plan())
    assert config.optimizer.learning_rate * factor == pytest.approx(rate, abs=5.1e-7)


@torch.no_grad()
def test_resnet50_starts_as_published():
    torch.manual_seed(0)
    model = build_resnet("resnet50", 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert float(model.fc.weight.std()) == pytest.approx(math.sqrt(2 / 2048), rel=0.01)
    assert float(model.fc.bias.abs().max()) <= 1 / math.sqrt(2048)  # PyTorch's own, of the baseline
    apply_log_bias(model)
    torch.testing.assert_close(model.fc.bias, torch.full((1000,), -6.907755), rtol=0, atol=1e-6)
    convolution = model.layer4[0].conv2
    assert float(convolution.weight.std()) == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        assert (norm.momentum, norm.eps) == (0.1, 1e-5) and norm.affine and norm.track_running_stats
        assert not norm.bias.any() and float(norm.weight.max()) > 0.5  # the last of a block is not zero
    weights = torch.cat([norm.weight for norm in norms])
    assert float(weights.min()) >= 0 and float(weights.max()) < 1
    assert float(weights.mean()) == pytest.approx(0.5, abs=0.02)
    strides = [(block.conv1.stride, block.conv2.stride) for block in (model.layer2[0], model.layer4[0])]
    assert strides == [((1, 1), (2, 2))] * 2  # v1.5: in the 3x3 convolution


def test_work_of_resnet50_is_that_of_the_reference():
    for size_px, expected in GFLOPS.items():
        assert work(size_px).flops / 1e9 == pytest.approx(expected, abs=0.06)
    for size_px, expected in MEGABYTES.items():
        assert work(size_px).num_bytes / 1e6 == pytest.approx(expected, rel=0.05)
    small, larger = (work(size_px).flops for size_px in (32, 64))  # 32: one pixel is left
    assert small == pytest.approx(larger / 4, rel=0.03)  # the classifier is the same


def test_resnet101_has_torchvisions_operations():
    facts = torchvision.models.ResNet101_Weights.IMAGENET1K_V1.meta
    with torch.device("meta"):
        model = build_resnet("resnet101", 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == facts["num_params"]
    stem = 2 * 64 * 112**2 * 3 * 7**2  # its input needs no gradient
    assert training_work(model, 224, 4).num_bytes == 2 * training_work(model, 224).num_bytes
    assert training_work(model, 224).flops == pytest.approx(6 * facts["_ops"] * 1e9 - stem, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "operations", "traffic"), [("mosaic", 8.96, 8.60), ("optimized", 8.92, 8.85)]
)
def test_the_epochs_that_are_run_equal_the_calculated_number_at_full_size(name, operations, traffic):
    sizes = probes_of(name).epoch_sizes_px()[:27]
    assert sum(work(size).flops for size in sizes) / work(224).flops == pytest.approx(operations, abs=0.03)
    num_bytes = sum(work(size).num_bytes for size in sizes)
    assert num_bytes / work(224).num_bytes == pytest.approx(traffic, abs=0.03)


def test_the_time_of_an_image_grows_with_its_area_between_measured_sizes():
    rate = probes_of("mosaic").rate
    measured = {"100 px": 4000.0, "200 px": 1000.0}
    share = (150**2 - 100**2) / (200**2 - 100**2)
    assert 1 / rate("150 px", measured) == pytest.approx(1 / 4000 + share * (1 / 1000 - 1 / 4000))
    assert [rate(f"{size} px", measured) for size in (96, 100, 200, 208)] == [4000, 4000, 1000, None]
    assert rate("100 px", {}) is None


@torch.no_grad()
def test_the_closed_division_starts_as_the_mlperf_reference():
    torch.manual_seed(0)
    model = build_resnet("resnet50", 1000, "reference")
    deviations = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 10**5:
            values = module.weight.flatten() * module.weight[0].numel() ** 0.5  # of variance 1
            deviations.append(float(values.std()))
            assert 2.2 < float(values.abs().max()) < 2 / 0.8796  # TensorFlow cuts at two standard deviations
        elif isinstance(module, nn.BatchNorm2d):
            assert set(module.weight.tolist()) == {1.0} and not module.bias.any()
    assert len(deviations) > 30 and deviations == pytest.approx([1.0] * len(deviations), rel=0.01)
    assert float(model.fc.weight.std()) == pytest.approx(0.01, rel=0.01) and not model.fc.bias.any()
