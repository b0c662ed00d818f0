"""ResNet on image classification, as the training loop sees it."""

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
from common.training import benchmark
from common.training.benchmark import Backend, Names
from common.training.method import Batch
from image_classification.augmentation import build_transform
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
from image_classification.data.resident import EvaluationCache
from image_classification.kernels.crop_resize import crop_resize, uses_triton
from image_classification.model import build_resnet


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
    def check_flip_probability(self) -> Self:
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
    names = Names(mlperf="resnet", samples="images", quality="top-1 accuracy")
    counts_epochs = True

    def prepare_loader(self) -> None:
        """Crop resident pixels to each size, which compiles the kernel on a GPU.

        Raises UserError when decoded images would not fit into memory, or DALI is missing.
        """
        data = self.config.data
        check_loader(data, self.num_rank_images, self.micro_batch_sizes[0], self.device)
        if data.loader != "resident":
            return
        pixels = torch.zeros(1, data.stored_px, data.stored_px, 3, dtype=torch.uint8, device=self.device)
        box = torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=self.device)
        row, flip = (torch.zeros(1, dtype=dtype, device=self.device) for dtype in (torch.int64, torch.bool))
        dtype = loaded_dtype(data, self.config.precision)
        for size_px in set(data.crop_px_by_epoch or [data.train_crop_px]):
            crop_resize(pixels, row, box, flip, size_px=size_px, mean=MEAN, std=STD, dtype=dtype)

    def build_model(self, *, from_scratch: bool = True) -> nn.Module:
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
        """Return random pixels, normalised as `batch` does."""
        shape = (num_samples, *2 * [self.config.data.evaluation_crop_px], 3)
        pixels = torch.randint(256, shape, dtype=torch.uint8, device=self.device)
        labels = torch.zeros(num_samples, dtype=torch.int64)
        return Batch(inputs={"x": normalize(pixels)}, targets={"labels": labels}, num_samples=num_samples)

    def noise(self, num_samples: int, size_px: int) -> Batch:
        """Return a batch of noise in the layout and type of the loader: what is compiled here is used."""
        dtype = loaded_dtype(self.config.data, self.config.precision)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(num_samples, 3, size_px, size_px, generator=generator)
        labels = torch.randint(self.config.model.num_classes, (num_samples,), generator=generator)
        images = images.to(dtype, memory_format=torch.channels_last)
        return Batch(inputs={"x": images}, targets={"labels": labels}, num_samples=num_samples)

    def backends(self) -> dict[str, Backend]:
        """Return what decodes and crops resident images."""
        if self.config.data.loader != "resident":
            return {}
        is_dali = uses_dali(self.config.data.decoder, self.device)
        is_triton = uses_triton(self.device.type == "cuda")
        return {
            "decoder": Backend("dali", "nvidia.dali") if is_dali else Backend("threads", "PIL"),
            "crops": Backend("triton", "triton") if is_triton else Backend("matrix products", "torch"),
        }

    @property
    def num_rank_images(self) -> int:
        """The training images that are this rank's, where a loader keeps them."""
        config = self.config
        return sampler.shard_size(config.data.num_train_samples, config.global_batch_size, self.rank_info)

    def train_batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield shuffled batches of random crops without end."""
        data, plan = self.config.data, self.config.plan()
        images, meter = self.images("train", data.num_train_samples), Meter()
        settings = TrainSettings(
            batch_size=self.config.global_batch_size,
            seed=self.seed,
            crop_px=lambda step: data.crop_px(plan.epoch(step)),
            min_area=data.min_crop_area,
            flip_probability=data.flip_probability,
            alternates_flips=data.alternates_flips,
            rank_info=self.rank_info,
            transform=build_transform(self.config),
        )
        loader = open_loader(
            images,
            settings,
            data,
            self.device,
            self.config.precision,
            micro_batch_size=self.micro_batch_sizes[0],
            start_step=start_step,
            meter=meter,
        )
        for samples, pixels in loader:
            loading_s, meter.seconds = meter.seconds, 0.0
            yield replace(self.batch(images, samples, pixels), loading_s=loading_s or None)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield one centre crop of every image of this rank's, in the order of the listing."""
        data = self.config.data
        images = self.images("validation", data.num_evaluation_samples)
        drawn = evaluation_batches(
            images,
            self.rank_evaluation_batch_size,
            samples=self.rank_evaluation_samples,
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
