"""The differences of a configuration from the one it extends, as switches to be turned one by one.

A switch is a method, or another key, with different settings in the two configurations. A state is the set of
switches that are on: none is the configuration extended, all is the configuration itself. As a method may
need another, some states cannot be built; building shows which.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.config import schema as configs
from common.config.merge import read
from common.errors import UserError
from common.evidence.recipes import flat
from common.machine.system import machine_id
from common.repository import MAX_NAME, configurations, shorten_name
from common.training.load import PRECISIONS, load_open, read_config
from common.training.registry import refuse_process_wide

State = frozenset[str]
Build = Callable[[configs.RunConfig], None]

# keys that are no switches: a study sets its own, and is no submission
OF_STUDY = ("evaluate_every", "evaluate_offset", "evaluate_from", "micro_batch_size", "submission.division")
METHODS = "methods."


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Settings of a key, as for --set: on as in the configuration, off as in the one that it extends."""

    name: str
    key: str
    on: tuple[str, ...]
    off: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A switch turned in a state: `before` without it, `after` with it and with nothing that needs it.

    `together` are the switches that are on with one that cannot stand alone, or off with one that others
    need; `reason` is why.
    """

    before: State
    after: State
    together: tuple[str, ...] = ()
    reason: str = ""

    @property
    def contrast(self) -> dict[State, float]:
        return {self.after: 1.0, self.before: -1.0}


class Switches:
    """The switches of a configuration, in its order, and the states that can be built."""

    def __init__(
        self, benchmark: str, configuration: str, *, size: str, settings: Sequence[str], build: Build
    ) -> None:
        self.benchmark, self.configuration, self.size = benchmark, configuration, size
        self.settings, self.build = tuple(settings), build
        where = f"{benchmark}/{configuration}.yaml"
        known = configurations(benchmark)
        base = read(benchmark, configuration).values.get("extends") if configuration in known else None
        if not isinstance(base, str):
            extending = ", ".join(name for name in known if "extends" in read(benchmark, name).values)
            what = f"'{configuration}' is no configuration that extends another: it has nothing to leave out"
            raise UserError(what, where=benchmark, hint=f"ttt ablate takes one of: {extending}")
        self.base = base
        self.switches = differences(benchmark, self.base, configuration, size, self.settings)
        if not self.switches:
            raise UserError(f"is the same as {self.base} at size {size}", where=where)
        self.refuse_settings_of_switches()
        self.problems: dict[State, str] = {}  # of the states that were tried; '' where there was none
        ends: tuple[State, State] = (frozenset(), self.all)
        for state in ends:
            self.refuse_broken(state)
        refuse_process_wide([self.load(state).config for state in ends])  # all states are timed in one

    def refuse_settings_of_switches(self) -> None:
        for text, switch in itertools.product(self.settings, self.switches):
            key, own_key = f"{text.partition('=')[0].strip()}.", f"{switch.key}."
            if own_key.startswith(key) or key.startswith(own_key):
                raise UserError(f"{switch.name} is a switch of this ablation", where=f"--set {text}")

    def refuse_broken(self, state: State) -> None:
        if problem := self.problem(state):
            raise UserError(f"cannot be built: {problem}", where=self.describe(state))

    @cached_property
    def all(self) -> State:
        return frozenset(switch.name for switch in self.switches)

    def in_order(self, names: State) -> tuple[str, ...]:
        return tuple(switch.name for switch in self.switches if switch.name in names)

    def nearest(self, state: State) -> tuple[bool, str, tuple[str, ...]]:
        """Return the configuration with the fewest switches to turn, and these; True if they are off."""
        off = self.all - state
        if len(off) < len(state):
            return True, self.configuration, self.in_order(off)
        return False, self.base, self.in_order(state)

    def recipe(self, state: State) -> tuple[str, list[str]]:
        """Return a state as a configuration and the fewest settings."""
        is_off, start, names = self.nearest(state)
        turned = [switch for switch in self.switches if switch.name in names]
        settings = (switch.off if is_off else switch.on for switch in turned)
        return start, [*itertools.chain.from_iterable(settings), *self.settings]

    def describe(self, state: State) -> str:
        """Return a state in words: `baseline + ema`, `optimized - ema`."""
        is_off, start, names = self.nearest(state)
        return (" - " if is_off else " + ").join([start, *names])

    def cell_name(self, state: State) -> str:
        """Return a state as the name of a folder: `with-ema`, `without-ema`."""
        is_off, start, names = self.nearest(state)
        name = f"{'without' if is_off else 'with'}-{'.'.join(names)}" if names else start
        return shorten_name(name, self.max_cell_name)

    @cached_property
    def max_cell_name(self) -> int:
        return MAX_NAME - len(f"{machine_id(self.load(self.all).config)}-")

    def load(self, state: State) -> configs.Loaded:
        configuration, settings = self.recipe(state)
        return load_open(self.benchmark, configuration, size=self.size, settings=settings)

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
        return frozenset().union(*(self.needs(switch.name) for switch in self.switches))

    def alone(self, switch: Switch) -> Step:
        """Return the step of a switch on the configuration extended, with the switches that it needs."""
        needs = self.needs(switch.name)
        return Step(
            before=needs,
            after=needs | {switch.name},
            together=self.in_order(needs),
            reason=self.problem(frozenset({switch.name})),
        )

    def left_out(self, switch: Switch) -> Step:
        """Return the step from the configuration without a switch, and without those that need it."""
        without = self.all - {switch.name}
        if reason := self.problem(without):
            without -= {other for other in without if switch.name in self.needs(other)}
            self.refuse_broken(without)
        together = self.in_order(self.all - without - {switch.name})
        return Step(before=without, after=self.all, together=together, reason=reason)


def differences(
    benchmark: str, base: str, configuration: str, size: str, settings: Sequence[str]
) -> list[Switch]:
    """Return the keys that differ between two configurations, before any method changes one itself."""
    precisions = [text for text in settings if text.partition("=")[0].strip() in PRECISIONS]
    before, after = (read_keys(benchmark, name, size, precisions) for name in (base, configuration))
    switches = []
    for key in {**before, **after}:
        old, new = before.get(key, False), after.get(key, False)
        if old != new and key not in OF_STUDY:
            name = key.removeprefix(METHODS)
            name = f"no_{name}" if name != key and new is False else name
            switches.append(
                Switch(name=name, key=key, on=make_settings(key, old, new), off=make_settings(key, new, old))
            )
    return switches


def read_keys(benchmark: str, configuration: str, size: str, precisions: Sequence[str]) -> dict[str, Any]:
    """Read every key with its value, defaults too, then each method that is on with its settings.

    A method that drops itself from the configuration on this machine, at these precisions, is off.
    """
    config, _, _ = read_config(benchmark, configuration, size=size, settings=[])
    keys = config.model_dump(exclude={"configuration"})
    kept = load_open(benchmark, configuration, size=size, settings=precisions).config.methods
    methods = {f"{METHODS}{name}": settings for name, settings in keys.pop("methods").items() if name in kept}
    return flat(keys) | methods


def make_settings(key: str, old: object, new: object) -> tuple[str, ...]:
    """Write settings that change a key's value, as JSON, which is YAML; False removes an old mapping."""
    values = (False, new) if isinstance(old, dict) and isinstance(new, dict) else (new,)
    return tuple(f"{key}={json.dumps(value)}" for value in values)
