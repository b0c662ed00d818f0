"""Layer freezing.

What. Late in training, stops training layers, the first ones first: their gradients are not computed and
their weights stay. Batch norms go on to count their statistics.
Effect on quality. Published: -0.5 to -1 % top-1 with ResNet-50. Not measured here.
Effect on time. Published: +5 % throughput. The backward pass ends at the first layer that is trained.
Relieves. Backward pass, optimizer.
When not. To reach a target: the loss is larger than what the time saved buys; several ranks, which exchange
all gradients, and a compiled model, whose steps have one graph (both refused).
Use. Each batch: `freeze_layers(model, frozen_share(step / num_steps))`.
Source. Brock et al. 2017, https://arxiv.org/abs/1706.04983; MosaicML Composer 0.7, algorithms/layer_freezing
(from half of the training on, linearly; it counts epochs, this one steps).
"""

from pydantic import Field
from torch import nn

from common.config.schema import Fraction, RunConfig, Strict
from common.errors import UserError
from common.training import ranks
from common.training.method import Batch, Method, Progress
from common.training.registry import refuse_compiled

FROZEN_HERE = "is_frozen_by_freeze_layers"  # of a parameter


def frozen_share(done: float, start: float = 0.5, level: float = 1.0) -> float:
    """Return the share of layers that are frozen when `done`, a fraction, of the training is over.

    Zero until `start`, then linearly up to `level` at the end.
    """
    return level * max(0.0, done - start) / (1 - start)


def freeze_layers(model: nn.Module, share: float) -> int:
    """Freeze a share of the layers, the first ones; returns how many are frozen.

    Layers are the modules that have parameters of their own, in the order of `model.modules()`; the last is
    never frozen. A parameter of two layers is that of the first. The other layers train again, but for what
    something else has frozen.
    """
    layers = [each for each in model.modules() if next(each.parameters(recurse=False), None) is not None]
    num_frozen = int(share * (len(layers) - 1))
    for layer in reversed(layers):
        for parameter in layer.parameters(recurse=False):
            if getattr(parameter, FROZEN_HERE, False):
                parameter.requires_grad_(True)
            is_frozen = parameter.requires_grad and layer in layers[:num_frozen]
            setattr(parameter, FROZEN_HERE, is_frozen)
            if is_frozen:
                parameter.requires_grad_(False)
                parameter.grad = None  # zeros would let momentum and weight decay go on
    return num_frozen


class LayerFreezing(Method):
    """Freezes before each step what its place in the training asks for."""

    frozen = 0.0

    class Config(Strict):
        """`start`: fraction of the training before the first layer; `level`: share of layers at the end."""

        start: float = Field(default=0.5, ge=0, lt=1)
        level: Fraction = 1.0

    def configure(self, config: RunConfig) -> RunConfig:
        """Change nothing; refuse a compiled model."""
        refuse_compiled(config, self.name)
        return config

    def model(self, model: nn.Module) -> nn.Module:
        """Remember it. Raise UserError on more than one rank."""
        if ranks.place().world_size > 1:
            raise UserError(
                "trains on one rank only: ranks exchange the gradients of every layer, frozen or not",
                where=f"methods.{self.name}",
                hint="--nproc 1",
            )
        self.trained = model
        return model

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        """Freeze layers; the batch stays."""
        if progress is not None:
            done = progress.step / progress.num_steps
            share = frozen_share(done, self.settings.start, self.settings.level)
            if share != self.frozen:
                freeze_layers(self.trained, share)
                self.frozen = share
        return batch
