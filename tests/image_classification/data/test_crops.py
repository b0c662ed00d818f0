"""Crops: known answers of the generator, torchvision's distribution, independence of the batch."""

import numpy as np
import pytest
import torch
from torchvision.transforms import RandomResizedCrop

from image_classification.data.crops import alternating_flips, centre_crops, draw_crops, philox

SETTINGS = {"seed": 3, "epoch": 1, "min_area": 0.08, "flip_probability": 0.5}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, expected):
    words = [
        np.array([int(word, 16) for word in text.split()], np.uint64) for text in (counter, key, expected)
    ]
    assert philox(words[0], words[1]).tolist() == words[2].tolist()


def test_a_crop_depends_on_seed_epoch_and_sample_alone():
    samples, sizes = np.array([5, 9, 2**40]), np.array([[375, 500], [500, 333], [60, 80]])
    crops = draw_crops(samples, sizes, **SETTINGS)
    for i in range(3):
        alone = draw_crops(samples[i : i + 1], sizes[i : i + 1], **SETTINGS)
        assert alone.boxes.tolist() == crops.boxes[i : i + 1].tolist() and alone.flips == crops.flips[i]
    for change in ({"seed": 4}, {"epoch": 2}):
        assert not np.array_equal(draw_crops(samples, sizes, **SETTINGS | change).boxes, crops.boxes)


@pytest.mark.parametrize("size", [(375, 500), (500, 100), (64, 64)])
def test_crops_are_distributed_as_torchvisions(size):
    number, image = 4000, torch.empty(3, *size)
    torch.manual_seed(0)
    params = [RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(number)]
    theirs = np.array(params)
    ours = draw_crops(np.arange(number), np.full((number, 2), size), **SETTINGS)
    error = 4 * theirs.std(axis=0) / np.sqrt(number / 2) + 1e-9
    assert (abs(ours.boxes.mean(axis=0) - theirs.mean(axis=0)) <= error).all()
    assert (abs(ours.boxes.std(axis=0) - theirs.std(axis=0)) <= 0.08 * theirs.std(axis=0) + 1e-9).all()
    assert (ours.boxes[:, :2] >= 0).all() and (ours.boxes[:, :2] + ours.boxes[:, 2:] <= size).all()
    assert abs(ours.flips.mean() - 0.5) < 0.04


def test_an_image_too_narrow_for_every_try_gives_the_centre():
    crops = draw_crops(np.arange(50), np.full((50, 2), (900, 10)), **SETTINGS)
    assert centre_crops(np.array([[900, 10]])).tolist() == [[443, 0, 13, 10]]
    assert (crops.boxes[:, 2] <= 13).all() and [443, 0, 13, 10] in crops.boxes.tolist()


def test_flips_alternate_from_epoch_to_epoch_and_move_no_crop():
    samples, sizes = np.arange(2**33, 2**33 + 4000), np.full((4000, 2), (375, 500))
    alternating = SETTINGS | {"alternates_flips": True}
    epochs = [draw_crops(samples, sizes, **alternating | {"epoch": epoch}) for epoch in range(4)]
    for epoch, crops in enumerate(epochs):
        plain = draw_crops(samples, sizes, **SETTINGS | {"epoch": epoch})
        assert np.array_equal(crops.boxes, plain.boxes)
        assert np.array_equal(crops.flips, epochs[0].flips ^ bool(epoch % 2))
        assert np.array_equal(crops.flips, alternating_flips(samples, seed=SETTINGS["seed"], epoch=epoch))
        assert abs(crops.flips.mean() - 0.5) < 0.04
    first = draw_crops(samples, sizes, **SETTINGS | {"epoch": 0})
    assert np.array_equal(epochs[0].flips, first.flips)
