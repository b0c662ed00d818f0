"""The computation of a run: model, methods and optimizer, and a training step on one of its ranks."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.config.schema import Plan, RunConfig
from common.machine.load import one_thread
from common.training import distributed, memory
from common.training.benchmark import Benchmark
from common.training.method import Batch, Loss, Method, Progress, apply_hook
from common.training.optim import build_optimizer, build_schedule, unscale
from common.training.registry import build_methods

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by precision
WARM_UP_CALLS = 3  # of each shape: compile, record and replay a captured graph


class Training:
    """Model, methods and optimizer of a configuration, and the step that they take together."""

    def __init__(self, config: RunConfig, benchmark: Benchmark, *, seed: int) -> None:
        self.config, self.benchmark, self.seed = config, benchmark, seed
        self.plan: Plan = config.plan()
        self.methods: list[Method] = build_methods(config)
        self.device, self.rank_info = benchmark.device, benchmark.rank_info
        self.step_s = math.inf  # forward and backward pass of a micro-batch, without loading
        self.num_micro_batches = benchmark.num_micro_batches
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")

    def initialize(self, *, from_scratch: bool = False, warms_up: bool = True) -> None:
        """Build everything and run every shape on random values; nothing here may open the data set.

        With `from_scratch` prepared starting weights are not needed; without `warms_up` no shape is run.
        """
        torch.backends.cudnn.benchmark = True  # convolutions by measured time; no effect on a CPU
        with distributed.raise_on_all_ranks():
            self.build(from_scratch=from_scratch)
        is_static = not any(method.compiles for method in self.methods)
        compression = self.config.gradient_compression
        self.replica = distributed.wrap_ddp(self.model, compression=compression, is_static=is_static)
        if warms_up:
            self.warm_up()

    def build(self, *, from_scratch: bool) -> None:
        """Build model, loss, optimizer and schedule, the same on every rank."""
        torch.manual_seed(self.seed)
        model = self.benchmark.build_model(from_scratch=from_scratch).to(self.device)
        self.model: nn.Module = self.apply_methods("model", model)
        self.loss: Loss = self.apply_methods("loss", self.benchmark.loss)
        optimizer = build_optimizer(self.model, self.config.optimizer)
        self.optimizer: Optimizer = self.apply_methods("optimizer", optimizer)
        self.set_rate = build_schedule(self.optimizer, self.config.schedule, self.plan)
        if self.rank_info.rank:
            torch.manual_seed(self.seed + self.rank_info.rank)  # dropout differs between ranks

    def apply_methods(self, hook: str, value: Any, *more: Any) -> Any:
        """Replace a value by the hook of each method in turn."""
        return reduce(lambda made, method: apply_hook(method, hook, made, *more), self.methods, value)

    def warm_up(self) -> None:
        """Run forward and backward passes of every shape on synthetic batches, and no step of the optimizer.

        Weights, buffers and the CPU's random state are restored.
        After this no shape of training or evaluation is compiled, and no kernel chosen, while the clock runs.
        The largest shape comes first: smaller ones then reuse its memory. Ranks exchange gradients for it
        alone: their numbers of shapes may differ.
        """
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        random_state = torch.get_rng_state()
        shapes = list(self.shapes())
        largest_first = sorted(shapes, key=lambda shape: shape[0].num_elements, reverse=True)
        for number, (batch, step) in enumerate(largest_first):
            self.report_warm_up(number, len(shapes))
            for _ in range(WARM_UP_CALLS):
                before = time.perf_counter()
                with self.explain_out_of_memory():
                    self.clear_gradients()
                    self.add_gradients(batch, step, exchanged=number == 0).item()
                alone_s = time.perf_counter() - before
            if batch is shapes[0][0] and step == shapes[0][1]:  # of the first steps, which a run reports
                self.step_s = alone_s
        self.clear_gradients()
        self.warm_up_evaluation()
        self.model.load_state_dict(state)
        torch.set_rng_state(random_state)

    def report_warm_up(self, number: int, num_shapes: int) -> None:
        """Called before shape `number` (from 0) of a warm-up; does nothing here."""

    @torch.no_grad()
    def warm_up_evaluation(self) -> None:
        """Evaluate synthetic batches of each size that an evaluation has."""
        num_samples = len(self.benchmark.rank_evaluation_samples)
        largest = self.benchmark.rank_evaluation_batch_size
        model = self.evaluation_model()
        for size in sorted({min(largest, num_samples), num_samples % largest} - {0}, reverse=True):
            self.count_correct(model, self.benchmark.synthetic_evaluation_batch(size))
        self.model.train()

    def evaluation_model(self) -> nn.Module:
        model: nn.Module = self.apply_methods("evaluation_model", self.model)
        return model.eval()

    def count_correct(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return how many predictions of a batch are right and how many there are, as integer scalars."""
        size, num_ranks = self.config.evaluation_batch_size, self.rank_info.world_size
        with memory.explain_out_of_memory(
            "evaluation_batch_size", size, num_samples=size, kept="the result", num_ranks=num_ranks
        ):
            batch = self.prepare_batch(batch, None)
            with self.autocast(self.config.evaluation_precision):
                outputs = model(**batch.inputs)
        return self.benchmark.count_correct(outputs, batch.targets)

    def shapes(self) -> Iterator[tuple[Batch, int]]:
        """Yield a synthetic micro-batch of each shape that training will see, and a step that sees it."""
        plan, num_steps = self.plan, self.plan.num_steps
        epochs = {plan.epoch(step): step for step in reversed(range(num_steps))}  # to its first step
        starts = [start for method in self.methods for start in method.phase_starts(num_steps)]
        steps = sorted({*epochs.values(), *(min(start, num_steps - 1) for start in starts)})
        shapes = set()
        for batch in self.benchmark.synthetic_batches():
            for step in steps:
                inputs = self.prepare_batch(batch, self.progress(step)).inputs.values()
                shape = tuple(value.shape for value in inputs if isinstance(value, Tensor))
                if shape not in shapes:
                    shapes.add(shape)
                    yield batch, step

    def progress(self, step: int) -> Progress:
        plan = self.plan
        return Progress(
            step=step,
            num_steps=plan.num_steps,
            epoch=plan.epoch(step),
            num_epochs=plan.num_epochs,
            seed=self.seed,
        )

    def autocast(self, precision: str) -> torch.autocast:
        return autocast(self.device, precision)

    def prepare_batch(self, batch: Batch, progress: Progress | None) -> Batch:
        """Apply each method to a batch, and move it to the device."""
        with use_one_host_thread(self.device):
            return to_device(self.apply_methods("batch", batch, progress), self.device)

    def clear_gradients(self) -> None:
        """Clear the gradients; micro-batches add theirs in memory that no CUDA graph overwrites."""
        if self.num_micro_batches == 1:
            self.optimizer.zero_grad()
            return
        parameters = list(self.model.parameters())
        for parameter in parameters:
            if not parameter.requires_grad:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])

    def add_gradients(
        self, batch: Batch, step: int, *, weight: float | None = None, exchanged: bool = True
    ) -> Tensor:
        """Run forward and backward of a micro-batch, adding to the gradients; returns its loss."""
        batch = self.prepare_batch(batch, self.progress(step))
        with nullcontext() if exchanged else distributed.no_sync(self.replica):
            with self.autocast(self.config.precision):
                outputs = self.replica(**batch.inputs)
            loss = self.loss(outputs, batch.targets)
            loss = loss if weight is None else loss * weight
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def forward_backward(self, batch: Batch, step: int) -> Tensor:
        """Return the loss of this rank's batch, with the gradients in place.

        A loss is a mean over targets, and micro-batches may differ in their number of targets. Each loss is
        weighted by its share, so that the mean over ranks, of gradients and losses, is the global batch's.
        """
        if self.rank_info.world_size == 1 and self.num_micro_batches == 1:
            return self.add_gradients(batch, step)
        parts = batch.parts(self.num_micro_batches)
        with use_one_host_thread(self.device):
            counts = [self.benchmark.num_targets(micro_batch) for micro_batch in parts]
        world_size = self.rank_info.world_size
        scale = world_size / (batch.num_global_targets or world_size * sum(counts))
        total = torch.zeros((), device=self.device)
        passes = update_statistics_once(self.model, parts)
        for number, (micro_batch, count) in enumerate(zip(passes, counts, strict=True), 1):
            is_last = number == len(parts)
            total = total + self.add_gradients(micro_batch, step, weight=count * scale, exchanged=is_last)
        return total

    def explain_out_of_memory(self) -> AbstractContextManager[None]:
        """Return a context in which a failed allocation names the micro-batches that may fit."""
        return memory.explain_out_of_memory(
            "micro_batch_size",
            self.benchmark.micro_batch_sizes[0],
            num_samples=self.benchmark.num_rank_samples,
            kept=f"the global batch of {self.config.global_batch_size:,}",
        )

    def train_step(self, batch: Batch, step: int) -> Tensor:
        def compute() -> Tensor:
            self.clear_gradients()
            loss = self.forward_backward(batch, step)
            unscale(self.scaler, self.optimizer)
            return loss

        self.set_rate(step)
        with self.explain_out_of_memory():
            loss = compute()
            for method in self.methods:
                method.gradients(self.model, self.progress(step), compute)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        for method in self.methods:
            method.after_step(self.model, step + 1)
        return loss


def update_statistics_once(model: nn.Module, parts: Sequence[Batch]) -> Iterator[Batch]:
    """Yield micro-batches, each for one forward pass, and update batch norm's running statistics once.

    The result is the mean of the statistics after each micro-batch alone, as with so many ranks of one
    micro-batch each. Batch norm itself would apply its momentum in every pass: with eight micro-batches eight
    times a step.
    """
    statistics = distributed.running_statistics(model) if len(parts) > 1 else []
    if not statistics:
        yield from parts
        return
    before = [value.clone() for value in statistics]
    total = [torch.zeros_like(value) for value in statistics]
    for part in parts:
        torch._foreach_copy_(statistics, before)
        yield part
        torch._foreach_add_(total, statistics)
    torch._foreach_div_(total, len(parts))
    torch._foreach_copy_(statistics, total)


def use_one_host_thread(device: torch.device) -> AbstractContextManager[None]:
    """Limit operators on the host to one thread where a GPU computes, which waits for the batch they make.

    They take microseconds. In traces on a machine of 16 cores, to wake the threads took 4 to 17 ms for each.
    """
    return nullcontext() if device.type == "cpu" else one_thread()


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Mixed precision: matrix products in 16 bits, parameters in float32; nothing for `fp32`."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the tensors of a batch to the device; a GPU copies pinned ones while the host goes on."""

    def pin(value: Any) -> Any:
        is_pageable = device.type == "cuda" and isinstance(value, Tensor) and value.device.type == "cpu"
        return value.pin_memory() if is_pageable else value

    def move(values: dict[str, Any]) -> dict[str, Any]:
        return {name: pin(value).to(device, non_blocking=True) for name, value in values.items()}

    return replace(batch, inputs=move(batch.inputs), targets=move(batch.targets))
