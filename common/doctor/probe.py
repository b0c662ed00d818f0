"""One rank of a measurement by `ttt doctor`: matmul and copy on its device, then all-reduces of all ranks.

`ttt doctor` starts `python -m common.doctor.probe OUTPUT.json` as each rank; rank 0 writes all figures.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.machine.load import own_gpu
from common.measure.clock import PeakLoad, synchronize, time_call
from common.training import distributed, ranks

SECONDS = {"cuda": 2.0, "cpu": 0.5}  # for matmul and copy each: long enough for a GPU to become warm
CALLS = {"cuda": 50, "cpu": 2}  # between two readings of the clock
MESSAGE_BYTES = {"cuda": 1 << 28, "cpu": 1 << 24}
NUM_MESSAGES = 10


def main() -> None:
    rank_info = ranks.read_rank_info()
    with distributed.process_group(rank_info):
        is_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
        measured: dict[str, Any] = {"ranks": distributed.all_gather(measure(device))}
        measured["backend"] = distributed.backend()
        if rank_info.world_size > 1:
            measured |= time_messages(device, rank_info.world_size)
        if rank_info.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(measured))


def measure(device: torch.device) -> dict[str, Any]:
    """Return the sustained peaks, a checksum of the product, and the state of the device under the matmul."""
    load, states = PeakLoad(device), list[dict[str, int]]()
    peaks = load.measure(partial(sustain, device=device, states=states))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        **asdict(peaks),
        "checksum": int(load.product.view(torch.int16).long().sum()),
        **states[0],
    }


def sustain(call: Callable[[], object], *, device: torch.device, states: list[dict[str, int]]) -> float:
    """Return the seconds of a call that all ranks repeat at once; appends the device's state to `states`."""
    time_call(call, device)
    distributed.barrier()
    num_calls, state, started = 0, {}, time.perf_counter()
    while time.perf_counter() - started < SECONDS[device.type]:
        for _ in range(CALLS[device.type]):
            call()
        num_calls += CALLS[device.type]
        state = own_gpu()
        synchronize(device)
    states.append(state)
    return (time.perf_counter() - started) / num_calls


def time_messages(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Return how fast the ranks sum a message over all of them, and whether the sums were right.

    `bus_bytes_per_s` is the bus bandwidth of NCCL's tests, which compares between numbers of ranks.
    """
    message = torch.empty(MESSAGE_BYTES[device.type] // 4, device=device)
    times, is_right = [], True
    for _ in range(NUM_MESSAGES):
        message.fill_(dist.get_rank() + 1)
        synchronize(device)
        distributed.barrier()
        times.append(time_call(lambda: dist.all_reduce(message), device))
        is_right &= bool((message == num_ranks * (num_ranks + 1) / 2).all())
    fastest = min(distributed.all_reduce_mean(seconds) for seconds in times)
    num_wrong = distributed.all_reduce_sum(int(not is_right))[0]
    num_bytes = message.numel() * 4
    return {
        "message_bytes": num_bytes,
        "bus_bytes_per_s": num_bytes * 2 * (num_ranks - 1) / num_ranks / fastest,
        "num_wrong_ranks": num_wrong,
    }


if __name__ == "__main__":
    main()
