"""The training loaders and evaluation: same crops, stated tolerances, order, resuming, damage, clean ends."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from itertools import count, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import dataloader
from torch.utils.data._utils import signal_handling
from torchvision.transforms.v2 import functional

from common.data import sampler
from common.errors import UserError
from common.repository import ROOT
from image_classification.benchmark import Benchmark
from image_classification.data import loader
from image_classification.data.crops import draw_crops
from image_classification.data.images import decode
from image_classification.data.loader import evaluation_batches, normalize, train_steps
from image_classification.kernels.crop_resize import MEAN, STD
from tests.image_classification.loading import (
    BATCH_SIZE,
    CROPS,
    LOADERS,
    NUM_IMAGES,
    SIZES_PX,
    STEPS_PER_EPOCH,
    CountedImages,
    config_of,
    load,
    natural,
    settings_of,
    smooth,
    write_images,
)

# In levels of 255: inside, on average, at the edge. DALI repeats the last pixel of a crop where the filter
# looks beyond it; torchvision leaves that part out. Exact rounding would be 0.5 and 0.25.
TOLERANCES = {"workers": (1.01, 0.35, 1.01), "dali": (1.01, 0.35, 20)}
RESIDENT = (20, 0.6, 20)  # of smooth images, cut from squares of 200 pixels


def triangle_weights(length, size_px):
    """Return (size_px, length): bilinear weights, widened by the scale where it shrinks."""
    scale = length / size_px
    centres = (np.arange(size_px)[:, None] + 0.5) * scale
    distances = abs(np.arange(length) + 0.5 - centres) / max(scale, 1)
    weights = np.maximum(1 - distances, 0)
    return weights / weights.sum(axis=1, keepdims=True)


def plain_batch(images, step):
    """Return the samples of a step and what they show, in float64: decode, cut, filter, mirror."""
    samples = next(sampler.batches(NUM_IMAGES, BATCH_SIZE, seed=CROPS["seed"], start_step=step))
    epoch, shown = step // STEPS_PER_EPOCH, []
    for sample in samples:
        image = np.asarray(decode(images, int(sample)), np.float64)
        crops = draw_crops(np.array([sample]), np.array([image.shape[:2]]), epoch=epoch, **CROPS)
        top, left, height, width = crops.boxes[0]
        cut = image[top : top + height, left : left + width]
        rows, columns = (triangle_weights(length, SIZES_PX[epoch % 3]) for length in (height, width))
        pixels = np.stack([rows @ cut[..., channel] @ columns.T for channel in range(3)], axis=-1)
        shown.append(pixels[:, ::-1] if crops.flips[0] else pixels)
    return samples, np.stack(shown)


def levels(pixels):
    """Return (batch, size, size, 3) in levels of 255, of normalised images, too."""
    if isinstance(pixels, torch.Tensor) and pixels.dtype != torch.uint8:
        assert pixels.dtype == torch.float32 and pixels.is_contiguous(memory_format=torch.channels_last)
        return 255 * (pixels.permute(0, 2, 3, 1).double().numpy() * STD + MEAN)
    return np.asarray(pixels)


@pytest.mark.parametrize("name", LOADERS)
def test_pixels_are_those_of_the_plain_crop(name, tmp_path):
    images = CountedImages(write_images(tmp_path, smooth if "resident" in name else natural))
    inside, on_average, at_the_edge = TOLERANCES.get(name, RESIDENT)
    batches = load(images, name)
    for step in range(2 * STEPS_PER_EPOCH + 1):
        samples, pixels, _ = next(batches)
        expected_samples, expected = plain_batch(images, step)
        assert samples.tolist() == expected_samples.tolist()
        shown = levels(pixels)
        assert shown.shape == expected.shape == (4, *2 * [SIZES_PX[step // STEPS_PER_EPOCH]], 3)
        errors = abs(shown - expected)
        inner = errors[:, 1:-1, 1:-1]
        assert inner.max() < inside and inner.mean() < on_average and errors.max() < at_the_edge


@pytest.mark.parametrize("name", LOADERS)
def test_a_later_start_gives_the_same_batches(images, name):
    whole = list(islice(load(images, name), STEPS_PER_EPOCH + 3))
    for start in (2, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1):
        resumed = load(images, name, start_step=start)
        for batch, other in zip(whole[start:], islice(resumed, len(whole) - start), strict=True):
            assert np.array_equal(batch.samples, other.samples)
            assert np.array_equal(batch.pixels, other.pixels)


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_ends_with_its_iterator_and_leaves_the_global_generator_alone(images, name):
    before = torch.get_rng_state()
    batches = load(images, name)
    next(batches)
    num_threads = sum(thread.name.startswith("decoding") for thread in threading.enumerate())
    assert len(multiprocessing.active_children()) == (2 if name == "workers" else 0)
    assert num_threads == (2 if "resident" in name else 0)
    batches.close()
    assert multiprocessing.active_children() == []
    assert not any(thread.name.startswith("decoding") for thread in threading.enumerate())
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("kept_bytes", [0, 20, 400, 3000])
@pytest.mark.parametrize("name", LOADERS)
def test_a_damaged_file_is_named(images, name, tmp_path, kept_bytes):
    second = next(train_steps(NUM_IMAGES, settings_of())).samples[1]
    damaged = tmp_path / "broken.JPEG"
    damaged.write_bytes(images.jpeg(0)[:kept_bytes])
    images.paths[second] = damaged
    with pytest.raises(UserError) as caught:
        next(load(images, name))
    assert str(caught.value).startswith(f"{damaged}: ") and "\n" not in str(caught.value)
    assert multiprocessing.active_children() == []
    assert not any(thread.name.startswith("decoding") for thread in threading.enumerate())
    with pytest.raises(UserError, match=r"broken\.JPEG: "):
        list(evaluation_batches(images, settings_of(name).data, 5, range(NUM_IMAGES)))


def evaluated(images, samples=range(NUM_IMAGES), *, name="workers", **changes):
    data = settings_of(name, **{"evaluation_resize_px": 80, "evaluation_crop_px": 64} | changes).data
    return list(evaluation_batches(images, data, 5, samples))


def test_batches_do_not_depend_on_the_number_of_workers(images):
    trained = [next(load(images, "workers", num_workers=number)).pixels for number in (1, 2)]
    assert np.array_equal(*trained)
    first, *others = (
        evaluated(images, name=name, num_workers=number)
        for name, number in (("workers", 1), ("workers", 2), ("resident", 1), ("resident", 3))
    )
    for other in others:
        assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("resize_px", "crop_px"), [(80, 64), (81, 62)])
def test_evaluation_sees_every_image_once_in_order(images, resize_px, crop_px):
    sizes = {"evaluation_resize_px": resize_px, "evaluation_crop_px": crop_px}
    batches = evaluated(images, range(1, NUM_IMAGES), name="resident", **sizes)
    assert [len(batch.samples) for batch in batches] == [5, 5, 5, 5, 1]
    assert np.concatenate([batch.samples for batch in batches]).tolist() == list(range(1, NUM_IMAGES))
    for samples, pixels, _ in batches:
        for sample, shown in zip(samples, pixels, strict=True):
            resized = functional.resize(decode(images, int(sample)), [resize_px], antialias=True)
            assert np.array_equal(shown, np.asarray(functional.center_crop(resized, [crop_px, crop_px])))


def test_a_step_travels_to_another_process(images):
    step = next(train_steps(NUM_IMAGES, settings_of(start_step=STEPS_PER_EPOCH)))
    copy = pickle.loads(pickle.dumps(step))
    assert copy.crops(images.size).boxes.tolist() == step.crops(images.size).boxes.tolist()
    assert (copy.samples.tolist(), copy.crop_px) == (step.samples.tolist(), 64)


def test_one_ctrl_c_ends_everything(image_folder):
    code = f"""
from pathlib import Path
from tests.image_classification.loading import CountedImages, load
try:
    for _ in load(CountedImages(Path({str(image_folder)!r})), "workers"):
        print("batch", flush=True)
        input()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True, **pipes)
    assert process.stdout.readline() == "batch\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (0, "interrupted\n", "")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_worker_whose_connection_ends_before_it_is_told_from_a_lost_peer(images, monkeypatch):
    def reset(batches):
        (worker,) = batches._workers
        threading.Timer(0.2, worker.kill).start()
        raise ConnectionResetError

    # torch sets its handler once a process, and a test that ended a rank in this process has removed it
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    batches = load(images, "workers", num_workers=1)
    next(batches)
    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter, "_get_data", reset)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal: Killed"):
        next(batches)


@pytest.mark.parametrize("name", ["dali", "resident, by dali"])
def test_without_dali_the_package_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    settings = [f"data.{key}={value}" for key, value in LOADERS[name].items()]
    config = config_of("baseline", "mini", *settings)
    with pytest.raises(UserError, match="pip install nvidia-dali-cuda130"):
        Benchmark(config, seed=0).prepare_loader()


def test_a_temporary_folder_without_room_for_sockets_is_named(monkeypatch):
    config = config_of("baseline")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 70 * "x")
    Benchmark(config, seed=0).prepare_loader()
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 71 * "x")
    with pytest.raises(UserError, match="no room for the sockets of worker processes"):
        Benchmark(config, seed=0).prepare_loader()


def test_normalisation_is_imagenets():
    pixels = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 4, 5, 3)
    normalised = normalize(pixels)
    assert normalised.shape == (2, 3, 4, 5) and normalised.dtype == torch.float32
    assert normalised.is_contiguous(memory_format=torch.channels_last)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(normalised[0, :, 0, 0], -mean / std)
    torch.testing.assert_close(normalised[1, :, 3, 4], (1 - mean) / std)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_loader_counts_the_seconds_of_its_work(images, monkeypatch, num_workers):
    """By a clock that says a second more each time: a batch takes one; workers side by side count once."""
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=count(0.0).__next__))
    batches = islice(load(images, "workers", num_workers=num_workers), 6)
    assert [batch.loading_s for batch in batches] == 6 * [1 / num_workers]
