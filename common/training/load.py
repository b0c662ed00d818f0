"""Loads a configuration: merged, checked, changed by its methods, frozen."""

from collections.abc import Sequence
from typing import Any

from common.config.division import OPEN, check_closed
from common.config.merge import is_asked, mapping, merge, merge_base, parse_setting
from common.config.names import find_methods, short_name, split_name
from common.config.schema import Loaded, RunConfig
from common.config.validation import validate
from common.errors import UserError
from common.evidence.recipes import all_differences, flat
from common.machine.hardware import fast_precision
from common.repository import config_class

PRECISIONS = ("precision", "evaluation_precision")
AUTO = " (auto)"  # ends the origin of a key whose value this machine decided
MAX_EVALUATIONS = 10**6  # a plan lists them all


def load_config(benchmark: str, configuration: str, *, size: str, settings: list[str]) -> Loaded:
    """Merge, check and freeze a configuration; `settings` are `key.path=value` texts.

    Changes in its name (common/config/names.py) are the first settings.
    Raises UserError that names file:line and the nearest valid key.
    """
    from common.training.method import apply_hook  # these load torch
    from common.training.registry import build_methods, check_division

    config, origins, source = read_config(benchmark, configuration, size=size, settings=settings)
    check_plan(config, origins)  # methods divide by its steps, and may shorten it
    methods = build_methods(config, origins)
    changes = []
    for method in sorted(methods, key=lambda one: not one.is_configured_first):
        before, config = config, apply_hook(method, "configure", config)
        changes += [
            f"{method.name}: {change.key}: {change.before} -> {change.after}"
            for change in all_differences(flat(before.model_dump()), flat(config.model_dump()))
        ]
    config.check_origins(origins)
    check_plan(config, origins)
    check_closed(config, origins)
    check_division(config, methods, origins)
    return Loaded(config=config, origins=origins, changes=changes, source=source)


def load_open(benchmark: str, configuration: str, *, size: str, settings: Sequence[str]) -> Loaded:
    """Load a configuration for a measurement or a study, whose runs are no submission.

    Its division is open: budgets, seeds and parts of batches break rules of the closed one.
    """
    return load_config(benchmark, configuration, size=size, settings=[OPEN, *settings])


def read_config(
    benchmark: str, configuration: str, *, size: str, settings: list[str]
) -> tuple[RunConfig, dict[tuple[str, ...], str], str]:
    """Merge and check a configuration without its methods, which change nothing about its data.

    Needs no torch. Returns also the origin of each key, and the name or path of the file. Raises UserError as
    `load_config` does.
    """
    kind = config_class(benchmark)
    source, changes_of_name = split_name(benchmark, configuration, size=size)
    merged = merge_base(benchmark, source, size)
    for setting in (*changes_of_name, *settings):
        merge(merged, parse_setting(setting))
    values, origins = merged.values, merged.origins
    fixed = {"benchmark": benchmark, "configuration": short_name(source), "size": size}
    for key in sorted(fixed.keys() & values.keys()):
        raise UserError("is chosen on the command line", where=f"{origins[key,]}: {key}")
    switched = mapping(merged, "methods")
    values["methods"] = {name: entry for name, entry in switched.items() if entry is not False}
    values |= fixed
    choose_precision(values, origins)
    config = validate(kind, values, origins)
    find_methods(config, origins)
    return config, origins, source


def choose_precision(values: dict[str, Any], origins: dict[tuple[str, ...], str]) -> None:
    """Replace `auto` by the precision that is fast on this machine, so that logs state it."""
    for key in PRECISIONS:
        if values.get(key) == "auto":
            values[key] = fast_precision()
            if not is_asked(origins[key,]):
                origins[key,] += AUTO


def check_plan(config: RunConfig, origins: dict[tuple[str, ...], str]) -> None:
    """Refuse a configuration that could not take a step or would never be evaluated."""

    def fail(key: str, what: str) -> None:
        file = f"{config.benchmark}/{config.configuration}.yaml"
        raise UserError(what, where=f"{origins.get((key,), file)}: {key}")

    if config.micro_batch_size == "auto":
        config.training_bytes(1)  # raises where the benchmark cannot tell
    if config.steps_per_epoch == 0:
        fail("global_batch_size", f"{config.global_batch_size} is more than the training set holds")
    if config.steps(config.evaluate_every) == 0:
        fail("evaluate_every", "must be at least one step")
    if config.steps(config.max_duration) > MAX_EVALUATIONS * config.steps(config.evaluate_every):
        fail("max_duration", f"{config.max_duration} holds more than {MAX_EVALUATIONS:,} evaluations")
    plan = config.plan()
    if plan.num_steps == 0:
        part = "" if config.budget == 1 else f"budget {config.budget:g} of "
        fail("max_duration", f"{part}{config.max_duration} is no step: a run needs at least one step")
    if config.checkpoint_every is not None and config.steps(config.checkpoint_every) == 0:
        fail("checkpoint_every", "must be at least one step")
    if config.schedule.end_learning_rate > config.optimizer.learning_rate:
        fail("schedule", "end_learning_rate is above optimizer.learning_rate")
    if plan.warmup_steps >= plan.num_steps:
        fail(
            "schedule",
            f"warm-up ({config.schedule.warmup}) must be shorter than max_duration ({config.max_duration})",
        )
