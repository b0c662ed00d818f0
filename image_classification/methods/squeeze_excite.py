"""Squeeze-and-excitation.

What. Scales each channel behind a wide convolution by a value in (0, 1), which two small layers compute from
the means of all channels. This changes the architecture.
Effect on quality. Published: accuracy goes up (with at least 512 channels).
Effect on time. Slower: one more reduction over the output of each such convolution, and a pass to scale it.
Relieves. Nothing: it buys accuracy that fewer epochs could spend.
When not. Where the architecture is fixed; short trainings (none of the study's recipes uses it).
Use. With the model: `apply_squeeze_excite(model)`.
Source. Hu et al. 2018, https://arxiv.org/abs/1709.01507; MosaicML Composer 0.7, algorithms/squeeze_excite
(after each convolution whose input and output both have `min_channels`); torchvision.ops.SqueezeExcitation.
Unlike Composer. `min_channels` is 512, as its method card advises; its class has 128. `latent_channels` is
the same (64), but cannot be a share of the width. Both layers have biases (torchvision's), there none.
"""

from pydantic import Field
from torch import nn
from torchvision.ops import SqueezeExcitation

from common.config.schema import Strict
from common.training.method import Method, replace_layers


def apply_squeeze_excite(model: nn.Module, min_channels: int = 512, latent_channels: int = 64) -> int:
    """Put a squeeze-and-excitation behind wide convolutions, in place; returns their number.

    Wide: at least `min_channels` in and out. `latent_channels` is the width between its two layers.
    """

    def extended(layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, nn.Conv2d) or min(layer.in_channels, layer.out_channels) < min_channels:
            return None
        scaled = SqueezeExcitation(layer.out_channels, latent_channels).to(layer.weight.device)
        return nn.Sequential(layer, scaled)

    return replace_layers(model, extended)


class SqueezeExcite(Method):
    """Extends the model once; the new layers have PyTorch's initial weights."""

    class Config(Strict):
        min_channels: int = Field(
            default=512, ge=1, description="convolutions with fewer channels, in or out, are left alone"
        )
        latent_channels: int = Field(default=64, ge=1, description="width of the bottleneck")

    def model(self, model: nn.Module) -> nn.Module:
        if apply_squeeze_excite(model, **self.settings.model_dump()) == 0:
            what = f"no convolution has {self.settings.min_channels} channels in and out"
            self.refuse(what, setting="min_channels")
        return model
