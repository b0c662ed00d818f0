"""Squeeze-and-excitation.

What. After wide convolutions, scales each channel by a value in (0, 1) that two small layers compute from the
means of all channels. It changes the architecture.
Effect on quality. Published: accuracy goes up (with at least 512 channels). Not measured here.
Effect on time. Slower: one more reduction over the output of each such convolution, and a pass to scale it.
Relieves. Nothing: it buys accuracy, which fewer epochs could spend.
When not. Where the architecture is fixed; short trainings (in none of the study's recipes).
Use. With the model: `apply_squeeze_excite(model)`.
Source. Hu et al. 2018, https://arxiv.org/abs/1709.01507; MosaicML Composer 0.7, algorithms/squeeze_excite
(after each convolution whose input and output both have `min_channels`);
torchvision.ops.SqueezeExcitation.
"""

from pydantic import Field
from torch import nn
from torchvision.ops import SqueezeExcitation

from common.config.schema import Strict
from common.training.method import Method


def apply_squeeze_excite(model: nn.Module, min_channels: int = 512, latent_channels: int = 64) -> int:
    """Put a squeeze-and-excitation behind wide convolutions, in place; returns behind how many.

    Wide: at least `min_channels` in and out. `latent_channels` lie between its two layers.
    """
    wide = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Conv2d) and min(child.in_channels, child.out_channels) >= min_channels
    ]
    for parent, name, layer in wide:
        scaled = SqueezeExcitation(layer.out_channels, latent_channels).to(layer.weight.device)
        setattr(parent, name, nn.Sequential(layer, scaled))
    return len(wide)


class SqueezeExcite(Method):
    """Extends the model once; the new layers have PyTorch's initial weights."""

    class Config(Strict):
        """Convolutions with fewer channels, in or out, than `min_channels` are left alone."""

        min_channels: int = Field(
            default=512, ge=1, description="convolutions with fewer channels, in or out, are left alone"
        )
        latent_channels: int = Field(default=64, ge=1, description="width of the bottleneck")

    def model(self, model: nn.Module) -> nn.Module:
        """Raise UserError when no convolution is wide enough."""
        if apply_squeeze_excite(model, **self.settings.model_dump()) == 0:
            what = f"no convolution has {self.settings.min_channels} channels in and out"
            self.refuse(what, setting="min_channels")
        return model
