"""FixRes: two sizes of the data change, nothing else."""

import pytest

from common.config import differences, load
from common.errors import UserError
from image_classification.methods.fixres import Fixres


def test_two_sizes_change() -> None:
    config = load("image_classification", "baseline", size="full", settings=[]).config
    method = Fixres("fixres", Fixres.Config(train_crop_px=176, evaluation_resize_px=232))
    changed = method.configure(config)
    assert differences(config, changed) == [
        "data.train_crop_px: 224 -> 176",
        "data.evaluation_resize_px: 256 -> 232",
    ]
    with pytest.raises(UserError, match="already"):
        method.configure(changed)
