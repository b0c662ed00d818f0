"""Verdicts on profiles made by hand, and the arithmetic beneath them."""

import math

import pytest

from common.measure.profiling.verdict import (
    Phase,
    Profile,
    Saving,
    compute_saving,
    describe_bottleneck,
    max_speedup,
)

FORWARD, BACKWARD = 20.0, 40.0


def phase(shape="112 px", share=1.0, batch=32, savings=None, loader_per_s=1000.0, **parts):
    parts = {"data wait": 0.0, "forward": FORWARD, "backward": BACKWARD, "optimizer": 5.0} | parts
    step_ms = sum(parts.values())
    return Phase(
        shape=shape,
        share=share,
        batch=batch,
        step_ms=step_ms,
        deviation=0.01,
        num_turns=4,
        parts_ms=parts,
        unaccounted_ms=0.0,
        loader_per_s=loader_per_s,
        first_pass_per_s=None,
        step_per_s=batch / (step_ms - parts["data wait"]) * 1e3,
        savings=savings or {},
        flops_share=0.5,
    )


def describe(*phases, cures=None, is_compressed=False):
    profile = Profile(samples_name="images", phases=phases, cures=cures or {}, is_compressed=is_compressed)
    return describe_bottleneck(profile)


def test_a_slow_loader_is_named_with_what_was_seen_to_remove_it():
    waits = {"data wait": 35.0}
    saved = {"kept batches": Saving(share=0.34, low=0.3, high=0.38)}
    saved["no decoding"] = Saving(share=0.25, low=0.2, high=0.3)
    saved["no augmentation"] = Saving(share=0.01, low=-0.02, high=0.04)
    cures = {"data.num_workers=6": 600.0, "data.loader=resident": 300.0}
    text = describe(phase(loader_per_s=320.0, savings=saved, **waits), cures=cures)
    assert text.startswith("input-bound: 35% of the step waits for images, of which leaving out removes: dec")
    assert "decoding 25%" in text and "augmentation" not in text  # within noise
    assert "the loader alone brings 320/s, the step alone takes 492/s" in text
    assert "fast enough alone: data.num_workers=6 (600/s);" in text and "1.54 times as fast at most" in text
    assert "replaying kept batches saves 34%" in text
    saved["kept batches"] = Saving(share=0.5, low=0.4, high=0.6)  # also of the step, which it disturbs
    assert "2.00 times as fast at most" in describe(phase(loader_per_s=320.0, savings=saved, **waits))
    saved["kept batches"] = Saving(share=0.1, low=-0.1, high=0.3)
    assert "kept batches" not in describe(phase(loader_per_s=320.0, savings=saved, **waits))
    none = describe(phase(loader_per_s=320.0, **waits), cures={"data.loader=resident": 300.0})
    assert "no loader setting that was tried is fast enough (data.loader=resident 300/s)" in none
    assert "storage or processors limit it" in describe(phase(loader_per_s=320.0, **waits))


def test_a_loader_that_keeps_up_alone_shares_the_processor():
    text = describe(phase(loader_per_s=600.0, **{"data wait": 35.0}), cures={"data.num_workers=6": 700.0})
    assert "alone it keeps up, but it shares the processor with the step" in text
    assert "data.num_workers" not in text and "no setting" not in text


def test_a_phase_whose_loader_is_too_slow_is_not_hidden_by_the_others():
    slow = phase(shape="56 px", share=0.05, loader_per_s=300.0, **{"data wait": 30.0})
    text = describe(slow, phase(share=0.95, loader_per_s=985.0))
    assert text.startswith("compute-bound") and "times as fast as the step" not in text
    assert "at 56 px, 5% of the training, the loader alone brings 300/s, the step alone takes 492/s" in text


def test_other_bounds_are_named_by_their_largest_part():
    exchange = describe(phase(communication=30.0))
    assert exchange.startswith("communication-bound: 32% of the step exchanges gradients")
    assert "gradient_compression" in exchange
    assert "gradient_compression" not in describe(phase(communication=30.0), is_compressed=True)
    text = describe(phase(optimizer=90.0))
    assert text.startswith("optimizer-bound: 60% of the step; forward and backward take 40%")
    text = describe(phase(loader_per_s=985.0))
    assert text.startswith("compute-bound: forward and backward take 92% of the step, at 50% of the matrix")
    assert "the loader alone is 2.0 times as fast" in text and "next is optimizer, 8%, at most 1.08" in text


def test_phases_count_by_the_time_that_they_take_of_the_whole_run():
    slow = phase(share=0.25, forward=20.0, backward=40.0, optimizer=0.0, **{"data wait": 20.0})
    fast = phase(share=0.75, forward=5.0, backward=10.0, optimizer=5.0)
    profile = Profile(samples_name="images", phases=(slow, fast))
    assert profile.shares()["data wait"] == pytest.approx(0.25 * 20 / (0.25 * 80 + 0.75 * 20))
    assert sum(profile.shares().values()) == pytest.approx(1)


def test_savings_are_paired_so_that_drift_cancels():
    saving = compute_saving([100.0, 200.0, 400.0], [90.0, 180.0, 360.0])
    assert (saving.share, saving.high - saving.low) == (pytest.approx(0.1), pytest.approx(0, abs=1e-9))
    saving = compute_saving([100.0, 100.0], [90.0, 80.0])  # t of one degree of freedom is 12.706
    assert saving.high - saving.share == pytest.approx(12.706 * 0.05, rel=1e-3)


def test_amdahl():
    assert [max_speedup(share) for share in (0.5, 0, -0.1, 1)] == [2, 1, 1, math.inf]
