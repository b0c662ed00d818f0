"""ResNet on image classification, as the training loop sees it."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data import sampler
from common.errors import UserError
from common.training import benchmark
from common.training.benchmark import TRITON, Backend, Names
from common.training.method import Batch
from common.training.step import DTYPES
from image_classification.augmentation import build_transform
from image_classification.config import Config, ImageDataConfig
from image_classification.data.dali import dali_batches, import_dali
from image_classification.data.images import Images, open_images
from image_classification.data.loader import (
    PixelBatch,
    TrainSettings,
    evaluation_batches,
    normalize,
    worker_batches,
)
from image_classification.data.nvjpeg import check_nvjpeg
from image_classification.data.resident import (
    EvaluationCache,
    PixelMemory,
    check_budget,
    choose_decoder,
    choose_stored_px,
    resident_batches,
)
from image_classification.kernels.crop_resize import crop_resize, uses_triton
from image_classification.model import build_resnet

NUM_DRAWN = 64  # different images of noise
DECODERS = {"threads": "PIL", "dali": "nvidia.dali", "nvjpeg": "torchvision"}  # their packages
MAX_FOLDER = 107 - len("/pymp-abcdefgh/listener-abcdefgh")  # a socket's path has 107 characters at most


class Benchmark(benchmark.Benchmark):
    """Quality is top-1 accuracy on one centre crop of every image of the evaluation set.

    Inputs are `x` (batch, 3, size, size), normalised, of `image_dtype` in training and float32 in evaluation,
    channels last; targets are `labels` (batch,) int64.
    """

    config: Config
    evaluated: EvaluationCache | None = None
    names = Names(mlperf="resnet", samples="images", quality="top-1 accuracy")
    counts_epochs = True

    def prepare_loader(self) -> None:
        """Crop resident pixels to each size, which compiles the kernel on a GPU.

        Raises UserError where decoded images would not fit into memory, DALI is missing, nvJPEG does not
        work, or the path of the temporary folder is too long for the sockets of worker processes.
        """
        data = self.data
        if data.loader == "workers" and len(folder := tempfile.gettempdir()) > MAX_FOLDER:
            what = f"longer than {MAX_FOLDER} characters: no room for the sockets of worker processes"
            raise UserError(what, where=folder, hint="set TMPDIR to a shorter folder")
        if "dali" in (data.loader, data.loader == "resident" and data.decoder):
            import_dali()
        if data.loader == "resident":
            if data.decoder == "nvjpeg":
                check_nvjpeg(self.device)
            check_budget(self.num_rank_images, data, self.pixel_memory)
            pixels = torch.zeros(1, data.stored_px, data.stored_px, 3, dtype=torch.uint8, device=self.device)
            box = torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=self.device)
            row, flip = (torch.zeros(1, dtype=kind, device=self.device) for kind in (torch.int64, torch.bool))
            for size_px in data.crop_sizes_px:
                crop_resize(pixels, row, box, flip, size_px=size_px, dtype=self.image_dtype)

    def build_model(self, *, from_scratch: bool = True) -> nn.Module:
        model = self.config.model
        return build_resnet(model.name, model.num_classes, model.initial_weights)

    def loss(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy; `labels` are indices (batch,) or probabilities (batch, classes)."""
        return F.cross_entropy(outputs.float(), targets["labels"])

    def synthetic_batches(self) -> Iterator[Batch]:
        """Yield noise in each size of the loader's batches; methods that resize batches resize these too."""
        for num_samples in self.micro_batch_sizes:
            for size_px in self.config.data.crop_sizes_px:
                yield self.noise(num_samples, size_px)

    def synthetic_evaluation_batch(self, num_samples: int) -> Batch:
        shape = (num_samples, *2 * [self.config.data.evaluation_crop_px], 3)
        pixels = torch.randint(256, shape, dtype=torch.uint8, device=self.device)
        labels = torch.zeros(num_samples, dtype=torch.int64)
        return Batch(inputs={"x": normalize(pixels)}, targets={"labels": labels}, num_samples=num_samples)

    def noise(self, num_samples: int, size_px: int) -> Batch:
        """Return noise in the layout and dtype of the loader's batches, so that training compiles nothing.

        Images repeat after NUM_DRAWN: a generator draws on one core, and a large batch would take seconds.
        """
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(min(num_samples, NUM_DRAWN), 3, size_px, size_px, generator=generator)
        images = drawn[torch.arange(num_samples) % NUM_DRAWN]
        labels = torch.randint(self.config.model.num_classes, (num_samples,), generator=generator)
        images = images.to(self.image_dtype, memory_format=torch.channels_last)
        return Batch(inputs={"x": images}, targets={"labels": labels}, num_samples=num_samples)

    def backends(self) -> dict[str, Backend]:
        on_gpu = self.device.type == "cuda"
        backends = {}
        if self.config.data.loader == "resident":
            decoder = choose_decoder(self.config.data.decoder, self.device)
            backends["decoder"] = Backend(decoder, DECODERS[decoder])
            if self.config.data.stored_px_if_it_fits:
                backends["stored pixels"] = Backend(f"{self.data.stored_px} px", "torch")
            backends["crops"] = TRITON if uses_triton(on_gpu) else Backend("matrix products", "torch")
        if "blurpool" in self.config.methods:
            backends["blur"] = TRITON if on_gpu else Backend("convolution", "torch")
        return backends

    @property
    def image_dtype(self) -> torch.dtype:
        """The type of the training images that reach the model."""
        is_resident = self.config.data.loader == "resident"
        return DTYPES[self.config.precision] if is_resident else torch.float32

    @cached_property
    def data(self) -> ImageDataConfig:
        """The settings of the data, with the size of stored pixels that all ranks of this machine take."""
        last_rank = replace(self.rank_info, rank=self.rank_info.world_size - 1)  # has the most images
        last = type(self)(self.config, seed=self.seed, rank_info=last_rank)
        stored_px = choose_stored_px(
            last.num_rank_images, self.config.data, last.pixel_memory, num_local=self.rank_info.num_local
        )
        data: ImageDataConfig = self.config.data.model_copy(update={"stored_px": stored_px})
        return data

    @property
    def pixel_memory(self) -> PixelMemory:
        """The memory in which a loader keeps this rank's training images."""
        return PixelMemory(self.config.data.stored_on, self.device, self.micro_batch_sizes[0])

    @property
    def num_rank_images(self) -> int:
        """The number of this rank's training images, for a loader that keeps them."""
        num_images, batch = self.config.data.num_train_samples, self.config.global_batch_size
        return len(sampler.shard_bounds(num_images, batch, self.rank_info))

    def train_batches(self, start_step: int = 0) -> Iterator[Batch]:
        data, plan = self.data, self.config.plan()
        if data.loader == "resident":  # again: by now the training has reserved its memory
            check_budget(self.num_rank_images, data, self.pixel_memory)
        images = self.images("train", data.num_train_samples)
        settings = TrainSettings(
            data=data,
            batch_size=self.config.global_batch_size,
            seed=self.seed,
            crop_px=lambda step: data.crop_px(plan.epoch(step)),
            rank_info=self.rank_info,
            start_step=start_step,
            transform=build_transform(self.config),
            device=self.device,
            dtype=self.image_dtype,
        )
        for batch in open_loader(images, settings):
            yield self.batch(images, batch)

    @cached_property
    def evaluation_images(self) -> Images:
        """The validation images, opened by the first evaluation."""
        return self.images("validation", self.config.data.num_evaluation_samples)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield one centre crop of each of this rank's images, in the order of the listing."""
        data = self.config.data
        images = self.evaluation_images
        size, samples = self.rank_evaluation_batch_size, self.rank_evaluation_samples
        batches = evaluation_batches(images, data, size, samples)
        if data.loader == "resident":
            self.evaluated = self.evaluated or EvaluationCache(self.pixel_memory)
            batches = self.evaluated.batches(batches)
        for batch in batches:
            yield self.batch(images, batch)

    def batch(self, images: Images, loaded: PixelBatch) -> Batch:
        """Return a loader's batch: images on the device, normalised; labels still on the CPU."""
        pixels = torch.as_tensor(loaded.pixels).to(self.device, non_blocking=True)
        return Batch(
            inputs={"x": normalize(pixels) if pixels.dtype == torch.uint8 else pixels},
            targets={"labels": torch.from_numpy(images.labels[loaded.samples])},
            num_samples=len(loaded.samples),
            num_global_targets=self.config.global_batch_size,
            loading_s=loaded.loading_s,
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
        labels = targets["labels"]
        num_labels = torch.full((), labels.numel(), device=labels.device)
        return (outputs.argmax(dim=-1) == labels).sum(), num_labels


LOADERS = {"workers": worker_batches, "dali": dali_batches, "resident": resident_batches}


def open_loader(images: Images, settings: TrainSettings) -> Iterator[PixelBatch]:
    """Open the training loader that the settings name; all loaders give the same crops."""
    return LOADERS[settings.data.loader](images, settings)
