"""ResNet from torchvision with the initial weights of the published runs, or of the MLPerf reference."""

import math

import torch
import torchvision
from torch import Tensor, nn

TRUNCATED_DEVIATION = 0.87962566  # standard deviation of a normal distribution truncated at -2 and 2
TRUNCATED_SHARE = math.erf(2 / math.sqrt(2))  # of a normal distribution, between -2 and 2


def build_resnet(name: str, num_classes: int, initial_weights: str = "mosaic") -> nn.Module:
    """Return torchvision's model (v1.5: stride in the 3x3 convolution) with weights drawn anew.

    They are drawn as in the published runs (`mosaic`), or as by the MLPerf `reference`.
    """
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    model.fc = Classifier(model.fc)
    (initialize if initial_weights == "mosaic" else initialize_as_reference)(model)
    return model


class Classifier(nn.Linear):
    """A linear layer with float32 logits in evaluation, because 16-bit logits are often equal."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, classes) of features x (batch, features)."""
        if self.training or x.dtype == self.weight.dtype:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


def initialize(model: nn.Module) -> None:
    """Draw convolution and linear weights from `kaiming_normal_`, batch-norm weights from U[0, 1), in place.

    `kaiming_normal_` keeps its default arguments (fan_in), where torchvision chooses fan_out. Every batch
    norm is drawn, the last of a block too; its bias is 0. The bias of the linear layer keeps PyTorch's
    default.
    Source: MosaicML Composer 0.7, composer/models/initializers.py (kaiming_normal, bn_uniform).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight)
            nn.init.zeros_(module.bias)


def initialize_as_reference(model: nn.Module) -> None:
    """Draw the weights as the MLPerf reference does, in place.

    Convolutions: a normal distribution truncated at two standard deviations, then of variance 1 / fan_in.
    Batch norms: scale 1, shift 0. The linear layer: standard deviation 0.01, bias 0.
    Source: Google's TensorFlow code in MLPerf Training v2.0, resnet_model.py (variance_scaling_initializer
    and random_normal_initializer with their defaults).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            deviation = module.weight[0].numel() ** -0.5 / TRUNCATED_DEVIATION
            nn.init.uniform_(module.weight, -TRUNCATED_SHARE, TRUNCATED_SHARE)
            with torch.no_grad():  # the inverse of the distribution function
                module.weight.erfinv_().mul_(math.sqrt(2) * deviation)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
