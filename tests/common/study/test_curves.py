"""Trade-off curves against plain arithmetic."""

import math
import statistics

import pytest

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


def test_a_line_rises_with_time_and_never_falls():
    found = line([(30.0, 0.5), (10.0, 0.2), (20.0, 0.6)])
    assert found == Line((10.0, 20.0, 30.0), (0.2, 0.6, 0.6))


def test_quality_and_time_are_each_others_inverse_between_budgets():
    found = line([(10.0, 0.2), (20.0, 0.6), (40.0, 0.7)])
    for seconds in (10.0, 12.5, 19.0, 20.0, 33.0, 40.0):
        low = max(t for t in (10.0, 20.0) if t <= seconds)  # the budget before, by hand
        start, end, base, top = (10, 20, 0.2, 0.6) if low == 10 else (20, 40, 0.6, 0.7)
        expected = base + (top - base) * (seconds - start) / (end - start)
        assert found.quality_at(seconds) == pytest.approx(expected)
        assert found.time_at(expected) == pytest.approx(seconds)
    assert found.quality_at(9.9) is None and found.quality_at(1000) == 0.7
    assert found.time_at(0.71) is None and found.time_at(0.1) == 10.0


def test_the_time_of_a_level_stretch_is_its_start():
    assert line([(10.0, 0.2), (20.0, 0.6), (30.0, 0.5), (40.0, 0.8)]).time_at(0.6) == 20.0


def test_a_quality_below_the_smallest_budget_is_reached_at_most_then():
    one, other = curve("one", (10, 0.2), (20, 0.6)), curve("other", (4, 0.5), (8, 0.7))
    value = curves.time_at(other, 0.2)
    assert (value.estimate.value, value.bound) == (4, "at most")
    faster = curves.times_faster(curves.time_at(one, 0.2), value)
    assert faster.estimate.value == pytest.approx(10 / 4)
    assert (faster.estimate.interval, faster.bound) == (None, "at least")
    slower = curves.times_faster(value, curves.time_at(one, 0.2))
    assert slower.estimate.value == pytest.approx(4 / 10) and slower.bound == "at most"
    assert curves.times_faster(value, value) == curves.Value()
    late = curves.quality_at(other, 20)
    assert (late.estimate.value, late.bound) == (0.7, "at least")
    assert curves.quality_at(one, 5).estimate is None
    assert curves.time_at(one, 0.65).estimate is None


def test_intervals_are_those_of_the_seeds_own_curves():
    found = curve("one", (10, 0.2), (20, 0.6), spread=0.1)
    value = curves.quality_at(found, 15)
    low, high = 0.3, 0.5  # of the two seeds, halfway
    assert value.values == pytest.approx((low, high))
    half = 12.706204736 * statistics.stdev([low, high]) / math.sqrt(2)  # t at 1 degree of freedom
    assert value.estimate.value == pytest.approx(0.4)
    assert value.estimate.interval.high == pytest.approx(0.4 + half)
    assert curves.time_at(found, 0.65).estimate is None  # one seed reaches it, their mean does not
    at_end = curves.time_at(found, 0.6)  # the mean and one seed do
    assert at_end.estimate.value == 20 and at_end.estimate.interval is None and at_end.values == ()


def test_a_value_is_the_mean_of_the_seeds_and_so_within_its_interval():
    found = of_runs(
        "one", [(1, 10, 0.2), (2, 10, 0.2)], [(1, 20, 0.5), (2, 20, 0.9)], [(1, 40, 0.9), (2, 40, 0.9)]
    )
    value = curves.time_at(found, 0.5)
    of_seeds = (20.0, 10 + 10 * 0.3 / 0.7)
    assert value.values == pytest.approx(of_seeds)
    assert value.estimate.value == pytest.approx(sum(of_seeds) / 2) != pytest.approx(found.mean.time_at(0.5))
    assert value.estimate.interval.low < value.estimate.value < value.estimate.interval.high
    faster = curves.times_faster(value, curves.time_at(found, 0.9)).estimate
    assert faster.interval.low < faster.value < faster.interval.high


def test_a_seed_that_is_past_a_quality_at_the_smallest_budget_makes_a_time_a_bound():
    found = of_runs("one", [(1, 10, 0.1), (2, 10, 0.3)], [(1, 20, 0.6), (2, 20, 0.6)])
    value = curves.time_at(found, 0.2)
    assert value.bound == "at most" and value.estimate.interval is None
    assert curves.time_at(found, 0.4).bound == ""


def test_seeds_are_asked_no_earlier_than_their_own_first_point():
    found = of_runs("one", [(1, 9, 0.2), (2, 11, 0.3)], [(1, 20, 0.6), (2, 20, 0.7)])
    value = curves.quality_at(found, 10.0)  # the mean of the first times
    assert value.values == pytest.approx((0.2 + 0.4 / 11, 0.3)) and value.estimate.interval is not None


def test_runs_of_one_seed_make_a_curve_though_another_was_replaced():
    found = of_runs(
        "one", [(1, 10, 0.1), (3, 10, 0.3), (4, 10, 0.4)], [(1, 20, 0.5), (2, 20, 0.6), (3, 20, 0.7)]
    )
    assert [each.qualities for each in found.seeds] == [(0.1, 0.5), (0.3, 0.7), (0.4, 0.6)]


def test_a_crossing_has_an_interval_only_where_all_seeds_cross_in_its_direction():
    one = of_runs("one", [(1, 10, 0.1), (2, 10, 0.1)], [(1, 30, 0.7), (2, 30, 0.9)])
    other = of_runs("other", [(1, 10, 0.3), (2, 10, 0.3)], [(1, 30, 0.4), (2, 30, 0.4)])
    (found,) = curves.crossings(one, other)
    of_seeds = (10 + 20 * 0.2 / 0.5, 10 + 20 * 0.2 / 0.7)
    assert found.seconds == pytest.approx(sum(of_seeds) / 2)
    assert found.interval.low < found.seconds < found.interval.high
    against = of_runs("one", [(1, 10, 0.0), (2, 10, 0.4)], [(1, 30, 1.0), (2, 30, 0.3)])
    (found,) = curves.crossings(against, other)
    assert found.leader == "one" and found.interval is None


def test_curves_cross_where_straight_lines_do():
    one, other = curve("one", (10, 0.2), (30, 0.8)), curve("other", (5, 0.4), (25, 0.6))
    (found,) = curves.crossings(one, other)
    # 0.2 + 0.03 (t - 10) = 0.4 + 0.01 (t - 5)
    assert (found.leader, found.other) == ("one", "other")
    assert found.seconds == pytest.approx(22.5) and found.quality == pytest.approx(0.575)
    assert not found.is_extended and found.interval is not None
    (mirrored,) = curves.crossings(other, one)
    assert mirrored.leader == "one" and mirrored.seconds == pytest.approx(22.5)


def test_a_crossing_beyond_the_largest_budget_is_marked_and_a_touch_is_none():
    (late,) = curves.crossings(curve("slow", (10, 0.1), (30, 0.8)), curve("fast", (5, 0.4), (12, 0.6)))
    assert late.leader == "slow" and late.is_extended
    assert late.seconds == pytest.approx(10 + 20 * 0.5 / 0.7)
    touching = curve("one", (10, 0.2), (20, 0.5), (30, 0.6)), curve("other", (10, 0.4), (20, 0.5), (30, 0.8))
    assert curves.crossings(*touching) == []
    assert curves.leader(*touching) == "other" and curves.leader(*touching[::-1]) == "other"
    assert curves.leader(touching[0], touching[0]) == ""


def test_a_crossing_at_a_budget_is_found_once():
    one, other = (
        curve("one", (10, 0.2), (20, 0.5), (30, 0.9)),
        curve("other", (10, 0.4), (20, 0.5), (30, 0.6)),
    )
    (found,) = curves.crossings(one, other)
    assert found.leader == "one" and found.seconds == 20 and found.quality == 0.5


def test_answers_ask_at_the_first_curves_places_and_at_the_target():
    one, other = curve("one", (10, 0.2), (20, 0.6)), curve("other", (4, 0.5), (8, 0.7))
    found = curves.compare_curves([one, other], target=0.55, price=3.6)
    assert [each.quality for each in found.equal_quality] == [0.2, 0.55, 0.6]
    assert [each.seconds for each in found.equal_time] == [8, 10, 20]
    at_target = found.equal_quality[1]
    expected = (10 + 10 * 0.35 / 0.4) / (4 + 4 * 0.05 / 0.2)
    assert at_target.times_faster["other"].estimate.value == pytest.approx(expected)
    assert curves.compare_curves([one], target=0.9, price=None).crossings == ()


def test_time_is_without_evaluations_and_costs_what_it_takes():
    record = ':::MLLOG {{"time_ms": {}, "key": "{}", "value": {}, "event_type": "{}", "metadata": {}}}'
    start = 1_700_000_000_000
    lines = [record.format(start - 5000, "seed", 7, "POINT_IN_TIME", "{}")]
    lines.append(record.format(start, "run_start", "null", "INTERVAL_START", "{}"))
    for number in (1, 2):  # 10 s of training, 2 s of evaluation
        end = start + number * 12_000
        lines.append(record.format(end - 2000, "eval_start", "null", "INTERVAL_START", "{}"))
        lines.append(record.format(end, "eval_stop", "null", "INTERVAL_END", "{}"))
        samples = f'{{"samples": {number * 100}}}'
        lines.append(record.format(end, "eval_accuracy", 0.1 * number, "POINT_IN_TIME", samples))
    lines.append(record.format(start + 24_000, "run_stop", "null", "INTERVAL_END", '{"status": "aborted"}'))
    log = parse_log("\n".join(lines).encode(), "here/result_0.txt")
    point = curves.read_point(0.5, [log], price=1800.0)
    assert [each.seconds for each in point.runs[0].way] == pytest.approx([10, 20])
    assert [each.samples for each in point.runs[0].way] == [100, 200]
    assert point.runs[0].seed == 7 and point.samples == 200
    assert point.seconds.value == pytest.approx(20) and point.quality.value == pytest.approx(0.2)
    assert point.cost.value == pytest.approx(20 / 3600 * 1800)
