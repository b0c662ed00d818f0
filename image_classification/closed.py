"""The rules of MLPerf's closed division for ResNet-50, as of its last round, v4.0.

Source: training_rules.adoc, rows `resnet` of the table of deprecated hyperparameters, its sections about
CLOSED, and the reference (batch 256 of images, 224 pixels, crops of 5 % of the area and more).
"""

import math
from typing import Any

from common.config.division import Rule, equals, is_evaluated_evenly
from common.evidence.log import IMAGENET_SAMPLES, TARGETS

LARGE_BATCH = 32_768  # from which the momentum of LARS is free
CADENCE_EPOCHS = 4
ASK_CADENCE = (
    f"evaluations {CADENCE_EPOCHS}ep apart (evaluate_offset 0ep to {CADENCE_EPOCHS - 1}ep, no evaluate_from)"
    " and a max_duration that ends with one"
)
BASE_DECAY, RATE_UNIT = 1e-4, 1e-3
ROUNDING = 1e-5  # of the official checker


def is_lars(config: Any) -> bool:
    return bool(config.optimizer.name == "lars")


def is_whole(number: float) -> bool:
    return abs(round(number) - number) < ROUNDING


def has_momentum(config: Any) -> bool:
    is_free = is_lars(config) and config.global_batch_size >= LARGE_BATCH
    return is_free or config.optimizer.momentum == 0.9


def has_weight_decay(config: Any) -> bool:
    decay = config.optimizer.weight_decay
    return decay > 0 and is_whole(math.log2(decay / BASE_DECAY))


def has_smoothing(config: Any) -> bool:
    return config.methods.get("label_smoothing", {"smoothing": 0.1})["smoothing"] == 0.1


def has_cadence(config: Any) -> bool:
    """True if a run is evaluated every 4 epochs, the first time after 1, 2, 3 or 4 of them."""
    first = next(step for step in config.plan().evaluation_steps if step)
    is_every_4 = config.steps(config.evaluate_every) == CADENCE_EPOCHS * config.steps_per_epoch
    return is_every_4 and first % config.steps_per_epoch == 0 and is_evaluated_evenly(config)


HYPERPARAMETERS = (
    Rule(
        "Hyperparameters: opt_name",
        "optimizer.name",
        "sgd or lars",
        lambda c: c.optimizer.name in ("sgd", "lars"),
    ),
    Rule(
        *("Hyperparameters: {optimizer}_opt_momentum", "optimizer.momentum"),
        *("0.9 (any with lars from a batch of 32,768 on)", has_momentum),
    ),
    equals("Hyperparameters: {optimizer}_opt_momentum", "optimizer.nesterov", False),
    Rule(
        *("Hyperparameters: {optimizer}_opt_weight_decay", "optimizer.weight_decay"),
        *("0.0001 * 2^N with a whole N", has_weight_decay),
    ),
    Rule(
        *("Hyperparameters: {optimizer}_opt_weight_decay", "methods.no_norm_decay"),
        *(
            "{} with sgd: scales and shifts of norms do not decay",
            lambda c: is_lars(c) or "no_norm_decay" in c.methods,
        ),
    ),
    Rule(
        *("Hyperparameters: lars_epsilon", "optimizer.epsilon"),
        *("0", lambda c: not is_lars(c) or c.optimizer.epsilon == 0),
    ),
    Rule(
        *("Hyperparameters: the reference's lars", "optimizer.trust_coefficient"),
        *("0.001", lambda c: not is_lars(c) or c.optimizer.trust_coefficient == 0.001),
    ),
    Rule(
        *("Hyperparameters: sgd_opt_base_learning_rate", "optimizer.learning_rate"),
        *("a multiple of 0.001", lambda c: is_lars(c) or is_whole(c.optimizer.learning_rate / RATE_UNIT)),
    ),
    equals("Hyperparameters: {optimizer}_opt_learning_rate_decay_poly_power", "schedule.name", "polynomial"),
    equals("Hyperparameters: {optimizer}_opt_learning_rate_decay_poly_power", "schedule.power", 2),
    equals("Hyperparameters: {optimizer}_opt_end_learning_rate", "schedule.end_learning_rate", 1e-4),
    Rule(
        *("Hyperparameters: opt_learning_rate_warmup_epochs", "schedule.warmup"),
        *(
            "whole epochs with sgd",
            lambda c: is_lars(c) or c.steps(c.schedule.warmup) % c.steps_per_epoch == 0,
        ),
    ),
    Rule(
        *(
            "Hyperparameters: label smoothing",
            "methods.label_smoothing.smoothing",
            "0.1, or none",
            has_smoothing,
        ),
    ),
)
SAME_AS_THE_REFERENCE = {  # name of the rule -> keys and their values at size full
    "Graph Definition": {"model.name": "resnet50", "model.num_classes": 1000},
    "Training and Test Sets": {
        "data.num_train_samples": IMAGENET_SAMPLES,
        "data.num_evaluation_samples": 50_000,
    },
    "Data Representation": {
        "data.train_crop_px": 224,
        "data.crop_px_by_epoch": [],
        "data.evaluation_resize_px": 256,
        "data.evaluation_crop_px": 224,
        "data.encoded_px": None,
    },
    "Preprocessing During the Run": {
        "data.min_crop_area": 0.05,
        "data.flip_probability": 0.5,
        "data.alternates_flips": False,
    },
}
RULES = (
    *HYPERPARAMETERS,
    equals("Weight and Bias Initialization", "model.initial_weights", "reference"),
    Rule(
        *("Data Representation", "data.loader", "workers or dali: resident images are squashed"),
        lambda c: c.data.loader != "resident",
    ),
    Rule(
        *("Quality measure: target", "target", f"{TARGETS['resnet']} (size mini: this or more)"),
        lambda c: c.target == TARGETS["resnet"] or (c.size == "mini" and c.target > TARGETS["resnet"]),
    ),
    Rule(
        *("Quality measure: evaluation frequency", "evaluate_every"),
        *(ASK_CADENCE, has_cadence, True),
    ),
    *(
        equals(name, key, value, full_only=True)
        for name, values in SAME_AS_THE_REFERENCE.items()
        for key, value in values.items()
    ),
)
