import math

import numpy as np
import pytest
from scipy import stats

from common.errors import UserError
from common.evidence.log import RunSet, load, parse_log
from common.evidence.score import duration, interval, notes, olympic_mean, reported, score, speedups

PUBLISHED_SCORES = {  # the official summarizer's minutes for the MosaicML submissions of v2.0 and v2.1
    ("resnet", "baseline"): (110.513128, 107_618_028, 0.766668),
    ("resnet", "methods"): (23.788506, 34_591_509, 0.761660),
    ("bert", "baseline"): (21.371129, 628_320, 0.720303),
    ("bert", "methods"): (7.895954, 643_104, 0.720276),
}


def scored(logs, folder="here"):
    parsed = [parse_log("\n".join(lines).encode(), f"{n}", ("", "")) for n, lines in enumerate(logs)]
    return score(RunSet(folder=folder, logs=tuple(parsed)))


def aborted(lines):
    return [line.replace('"status": "success"', '"status": "aborted"') for line in lines]


def below_target(lines):
    """Without its last evaluation, the one at the target."""
    last = max(index for index, line in enumerate(lines) if '"key": "eval_accuracy"' in line)
    return lines[:last] + lines[last + 1 :]


def test_the_score_drops_the_fastest_and_the_slowest():
    assert olympic_mean([23.5536, 24.1001, 23.5456, 24.5397, 23.7118]) == pytest.approx(23.7885)


def test_one_missed_target_is_the_slowest_run_and_two_leave_no_score():
    runs = [28.4105, 28.6387, 28.7480, 28.6694, math.inf]  # NVIDIA v2.0 resnet
    assert olympic_mean(runs) == pytest.approx(28.6854, abs=1e-4)
    assert olympic_mean([*runs[1:], math.inf]) is None
    assert olympic_mean([1.0, math.inf]) is None


def test_below_three_runs_the_score_is_the_plain_mean():
    assert olympic_mean([1.0, 3.0]) == 2.0


@pytest.mark.parametrize("key", PUBLISHED_SCORES, ids="-".join)
def test_reported_numbers_give_the_published_score(key):
    found = next(entry for entry in reported() if (entry.benchmark, entry.configuration) == key)
    minutes, samples, quality = PUBLISHED_SCORES[key]
    assert found.minutes == pytest.approx(minutes, abs=5e-5)
    assert found.samples_to_target == pytest.approx(samples)
    assert found.quality == pytest.approx(quality, abs=1e-6)


def test_published_logs_give_the_published_score(published):
    for found in map(score, load([published])):
        minutes, samples, quality = PUBLISHED_SCORES[found.benchmark, found.configuration]
        assert found.minutes == pytest.approx(minutes, abs=1e-6)
        assert found.samples_to_target == samples
        assert found.quality == pytest.approx(quality, abs=1e-6)


def test_published_logs_give_the_published_throughput_without_evaluation(published):
    rates = {found.benchmark: found.samples_per_s for found in map(score, load([published]))}
    assert 23_989 < rates["resnet"] < 25_038
    assert 1_488 < rates["bert"] < 1_533


def test_a_complete_set_is_unverified_and_a_short_one_provisional(golden):
    assert scored(golden.set()).label == "unverified"
    assert scored(golden.set()[:4]).label == "unverified, provisional"
    assert scored(golden.set(size="mini")).label == "unverified, proxy"


def test_aborted_and_below_target_runs_count_as_infinite(golden):
    good = golden.set()
    assert scored([*good[:4], aborted(good[4])]).num_converged == 4
    assert scored([*good[:3], aborted(good[3]), below_target(good[4])]).minutes is None
    assert scored([*good, ["unreadable"]]).num_converged == 5


def test_time_is_split_into_startup_training_and_evaluation(golden):
    split = scored([golden.log()]).split
    assert split.evaluation == pytest.approx(5 * 2 / 60)
    assert split.startup == pytest.approx(0.010 / 60)
    assert split.total == pytest.approx(scored([golden.log()]).minutes)


def test_the_bootstrap_interval_holds_the_score_and_is_repeatable():
    runs = [23.5536, 24.1001, 23.5456, 24.5397, 23.7118]
    found = interval(runs)
    assert found == interval(runs)
    assert found.method.startswith("BCa")
    assert min(runs) <= found.low < olympic_mean(runs) < found.high <= max(runs)


def test_few_runs_give_students_interval_on_log_minutes():
    runs = [1.0, 1.1, 1.3]
    found, logs = interval(runs), np.log(runs)
    low, high = stats.t.interval(0.95, 2, loc=logs.mean(), scale=stats.sem(logs))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert interval([1.0]) is None


@pytest.mark.parametrize("runs", [[2.0] * 5, [1.0, 2.0, 2.0, 2.0, 3.0], [1.0, 1.1, 1.2, 1.3, math.inf]])
def test_an_interval_is_finite_for_equal_and_for_missing_runs(runs):
    found = interval(runs)
    assert 0 < found.low <= found.high < math.inf


def test_a_speed_up_is_the_ratio_to_the_baseline_of_the_same_hardware(golden):
    baseline = scored(golden.set(configuration="baseline", block_s=80), "slow")
    other = scored(golden.set(configuration="optimized", block_s=40), "fast")
    proxy = scored(golden.set(configuration="optimized", size="mini"), "mini")
    found = speedups([baseline, other, proxy])
    assert set(found) == {"fast"}
    assert found["fast"].ratio == pytest.approx(baseline.minutes / other.minutes)
    assert found["fast"].interval.low < found["fast"].ratio < found["fast"].interval.high


def test_every_kind_of_score_has_its_note(golden):
    assert len(notes([scored(golden.set())])) == 1
    assert len(notes([scored(golden.set(size="mini")), *reported()])) == 3


def test_short_times_are_given_in_seconds_too():
    assert duration(0.5) == "0.500 (30.0 s)"
    assert duration(23.7885) == "23.788"


def test_a_broken_reported_file_is_named(tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "reported.yaml").write_text("benchmark: resnet\nsets: [{}]\n")
    with pytest.raises(UserError, match="some/reported.yaml"):
        reported(tmp_path)
