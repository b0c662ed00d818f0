"""Checks of the host: versions, disks, shared memory, open files. Nothing here takes longer than a second."""

import os
import platform
import resource
import shutil
import tempfile
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from common.evidence.disturbance import SPARE
from common.files import FULL, existing_folder
from common.machine import hardware, torch_build
from common.machine import load as machine_load
from common.machine.line import Line, fault, judge, ok
from common.machine.load import Meter
from common.machine.record import judge_speed

MIB, GIB = 2**20, 2**30
OLDEST_TORCH = (2, 11)
LOG_BYTES = MIB  # of a log; the largest published ones have half of it
LEAST_FREE, USUAL_FREE = 16 * MIB, GIB
SHARED_MEMORY = Path("/dev/shm")
WORKERS_SHM = 16 * MIB  # a few batches of size mini
DOCKER_SHM, USUAL_SHM = 64 * MIB, 8 * GIB  # loader processes and NCCL pass their data through it
OPEN_FILES, USUAL_OPEN_FILES = 128, 1024  # of a run without its shards; the usual limit
SLOW_DISK = 200e6  # bytes/s: 2,000 images/s of ImageNet, less than one GPU trains
PRODUCT_SIZE, PRODUCTS_S = 512, 0.1  # of a product on one core: 5 ms
READ_BYTES, CHUNK_BYTES, MOST_FILES = 256 * MIB, 4 * MIB, 1000


def versions() -> Line:
    """Check Python, torch, its CUDA and NCCL, and the driver; advise what to install for it."""
    check, texts = "versions", [f"python {platform.python_version()}"]
    texts += [f"{name} {number}" for name, number in hardware.driver().items()]
    cuda = torch_build.driver_cuda()
    if not torch_build.has_torch():
        return fault(check, f"{', '.join(texts)}, no torch", torch_build.install_line(cuda))
    import torch

    version, build = metadata.version("torch"), torch.version.cuda
    texts[1:1] = [f"torch {version}", f"CUDA {build}" if build else "no CUDA in torch"]
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        texts.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")  # type: ignore[no-untyped-call]
    is_old = tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH
    is_other = not torch_build.is_for_driver(build, cuda)
    texts += [f"torch for CUDA {build} needs a newer driver" if build else "torch for CPUs alone"] * is_other
    advice = torch_build.install_line(cuda)
    return judge(check, ", ".join(texts), advice, is_fault=is_old, is_warning=is_other)


def processors(meter: Meter) -> Line:
    """Check that nobody else computes on our processors, since the meter's start and for a moment more."""
    check, load = "processors", machine_load.look(meter)
    if load is None:
        return ok(check, "this system does not tell who uses them")
    values: dict[str, Any] = asdict(load) | {"factor": load.factor}
    text = f"other programs use {load.others:.1f} of {load.cores:g} cores"
    text += f", the host took {load.steal:.1f}" * (load.steal > SPARE)
    is_busy = load.taken > SPARE
    if is_busy and (names := machine_load.busy_programs()):
        text += f" ({', '.join(names)})"
    advice = f"a run takes {load.factor:.1f} times as long or more: end them, or wait"
    return judge(check, text, advice, is_warning=is_busy, **values)


def core_speed() -> Line:
    """Compare the speed of one core with the best of this machine: a slow clock, heat, stolen time."""
    import torch

    matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
    with machine_load.one_thread():
        product = matrix @ matrix
        num_products, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < PRODUCTS_S:
            torch.mm(matrix, matrix, out=product)
            num_products += 1
    rate = 2 * PRODUCT_SIZE**3 * num_products / elapsed
    check = "speed of a core"
    return judge_speed(ok(check, f"{rate / 1e9:.3g} GFLOP/s", flops_per_s=rate), check, rate)


def space(what: str, directory: Path) -> Line:
    """Check that a folder can be written, by writing as much as a log, and that its disk has room.

    `is_forcible` is False where `--force` would not help.
    """
    check, place = f"room for {what}", existing_folder(directory)
    advice = f"free some, or choose another disk for {what}"
    try:
        with tempfile.TemporaryFile(dir=place) as file:  # has no name, so that nothing can stay behind
            file.write(b"\0" * LOG_BYTES)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        is_full = error.errno in FULL
        advice = advice if is_full else f"choose another folder for {what}"
        return fault(check, f"{directory} cannot be written ({error.strerror})", advice, is_forcible=is_full)
    is_full = free < LEAST_FREE
    amount = f"{free / MIB:.1f} MiB" if is_full else f"{free / GIB:.1f} GiB"
    text = f"{amount} free at {directory}"
    return judge(check, text, advice, is_fault=is_full, is_warning=free < USUAL_FREE, free_bytes=free)


def shared_memory(size: str, directory: Path = SHARED_MEMORY, *, is_needed: bool = False) -> Line:
    """Check the free space in /dev/shm: full-size loaders and NCCL fail with Docker's 64 MiB.

    Size mini needs `WORKERS_SHM`, and only where it `is_needed`: worker processes pass their batches through
    it.
    """
    check = "shared memory"
    if not directory.is_dir():
        return ok(check, f"this system has no {directory}")
    if is_needed:
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                os.posix_fallocate(file.fileno(), 0, WORKERS_SHM)
        except OSError as error:
            what = f"{directory} cannot hold the batches of worker processes ({error.strerror})"
            advice = f"mount -o remount,rw,size=16G {directory}, or --set data.loader=resident"
            return fault(check, what, advice)
    free = shutil.disk_usage(directory).free
    text, is_full_size = f"{free / GIB:.2f} GiB free in {directory}", size == "full"
    return judge(
        check,
        text,
        f"enlarge it: docker run --shm-size 16g, or mount -o remount,size=16G {directory}",
        is_fault=is_full_size and free <= DOCKER_SHM,
        is_warning=free <= DOCKER_SHM or (is_full_size and free < USUAL_SHM),
        free_bytes=free,
    )


def open_files(num_shards: int) -> Line:
    """Check how many files a process may open; a run keeps the shards of its data open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES + num_shards
    check, values = "open files", dict[str, Any](limit=soft, hard_limit=hard, needed=needed)
    if soft == resource.RLIM_INFINITY:
        return ok(check, "no limit", **values)
    wanted = max(needed, USUAL_OPEN_FILES)
    can_raise = hard == resource.RLIM_INFINITY or hard >= wanted
    advice = f"ulimit -n {wanted}" + ("" if can_raise else ", for which the hard limit has to be raised")
    text, is_low = f"{soft:,} allowed, {needed:,} needed", soft < wanted
    return judge(check, text, advice, is_fault=soft < needed, is_warning=is_low, **values)


def read_rate(what: str, directory: Path, manifest: dict[str, Any]) -> Line:
    """Time reading files of prepared data, past the page cache."""
    check, num_read, seconds = f"reading {what}", 0, 0.0
    names = list(manifest["files"])[:MOST_FILES]
    try:
        for name in names:
            with (directory / name).open("rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                started = time.perf_counter()
                while num_read < READ_BYTES and (chunk := file.read(CHUNK_BYTES)):
                    num_read += len(chunk)
                seconds += time.perf_counter() - started
    except OSError as error:
        return fault(check, f"{name}: {error.strerror}", "check the disk, and prepare the data again")
    rate, free = num_read / max(seconds, 1e-9), shutil.disk_usage(directory).free
    text = f"{rate / 1e6:,.0f} MB/s ({num_read / MIB:.1f} MiB read), {free / GIB:.1f} GiB free there"
    is_slow = num_read >= READ_BYTES and rate < SLOW_DISK  # the time of a shorter read says little
    advice = "training may wait for data: copy them to a faster disk"
    return judge(check, text, advice, is_warning=is_slow, bytes_per_s=rate, free_bytes=free)
