"""Figures as text, in tables, sentences and the report."""

from collections.abc import Callable

from common.evidence.intervals import Estimate, Interval

DASH = "-"
Form = Callable[[float], str]
TWO_DIGITS: Form = "{:.2f}".format


def number(value: float) -> str:
    """Return a count or a rate with thousands separated; below 100 with a decimal."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def duration(minutes: float) -> str:
    """Return minutes, and seconds too where those are easier to read."""
    return f"{minutes:.3f} ({minutes * 60:.1f} s)" if minutes < 5 else f"{minutes:.3f}"


def percent(share: float) -> str:
    """Return a share as text: 5 %, 3.7 %."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def between(limits: Interval | None, form: Form = TWO_DIGITS) -> str:
    return f"{form(limits.low)} to {form(limits.high)}" if limits else DASH


def spread(value: float, limits: Interval | None, form: Form = TWO_DIGITS, unit: str = "") -> str:
    """Return a value with its unit and, in brackets, its interval where it has one."""
    return f"{form(value)}{unit}" + (f" ({between(limits, form)})" if limits else "")


def spread_of(estimate: Estimate, form: Form = TWO_DIGITS, unit: str = "") -> str:
    return spread(estimate.value, estimate.interval, form, unit)
