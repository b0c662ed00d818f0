"""One rank of a measurement by `ttt doctor`: product and copy on its device, then messages between all.

`ttt doctor` starts `python -m common.doctor.probe OUTPUT.json` as each rank; rank 0 writes what all measured.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.machine.load import own_gpu
from common.measure.throughput import COPY_BYTES, GEMM_SIZE, synchronize
from common.training import distributed, ranks

SECONDS = {"cuda": 2.0, "cpu": 0.5}  # of each: long enough for a GPU to become warm
CALLS = {"cuda": 50, "cpu": 2}  # between two looks at the clock
MESSAGE_BYTES = {"cuda": 1 << 28, "cpu": 1 << 24}
NUM_MESSAGES = 10


def main() -> None:
    """Measure, and let rank 0 write."""
    place = ranks.place()
    with distributed.joined(place):
        is_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
        found = measure(device)
        everyone: list[Any] = [found]
        if place.world_size > 1:
            everyone = [None] * place.world_size
            dist.all_gather_object(everyone, found)
        messages = exchange(device, place.world_size) if place.world_size > 1 else {}
        if place.rank == 0:
            found = {"ranks": everyone, "backend": distributed.backend(), **messages}
            Path(sys.argv[1]).write_text(json.dumps(found))


def measure(device: torch.device) -> dict[str, Any]:
    """Return the speed of a bfloat16 product and of a copy, what the product was, and the clock meanwhile."""
    size, num_bytes = GEMM_SIZE[device.type], COPY_BYTES[device.type]
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(size, size, generator=generator).bfloat16().to(device)
    product = torch.empty_like(matrix)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    products_per_s, state = rate(lambda: torch.mm(matrix, matrix, out=product), device)
    copies_per_s, _ = rate(lambda: target.copy_(source), device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "flops_per_s": 2 * size**3 * products_per_s,
        "bytes_per_s": 2 * num_bytes * copies_per_s,
        "checksum": int(product.view(torch.int16).long().sum()),
        **state,
    }


def rate(call: Callable[[], object], device: torch.device) -> tuple[float, dict[str, int]]:
    """Return the calls per second while all ranks do the same, and the state of the device among them."""
    call()
    synchronize(device)
    distributed.barrier()
    num_calls, state, started = 0, {}, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < SECONDS[device.type]:
        for _ in range(CALLS[device.type]):
            call()
        num_calls += CALLS[device.type]
        state = own_gpu()
        synchronize(device)
    elapsed = time.perf_counter() - started
    return num_calls / elapsed, state


def exchange(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Return how fast the ranks sum a message over all of them, and whether the sums were right.

    `bus_bytes_per_s` counts what each rank sends at least, so that any number of ranks compares.
    """
    own = dist.get_rank() + 1
    message = torch.empty(MESSAGE_BYTES[device.type] // 4, device=device)
    times, is_right = [], True
    for _ in range(NUM_MESSAGES):
        message.fill_(own)
        synchronize(device)
        distributed.barrier()
        started = time.perf_counter()
        dist.all_reduce(message)
        synchronize(device)
        times.append(time.perf_counter() - started)
        is_right &= bool((message == num_ranks * (num_ranks + 1) / 2).all())
    fastest = min(distributed.mean(seconds) for seconds in times)
    num_wrong = distributed.total(int(not is_right))[0]
    num_bytes = message.numel() * 4
    return {
        "message_bytes": num_bytes,
        "bus_bytes_per_s": num_bytes * 2 * (num_ranks - 1) / num_ranks / fastest,
        "num_wrong_ranks": num_wrong,
    }


if __name__ == "__main__":
    main()
