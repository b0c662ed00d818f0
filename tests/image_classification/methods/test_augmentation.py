"""RandAugment and AugMix: torchvision's, one image at a time, the same in every worker."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from common.training.method import seeded
from image_classification.augmentation import augment, build_transform
from image_classification.benchmark import Benchmark
from image_classification.methods.augmix import aug_mix
from image_classification.methods.randaugment import rand_augment
from tests.image_classification.loading import config_of

SMALL = ["data.train_crop_px=32", "global_batch_size=6"]


def loaded(*settings):
    return config_of("baseline", "mini", *SMALL, *settings)


def pixels():
    return np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)


@pytest.mark.parametrize(
    ("setting", "plain", "called"),
    [
        ("randaugment={num_ops: 3, magnitude: 12}", v2.RandAugment(3, 12), lambda x: rand_augment(x, 3, 12)),
        ("augmix={severity: 5, width: 2}", v2.AugMix(5, 2), lambda x: aug_mix(x, 5, 2)),
    ],
)
def test_an_image_is_that_of_torchvision_at_its_seed_epoch_and_sample(setting, plain, called):
    transform, image = build_transform(loaded(f"methods.{setting}")), pixels()
    before = torch.get_rng_state()
    found = augment(transform, image[:, ::-1], seed=3, epoch=1, sample=70)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.dtype == np.uint8 and found.shape == image.shape
    mirrored = torch.from_numpy(image[:, ::-1].copy()).permute(2, 0, 1)
    for each in (plain, called):
        with seeded(3, 1, 70):
            assert np.array_equal(found, each(mirrored).permute(1, 2, 0).numpy())
    others = [
        augment(transform, image[:, ::-1], **({"seed": 3, "epoch": 1, "sample": 70} | other))
        for other in ({"seed": 4}, {"epoch": 2}, {"sample": 71})
    ]
    assert not any(np.array_equal(found, other) for other in others)


def test_both_are_applied_in_their_order():
    image = pixels()
    config = loaded("methods.augmix={}", "methods.randaugment={num_ops: 1}")
    found = augment(build_transform(config), image, seed=0, epoch=0, sample=0)
    with seeded(0, 0, 0):
        expected = v2.RandAugment(1, 9)(v2.AugMix()(torch.from_numpy(image).permute(2, 0, 1)))
    assert np.array_equal(found, expected.permute(1, 2, 0).numpy())
    assert build_transform(loaded()) is None


@pytest.mark.on_demand
def test_batches_do_not_depend_on_the_number_of_workers_and_evaluation_stays():
    def first_two(*settings):
        benchmark = Benchmark(loaded(*settings), seed=5)
        batches = benchmark.train_batches()
        images = torch.cat([next(batches).inputs["x"] for _ in range(2)])
        batches.close()
        return images, next(benchmark.evaluation_batches()).inputs["x"]

    plain, one, two = (
        first_two(f"data.num_workers={workers}", *settings)
        for workers, settings in ((1, []), (1, ["methods.randaugment={}"]), (2, ["methods.randaugment={}"]))
    )
    assert torch.equal(one[0], two[0]) and not torch.equal(one[0], plain[0])
    assert torch.equal(one[1], plain[1])
