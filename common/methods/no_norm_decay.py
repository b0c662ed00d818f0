"""No weight decay on norms and biases.

What. Only matrices and filters decay; scales and shifts, which have one dimension, keep their size.
Effect on quality. Common in strong recipes (He 2018; NVIDIA's ResNet-50); with the recipes here it was not
measured on the full-size data: off by default.
Effect on time. None.
Relieves. Nothing: accuracy that fewer epochs could spend.
When not. As an anchor to the published runs, which decay every parameter.
Use. With the optimizer: `split_decay(optimizer)`.
Source. He et al. 2018, https://arxiv.org/abs/1812.01187, section 3.1.
"""

from torch.optim import Optimizer

from common.errors import UserError
from common.training.method import Method


def split_decay(optimizer: Optimizer) -> int:
    """Move the parameters of fewer than two dimensions into groups without decay; returns how many."""
    num_moved = 0
    for group in list(optimizer.param_groups):
        kept = [parameter for parameter in group["params"] if parameter.ndim >= 2]
        moved = [parameter for parameter in group["params"] if parameter.ndim < 2]
        num_moved += len(moved)
        group["params"] = kept
        if moved:
            optimizer.add_param_group({**group, "params": moved, "weight_decay": 0.0})
    return num_moved


class NoNormDecay(Method):
    """Splits the optimizer's groups."""

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise UserError when nothing is exempt."""
        if split_decay(optimizer) == 0:
            raise UserError("no parameter of one dimension", where=f"methods.{self.name}")
        return optimizer
