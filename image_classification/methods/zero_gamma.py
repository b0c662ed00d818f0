"""Zero gamma.

What. Starts the scale of the last batch norm of every residual block at 0, so that each block begins as the
identity.
Effect on quality. Published: a gain in large-batch trainings (Goyal 2017, He 2018). With the recipes here it
was not measured on ImageNet: off by default.
Effect on time. None.
Relieves. Nothing: accuracy that fewer epochs could spend.
When not. As an anchor to the published runs, which draw every scale from U[0, 1).
Use. With the model: `apply_zero_gamma(model)`.
Source. Goyal et al. 2017, https://arxiv.org/abs/1706.02677; He et al. 2018, https://arxiv.org/abs/1812.01187.
"""

from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from common.training.method import Method


def apply_zero_gamma(model: nn.Module) -> int:
    """Set the scale of the last batch norm of every block to 0, in place; returns how many changed."""
    num_changed = 0
    for module in model.modules():
        if isinstance(module, BasicBlock | Bottleneck):
            last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
            nn.init.zeros_(last.weight)
            num_changed += 1
    return num_changed


class ZeroGamma(Method):
    """Changes initial weights once."""

    def model(self, model: nn.Module) -> nn.Module:
        """Raise UserError when the model has no residual block."""
        if apply_zero_gamma(model) == 0:
            self.refuse("no residual block in this model")
        return model
