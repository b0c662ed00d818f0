"""The loader of a run as `ttt inspect profile` reads it: within one phase, on storage that may be slow."""

import time

from common.training.benchmark import Benchmark
from common.training.method import Batch
from common.training.probes import probes_of

PREFETCHED_IN_MEMORY = 4  # the most batches that a loader with all data in memory prefetches
RATE_S, MIN_BATCHES = 1.0, 3
PASS_S = 30.0  # the most that a first pass over the data may take, for a loader that keeps what it reads


class Feed:
    """A loader's batches in the steps of one phase, over and over.

    A loader that keeps what it reads makes a pass over the data first, if that is short enough. `delay_s` is
    the time that a reader waits for a batch: several readers share it.
    """

    def __init__(self, benchmark: Benchmark, steps: range, delay_s: float = 0.0) -> None:
        self.benchmark, self.probes, self.steps = benchmark, probes_of(benchmark), steps
        self.delay_s = delay_s / self.probes.num_readers
        self.first_pass_per_s: float | None = None
        self.open()

    def open(self) -> None:
        per_epoch: int = self.benchmark.config.steps_per_epoch
        makes_pass = self.probes.loads_once and per_epoch < self.steps.stop
        self.keeps, self.due = False, 0.0
        self.start(max(0, self.steps.start - per_epoch) if makes_pass else self.steps.start)
        if makes_pass:
            self.first_pass_per_s, self.keeps = self.pull(PASS_S, per_epoch)
            if self.position < self.steps.start:  # too long a pass: stay in the first one
                self.close()
                self.start(self.steps.start)

    def start(self, step: int) -> None:
        self.position, self.batches = step, self.benchmark.train_batches(step)

    def __next__(self) -> Batch:
        batch = next(self.batches)
        self.position += 1
        if self.delay_s and not self.keeps:
            time.sleep(max(0.0, self.due - time.perf_counter()))
            self.due = time.perf_counter() + self.delay_s
        return batch

    def skip_prefetched(self, num_batches: int) -> None:
        """Drop the batches that were prefetched during a pause, but leave `num_batches` of the phase."""
        if self.position + num_batches > self.steps.stop:
            self.close()
            self.open()
        left, num_prefetched = self.steps.stop - self.position - num_batches, PREFETCHED_IN_MEMORY
        if not self.probes.loads_once:
            num_prefetched = 2 * self.probes.num_readers + 1  # at most: a DataLoader's workers have two each
        for _ in range(min(num_prefetched, left)):
            next(self.batches)
            self.position += 1

    def pull(self, seconds: float, most: int) -> tuple[float, bool]:
        size: int = self.benchmark.config.global_batch_size
        next(self)  # starts threads and processes
        count, before = 0, time.perf_counter()
        while count + 1 < most and (count < MIN_BATCHES or time.perf_counter() - before < seconds):
            next(self)
            count += 1
        return count * size / (time.perf_counter() - before), count + 1 == most

    def measure_rate(self) -> float:
        """Return the samples/s of the loader while nothing trains."""
        self.skip_prefetched(MIN_BATCHES + 1)
        most = max(MIN_BATCHES + 1, (self.steps.stop - self.position) // 3)  # leaves some for the turns
        return self.pull(RATE_S, most)[0]

    def close(self) -> None:
        self.batches.close()  # type: ignore[attr-defined]
