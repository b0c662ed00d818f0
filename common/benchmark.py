"""What the loop asks of a benchmark."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from common.config import ROOT, RunConfig
from common.method import Batch


class Benchmark(ABC):
    """A benchmark folder's `benchmark.py` exports a subclass, `Benchmark`, and its configuration, `Config`.

    Nothing here opens the data set but `train_batches`, `evaluation_batches` and `fingerprint`, which the
    loop calls after run_start.
    """

    mlperf_name: ClassVar[str]  # "resnet" or "bert"
    samples_name: ClassVar[str]  # what a sample is: "images", "sequences"
    quality_name: ClassVar[str]  # what the target measures: "top-1 accuracy"
    counts_epochs: ClassVar[bool]  # whether `epoch_num` in the log counts epochs (resnet) or samples (bert)

    def __init__(self, config: Any, *, seed: int) -> None:
        self.config, self.seed = config, seed

    @property
    def directory(self) -> Path:
        """Where the prepared data lie."""
        return ROOT / str(self.config.data.directory)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the baseline's model with its initial weights, drawn from the global generator."""

    @abstractmethod
    def loss(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the baseline's loss, a scalar: the mean over the batch."""

    @abstractmethod
    def synthetic_batches(self) -> Iterator[Batch]:
        """Yield batches of random values in every shape that training will see: warm-up without data."""

    @abstractmethod
    def train_batches(self) -> Iterator[Batch]:
        """Yield the training batches from the first step on, without end."""

    @abstractmethod
    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield the whole evaluation set, every sample once."""

    @abstractmethod
    def count_correct(self, outputs: Any, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return how many predictions of a batch are right and how many there are, as integer scalars."""

    @property
    @abstractmethod
    def num_evaluation_targets(self) -> int:
        """How many predictions the whole evaluation set has: the denominator of the quality."""

    @abstractmethod
    def epoch_number(self, num_samples: int) -> int:
        """Return the `epoch_num` of the log after so many training samples."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return the fingerprint of the prepared data, from its manifest."""


def prepared_hint(config: RunConfig) -> str:
    """Return what a person types to prepare the data of a configuration."""
    return f"run: ttt data prepare {config.benchmark} --size {config.size}"
