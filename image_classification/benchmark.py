"""ResNet on image classification: what the loop asks of this benchmark."""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from common.config.schema import DataConfig, Fraction, RunConfig, Strict
from common.data import sampler
from common.data.manifest import read_manifest
from common.training import benchmark
from common.training.benchmark import Form, KernelPair, Part, Projection, Work
from common.training.method import Batch
from common.training.registry import build_methods
from image_classification.augmentation import augmentation, augmentations
from image_classification.bench_parts import bench_parts
from image_classification.data.decoders import Name, uses_dali
from image_classification.data.images import Images, open_images
from image_classification.data.loader import (
    MEAN,
    STD,
    Meter,
    TrainSettings,
    evaluation_batches,
    normalize,
)
from image_classification.data.loaders import check_loader, keep_evaluation, loaded_dtype, open_loader
from image_classification.data.resident import EvaluationCache, stored_bytes
from image_classification.kernel_pairs import kernel_pairs
from image_classification.kernels.crop_resize import crop_resize, uses_triton
from image_classification.methods.progressive_resizing import ProgressiveResizing
from image_classification.model import build_resnet
from image_classification.roofline import project, training_work

BENCH_SIZES_PX = {"full": (96, 128, 160, 176, 224), "mini": (56, 84, 112)}
EPOCHS_TO_TARGET = {90: 84, 28: 27}  # of a schedule of so many, in the published runs of ResNet-50
DECODED_ONCE = ["data.loader=resident"]


class ModelConfig(Strict):
    """A torchvision ResNet by name."""

    name: Literal["resnet18", "resnet50", "resnet101"]
    num_classes: int = Field(gt=1)


class ImageDataConfig(DataConfig):
    """Sizes in pixels; `min_crop_area` is the smallest part of an image that a training crop shows."""

    train_crop_px: int = Field(ge=32)
    crop_px_by_epoch: list[Annotated[int, Field(ge=32)]]  # empty: train_crop_px in every epoch
    evaluation_resize_px: int = Field(ge=32)  # the shorter side
    evaluation_crop_px: int = Field(ge=32)
    min_crop_area: float = Field(gt=0, le=1)
    flip_probability: Fraction
    alternates_flips: bool = False  # set by alternating_flip: each image is mirrored in every other epoch
    loader: Literal["workers", "dali", "resident"]
    num_workers: int = Field(ge=1)  # decoding processes or threads
    stored_px: int = Field(ge=32)  # loader resident: images are held squashed to this size ...
    stored_on: Literal["device", "host"]  # ... on the GPU, or in memory of the host
    decoder: Name = "auto"  # loader resident: auto is DALI on a GPU where it is installed, else threads

    @model_validator(mode="after")
    def mirrors_half(self) -> Self:
        """Raise ValueError where flips alternate but are not to be one of two."""
        if self.alternates_flips and self.flip_probability != 0.5:
            raise ValueError("alternates_flips needs a flip_probability of 0.5")
        return self

    def crop_px(self, epoch: int) -> int:
        """Return the size of the training crops of an epoch, from 0."""
        if not self.crop_px_by_epoch:
            return self.train_crop_px
        return self.crop_px_by_epoch[min(epoch, len(self.crop_px_by_epoch) - 1)]


class Config(RunConfig):
    """The keys of this benchmark."""

    model: ModelConfig
    data: ImageDataConfig


class Benchmark(benchmark.Benchmark):
    """Quality is top-1 accuracy on one centre crop of every image of the evaluation set.

    Inputs are `x` (batch, 3, size, size), normalised float32, channels last; targets are `labels` (batch,)
    int64.
    """

    config: Config
    evaluated: EvaluationCache | None = None
    mlperf_name = "resnet"
    samples_name = "images"
    quality_name = "top-1 accuracy"
    has_batch_norm = True
    counts_epochs = True

    def build_model(self) -> nn.Module:
        """Return torchvision's ResNet with the published initial weights."""
        return build_resnet(self.config.model.name, self.config.model.num_classes)

    def loss(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy; `labels` are indices (batch,) or probabilities (batch, classes)."""
        return F.cross_entropy(outputs.float(), targets["labels"])

    def synthetic_batches(self) -> Iterator[Batch]:
        """Yield noise in each size of the loader's batches; methods that resize batches resize this too."""
        data = self.config.data
        for num_samples in self.micro_batch_sizes:
            for size_px in dict.fromkeys(data.crop_px_by_epoch or [data.train_crop_px]):
                yield self.noise(num_samples, size_px)

    def synthetic_evaluation_batch(self, num_samples: int) -> Batch:
        """Return noise as `batch` makes it of pixels."""
        shape = (num_samples, *2 * [self.config.data.evaluation_crop_px], 3)
        pixels = torch.randint(256, shape, dtype=torch.uint8, device=self.device)
        labels = torch.zeros(num_samples, dtype=torch.int64)
        return Batch(inputs={"x": normalize(pixels)}, targets={"labels": labels}, num_samples=num_samples)

    def warm_up_loader(self) -> None:
        """Crop resident pixels to each size, which compiles the kernel on a GPU."""
        data = self.config.data
        if data.loader != "resident":
            return
        pixels = torch.zeros(1, data.stored_px, data.stored_px, 3, dtype=torch.uint8, device=self.device)
        box = torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=self.device)
        row, flip = (torch.zeros(1, dtype=dtype, device=self.device) for dtype in (torch.int64, torch.bool))
        dtype = loaded_dtype(data, self.config.precision)
        for size_px in set(data.crop_px_by_epoch or [data.train_crop_px]):
            crop_resize(pixels, row, box, flip, size_px=size_px, mean=MEAN, std=STD, dtype=dtype)

    def noise(self, num_samples: int, size_px: int) -> Batch:
        """Return a batch of noise in the layout and type of the loader: what is compiled here is used."""
        dtype = loaded_dtype(self.config.data, self.config.precision)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(num_samples, 3, size_px, size_px, generator=generator)
        labels = torch.randint(self.config.model.num_classes, (num_samples,), generator=generator)
        images = images.to(dtype, memory_format=torch.channels_last)
        return Batch(inputs={"x": images}, targets={"labels": labels}, num_samples=num_samples)

    def bench_batches(self, num_samples: int) -> dict[str, Batch]:
        """Return noise in the sizes of the optimized schedules and of the baseline."""

        def on_device(batch: Batch) -> Batch:  # as `batch` does
            return replace(batch, inputs={"x": batch.inputs["x"].to(self.device)})

        sizes_px = BENCH_SIZES_PX[self.config.size]
        return {f"{size_px} px": on_device(self.noise(num_samples, size_px)) for size_px in sizes_px}

    def bench_parts(self) -> Iterator[Part]:
        """Yield the loaders alone, crop and resize, and the two forms of blurring before a shortcut."""
        return bench_parts(self.config.data, self.config.global_batch_size, self.device)

    def kernel_pairs(self) -> Iterator[KernelPair]:
        """Yield the blur before a subsampling, and on a GPU the crop of resident pixels."""
        return kernel_pairs(self.device)

    def work(self, shape: str) -> Work:
        """Return the work of an image of such a size when batch norm, addition and ReLU are fused."""
        with torch.device("meta"):
            model = self.build_model()
        return training_work(model, int(shape.split()[0]), is_fused=True)

    def shape_shares(self) -> dict[str, float]:
        """Count the epochs of each size."""
        sizes = self.epoch_sizes_px()
        return {f"{size_px} px": sizes.count(size_px) / len(sizes) for size_px in sizes}

    def phases(self) -> list[tuple[str, range]]:
        """Return the steps of each size, in the order of training."""
        steps, first, found = self.config.steps_per_epoch, 0, []
        for size_px, epochs in itertools.groupby(self.epoch_sizes_px()):
            last = min(first + len(list(epochs)) * steps, self.config.plan().num_steps)
            found.append((f"{size_px} px", range(first, last)))
            first = last
        return found

    @property
    def loads_once(self) -> bool:
        """Whether decoded images stay in memory."""
        return self.config.data.loader == "resident"

    def forms(self) -> dict[str, Form]:
        """Return what decodes and crops resident images."""
        if self.config.data.loader != "resident":
            return {}
        is_dali = uses_dali(self.config.data.decoder, self.device)
        is_triton = uses_triton(self.device.type == "cuda")
        return {
            "decoder": Form("dali", "nvidia.dali") if is_dali else Form("threads", "PIL"),
            "crops": Form("triton", "triton") if is_triton else Form("matrix products", "torch"),
        }

    @property
    def num_readers(self) -> int:
        """The threads or processes that decode."""
        return self.config.data.num_workers

    def without_loading(self) -> dict[str, list[str]]:
        """Return what leaves out decoding, and random crops with the methods that change single images."""
        methods = augmentations(self.config)  # which ask for worker processes
        plain = ["data.min_crop_area=1.0", "data.flip_probability=0", "data.alternates_flips=false"]
        random = {method.name for method in methods} | {"alternating_flip"}
        plain += [f"methods.{name}=false" for name in self.config.methods if name in random]
        return ({} if self.loads_once or methods else {"decoding": DECODED_ONCE}) | {"augmentation": plain}

    def other_loaders(self, factor: float) -> dict[str, list[str]]:
        """Return as many workers as that takes, and the loader that decodes once."""
        workers = min(math.ceil(self.num_readers * factor), os.cpu_count() or 1)
        loaders = {}
        if workers > self.num_readers or self.loads_once:
            loaders[f"data.num_workers={workers}"] = ["data.loader=workers", f"data.num_workers={workers}"]
        if not augmentations(self.config):  # which ask for worker processes
            loaders[" ".join(DECODED_ONCE)] = DECODED_ONCE
        return loaders

    def projection(self, samples_per_s: dict[str, float], num_devices: int) -> Projection | None:
        """Return the minutes of the published number of epochs, the loader keeping up."""
        sizes = self.epoch_sizes_px()
        num_epochs = EPOCHS_TO_TARGET.get(len(sizes)) if self.config.model.name == "resnet50" else None
        if num_epochs is None or self.config.size != "full" or self.config.budget != 1:
            return None
        last = num_epochs * self.config.steps_per_epoch
        evaluations = [step for step in self.config.plan().evaluation_steps if step <= last]
        return project(
            sizes[:num_epochs],
            {int(shape.split()[0]): rate for shape, rate in samples_per_s.items()},
            self.config.data,
            num_evaluations=len(evaluations),
            num_devices=num_devices,
        )

    def epoch_sizes_px(self) -> list[int]:
        """Return the size of the images that the model sees in each epoch of the recipe."""
        num_epochs, methods = self.config.num_epochs, build_methods(self.config)
        sizes = [self.config.data.crop_px(epoch) for epoch in range(num_epochs)]
        for method in methods:
            if isinstance(method, ProgressiveResizing):
                sizes = [method.size_px(epoch, num_epochs, full) for epoch, full in enumerate(sizes)]
        return sizes

    @property
    def resident_bytes(self) -> int:
        """The decoded images of the loader that keeps those of this rank."""
        data = self.config.data
        return stored_bytes(self.num_own_images, data.stored_px) if data.loader == "resident" else 0

    @property
    def num_own_images(self) -> int:
        """The training images that are this rank's, where a loader keeps them."""
        config = self.config
        return sampler.shard_size(config.data.num_train_samples, config.global_batch_size, self.place)

    def equal_settings(self) -> list[list[str]]:
        """Return numbers of workers with a processor each."""
        processors = os.cpu_count() or 1
        counts = {count for count in (1, 2, 4, processors) if count <= processors} - {self.num_readers}
        return [[f"data.num_workers={count}"] for count in sorted(counts)]

    @property
    def num_batches_ahead(self) -> int:
        """Each worker prepares two."""
        return 2 * self.config.data.num_workers if self.config.data.loader == "workers" else 1

    def check_ready(self) -> None:
        """Raise UserError when decoded images would not fit into memory, or DALI is missing."""
        check_loader(self.config.data, self.num_own_images, self.micro_batch_sizes[0], self.device)

    def train_batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield shuffled batches of random crops without end."""
        data, plan = self.config.data, self.config.plan()
        images, self.meter = self.images("train", data.num_train_samples), Meter()
        settings = TrainSettings(
            batch_size=self.config.global_batch_size,
            seed=self.seed,
            crop_px=lambda step: data.crop_px(plan.epoch(step)),
            min_area=data.min_crop_area,
            flip_probability=data.flip_probability,
            alternates_flips=data.alternates_flips,
            place=self.place,
            transform=augmentation(self.config),
        )
        loader = open_loader(
            images,
            settings,
            data,
            self.device,
            self.config.precision,
            micro_batch_size=self.micro_batch_sizes[0],
            start_step=start_step,
            meter=self.meter,
        )
        for samples, pixels in loader:
            yield self.batch(images, samples, pixels)

    def loading_s(self, waited_s: float) -> float | None:
        """Return what the loader has counted; DALI and what keeps decoded images work out of sight."""
        return self.meter.seconds if self.config.data.loader == "workers" else None

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield one centre crop of every image of this rank's, in the order of the listing."""
        data = self.config.data
        images = self.images("validation", data.num_evaluation_samples)
        drawn = evaluation_batches(
            images,
            self.own_evaluation_batch_size,
            samples=self.own_evaluation_samples,
            resize_px=data.evaluation_resize_px,
            crop_px=data.evaluation_crop_px,
            num_workers=data.num_workers if data.loader == "workers" else 0,
            num_threads=data.num_workers,
        )
        if data.loader == "resident":
            self.evaluated = self.evaluated or keep_evaluation(data, self.micro_batch_sizes[0], self.device)
            drawn = self.evaluated.batches(drawn)
        for samples, pixels in drawn:
            yield self.batch(images, samples, pixels)

    def batch(self, images: Images, samples: np.ndarray, pixels: np.ndarray | Tensor) -> Batch:
        """Return a loader's pixels, (batch, size, size, 3) uint8 or normalised already, with labels."""
        on_device = torch.as_tensor(pixels).to(self.device, non_blocking=True)
        return Batch(
            inputs={"x": normalize(on_device) if on_device.dtype == torch.uint8 else on_device},
            targets={"labels": torch.from_numpy(images.labels[samples])},
            num_samples=len(samples),
            num_global_targets=self.config.global_batch_size,
        )

    def images(self, part: str, num_samples: int) -> Images:
        """Open a part of the data. Raises UserError unless it holds what the configuration says."""
        return open_images(
            self.directory,
            part,
            num_samples=num_samples,
            num_classes=self.config.model.num_classes,
            hint=self.config.prepared_hint,
        )

    def count_correct(self, outputs: Any, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Count the images whose largest output is their class, and the images."""
        labels = targets["labels"]
        num_labels = torch.full((), labels.numel(), device=labels.device)
        return (outputs.argmax(dim=-1) == labels).sum(), num_labels

    @property
    def num_evaluation_targets(self) -> int:
        """One prediction an image."""
        return self.config.data.num_evaluation_samples

    def epoch_number(self, num_samples: int) -> int:
        """Return the epoch, from 1, in which the last of so many samples was seen."""
        return max(1, math.ceil(self.epochs_finished(num_samples)))

    def epochs_finished(self, num_samples: int) -> float:
        """Return the epochs, with a fraction where an evaluation divides one."""
        epochs = num_samples / (self.config.steps_per_epoch * self.config.global_batch_size)
        return int(epochs) if epochs.is_integer() else epochs

    def fingerprint(self) -> str:
        """Return the fingerprint of the prepared data."""
        manifest = read_manifest(self.directory, hint=self.config.prepared_hint)
        return str(manifest["fingerprint"])
