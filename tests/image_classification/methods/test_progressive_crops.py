"""Progressive crops: the sizes of every epoch, and what does not fit the run."""

import pytest

from common.errors import UserError
from common.training.load import load_config
from image_classification.methods.progressive_crops import crops_by_epoch


def configured(*settings, size="full"):
    return load_config("image_classification", "optimized", size=size, settings=list(settings)).config


def test_the_sizes_cost_what_the_reference_calculates():
    sizes = crops_by_epoch([96, 128, 160, 176], [14, 5, 3, 6])
    assert len(sizes) == 28
    assert sum((size / 224) ** 2 for size in sizes[:27]) == pytest.approx(8.82, abs=0.005)


def test_the_loader_gets_a_size_for_every_epoch():
    data = configured().data
    assert [data.crop_px(epoch) for epoch in (0, 13, 14, 18, 19, 21, 22, 27)] == [
        96,
        96,
        128,
        128,
        160,
        160,
        176,
        176,
    ]
    assert data.crop_px(28) == 176  # a batch drawn ahead of the end
    assert configured(size="mini").data.crop_px_by_epoch == [56, 84, 84, 84]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("methods.progressive_crops.epochs=[14, 5, 3, 5]", "27 epochs have a size, but the run has 28"),
        ("methods.progressive_crops.epochs=[28]", "each of sizes_px needs its number of epochs"),
        (
            "methods.progressive_crops.sizes_px=[96, 128, 160, 192]",
            "the last size is 192, but train_crop_px is 176",
        ),
        ("methods.scale_schedule.ratio=0.5", "but the run has 45"),
    ],
)
def test_sizes_that_do_not_fit_the_run_are_refused(setting, message):
    with pytest.raises(UserError, match=message):
        configured(setting)
