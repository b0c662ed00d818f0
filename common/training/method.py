"""The Method protocol: one speed-up is one file, a plain function and the lines that hook it into the loop.

A method lives in `<benchmark>/methods/<name>.py` or `common/methods/<name>.py`; its class carries the name of
the file in CamelCase and its settings are the class's `Config`.
"""

import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.config.schema import RunConfig, Strict
from common.errors import UserError
from common.files import hash_file
from common.training.ranks import part

GRADUAL_PARTS = 4  # of a phase in which the work of a step changes gradually

Loss = Callable[[Any, dict[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The inputs of the model, the targets of the loss, and their number of samples.

    `num_global_targets` is the number of targets in the batches of all ranks together; None where it does not
    matter. In a loader's batch the samples are the first dimension of every tensor. `loading_s` is the time
    that the loader worked on it; None if unknown.
    """

    inputs: dict[str, Any]
    targets: dict[str, Tensor]
    num_samples: int
    num_global_targets: int | None = None
    loading_s: float | None = None

    @property
    def num_elements(self) -> int:
        return sum(value.numel() for value in self.inputs.values() if isinstance(value, Tensor))

    def parts(self, num_parts: int) -> "list[Batch]":
        """Split a batch of a loader into micro-batches, as equal as possible."""
        ranges = [part(self.num_samples, number, num_parts) for number in range(num_parts)]
        return [
            replace(
                self,
                inputs={name: value[samples.start : samples.stop] for name, value in self.inputs.items()},
                targets={name: value[samples.start : samples.stop] for name, value in self.targets.items()},
                num_samples=len(samples),
            )
            for samples in ranges
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The position of a training step: epoch of the recipe (from 0), whatever the budget; seed of the run."""

    step: int
    num_steps: int
    epoch: int
    num_epochs: int
    seed: int = 0

    def randomness(self, name: str) -> AbstractContextManager[None]:
        """Make torch's random numbers on the CPU a function of (seed, step, name) alone inside the block.

        So runs repeat and resume, and ranks and micro-batches draw alike.
        """
        return seeded(self.seed, self.step, zlib.crc32(name.encode()))


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Make torch's random numbers on the CPU a function of `numbers` alone inside the block."""
    (state,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(state) >> 1)
        yield


def replace_layers(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace each layer by the one that `replacement` returns, unless that is None; returns their number."""
    num_replaced = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if (other := replacement(layer)) is not None:
                setattr(parent, name, other)
                num_replaced += 1
    return num_replaced


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of x in a matmul under autocast, which leaves float64 as it is.

    x may be float32, as from LayerNorm on GPUs.
    """
    device, is_double = x.device.type, x.dtype == torch.float64
    is_cast = torch.is_autocast_enabled(device) and not is_double
    return torch.get_autocast_dtype(device) if is_cast else x.dtype


def split_gradual(first: int, last: int) -> list[int]:
    """Return the first steps of equal parts of a phase in which work changes gradually, and its end."""
    return [first + (last - first) * number // GRADUAL_PARTS for number in range(GRADUAL_PARTS + 1)]


class Method:
    """Every hook does nothing unless a method overrides it.

    Methods are called in the order in which the configuration, `config`, lists them.
    """

    compiles: ClassVar[bool] = False  # whether it hands the model to torch.compile
    # Training stays equal up to rounding, but for trust ratios and muon's steps; a test shows it.
    is_exact: ClassVar[bool] = False
    is_of_reference: ClassVar[bool] = False  # part of the MLPerf reference, which the closed division allows
    is_approved: ClassVar[bool] = False  # another numerical format that the closed division approves
    is_process_wide: ClassVar[bool] = False  # it acts on the process, and so on every model in it
    is_configured_first: ClassVar[bool] = False  # it sets lengths or sizes that other methods check
    config: RunConfig

    class Config(Strict):
        """No settings."""

    def __init__(self, name: str, settings: Any) -> None:
        self.name, self.settings = name, settings

    @property
    def digest(self) -> str:
        """The first 12 digits of the SHA-256 of its file."""
        return hash_file(Path(inspect.getfile(type(self))))[:12]

    def refuse(self, what: str, *, setting: str = "", hint: str = "") -> NoReturn:
        """Raise UserError that names this method, or one of its settings, as the place."""
        raise UserError(what, where=f"methods.{self.name}" + (f".{setting}" if setting else ""), hint=hint)

    def dropped_from(self, config: RunConfig) -> RunConfig:
        """Return the configuration without this method, for `configure` where it would do nothing."""
        others = {name: settings for name, settings in config.methods.items() if name != self.name}
        return config.replaced(methods=others)

    def configure(self, config: RunConfig) -> RunConfig:
        """Return the configuration this method wants; what it changed is printed and logged.

        Keep nothing on `self`: another object of the class trains, and reads its `self.config`.
        """
        return config

    def model(self, model: nn.Module) -> nn.Module:
        """Operate on the model once, before the optimizer exists."""
        return model

    def loss(self, loss: Loss) -> Loss:
        """Return the loss to use: (outputs, targets) -> scalar."""
        return loss

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to use; the log names its class."""
        return optimizer

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        """Return the batch to use, before it moves to the device; `progress` is None in evaluation."""
        return batch

    def gradients(self, model: nn.Module, progress: Progress, closure: Callable[[], Tensor]) -> None:
        """Change the gradients of a step before the optimizer takes it.

        They are reduced over all ranks and micro-batches, and unscaled under fp16. After an overflow some are
        not finite, and the step is skipped whatever this hook does. `closure()` recomputes the gradients of
        the same batch at the current weights, in place.
        """

    @property
    def period(self) -> int:
        """The length of the method's cycle in steps; 1: it does the same in every step."""
        return 1

    def phase_starts(self, num_steps: int) -> list[int]:
        """Return the steps, of `num_steps`, at which the method's work per step changes; it may change back.

        `split_gradual` gives the steps for work that changes gradually.
        """
        return []

    def after_step(self, model: nn.Module, num_steps: int) -> None:
        """Act after a step; `num_steps` is how many have been taken."""

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        return model

    def extra_state(self) -> nn.Module | None:
        """Return the module that a checkpoint has to hold beside the model; None while there is none."""
        return None

    def init_extra_state(self, model: nn.Module) -> None:
        """Make the module that `extra_state` returns; a checkpoint then fills it."""


def apply_hook(method: Method, hook: str, value: Any, *more: Any) -> Any:
    """Call a hook that returns what replaces `value`. Raises UserError where it returns nothing."""
    result = getattr(method, hook)(value, *more)
    if result is None:
        method.refuse(f"its `{hook}` returned nothing", hint="return what it was given, or what replaces it")
    return result
