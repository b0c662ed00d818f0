"""The rules of MLPerf's closed division for ResNet-50, as of its last round, v4.0.

Source: training_rules.adoc, rows `resnet` of the table of deprecated hyperparameters, its sections about
CLOSED, and the reference (evaluation on 224 of 256 pixels, crops of 5 % of the area and more).
"""

import math
from dataclasses import replace
from typing import Any

from common.config.division import Rule, all_equal, equals, first_even_evaluation, reaches
from common.evidence.log import IMAGENET_SAMPLES, TARGETS

LARGE_BATCH = 32_768  # from this batch size on, the momentum of LARS is free
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


def with_lars(rule: Rule) -> Rule:
    return replace(rule, holds=lambda config: not is_lars(config) or rule.holds(config))


def allows_momentum(config: Any) -> bool:
    is_free = is_lars(config) and config.global_batch_size >= LARGE_BATCH
    return is_free or config.optimizer.momentum == 0.9


def allows_weight_decay(config: Any) -> bool:
    decay = config.optimizer.weight_decay
    return decay > 0 and is_whole(math.log2(decay / BASE_DECAY))


def allows_smoothing(config: Any) -> bool:
    return config.methods.get("label_smoothing", {"smoothing": 0.1})["smoothing"] == 0.1


def has_cadence(config: Any) -> bool:
    """True if a run is evaluated every 4 epochs, the first time after 1, 2, 3 or 4 of them."""
    first = first_even_evaluation(config)
    is_every_4 = config.steps(config.evaluate_every) == CADENCE_EPOCHS * config.steps_per_epoch
    return is_every_4 and first is not None and first % config.steps_per_epoch == 0


HYPERPARAMETERS = (
    Rule(
        name="Hyperparameters: opt_name",
        key="optimizer.name",
        asks="sgd or lars",
        holds=lambda c: c.optimizer.name in ("sgd", "lars"),
    ),
    Rule(
        name="Hyperparameters: {optimizer}_opt_momentum",
        key="optimizer.momentum",
        asks="0.9 (any with lars from a batch of 32,768 on)",
        holds=allows_momentum,
    ),
    equals("Hyperparameters: {optimizer}_opt_momentum", "optimizer.nesterov", False),
    Rule(
        name="Hyperparameters: {optimizer}_opt_weight_decay",
        key="optimizer.weight_decay",
        asks="0.0001 * 2^N with a whole N",
        holds=allows_weight_decay,
    ),
    Rule(
        name="Hyperparameters: {optimizer}_opt_weight_decay",
        key="methods.no_norm_decay",
        asks="{} with sgd: scales and shifts of norms do not decay",
        holds=lambda c: is_lars(c) or "no_norm_decay" in c.methods,
    ),
    with_lars(equals("Hyperparameters: lars_epsilon", "optimizer.epsilon", 0)),
    with_lars(equals("Hyperparameters: the reference's lars", "optimizer.trust_coefficient", 0.001)),
    Rule(
        name="Hyperparameters: sgd_opt_base_learning_rate",
        key="optimizer.learning_rate",
        asks="a multiple of 0.001",
        holds=lambda c: is_lars(c) or is_whole(c.optimizer.learning_rate / RATE_UNIT),
    ),
    equals("Hyperparameters: {optimizer}_opt_learning_rate_decay_poly_power", "schedule.name", "polynomial"),
    equals("Hyperparameters: {optimizer}_opt_learning_rate_decay_poly_power", "schedule.power", 2),
    equals("Hyperparameters: {optimizer}_opt_end_learning_rate", "schedule.end_learning_rate", 1e-4),
    equals("Hyperparameters: {optimizer}_opt_learning_rate_decay_steps", "schedule.decay_from", "warmup"),
    Rule(
        name="Hyperparameters: opt_learning_rate_warmup_epochs",
        key="schedule.warmup",
        asks="whole epochs with sgd",
        holds=lambda c: is_lars(c) or c.steps(c.schedule.warmup) % c.steps_per_epoch == 0,
    ),
    Rule(
        name="Hyperparameters: label smoothing",
        key="methods.label_smoothing.smoothing",
        asks="0.1, or none",
        holds=allows_smoothing,
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
        name="Data Representation",
        key="data.loader",
        asks="workers or dali, whose images are not squashed",
        holds=lambda c: c.data.loader != "resident",
    ),
    reaches(TARGETS["resnet"]),
    Rule(
        name="Quality measure: evaluation frequency",
        key="evaluate_every",
        asks=ASK_CADENCE,
        holds=has_cadence,
        full_only=True,
    ),
    *all_equal(SAME_AS_THE_REFERENCE, full_only=True),
)
