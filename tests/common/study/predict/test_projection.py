"""Minutes to the target from a bench at size full, counted by hand."""

import pytest

from common.study.predict.devices import project

IMAGES, SIZES = 1_281_167, (96, 128, 160, 176, 224)


def bench(benchmark, name, shapes, per_s, size="full", batch_size=None):
    share = {"batch_size": batch_size or {"language_bert": 56, "image_classification": 256}[benchmark]}
    rates = [{"configuration": name, "shape": shape, "samples_per_s": per_s} | share for shape in shapes]
    return {"benchmark": benchmark, "size": size, "rates": rates}


@pytest.mark.parametrize(
    ("name", "epochs", "evaluations"),
    [("baseline", 84, 21), ("mosaic", 27, 9), ("optimized", 27, 4), ("baseline+ema", 84, 21)],
)
def test_resnet_takes_the_published_epochs(name, epochs, evaluations):
    figures = bench("image_classification", name, [f"{size} px" for size in SIZES], 1000.0)
    projected = project(name, figures)
    num_images = epochs * IMAGES + evaluations * 50_000 / 3
    assert projected["minutes"] == pytest.approx(num_images / 8000 / 60, rel=2e-3)  # start-up: seconds
    assert projected["low"] < projected["minutes"] < projected["high"]
    assert f"{evaluations} evaluations" in projected["assuming"]


@pytest.mark.parametrize(
    ("name", "published", "evaluations"), [("baseline", 628_320, 1 + 40), ("optimized", 643_104, 1 + 41 - 19)]
)
def test_bert_takes_more_than_mosaicmls_samples_and_an_evaluation_every_24640(name, published, evaluations):
    projected = project(name, bench("language_bert", name, ["512 tokens"], 750.0))
    # one is of the starting weights; `optimized` leaves out 19 before 492,800 samples
    num_samples = 1.6 * published + evaluations * 10_000 / 3
    assert projected["minutes"] == pytest.approx(num_samples / 6000 / 60, rel=1e-2)
    assert f"{evaluations} evaluations" in projected["assuming"] and "an estimate" in projected["assuming"]


def test_nothing_is_projected_where_samples_or_rates_are_unknown():
    shapes = [f"{size} px" for size in SIZES]
    for name, *of in (
        ("baseline+model.name=resnet101", shapes, 1000.0),
        ("optimized_short", shapes, 1000.0),
        ("baseline", shapes[:4], 1000.0),
        ("baseline", shapes, 1000.0, "full", 2048),
        ("baseline", ["112 px"], 1000.0, "mini", 32),
    ):
        assert project(name, bench("image_classification", name, *of)) is None, name
