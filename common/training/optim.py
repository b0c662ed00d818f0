"""Optimizers and step-wise schedules of the published recipes.

No step waits for the device: norms, trust ratios and overflows stay tensors. The exception is Apex's LAMB
with fp16, see `build_fused_lamb`.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from common.config.schema import LAMB, OptimizerConfig, Plan, ScheduleConfig
from common.errors import UserError

MLPERF_NAMES = {"fused_lamb": "lamb"}  # the log names class and version too


class FusedSGD(SGD):
    """SGD in torch's fused form, after what a subclass does to parameters or gradients; it decays nothing."""

    def __init__(
        self, parameters: Any, *, lr: float, momentum: float, weight_decay: float, nesterov: bool = False
    ) -> None:
        super().__init__(
            parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, fused=True
        )
        start_momentum(self)

    def prepare(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        """Change the parameters of a group in place, or return other gradients; does neither here."""
        return gradients

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step; after an overflow under loss scaling nothing changes."""
        with torch.enable_grad():
            loss = closure() if closure else None
        unscale_gradients(self)
        for group in self.param_groups:
            parameters, gradients, buffers = [list[Tensor]() for _ in range(3)]
            self._init_group(group, parameters, gradients, buffers)  # type: ignore[no-untyped-call]
            if parameters:
                gradients = self.prepare(group, parameters, gradients)
                self.step_group(group, parameters, gradients, buffers)
        return loss

    def step_group(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], buffers: list[Tensor]
    ) -> None:
        """Take the step of one group, without weight decay. There are no `buffers` without momentum."""
        lists = [parameters, gradients, buffers] if buffers else [parameters, gradients]
        if parameters[0].device.type == "cpu":
            lists = [list(one) for one in zip(*map(in_memory_order, zip(*lists, strict=True)), strict=True)]
        sgd(
            lists[0],
            lists[1],
            lists[2] if buffers else [],  # type: ignore[arg-type]
            fused=True,
            found_inf=getattr(self, "found_inf", None),
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
        )


class DecoupledSGD(FusedSGD):
    """SGD with momentum whose weight decay follows the schedule, not the gradient.

    Each step: p <- p * (1 - weight_decay * lr / peak_lr), then buf <- momentum * buf + g, p <- p - lr * buf;
    with `nesterov` the last is p <- p - lr * (g + momentum * buf).
    At the peak a step decays by `weight_decay` itself, whatever the learning rate. Every parameter decays.
    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101; MosaicML's DecoupledSGDW.
    """

    def __init__(self, parameters: Any, *, lr: float, **settings: Any) -> None:
        super().__init__(parameters, lr=lr, **settings)
        self.peak_lr = lr

    def prepare(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        """Decay the parameters."""
        overflow = getattr(self, "found_inf", None)  # 1 where loss scaling skips the step, else 0
        factor = group["weight_decay"] * group["lr"] / self.peak_lr
        torch._foreach_mul_(parameters, 1 - factor if overflow is None else 1 - factor * (1 - overflow))
        return gradients


class Lars(FusedSGD):
    """SGD with momentum, each parameter's gradient scaled by a trust ratio.

    Each step: d <- ratio * (g + weight_decay * p), then as SGD: buf <- momentum * buf + d, p <- p - lr * buf;
    with `nesterov` p <- p - lr * (d + momentum * buf).
    ratio = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps), and 1 where |p| or |g| is 0. Groups
    without weight decay have no ratio.
    Source: You, Gitman, Ginsburg 2017, https://arxiv.org/abs/1708.03888. Of the two forms that MLPerf allows
    this is SGDwFASTLARS, whose buffer holds lr * buf and whose momentum is scaled by lr / previous lr. The
    other, MLPERF_LARSOptimizer of TensorFlow, leaves that factor out and differs while the rate changes.
    Written independently: tests/common/training/test_large_batch.py shows that it equals a loop over the
    published formula, and timm's.
    """

    def __init__(
        self, parameters: Any, *, trust_coefficient: float = 0.001, eps: float = 0.0, **settings: Any
    ) -> None:
        super().__init__(parameters, **settings)
        self.trust_coefficient, self.eps = trust_coefficient, eps

    def prepare(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        """Scale the gradients, out of place."""
        decay = group["weight_decay"]
        return self.scale(parameters, gradients, decay) if decay else gradients

    def scale(self, parameters: list[Tensor], gradients: list[Tensor], decay: float) -> list[Tensor]:
        """Return ratio * (gradient + decay * parameter) for each parameter."""
        weights, slopes = norms(parameters), norms(gradients)
        ratios = self.trust_coefficient * weights / (slopes + decay * weights + self.eps)
        ratios = torch.where((weights > 0) & (slopes > 0), ratios, 1.0)
        scaled = torch._foreach_add(gradients, parameters, alpha=decay)
        torch._foreach_mul_(scaled, ratios.unbind())
        return list(scaled)


class Lamb(Adam):
    """Adam with decoupled weight decay, each parameter's step scaled by a trust ratio.

    Each step: gradients are divided by max(1, |all gradients| / max_gradient_norm), in place; u <- Adam's
    step, bias-corrected, + weight_decay * p; p <- p - lr * ratio * u. ratio = |p| / |u|, and 1 where either
    is 0. Groups without weight decay have no ratio.
    Source: You et al. 2020, https://arxiv.org/abs/1904.00962; NVIDIA's apex.optimizers.FusedLAMB, which
    MLPerf lists and which computes the same in fewer passes over memory. Written independently:
    tests/common/training/test_large_batch.py shows that it equals a loop over the published formula, and
    timm's.
    """

    def __init__(
        self,
        parameters: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_gradient_norm: float | None = 1.0,
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.max_gradient_norm = max_gradient_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure else None
        unscale_gradients(self)
        gradients = list_gradients(self)
        if gradients and self.max_gradient_norm is not None:
            excess = norms(gradients).norm() / self.max_gradient_norm
            torch._foreach_div_(gradients, excess.clamp(min=1.0))
        for group in self.param_groups:
            self.step_group(group)
        return loss

    def step_group(self, group: dict[str, Any]) -> None:
        """Take the step of one group; after an overflow nothing changes."""
        parameters, gradients, averages, squares, steps = [list[Tensor]() for _ in range(5)]
        self._init_group(group, parameters, gradients, averages, squares, [], steps)  # type: ignore[no-untyped-call]
        if not parameters:
            return
        decay, overflow = group["weight_decay"], getattr(self, "found_inf", None)
        updates = list(torch._foreach_mul(parameters, decay))
        adam(  # adds its step to the updates, by a learning rate of -1
            updates,
            gradients,
            averages,
            squares,
            [],
            steps,
            fused=True,
            found_inf=overflow,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=-1.0,
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        if not decay:
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            return
        weights, sizes = norms(parameters), norms(updates)
        ratios = torch.where((weights > 0) & (sizes > 0), weights / sizes, 1.0)
        ratios = ratios if overflow is None else ratios * (1 - overflow)
        torch._foreach_addcmul_(parameters, updates, ratios.unbind(), value=-group["lr"])


def in_memory_order(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """View tensors that are all channels last so that they are contiguous; leave others as they are.

    On a CPU torch's fused SGD makes a contiguous copy of a gradient in any other order, and does not use it.
    """
    are_channels_last = all(
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors
    )
    return tuple(tensor.permute(0, 2, 3, 1) for tensor in tensors) if are_channels_last else tensors


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, in one tensor."""
    return torch.stack(torch._foreach_norm(tensors))


def list_gradients(optimizer: Optimizer) -> list[Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def unscale_gradients(optimizer: Optimizer) -> None:
    """Divide the gradients by the loss scale where a GradScaler leaves that to the optimizer's step."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None and (gradients := list_gradients(optimizer)):
        torch._foreach_div_(gradients, scale)


def start_momentum(optimizer: SGD) -> None:
    """Give every parameter a momentum of 0, in place, which equals starting with the first gradient.

    Fused SGD would leave it uninitialised when loss scaling skips the first step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def build_fused_lamb(
    groups: list[dict[str, Any]], *, max_gradient_norm: float | None, **settings: Any
) -> Optimizer:
    """Build Apex's LAMB. Raises UserError where NVIDIA's Apex or a GPU is missing.

    With fp16 its step waits for the GPU: it leaves the decision whether to skip a step to the host.
    """
    where, hint = "optimizer.name: fused_lamb", "--set optimizer.name=lamb computes the same"
    try:
        from apex.optimizers import FusedLAMB
    except (ImportError, SyntaxError) as error:  # PyPI's apex, a web toolkit, fails with either
        what = "NVIDIA's Apex is not installed (PyPI's apex is another project)"
        raise UserError(what, where=where, hint=hint) from error
    if not torch.cuda.is_available():
        raise UserError("Apex needs a GPU", where=where, hint=hint)
    most = math.inf if max_gradient_norm is None else max_gradient_norm
    try:
        optimizer: Optimizer = FusedLAMB(groups, **settings, max_grad_norm=most)
    except RuntimeError as error:
        raise UserError(f"Apex cannot be used ({error})", where=where, hint=hint) from error
    optimizer.register_state_dict_post_hook(move_step_to_state)
    optimizer.register_load_state_dict_pre_hook(move_step_to_groups)
    return optimizer


def move_step_to_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Give each parameter's saved state the count of steps that stands in its group, as torch's Adam does.

    Checkpoints hold the state alone.
    """
    state = dict(saved["state"])
    for group in saved["param_groups"]:
        for number in group["params"]:
            if number in state:
                state[number] = state[number] | {"step": torch.tensor(float(group["step"]))}
    return saved | {"state": state}


def move_step_to_groups(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Undo `move_step_to_state`."""
    groups = [dict(group) for group in saved["param_groups"]]
    for group in groups:
        steps = [saved["state"][number]["step"] for number in group["params"] if number in saved["state"]]
        group |= {"step": int(steps[0])} if steps else {}
    state = {
        number: {name: value for name, value in values.items() if name != "step"}
        for number, values in saved["state"].items()
    }
    return saved | {"state": state, "param_groups": groups}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer over all parameters of the model, in two groups where it takes trust ratios."""
    parameters = list(model.parameters())
    settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    betas = (config.momentum, config.beta2)
    if config.name == "adamw":
        return AdamW(parameters, **settings, betas=betas, eps=config.epsilon, fused=True)
    if config.name in LAMB:
        build = Lamb if config.name == "lamb" else build_fused_lamb
        settings |= {"betas": betas, "eps": config.epsilon, "max_gradient_norm": config.max_gradient_norm}
        return build(exempt_vectors(parameters), **settings)
    settings |= {"momentum": config.momentum, "nesterov": config.nesterov}
    if config.name == "lars":
        settings |= {"trust_coefficient": config.trust_coefficient, "eps": config.epsilon}
        return Lars(exempt_vectors(parameters), **settings)
    if config.name == "decoupled_sgd":
        return DecoupledSGD(parameters, **settings)
    optimizer = SGD(parameters, **settings, fused=True)
    start_momentum(optimizer)
    return optimizer


def exempt_vectors(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Split parameters into two groups: the second, biases and those of norms, has no weight decay."""
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def unscale(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Divide the gradients by the loss scale; a step may do so again after each further backward pass.

    An overflow in any of the passes skips the step. Torch itself allows one call in a step.
    """
    if not scaler.is_enabled():
        return
    state = scaler._per_optimizer_states[id(optimizer)]
    earlier = state["found_inf_per_device"]
    state["stage"] = OptState.READY
    scaler.unscale_(optimizer)
    for device, overflow in earlier.items():  # 0 or 1: fused kernels skip a step at exactly 1
        state["found_inf_per_device"][device].clamp_(min=overflow)


def optimizer_name(optimizer: Optimizer) -> str:
    """Write an optimizer's class as logs do: DecoupledSGD is decoupled_sgd, AdamW adamw, FusedLAMB lamb."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z]\w)", "_", type(optimizer).__name__).lower()
    return MLPERF_NAMES.get(name, name)


def schedule_factor(step: int, config: ScheduleConfig, plan: Plan, peak: float = 1.0) -> float:
    """Return the factor in [0, 1] on the peak learning rate at a step counted from 0.

    It rises linearly from 0 over the warm-up (step 0 has factor 0, as in the published runs). Then `cosine`
    and `linear` fall to 0, `step` multiplies by `factor` at each milestone, and `polynomial` falls to
    `end_learning_rate`, which is divided by the `peak` rate.
    """
    if step < plan.warmup_steps:
        return step / plan.warmup_steps
    if config.name == "step":
        return config.factor ** sum(milestone <= step for milestone in plan.milestones)
    first = 0 if config.decay_from == "start" else plan.warmup_steps
    progress = min(1.0, (step - first) / max(1, plan.decay_steps))
    if config.name == "polynomial":
        end = config.end_learning_rate / peak
        return float(end + (1 - end) * (1 - progress) ** config.power)
    return 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1 - progress


def build_schedule(optimizer: Optimizer, config: ScheduleConfig, plan: Plan) -> Callable[[int], None]:
    """Make a function that sets the learning rate of a step, counted from 0, before it is taken."""
    peaks = [group["lr"] for group in optimizer.param_groups]

    def set_rate(step: int) -> None:
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule_factor(step, config, plan, peak)

    return set_rate
