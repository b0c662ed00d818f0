"""Copy trained position embeddings to untrained ones.

What. Rows 128 to 511 of the position embeddings, which the published checkpoint never trained (its sequences
have 128 tokens), become copies of row `position mod trained_rows`.
Effect on quality. The untrained rows are noise; published runs spend 100,000 to 600,000 sequences on a
plateau that is attributed to them. The starting accuracy must rise.
Effect on time. None per step; fewer steps.
Relieves. Number of steps.
When not. Weights that were trained at full length; results to compare with the published ones. The starting
weights are changed by a fixed function: disclose it.
Use. With the model: `copy_rows(model.bert.embeddings.position_embeddings.weight, 128)`.
Source. https://arxiv.org/abs/2004.05150 (Longformer copies 512 rows to 4096).
Unlike Composer. Composer 0.7 has no such method.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import RunConfig, Strict
from common.training.method import Method


@torch.no_grad()
def copy_rows(weight: Tensor, num_trained: int) -> None:
    """Set row p of weight (S, D) to row p mod `num_trained`, in place."""
    weight.copy_(weight[torch.arange(len(weight), device=weight.device) % num_trained])


class PositionRows(Method):
    class Config(Strict):
        trained_rows: int = Field(
            default=128, gt=0, description="the length that they were trained on, in tokens"
        )

    def configure(self, config: RunConfig) -> RunConfig:
        length = config.model_dump()["data"]["max_seq_length"]
        if self.settings.trained_rows >= length:
            self.refuse(f"leaves none of {length} rows to copy to", setting="trained_rows")
        return config

    def model(self, model: nn.Module) -> nn.Module:
        bert: Any = model.bert
        copy_rows(bert.embeddings.position_embeddings.weight, self.settings.trained_rows)
        return model
