"""Measures the load of this machine: other programs on its processors, stolen time, slowed GPUs.

OpenMP's threads spin while they wait for each other. One other busy process on their cores makes a step of
size mini tens of times as long, unless a thread less is used: `ttt inspect neighbour` measures it.
"""

import math
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml

from common.evidence.disturbance import SPARE
from common.evidence.records import counted
from common.machine.hardware import ask_nvml

STAT = Path("/proc/stat")
CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # quota and period
QUOTA_V1 = [Path("/sys/fs/cgroup/cpu", f"cpu.cfs_{part}_us") for part in ("quota", "period")]
LOOK_S = 0.3  # so that a hundred ticks a second tell a busy core from an idle one
NAMES_S = 0.15  # to find the busiest program
NUM_LOOKS = 3  # measurements before other programs are expected to stay
BUSY_PERCENT = 10  # of a core, from which on a program is named
NAMED = 3  # programs at most
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")


@dataclass(frozen=True, slots=True)
class Load:
    """The use of the processors, in cores: `others` are programs that are not ours."""

    cores: float  # that we may use
    others: float
    steal: float  # taken by the host of a virtual machine

    @property
    def taken(self) -> float:
        """The cores that were not ours to use."""
        return min(self.others + self.steal, self.cores)

    @property
    def factor(self) -> float:
        """The least factor by which a computation on all cores slows down."""
        return self.cores / max(self.cores - self.taken, 1.0)

    def threads(self, num_ranks: int = 1) -> int:
        """Return how many threads each rank can have such that no other program takes their cores."""
        return max(1, math.floor((self.cores - self.taken + SPARE) / num_ranks))


def usable_cores() -> float:
    """Count the cores that this process may use: its affinity, limited by the quota of its container."""
    cores = float(len(affinity()))
    for paths in ([QUOTA], QUOTA_V1):
        with suppress(OSError, ValueError):  # no cgroup of this version, or no limit ("max")
            quota, period = map(int, " ".join(path.read_text() for path in paths).split()[:2])
            return min(cores, quota / period) if quota > 0 else cores  # -1: no limit
    return cores


@cache
def affinity() -> frozenset[int]:
    """Return the processors that this process might use at its start; numa.py may bind it to fewer later.

    The load of all of them is measured, because other ranks compute on the rest.
    """
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Count the cores that this process may use, two hyperthreads of one as one."""
    try:
        return len({(CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in affinity()})
    except OSError:  # the system does not say
        return len(affinity())


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread in the block: torch starts no other, and wakes none."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def threads_of_rank(num_ranks: int) -> int:
    return max(1, int(usable_cores()) // num_ranks)


class Reading(NamedTuple):
    """The increase of the counters between two readings; each rank has its own."""

    seconds: float
    busy: float  # seconds of all our processors together
    stolen: float
    own_s: float
    switches: int  # involuntary
    cores: float  # that we may use: `processors`, or the quota of a container
    processors: int  # whose seconds `busy` and `stolen` are


class Meter:
    """Reads the counters; each reading tells what has happened since the one before."""

    def __init__(self) -> None:
        self.before = count_seconds()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.before[0] if self.before else 0.0

    def read(self) -> Reading | None:
        """Return the increase since the last reading; None where the system does not say."""
        before, self.before = self.before, count_seconds()
        if before is None or self.before is None:
            return None
        seconds, busy, stolen, own_s, switches = (b - a for a, b in zip(before, self.before, strict=True))
        return Reading(
            max(seconds, 1e-3), busy, stolen, own_s, int(switches), usable_cores(), len(affinity())
        )


def count_seconds() -> tuple[float, float, float, float, int] | None:
    """Read the counters of a meter: time, busy, stolen and own seconds, involuntary switches.

    None where the system does not say how long our processors have been busy.
    """
    try:
        lines = STAT.read_text().splitlines()
    except OSError:
        return None
    names, per_s = {f"cpu{number}" for number in affinity()}, os.sysconf("SC_CLK_TCK")
    busy = stolen = 0
    for line in lines:
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _idle, _iowait, interrupts, soft, steal, *_ = map(int, ticks)
            busy += user + nice + system + interrupts + soft
            stolen += steal
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    return time.monotonic(), busy / per_s, stolen / per_s, own_seconds(), switches


def own_seconds() -> float:
    """Add up the CPU seconds of this process, of its workers and of its ended children."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() + ended.ru_utime + ended.ru_stime
    for worker in multiprocessing.active_children():
        with suppress(psutil.Error):  # it has just ended
            seconds += sum(psutil.Process(worker.pid).cpu_times()[:2])
    return seconds


def load_of(machines: Sequence[Reading], ranks: Sequence[Reading]) -> Load:
    """Calculate the load of some machines from a reading on each, and a reading of each rank on them."""
    seconds = machines[0].seconds
    others = (sum(reading.busy for reading in machines) - sum(reading.own_s for reading in ranks)) / seconds
    beside = sum(reading.processors - reading.cores for reading in machines)  # cores outside our quota
    return Load(
        cores=sum(reading.cores for reading in machines),
        others=max(0.0, others - beside),
        steal=sum(reading.stolen for reading in machines) / seconds,
    )


def read_alone(meter: Meter) -> Load | None:
    reading = meter.read()
    return reading and load_of([reading], [reading])


def look(meter: Meter | None = None) -> Load | None:
    """Measure the load a few times and return the least: a program that ends at once does not disturb a run.

    The first measurement may have begun with the `meter`. One measurement is enough on a quiet machine, and
    where the environment sets the number of threads, because the load then decides nothing.
    """
    meter, least = meter or Meter(), None
    for _ in range(NUM_LOOKS if may_choose_threads() else 1):
        time.sleep(max(0.0, LOOK_S - meter.seconds))
        load = read_alone(meter)
        if load is None:
            return None
        least = load if least is None or load.taken < least.taken else least
        if least.taken <= SPARE:
            break
    return least


def busy_programs() -> list[str]:
    """Name the other programs that use the most CPU time now, without their arguments."""
    list(psutil.process_iter(["cpu_percent"]))  # begins to count
    time.sleep(NAMES_S)
    percents = [
        (program.info["cpu_percent"] or 0.0, program.info["name"])
        for program in psutil.process_iter(["cpu_percent", "name"])
        if program.pid != os.getpid()
    ]
    busy = sorted((entry for entry in percents if entry[0] >= BUSY_PERCENT), reverse=True)
    return [f"{name} {percent:.0f}%" for percent, name in busy[:NAMED]]


def may_choose_threads() -> bool:
    """True unless a person has: torch reads the first two of THREADS, OpenMP obeys the third."""
    return not any(map(os.environ.get, THREADS))


def most_threads(num_ranks: int) -> tuple[int | None, str]:
    """Return the most threads of a rank that each have a core, and why they are fewer than usual, or ''.

    None leaves the number to torch, because the environment sets it.
    """
    if not may_choose_threads():
        return None, ""
    load = look()
    if load is None or load.taken <= SPARE:
        return threads_of_rank(num_ranks), ""
    number = min(load.threads(num_ranks), threads_of_rank(num_ranks))
    return number, (
        f"other programs use {load.taken:.1f} of {load.cores:g} cores: at most "
        f"{counted(number, 'thread')} a rank, another recipe than on a quiet machine"
    )


# GPUs, through NVML.


def gpu_state(bus: str) -> dict[str, int]:
    """Return clock and maximum clock in MHz, NVML's throttle reasons, and the number of other processes.

    `bus` is a PCI address as NVML spells it. A value that the driver does not tell is left out.
    """
    handle = gpu_handle(bus)
    if handle is None:
        return {}
    processes = ask_nvml(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    answers = {
        "clock_mhz": ask_nvml(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "max_clock_mhz": ask_nvml(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "reasons": ask_nvml(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        "other_processes": None if processes is None else max(0, len(processes) - 1),
    }
    return {name: value for name, value in answers.items() if value is not None}


@cache
def gpu_handle(bus: str) -> Any:
    """Ask NVML once for the handle of a GPU; None without a driver or such a GPU."""
    ask_nvml(pynvml.nvmlInit)
    return ask_nvml(pynvml.nvmlDeviceGetHandleByPciBusId, bus)


def own_gpu() -> dict[str, int]:
    """Return the state of the GPU that this process computes on; empty on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return gpu_state(f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
