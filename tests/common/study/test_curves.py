"""Trade-off curves against plain arithmetic."""

import json
import math
import statistics

import pytest
from pytest import approx

from common.evidence import intervals
from common.evidence.log import parse_log
from common.study import curves
from common.study.curves import Curve, Evaluation, Line, Point, Run, line


def of_runs(name, *points):
    """Return a curve of points, each the (seed, seconds, quality) of its runs."""
    return Curve(
        configuration=name,
        points=tuple(
            Point(
                budget=float(number),
                samples=10,
                seconds=intervals.mean([seconds for _, seconds, _ in runs]),
                quality=intervals.mean([quality for _, _, quality in runs]),
                cost=None,
                runs=tuple(
                    Run(log="", seed=seed, way=(Evaluation(seconds=seconds, samples=10, quality=quality),))
                    for seed, seconds, quality in runs
                ),
            )
            for number, runs in enumerate(points, 1)
        ),
    )


def curve(name, *points, spread=0.0):
    """Return a curve of two seeds, `spread` below and above (seconds, quality) of each point."""
    return of_runs(
        name, *([(1, seconds, end - spread), (2, seconds, end + spread)] for seconds, end in points)
    )


def test_a_line_rises_with_time_and_its_quality_and_time_are_each_others_inverse():
    rising = line([(40.0, 0.7), (10.0, 0.2), (20.0, 0.6)])
    assert rising == Line((10.0, 20.0, 40.0), (0.2, 0.6, 0.7))
    for seconds, quality in ((10, 0.2), (12.5, 0.3), (19, 0.56), (20, 0.6), (33, 0.665), (40, 0.7)):
        assert rising.quality_at(seconds) == approx(quality)
        assert rising.time_at(rising.quality_at(seconds)) == approx(seconds)
    assert rising.quality_at(1000) == 0.7 and rising.time_at(0.71) is None and rising.time_at(0.1) == 10.0
    level = line([(10.0, 0.2), (20.0, 0.6), (30.0, 0.5), (40.0, 0.8)])  # which never falls
    assert level.qualities == (0.2, 0.6, 0.6, 0.8) and level.time_at(0.6) == 20.0


def test_a_quality_below_the_smallest_budget_is_reached_at_most_then():
    one, other = curve("one", (10, 0.2), (20, 0.6)), curve("other", (4, 0.5), (8, 0.7))
    value = curves.time_at(other, 0.2)
    assert (value.estimate.value, value.bound) == (4, "at most")
    faster = curves.times_faster(curves.time_at(one, 0.2), value)
    assert faster.estimate.value == approx(10 / 4)
    assert (faster.estimate.interval, faster.bound) == (None, "at least")
    slower = curves.times_faster(value, curves.time_at(one, 0.2))
    assert slower.estimate.value == approx(4 / 10) and slower.bound == "at most"
    assert curves.times_faster(value, value) == curves.Value()
    late = curves.quality_at(other, 20)
    assert (late.estimate.value, late.bound) == (0.7, "at least")
    assert curves.quality_at(one, 5).estimate is None and curves.time_at(one, 0.65).estimate is None


def test_intervals_are_those_of_the_seeds_own_curves():
    one = curve("one", (10, 0.2), (20, 0.6), spread=0.1)
    value = curves.quality_at(one, 15)
    low, high = 0.3, 0.5  # of the two seeds, halfway
    half = 12.706204736 * statistics.stdev([low, high]) / math.sqrt(2)  # t at 1 degree of freedom
    assert value.values == approx((low, high)) and value.estimate.value == approx(0.4)
    assert value.estimate.interval.high == approx(0.4 + half)
    assert curves.time_at(one, 0.65).estimate is None  # one seed reaches it, their mean does not
    at_end = curves.time_at(one, 0.6)  # the mean and one seed do
    assert (at_end.estimate.value, at_end.estimate.interval, at_end.values) == (20, None, ())


def test_a_value_is_the_mean_of_the_seeds_and_so_within_its_interval():
    one = of_runs(
        "one", [(1, 10, 0.2), (2, 10, 0.2)], [(1, 20, 0.5), (2, 20, 0.9)], [(1, 40, 0.9), (2, 40, 0.9)]
    )
    value = curves.time_at(one, 0.5)
    of_seeds = (20.0, 10 + 10 * 0.3 / 0.7)
    assert value.values == approx(of_seeds)
    assert value.estimate.value == approx(sum(of_seeds) / 2) != approx(one.mean.time_at(0.5))
    for estimate in (value.estimate, curves.times_faster(value, curves.time_at(one, 0.9)).estimate):
        assert estimate.interval.low < estimate.value < estimate.interval.high


def test_a_seed_has_its_own_first_point():
    one = of_runs("one", [(1, 10, 0.1), (2, 10, 0.3)], [(1, 20, 0.6), (2, 20, 0.6)])
    early = curves.time_at(one, 0.2)  # a seed is past it at the smallest budget
    assert early.bound == "at most" and early.estimate.interval is None
    assert curves.time_at(one, 0.4).bound == ""
    other = of_runs("other", [(1, 9, 0.2), (2, 11, 0.3)], [(1, 20, 0.6), (2, 20, 0.7)])
    value = curves.quality_at(other, 10.0)  # the mean of the first times
    assert value.values == approx((0.2 + 0.4 / 11, 0.3)) and value.estimate.interval is not None


def test_runs_of_one_seed_make_a_curve_though_another_was_replaced():
    one = of_runs(
        "one", [(1, 10, 0.1), (3, 10, 0.3), (4, 10, 0.4)], [(1, 20, 0.5), (2, 20, 0.6), (3, 20, 0.7)]
    )
    assert [seed.qualities for seed in one.seeds] == [(0.1, 0.5), (0.3, 0.7), (0.4, 0.6)]


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
def test_curves_cross_where_straight_lines_do(one, other, expected):
    one, other = curve("one", *one), curve("other", *other)
    for pair in ((one, other), (other, one)):
        crossings = list(curves.crossings(*pair))
        if expected is None:
            assert crossings == [] and curves.leader(*pair) == "other"
            continue
        (crossing,) = crossings
        assert (crossing.leader, crossing.other) == ("one", "other")
        assert (crossing.seconds, crossing.quality, crossing.is_extended) == approx(expected)
        assert crossing.interval is not None
    assert curves.leader(one, one) == ""


def test_a_crossing_has_an_interval_only_where_all_seeds_cross_in_its_direction():
    one = of_runs("one", [(1, 10, 0.1), (2, 10, 0.1)], [(1, 30, 0.7), (2, 30, 0.9)])
    other = of_runs("other", [(1, 10, 0.3), (2, 10, 0.3)], [(1, 30, 0.4), (2, 30, 0.4)])
    (crossing,) = curves.crossings(one, other)
    of_seeds = (10 + 20 * 0.2 / 0.5, 10 + 20 * 0.2 / 0.7)
    assert crossing.seconds == approx(sum(of_seeds) / 2)
    assert crossing.interval.low < crossing.seconds < crossing.interval.high
    against = of_runs("one", [(1, 10, 0.0), (2, 10, 0.4)], [(1, 30, 1.0), (2, 30, 0.3)])
    (crossing,) = curves.crossings(against, other)
    assert crossing.leader == "one" and crossing.interval is None


def test_answers_ask_at_the_first_curves_places_and_at_the_target():
    one, other = curve("one", (10, 0.2), (20, 0.6)), curve("other", (4, 0.5), (8, 0.7))
    answers = curves.compare_curves([one, other], target=0.55, price=3.6)
    assert [level["quality"] for level in answers.equal_quality] == [0.2, 0.55, 0.6]
    assert [moment["seconds"] for moment in answers.equal_time] == [8, 10, 20]
    expected = (10 + 10 * 0.35 / 0.4) / (4 + 4 * 0.05 / 0.2)
    assert answers.equal_quality[1]["times_faster"]["other"].estimate.value == approx(expected)
    assert curves.compare_curves([one], target=0.9, price=None).crossings == ()


def test_time_is_without_evaluations_and_costs_what_it_takes():
    lines = []

    def record(seconds, key, value=None, **metadata):
        time_ms = 1_700_000_000_000 + 1000 * seconds
        entry = {"time_ms": time_ms, "key": key, "value": value, "event_type": "", "metadata": metadata}
        lines.append(":::MLLOG " + json.dumps(entry))

    record(-5, "seed", 7)
    record(0, "run_start")
    for number in (1, 2):  # 10 s of training, 2 s of evaluation
        record(12 * number - 2, "eval_start")
        record(12 * number, "eval_stop")
        record(12 * number, "eval_accuracy", 0.1 * number, samples=100 * number)
    record(24, "run_stop", status="aborted")
    point = curves.read_point(0.5, [parse_log("\n".join(lines).encode(), "result_0.txt")], price=1800.0)
    (run,) = point.runs
    assert [place.seconds for place in run.way] == approx([10, 20])
    assert [place.samples for place in run.way] == [100, 200] and (run.seed, point.samples) == (7, 200)
    assert (point.seconds.value, point.quality.value) == approx((20, 0.2))
    assert point.cost.value == approx(20 / 3600 * 1800)
