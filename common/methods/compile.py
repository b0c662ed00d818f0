"""Compile.

What. Passes the model to `torch.compile`, one static graph for each input shape; mode `reduce-overhead` also
captures forward and backward as CUDA graphs. All shapes are compiled in initialisation, on synthetic batches.
Effect on quality. None except rounding: fused operations keep intermediate results in float32.
Effect on time. Fuses batch norm, ReLU and addition, or bias and GELU, into fewer passes over memory; CUDA
graphs remove the cost of launching kernels, which is largest for small images and short sequences.
Relieves. Forward pass, backward pass: memory traffic and the host.
When not. Shapes that change from step to step; more than about eight of them; CPUs without a C++ compiler.
Use. With the model: `compile_model(model)`.
Source. https://docs.pytorch.org/docs/stable/generated/torch.compile.html.
Unlike Composer. Composer 0.7 has no such method.
"""

import os
import shutil
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from common.config.schema import Strict
from common.errors import UserError
from common.training.method import Method

MAX_SHAPES = 64  # of all models of a process; torch's own limit is 8, beyond which it silently runs eager


def compile_options(mode: str, backend: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of torch.compile: static shapes, and an error beyond `MAX_SHAPES` of them.

    `options` are added to those of the mode.
    """
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if backend != "inductor":
        return {"dynamic": False, "backend": backend}
    options = torch._inductor.list_mode_options(mode) | (options or {})
    try:
        torch.compile(nn.Identity(), options=options)  # checks them; nothing is compiled before a call
    except RuntimeError as error:
        what = str(error).partition(", known options")[0]
        raise UserError(what, where="options of torch.compile") from error
    return {"dynamic": False, "options": options}


def compile_model(
    model: nn.Module,
    mode: str = "reduce-overhead",
    backend: str = "inductor",
    options: dict[str, Any] | None = None,
) -> None:
    """Compile the forward and backward pass of a model in place, each input shape on its own.

    Under DDP torch cuts the graph where buckets end, so that their all-reduce overlaps the backward pass.
    """
    model.compile(**compile_options(mode, backend, options))


def remove_batch_counters(model: nn.Module) -> None:
    """Remove batch norm's counters of batches in place: a fixed momentum never reads them.

    A counter costs a kernel launch a step, and one more where it is copied. A `state_dict` loads with and
    without counters.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is not None:
            module.num_batches_tracked = None
            module.register_load_state_dict_post_hook(expect_no_counter)  # type: ignore[no-untyped-call]


def expect_no_counter(norm: nn.Module, keys: Any) -> None:
    """Ignore counters in a `state_dict`; torch itself adds one to a `state_dict` without a version."""
    keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if "num_batches_tracked" not in key]


def missing_compiler() -> str:
    """Return what torch.compile lacks on this machine, an empty string if nothing."""
    names = (os.environ.get("CXX", "g++"), "clang++")
    return "" if any(shutil.which(name) for name in names) else "no C++ compiler"


class Eager(nn.Module):
    """Calls a model without its compiled form."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model.forward(*inputs, **named)


class Compile(Method):
    """Methods that change the model come before it."""

    compiles = True
    is_exact = True  # but not the random numbers of dropout, which inductor draws itself: -O1 then refuses it

    class Config(Strict):
        mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"] = Field(
            default="reduce-overhead", description="of torch.compile; reduce-overhead captures CUDA graphs"
        )
        backend: Literal["inductor", "aot_eager"] = Field(
            default="inductor", description="of torch.compile; aot_eager needs no compiler and gains nothing"
        )
        options: dict[str, bool | int | str] = Field(
            default={}, description="of Inductor, beside those of the mode, such as combo_kernels"
        )
        counts_batches: bool = Field(
            default=True, description="false removes batch norm's counters of batches, which nothing reads"
        )

    def model(self, model: nn.Module) -> nn.Module:
        if not self.settings.counts_batches:
            remove_batch_counters(model)
        compile_model(model, self.settings.mode, self.settings.backend, self.settings.options)
        return model

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """Return the eager model: other shapes would be compiled while the clock runs."""
        return Eager(model)
