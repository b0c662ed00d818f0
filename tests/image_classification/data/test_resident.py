"""Pixels that stay in memory: one decoding of each image, shares of the ranks, budgets, GPUs."""

import sys
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.data import sampler
from common.errors import UserError
from common.training.ranks import RankInfo
from image_classification.benchmark import Benchmark
from image_classification.data import decoding, resident
from image_classification.data.loader import PixelBatch
from image_classification.data.nvjpeg import check_nvjpeg
from image_classification.data.resident import (
    GIB,
    NUM_STEPS_AHEAD,
    EvaluationCache,
    PixelMemory,
    choose_decoder,
)
from tests.image_classification.loading import (
    BATCH_SIZE,
    LOADERS,
    NUM_IMAGES,
    STEPS_PER_EPOCH,
    CountedImages,
    config_of,
    load,
    settings_of,
)

RESIDENT = [name for name in LOADERS if "resident" in name]


@pytest.mark.parametrize("name", RESIDENT)
def test_an_image_is_decoded_once_also_when_an_epoch_dropped_it(images, name):
    batches, seen = load(images, name), set()
    for step in range(6 * STEPS_PER_EPOCH):
        seen.update(next(batches).samples.tolist())
        if step == 0:
            assert sum(images.num_reads) <= (1 + NUM_STEPS_AHEAD) * BATCH_SIZE
    assert seen == set(range(NUM_IMAGES))  # 2 of 22 are dropped in each epoch
    assert images.num_reads == [1] * NUM_IMAGES


def test_ranks_share_the_images_and_each_decodes_its_own_once(image_folder):
    seen = []
    for rank, (first, last) in enumerate([(0, 5), (5, 13), (13, 22)]):  # 3 ranks take 2, 3 and 3 of 8
        images, rank_info = CountedImages(image_folder), RankInfo(rank=rank, world_size=3)
        batches = [batch.samples for batch in islice(load(images, rank_info=rank_info, batch_size=8), 12)]
        assert all(len(samples) == len(rank_info.part(8)) for samples in batches)
        assert len(sampler.shard_bounds(NUM_IMAGES, 8, rank_info)) == last - first
        for epoch in range(6):  # of 2 steps
            drawn = np.concatenate(batches[2 * epoch : 2 * epoch + 2])
            assert len(set(drawn)) == len(drawn)
        rest = islice(load(images, rank_info=rank_info, batch_size=8, start_step=5), 7)
        pairs = zip(batches[5:], rest, strict=True)
        assert all(np.array_equal(one, other.samples) for one, other in pairs)
        seen.append(set(np.concatenate(batches).tolist()))
        assert sum(number > 0 for number in images.num_reads) == last - first == len(seen[-1])
    assert set.union(*seen) == set(range(NUM_IMAGES)) and sum(map(len, seen)) == NUM_IMAGES


def test_auto_is_dali_on_a_gpu_where_it_is_installed(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(resident, "has_dali", lambda: True)
    assert [choose_decoder("auto", device) for device in (gpu, cpu)] == ["dali", "threads"]
    assert [choose_decoder(name, gpu) for name in ("threads", "nvjpeg")] == ["threads", "nvjpeg"]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    assert choose_decoder("auto", gpu) == "threads"


def test_nvjpeg_is_refused_before_the_run_where_there_is_no_gpu():
    benchmark = Benchmark(
        config_of("optimized", "mini", "data.loader=resident", "data.decoder=nvjpeg"), seed=0
    )
    with pytest.raises(UserError, match="data.decoder: nvjpeg needs a GPU; use threads or dali"):
        benchmark.prepare_loader()


def test_decoders_use_one_stream_and_leave_other_gpus_alone(monkeypatch):
    """Memory stays with the stream that used it; in a new thread, a stream that ends selects GPU 0."""
    events, streams = [], []

    @contextmanager
    def enter(what):
        events.append(what)
        yield
        events.append("end")

    def open_stream(device):
        streams.append(SimpleNamespace(synchronize=lambda: None))
        return streams[-1]

    fakes = {"Stream": open_stream, "stream": lambda stream: enter("stream"), "device": enter}
    for name, fake in (fakes | {"current_stream": lambda device: None}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    gpu, pixels = torch.device("cuda", 3), SimpleNamespace(record_stream=lambda stream: None)
    decoding.side_stream.cache_clear()
    assert all(decoding.on_side_stream(gpu, lambda: pixels) is pixels for _ in range(2))
    decoding.side_stream.cache_clear()
    assert events == 2 * [gpu, "stream", "end", "end"] and len(streams) == 1


def test_memory_of_the_host_is_pinned_until_it_is_freed(monkeypatch):
    pinned = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.append(address), cudaHostUnregister=pinned.remove
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    memory = resident.allocate((2, 4, 4, 3), device=torch.device("cuda"), where="host")
    assert pinned == [memory.data_ptr()]
    del memory
    assert pinned == []  # else the next memory at this address could not be pinned


def test_pixels_that_do_not_fit_are_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(PixelMemory, "available_bytes", lambda memory: 100 * GIB)
        data, gpu = settings_of(stored_px=256).data, PixelMemory("device", torch.device("cuda"), 1)
        with pytest.raises(UserError, match="data.loader: 234.6 GiB.* 100.0 GiB free on the GPU; .*px=160"):
            resident.check_budget(1_281_167, data, gpu)
        larger = data.model_copy(update={"stored_px_if_it_fits": 320})
        with pytest.raises(UserError, match=r"data\.stored_px=160 data\.stored_px_if_it_fits=null or"):
            resident.check_budget(1_281_167, larger, gpu)
        resident.check_budget(100 * GIB // (3 * 256**2), data, gpu)
    host = PixelMemory("host", torch.device("cpu"), 1)
    with pytest.raises(UserError, match=r"GiB free in memory; use data.stored_px=\d+ or stream"):
        resident.check_budget(NUM_IMAGES, settings_of(stored_px=10_000_000).data, host)


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("is_enough", [True, False])
def test_an_evaluation_is_kept_if_it_fits(where, is_enough, monkeypatch):
    num_started = 0

    def source():
        nonlocal num_started
        num_started += 1
        rng = np.random.default_rng(0)
        for first in (0, 4, 8):
            samples = np.arange(first, min(first + 4, 10))
            yield PixelBatch(samples, rng.integers(0, 256, (len(samples), 16, 16, 3), dtype=np.uint8))

    available = 2 * (10 * 16 * 16 * 3 - (not is_enough))  # of which half is for evaluation
    monkeypatch.setattr(PixelMemory, "available_bytes", lambda memory: available)
    cache, expected = EvaluationCache(PixelMemory(where, torch.device("cpu"), 1)), list(source())
    next(cache.batches(source()))  # a broken-off evaluation is not kept
    for number in (3, 4, 5):
        batches = list(cache.batches(source()))
        assert num_started == (3 if is_enough else number) and cache.is_complete == is_enough
        for batch, other in zip(batches, expected, strict=True):
            assert np.array_equal(batch.samples, other.samples)
            assert np.array_equal(batch.pixels.numpy(), other.pixels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("name", ["resident", "resident, by dali", "resident, by nvjpeg"])
def test_a_gpu_sees_the_same_crops(images, where, name):
    if "nvjpeg" in name:
        check_nvjpeg(torch.device("cuda"))
    on_gpu = load(images, name, device="cuda", stored_on=where)
    both = zip(on_gpu, load(images), strict=False)
    for batch, other in islice(both, 2 * STEPS_PER_EPOCH):
        assert batch.samples.tolist() == other.samples.tolist() and batch.pixels.is_cuda
        if name == "resident":
            torch.testing.assert_close(batch.pixels.cpu(), other.pixels, rtol=0, atol=1e-4)
        errors = abs(batch.pixels.cpu() - other.pixels).mean() * 0.225 * 255
        assert errors < (2 if "nvjpeg" in name else 0.8)  # levels; nvJPEG does not interpolate colours
