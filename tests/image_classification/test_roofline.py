"""The work of a training image and the projection of a run, against the reference's tables."""

import pytest
import torch
import torchvision

from common.training.load import load_config
from image_classification.benchmark import Benchmark
from image_classification.model import build_resnet
from image_classification.probes import Probes, project, training_work

GFLOPS = {224: 24.3, 192: 17.9, 176: 15.5, 160: 12.4, 128: 7.9, 96: 4.5}
MEGABYTES = {224: 360, 176: 224, 160: 184, 128: 118, 96: 66}


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return build_resnet("resnet50", 1000)


def test_operations_of_resnet50(model):
    for size_px, expected in GFLOPS.items():
        assert training_work(model, size_px).flops / 1e9 == pytest.approx(expected, abs=0.06)


def test_a_size_of_which_one_pixel_is_left_at_the_end_has_work_too(model):
    small, larger = (training_work(model, size_px).flops for size_px in (32, 64))
    assert small == pytest.approx(larger / 4, rel=0.03)  # the classifier is the same


def test_resnet101_has_torchvisions_operations_and_no_published_epochs():
    facts = torchvision.models.ResNet101_Weights.IMAGENET1K_V1.meta
    with torch.device("meta"):
        model = build_resnet("resnet101", 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == facts["num_params"]
    stem = 2 * 64 * 112**2 * 3 * 7**2  # its input needs no gradient
    expected = 6 * facts["_ops"] * 1e9 - stem
    assert training_work(model, 224).flops == pytest.approx(expected, rel=1e-3)
    config = load_config(
        "image_classification", "baseline", size="full", settings=["model.name=resnet101"]
    ).config
    assert Probes(Benchmark(config, seed=0)).projection({"224 px": 1000.0}, 8) is None


def test_memory_traffic_of_resnet50_is_the_reference_calculation_within_5_percent(model):
    for size_px, expected in MEGABYTES.items():
        assert training_work(model, size_px).num_bytes / 1e6 == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("name", "operations", "traffic"), [("mosaic", 8.96, 8.60), ("optimized", 8.92, 8.85)]
)
def test_the_epochs_that_are_run_equal_the_calculated_number_at_full_size(model, name, operations, traffic):
    benchmark = Benchmark(load_config("image_classification", name, size="full", settings=[]).config, seed=0)
    sizes = Probes(benchmark).epoch_sizes_px()[:27]
    work = {size: training_work(model, size) for size in {*sizes, 224}}
    assert sum(work[size].flops for size in sizes) / work[224].flops == pytest.approx(operations, abs=0.03)
    found = sum(work[size].num_bytes for size in sizes) / work[224].num_bytes
    assert found == pytest.approx(traffic, abs=0.03)


def test_a_projection_adds_epochs_by_size_and_evaluations():
    data = load_config("image_classification", "baseline", size="full", settings=[]).config.data
    rates = {100: 4000.0, 200: 1000.0}
    two = project([100, 200], rates, data, num_evaluations=0, num_devices=8)
    assert two.minutes == pytest.approx(1281167 * (1 / 4000 + 1 / 1000) / 8 / 60)
    between = project([150], rates, data, num_evaluations=0, num_devices=8)
    share = (150**2 - 100**2) / (200**2 - 100**2)
    assert between.minutes == pytest.approx(1281167 * (1 / 4000 + share * (1 / 1000 - 1 / 4000)) / 8 / 60)
    evaluated = project([100], rates, data, num_evaluations=3, num_devices=1)
    assert evaluated.minutes == pytest.approx((1281167 / 4000 + 3 * 50000 / 3000) / 60)
    assert "3 evaluations" in evaluated.assuming


def test_a_run_is_projected_to_the_published_epochs():
    rates = {f"{size} px": 1000.0 for size in (96, 128, 160, 176, 224)}
    minutes = {}
    for name in ("baseline", "mosaic", "optimized"):
        benchmark = Benchmark(
            load_config("image_classification", name, size="full", settings=[]).config, seed=0
        )
        minutes[name] = Probes(benchmark).projection(rates, 8).minutes
    images = {"baseline": 84 * 1281167 + 21 * 50000 / 3, "mosaic": 27 * 1281167 + 9 * 50000 / 3}
    images["optimized"] = 27 * 1281167 + 4 * 50000 / 3
    assert minutes == pytest.approx({name: count / 8000 / 60 for name, count in images.items()})
