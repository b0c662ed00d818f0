"""The closed division of MLPerf Training: its rules as a table, and the check of a configuration.

A configuration with `submission.division: closed` is held to the rules of its benchmark, `closed.py` in its
folder, and to those below. Rules about absolute numbers (`full_only`) hold at size full alone.
Source: MLCommons' training_rules.adoc, its sections on CLOSED and its table of hyperparameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, NoReturn

from common import yaml_file
from common.errors import UserError

DOCUMENT = "training_rules"
OPEN = "submission.division=open"
Origins = Mapping[tuple[str, ...], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule that a configuration `holds` or breaks.

    `name` is its section in training_rules.adoc and its subject there; `{optimizer}` in it stands for the
    optimizer in use. `key` is the setting that can break it, `asks` describes the allowed values.
    """

    name: str
    key: str
    asks: str | Callable[[Any], str]
    holds: Callable[[Any], bool]
    full_only: bool = False


def equals(name: str, key: str, value: object, *, full_only: bool = False) -> Rule:
    """Return the rule that a key has this value."""
    return Rule(
        name=name,
        key=key,
        asks=format_value(value),
        holds=lambda config: bool(read_key(config, key) == value),
        full_only=full_only,
    )


def all_equal(table: Mapping[str, Mapping[str, object]], *, full_only: bool = False) -> list[Rule]:
    """Return the rules that keys have these values, by the names of the rules."""
    return [
        equals(name, key, value, full_only=full_only)
        for name, values in table.items()
        for key, value in values.items()
    ]


def reaches(target: float) -> Rule:
    """Return the rule about the target of a benchmark; size mini may have a higher one."""
    return Rule(
        name="Quality measure: target",
        key="target",
        asks=f"{target} (size mini: this or more)",
        holds=lambda c: c.target == target or (c.size == "mini" and c.target > target),
    )


def read_key(config: Any, key: str) -> Any:
    """Read a key such as `optimizer.momentum`; None for a method that is off."""

    def read(value: Any, name: str) -> Any:
        return value.get(name) if isinstance(value, dict) else getattr(value, name, None)

    return reduce(read, key.split("."), config)


def format_value(value: object) -> str:
    if isinstance(value, dict):  # the settings of a method
        return "on"
    return yaml_file.spell(value)


def first_even_evaluation(config: Any) -> int | None:
    """Return the step of the first evaluation if the others follow at every `evaluate_every`, else None.

    An evaluation of the untrained model is ignored. None also for a first step after `evaluate_every`.
    """
    every = config.steps(config.evaluate_every)
    steps = [step for step in config.plan().evaluation_steps if step]
    is_even = all(after - before == every for before, after in zip(steps, steps[1:], strict=False))
    return int(steps[0]) if is_even and steps[0] <= every else None


RULES = (
    equals("Quality measure: stop at the target", "stop_at_target", True),
    equals("Hyperparameters: number of training steps", "budget", 1.0),
)


def check_closed(config: Any, origins: Origins) -> None:
    """Raise UserError for the first rule of the closed division that a configuration of it breaks."""
    if config.submission.division != "closed":
        return
    if not config.closed_rules:
        what = f"{config.benchmark} states no rules of the closed division"
        raise UserError(what, where="submission.division", hint=f"--set {OPEN}")
    for rule in (*RULES, *config.closed_rules):
        if (config.size == "full" or not rule.full_only) and not rule.holds(config):
            asks = rule.asks if isinstance(rule.asks, str) else rule.asks(config)
            refuse(config, origins, rule.key, asks, rule.name.format(optimizer=config.optimizer.name))


def refuse(config: Any, origins: Origins, key: str, asks: str, name: str) -> NoReturn:
    """Raise UserError for the value of a key that the rule `name` forbids."""
    path = tuple(key.split("."))
    places = (origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins)
    place = next(places, f"{config.benchmark}/{config.configuration}.yaml")
    value = read_key(config, key)
    shown = "off" if value is None and path[0] == "methods" else format_value(value)
    raise UserError(
        f"is {shown}; the closed division asks for {asks} ({DOCUMENT}, {name})",
        where=f"{place}: {key}",
        hint=f"--set {OPEN} trains it all the same",
    )


def check_seed(config: Any, seed: int | None) -> None:
    """Raise UserError for a seed that a person chose for closed runs."""
    if seed is not None and config.submission.division == "closed":
        what = f"seeds of the closed division are drawn by the system ({DOCUMENT}, Random numbers)"
        raise UserError(what, where=f"--seed {seed}", hint=f"leave it out, or --set {OPEN}")
