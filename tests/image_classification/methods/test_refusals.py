"""The configurations and models that a method refuses: one table each."""

import pytest
from torch import nn

from common.errors import UserError
from common.training.registry import kind_of
from tests.image_classification.loading import config_of

RESIZING = (
    "methods.progressive_resizing={{initial_scale: {}, delay_fraction: {}, finetune_fraction: 0.2, "
    "size_increment_px: 4, interpolation: nearest}}"
)
CROPS = "methods.progressive_crops"
CONFIGURATIONS = [  # configuration, settings, place and key word
    ("baseline", ["methods.alternating_flip={}"], "methods.alternating_flip: .*flip_probability is 0"),
    ("baseline", ["data.alternates_flips=true"], "alternates_flips needs"),
    ("baseline", ["methods.randaugment={}", "data.loader=dali"], "methods.randaugment: .*'dali'"),
    ("baseline", ["methods.randaugment={}", "data.loader=resident"], "methods.randaugment: .*'resident'"),
    ("baseline", ["methods.augmix={}", "data.loader=dali"], "methods.augmix: .*'dali'"),
    ("baseline", ["methods.augmix={}", "data.loader=resident"], "methods.augmix: .*'resident'"),
    ("optimized", ["data.train_crop_px=84", "data.evaluation_resize_px=112"], "methods.fixres: .*already"),
    ("baseline", [RESIZING.format(0.999, 0.4)], "methods.progressive_resizing: .*full size"),
    ("baseline", [RESIZING.format(0.5, 0.9)], "methods.progressive_resizing: .*some epochs between"),
    ("optimized", [f"{CROPS}.epochs=[1, 2]"], f"{CROPS}: 3 epochs .*has 4"),
    ("optimized", [f"{CROPS}.epochs=[4]"], f"{CROPS}: each of sizes_px"),
    ("optimized", [f"{CROPS}.sizes_px=[56, 96]"], f"{CROPS}: the last size is 96, but train_crop_px is 84"),
    ("optimized", ["methods.scale_schedule.ratio=0.75"], f"{CROPS}: .*has 6"),
]
MODELS = [  # method, settings, a model that gives it nothing to do
    ("mixup", {}, nn.Conv2d(3, 3, 1)),
    ("cutmix", {}, nn.Conv2d(3, 3, 1)),
    ("binary_cross_entropy", {"smoothing": 0.08}, nn.Linear(2, 2, bias=False)),
    ("blurpool", {"min_channels": 16}, nn.Linear(2, 2)),
    ("squeeze_excite", {}, nn.Conv2d(3, 600, 1)),
    ("stochastic_depth", {}, nn.Linear(2, 2)),
    ("zero_gamma", {}, nn.Linear(2, 2)),
]


@pytest.mark.parametrize(("configuration", "settings", "message"), CONFIGURATIONS)
def test_a_configuration_that_does_not_fit_is_refused(configuration, settings, message):
    with pytest.raises(UserError, match=message):
        config_of(configuration, "mini", *settings)


@pytest.mark.parametrize(("name", "settings", "model"), MODELS)
def test_a_model_without_a_layer_to_change_is_refused(name, settings, model):
    kind = kind_of(name, f"image_classification.methods.{name}")
    with pytest.raises(UserError, match=f"methods.{name}.*: no "):
        kind(name, kind.Config(**settings)).model(nn.Sequential(model))
