"""Muon for matrices, AdamW for the rest.

What. A weight matrix of the encoder or of the head's transform moves by its momentum with all singular values
set to about 1, in a few Newton-Schulz iterations. AdamW keeps embeddings, biases and norms. What `fused_qkv`
or `gated_linear_units` joins counts as one matrix.
Effect on quality. Published, from random weights: AdamW's loss in half of the compute. From weights that Adam
trained, as BERT's checkpoint, published results are equal or worse.
Effect on time. Three matrix products an iteration for each matrix, however large the batch; every rank
computes all of them. One average per weight instead of AdamW's two.
Relieves. Number of steps.
When not. Small batches of short sequences, where these products are a large part of a step.
Use. With the optimizer: `optimizer = MuonAdamW(model.parameters(), hidden_matrices(model), lr=1e-3)`.
Source. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; size of the steps: Liu et al. 2025,
https://arxiv.org/abs/2502.16982; from checkpoints of Adam: https://arxiv.org/abs/2605.10468 and
https://arxiv.org/abs/2511.06086. `torch.optim.Muon` takes the same steps, one matrix at a time and always in
bfloat16.
Unlike Composer. Composer 0.7 has no such method.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from common.config.schema import RunConfig, Strict
from common.training.method import Method

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: small singular values grow fast, none exceeds 1.21
STEP_RMS = 0.2  # of an element, times the learning rate: as large as AdamW's steps are; Liu et al.


def hidden_matrices(model: Any) -> list[nn.Parameter]:
    """Return the weight matrices of encoder and transform; `model` is a Hugging Face BERT or a packed one."""
    encoder = [parameter for parameter in model.bert.encoder.parameters() if parameter.ndim == 2]
    return [*encoder, model.cls.predictions.transform.dense.weight]


def orthogonalize(
    matrices: Sequence[Tensor], dtype: torch.dtype = torch.float32, iterations: int = 5
) -> list[Tensor]:
    """Return the matrices with singular values of about 1 (0.68 to 1.21), computed in `dtype`.

    Singular values below 0.002 of a matrix's Frobenius norm stay smaller, after three iterations those below
    0.02 of it. Matrices of one shape, in either orientation, are computed together.
    """
    results = [make_wide(matrix) for matrix in matrices]
    by_shape = defaultdict[torch.Size, list[int]](list)
    for number, matrix in enumerate(results):
        by_shape[matrix.shape].append(number)
    a, b, c = COEFFICIENTS
    for numbers in by_shape.values():
        x = torch.stack([results[number] for number in numbers])
        x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)).to(dtype)
        for _ in range(iterations):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        for number, result in zip(numbers, x, strict=True):
            results[number] = result
    return [
        result if result.shape == matrix.shape else result.mT
        for result, matrix in zip(results, matrices, strict=True)
    ]


def make_wide(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


class MuonAdamW(AdamW):
    """Muon for `matrices`, torch's fused AdamW for the other parameters.

    `parameters` are those of the model, or groups of them; the matrices are taken out. Their step, with
    Nesterov's momentum: buf <- momentum * buf + (1 - momentum) * g,
    o <- orthogonalize((1 - momentum) * g + momentum * buf),
    p <- (1 - rate * weight_decay) * p - rate * 0.2 * sqrt(max(rows, columns)) * o, rate = rate_ratio * lr.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        matrices: Sequence[Tensor],
        *,
        lr: float,
        rate_ratio: float = 1.0,
        momentum: float = 0.95,
        iterations: int = 5,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        taken = {id(matrix) for matrix in matrices}
        given = list(parameters)
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        if not taken <= {id(one) for group in groups for one in group["params"]}:
            raise ValueError("MuonAdamW: a matrix is not among the parameters")
        others = [[one for one in group["params"] if id(one) not in taken] for group in groups]
        left = [group | {"params": some} for group, some in zip(groups, others, strict=True) if some]
        super().__init__(left, lr=lr, fused=True, **settings)
        self.add_param_group({"params": list(matrices), "lr": lr * rate_ratio, "momentum": momentum})
        self.iterations, self.dtype = iterations, dtype
        self._step_supports_amp_scaling = False  # a GradScaler then skips the whole step after an overflow

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step of both kinds."""
        with torch.enable_grad():
            loss = closure() if closure else None
        groups = self.param_groups
        for group in groups:
            if "momentum" in group:
                self.step_matrices(group)
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups
        return loss

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Take the step of a group of matrices."""
        matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
        if not matrices:  # all are frozen
            return
        gradients = [matrix.grad for matrix in matrices]
        for matrix in matrices:
            if not self.state[matrix]:  # under Adam's names: its `load_state_dict` reads `step`
                self.state[matrix] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(matrix)}
        averages = [self.state[matrix]["exp_avg"] for matrix in matrices]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, averages, group["momentum"])
        steps = orthogonalize(nesterov, self.dtype, self.iterations)
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        for matrix, step in zip(matrices, steps, strict=True):
            matrix.add_(step, alpha=-group["lr"] * STEP_RMS * math.sqrt(max(matrix.shape)))


class Muon(Method):
    class Config(Strict):
        rate_ratio: float = Field(
            default=1.0, gt=0, description="learning rate of the matrices over `optimizer.learning_rate`"
        )
        momentum: float = Field(default=0.95, ge=0, lt=1, description="of the matrices")
        iterations: int = Field(
            default=5, ge=1, description="of Newton and Schulz: fewer are faster and less exact"
        )

    def configure(self, config: RunConfig) -> RunConfig:
        if config.optimizer.name != "adamw":
            self.refuse(f"it stands beside adamw alone, not {config.optimizer.name}")
        return config

    def model(self, model: nn.Module) -> nn.Module:
        self.matrices = hidden_matrices(model)
        return model

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not {id(matrix) for matrix in self.matrices} <= trained:
            self.refuse("a method after it replaces layers", hint="list muon last")
        return MuonAdamW(
            optimizer.param_groups,  # with the settings of AdamW
            self.matrices,
            lr=self.config.optimizer.learning_rate,
            weight_decay=self.config.optimizer.weight_decay,
            dtype=torch.float32 if self.config.precision == "fp32" else torch.bfloat16,
            **self.settings.model_dump(),
        )
