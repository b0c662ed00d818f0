"""The plan of an ablation: which states of a configuration's switches are to be measured, and why."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import UserError
from common.study.ablation.factorial import Design, design, smallest
from common.study.ablation.switches import State, Switches


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """The states to be measured: `single` for each switch alone and left out, `factorial` for pairs."""

    switches: Switches
    single: tuple[State, ...]
    design: Design | None

    @property
    def ends(self) -> tuple[State, State]:
        """The configuration extended, and the configuration."""
        return State(), self.switches.all

    @property
    def factorial(self) -> tuple[State, ...]:
        """The states of the design; the switches that others need are on in every one."""
        return tuple(run | self.switches.needed for run in self.design.runs) if self.design else ()

    @property
    def states(self) -> tuple[State, ...]:
        return tuple(dict.fromkeys([*self.ends, *self.single, *self.factorial]))


def plan(switches: Switches, max_design: int) -> Ablation:
    """Return what is to be measured; the factorial is over the switches that no other needs."""
    steps = [
        step for switch in switches.switches for step in (switches.alone(switch), switches.left_out(switch))
    ]
    single = itertools.chain.from_iterable((step.before, step.after) for step in steps)
    factors = switches.in_order(switches.all - switches.needed)
    made = None
    if len(factors) > 1 and max_design:
        if max_design < smallest(len(factors)):
            hint = f"--max-design {smallest(len(factors))} or more, or 0 for none"
            raise UserError(f"{len(factors)} switches need a larger factorial", hint=hint)
        made = design(factors, max_design)
    ablation = Ablation(switches=switches, single=tuple(dict.fromkeys(single)), design=made)
    for state in ablation.states:
        switches.refuse_broken(state)
    return ablation


def describe(ablation: Ablation) -> Iterable[str]:
    switches = ablation.switches
    yield f"{switches.benchmark} {switches.configuration} over {switches.base}, size {switches.size}:"
    for switch in switches.switches:
        alone, left_out = switches.alone(switch), switches.left_out(switch)
        needs = [f"with {', '.join(alone.together)} ({alone.reason})"] if alone.together else []
        if left_out.together:
            needs.append(f"left out together with {', '.join(left_out.together)} ({left_out.reason})")
        yield f"  {switch.name}: {'; '.join(needs) or 'stands alone'}"
    if ablation.design:
        held = f"; {', '.join(switches.in_order(switches.needed))} always on" if switches.needed else ""
        yield f"factorial of step times: {ablation.design.describe()}{held}"
