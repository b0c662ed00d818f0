"""The collective operations of a run: start and end of the process group, reductions, gathers, DDP.

With one rank no group is started, and every function here returns at once. NCCL on GPUs, gloo elsewhere.
"""

import os
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.machine import numa
from common.training.ranks import STORE, RankInfo, meeting_point

TIMEOUT = timedelta(minutes=10)  # one rank may compile that much longer than another
WAITING_S = 20.0  # for the other ranks, before a line says so

T = TypeVar("T")


@contextmanager
def process_group(rank_info: RankInfo) -> Iterator[None]:
    """Join the process group, on this rank's GPU if the machine has any; UserError if none is left for it.

    After an error the group is not destroyed, because that could wait for the peers.
    """
    if rank_info.world_size == 1:
        yield
        return
    if file := os.environ.get(STORE):
        store = FileStore(file, rank_info.world_size)  # by its path: a URL would end at a # or ?
        store.set_timeout(TIMEOUT)
    else:
        store = None
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, _ = meeting_point()
        check_host(host)
    on_gpu, count = torch.cuda.is_available(), torch.cuda.device_count()
    if on_gpu:
        if 1 < count <= rank_info.local_rank:  # of 1: srun shows each rank its own GPU alone
            what = f"no GPU is left for rank {rank_info.local_rank} of this machine, which has {count}"
            raise UserError(what)
        torch.cuda.set_device(rank_info.local_rank % count)
        if rank_info.num_local > 1:
            numa.bind_near(torch.cuda.get_device_properties(torch.cuda.current_device()))
    where = "" if store else "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
    try:
        with nullcontext() if store else report_waiting(where):
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=rank_info.rank,
                world_size=rank_info.world_size,
                timeout=TIMEOUT,
                device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
            )
    except dist.DistError as error:
        what = f"the ranks cannot meet here ({str(error).splitlines()[0]})"
        hint = "give all machines the same MASTER_ADDR and MASTER_PORT, of a port that is free"
        raise UserError(what, where=where, hint=hint) from error
    yield
    barrier()  # no rank disconnects while a peer still reads
    dist.destroy_process_group()


@contextmanager
def report_waiting(where: str) -> Iterator[None]:
    """Print a line when the block has taken `WAITING_S`."""
    line = f"  waiting for the other ranks at {where}"
    timer = threading.Timer(WAITING_S, print, [line], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_host(host: str) -> None:
    """Raise UserError for a host name that does not resolve here: torch would retry until `TIMEOUT`."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", "") or error
        hint = "set MASTER_ADDR to the name or address of the first machine"
        raise UserError(f"cannot be looked up here ({reason})", where=f"'{host}'", hint=hint) from error


def backend() -> str:
    """Return the backend: nccl, gloo, or none with a single rank."""
    return str(dist.get_backend()) if dist.is_initialized() else "none"


def comm_device() -> torch.device:
    """The device that tensors must be on for this backend."""
    return torch.device("cuda", torch.cuda.current_device()) if backend() == "nccl" else torch.device("cpu")


def barrier() -> None:
    all_reduce_sum(0)


def all_reduce_sum(*counts: int) -> list[int]:
    if not dist.is_initialized():
        return list(counts)
    summed = torch.tensor(counts, dtype=torch.int64, device=comm_device())
    dist.all_reduce(summed)
    return [int(count) for count in summed.tolist()]


def all_reduce_mean(value: float) -> float:
    if not dist.is_initialized():
        return value
    summed = torch.tensor(value, dtype=torch.float64, device=comm_device())
    dist.all_reduce(summed)
    return float(summed) / dist.get_world_size()


def all_reduce_max(values: Tensor) -> Tensor:
    """Take the elementwise maximum over all ranks, in place; the host does not wait."""
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def broadcast(value: T) -> T:
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, device=comm_device())
    return values[0]


def all_gather(value: T) -> list[T]:
    """Return the value of each rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise the first rank's UserError on every rank; no collective call is allowed inside the block."""
    error: UserError | None = None
    try:
        yield
    except UserError as met:
        error = met
    if first := next(filter(None, all_gather(error)), None):
        raise first


def wrap_ddp(model: nn.Module, *, compression: str, is_static: bool) -> nn.Module:
    """Wrap the model so that its backward pass averages the gradients; a single rank gets it as it is.

    Gradients are all-reduced in buckets during the backward pass, in bfloat16 with `compression` bf16.
    Buffers stay local to each rank: batch norm's statistics are those of its part of the batch, as in the
    published runs. `is_static`: every step computes the same graph, and nothing is compiled.
    """
    if not dist.is_initialized():
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 deprecates broadcast_buffers
        replica = DistributedDataParallel(
            model, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=is_static
        )
    if compression == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        replica.register_comm_hook(None, bf16_compress_hook)
    return replica


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate this rank's gradients without an all-reduce inside the context."""
    if isinstance(model, DistributedDataParallel):
        context: AbstractContextManager[None] = model.no_sync()
        return context
    return nullcontext()


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances of every batch norm, each (num_features,)."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [value for norm in norms for value in (norm.running_mean, norm.running_var) if value is not None]


@torch.no_grad()
def sync_batch_norm(model: nn.Module, of: Literal["mean", "rank_0"]) -> None:
    """Give every rank the same batch norm statistics, in place, so that all evaluate one model.

    They are the `mean` over the ranks, or those of rank 0, as in the published runs.
    """
    local = running_statistics(model)
    if not local or not dist.is_initialized():
        return
    flat = torch.cat([value.double() for value in local])
    if of == "mean":
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
    else:
        dist.broadcast(flat, 0)
    parts = torch.split(flat, [value.numel() for value in local])
    for value, averaged in zip(local, parts, strict=True):
        value.copy_(averaged)
