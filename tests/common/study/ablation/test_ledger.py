"""The ledger of an ablation on invented measurements, whose effects are known."""

import math
from dataclasses import replace
from itertools import chain, combinations

import pytest

from common.evidence.ledger import EffectTest, Trained, times, unless_shown
from common.study.ablation import ledger as ledgers
from common.study.ablation.factorial import design
from common.study.ablation.measurements import Measurements, exceed_bounds
from common.study.ablation.switches import State, Step, Switch

SAVED_MS = {"a": 4.0, "b": 2.0, "c": 1.0}  # of 10 ms; a and b have 1 ms in common
TURNS = 9


NOISE = 0.05


class Three:
    """Switches a, b and c, of which c needs a."""

    switches = [Switch(name=name, key=name, on=(), off=()) for name in SAVED_MS]
    all = State(SAVED_MS)
    describe = staticmethod(lambda state: "+".join(sorted(state)))

    def alone(self, switch):
        needs = State("a") if switch.name == "c" else State()
        return Step(before=needs, after=needs | {switch.name}, together=tuple(needs))

    def left_out(self, switch):
        out = {"a", "c"} if switch.name == "a" else {switch.name}
        return Step(before=self.all - out, after=self.all)


def milliseconds(state):
    return 10.0 - sum(SAVED_MS[name] for name in state) + ({"a", "b"} <= state)


def samples(state, seed):
    """Seed 1 is 5 % better in states of even numbers of switches, worse in others; seed 2 the other way."""
    chance = NOISE * {"0": 0, "1": 1, "2": -1}[seed] * (-1) ** len(state)
    differs = 1e-9 * sum(map(ord, state))  # no two states have the same runs
    return 6000.0 * (0.5 if "b" in state else 1.0) * math.exp(chance + differs)


def made(seeds=("0",)):
    states = [State(each) for each in chain(*(combinations(SAVED_MS, size) for size in range(4)))]
    return Measurements(
        base_s=0.010,
        turns={state: [milliseconds(state) / 10] * TURNS for state in states},
        runs={
            state: [Trained(seed=seed, samples=samples(state, seed), quality=0.9) for seed in seeds]
            for state in states
        },
        shares={"forward pass": 0.25, "backward pass": 0.5, "optimizer": 0.25},
    )


CARDS = {"a": ("backward pass",), "b": ("backward pass", "optimizer"), "c": ("nothing",)}
SPREAD = NOISE * math.sqrt(16 / 7)  # 16 runs
STUDENT = 2.364624  # t of 7 degrees: 16 runs less 8 states and what two seeds differ by


def rows(measured):
    return {row.name: row for row in ledgers.make_rows(measured, Three(), CARDS)}


def test_effects_alone_and_left_out_are_those_of_their_states():
    a, b, c = rows(made()).values()
    assert a.alone.throughput.value == pytest.approx(10 / 6)
    assert b.alone.samples.value == pytest.approx(0.5)
    assert b.alone.minutes_saved.value == pytest.approx((6000 * 0.010 - 3000 * 0.008) / 60)
    assert c.alone.throughput.value == pytest.approx(6 / 5)
    assert a.left_out.throughput.value == pytest.approx(8 / 4)
    assert (a.bound, b.bound, c.bound) == (2, 4, None)  # c is measured on top of a


def test_one_seed_has_no_interval_of_samples_and_two_have_that_of_both_states():
    one, two = rows(made())["b"].alone, rows(made(seeds=("1", "2")))["b"].alone
    assert one.samples.interval is None and one.minutes_saved.interval is None
    assert one.throughput.interval is not None  # from the turns
    limits = two.samples.interval
    assert limits.low < 0.5 < limits.high
    assert math.log(limits.high / 0.5) == pytest.approx(STUDENT * SPREAD, rel=1e-6)
    before, after = (milliseconds * count / 6e4 for milliseconds, count in ((10, 6000), (8, 3000)))
    saved = two.minutes_saved
    assert saved.value == pytest.approx(before - after)
    half = STUDENT * SPREAD * math.hypot(before, after) / math.sqrt(2)
    assert saved.interval.high - saved.value == pytest.approx(half, rel=1e-6)


def test_the_whole_is_compared_with_the_product_and_with_added_savings():
    """The noise of a state that two steps share, between the base and a + c, is not counted twice."""
    measured = made(seeds=("1", "2"))
    noisy = {State("a"): [0.6 * (1 + 0.1 * (turn % 3)) for turn in range(TURNS)]}
    measured = replace(measured, turns={**measured.turns, **noisy})
    throughput, minutes = ledgers.make_compositions(measured, Three(), list(rows(measured).values()))
    assert throughput.measured.value == pytest.approx(10 / 4)
    assert throughput.product.value == pytest.approx(10 / 6 * 10 / 8 * 6 / 5)
    assert throughput.product.interval.high == pytest.approx(throughput.product.interval.low)
    assert throughput.added.value == pytest.approx(10 / (10 - 4 - 2 - 1))
    assert minutes.measured.value == pytest.approx(10 / 4 / 0.5)
    half = STUDENT * SPREAD * math.sqrt((2**2 + 1 + 1) / 2)  # base -2, b +1, a + c +1
    product = minutes.product
    assert math.log(product.interval.high / product.value) == pytest.approx(half, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"is_bound": True}, "passed at the first evaluation by 1 of 1 runs with it"),
        ({"samples": None}, "missed by 1 of 1 runs with it"),
    ],
)
def test_samples_that_are_not_known_leave_minutes_unknown_and_are_told(change, note):
    measured = made()
    runs = [run.model_copy(update=change) for run in measured.runs[State("b")]]
    effect = rows(replace(measured, runs={**measured.runs, State("b"): runs}))["b"].alone
    assert effect.samples is None and effect.minutes_saved is None and effect.quality is not None
    assert effect.note == note


def test_a_state_without_a_seed_of_the_others_is_not_compared_and_says_so():
    measured = made(seeds=("1", "2"))
    alone = [Trained(seed=seed, samples=9000.0, quality=0.5) for seed in ("3", "4")]
    effect = rows(replace(measured, runs={**measured.runs, State("b"): alone}))["b"].alone
    assert effect.samples is None and effect.minutes_saved is None and effect.quality is None
    assert effect.note == "no seed links the runs with and without it"


def test_pairs_tell_what_two_save_together():
    (pair,) = ledgers.make_pairs(made(), design(("a", "b"), 8), State())
    assert pair.names == ["a", "b"]
    assert (pair.one_by_one_ms, pair.together_ms, pair.lost_ms.value) == pytest.approx((6, 5, 1))
    table = list(rows(made()).values())
    (line,) = ledgers.make_warnings(table, [pair], 10.0)
    assert "a and b both relieve the backward pass: together they save 5 ms a sample, less" in line
    (line,) = ledgers.make_warnings(table, [], 10.0)  # by their cards alone
    assert "a and b both relieve the backward pass: expect less than the sum" in line
    turns = {  # noise
        state: [time * (1 + 0.05 * ((turn * (3 + len(state))) % 4)) for turn, time in enumerate(times)]
        for state, times in made().turns.items()
    }
    (pair,) = ledgers.make_pairs(replace(made(), turns=turns), design(("a", "b"), 8), State())
    assert pair.one_by_one_ms - pair.together_ms == pytest.approx(pair.lost_ms.value)
    assert pair.lost_ms.interval.low <= pair.lost_ms.value <= pair.lost_ms.interval.high


def test_a_gain_beyond_the_bound_of_a_card_is_told():
    assert exceed_bounds(made(), Three(), list(rows(made()).values())) == []
    assert (times(2.5), times(55.92), times(math.inf)) == ("2.50x", "none", "none")
    meek = ledgers.make_rows(made(), Three(), CARDS | {"a": ("forward pass",)})
    assert exceed_bounds(made(), Three(), meek) == ["a"]
    lines = ledgers.make_warnings(meek, [], 10.0, ["a"])
    assert any("a gains more than Amdahl's bound" in line for line in lines)


def test_an_effect_is_shown_after_holms_correction_or_beside_it_stands_what_could_be():
    two = rows(made(seeds=("1", "2")))
    assert two["b"].alone.tests["samples"].is_shown and two["b"].alone.tests["throughput"].is_shown
    idle = two["a"].alone.tests["samples"]
    assert idle.p_value == 1 and 0.2 < idle.detectable < 0.6  # 7.6 % spread, two runs, three switches
    text = unless_shown(two["a"].alone.tests, "samples")
    assert text == f", not shown ({1 + idle.detectable:.2f}x could be)"
    assert unless_shown(two["b"].alone.tests, "samples") == unless_shown({}, "samples") == ""
    assert unless_shown({"quality": EffectTest(p_value=0.2, detectable=0.012)}, "quality").endswith(
        "(1.2 points could be)"
    )
    lost = {"lost_ms": EffectTest(p_value=0.2, detectable=0.12)}
    assert unless_shown(lost, "lost_ms") == ", not shown (0.12 ms could be)"
    equal = {"samples": EffectTest(p_value=1, detectable=0.0)}
    assert unless_shown(equal, "samples") == ", equal in every run"
    one = rows(made())["b"].alone.tests
    assert one.keys() == {"throughput"}  # one run a state has no spread


def test_a_pair_tells_what_both_change_in_samples_and_quality():
    def half(state, seed):  # a alone 0.8, b alone 0.5, both 0.3 of the samples
        return samples(state, seed) * (0.8 if "a" in state else 1) * (0.75 if {"a", "b"} <= state else 1)

    measured = made(seeds=("1", "2"))
    runs = {
        state: [
            Trained(seed=seed, samples=half(state, seed), quality=0.9 + 0.02 * ({"a", "b"} <= state))
            for seed in "12"
        ]
        for state in measured.turns
    }
    (pair,) = ledgers.make_pairs(replace(measured, runs=runs), design(("a", "b"), 8), State())
    assert pair.samples.value == pytest.approx(0.75) and pair.quality.value == pytest.approx(0.02)
    assert pair.samples.interval.low < 0.75 < pair.samples.interval.high
    assert pair.tests.keys() == {"samples", "quality", "lost_ms"} and pair.tests["quality"].is_shown
    (untrained,) = ledgers.make_pairs(replace(measured, runs={}), design(("a", "b"), 8), State())
    assert untrained.samples is None and untrained.tests.keys() == {"lost_ms"}
