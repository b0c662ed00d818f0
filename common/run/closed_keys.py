"""The hyperparameters that MLPerf's closed rulesets require in a log, from the run's optimizer and plan.

ResNet-50 logs the keys of SGD or LARS, BERT the keys of LAMB. Source: the official compliance checker,
rulesets 4.0.0 (resnet) and 5.0.0 (bert).
"""

from torch.nn.modules.batchnorm import _BatchNorm

from common.config.schema import LAMB
from common.training.step import Training

Number = int | float


def closed_keys(run: Training) -> dict[str, Number]:
    """Return the log keys that only the closed division requires; none for an open run."""
    if run.config.submission.division == "open":
        return {}
    name = run.config.optimizer.name
    return lamb_keys(run) if name in LAMB else sgd_keys(run, name)


def lamb_keys(run: Training) -> dict[str, Number]:
    group, schedule, plan = run.optimizer.param_groups[0], run.config.schedule, run.plan
    first = 0 if schedule.decay_from == "start" else plan.warmup_steps
    return {
        "opt_learning_rate_training_steps": first + plan.decay_steps,  # the rate is lowest from here on
        "num_warmup_steps": plan.warmup_steps,
        "start_warmup_step": 0,
        "opt_lamb_epsilon": group["eps"],
        "opt_lamb_beta_1": group["betas"][0],
        "opt_lamb_beta_2": group["betas"][1],
        "opt_lamb_weight_decay_rate": group["weight_decay"],
        "opt_lamb_learning_rate_decay_poly_power": schedule.power,
    }


def sgd_keys(run: Training, name: str) -> dict[str, Number]:
    """Return the keys of SGD, or of LARS with its epsilon; decay is counted from the end of the warm-up."""
    group, schedule, plan = run.optimizer.param_groups[0], run.config.schedule, run.plan
    epochs = plan.warmup_steps / plan.steps_per_epoch
    warmup_epochs = int(epochs) if epochs.is_integer() else epochs
    keys: dict[str, Number] = {
        f"{name}_opt_base_learning_rate": group["lr"],
        f"{name}_opt_end_learning_rate": schedule.end_learning_rate,
        f"{name}_opt_learning_rate_decay_poly_power": schedule.power,
        f"{name}_opt_learning_rate_decay_steps": plan.decay_steps,
        f"{name}_opt_learning_rate_warmup_epochs": warmup_epochs,
        f"{name}_opt_momentum": group["momentum"],
        f"{name}_opt_weight_decay": group["weight_decay"],
        "opt_learning_rate_warmup_epochs": warmup_epochs,
    }
    if name == "lars":
        keys["lars_epsilon"] = run.optimizer.eps  # type: ignore[attr-defined]
    if any(isinstance(module, _BatchNorm) for module in run.model.modules()):
        keys["model_bn_span"] = run.benchmark.micro_batch_sizes[0]  # samples that share statistics
    return keys
