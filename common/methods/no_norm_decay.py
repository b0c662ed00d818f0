"""No weight decay on norms and biases.

What. Only matrices and filters decay; scales and shifts, which have one dimension, keep their size.
Effect on quality. Common in strong recipes (He 2018; NVIDIA's ResNet-50).
Effect on time. None.
Relieves. Nothing: it buys accuracy that fewer epochs could spend.
When not. To compare with the published runs, which decay every parameter.
Use. With the optimizer: `split_decay(optimizer)`.
Source. He et al. 2018, https://arxiv.org/abs/1812.01187, section 3.1.
Unlike Composer. Composer 0.7 has no such method.
"""

from torch.optim import Optimizer

from common.config.schema import TRUST_RATIO, RunConfig
from common.training.method import Method
from common.training.optim import exempt_vectors


def split_decay(optimizer: Optimizer) -> int:
    """Move the parameters of fewer than two dimensions into groups without decay; returns how many."""
    num_moved = 0
    for group in [group for group in optimizer.param_groups if group["weight_decay"]]:
        decayed, exempt = exempt_vectors(group["params"])
        group |= decayed
        num_moved += len(exempt["params"])
        if exempt["params"]:
            optimizer.add_param_group(group | exempt)
    return num_moved


class NoNormDecay(Method):
    is_of_reference = True

    def configure(self, config: RunConfig) -> RunConfig:
        if config.optimizer.name in TRUST_RATIO:
            self.refuse(f"{config.optimizer.name} gives them no weight decay itself")
        return config

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        if not split_decay(optimizer):
            self.refuse("no parameter of one dimension has weight decay")
        return optimizer
