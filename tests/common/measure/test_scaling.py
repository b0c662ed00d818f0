"""The time of a step on more devices, calculated by hand."""

import math
from dataclasses import replace

import pytest

from common.errors import UserError
from common.measure import scaling

LINKS = scaling.Links(inside=100.0, network=10.0, latency_us=0.0, share=0.5, overlap=0.9)
WORK = scaling.Work(gradient_bytes=1e9, sample_s=0.01, fixed_s=0.1)


def test_a_ring_moves_each_gradient_almost_twice_over_its_slowest_link():
    one = scaling.step(WORK, LINKS, machines=1, per_machine=1, batch=32)
    assert (one.compute_s, one.exchange_s, one.seconds) == (0.1 + 32 * 0.01, 0, 0.1 + 32 * 0.01)
    inside = scaling.step(WORK, LINKS, machines=1, per_machine=4, batch=32)
    assert inside.exchange_s == pytest.approx(2 * 3 / 4 * 1e9 / (0.5 * 100e9))
    between = scaling.step(WORK, LINKS, machines=2, per_machine=4, batch=32)
    assert between.exchange_s == pytest.approx(2 * 7 / 8 * 1e9 / (0.5 * 10e9))
    assert between.compute_s == pytest.approx(0.1 + 4 * 0.01)
    hidden = 2 / 3 * between.compute_s  # a backward shorter than nine tenths of the exchange
    assert between.exposed_s == pytest.approx(between.exchange_s - hidden)
    slow = replace(LINKS, latency_us=10.0)
    late = scaling.step(WORK, slow, machines=4, per_machine=4, batch=32)
    soon = scaling.step(WORK, LINKS, machines=4, per_machine=4, batch=32)
    waited_s = 40 * 2 * 2 * 10e-6  # 40 buckets, two hops, twice
    assert late.exchange_s - soon.exchange_s == pytest.approx(waited_s)


def test_shares_above_the_measured_batch_are_accumulated_and_unequal_samples_wait_for_the_longest():
    work = replace(WORK, micro_batch=16)
    assert scaling.step(work, LINKS, machines=1, per_machine=1, batch=33).compute_s == pytest.approx(0.63)
    uneven = replace(WORK, deviation=0.7, longest=2.0)
    step = scaling.step(uneven, LINKS, machines=1, per_machine=8, batch=400)
    assert step.compute_s == pytest.approx(0.1 + 0.5 * (1 + 0.7 * math.sqrt(2 * math.log(8) / 50)))
    step = scaling.step(uneven, LINKS, machines=128, per_machine=8, batch=1024)
    assert step.compute_s == pytest.approx(0.12)
    balanced = replace(uneven, is_balanced=True)
    step = scaling.step(balanced, LINKS, machines=1, per_machine=8, batch=400)
    assert step.compute_s == pytest.approx(0.1 + 0.5 * (1 + 1 / 50**2))


def test_two_batches_show_what_of_a_step_is_fixed():
    found = scaling.fit_work(replace(WORK, fixed_s=0, sample_s=0), [(8, 0.18), (64, 0.74)], 0.02)
    assert (found.fixed_s, found.sample_s) == (pytest.approx(0.1), pytest.approx(0.01))
    near = scaling.fit_work(WORK, [(60, 0.62), (64, 0.66)], 0.02)
    assert (near.fixed_s, near.sample_s) == (0.02, pytest.approx(0.01))
    with pytest.raises(UserError, match="memory traffic"):
        scaling.fit_work(WORK, [(8, 0.01)], 0.02)
