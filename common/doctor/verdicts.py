"""The verdicts of `ttt accept`: what was measured, what was expected, from where, and what a person does."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.doctor.expectations import Expectation
from common.evidence.disturbance import SPARE
from common.machine import gpus
from common.machine.line import FAULT, OK, WARNING, Line, warning

PASS, BELOW, UNKNOWN, FAILED = "pass", "below", "no expectation", "failed"
REFUSED = (BELOW, FAILED)  # with one of them a machine is not accepted
DOCTOR = "doctor"  # whose verdict compares no rate
# The names of the checks that explain a slow machine begin so.
OF_SPEED = (
    "processors",
    "speed of a core",
    "GPU",
    "Xid",
    "clocks",
    "matrix product",
    "device copy",
    "all-reduce",
)
LONGER = "the archive has what it printed; --minutes gives it longer"
AGAIN = "the next `ttt accept` on this machine compares with this rate"


def judge_checks(checks: Sequence[Line], trouble: str | None) -> Line:
    """Judge the doctor's lines; `trouble` is why there are no more of them, None where all were made."""
    faults, warnings = ([line for line in checks if line.state == state] for state in (FAULT, WARNING))
    text = f"{len(faults)} faults, {len(warnings)} warnings in {len(checks)} checks"
    state, advice = FAILED, LONGER
    if trouble is not None:
        text += f", then {trouble}"
    elif faults:
        text, advice = f"{text}: {faults[0].check}: {faults[0].found}", faults[0].advice
    else:
        state, advice = PASS, ""
        text += f": {', '.join(line.check for line in warnings)}" if warnings else ""
    numbers = {"faults": len(faults), "warnings": len(warnings), "checks": len(checks)}
    return Line(check=DOCTOR, state=state, found=text, advice=advice, values=numbers)


def find_causes(checks: Sequence[Line], figures: Mapping[str, Any]) -> list[Line]:
    """Return what explains a low rate, the likeliest first: seen during the steps, faults, then warnings."""
    causes = list[Line]()
    if is_disturbed(figures):
        text = f"other programs used {figures['taken_cores']:.1f} of {figures['cores']:g} cores meanwhile"
        causes.append(warning("processors", text, "end them, or wait"))
    for rank, state in enumerate(figures.get("gpus", ())):
        causes += gpus.find_slow_downs(f"GPU of rank {rank}", state.get("reasons", 0))
    ill = [line for line in checks if line.state != OK and line.check.startswith(OF_SPEED)]
    return causes + sorted(ill, key=lambda line: line.state != FAULT)


def is_disturbed(figures: Mapping[str, Any]) -> bool:
    """Return True if other programs took cores while a rate was measured."""
    return bool(figures.get("taken_cores", 0.0) > SPARE)


def judge_failure(name: str, trouble: str, causes: Sequence[Line]) -> Line:
    advice = f"{explain(causes[0])}; {LONGER}" if causes else LONGER
    return Line(check=name, state=FAILED, found=f"not measured: {trouble}", advice=advice)


def judge_rate(
    name: str, figures: Mapping[str, Any], expected: Expectation | None, share: float, causes: Sequence[Line]
) -> Line:
    """Compare the rate of a configuration, `name`, with the least share of the expected one.

    A prediction may be wrong by its usual error before a machine is called slow.
    """
    per_s, unit = figures["samples_per_s"], f"{figures['samples']}/s"
    text = f"{per_s:,.1f} {unit}"
    values: dict[str, Any] = {"samples_per_s": per_s}
    if expected is None:
        note = f"{text}; no record, published rate or prediction of this hardware"
        advice = f"this rate is not kept: {causes[0]}" if is_disturbed(figures) else AGAIN
        return Line(check=name, state=UNKNOWN, found=note, advice=advice, values=values)
    part, least = per_s / expected.samples_per_s, share / expected.error
    values |= {
        "expected_per_s": expected.samples_per_s,
        "source": expected.source,
        "share": part,
        "least_share": least,
        "causes": [str(cause) for cause in causes],
    }
    text += f", {part:.0%} of {expected.samples_per_s:,.1f} ({expected.source}); {least:.0%} is enough"
    if part >= least:
        return Line(check=name, state=PASS, found=text, values=values)
    command = f"ttt inspect profile {name} --size {figures['size']}"
    advice = f"no cause was seen: compare with another machine; {command} says where a step goes"
    advice = explain(causes[0]) if causes else advice
    return Line(check=name, state=BELOW, found=text, advice=advice, values=values)


def explain(cause: Line) -> str:
    return f"likely cause: {cause}"
