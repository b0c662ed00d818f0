"""Compile embeddings, encoder layer and head.

What. Applies `torch.compile` to the pieces of the packed encoder instead of the whole: the 24 layers share
one graph for each number of tokens, so compilation takes the time of one layer. Evaluation, whose numbers of
tokens nobody knows before the data are read, has one graph for all. All are compiled in initialisation.
Effect on quality. None except rounding: fused operations keep intermediate results in float32.
Effect on time. Bias and GELU, and addition and LayerNorm, become one pass over memory each, forward and
backward.
Relieves. Forward pass, backward pass, evaluation: memory traffic and the host.
When not. CPUs without a C++ compiler. Needs `unpad` before it, with tokens rounded up to few shapes.
Use. With the model: `model = unpad(model, round_to=2048)`, `compile_layers(model)`.
Source. https://docs.pytorch.org/tutorials/recipes/regional_compilation.html; the fusions are those of MLPerf
Training v2.1, MosaicML and NVIDIA.
Unlike Composer. Composer 0.7 has no such method.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from common.config.schema import Strict
from common.methods.compile import compile_options
from common.training.method import Method
from language_bert.methods.unpad import check_packed
from language_bert.model import PackedBert, apply_module, embed, encoder_layer

PIECES = {"embed": embed, "layer": encoder_layer, "head": apply_module}


def compile_layers(
    model: PackedBert,
    mode: str = "default",
    backend: str = "inductor",
    options: dict[str, Any] | None = None,
    *,
    evaluation: bool = True,
) -> None:
    """Compile the pieces of a packed encoder: for training each shape on its own, for evaluation all at once.

    Torch does not cut the graphs for DDP, in the whole process: DDP still all-reduces layer by layer, and a
    cut where a bucket ends would undo fusions. A copy of the model, such as an average, uses the pieces too.
    """
    check_packed(model, "compile_layers")
    torch._dynamo.config.optimize_ddp = False
    arguments = {"fullgraph": True} | compile_options(mode, backend, options)
    model.compiled = {name: torch.compile(piece, **arguments) for name, piece in PIECES.items()}
    if evaluation:
        arguments |= {"dynamic": True}
        model.compiled_for_evaluation = {
            name: torch.compile(piece, **arguments) for name, piece in PIECES.items()
        }


class CompileLayers(Method):
    """Methods that change the model come before it."""

    compiles = True
    is_exact = True

    class Config(Strict):
        mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
            default="default", description="of torch.compile: how long it searches for fast kernels"
        )
        backend: Literal["inductor", "aot_eager"] = Field(
            default="inductor", description="of torch.compile; aot_eager needs no compiler and gains nothing"
        )
        options: dict[str, bool | int | str] = Field(
            default={}, description="of Inductor, beside those of the mode, such as combo_kernels"
        )
        evaluation: bool = Field(default=True, description="false evaluates eagerly")

    def model(self, model: nn.Module) -> nn.Module:
        compile_layers(check_packed(model, self), **self.settings.model_dump())
        return model
