"""The questions that the training loop asks of a benchmark: at most 15, the members below without `final`.

A folder with `benchmark.py` and `baseline.yaml` is a benchmark. The module exports `Config`, the keys of its
configurations, and `Benchmark`, a subclass of the class below. tests/test_house.py counts the questions; what
only the measuring tools ask stands in probes.py.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from common.training import memory
from common.training.method import Batch
from common.training.ranks import SINGLE_RANK, RankInfo, part


class Names(NamedTuple):
    """MLPerf's name ("resnet"), the samples ("images") and what the target measures ("top-1 accuracy")."""

    mlperf: str
    samples: str
    quality: str


class Backend(NamedTuple):
    """The implementation that computes a part of training, and the Python module that provides it."""

    name: str
    module: str


TRITON = Backend("triton", "triton")  # a kernel of ours


class Benchmark(ABC):
    """One benchmark with one configuration, seed and rank.

    Only `train_batches`, `evaluation_batches` and `num_evaluation_targets` may open the data set; the loop
    asks for them after run_start.
    """

    names: ClassVar[Names]
    counts_epochs: ClassVar[bool]  # whether `epoch_num` in the log counts epochs (resnet) or samples (bert)

    def __init__(self, config: Any, *, seed: int, rank_info: RankInfo = SINGLE_RANK) -> None:
        self.config, self.seed, self.rank_info = config, seed, rank_info

    def prepare_loader(self) -> None:
        """Run the loader's own GPU kernels once for each shape of training, so that they are compiled.

        Raises UserError when the loader or the configuration cannot work on this machine. Opens no data.
        """
        return

    @abstractmethod
    def build_model(self, *, from_scratch: bool = True) -> nn.Module:
        """Return the baseline's model with its initial weights, drawn from the global generator.

        A benchmark that starts from prepared weights loads them over these unless `from_scratch`.
        """

    @abstractmethod
    def loss(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the baseline's loss, a scalar: the mean over the targets of a batch."""

    def num_targets(self, batch: Batch) -> int:
        """Return how many targets `loss` averages over; one a sample by default."""
        return batch.num_samples

    @abstractmethod
    def synthetic_batches(self) -> Iterator[Batch]:
        """Yield micro-batches of random values in every shape that training will see: warm-up without data.

        On every rank the first one has the same place in the order by size.
        """

    @abstractmethod
    def synthetic_evaluation_batch(self, num_samples: int) -> Batch:
        """Return random values in the shape and type of a batch of `evaluation_batches`."""

    @abstractmethod
    def train_batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of the training batches from a step on, without end."""

    @abstractmethod
    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield this rank's part of the evaluation set; the ranks together see every sample once."""

    def backends(self) -> dict[str, Backend]:
        """Map each part that has several implementations, such as "attention", to the one in use."""
        return {}

    @abstractmethod
    def count_correct(self, outputs: Any, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the numbers of right predictions and of predictions in a batch, as integer scalars."""

    @property
    def num_evaluation_targets(self) -> int:
        """Predictions in the whole evaluation set, the quality's denominator; one a sample by default."""
        return int(self.config.data.num_evaluation_samples)

    def extra_metrics(self, num_correct: int, num_total: int) -> dict[str, float]:
        """Return further metrics of an evaluation by their log keys; none of them ends a run."""
        return {}

    def check_initial_quality(self, quality: float) -> str:
        """Return a warning when the quality before the first step is not the published one, else ""."""
        return ""

    @property
    @final
    def device(self) -> torch.device:
        """The GPU of this process, or the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    @final
    def num_rank_samples(self) -> int:
        """Samples of every global batch that this rank takes."""
        size: int = self.config.global_batch_size
        return len(self.rank_info.part(size))

    @property
    @final
    def num_micro_batches(self) -> int:
        """Micro-batches in which this rank takes its samples."""
        return math.ceil(self.num_rank_samples / self._largest_micro_batch)

    @cached_property
    def _largest_micro_batch(self) -> int:
        size = self.config.micro_batch_size or self.num_rank_samples
        if size != "auto":
            return size
        available = memory.usable_bytes(self.device, self.rank_info.num_local)
        return memory.fitting_size(self.num_rank_samples, available, self.config.training_bytes)

    @property
    @final
    def num_accumulation_steps(self) -> int:
        """The most micro-batches of any rank; the ranks' shares may differ by a sample."""
        last = replace(self.rank_info, rank=self.rank_info.world_size - 1)
        return type(self)(self.config, seed=self.seed, rank_info=last).num_micro_batches

    @property
    @final
    def micro_batch_sizes(self) -> list[int]:
        """The different numbers of samples that the model is called with in training, largest first."""
        num_samples, parts = self.num_rank_samples, self.num_micro_batches
        return sorted({len(part(num_samples, number, parts)) for number in range(parts)}, reverse=True)

    @property
    @final
    def rank_evaluation_samples(self) -> range:
        """Samples of the evaluation set that this rank takes; empty where there are fewer than ranks."""
        return self.rank_info.part(self.config.data.num_evaluation_samples)

    @property
    @final
    def rank_evaluation_batch_size(self) -> int:
        """Samples of the evaluation set that this rank takes at a time."""
        size: int = self.config.evaluation_batch_size
        return math.ceil(size / self.rank_info.world_size)

    @property
    @final
    def directory(self) -> Path:
        directory: Path = self.config.data_directory
        return directory

    @final
    def epochs_finished(self, num_samples: int) -> float:
        """Return `epoch_num` after so many training samples, with a fraction inside an epoch."""
        if not self.counts_epochs:
            return num_samples
        epochs = num_samples / (self.config.steps_per_epoch * self.config.global_batch_size)
        return int(epochs) if epochs.is_integer() else epochs

    @final
    def epoch_number(self, num_samples: int) -> int:
        """Return the `epoch_num`, from 1, that the last of so many training samples belongs to."""
        return max(1, math.ceil(self.epochs_finished(num_samples)))
