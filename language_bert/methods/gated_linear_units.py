"""Gated linear units in the feed-forward network.

What. The first projection and its activation become act(x W) * (x V): one half decides how much of the other
passes. With the model's GELU this is GEGLU. At 2/3 of the width it has as many parameters as the plain form.
Effect on quality. Published: at equal parameters and steps a lower loss in pre-training (T5, Shazeer 2020);
better convergence for slightly less throughput (Composer's method card).
Effect on time. None in arithmetic at 2/3 of the width; one more pass over the activations for the product.
Relieves. Nothing: it buys accuracy that fewer steps spend.
When not. Weights that were trained with the plain form, which it replaces.
Use. With the model: `apply_gated_linear_units(model)`.
Source. Shazeer 2020, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202 (without biases);
MosaicML Composer, algorithms/gated_linear_units.
Unlike Composer. No biases before the product, as there (since 0.8; 0.7 has no such method). The width is 2/3
of the plain form's, as its method card says; there the code keeps it and the model must be made narrower.
Weights are drawn as the model's, there as PyTorch's linear layers.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import RunConfig, Strict
from common.errors import UserError, refuse_twice
from common.training.method import Method
from language_bert.methods.alibi import check_from_scratch, find_bert


class GatedUnit(nn.Module):
    """act(x W) * (x V), with both projections in one product: (..., D) to (..., width)."""

    def __init__(self, size: int, width: int, activation: nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.dense = nn.Linear(size, 2 * width, bias=bias)  # the gate first
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        gate, value = self.dense(hidden).chunk(2, dim=-1)
        gated: Tensor = self.activation(gate) * value
        return gated


def gated_width(width: int, width_factor: float, round_to: int) -> int:
    """Return `width` times the factor, rounded to the nearest multiple of `round_to`, at least `round_to`."""
    return max(1, round(width * width_factor / round_to)) * round_to


@torch.no_grad()
def apply_gated_linear_units(
    model: nn.Module, width_factor: float = 2 / 3, round_to: int = 8, *, bias: bool = False
) -> int:
    """Replace the feed-forward networks of a Hugging Face BERT in place; returns the number of layers.

    The new weights are drawn like those of the model: normal, `initializer_range` wide, biases 0.
    """
    bert = find_bert(model, "apply_gated_linear_units")
    refuse_twice(isinstance(bert.encoder.layer[0].intermediate, GatedUnit), "apply_gated_linear_units")
    if width_factor <= 0 or round_to < 1:
        what = f"width_factor {width_factor:g} and round_to {round_to}: expected positive numbers"
        raise UserError(what, where="apply_gated_linear_units")
    for layer in bert.encoder.layer:
        old = layer.intermediate.dense
        width = gated_width(old.out_features, width_factor, round_to)
        gated = GatedUnit(old.in_features, width, layer.intermediate.intermediate_act_fn, bias=bias)
        output = nn.Linear(width, layer.output.dense.out_features)
        for dense in (gated.dense, output):
            nn.init.normal_(dense.weight, std=bert.config.initializer_range)
            if dense.bias is not None:
                nn.init.zeros_(dense.bias)
        layer.intermediate, layer.output.dense = gated.to(old.weight), output.to(old.weight)
    return len(bert.encoder.layer)


class GatedLinearUnits(Method):
    class Config(Strict):
        width_factor: float = Field(
            default=2 / 3, gt=0, description="width over that of the plain form; 2/3: as many parameters"
        )
        round_to: int = Field(default=8, gt=0, description="the width is a multiple of this")
        bias: bool = Field(default=False, description="biases before the product; the paper has none")

    def configure(self, config: RunConfig) -> RunConfig:
        check_from_scratch(config, self)
        return config

    def model(self, model: nn.Module) -> nn.Module:
        apply_gated_linear_units(model, **self.settings.model_dump())
        return model
