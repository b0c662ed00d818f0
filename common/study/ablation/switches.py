"""The differences of a configuration from the one it extends, as switches to be turned one by one.

A switch is a method, or another key, that the two configurations have different settings of. A state is the
set of switches that are on: none is the configuration extended, all is the configuration itself. Not every
state can be built, since a method may need another; which, is found by trying.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from common.config import schema as configs
from common.config.merge import mapping, merge_files, read
from common.config.validation import validate
from common.errors import UserError, nearest
from common.evidence.recipes import flat
from common.repository import benchmark_module, configurations
from common.training.load import load_config

State = frozenset[str]
Build = Callable[[configs.RunConfig], None]

CADENCE = ("evaluate_every", "evaluate_from")  # no switches: a study has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Settings, as for --set, that turn it on in the configuration extended, and off in the other."""

    name: str
    method: str | None  # None for a key that is no method's
    on: tuple[str, ...]
    off: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A switch turned in a state: `before` without it, `after` with it and with nothing that needs it.

    `together` are the other switches on in the state of one that cannot stand alone, or off in that of one
    that others need; `reason` is why.
    """

    switch: Switch
    before: State
    after: State
    together: tuple[str, ...] = ()
    reason: str = ""


class Switches:
    """The switches of a configuration, in its order, and the states that can be built."""

    def __init__(
        self, benchmark: str, configuration: str, *, size: str, settings: Sequence[str], build: Build
    ) -> None:
        self.benchmark, self.configuration, self.size = benchmark, configuration, size
        self.settings, self.build = tuple(settings), build
        self.base = extended(benchmark, configuration)
        self.switches = differences(benchmark, self.base, configuration, size)
        self.refuse_switched()
        self.problems: dict[State, str] = {}  # of the states that were tried; '' where there was none
        for state in (frozenset(), self.all):
            if problem := self.problem(state):
                raise UserError(f"cannot be built: {problem}", where=self.describe(state))

    def refuse_switched(self) -> None:
        for text in self.settings:
            key = text.partition("=")[0].strip()
            for switch in self.switches:
                switched = f"methods.{switch.method}" if switch.method else switch.name
                if f"{switched}.".startswith(f"{key}.") or f"{key}.".startswith(f"{switched}."):
                    raise UserError(f"{switch.name} is a switch of this ablation", where=f"--set {text}")

    @cached_property
    def all(self) -> State:
        return frozenset(switch.name for switch in self.switches)

    @cached_property
    def by_name(self) -> dict[str, Switch]:
        return {switch.name: switch for switch in self.switches}

    def in_order(self, names: State) -> tuple[str, ...]:
        """Return names in the order of the configuration."""
        return tuple(switch.name for switch in self.switches if switch.name in names)

    def recipe(self, state: State) -> tuple[str, list[str]]:
        """Return a state as a configuration and the fewest settings."""
        off = self.all - state
        if len(off) < len(state):
            settings = (self.by_name[name].off for name in self.in_order(off))
            return self.configuration, [*chain.from_iterable(settings), *self.settings]
        settings = (self.by_name[name].on for name in self.in_order(state))
        return self.base, [*chain.from_iterable(settings), *self.settings]

    def describe(self, state: State) -> str:
        """Return a state in words: `baseline + ema`, `optimized - ema`."""
        off = self.all - state
        start, mark, names = (
            (self.configuration, " - ", off) if len(off) < len(state) else (self.base, " + ", state)
        )
        return mark.join([start, *self.in_order(names)])

    def load(self, state: State) -> configs.Loaded:
        """Return the merged configuration of a state."""
        configuration, settings = self.recipe(state)
        return load_config(self.benchmark, configuration, size=self.size, settings=settings)

    def problem(self, state: State) -> str:
        """Return why a state cannot be built; '' if it can."""
        if state not in self.problems:
            try:
                self.build(self.load(state).config)
                self.problems[state] = ""
            except UserError as error:
                self.problems[state] = error.what
        return self.problems[state]

    def needs(self, name: str) -> State:
        """Return the fewest others, leaving out one after the other, without which a switch cannot be on."""
        kept: State = frozenset({name})
        if self.problem(kept):
            kept = self.all
            for other in reversed(self.in_order(self.all - {name})):
                if not self.problem(kept - {other}):
                    kept -= {other}
        return kept - {name}

    @cached_property
    def needed(self) -> State:
        """The switches that others need."""
        return frozenset().union(*(self.needs(switch.name) for switch in self.switches))

    def alone(self, switch: Switch) -> Step:
        """Return a switch turned on in the configuration extended, or with what it needs."""
        needs = self.needs(switch.name)
        return Step(
            switch=switch,
            before=needs,
            after=needs | {switch.name},
            together=self.in_order(needs),
            reason=self.problem(frozenset({switch.name})),
        )

    def left_out(self, switch: Switch) -> Step:
        """Return a switch that the configuration is to be without, and without those that need it."""
        without = self.all - {switch.name}
        reason = self.problem(without)
        if reason:
            without -= {other for other in without if switch.name in self.needs(other)}
            if problem := self.problem(without):
                raise UserError(f"cannot be built: {problem}", where=self.describe(without))
        return Step(
            switch=switch,
            before=without,
            after=self.all,
            together=self.in_order(self.all - without - {switch.name}),
            reason=reason,
        )


def extended(benchmark: str, configuration: str) -> str:
    """Return the name of the configuration that another extends. Raises UserError where there is none."""
    benchmark_module(benchmark)  # answers an unknown name
    if configuration not in configurations(benchmark):
        hint = nearest(configuration, configurations(benchmark))
        raise UserError(f"unknown configuration '{configuration}' of {benchmark}", hint=hint)
    base = read(benchmark, configuration).values.get("extends")
    if not isinstance(base, str):
        raise UserError(
            "extends no other configuration: there is nothing to leave out",
            where=f"{benchmark}/{configuration}.yaml",
        )
    return base


def differences(benchmark: str, base: str, configuration: str, size: str) -> list[Switch]:
    """Return what one configuration changes of the other, before any method changes anything itself."""
    (before, methods_before), (after, methods_after) = (
        merged(benchmark, name, size) for name in (base, configuration)
    )
    switches = [
        Switch(name=key, method=None, on=(setting(key, after[key]),), off=(setting(key, before[key]),))
        for key in after
        if before[key] != after[key] and key not in CADENCE
    ]
    for name in {**methods_before, **methods_after}:
        old, new = methods_before.get(name), methods_after.get(name)
        if old != new:
            shown = f"no_{name}" if new is None else name
            on, off = turned(name, old, new), turned(name, new, old)
            switches.append(Switch(name=shown, method=name, on=on, off=off))
    if not switches:
        raise UserError(f"is the same as {base} at size {size}", where=f"{benchmark}/{configuration}.yaml")
    return switches


def merged(benchmark: str, configuration: str, size: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return every key with its value, defaults too, and the settings of each method that is on."""
    values, origins = merge_files(benchmark, configuration, size)
    switched = mapping(values, "methods", origins)
    values["methods"] = {name: entry for name, entry in switched.items() if entry is not False}
    values |= {"benchmark": benchmark, "configuration": "", "size": size}
    config = validate(benchmark_module(benchmark).Config, values, origins)
    keys = config.model_dump()
    methods = keys.pop("methods")
    return flat(keys), methods


def setting(key: str, value: object) -> str:
    """Return a value as for --set; JSON is YAML."""
    return f"{key}={json.dumps(value)}"


def turned(name: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the settings that give a method these settings; None: it is off."""
    off, on = (f"methods.{name}=false",), (setting(f"methods.{name}", new),)
    if new is None:
        return off
    return on if old is None else off + on  # else they would be laid over the old ones
