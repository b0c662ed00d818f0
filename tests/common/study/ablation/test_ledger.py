"""The ledger of an ablation on measurements made up so that every effect is known."""

import math
from dataclasses import replace
from itertools import chain, combinations

import pytest

from common.evidence.ledger import Trained
from common.study.ablation import ledger as ledgers
from common.study.ablation.factorial import design
from common.study.ablation.ledger import Measurements
from common.study.ablation.switches import State, Step, Switch

SAVED_MS = {"a": 4.0, "b": 2.0, "c": 1.0}  # of 10 ms; a and b have 1 ms in common
TURNS = 9


class Three:
    """Switches a, b and c, of which c needs a."""

    switches = [Switch(name=name, method=name, on=(), off=()) for name in SAVED_MS]
    all = State(SAVED_MS)
    describe = staticmethod(lambda state: "+".join(sorted(state)))

    def alone(self, switch):
        needs = State("a") if switch.name == "c" else State()
        return Step(switch=switch, before=needs, after=needs | {switch.name}, together=tuple(needs))

    def left_out(self, switch):
        out = {"a", "c"} if switch.name == "a" else {switch.name}
        return Step(switch=switch, before=self.all - out, after=self.all)


def milliseconds(state):
    return 10.0 - sum(SAVED_MS[name] for name in state) + ({"a", "b"} <= state)


def samples(state, seed):
    return 6000.0 * (0.5 if "b" in state else 1.0) * (1.1 if seed == "2" else 1.0)


def made(seeds=("1",), missing=()):
    states = [State(each) for each in chain(*(combinations(SAVED_MS, size) for size in range(4)))]
    return Measurements(
        base_s=0.010,
        turns={state: [milliseconds(state) / 10] * TURNS for state in states},
        runs={
            state: [
                Trained(seed=seed, samples=None if state in missing else samples(state, seed), quality=0.9)
                for seed in seeds
            ]
            for state in states
        },
        shares={"forward pass": 0.25, "backward pass": 0.5, "optimizer": 0.25},
    )


CARDS = {"a": ("backward pass",), "b": ("backward pass", "optimizer"), "c": ("nothing",)}


def rows(found):
    return {row.name: row for row in ledgers.make_rows(found, Three(), CARDS)}


def test_effects_alone_and_left_out_are_those_of_their_states():
    found = rows(made())
    assert found["a"].alone.throughput.value == pytest.approx(10 / 6)
    assert found["b"].alone.samples.value == pytest.approx(0.5)
    assert found["b"].alone.minutes_saved.value == pytest.approx((6000 * 0.010 - 3000 * 0.008) / 60)
    assert found["c"].alone.throughput.value == pytest.approx(6 / 5)
    assert found["a"].left_out.throughput.value == pytest.approx(8 / 4)
    assert (found["a"].bound, found["b"].bound, found["c"].bound) == (2, 4, None)  # c is measured on top of a


def test_one_seed_has_no_interval_of_samples_and_two_have():
    one, two = rows(made())["b"].alone, rows(made(seeds=("1", "2")))["b"].alone
    assert one.samples.interval is None and one.minutes_saved.interval is None
    assert one.throughput.interval is not None  # from the turns
    limits = two.samples.interval
    assert limits.low < 0.5 < limits.high
    spread, freedom = math.log(1.1) / math.sqrt(2), 8  # of two values; eight states
    half = 2.306004 * spread * math.sqrt(1 / 2 + 1 / 2)  # t of 8 degrees
    assert freedom == len(made().runs) and math.log(limits.high / 0.5) == pytest.approx(half, rel=1e-6)


def test_the_interval_of_minutes_has_the_spread_of_both_states():
    found = rows(made(seeds=("1", "2")))["b"].alone.minutes_saved
    before, after = (
        seconds * count * math.sqrt(1.1) / 60 for seconds, count in ((0.010, 6000), (0.008, 3000))
    )
    assert found.value == pytest.approx(before - after)
    half = 2.306004 * math.log(1.1) / math.sqrt(2) * math.hypot(before, after) / math.sqrt(2)
    assert found.interval.high - found.value == pytest.approx(half, rel=1e-6)


def test_noise_of_a_state_that_steps_share_is_not_counted_twice():
    found = made(seeds=("1", "2"))
    noisy = {State("a"): [0.6 * (1 + 0.1 * (turn % 3)) for turn in range(TURNS)]}  # between base and a + c
    found = replace(found, turns={**found.turns, **noisy})
    throughput, minutes = ledgers.make_compositions(found, Three())
    assert throughput.product.interval.high == pytest.approx(throughput.product.interval.low)
    assert throughput.added.value == pytest.approx(10 / (10 - 4 - 2 - 1))
    deviation, root = math.log(1.1) / math.sqrt(2), math.sqrt((2**2 + 1 + 1) / 2)  # base -2, b +1, a + c +1
    limits = minutes.product.interval
    assert math.log(limits.high / minutes.product.value) == pytest.approx(
        2.306004 * deviation * root, rel=1e-6
    )


def test_samples_at_the_first_evaluation_are_a_bound_and_leave_minutes_unknown():
    found = made()
    runs = [run.model_copy(update={"is_bound": True}) for run in found.runs[State("b")]]
    effect = rows(replace(found, runs={**found.runs, State("b"): runs}))["b"].alone
    assert effect.samples is None and effect.minutes_saved is None
    assert effect.note == "passed at the first evaluation by 1 of 1 runs with it"


def test_a_run_that_missed_the_target_leaves_minutes_unknown_and_is_told():
    found = rows(made(missing=[State("b")]))["b"].alone
    assert found.samples is None and found.minutes_saved is None and found.quality is not None
    assert found.note == "missed by 1 of 1 runs with it"


def test_the_whole_lies_between_added_savings_and_the_product_or_is_told_as_it_is():
    throughput, minutes = ledgers.make_compositions(made(), Three())
    assert throughput.measured.value == pytest.approx(10 / 4)
    assert throughput.product.value == pytest.approx(10 / 6 * 10 / 8 * 6 / 5)
    assert throughput.added.value == pytest.approx(10 / (10 - 4 - 2 - 1))
    assert minutes.measured.value == pytest.approx(10 / 4 / 0.5)


def test_pairs_tell_what_two_save_together():
    found = made()
    measured = ledgers.make_pairs(found, design(("a", "b"), 8), State())
    assert [pair.names for pair in measured] == [["a", "b"]]
    assert measured[0].one_by_one_ms == pytest.approx(6)
    assert measured[0].together_ms == pytest.approx(5)
    assert measured[0].lost_ms.value == pytest.approx(1)
    told = ledgers.make_warnings(list(rows(found).values()), measured, 10.0)
    assert told[0] == (
        "a and b both relieve the backward pass: together they save 5 ms a sample, less than the 6 ms of one "
        "by one"
    )
    assert len(told) == 1
    meek = ledgers.make_rows(found, Three(), CARDS | {"a": ("forward pass",)})
    assert any(
        "a gains more than Amdahl's bound" in line for line in ledgers.make_warnings(meek, measured, 10.0)
    )


def test_what_a_pair_loses_is_one_by_one_minus_together_in_spite_of_noise():
    found = made()
    turns = {
        state: [each * (1 + 0.05 * ((turn * (3 + len(state))) % 4)) for turn, each in enumerate(own)]
        for state, own in found.turns.items()
    }
    (pair,) = ledgers.make_pairs(replace(found, turns=turns), design(("a", "b"), 8), State())
    assert pair.one_by_one_ms - pair.together_ms == pytest.approx(pair.lost_ms.value)
    assert pair.lost_ms.interval.low <= pair.lost_ms.value <= pair.lost_ms.interval.high


def test_cards_alone_warn_where_the_pair_was_not_measured():
    told = ledgers.make_warnings(list(rows(made()).values()), [], 10.0)
    assert "a and b both relieve the backward pass: expect less than the sum of what they save alone" in told
