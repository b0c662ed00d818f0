"""Optimizers and step-wise schedules of the published recipes."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.optim import SGD, AdamW, Optimizer

from common.config.schema import OptimizerConfig, Plan, ScheduleConfig


class DecoupledSGD(SGD):
    """SGD with momentum whose weight decay follows the schedule, not the gradient.

    Each step: p <- p * (1 - weight_decay * lr / peak_lr), then buf <- momentum * buf + g, p <- p - lr * buf;
    with `nesterov` the last is p <- p - lr * (g + momentum * buf).
    At the peak a step decays by `weight_decay` itself, whatever the learning rate. Every parameter decays.
    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101; MosaicML's DecoupledSGDW.
    """

    def __init__(
        self, parameters: Any, *, lr: float, momentum: float, weight_decay: float, nesterov: bool = False
    ) -> None:
        super().__init__(
            parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, fused=True
        )
        self.peak_lr = lr
        start_momentum(self)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Decay the weights, then take a plain SGD step."""
        decays = [group["weight_decay"] for group in self.param_groups]
        overflow = getattr(self, "found_inf", None)  # 1 where loss scaling skips the step, else 0
        for group, decay in zip(self.param_groups, decays, strict=True):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            factor = decay * group["lr"] / self.peak_lr
            torch._foreach_mul_(parameters, 1 - factor if overflow is None else 1 - factor * (1 - overflow))
            group["weight_decay"] = 0.0  # not once more, in the gradient
        result = super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        return result


def start_momentum(optimizer: SGD) -> None:
    """Give every parameter a momentum of 0, in place, which equals starting with the first gradient.

    Fused SGD would leave it uninitialised when loss scaling skips the first step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer over all parameters of the model in one group."""
    parameters = list(model.parameters())
    settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.name == "adamw":
        betas = (config.momentum, config.beta2)
        return AdamW(parameters, **settings, betas=betas, eps=config.epsilon, fused=True)
    settings |= {"momentum": config.momentum, "nesterov": config.nesterov}
    if config.name == "decoupled_sgd":
        return DecoupledSGD(parameters, **settings)
    optimizer = SGD(parameters, **settings, fused=True)
    start_momentum(optimizer)
    return optimizer


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
    for device, overflow in earlier.items():
        state["found_inf_per_device"][device] += overflow


def optimizer_name(optimizer: Optimizer) -> str:
    """Write an optimizer's class as logs do: DecoupledSGD is decoupled_sgd, AdamW adamw."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z]\w)", "_", type(optimizer).__name__).lower()


def schedule_factor(step: int, config: ScheduleConfig, plan: Plan) -> float:
    """Return the factor in [0, 1] on the peak learning rate at a step counted from 0.

    Linear from 0 over the warm-up (step 0 has factor 0, as in the published runs), then `cosine` or `linear`
    to 0, or `step`: times the configured factor at each milestone.
    """
    if step < plan.warmup_steps:
        return step / plan.warmup_steps
    if config.name == "step":
        return config.factor ** sum(milestone <= step for milestone in plan.milestones)
    progress = min(1.0, (step - plan.warmup_steps) / max(1, plan.num_steps - plan.warmup_steps))
    return 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1 - progress


def build_schedule(optimizer: Optimizer, config: ScheduleConfig, plan: Plan) -> Callable[[int], None]:
    """Make a function that sets the learning rate of a step, counted from 0, before it is taken."""
    peaks = [group["lr"] for group in optimizer.param_groups]

    def set_rate(step: int) -> None:
        factor = schedule_factor(step, config, plan)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor

    return set_rate
