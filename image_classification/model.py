"""ResNet from torchvision with the initial weights of the published runs."""

import torchvision
from torch import nn


def build_resnet(name: str, num_classes: int) -> nn.Module:
    """Return torchvision's model (v1.5: stride in the 3x3 convolution) with the published initial weights."""
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    initialize(model)
    return model


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
