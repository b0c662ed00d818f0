"""ResNet on image classification: what the loop asks of this benchmark."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from common import benchmark, fingerprint
from common.config import DataConfig, Fraction, RunConfig, Strict
from common.method import Batch
from image_classification.data.image_folder import ImageFolder, evaluation_batches, train_batches
from image_classification.model import build_resnet


class ModelConfig(Strict):
    """A torchvision ResNet by name."""

    name: Literal["resnet18", "resnet50"]
    num_classes: int = Field(gt=1)


class ImageDataConfig(DataConfig):
    """Sizes in pixels; `min_crop_area` is the smallest part of an image that a training crop shows."""

    train_crop_px: int = Field(ge=32)
    evaluation_resize_px: int = Field(ge=32)  # the shorter side
    evaluation_crop_px: int = Field(ge=32)
    min_crop_area: float = Field(gt=0, le=1)
    keep_decoded: bool  # hold every decoded image in memory from its first use on
    flip_probability: Fraction


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
    mlperf_name = "resnet"
    samples_name = "images"
    quality_name = "top-1 accuracy"
    counts_epochs = True

    def build_model(self) -> nn.Module:
        """Return torchvision's ResNet with the published initial weights."""
        return build_resnet(self.config.model.name, self.config.model.num_classes)

    def loss(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy; `labels` are indices (batch,) or probabilities (batch, classes)."""
        return F.cross_entropy(outputs.float(), targets["labels"])

    def synthetic_batches(self) -> Iterator[Batch]:
        """Yield one batch of noise as large as the loader's; methods that resize batches resize this too."""
        generator = torch.Generator().manual_seed(0)
        num_samples, size = self.config.global_batch_size, self.config.data.train_crop_px
        images = torch.randn(num_samples, 3, size, size, generator=generator)
        labels = torch.randint(self.config.model.num_classes, (num_samples,), generator=generator)
        images = images.contiguous(memory_format=torch.channels_last)
        yield Batch(inputs={"x": images}, targets={"labels": labels}, num_samples=num_samples)

    def train_batches(self) -> Iterator[Batch]:
        """Yield shuffled batches of random crops without end."""
        folder = self.folder("train", self.config.data.num_train_samples)
        data = self.config.data
        yield from train_batches(
            folder,
            self.config.global_batch_size,
            seed=self.seed,
            crop_px=data.train_crop_px,
            min_area=data.min_crop_area,
            flip_probability=data.flip_probability,
        )

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield one centre crop of every evaluation image, in the order of the listing."""
        folder = self.folder("validation", self.config.data.num_evaluation_samples)
        data = self.config.data
        yield from evaluation_batches(
            folder,
            self.config.evaluation_batch_size,
            resize_px=data.evaluation_resize_px,
            crop_px=data.evaluation_crop_px,
        )

    def folder(self, name: str, num_samples: int) -> ImageFolder:
        """Open a part of the data. Raises UserError unless it holds what the configuration says."""
        return ImageFolder.open(
            self.directory / name,
            num_samples=num_samples,
            num_classes=self.config.model.num_classes,
            keep_decoded=self.config.data.keep_decoded,
            hint=benchmark.prepared_hint(self.config),
        )

    def count_correct(self, outputs: Any, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Count the images whose largest output is their class, and the images."""
        labels = targets["labels"]
        return (outputs.argmax(dim=-1) == labels).sum(), torch.tensor(labels.numel(), device=labels.device)

    @property
    def num_evaluation_targets(self) -> int:
        """One prediction an image."""
        return self.config.data.num_evaluation_samples

    def epoch_number(self, num_samples: int) -> int:
        """Return the epoch, from 1, in which the last of so many samples was seen."""
        return max(1, -(-num_samples // (self.config.steps_per_epoch * self.config.global_batch_size)))

    def fingerprint(self) -> str:
        """Return the fingerprint of the prepared data."""
        manifest = fingerprint.read_manifest(self.directory, hint=benchmark.prepared_hint(self.config))
        return str(manifest["fingerprint"])
