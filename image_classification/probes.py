"""Answers of ResNet to the measuring tools: shapes, parts and kernels to time, work of an image, loaders."""

import io
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from common.evidence.records import counted
from common.training import probes
from common.training.memory import USABLE
from common.training.method import Batch
from common.training.probes import KernelPair, Part, Work
from common.training.registry import build_methods
from common.training.step import DTYPES
from image_classification.augmentation import augmentations
from image_classification.benchmark import Benchmark, open_loader
from image_classification.config import Decoder, ImageDataConfig
from image_classification.data.dali import has_dali
from image_classification.data.decoding import Request
from image_classification.data.images import Images
from image_classification.data.loader import TrainSettings
from image_classification.data.nvjpeg import has_nvjpeg
from image_classification.data.resident import GIB, NUM_STEPS_AHEAD, open_decoder, stored_bytes
from image_classification.kernels.crop_resize import crop_resize, crop_resize_reference
from image_classification.methods.blurpool import Blur, MaxBlur
from image_classification.methods.progressive_resizing import ProgressiveResizing

BENCH_SIZES_PX = {"full": (96, 128, 160, 176, 224), "mini": (56, 84, 112)}
DECODED_ONCE = ["data.loader=resident"]
QUALITY = 90  # of the synthetic JPEG files
NUM_IMAGES = 64
CROP_PX = 176
CROPS = {"min_crop_area": 0.08, "flip_probability": 0.5, "alternates_flips": False}  # of the timed loaders
LOADER_BATCH = 32
SHORTCUT = (256, 56, 512)  # channels, size and outputs of the first strided shortcut of ResNet-50 at 224 px
PAIR_IMAGES, STORED_PX, SIZE_PX = 8, 96, 56
CHANNELS = 32
DECODING_MS = (1.8, 2.9)  # of a core, to decode and squash an image of HEIGHT x WIDTH: an assumed range
HEIGHT, WIDTH = 375, 500  # of a usual image of ImageNet
CORES = (64, 128, 192)


class Probes(probes.Probes):
    """Shapes are the sizes of square images: "224 px"."""

    benchmark: Benchmark
    has_batch_norm = True

    @property
    def resident_bytes(self) -> int:
        num_images, stored_px = self.benchmark.num_rank_images, self.benchmark.data.stored_px
        return stored_bytes(num_images, stored_px) if self.loads_once else 0

    def describe_loading(self) -> list[str]:
        """Describe the first epoch, the size of stored pixels, and what it is chosen by."""
        data, larger = self.config.data, self.config.data.stored_px_if_it_fits
        if not self.loads_once or self.config.size == "mini":
            return []
        lines = [describe_first_epoch(data, self.benchmark.rank_info.world_size)]
        if larger is None:
            return lines
        memory = self.benchmark.pixel_memory
        least = memory.bytes_to_fit(self.benchmark.num_rank_images, larger) / GIB
        reserved = memory.reserved_bytes / GIB
        training = f" and {reserved:.1f} GiB of training" if reserved else ""
        place = "its GPU" if data.stored_on == "device" else "its part of the host's memory"
        return [
            *lines,
            f"stored pixels: {self.benchmark.data.stored_px} px on this machine; {larger} px where a rank "
            f"has at least {least:.1f} GiB ({place}; {USABLE:.0%} of it for pixels"
            f"{training}), else {data.stored_px} px; by hand: "
            "--set data.stored_px=N --set data.stored_px_if_it_fits=null",
        ]

    @property
    def loads_once(self) -> bool:
        return self.config.data.loader == "resident"

    @property
    def num_readers(self) -> int:
        return self.config.data.num_workers

    @property
    def num_batches_ahead(self) -> int:
        """Each worker prepares two."""
        return 2 * self.num_readers if self.config.data.loader == "workers" else 1

    def equal_settings(self) -> list[list[str]]:
        """Return other numbers of workers, up to one for each processor."""
        processors = os.cpu_count() or 1
        counts = {count for count in (1, 2, 4, processors) if count <= processors} - {self.num_readers}
        return [[f"data.num_workers={count}"] for count in sorted(counts)]

    def without_loading(self) -> dict[str, list[str]]:
        """Return settings without decoding, and without random crops and methods on single images."""
        methods = augmentations(self.config)  # they need worker processes
        plain = ["data.min_crop_area=1.0", "data.flip_probability=0", "data.alternates_flips=false"]
        random = {method.name for method in methods} | {"alternating_flip"}
        plain += [f"methods.{name}=false" for name in self.config.methods if name in random]
        return ({} if self.loads_once or methods else {"decoding": DECODED_ONCE}) | {"augmentation": plain}

    def other_loaders(self, factor: float) -> dict[str, list[str]]:
        """Return the loader with `factor` times the workers, and the loader that decodes once."""
        workers = min(math.ceil(self.num_readers * factor), os.cpu_count() or 1)
        streamed = ["data.loader=workers", f"data.num_workers={workers}"]
        loaders = {" ".join(streamed): streamed} if workers > self.num_readers or self.loads_once else {}
        if not augmentations(self.config):  # they need worker processes
            loaders[" ".join(DECODED_ONCE)] = DECODED_ONCE
        return loaders

    def bench_batches(self, num_samples: int) -> dict[str, Batch]:
        """Return noise in the sizes of the optimized schedules and of the baseline, images on the device."""
        batches, of_rank = {}, len(self.benchmark.rank_info.part(num_samples))
        for size_px in BENCH_SIZES_PX[self.config.size]:
            batch = self.benchmark.noise(of_rank, size_px)
            images = batch.inputs["x"].to(self.benchmark.device)
            batches[f"{size_px} px"] = replace(batch, inputs={"x": images})
        return batches

    def bench_parts(self) -> Iterator[Part]:
        """Yield the loaders and decoders of this machine, the crop, and two ways to blur a shortcut."""
        device, batch_size = self.benchmark.device, self.config.global_batch_size
        num_workers = min(self.num_readers, os.cpu_count() or 1)
        data = self.benchmark.data.model_copy(update=CROPS | {"num_workers": num_workers})
        images = SyntheticImages()
        yield from loader_parts(images, data, device)
        yield from decoder_parts(images, data, device)
        dtype = DTYPES[self.config.precision]
        yield crop_part(data.stored_px, batch_size, device, dtype)
        yield from blur_parts(min(batch_size, 256), device, dtype)

    def kernel_pairs(self) -> Iterator[KernelPair]:
        """Yield blur, max-pool with blur, and on a GPU the crop: a CPU runs its reference anyway."""
        device = self.benchmark.device
        yield from blur_pairs(device)
        if device.type == "cuda":
            yield crop_pair(device)

    def work(self, shape: str) -> Work:
        with torch.device("meta"):
            model = self.benchmark.build_model()
        return training_work(model, pixels_of(shape), DTYPES[self.config.precision].itemsize)

    def shape_shares(self) -> dict[str, float]:
        sizes = self.epoch_sizes_px()
        return {f"{size_px} px": sizes.count(size_px) / len(sizes) for size_px in sizes}

    def phases(self) -> list[tuple[str, range]]:
        plan, sizes = self.config.plan(), self.epoch_sizes_px()

        def size_px(step: int) -> int:
            return sizes[min(plan.epoch(step), len(sizes) - 1)]

        groups = itertools.groupby(range(plan.num_steps), size_px)
        parts = ((size, list(steps)) for size, steps in groups)
        return [(f"{size} px", range(steps[0], steps[-1] + 1)) for size, steps in parts]

    def loaded_shape(self, step: int) -> str:
        return f"{self.config.data.crop_px(self.config.plan().epoch(step))} px"

    def rate(self, shape: str, measured: Mapping[str, float]) -> float | None:
        """Interpolate: the time of an image is linear in its area, and constant below the least size."""
        points = sorted((pixels_of(name) ** 2, 1 / per_s) for name, per_s in measured.items())
        area = pixels_of(shape) ** 2
        if not points or area > points[-1][0]:
            return None
        return measured.get(shape) or float(1 / np.interp(area, *zip(*points, strict=True)))

    def epoch_sizes_px(self) -> list[int]:
        num_epochs = self.config.num_epochs
        sizes = [self.config.data.crop_px(epoch) for epoch in range(num_epochs)]
        for method in build_methods(self.config):
            if isinstance(method, ProgressiveResizing):
                sizes = [method.size_px(epoch, num_epochs, full) for epoch, full in enumerate(sizes)]
        return sizes


def predict_decoding_s(data: ImageDataConfig, num_cores: int, num_ranks: int) -> tuple[float, float]:
    """Predict the seconds, least and most, in which threads decode all training images once.

    A rank has `data.num_workers` threads, but all ranks no more than the cores. Images that were encoded
    again take, at best, time in proportion to their pixels. Python's interpreter lock, disks and networks may
    be slower.
    """
    shrinkage = min(1.0, data.encoded_px / HEIGHT) if data.encoded_px else 1.0
    images = data.num_train_samples * shrinkage**2 / min(num_cores, num_ranks * data.num_workers)
    low, high = (images * ms / 1e3 for ms in DECODING_MS)
    return low, high


def describe_first_epoch(data: ImageDataConfig, num_ranks: int) -> str:
    """Describe the prediction, with its constants, for machines of 64, 128 and 192 cores."""
    if decoder := {"nvjpeg": "nvJPEG", "dali": "DALI"}.get(data.decoder):
        return f"first epoch: {decoder} decodes {data.num_train_samples:,} images; its rate was not measured"
    seconds = [predict_decoding_s(data, num_cores, num_ranks) for num_cores in CORES]
    times = [
        f"{low:.0f} to {high:.0f} s on {count} cores"
        for count, (low, high) in zip(CORES, seconds, strict=True)
    ]
    encoded = f", encoded again at {data.encoded_px} px, at best" if data.encoded_px else ""
    low, high = DECODING_MS
    return (
        f"first epoch, predicted and not measured: threads decode {data.num_train_samples:,} images{encoded} "
        f"in {', '.join(times)}, of which the steps of that epoch hide as many seconds as they take; "
        f"assuming {low} to {high} ms of a core for {WIDTH} x {HEIGHT} pixels, {data.num_workers} threads on "
        f"each of {counted(num_ranks, 'rank')}; no GPU decodes"
    )


def pixels_of(shape: str) -> int:
    return int(shape.split()[0])


class SyntheticImages:
    """Smooth noise as JPEG files in memory, as `images.Images`."""

    labels = np.zeros(NUM_IMAGES, np.int64)

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.files = []
        for _ in range(NUM_IMAGES):
            noise = Image.fromarray(rng.integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8))
            file = io.BytesIO()
            noise.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(file, "JPEG", quality=QUALITY)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return NUM_IMAGES

    def where(self, sample: int) -> str:
        return f"synthetic image {sample}"

    def jpeg(self, sample: int) -> bytes:
        return self.files[sample]

    def size(self, sample: int) -> tuple[int, int]:
        return HEIGHT, WIDTH


def loader_parts(images: Images, data: ImageDataConfig, device: torch.device) -> Iterator[Part]:
    """Yield the loaders that decode in every epoch."""
    for loader in ("workers", *["dali"] * has_dali()):
        settings = TrainSettings(
            data=data.model_copy(update={"loader": loader}),
            batch_size=LOADER_BATCH,
            seed=0,
            crop_px=lambda step: CROP_PX,
            device=device,
        )
        batches: Any = open_loader(images, settings)
        name = f"loader {loader} ({data.num_workers}), {WIDTH} x {HEIGHT} JPEG to {CROP_PX} px"
        yield Part(name=name, call=partial(next, batches), num_samples=LOADER_BATCH)
        batches.close()


def decoder_parts(images: Images, data: ImageDataConfig, device: torch.device) -> Iterator[Part]:
    """Yield the decoders of resident images, which work ahead in the first epoch of a run."""
    samples, stored_px, num_threads = np.arange(LOADER_BATCH), data.stored_px, data.num_workers
    num_batches = NUM_STEPS_AHEAD + 1

    def decode_batches(request: Request) -> None:
        for wait in [request(samples) for _ in range(num_batches)]:
            wait()

    decoders: list[Decoder] = ["threads", *["nvjpeg"] * has_nvjpeg(device), *["dali"] * has_dali()]
    for name in decoders:
        with open_decoder(
            name, images, stored_px, device=device, num_threads=num_threads, most=LOADER_BATCH
        ) as request:
            yield Part(
                name=f"decoder {name} ({num_threads}), {WIDTH} x {HEIGHT} JPEG to {stored_px} px",
                call=partial(decode_batches, request),
                num_samples=num_batches * LOADER_BATCH,
            )


def crop_inputs(num_images: int, stored_px: int, least: float, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (num_images, stored_px, stored_px, 3)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    starts = torch.rand(num_images, 2, generator=generator) * 0.4
    lengths = least + (0.6 - least) * torch.rand(num_images, 2, generator=generator)
    flips = torch.rand(num_images, generator=generator) < 0.5
    rows = torch.randperm(num_images, generator=generator)
    return [values.to(device) for values in (pixels, rows, torch.cat([starts, lengths], dim=1), flips)]


def crop_part(stored_px: int, batch_size: int, device: torch.device, dtype: torch.dtype) -> Part:
    inputs = crop_inputs(batch_size, stored_px, 0.3, device)
    return Part(
        name=f"crop and resize, {stored_px} to {CROP_PX} px",
        call=partial(crop_resize, *inputs, size_px=CROP_PX, dtype=dtype),
        num_samples=batch_size,
    )


def blur_parts(batch_size: int, device: torch.device, dtype: torch.dtype) -> Iterator[Part]:
    """Yield the blurred shortcut as published and with the stride in the blur, forward and backward."""
    channels, size_px, outputs = SHORTCUT
    images = torch.randn(batch_size, channels, size_px, size_px, device=device)
    images = images.to(dtype, memory_format=torch.channels_last).requires_grad_()
    forms = {"published": (1, 2), "stride in the blur": (2, 1)}
    for name, (blur_stride, stride) in forms.items():
        layer = nn.Sequential(Blur(stride=blur_stride), nn.Conv2d(channels, outputs, 1, stride, bias=False))
        layer = layer.to(device, dtype, memory_format=torch.channels_last)

        def call(layer: nn.Module = layer) -> None:
            layer(images).sum().backward()

        yield Part(name=f"blurred shortcut, {name}", call=call, num_samples=batch_size)


def blur_pairs(device: torch.device) -> Iterator[KernelPair]:
    """Pair the blur of both strides, and a max-pool with its blur, with convolutions in float32.

    The kernels compute in bfloat16; gradients are compared too.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(PAIR_IMAGES, CHANNELS, SIZE_PX, SIZE_PX, generator=generator).bfloat16().to(device)
    plain = images.float().requires_grad_()
    images = images.to(memory_format=torch.channels_last).requires_grad_()

    def with_gradient(blurred: Tensor, source: Tensor) -> list[Tensor]:
        return [blurred, *torch.autograd.grad(blurred.square().sum(), [source])]

    def blurred(stride: int) -> list[Tensor]:
        return with_gradient(Blur(stride=stride).to(device)(images), images)

    def convolved(values: Tensor, stride: int) -> list[Tensor]:
        weight = torch.tensor([1.0, 2.0, 1.0], device=device)
        filters = (weight[:, None] * weight / 16).expand(CHANNELS, 1, 3, 3)
        return with_gradient(F.conv2d(values, filters, stride=stride, padding=1, groups=CHANNELS), plain)

    tolerance = 0.02  # bfloat16 keeps 8 bits
    yield KernelPair(
        name="blur",
        kernel=lambda: blurred(1) + blurred(2),
        plain=lambda: convolved(plain, 1) + convolved(plain, 2),
        tolerance=tolerance,
    )
    pool = nn.MaxPool2d(3, stride=1, padding=1)
    yield KernelPair(
        name="max-pool and blur",
        kernel=lambda: with_gradient(MaxBlur(pool).to(device)(images), images),
        plain=lambda: convolved(pool(plain), 2),
        tolerance=tolerance,
    )


def crop_pair(device: torch.device) -> KernelPair:
    inputs = crop_inputs(PAIR_IMAGES, STORED_PX, 0.2, device)
    return KernelPair(
        name="crop and resize",
        kernel=lambda: [crop_resize(*inputs, size_px=SIZE_PX, dtype=torch.float32)],
        plain=lambda: [crop_resize_reference(*inputs, size_px=SIZE_PX, dtype=torch.float32)],
        tolerance=1e-3,  # where TF32 is allowed; the tests ask for 2e-4 in a value
    )


def training_work(model: nn.Module, size_px: int, element_bytes: int = 2) -> Work:
    """Return the work of one image (3, size_px, size_px), forward and backward.

    `model` lies on the meta device. Elements read or written: by a convolution 3 times its input and output;
    by a batch norm 3 forward and 5 backward, by an addition 1 and 3, by a pooling 2 and 2: addition and ReLU
    are fused with the batch norm. Weights are left out: a batch shares them.
    """
    elements = []

    def count(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        num_in, num_out = inputs[0].numel(), output.numel()
        if isinstance(module, nn.Conv2d | nn.Linear):
            elements.append(3 * (num_in + num_out))
        elif isinstance(module, nn.BatchNorm2d):
            elements.append(8 * num_out)
        elif isinstance(module, nn.MaxPool2d):
            elements.append(2 * (num_in + num_out))
        elif hasattr(module, "downsample"):  # a residual block ends with an addition
            elements.append(4 * num_out)

    hooks = [module.register_forward_hook(count) for module in model.modules()]
    with FlopCounterMode(display=False) as counter:
        model.eval()(torch.empty(1, 3, size_px, size_px, device="meta")).sum().backward()
    for hook in hooks:
        hook.remove()
    return Work(flops=counter.get_total_flops(), num_bytes=element_bytes * sum(elements))
