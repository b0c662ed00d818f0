"""Zero gamma.

What. Starts the scale of the last batch norm of every residual block at 0, so that each block begins as the
identity.
Effect on quality. Published: a gain in trainings with large batches (Goyal 2017, He 2018).
Effect on time. None.
Relieves. Nothing: it buys accuracy that fewer epochs could spend.
When not. To compare with the published runs, which draw every scale from U[0, 1).
Use. With the model: `apply_zero_gamma(model)`.
Source. Goyal et al. 2017, https://arxiv.org/abs/1706.02677; He et al. 2018, https://arxiv.org/abs/1812.01187.
Unlike Composer. Composer 0.7 has no such method.
"""

from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from common.training.method import Method


def apply_zero_gamma(model: nn.Module) -> int:
    """Set the scale of the last batch norm of every block to 0, in place; returns how many changed."""
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    for block in blocks:
        nn.init.zeros_((block.bn3 if isinstance(block, Bottleneck) else block.bn2).weight)
    return len(blocks)


class ZeroGamma(Method):
    def model(self, model: nn.Module) -> nn.Module:
        if apply_zero_gamma(model) == 0:
            self.refuse("no residual block in this model")
        return model
