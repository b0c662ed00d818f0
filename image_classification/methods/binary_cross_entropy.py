"""Binary cross-entropy.

What. Answers one yes-or-no question for each class instead of choosing one of all classes: sigmoid
cross-entropy with smoothed targets, summed over classes, averaged over samples. The last linear layer starts
with bias -ln(classes), so that the loss on 1000 classes starts near 8 and not near 693.
Effect on quality. Published as part of a recipe that gains accuracy.
Effect on time. Negligible: one pass over (batch, classes).
Relieves. Nothing: it buys accuracy that fewer epochs spend.
When not. Together with `label_smoothing`: this loss smooths its targets already. Listed before it, as in
`baseline`, `label_smoothing` has no effect; listed after it, it smooths them again.
Use. With the model: `apply_log_bias(model)`.
For the loss: `loss = binary_cross_entropy(model(images), smooth_labels(labels, 1000, 0.08))`.
Source. Wightman, Touvron and Jegou 2021, ResNet strikes back, https://arxiv.org/abs/2110.00476; MosaicML
Composer 0.7, composer/loss/loss.py (sum over classes) and initializers.py (linear_log_constant_bias).
Unlike Composer. A loss there, with the smoothing of its label smoothing; one method here, whose smoothing is
required. Sum, average and bias are the same.
"""

import math

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import Fraction, Strict
from common.methods.label_smoothing import smooth_labels
from common.training.method import Loss, Method


def binary_cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Return the sum over classes and mean over samples of (batch, classes), computed in float32 or wider."""
    logits = logits.float() if logits.element_size() < 4 else logits
    total = F.binary_cross_entropy_with_logits(logits, probabilities.to(logits.dtype), reduction="sum")
    return total / len(logits)


def apply_log_bias(model: nn.Module) -> int:
    """Set the bias of the last linear layer to -ln(its outputs); returns how many layers changed."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer.bias is not None]
    for layer in layers[-1:]:
        nn.init.constant_(layer.bias, -math.log(layer.out_features))
    return len(layers[-1:])


class BinaryCrossEntropy(Method):
    class Config(Strict):
        smoothing: Fraction = Field(description="the part of each target spread evenly over all classes")

    def model(self, model: nn.Module) -> nn.Module:
        if apply_log_bias(model) == 0:
            self.refuse("no linear layer with a bias in this model")
        return model

    def loss(self, loss: Loss) -> Loss:
        def binary(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
            labels = smooth_labels(targets["labels"], outputs.shape[-1], self.settings.smoothing)
            return binary_cross_entropy(outputs, labels)

        return binary
