"""The ledger of an ablation: the effect of each switch of a configuration, alone and beside all others.

`ttt ablate` writes NAME.ledger.json beside the logs that it was computed from; `ttt report` reads it. A ratio
is a time or rate with the switch over the one without it; a difference is with minus without.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from common.errors import first_fault
from common.evidence.intervals import ALPHA, Estimate
from common.evidence.log import MAX_BYTES
from common.evidence.paths import find_files, label
from common.evidence.records import read_bytes
from common.evidence.text import DASH, size_title, spread_of

PATTERN = "*.ledger.json"
LARGEST_BOUND = 10.0  # of a method that relieves nearly the whole step: no limit in practice
SMALLEST_LOSS = 0.01  # of the base's time: less is not worth a warning

Text = Annotated[str, StringConstraints(max_length=2000)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Trained(Strict):
    """One run: samples at the interpolated crossing of the target, None if missed; the last quality.

    `is_bound`: the first evaluation was past the target, so `samples` is an upper bound.
    """

    seed: Text
    samples: float | None
    quality: float
    is_bound: bool = False


class State(Strict):
    """A set of switches that was built, timed and, unless `runs` is empty, trained."""

    name: Text
    ms: float  # of a sample, in training steps
    runs: list[Trained] = []


class EffectTest(Strict):
    """A test whether a switch has any effect; p after Holm's correction for all switches of a table.

    `detectable` is the effect, a fraction or a difference of quality or of milliseconds, that is shown with
    80 % probability at 5 % / number of switches; None where so few turns cannot show any.
    """

    p_value: float
    detectable: float | None = None

    @property
    def is_shown(self) -> bool:
        return self.p_value < ALPHA


class Effect(Strict):
    """The effect of a switch between two states; the switches `together` had to be turned with it.

    `tests` are by the name of a figure; ledgers of earlier versions have none.
    """

    before: Text
    after: Text
    together: list[Text]
    reason: Text  # why they were turned together
    before_ms: Annotated[float, Field(gt=0)]
    after_ms: float
    throughput: Estimate
    samples: Estimate | None
    quality: Estimate | None
    minutes_saved: Estimate | None
    note: Text
    tests: dict[Text, EffectTest] = {}


class Row(Strict):
    """One switch; `bound` is Amdahl's bound of its throughput ratio."""

    name: Text
    relieves: list[Text]
    bound: float | None
    alone: Effect
    left_out: Effect


class Pair(Strict):
    """Two switches of the factorial design: milliseconds a sample that they save, one by one and together.

    `lost_ms` is the first minus the second. `aliases` are pairs that the design cannot tell from this one.
    If the states were trained, `samples` is the ratio to target of both over the product of the two single
    ratios, `quality` the difference of both minus the sum of the single ones. `tests` are by figure.
    """

    names: list[Text]
    aliases: list[Text]
    one_by_one_ms: float
    together_ms: float
    lost_ms: Estimate
    samples: Estimate | None = None
    quality: Estimate | None = None
    tests: dict[Text, EffectTest] = {}


class Composition(Strict):
    """The ratio of the whole to the base: measured, and predicted from the switches alone."""

    of: Text
    measured: Estimate
    product: Estimate  # of the single ratios: right if all act on the whole time
    added: Estimate | None  # by the sum of saved times: right if each acts on a part of its own


class Ledger(Strict):
    """An ablation."""

    benchmark: Text
    configuration: Text
    base: Text
    size: Text
    hardware: Text
    versions: dict[Text, Text]
    commit: Text
    samples_name: Text
    quality_name: Text
    target: float
    num_turns: int
    shares: dict[Text, float]  # of a step of the base
    design: Text
    states: list[State]
    rows: list[Row]
    pairs: list[Pair]
    compositions: list[Composition]
    warnings: list[Text]
    notes: list[Text]

    @property
    def title(self) -> str:
        where = f"{size_title(self.size)}, {self.hardware}"
        return f"{self.benchmark} {self.configuration} over {self.base}, {where}"

    @property
    def minutes(self) -> str:
        """A column's unit: at size full, one device computes its share of the batch."""
        return "minutes of one device" if self.size == "full" else "minutes"

    @property
    def alone(self) -> list[dict[str, str]]:
        """The rows of the first table, most minutes saved first."""
        return [
            {"method": row.name}
            | effect_cells(row.alone, "with", self.minutes)
            | {
                "relieves": ", ".join(row.relieves) or "no card says",
                "bound": DASH if row.bound is None else times(row.bound),
            }
            for row in sorted(self.rows, key=lambda row: savings_key(row.alone))
        ]

    @property
    def left_out(self) -> list[dict[str, str]]:
        """The rows of the second table, most minutes saved beside all other switches first."""
        return [
            {"method": row.name} | effect_cells(row.left_out, "out too", self.minutes)
            for row in sorted(self.rows, key=lambda row: savings_key(row.left_out))
        ]

    @property
    def parts(self) -> str:
        """The parts of a step of the base, the largest first."""
        ordered = sorted(self.shares.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {share:.1%}" for name, share in ordered)

    @property
    def paired(self) -> list[dict[str, str]]:
        """The pairs of the factorial, the largest loss first."""
        return [
            {
                "pair": " and ".join(pair.names),
                "one by one, ms saved": f"{pair.one_by_one_ms:.3g}",
                "together": f"{pair.together_ms:.3g}",
                "lost together": spread_of(pair.lost_ms, "{:+.3g}".format)
                + unless_shown(pair.tests, "lost_ms"),
                "samples, of the product": ratio(pair.samples) + unless_shown(pair.tests, "samples"),
                "quality, beyond the sum": points(pair.quality) + unless_shown(pair.tests, "quality"),
                "aliases": ", ".join(pair.aliases) or DASH,
            }
            for pair in sorted(self.pairs, key=lambda pair: -pair.lost_ms.value)
        ]

    @property
    def composed(self) -> list[dict[str, str]]:
        return [
            {
                "of": composition.of,
                "measured": ratio(composition.measured),
                "product of each": ratio(composition.product),
                "saved times added": ratio(composition.added),
            }
            for composition in self.compositions
        ]


def savings_key(effect: Effect) -> tuple[float, float]:
    """Sort key: minutes saved, then time of a sample saved."""
    minutes = effect.minutes_saved.value if effect.minutes_saved else -math.inf
    return -minutes, effect.after_ms / effect.before_ms


def effect_cells(effect: Effect, together: str, minutes: str) -> dict[str, str]:
    saved, quality = effect.minutes_saved, effect.quality
    return {
        together: ", ".join(effect.together) or DASH,
        f"{minutes} saved": spread_of(saved, "{:+.2f}".format) if saved else DASH,
        "ms a sample": f"{effect.before_ms:.3g} -> {effect.after_ms:.3g}",
        "throughput": ratio(effect.throughput) + unless_shown(effect.tests, "throughput"),
        "samples to target": ratio(effect.samples) + unless_shown(effect.tests, "samples")
        if effect.samples
        else effect.note or DASH,
        "quality": points(quality) + unless_shown(effect.tests, "quality"),
    }


def unless_shown(tests: Mapping[str, EffectTest], name: str) -> str:
    """Return a remark for a figure whose effect is not significant; '' for any other."""
    test = tests.get(name)
    if test is None or test.is_shown:
        return ""
    if test.detectable is None:
        return ", not shown"
    if not test.detectable:
        return ", equal in every run"
    forms = {"quality": f"{100 * test.detectable:.1f} points", "lost_ms": f"{test.detectable:.2g} ms"}
    could = forms.get(name, f"{1 + test.detectable:.2f}x")
    return f", not shown ({could} could be)"


def points(quality: Estimate | None) -> str:
    return spread_of(quality, lambda q: f"{100 * q:+.1f}") + " points" if quality else DASH


def ratio(estimate: Estimate | None) -> str:
    return spread_of(estimate, unit="x") if estimate else DASH


def times(value: float) -> str:
    return f"{value:.2f}x" if value <= LARGEST_BOUND else "none"


def find_ledgers(paths: Sequence[Path]) -> list[tuple[str, Ledger | str]]:
    """Return each ledger below the paths by its label, or why it cannot be read."""
    return [(label(file), read_ledger(file)) for file in find_files(paths, PATTERN)]


def read_ledger(path: Path) -> Ledger | str:
    """Read one file; a fault is returned as text."""
    try:
        return Ledger.model_validate_json(read_bytes(path, MAX_BYTES))
    except ValueError as error:
        return first_fault(error)
