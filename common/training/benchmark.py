"""What the loop asks of a benchmark."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from common.repository import ROOT
from common.training.method import Batch
from common.training.ranks import ALONE, Place, part


class Form(NamedTuple):
    """The code that computes a part which has several forms, and the module that provides it."""

    name: str
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What training on one sample costs at least: floating-point operations, bytes of memory traffic.

    `num_bytes` is None where memory is not what bounds the benchmark; `num_tokens` where there are none.
    """

    flops: float
    num_bytes: float | None = None
    num_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the work on a sample differs: its deviation and longest relative to the mean.

    `is_balanced`: the ranks get equal work by their parts of a batch all the same.
    """

    deviation: float = 0.0
    longest: float = 1.0
    is_balanced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a training step, or of what feeds it, to be timed alone; a call takes `num_samples`."""

    name: str
    call: Callable[[], object]
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPair:
    """A kernel and its plain form, to be compared; both return the same tensors, gradients too.

    `tolerance` is the largest difference allowed, as a share of the largest plain value.
    """

    name: str
    kernel: Callable[[], Sequence[Tensor]]
    plain: Callable[[], Sequence[Tensor]]
    tolerance: float

    def error(self) -> float:
        """Return the largest difference as a share of the largest plain value; NaN where one is NaN."""
        pairs = [
            (one.detach().double(), other.detach().double())
            for one, other in zip(self.kernel(), self.plain(), strict=True)
        ]
        shares = [(one - other).abs().max() / other.abs().max() for one, other in pairs]
        return float(torch.stack(shares).max())  # max() keeps NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Minutes to the target, calculated from throughput, and what that assumes."""

    minutes: float
    assuming: str


class Benchmark(ABC):
    """A benchmark folder's `benchmark.py` exports a subclass, `Benchmark`, and its configuration, `Config`.

    Nothing here opens the data set but `train_batches`, `evaluation_batches` and `fingerprint`, which the
    loop calls after run_start.
    """

    mlperf_name: ClassVar[str]  # "resnet" or "bert"
    samples_name: ClassVar[str]  # what a sample is: "images", "sequences"
    quality_name: ClassVar[str]  # what the target measures: "top-1 accuracy"
    has_batch_norm: ClassVar[bool] = False  # what a rank computes at a time is part of the recipe
    counts_epochs: ClassVar[bool]  # whether `epoch_num` in the log counts epochs (resnet) or samples (bert)

    def __init__(self, config: Any, *, seed: int, place: Place = ALONE) -> None:
        self.config, self.seed, self.place = config, seed, place

    @property
    def device(self) -> torch.device:
        """The GPU of this process, or the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def num_own_samples(self) -> int:
        """How many samples of every global batch this rank takes."""
        size: int = self.config.global_batch_size
        return len(part(size, self.place.rank, self.place.world_size))

    @property
    def num_micro_batches(self) -> int:
        """In how many parts this rank takes its samples."""
        largest: int = self.config.micro_batch_size or self.num_own_samples
        return math.ceil(self.num_own_samples / largest)

    @property
    def num_accumulation_steps(self) -> int:
        """The most micro-batches that a rank takes; shares differ by a sample where they are not equal."""
        last = Place(rank=self.place.world_size - 1, world_size=self.place.world_size)
        return type(self)(self.config, seed=self.seed, place=last).num_micro_batches

    @property
    def micro_batch_sizes(self) -> list[int]:
        """The different numbers of samples that the model is called with in training."""
        own, parts = self.num_own_samples, self.num_micro_batches
        return sorted({len(part(own, number, parts)) for number in range(parts)}, reverse=True)

    @property
    def own_evaluation_samples(self) -> range:
        """The samples of the evaluation set that this rank takes; none where there are fewer than ranks."""
        return part(self.config.data.num_evaluation_samples, self.place.rank, self.place.world_size)

    @property
    def own_evaluation_batch_size(self) -> int:
        """How many of them it takes at a time."""
        size: int = self.config.evaluation_batch_size
        return math.ceil(size / self.place.world_size)

    @property
    def directory(self) -> Path:
        """Where the prepared data lie."""
        return ROOT / str(self.config.data.directory)

    @property
    def resident_bytes(self) -> int:
        """Memory that the data take while training runs, beyond the batches."""
        return 0

    def equal_settings(self) -> list[list[str]]:
        """Return settings that leave the mathematics alone and are worth trying on this machine."""
        return []

    @property
    def num_batches_ahead(self) -> int:
        """How many training batches a loader may hold ready."""
        return 1

    def check_ready(self) -> None:
        """Raise UserError, before the clock starts, when the loader could not work; opens no data."""
        return

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the baseline's model with its initial weights, drawn from the global generator."""

    def load_weights(self, model: nn.Module) -> None:
        """Give the baseline's model its prepared starting weights; none unless a benchmark has some."""
        return

    @abstractmethod
    def loss(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the baseline's loss, a scalar: the mean over the batch."""

    def num_targets(self, batch: Batch) -> int:
        """Return how many targets the loss of a batch is the mean over: samples, if nothing else is said."""
        return batch.num_samples

    @abstractmethod
    def synthetic_batches(self) -> Iterator[Batch]:
        """Yield micro-batches of random values in every shape that training will see: warm-up without data.

        The first has the same place in the order of every rank.
        """

    @abstractmethod
    def synthetic_evaluation_batch(self, num_samples: int) -> Batch:
        """Return random values in the shape and type of a batch of `evaluation_batches`."""

    def warm_up_loader(self) -> None:
        """Run the loader's own GPU kernels in each form that training will see; none unless it has some."""
        return

    @abstractmethod
    def train_batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of the training batches from a step on, without end."""

    @abstractmethod
    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield this rank's part of the evaluation set; the ranks together see every sample once."""

    @abstractmethod
    def bench_batches(self, num_samples: int) -> dict[str, Batch]:
        """Return batches of random values to measure throughput on, by the name of their shape."""

    def bench_parts(self) -> Iterator[Part]:
        """Yield the pieces that are worth timing alone; none unless a benchmark has some."""
        yield from ()

    def kernel_pairs(self) -> Iterator[KernelPair]:
        """Yield the kernels that this machine runs, with their plain forms; none unless there are some."""
        yield from ()

    @abstractmethod
    def work(self, shape: str) -> Work:
        """Return the work of a sample of such a batch."""

    @abstractmethod
    def shape_shares(self) -> dict[str, float]:
        """Return which share of the training samples has which shape of `bench_batches`."""

    def phases(self) -> list[tuple[str, range]]:
        """Return all steps in their order: the name of a shape of `bench_batches`, and how long it lasts."""
        (shape,) = self.shape_shares()
        return [(shape, range(self.config.plan().num_steps))]

    @property
    def loads_once(self) -> bool:
        """Whether the loader keeps what it has read, so that later passes over the data cost less."""
        return False

    def forms(self) -> dict[str, Form]:
        """Return what this machine uses where a part has several forms, by the part ("attention")."""
        return {}

    @property
    def num_readers(self) -> int:
        """How many batches the loader reads at a time."""
        return 1

    def without_loading(self) -> dict[str, list[str]]:
        """Return settings that leave out a part of the loader's work, by its name ("decoding")."""
        return {}

    def other_loaders(self, factor: float) -> dict[str, list[str]]:
        """Return settings that may load so many times faster, by what a person would call them."""
        return {}

    def work_spread(self) -> Spread:
        """Return how much the work differs from sample to sample; not at all if not said."""
        return Spread()

    def projection(self, samples_per_s: dict[str, float], num_devices: int) -> Projection | None:
        """Return what devices of these rates by shape would need, or None where nothing says how long."""
        return None

    @abstractmethod
    def count_correct(self, outputs: Any, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return how many predictions of a batch are right and how many there are, as integer scalars."""

    def other_qualities(self, num_correct: int, num_total: int) -> dict[str, float]:
        """Return other numbers of an evaluation under names of their own; none decides when a run stops."""
        return {}

    def loading_s(self, waited_s: float) -> float | None:
        """Return how long the loader has worked on batches by now; None where it cannot tell.

        `waited_s` is how long the training has waited for it.
        """
        return None

    def starting_doubt(self, quality: float) -> str:
        """Return what is odd about the quality before the first step; nothing where none is known."""
        return ""

    @property
    @abstractmethod
    def num_evaluation_targets(self) -> int:
        """How many predictions the whole evaluation set has: the denominator of the quality."""

    @abstractmethod
    def epoch_number(self, num_samples: int) -> int:
        """Return the `epoch_num` of the log in which the last of so many training samples lies."""

    def epochs_finished(self, num_samples: int) -> float:
        """Return the `epoch_num` of an evaluation after so many training samples."""
        return self.epoch_number(num_samples)

    @abstractmethod
    def fingerprint(self) -> str:
        """Return the fingerprint of the prepared data, from its manifest."""
