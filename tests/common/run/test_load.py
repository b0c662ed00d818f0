"""Load: memory over thousands of steps, and resources that many launches in a row leave behind.

`LAUNCHES=100 tests/run.sh -m slow -rP tests/common/run/test_load.py` makes a hundred, and shows figures.
"""

import os
import re
import threading
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import psutil
import pytest

from common.repository import benchmark_module
from common.training.load import load_config
from tests.runs import BERT, RESNET

NUM_STEPS = 2000
NUM_WINDOWS = 7
MB_PER_1000_STEPS = 10.0  # four tensors of 1 KB kept in each step cost 200: blocks between them stay
MB_IN_ALL = 32
NUM_LAUNCHES = int(os.environ.get("LAUNCHES", "6"))
WITHIN_S = 600
PADDED = (BERT[0], "baseline", *BERT[2:])  # one shape; oneDNN keeps kernels for up to 1,024
LONG = ("max_duration=2000ba", "evaluate_every=200ba", "evaluate_from=200ba")
PIXELS = (
    *("data.train_crop_px=32", "data.evaluation_crop_px=32", "data.evaluation_resize_px=32"),
    "optimizer.learning_rate=0.00001",
)
TINY = ("max_duration=3ba", "evaluate_every=3ba", "evaluate_from=3ba", "schedule.warmup=1ba")
TINY += ("stop_at_target=false",)  # three steps reach none


pytestmark = pytest.mark.usefixtures("prepared_data")


def memory_of(pid):
    """Return the bytes of a process that map no file, with those of tensors in transit to another."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0  # it is gone
    return sum(1024 * int(number) for number in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))


def check_flat(samples, num_steps):
    """Print how the memory of each process changes, and assert that it does not grow from window to window.

    The minimum of each window counts, and the median of the changes between windows: a leak grows in every
    window, an allocator that takes a few megabytes more once does not.
    """
    for pid, sizes in samples.items():
        floors = np.array([window.min() for window in np.array_split(np.array(sizes) / 1e6, NUM_WINDOWS)])
        slope = np.median(np.diff(floors)) * NUM_WINDOWS * 1000 / num_steps
        shown = f"{pid}: {slope:+.3f} MB in 1,000 steps; from {floors[0]:.1f} to {floors[-1]:.1f} MB"
        print(f"{shown} ({len(sizes)} samples)")
        assert slope < MB_PER_1000_STEPS and floors[-1] - floors[0] < MB_IN_ALL, shown


@pytest.mark.on_demand
def test_memory_of_every_process_is_flat_over_2000_steps(place, ttt):
    samples = {}

    def sample():
        place.until_logged('"eval_accuracy"', times=3)  # by then allocators and kernels have what they keep
        followed = [os.getpid(), *(process.pid for process in place.processes())]
        while not place.is_over.wait(0.02):
            for pid in followed:
                if found := memory_of(pid):
                    samples.setdefault(pid, []).append(found)

    done = ttt(place.arguments((*PADDED, *LONG), "--nproc", 2), sample, WITHIN_S)
    assert done.returncode == 1, done.stderr  # the target is out of reach
    (path,) = place.results()
    assert path.read_text().count('"eval_accuracy"') == NUM_STEPS / 200
    assert len(samples) == 3  # the launcher and two ranks
    check_flat(samples, NUM_STEPS - 600)


@pytest.mark.on_demand
def test_memory_of_a_worker_and_its_reader_is_flat_over_2000_batches():
    benchmark, name, *settings = (*RESNET, *PIXELS)
    config = load_config(benchmark, name, size="mini", settings=settings).config
    batches = benchmark_module(benchmark).Benchmark(config, seed=0).train_batches()
    samples = {}
    for number in range(NUM_STEPS):
        next(batches)
        if number >= 400 and number % 10 == 0:
            for pid in (os.getpid(), *(worker.pid for worker in active_children())):
                samples.setdefault(pid, []).append(memory_of(pid))
    batches.close()
    assert len(samples) == 2
    check_flat(samples, NUM_STEPS - 400)


def held():
    """Return files, sockets and threads of this process, and shared memory that no process maps."""
    process = psutil.Process()
    shared, mapped = {str(path) for path in Path("/dev/shm").glob("*")}, []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped.append(maps.read_text())
    left = sorted(
        path for path in shared if os.path.exists(path) and not any(path in text for text in mapped)
    )
    return process.num_fds(), len(process.net_connections()), threading.active_count(), left


@pytest.mark.on_demand
def test_launches_in_a_row_leave_no_file_port_or_process(place, ttt):
    before = None
    for number in range(NUM_LAUNCHES):
        settings = BERT if number % 2 else (*RESNET, *PIXELS)
        options = ("--nproc", 2 if number % 3 else 1)
        done = ttt(place.arguments((*settings, *TINY), *options))  # asserts that no process or file is left
        assert done.returncode == 0, done.stderr
        if number >= 2:
            before = before or held()
            assert held() == before
    assert len(place.results()) == NUM_LAUNCHES
    print(
        f"{NUM_LAUNCHES} launches: {before[0]} open files, {before[1]} sockets, {before[2]} threads all along"
    )
