"""Speed-ups for a model, a loader and an optimizer of one's own; all leave the mathematics alone."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from common.errors import UserError
from common.methods.channels_last import apply_channels_last
from common.methods.compile import missing_compiler
from common.study.tuning.subjects import Steps
from common.study.tuning.traces import Trace, take_trace
from common.study.tuning.tune import Change, Refused, Search, State, write_table

NUM_WORKERS = (2, 4, 8)
NUM_STEPS = 4  # of a turn, and of a comparison


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The model (the same object), its optimizer and loader, with the kept changes; `report` is a table."""

    model: nn.Module
    optimizer: Optimizer
    loader: "Loader"
    kept: tuple[str, ...] = ()
    report: str = ""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Yields the batches of a loader on the device of the model, images in its layout."""

    batches: Iterable[Any]
    device: torch.device
    is_channels_last: bool
    dtype: torch.dtype | None = None  # of inputs of a float type; None: theirs

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for inputs, targets in self.batches:
            yield map_tensors(inputs, self.move), map_tensors(targets, self.move)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def move(self, value: Tensor) -> Tensor:
        value = value.to(self.device, self.dtype if value.is_floating_point() else None, non_blocking=True)
        is_image = self.is_channels_last and value.ndim == 4
        return value.contiguous(memory_format=torch.channels_last) if is_image else value


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = (map_tensors(item, function) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def optimize(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Any], Optimizer],
    *,
    seconds: float = 60.0,
) -> Tuned:
    """Return model, optimizer and loader with the speed-ups that gain on this machine.

    `loader` yields (inputs, targets), `loss` takes (model(inputs), targets), `optimizer` takes parameters.
    The search works on copies; the model is changed in the end, its weights are not. Raises UserError for a
    loader that yields no pairs, or that can be read only once, which the search would use up; and the error
    of the first step where the unchanged model cannot be trained so.
    """
    bench = ModelBench(model=model, loader=loader, loss=loss, make_optimizer=optimizer)
    with torch.random.fork_rng(), restore_generators(loader):
        if iter(loader) is loader:
            hint = "pass what it iterates over"
            raise UserError("this loader can be read only once", where="optimize", hint=hint)
        bench.take_first_step()
        search = Search(bench, seconds=seconds, report=lambda tried: None).run(bench.changes())
    return replace(bench.assemble(search.state, model), kept=search.state, report=write_table(search))


@dataclass(frozen=True, kw_only=True)
class ModelBench:
    """Builds copies of a person's model to be timed and compared; a state is names of changes."""

    model: nn.Module
    loader: Iterable[Any]
    loss: Callable[[Any, Any], Tensor]
    make_optimizer: Callable[[Any], Optimizer]

    def changes(self) -> list[Change]:
        """Return the changes, likely gains first: the time may not suffice for all."""
        lacks = missing_compiler()
        workers = [f"loader_workers_{number}" for number in NUM_WORKERS]
        return [
            *(Change(name=name, adds=(name,), is_of_loader=True) for name in workers),
            Change(name="compile", adds=("compile",), missing=f"not available: {lacks}" if lacks else ""),
            Change(name="channels_last", adds=("channels_last",)),
            Change(name="fused_optimizer", adds=("fused_optimizer",)),
        ]

    def assemble(self, state: State, model: nn.Module, dtype: torch.dtype | None = None) -> Tuned:
        """Return the model with the changes of a state, its optimizer and its loader."""
        if "channels_last" in state and apply_channels_last(model) == 0:
            raise UserError("no 2-d convolution in this model")
        optimizer = self.make_optimizer(model.parameters())
        if "fused_optimizer" in state:
            fuse(optimizer)
        if "compile" in state:
            model.compile()
        numbers = [int(name.rpartition("_")[2]) for name in state if name.startswith("loader_workers_")]
        batches = with_workers(self.loader, numbers[-1]) if numbers else self.loader
        loader = Loader(
            batches=batches,
            device=next(model.parameters()).device,
            is_channels_last="channels_last" in state,
            dtype=dtype,
        )
        return Tuned(model=model, optimizer=optimizer, loader=loader)

    def copy_model(self, state: State, dtype: torch.dtype | None = None) -> Tuned:
        return self.assemble(state, copy.deepcopy(self.model).to(dtype).train(), dtype)

    def build(self, state: State, *, has_loader: bool) -> Steps:
        """Return a copy that takes turns on the first batches, or on those of its loader."""
        tuned = self.copy_model(state)
        loader = tuned.loader.batches
        num_ahead = getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 2)
        batches = tuned.loader if has_loader else list(itertools.islice(tuned.loader, NUM_STEPS))
        return Steps(
            step=lambda number, batch: take_step(tuned, self.loss, batch),
            batches=itertools.chain.from_iterable(itertools.repeat(batches)),
            num_steps=NUM_STEPS,
            num_prefetched=num_ahead if has_loader else 0,
            device=tuned.loader.device,
        )

    @cached_property
    def read(self) -> list[Any]:
        return first_batches(self.loader)

    def take_first_step(self) -> None:
        """Train an unchanged copy for one step. Raises its error, or UserError where batches are no pairs."""
        if not all(isinstance(batch, tuple | list) and len(batch) == 2 for batch in self.read or [None]):
            hint = "wrap it, so that it yields them"
            raise UserError("the loader does not yield pairs (inputs, targets)", where="optimize", hint=hint)
        tuned = self.copy_model(())
        take_step(tuned, self.loss, next(iter(replace(tuned.loader, batches=self.read))))

    def trace(self, state: State, *, is_exact: bool) -> Trace:
        """Return the first steps; raises Refused where worker processes draw other batches."""
        kind = next(self.model.parameters())
        exact = torch.float32 if kind.is_cuda else torch.float64
        tuned = self.copy_model(state, exact if is_exact else None)
        loader = tuned.loader.batches
        if loader is not self.loader and not equal_tensors(first_batches(loader), self.read):
            raise Refused("the data set draws at random: not compared")
        batches = list(replace(tuned.loader, batches=copy.deepcopy(self.read)))
        torch.manual_seed(0)
        return take_trace(
            tuned.model,
            lambda number: float(take_step(tuned, self.loss, batches[number % len(batches)])),
            NUM_STEPS,
            exact if is_exact else kind.dtype,
        )


def take_step(tuned: Tuned, loss: Callable[[Any, Any], Tensor], batch: tuple[Any, Any]) -> Tensor:
    inputs, targets = batch
    tuned.optimizer.zero_grad(set_to_none=True)
    value = loss(tuned.model(inputs), targets)
    value.backward()  # type: ignore[no-untyped-call]
    tuned.optimizer.step()
    return value.detach()


def fuse(optimizer: Optimizer) -> None:
    """Let an optimizer update all parameters in one pass, in place, before its first step."""
    if "fused" not in optimizer.defaults:
        raise UserError("this optimizer has no fused form")
    if optimizer.defaults["fused"]:
        raise UserError("on already")
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings |= {"fused": True, "foreach": None}


def with_workers(loader: Iterable[Any], num_workers: int) -> DataLoader[Any]:
    """Return the same DataLoader with more worker processes. Raises UserError where that cannot be."""
    if not isinstance(loader, DataLoader):
        raise UserError("the loader is no torch DataLoader")
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise UserError("its data set has no index")
    if loader.num_workers >= num_workers:
        raise UserError(f"it has {loader.num_workers} already")
    return DataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
        num_workers=num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=True,
        in_order=loader.in_order,
    )


@contextmanager
def restore_generators(loader: Iterable[Any]) -> Iterator[None]:
    """Put the generators of a loader and of its sampler back where they were."""
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    with ExitStack() as restored:
        for holder in (loader, *samplers, getattr(samplers[1], "sampler", None)):
            if isinstance(generator := getattr(holder, "generator", None), Generator):
                restored.callback(generator.set_state, generator.get_state())
        yield


def first_batches(loader: Iterable[Any]) -> list[Any]:
    """Read the first batches, the same ones each time."""
    torch.manual_seed(0)
    with restore_generators(loader):
        return list(itertools.islice(loader, NUM_STEPS))


def equal_tensors(one: Any, other: Any) -> bool:
    """Compare the tensors of nested tuples, lists and mappings."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return all(equal_tensors(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return all(map(equal_tensors, one, other))
    return bool(one == other)
