"""Pixels that stay in memory: same crops as every loader, one decoding each, budgets, errors, clean ends."""

import sys
import threading
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.data import sampler
from common.errors import UserError
from common.training.ranks import RankInfo
from image_classification.data import resident
from image_classification.data.crops import draw_crops
from image_classification.data.decoders import uses_dali
from image_classification.data.images import ImageFolder, decode
from image_classification.data.loader import TrainSettings, normalize
from image_classification.data.resident import (
    GIB,
    NUM_STEPS_AHEAD,
    EvaluationCache,
    ResidentLoader,
)

NUM_IMAGES = 17
STEPS_PER_EPOCH = NUM_IMAGES // 3
SETTINGS = TrainSettings(
    batch_size=3,
    seed=7,
    crop_px=lambda step: 40 + 8 * (step // STEPS_PER_EPOCH),
    min_area=0.25,
    flip_probability=0.5,
)
STORED_PX = 128
MEAN_ERROR = 0.8  # levels of 255 against a crop of the original, on average over its pixels; seen: 0.59


class Counted:
    """Images that count how often each was read."""

    def __init__(self, images: ImageFolder) -> None:
        self.images, self.labels, self.where, self.size = images, images.labels, images.where, images.size
        self.num_reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.images)

    def jpeg(self, sample: int) -> bytes:
        self.num_reads[sample] += 1
        return self.images.jpeg(sample)


@pytest.fixture
def images(tmp_path: Path) -> Counted:
    rng = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        path = tmp_path / str(number % 2) / f"{number:02}.JPEG"
        path.parent.mkdir(exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8))
        width, height = rng.integers(100, 151, 2).tolist()
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(path, quality=95)
    return Counted(ImageFolder.open(tmp_path, hint=""))


def load(
    images: Counted, *, settings=SETTINGS, device: str = "cpu", where: str = "device", **changes
) -> ResidentLoader:
    options = {"stored_px": STORED_PX, "dtype": torch.float32, "num_threads": 2} | changes
    return ResidentLoader(images, settings, device=torch.device(device), where=where, **options)


def num_decoding_threads() -> int:
    return sum(thread.name.startswith("decoding") for thread in threading.enumerate())


@pytest.fixture(params=["threads", "dali"])
def decoder(request) -> str:
    if request.param == "dali":
        pytest.importorskip("nvidia.dali")
    return request.param


@pytest.mark.parametrize("where", ["device", "host"])
def test_crops_are_those_of_every_loader(images, where, decoder):
    order = sampler.batches(NUM_IMAGES, SETTINGS.batch_size, seed=SETTINGS.seed)
    batches = islice(load(images, where=where, decoder=decoder), 2 * STEPS_PER_EPOCH)
    errors = []
    for step, ((samples, crops), expected) in enumerate(zip(batches, order, strict=False)):
        epoch = step // STEPS_PER_EPOCH
        size_px = SETTINGS.crop_px(step)
        assert samples.tolist() == expected.tolist()
        assert crops.shape == (SETTINGS.batch_size, 3, size_px, size_px)
        assert crops.dtype == torch.float32 and crops.is_contiguous(memory_format=torch.channels_last)
        errors += [
            abs(crop - direct).mean() * 0.225 * 255
            for crop, direct in zip(crops, cut_from_originals(images, samples, epoch, size_px), strict=True)
        ]
    assert max(errors) < MEAN_ERROR


def cut_from_originals(images: Counted, samples: np.ndarray, epoch: int, size_px: int) -> torch.Tensor:
    """Return the crops that PIL cuts from the images themselves, normalised."""
    originals = [decode(images, int(sample)) for sample in samples]
    crops = draw_crops(
        samples,
        np.array([(image.height, image.width) for image in originals]),
        seed=SETTINGS.seed,
        epoch=epoch,
        min_area=SETTINGS.min_area,
        flip_probability=SETTINGS.flip_probability,
    )
    pixels = []
    for image, (top, left, height, width), flip in zip(originals, crops.boxes, crops.flips, strict=True):
        crop = image.crop((left, top, left + width, top + height)).resize((size_px, size_px), 2)
        pixels.append(np.asarray(crop)[:, ::-1] if flip else np.asarray(crop))
    return normalize(torch.from_numpy(np.stack(pixels)))


@pytest.mark.parametrize("where", ["device", "host"])
def test_an_image_is_decoded_once_also_when_an_epoch_dropped_it(images, where, decoder):
    batches = iter(load(images, where=where, decoder=decoder))
    seen = set()
    for step in range(6 * STEPS_PER_EPOCH):
        seen.update(next(batches)[0].tolist())
        if step == 0:
            assert images.num_reads.total() <= (1 + NUM_STEPS_AHEAD) * SETTINGS.batch_size
    assert seen == set(range(NUM_IMAGES))  # 2 of 17 are dropped in each epoch
    assert images.num_reads == Counter(range(NUM_IMAGES))


def test_a_later_start_continues_the_run(images):
    whole = list(islice(load(images), 13))
    for start_step in (4, STEPS_PER_EPOCH, 11):
        rest = list(islice(load(images, start_step=start_step), 13 - start_step))
        for (samples, crops), (expected_samples, expected) in zip(rest, whole[start_step:], strict=True):
            assert samples.tolist() == expected_samples.tolist() and crops.equal(expected)


def test_a_second_pass_is_the_first_without_reading(images):
    loader = load(images, dtype=torch.bfloat16)
    first = list(islice(loader, STEPS_PER_EPOCH))
    num_reads = images.num_reads.total()
    again = list(islice(loader, STEPS_PER_EPOCH - NUM_STEPS_AHEAD))
    assert first[0][1].dtype == torch.bfloat16
    assert all(one.equal(other) for (_, one), (_, other) in zip(first, again, strict=False))
    assert images.num_reads.total() == num_reads


def test_ranks_share_the_images_and_each_decodes_its_own_once(images):
    settings = replace(SETTINGS, batch_size=8)  # 3 ranks take 2, 3 and 3
    seen = []
    for rank in range(3):
        here = Counted(images.images)
        rank_info = RankInfo(rank=rank, world_size=3)
        loader = load(here, settings=replace(settings, rank_info=rank_info))
        first, last = (NUM_IMAGES * (8 * number // 3) // 8 for number in (rank, rank + 1))
        num_rank_images = last - first
        assert len(loader.pixels) == num_rank_images == sampler.shard_size(NUM_IMAGES, 8, rank_info)
        batches = [samples for samples, _ in islice(loader, 12)]
        assert all(len(samples) == len(sampler.rank_part(np.arange(8), rank_info)) for samples in batches)
        for epoch in range(6):  # of 2 steps
            drawn = np.concatenate(batches[2 * epoch : 2 * epoch + 2])
            assert len(set(drawn)) == len(drawn)
        rest = [samples for samples, _ in islice(load(here, settings=loader.settings, start_step=5), 7)]
        assert all(np.array_equal(*both) for both in zip(rest, batches[5:], strict=True))
        seen.append(set(np.concatenate(batches).tolist()))
        assert len(here.num_reads) == num_rank_images == len(seen[-1])
    assert set.union(*seen) == set(range(NUM_IMAGES)) and sum(map(len, seen)) == NUM_IMAGES


def test_a_damaged_image_is_named_and_ends_the_threads(images, decoder):
    victim = images.images.paths[5]
    victim.write_bytes(victim.read_bytes()[:300])
    with pytest.raises(UserError, match=rf"{victim.name}: cannot be decoded"):
        list(islice(load(images, decoder=decoder), STEPS_PER_EPOCH + 1))
    assert num_decoding_threads() == 0


def test_closing_ends_the_threads(images, decoder):
    batches = iter(load(images, decoder=decoder))
    next(batches)
    assert num_decoding_threads() == 2
    batches.close()
    assert num_decoding_threads() == 0


def test_auto_is_dali_on_a_gpu_where_it_is_installed(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr("image_classification.data.decoders.import_dali", lambda: None)
    assert [uses_dali("auto", gpu), uses_dali("auto", cpu), uses_dali("dali", cpu)] == [True, False, True]
    assert not uses_dali("threads", gpu)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    assert not uses_dali("auto", gpu)


def test_pixels_that_do_not_fit_are_refused_before_anything_starts(images, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(resident, "available_bytes", lambda *args, **named: 100 * GIB)
        gpu = {"device": torch.device("cuda"), "where": "device", "batch_size": 1}
        with pytest.raises(UserError, match="data.loader: 234.6 GiB.* 100.0 GiB free on the GPU; .*px=160"):
            resident.check_budget(1_281_167, 256, **gpu)
        resident.check_budget(100 * GIB // (3 * 256**2), 256, **gpu)
    with pytest.raises(UserError, match=r"GiB free in memory; use data.stored_px=\d+ or"):
        load(images, stored_px=10_000_000)
    assert images.num_reads.total() == 0 and num_decoding_threads() == 0


def evaluation_source(num_started: list[int]):
    num_started.append(1)
    rng = np.random.default_rng(0)
    for first in (0, 4, 8):
        samples = np.arange(first, min(first + 4, 10))
        yield samples, rng.integers(0, 256, (len(samples), 16, 16, 3), dtype=np.uint8)


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("is_enough", [True, False])
def test_an_evaluation_is_kept_if_it_fits(where, is_enough):
    available = 10 * 16 * 16 * 3 - (not is_enough)
    cache = EvaluationCache(device=torch.device("cpu"), where=where, available_bytes=available)
    num_started: list[int] = []
    next(iter(cache.batches(evaluation_source(num_started))))  # a broken-off evaluation is not kept
    expected = list(evaluation_source([]))
    for number in (2, 3, 4):
        found = list(cache.batches(evaluation_source(num_started)))
        assert len(num_started) == (2 if is_enough else number)
        assert cache.is_complete == is_enough
        for (samples, pixels), (expected_samples, expected_pixels) in zip(found, expected, strict=True):
            assert samples.tolist() == expected_samples.tolist()
            assert np.array_equal(pixels.numpy(), expected_pixels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", ["device", "host"])
def test_a_gpu_sees_the_same_crops(images, where):
    number = 2 * STEPS_PER_EPOCH
    found, expected = (
        list(islice(loader, number))
        for loader in (load(images, device="cuda", where=where, decoder="threads"), load(images))
    )
    for (samples, crops), (expected_samples, expected_crops) in zip(found, expected, strict=True):
        assert samples.tolist() == expected_samples.tolist() and crops.is_cuda
        torch.testing.assert_close(crops.cpu(), expected_crops, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", ["device", "host"])
def test_images_that_a_gpu_decodes_are_about_the_same(images, where):
    pytest.importorskip("nvidia.dali")
    loaders = (load(images, device="cuda", where=where, decoder="dali"), load(images))
    for (_, crops), (_, expected) in zip(*(islice(each, STEPS_PER_EPOCH) for each in loaders), strict=True):
        assert abs(crops.cpu() - expected).mean() * 0.225 * 255 < MEAN_ERROR
