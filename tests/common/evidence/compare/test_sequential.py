"""The sequential test against simulations with a known truth: 2,000 of each, stopped after every pair."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from common.evidence.compare.sequential import PRIOR_PRECISION, decide
from common.repository import ROOT

NUM_STUDIES, NUM_PAIRS, ALPHA = 2000, 60, 0.05
NEVER = 0.0  # a margin that no effect lies in
SD = 0.1
PAGE = " ".join((ROOT / "common/study/README.md").read_text().split())  # states what is simulated here


def normal(rng, size):
    return rng.normal(0, SD, size)


def heavy(rng, size):
    return SD * rng.standard_t(3, size)


def disturbed(rng, size):
    """One run in ten takes up to twice as long, on either side."""
    sides = [rng.normal(0, 0.05, size) + rng.exponential(0.5, size) * (rng.random(size) < 0.1) for _ in "ab"]
    return sides[0] - sides[1]


def alternating(rng, size):
    """The first of a pair is 5 % faster, and the order alternates."""
    return rng.normal(0, SD, size) + 0.05 * (-1) ** np.arange(size[1])


def rounded(rng, size):
    """Accuracies on 360 images, whose noise is 0.7 images."""
    sides = [np.round(350 + rng.normal(0, 0.7, size)) / 360 for _ in "ab"]
    return sides[0] - sides[1]


def outcomes(make, shift=0.0, margin=NEVER, max_pairs=NUM_PAIRS, **options):
    studies = make(np.random.default_rng(1), (NUM_STUDIES, max_pairs)) + shift
    return [decide(study, margin=margin, max_pairs=max_pairs, **options) for study in studies]


def share(decisions, *names):
    return sum(decision.outcome in names for decision in decisions) / len(decisions)


@pytest.mark.parametrize(
    ("make", "options"),
    [(normal, {}), (heavy, {}), (disturbed, {}), (alternating, {}), (rounded, {"resolution": 1 / 360})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_difference_is_found_where_there_is_none_although_one_looks_after_every_pair(make, options):
    decisions = outcomes(make, **options)
    false = share(decisions, "higher", "lower")
    assert false <= ALPHA
    assert make is not normal or f"found a difference in {100 * false:.1f} %, looking after" in PAGE
    assert false == sum(decision.p <= ALPHA for decision in decisions) / NUM_STUDIES


def test_the_limits_hold_the_truth_at_every_pair_in_95_percent_of_comparisons():
    held = [
        decision.low is None or decision.low <= 0.3 <= decision.high
        for decision in outcomes(normal, shift=0.3)
    ]
    assert 0.95 <= sum(held) / NUM_STUDIES <= 0.99


def test_a_true_difference_at_the_margin_is_seldom_called_equivalent():
    assert share(outcomes(normal, shift=0.05, margin=0.05), "equivalent") <= ALPHA


@pytest.mark.parametrize(
    ("words", "deviations", "num_pairs"),
    [
        ("one standard deviation of a pair is found", 1.0, 20),
        ("one of two deviations", 2.0, 10),
        ("one of four", 4.0, 5),
    ],
)
def test_the_power_at_a_known_effect_is_as_stated(words, deviations, num_pairs):
    effect = {"shift": deviations * SD, "max_pairs": num_pairs}
    one, three = (100 * share(outcomes(normal, **effect, alpha=ALPHA / n), "higher") for n in (1, 3))
    assert f"{words} within {num_pairs} pairs in {one:.0f} % ({three:.0f} %" in PAGE


def test_equal_sides_are_called_equivalent_within_a_margin_of_their_deviation():
    decisions = outcomes(normal, margin=SD)
    assert share(decisions, "equivalent") > 0.9 and share(decisions, "higher", "lower") <= ALPHA


def test_the_detectable_difference_is_detected_four_times_in_five():
    effect = decide(np.tile([SD, -SD], 10), margin=NEVER, max_pairs=20).detectable
    assert share(outcomes(normal, shift=effect, max_pairs=20), "higher") == pytest.approx(0.8, abs=0.08)


def test_the_evidence_is_the_mixture_that_the_paper_defines():
    """The formula against its integral over effect and deviation, by numerical quadrature."""
    x = np.array([0.3, 0.1, 0.25, 0.4, 0.2])

    def likelihood(effect, log_sd):
        sd = math.exp(log_sd)
        return math.exp(-len(x) * log_sd - float(np.sum((x - effect * sd) ** 2)) / (2 * sd**2))

    prior = stats.norm(0, PRIOR_PRECISION**-0.5)
    mixed, _ = integrate.dblquad(lambda e, s: prior.pdf(e) * likelihood(e, s), -6, 4, -20, 20)
    null, _ = integrate.quad(lambda s: likelihood(0.0, s), -6, 4)
    assert decide(x, margin=NEVER, max_pairs=9).p == pytest.approx(null / mixed, rel=1e-5)


def test_a_decision_stands_whatever_comes_later_and_is_the_same_pair_by_pair():
    rng = np.random.default_rng(3)
    for shift in (0.0, 0.5, 1.5):
        values = rng.normal(shift, 1, 30)
        steps = [decide(values[:number], margin=0.8, max_pairs=30) for number in range(1, 31)]
        first = next((step for step in steps if step.outcome != "undecided"), None)
        last = steps[-1]
        assert last.outcome == (first.outcome if first else "undecided")
        assert last.decided_after == (first.num_pairs if first else None)
        p_values = [step.p for step in steps]
        assert p_values == sorted(p_values, reverse=True)
        widths = [step.high - step.low for step in steps if step.low is not None]
        assert widths == sorted(widths, reverse=True)


def test_the_forecast_of_pairs_is_what_it_takes():
    values = np.tile([0.2, 0.0], 3)
    state = decide(values, margin=NEVER, max_pairs=40)
    assert state.outcome == "undecided" and 2 < state.more < 40 and not state.is_futile
    further = math.ceil(state.more / 2)
    assert decide(np.tile([0.2, 0.0], 3 + further), margin=NEVER, max_pairs=40).outcome == "higher"


def test_what_so_many_pairs_cannot_show_is_futile():
    values = np.tile([0.2, -0.2], 4)
    assert decide(values, margin=0.01, max_pairs=10).is_futile
    assert not decide(values, margin=0.01, max_pairs=10_000).is_futile
    assert not decide(values, margin=0.5, max_pairs=12).is_futile  # it could be called equivalent


def test_one_pair_says_nothing_and_pairs_without_any_difference_are_equivalent():
    state = decide([0.7], margin=0.1, max_pairs=5)
    assert (state.low, state.high, state.p, state.outcome) == (None, None, 1.0, "undecided")
    assert state.more is None and not state.is_futile
    state = decide([0.0, 0.0, 0.0], margin=0.1, max_pairs=5)
    assert (state.low, state.high, state.p, state.outcome) == (0.0, 0.0, 1.0, "equivalent")
