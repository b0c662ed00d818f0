"""The one timer of training steps, used by bench, profile, ablate, tune, doctor and inspect.

A GPU runs behind the host: a call that has returned may have only queued its kernels, so a time begins and
ends with the device idle. The speed of a machine drifts with its clocks, its heat and other programs, so
trials are interleaved, one of each in every round, and compared by medians or paired ratios.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from common.machine.hardware import bf16_instructions

WARM_UP_CALLS = 2  # compile, record and replay captured graphs, choose kernels
GEMM_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 27}
PEAK_REPEATS = 10

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Wait until the device has run everything that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_call(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, to its end on the device."""
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def time_launching(step: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median seconds of the host for one step from an idle device.

    The host waits once about 1,000 launches are queued on a GPU: several steps would show the GPU's time.
    """
    host_s = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        step()
        host_s.append(time.perf_counter() - started)
    synchronize(device)
    return statistics.median(host_s)


def warm_up(function: Callable[[], object]) -> None:
    """Call a function as often as it takes until later calls are alike."""
    for _ in range(WARM_UP_CALLS):
        function()


def interleave(
    trials: Mapping[K, Callable[[], T]],
    *,
    rounds: int = 1,
    seconds: float = 0.0,
    rotates: bool = False,
    report: Callable[[int], None] = lambda round: None,
) -> dict[K, list[T]]:
    """Return the results of trials, each run once a round, for at least so many rounds and `seconds`.

    With `rotates` every round begins with the next trial, so that none always follows the same other one.
    `report` is given the number of each finished round, from 1.
    """
    results: dict[K, list[T]] = {name: [] for name in trials}
    names, ends = list(trials), time.perf_counter() + seconds
    for number in itertools.count():
        if not names or (number >= rounds and time.perf_counter() >= ends):
            break
        first = number % len(names) if rotates else 0
        for name in names[first:] + names[:first]:
            results[name].append(trials[name]())
        report(number + 1)
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The highest rates of this device that were measured: a matmul, and a copy (read and write)."""

    dtype: str  # of the matmul
    flops_per_s: float
    bytes_per_s: float


class PeakLoad:
    """The matmul and the copy that measure a device's peaks, on the same numbers on every device.

    A processor without instructions for bfloat16 emulates them, and multiplies float32 faster.
    """

    def __init__(self, device: torch.device) -> None:
        size, num_bytes = GEMM_SIZE[device.type], COPY_BYTES[device.type]
        numbers = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
        has_bf16 = device.type == "cuda" or bf16_instructions()
        self.matrix = numbers.to(device, torch.bfloat16 if has_bf16 else torch.float32)
        self.product = torch.empty_like(self.matrix)
        self.source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)

    def multiply(self) -> None:
        torch.mm(self.matrix, self.matrix, out=self.product)

    def copy(self) -> None:
        self.target.copy_(self.source)

    def measure(self, time_load: Callable[[Callable[[], object]], float]) -> Peaks:
        """Return the peaks, where `time_load` returns the seconds of one call of either."""
        return Peaks(
            dtype=str(self.matrix.dtype).removeprefix("torch."),
            flops_per_s=2 * len(self.matrix) ** 3 / time_load(self.multiply),
            bytes_per_s=2 * len(self.source) / time_load(self.copy),
        )


def measure_peaks(device: torch.device) -> Peaks:
    """Return the peaks of a device, by the fastest of several calls."""
    return PeakLoad(device).measure(lambda load: min(time_call(load, device) for _ in range(PEAK_REPEATS)))
