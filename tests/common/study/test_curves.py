"""Trade-off curves against plain arithmetic."""

import pytest
from pytest import approx

from common.evidence import intervals
from common.study import curves
from common.study.curves import Curve, Evaluation, Line, Run
from common.study.sweep import with_bound


def of_runs(name, *points):
    """Return a curve of points, each the (seed, seconds, quality) of its runs."""
    return of_ways(name, *([(seed, [(s, quality)]) for seed, s, quality in runs] for runs in points))


def gaps_of(one, other, resolution=0.0):
    (compared,) = curves.compare_pairs([(one, other)], resolution)
    return compared.gaps


def curve(name, *points, spread=0.0):
    """Return a curve of two seeds, `spread` below and above (seconds, quality) of each point."""
    return of_runs(
        name, *([(1, seconds, end - spread), (2, seconds, end + spread)] for seconds, end in points)
    )


def of_ways(name, *budgets):
    """Return a curve of budgets 1, 2, ..., each the (seed, way) of its runs: (seconds, quality)."""
    points = [
        curves.make_point(
            float(budget),
            [
                Run(
                    log="", seed=seed, way=tuple(Evaluation(seconds=s, samples=10, quality=q) for s, q in way)
                )
                for seed, way in runs
            ],
        )
        for budget, runs in enumerate(budgets, 1)
    ]
    return Curve(configuration=name, points=tuple(points))


def test_a_line_reaches_a_quality_where_it_first_does():
    rising = Line((10.0, 20.0, 40.0), (0.2, 0.6, 0.7))
    assert [rising.time_at(quality) for quality in (0.1, 0.3, 0.6, 0.665)] == approx([10, 12.5, 20, 33])
    assert rising.time_at(0.71) is None
    assert Line((10.0, 20.0, 30.0, 40.0), (0.2, 0.6, 0.5, 0.8)).time_at(0.6) == 20.0


def test_the_means_of_a_curve_are_isotonic():
    falls = curve("one", (10, 0.2), (20, 0.8), (30, 0.6), (40, 0.9))
    assert falls.mean == Line((10, 20, 30, 40), (0.2, approx(0.7), approx(0.7), 0.9))
    one = of_runs(
        "one", [(1, 10, 0.1), (2, 10, 0.3)], [(1, 20, 0.9), (2, 20, 0.7)], [(1, 30, 0.5), (2, 30, 0.7)]
    )
    assert [line.qualities for line in one.ends] == [(0.1, *[approx(0.7)] * 2), (0.3, *[approx(0.7)] * 2)]


def test_a_time_is_that_of_the_budget_whose_stopped_runs_need_the_least():
    long = [[(10, 0.3), (20, 0.5), (40, 0.9)], [(10, 0.3), (24, 0.5), (48, 0.9)]]
    short = [[(8, 0.4), (16, 0.6)], [(8, 0.4), (16, 0.45)]]
    one = of_ways("one", enumerate(short), enumerate(long))
    value = curves.time_at(one, 0.5)  # of the short budget only one run reaches it
    assert value.values == (20, 24) and value.estimate.value == 22 and value.bound == ""
    assert with_bound(value, "{:.0f}".format).endswith(", budget 2")
    sooner = curves.time_at(one, 0.42)
    assert sooner.values == approx((8.8, 8 + 8 * 0.02 / 0.05))  # less than 16.1 s
    assert sooner.budget == 1
    early = curves.time_at(one, 0.35)  # exceeded at the first evaluation
    assert (early.estimate.value, early.estimate.interval, early.bound) == (8, None, "at most")
    assert curves.time_at(one, 0.95) == curves.Value()
    with_a_miss = of_ways("one", [(0, short[1]), (1, short[0]), (2, short[0])], enumerate(long))
    assert curves.time_at(with_a_miss, 0.5) == value  # though the longer budget lacks a run


def test_a_quality_is_that_of_the_best_budget_stopped_at_that_time():
    short, long = [(5, 0.1), (10, 0.5)], [(10, 0.3), (20, 0.8), (40, 0.9)]
    one = of_ways("one", *(enumerate([way] * 2) for way in (short, long)))
    assert curves.quality_at(one, 4) == curves.Value()
    expected = {7.5: 0.3, 10: 0.5, 20: 0.8, 12: 0.5 + 0.4 * 2 / 30, 30: 0.85, 40: 0.9}
    for seconds, quality in expected.items():
        assert curves.quality_at(one, seconds).estimate.value == approx(quality)
    late = curves.quality_at(one, 50)
    assert (late.estimate.value, late.bound) == (approx(0.9), "at least")


def test_a_ratio_says_what_the_runs_could_show():
    slow, fast = (curves.Value(estimate=intervals.mean(v), values=v) for v in ((10.0, 12.0), (5.0, 6.0)))
    ratio, faster = intervals.ratio((10.0, 12.0), (5.0, 6.0)), curves.times_faster(slow, fast)
    assert faster.estimate.value == approx(2) and faster.detectable == ratio.detectable > 0
    bound = curves.Value(estimate=fast.estimate, values=fast.values, bound="at most")
    assert curves.times_faster(slow, bound).bound == "at least"
    assert curves.times_faster(bound, slow).bound == "at most"
    assert curves.times_faster(bound, bound) == curves.times_faster(slow, curves.Value()) == curves.Value()


def test_runs_of_one_seed_make_a_curve_though_another_was_replaced():
    one = of_runs(
        "one", [(1, 10, 0.1), (3, 10, 0.3), (4, 10, 0.4)], [(1, 20, 0.5), (2, 20, 0.6), (3, 20, 0.7)]
    )
    ends = [tuple(run.end.quality for run in runs) for runs in one.seeds]
    assert ends == [(0.1, 0.5), (0.3, 0.7), (0.4, 0.6)]


def test_a_pair_of_curves_is_compared_in_runs_of_one_seed():
    one = of_runs("one", *([(seed, t, 0.5 + seed / 10) for seed in (1, 2, 3)] for t in (10, 20)))
    other = of_runs("other", *([(seed, t, 0.4 + seed / 10) for seed in (1, 3, 4)] for t in (10, 20)))
    gaps = gaps_of(one, other)
    assert [gap.difference.value for gap in gaps] == approx([0.1, 0.1])
    apart = of_runs("apart", *([(seed, t, 0.5) for seed in (7, 8)] for t in (10, 20)))
    assert gaps_of(one, apart) == ()


def test_holms_correction_is_for_all_pairs_of_a_sweep():
    lines = [curve(name, (10, end), spread=0.0005) for name, end in (("a", 0.5), ("b", 0.52), ("c", 0.54))]
    (alone,) = gaps_of(*lines[:2], 0.002)
    (together, *_) = curves.compare_curves(lines, target=0.5, price=None, resolution=0.002).comparisons
    assert together.gaps[0].difference.p_value > 1.5 * alone.difference.p_value


def test_equal_differences_of_rounded_qualities_are_no_proof_that_one_is_ahead():
    one, other = curve("one", (10, 0.5)), curve("other", (10, 0.5 - 1 / 360))
    (exact,), (rounded,) = (gaps_of(one, other, step) for step in (0.0, 1 / 360))
    assert exact.sign == 1 and exact.difference.p_value < 0.01
    assert rounded.sign == 0 and rounded.difference.p_value > 0.2
    interval = rounded.difference.interval
    assert interval.low < 0 < interval.high and rounded.difference.detectable > 1 / 360


def test_runs_of_a_seed_whose_longer_budget_was_quicker_leave_a_line_that_rises():
    one = of_runs("one", [(1, 10, 0.2), (2, 21, 0.2)], [(1, 30, 0.6), (2, 20, 0.6)])
    assert [line.times for line in one.ends] == [(10, 30), (21, 21)]
    assert curves.quality_at(one, 22).values == approx((0.2 + 0.4 * 12 / 20, 0.6))


def answer_crossings(one, other):
    return curves.compare_curves([one, other], target=0.5, price=None).crossings


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        # 0.2 + 0.03 (t - 10) = 0.4 + 0.01 (t - 5)
        ([(10, 0.2), (30, 0.8)], [(5, 0.4), (25, 0.6)], (22.5, 0.575, False)),
        ([(10, 0.1), (30, 0.8)], [(5, 0.4), (12, 0.6)], (10 + 20 * 0.5 / 0.7, 0.6, True)),
        ([(10, 0.2), (20, 0.5), (30, 0.9)], [(10, 0.4), (20, 0.5), (30, 0.6)], (20, 0.5, False)),
        ([(10, 0.2), (20, 0.5), (30, 0.6)], [(10, 0.4), (20, 0.5), (30, 0.8)], None),
    ],
    ids=["straight lines", "beyond the largest budget", "at a budget", "a touch"],
)
def test_curves_without_noise_cross_where_straight_lines_do(one, other, expected):
    one, other = curve("one", *one), curve("other", *other)
    for pair in ((one, other), (other, one)):
        crossings = answer_crossings(*pair)
        if expected is None:
            assert crossings == ()
            continue
        (crossing,) = crossings
        assert (crossing.leader, crossing.other) == ("one", "other")
        assert (crossing.seconds, crossing.quality, crossing.is_extended) == approx(expected)
        assert crossing.interval.low < crossing.seconds < crossing.interval.high
    assert answer_crossings(one, one) == ()


def test_a_crossing_is_shown_only_where_each_curve_is_ahead_by_more_than_noise():
    other = of_runs("other", *([(s, t, 0.4 + 0.001 * s) for s in range(3)] for t in (10, 30)))
    clear = of_runs("one", *([(s, t, q + 0.002 * s) for s in range(3)] for t, q in ((10, 0.1), (30, 0.7))))
    (crossing,) = answer_crossings(clear, other)
    assert crossing.leader == "one" and (crossing.interval.low, crossing.interval.high) == (10, 30)
    noise = [(0, -0.3), (1, 0.0), (2, 0.3)]
    vague = of_runs("one", [(s, 10, 0.1 + e) for s, e in noise], [(s, 30, 0.7) for s, _ in noise])
    assert answer_crossings(vague, other) == ()
    (pair,) = curves.compare_curves([vague, other], target=0.5, price=None).comparisons
    assert [gap.sign for gap in pair.gaps] == [0, 1]
    assert pair.gaps[0].difference.detectable > 0.3 > pair.gaps[1].difference.detectable


def test_one_curve_has_answers_alone_and_a_cost_is_hours_times_a_price():
    one = curve("one", (10, 0.2), (20, 0.6))
    answers = curves.compare_curves([one], target=0.5, price=None)
    assert answers.comparisons == () and [level.quality for level in answers.equal_quality] == [0.2, 0.5, 0.6]
    point = curves.make_point(0.5, one.points[1].runs, price=1800.0)
    assert point.cost.value == approx(20 / 3600 * 1800)
