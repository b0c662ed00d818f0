"""The loaders: same crops, pixels within a stated tolerance, order, resuming, damaged files, clean ends."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional

from common.data import sampler
from common.errors import UserError
from common.repository import ROOT
from image_classification.data import loader
from image_classification.data.crops import draw_crops
from image_classification.data.dali import dali_batches
from image_classification.data.images import ImageFolder, decode
from image_classification.data.loader import (
    Meter,
    TrainSettings,
    evaluation_batches,
    normalize,
    prefetch,
    train_steps,
    worker_batches,
)
from image_classification.data.loaders import check_loader

NUM_IMAGES = 22
SIZES_PX = (48, 64, 96)  # of the epochs
STEPS_PER_EPOCH = NUM_IMAGES // 4
SETTINGS = TrainSettings(
    batch_size=4,
    seed=3,
    crop_px=lambda step: SIZES_PX[step // STEPS_PER_EPOCH % 3],
    min_area=0.08,
    flip_probability=0.5,
)
LOADERS = {
    "workers": partial(worker_batches, num_workers=2),
    "dali": partial(dali_batches, num_threads=2),
}
# In levels of 255. DALI repeats the last pixel of a crop where the filter looks beyond it; torchvision leaves
# that part out.
OUTERMOST_TOLERANCES = {"workers": 1.01, "dali": 20}


def natural(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return (height, width, 3) uint8 whose amplitudes fall as 1/frequency, mostly without colour."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)) + 1 / max(height, width)
    noise = np.fft.rfft2(rng.standard_normal((4, height, width))) / frequency
    grey, *colours = np.fft.irfft2(noise, s=(height, width))
    image = grey[..., None] + 0.3 * np.stack(colours, axis=-1)
    return (118 + 60 * image / image.std()).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of two classes: colour, one grey, one CMYK; and a PNG that is named JPEG, as in ImageNet."""
    directory, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        image = Image.fromarray(natural(rng, *rng.integers(120, 200, 2)))
        path = directory / str(number % 2) / f"{number:02}.JPEG"
        path.parent.mkdir(exist_ok=True)
        image = image.convert({4: "L", 5: "CMYK"}.get(number, "RGB"))
        image.save(path, format="PNG" if number == 6 else "JPEG", quality=90)
    return directory


@pytest.fixture
def images(directory: Path) -> ImageFolder:
    return ImageFolder.open(directory, hint="")


@pytest.fixture(params=LOADERS)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of each training loader that is installed."""
    if request.param == "dali":
        pytest.importorskip("nvidia.dali")
    return request.param


def take(batches, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(samples, np.asarray(pixels)) for samples, pixels in islice(batches, number)]


def assert_equal(found, expected) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def triangle_weights(length: int, size_px: int) -> np.ndarray:
    """Return (size_px, length): bilinear weights, widened by the scale where it shrinks."""
    scale = length / size_px
    centres = (np.arange(size_px)[:, None] + 0.5) * scale
    distances = abs(np.arange(length) + 0.5 - centres) / max(scale, 1)
    weights = np.maximum(1 - distances, 0)
    return weights / weights.sum(axis=1, keepdims=True)


def plain_batch(images: ImageFolder, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of a step and what they show, in float64: decode, cut, filter, mirror."""
    samples = next(sampler.batches(NUM_IMAGES, SETTINGS.batch_size, seed=SETTINGS.seed, start_step=step))
    epoch, shown = step // STEPS_PER_EPOCH, []
    for sample in samples:
        image = np.asarray(decode(images, int(sample)), np.float64)
        size = np.array([image.shape[:2]])
        crops = draw_crops(np.array([sample]), size, seed=3, epoch=epoch, min_area=0.08, flip_probability=0.5)
        top, left, height, width = crops.boxes[0]
        cut = image[top : top + height, left : left + width]
        rows, columns = (triangle_weights(length, SIZES_PX[epoch % 3]) for length in (height, width))
        pixels = np.stack([rows @ cut[..., channel] @ columns.T for channel in range(3)], axis=-1)
        shown.append(pixels[:, ::-1] if crops.flips[0] else pixels)
    return samples, np.stack(shown)


def test_pixels_are_those_of_the_plain_crop(images, name):
    steps = 2 * STEPS_PER_EPOCH + 1
    found = take(LOADERS[name](images, SETTINGS), steps)
    for step, (samples, pixels) in enumerate(found):
        expected_samples, expected = plain_batch(images, step)
        assert samples.tolist() == expected_samples.tolist()
        assert pixels.dtype == np.uint8 and pixels.shape == expected.shape
        errors = abs(pixels - expected)
        inside = errors[:, 1:-1, 1:-1]
        assert inside.max() < 1.01 and inside.mean() < 0.35  # exact rounding: 0.5 and 0.25
        assert errors.max() < OUTERMOST_TOLERANCES[name]
    assert [pixels.shape[1] for _, pixels in found] == [48] * STEPS_PER_EPOCH + [64] * STEPS_PER_EPOCH + [96]


def test_a_later_start_gives_the_same_batches(images, name):
    whole = take(LOADERS[name](images, SETTINGS), STEPS_PER_EPOCH + 3)
    for start in (2, STEPS_PER_EPOCH + 1):
        resumed = take(LOADERS[name](images, SETTINGS, start_step=start), len(whole) - start)
        assert_equal(resumed, whole[start:])


def test_batches_do_not_depend_on_the_number_of_workers(images):
    one, two = (take(worker_batches(images, SETTINGS, num_workers=number), 7) for number in (1, 2))
    assert_equal(one, two)
    sizes = {"resize_px": 80, "crop_px": 64}
    none, *others = (take(evaluation_batches(images, 5, **sizes, num_workers=n), 9) for n in (0, 1, 2))
    others.append(take(evaluation_batches(images, 5, **sizes, num_threads=3), 9))
    for other in others:
        assert_equal(other, none)


@pytest.mark.parametrize(("resize_px", "crop_px"), [(80, 64), (81, 62)])
def test_evaluation_sees_every_image_once_in_order(images, resize_px, crop_px):
    found = list(evaluation_batches(images, 5, resize_px=resize_px, crop_px=crop_px))
    assert [len(samples) for samples, _ in found] == [5, 5, 5, 5, 2]
    assert np.concatenate([samples for samples, _ in found]).tolist() == list(range(NUM_IMAGES))
    for samples, pixels in found:
        for sample, shown in zip(samples, pixels, strict=True):
            resized = functional.resize(decode(images, int(sample)), [resize_px], antialias=True)
            assert np.array_equal(shown, np.asarray(functional.center_crop(resized, [crop_px, crop_px])))


def test_a_step_travels_to_another_process(images):
    step = next(train_steps(NUM_IMAGES, SETTINGS, start_step=STEPS_PER_EPOCH))
    copy = pickle.loads(pickle.dumps(step))
    assert copy.crops(images.size).boxes.tolist() == step.crops(images.size).boxes.tolist()
    assert (copy.samples.tolist(), copy.crop_px) == (step.samples.tolist(), 64)


def test_workers_leave_the_global_generator_alone(images):
    before = torch.get_rng_state()
    take(worker_batches(images, SETTINGS, num_workers=1), 1)
    assert torch.get_rng_state().equal(before)


def broken(images: ImageFolder, tmp_path: Path, content: bytes) -> ImageFolder:
    """Return the images with other content in the file of the first training step's second sample."""
    sample = next(train_steps(NUM_IMAGES, SETTINGS, start_step=0)).samples[1]
    path = tmp_path / "broken.JPEG"
    path.write_bytes(content)
    return ImageFolder(
        paths=[path if i == sample else other for i, other in enumerate(images.paths)], labels=images.labels
    )


@pytest.mark.parametrize("kept_bytes", [0, 20, 400, 3000])
def test_a_damaged_file_is_named(images, name, tmp_path, kept_bytes):
    damaged = broken(images, tmp_path, images.paths[0].read_bytes()[:kept_bytes])
    with pytest.raises(UserError) as caught:
        take(LOADERS[name](damaged, SETTINGS), 1)
    assert str(caught.value).startswith(f"{tmp_path}/broken.JPEG: ") and "\n" not in str(caught.value)
    assert multiprocessing.active_children() == []


def test_a_damaged_file_is_named_in_evaluation_with_workers(images, tmp_path):
    damaged = broken(images, tmp_path, b"not a JPEG")
    with pytest.raises(UserError, match=r"broken\.JPEG: cannot be decoded"):
        list(evaluation_batches(damaged, 5, resize_px=80, crop_px=64, num_workers=2))


def test_workers_end_with_the_iterator(images):
    batches = worker_batches(images, SETTINGS, num_workers=2)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert multiprocessing.active_children() == []


def test_one_ctrl_c_ends_everything(directory):
    code = f"""
from pathlib import Path
from image_classification.data.images import ImageFolder
from image_classification.data.loader import TrainSettings, worker_batches
settings = TrainSettings(batch_size=4, seed=0, crop_px=lambda step: 64, min_area=0.08, flip_probability=0)
try:
    for _ in worker_batches(ImageFolder.open(Path({str(directory)!r}), hint=""), settings, num_workers=2):
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


def test_without_dali_the_package_is_named(images, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(UserError, match="pip install nvidia-dali-cuda130"):
        next(dali_batches(images, SETTINGS, num_threads=1))


def test_a_temporary_folder_without_room_for_sockets_is_named(tmp_path, monkeypatch):
    data = SimpleNamespace(loader="workers")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 70 * "x")
    check_loader(data, 4, 4, torch.device("cpu"))
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 71 * "x")
    with pytest.raises(UserError, match="no room for the sockets of worker processes"):
        check_loader(data, 4, 4, torch.device("cpu"))


def test_normalisation_is_imagenets():
    pixels = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 4, 5, 3)
    found = normalize(pixels)
    assert found.shape == (2, 3, 4, 5) and found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(found[0, :, 0, 0], -mean / std)
    torch.testing.assert_close(found[1, :, 3, 4], (1 - mean) / std)


def test_an_error_in_the_second_thread_is_raised_here():
    def build(item: int) -> int:
        if item == 2:
            raise UserError("broken")
        return item

    batches = prefetch(build, range(5))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(UserError, match="broken"):
        next(batches)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_loader_counts_the_seconds_of_its_work(directory: Path, monkeypatch, num_workers: int) -> None:
    """By a clock that says a second more each time: a batch takes one; workers side by side count once."""
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=count(0.0).__next__))
    images, meter = ImageFolder.open(directory, hint=""), Meter()
    take(worker_batches(images, SETTINGS, num_workers=num_workers, meter=meter), 6)
    assert meter.seconds == 6 / num_workers
