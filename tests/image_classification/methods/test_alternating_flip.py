"""Alternating flips: of a data set in a plain loop, and of the loaders."""

import torch

from image_classification.methods.alternating_flip import alternate_flips
from tests.image_classification.loading import config_of

ON = ["methods.alternating_flip={}"]


def test_each_image_is_mirrored_in_every_other_epoch() -> None:
    images = [torch.arange(12.0).view(1, 3, 4) + number for number in range(64)]
    dataset = alternate_flips([(image, number) for number, image in enumerate(images)], seed=3)
    mirrored = []
    for dataset.epoch in range(3):
        shown = [dataset[number] for number in range(len(dataset))]
        assert [label for _, label in shown] == list(range(64))
        is_mirrored = [not shown[number][0].equal(image) for number, image in enumerate(images)]
        for (found, _), image, flip in zip(shown, images, is_mirrored, strict=True):
            assert found.equal(image.flip(-1) if flip else image)
        mirrored.append(is_mirrored)
    assert mirrored[0] == mirrored[2] == [not each for each in mirrored[1]]
    assert 16 < sum(mirrored[0]) < 48


def test_it_reaches_the_settings_of_the_loaders() -> None:
    config = config_of("optimized", "full", *ON)
    assert config.data.alternates_flips
    plain = config_of("optimized", "full")
    assert not plain.data.alternates_flips
