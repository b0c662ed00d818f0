"""The time of a training step on more devices, calculated from that of one.

The formula and its assumptions are FORMULA below; common/study/predict compares it with published results.
"""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.arguments import positive_number
from common.config.duration import BACKWARD
from common.errors import UserError, nearest

FORMULA = (
    "step = compute + exposed",
    "exposed = exchange - min(overlap x exchange, backward): the part that the backward pass does not hide",
    "compute = fixed + batch per device x seconds per sample x imbalance",
    "exchange = 2 (n-1)/n x gradient bytes / (link share x slowest link) + buckets x hops x latency",
    "buckets = gradient bytes / 25 MB, hops = 2 log2(machines), at least 2; each rounded up",
    "imbalance = 1 + deviation x sqrt(2 ln n / batch per device), at most longest / mean sample",
    "imbalance of balanced ranks = 1 + (longest / mean sample - 1) / (batch per device)^2",
    "minutes = (steps to target x step + evaluations + start-up) / 60",
)
INSIDE = {  # GB/s that one device can send to its peers of the same machine
    "nvlink3": 300.0,  # A100: 600 GB/s in both directions (accelerator_interconnect of published systems)
    "nvlink4": 450.0,  # H100, H200: 900 GB/s (the same)
    "pcie4": 32.0,  # 16 lanes of 16 GT/s
    "pcie5": 64.0,
}
NETWORK = {  # GB/s of one link between machines
    "hdr": 25.0,  # InfiniBand, 200 Gb/s
    "ndr": 50.0,  # 400 Gb/s
    "100gbe": 12.5,  # Ethernet, 100 Gb/s
}
LATENCY_US, LINK_SHARE, OVERLAP = 5.0, 0.8, 0.9  # assumed, not measured; the same for the published check
BUCKET_BYTES = 25e6  # of DistributedDataParallel; the published code has others
# bytes per parameter: each float32 that is read or written; for fused_lamb as in Apex's kernels
OPTIMIZER_BYTES = {"adamw": 28, "sgd": 20, "decoupled_sgd": 20, "lars": 48, "lamb": 68, "fused_lamb": 52}


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links that carry gradients, in GB/s: `inside` of a device, `network` of a whole machine.

    `share` of these rates is reached, `overlap` is the share of an exchange that the backward pass can hide.
    """

    inside: float
    network: float
    latency_us: float = LATENCY_US
    share: float = LINK_SHARE
    overlap: float = OVERLAP


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a device: `fixed_s` of every micro-batch, `sample_s` of each of its samples.

    `deviation` and `longest` of a sample's time are relative to its mean: ranks wait for the one with most.
    """

    gradient_bytes: float
    sample_s: float
    fixed_s: float = 0.0
    micro_batch: int | None = None
    deviation: float = 0.0
    longest: float = 1.0
    is_balanced: bool = False  # the sampler assigns samples to ranks by their work


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of `devices` on `machines`; the backward pass hides all but `exposed_s` of the exchange."""

    machines: int
    devices: int
    batch: int  # of all devices
    compute_s: float
    exchange_s: float
    exposed_s: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.seconds


def step(work: Work, links: Links, *, machines: int, per_machine: int, batch: int) -> Step:
    """Return the step of a global batch; the device with the largest share sets the pace."""
    devices = machines * per_machine
    share = math.ceil(batch / devices)
    parts = math.ceil(share / work.micro_batch) if work.micro_batch else 1
    compute = parts * work.fixed_s + share * work.sample_s * imbalance(work, share, devices)
    exchange = exchange_s(work.gradient_bytes, links, machines, per_machine)
    exposed = exposed_s(exchange, compute, links)
    return Step(
        machines=machines,
        devices=devices,
        batch=batch,
        compute_s=compute,
        exchange_s=exchange,
        exposed_s=exposed,
    )


def imbalance(work: Work, batch: float, devices: int) -> float:
    """Return the expected time of the device with most work over the mean time, for random batches.

    The formula for balanced ranks lies above the mean of simulated batches of Wikipedia's lengths.
    """
    if work.is_balanced and devices > 1:
        return 1 + (work.longest - 1) / batch**2
    return min(work.longest, 1 + work.deviation * math.sqrt(2 * math.log(devices) / batch))


def exchange_s(num_bytes: float, links: Links, machines: int, per_machine: int) -> float:
    """Return the seconds of one all-reduce: a ring over all devices, as fast as its slowest link."""
    devices = machines * per_machine
    if devices == 1:
        return 0.0
    slowest = min(links.inside, links.network) if machines > 1 else links.inside
    moved = 2 * (devices - 1) / devices * num_bytes / (links.share * slowest * 1e9)
    hops = 2 * math.ceil(math.log2(max(machines, 2)))
    return moved + math.ceil(num_bytes / BUCKET_BYTES) * hops * links.latency_us * 1e-6


def exposed_s(exchange: float, compute: float, links: Links) -> float:
    """Return the part of an exchange that the backward pass does not hide."""
    return exchange - min(links.overlap * exchange, BACKWARD * compute)


def fit_work(work: Work, points: Sequence[tuple[float, float]], floor_s: float) -> Work:
    """Return work with times fitted to measured points (batch of a device, seconds of compute).

    Two batches that differ by a factor of two show the fixed time; otherwise it is `floor_s`.
    """
    (small, small_s), (large, large_s) = min(points), max(points)
    if large >= 2 * small:
        sample_s = (large_s - small_s) / (large - small)
        fixed_s = small_s - sample_s * small
        if fixed_s > floor_s:
            return replace(work, fixed_s=fixed_s, sample_s=sample_s)
    sample_s = statistics.mean((seconds - floor_s) / batch for batch, seconds in points)
    if sample_s <= 0:
        raise UserError("the optimizer's memory traffic alone takes longer than the measured step")
    return replace(work, fixed_s=floor_s, sample_s=sample_s)


def choose_inside(text: str) -> float:
    """Return GB/s of `nvlink4`, or of a number. Raises UserError."""
    rate = INSIDE.get(text.lower()) or positive_number(text)
    if rate is None:
        raise UserError(f"unknown link '{text}'", where="--inside", hint=f"GB/s, or {nearest(text, INSIDE)}")
    return rate


def choose_network(text: str) -> float:
    """Return GB/s of a machine with `8xhdr`, or of a number. Raises UserError."""
    match = re.fullmatch(r"([1-9]\d?)x(\w+)", text.lower())
    rate = int(match[1]) * NETWORK[match[2]] if match and match[2] in NETWORK else positive_number(text)
    if rate is None:
        hint = f"GB/s of a machine, or links such as 8xhdr; known: {', '.join(NETWORK)}"
        raise UserError(f"unknown network '{text}'", where="--network", hint=hint)
    return rate
