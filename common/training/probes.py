"""The questions that the tools (bench, inspect, estimate, tuning, doctor) ask of a benchmark.

The module `probes.py` in a benchmark's folder exports `Probes`, a subclass of the class below. A run needs no
answer but `has_batch_norm`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from common.repository import benchmark_module
from common.training.benchmark import Benchmark
from common.training.method import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least work of training on one sample: floating-point operations, bytes of memory traffic, tokens.

    `num_bytes` is None where memory does not bound the benchmark; `num_tokens` where samples have none.
    """

    flops: float
    num_bytes: float | None = None
    num_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The differences in work between samples: standard deviation and maximum, relative to the mean.

    `is_balanced`: the samples of a batch are distributed so that each rank gets the same work.
    """

    deviation: float = 0.0
    longest: float = 1.0
    is_balanced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a training step or of its loader, to be timed alone; a call takes `num_samples`."""

    name: str
    call: Callable[[], object]
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPair:
    """A kernel and its reference; both return the same tensors, gradients too.

    `tolerance` is the largest difference allowed, as a share of the largest value of the reference.
    """

    name: str
    kernel: Callable[[], Sequence[Tensor]]
    plain: Callable[[], Sequence[Tensor]]
    tolerance: float

    def error(self) -> float:
        """Return the largest difference as a share of the reference's largest value; NaN for any NaN."""
        pairs = [
            (actual.detach().double(), expected.detach().double())
            for actual, expected in zip(self.kernel(), self.plain(), strict=True)
        ]
        shares = [(actual - expected).abs().max() / expected.abs().max() for actual, expected in pairs]
        return float(torch.stack(shares).max())  # max() keeps NaN


class Probes(ABC):
    """The tools' view of a benchmark with one configuration. A shape is a name such as "224 px".

    A list of settings holds KEY=VALUE as `--set` takes them.
    """

    has_batch_norm: ClassVar[bool] = False  # if so, the size of a micro-batch is part of the recipe

    def __init__(self, benchmark: Benchmark) -> None:
        self.benchmark = benchmark

    @property
    def config(self) -> Any:
        return self.benchmark.config

    @property
    def resident_bytes(self) -> int:
        """Memory that the loader's data take while training runs, beyond the batches."""
        return 0

    @property
    def loads_once(self) -> bool:
        """True if the loader keeps what it has read, so that later passes over the data cost less."""
        return False

    @property
    def num_readers(self) -> int:
        """Batches that the loader reads at a time."""
        return 1

    @property
    def num_batches_ahead(self) -> int:
        """The most training batches that the loader holds ready."""
        return 1

    def describe_loading(self) -> list[str]:
        """Describe for a dry run how data are loaded, on this machine and on others; nothing by default."""
        return []

    def equal_settings(self) -> list[list[str]]:
        """Return settings that change the speed but not the results and are worth a trial on this machine."""
        return []

    def without_loading(self) -> dict[str, list[str]]:
        """Return settings that leave out a part of the loader's work, by its name ("decoding")."""
        return {}

    def other_loaders(self, factor: float) -> dict[str, list[str]]:
        """Return settings that may load `factor` times faster, by a short description."""
        return {}

    @abstractmethod
    def bench_batches(self, num_samples: int) -> dict[str, Batch]:
        """Return batches of random values to measure throughput on, by the name of their shape.

        Each is this rank's part of `num_samples`.
        """

    def bench_parts(self) -> Iterator[Part]:
        """Yield the pieces of a step that are worth timing alone."""
        yield from ()

    def kernel_pairs(self) -> Iterator[KernelPair]:
        """Yield the kernels that this machine runs, with their references."""
        yield from ()

    @abstractmethod
    def work(self, shape: str) -> Work:
        """Return the work on one sample in a batch of this shape."""

    def work_spread(self) -> Spread:
        """Return the differences in work between samples; none by default."""
        return Spread()

    @abstractmethod
    def shape_shares(self) -> dict[str, float]:
        """Return the share of the training samples that has each shape of `bench_batches`."""

    def phases(self) -> list[tuple[str, range]]:
        """Return the shapes of training in their order, each with its steps."""
        (shape,) = self.shape_shares()
        return [(shape, range(self.config.plan().num_steps))]

    def loaded_shape(self, step: int) -> str:
        """Return the shape of the batch that the loader yields for a step, before methods change it."""
        (shape,) = self.shape_shares()
        return shape

    def rate(self, shape: str, measured: Mapping[str, float]) -> float | None:
        """Estimate the samples/s of a shape from those of measured shapes; None where that is impossible."""
        return measured.get(shape)


def probes_of(benchmark: Benchmark) -> Probes:
    """Return the probes of a benchmark from the module beside it."""
    probes: Probes = benchmark_module(benchmark.config.benchmark, "probes").Probes(benchmark)
    return probes
