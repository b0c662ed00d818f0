import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy import stats

from common.errors import UserError
from common.evidence import intervals
from common.evidence.compare import masked_accuracy
from common.evidence.compare.reported import reported
from common.evidence.log import RunSet, load, parse_log
from common.evidence.rules.rule import add, edit, place_of, remove
from common.evidence.score import counting_window, olympic_mean, score, speedups
from common.evidence.text import COLUMNS, SPEEDUP, notes
from tests.command import ttt_here as ttt

aborted = edit("run_stop", status="aborted")
below_target = remove("eval_accuracy", at=-1)  # without the evaluation at the target

PUBLISHED_SCORES = {  # the official summarizer's minutes for the MosaicML submissions of v2.0 and v2.1
    ("resnet", "baseline"): (110.513128, 107_618_028, 0.766668),
    ("resnet", "methods"): (23.788506, 34_591_509, 0.761660),
    ("bert", "baseline"): (21.371129, 628_320, 0.720303),
    ("bert", "methods"): (7.895954, 643_104, 0.720276),
}
RATES = {"resnet": (23_989, 25_038), "bert": (1_488, 1_533)}  # samples/s without evaluation


def scored(logs, folder="here", **told):
    parsed = [parse_log("\n".join(lines).encode(), f"{n}") for n, lines in enumerate(logs)]
    return score(RunSet(folder=folder, logs=tuple(parsed)), **told)


def test_a_resumed_run_counts_when_told_to_in_place_of_its_interrupted_logs(golden):
    logs = golden.set("resnet")
    first = place_of(logs[1], "block_stop")
    again = add("block_stop", key="resumed")(logs[1])
    stopped = aborted([*logs[1][:first], logs[1][-1]]), aborted([*again[: first + 5], again[-1]])
    interrupted = [logs[0], stopped[0], *logs[2:], stopped[1], again]
    alone, told = scored(interrupted), scored(interrupted, include_resumed=True)
    assert alone.num_converged == 4 and len(alone.runs) == 5 and "2 resumed not counted" in alone.label
    assert told.minutes == scored(logs).minutes and told.run_minutes == scored(logs).run_minutes
    assert "2 resumed" in told.label and any("--include-resumed" in note for note in notes([told]))
    none = scored([again])
    assert none.minutes is None and none.runs == ()


@pytest.mark.parametrize(
    ("runs", "minutes"),
    [
        ([28.4105, 28.6387, 28.7480, 28.6694, math.inf], 28.68537),  # NVIDIA v2.0 resnet: a miss is slowest
        ([28.6387, 28.7480, 28.6694, math.inf, math.inf], None),
        ([1.0, math.inf], None),
        ([1.0, 3.0], 2.0),  # below three the plain mean
    ],
)
def test_the_score_drops_the_fastest_and_the_slowest(runs, minutes):
    assert olympic_mean(runs) == (minutes and pytest.approx(minutes, abs=5e-5))


@pytest.mark.parametrize("key", PUBLISHED_SCORES, ids="-".join)
def test_reported_numbers_give_the_published_score(key):
    found = next(entry for entry in reported() if (entry.benchmark, entry.configuration) == key)
    minutes, samples, quality = PUBLISHED_SCORES[key]
    assert found.minutes == pytest.approx(minutes, abs=5e-5)
    assert found.samples_to_target == pytest.approx(samples)
    assert found.quality == pytest.approx(quality, abs=1e-6)
    is_counted_otherwise = found.benchmark == "bert"
    assert (masked_accuracy.NOTE in notes([found])) == is_counted_otherwise
    by_official_count = masked_accuracy.convert(0.72, masked_accuracy.MOSAIC, masked_accuracy.OFFICIAL)
    assert f"their 0.7200 is {by_official_count:.4f} by" in masked_accuracy.NOTE


def test_published_logs_give_the_published_score_rate_and_overshoot(published):
    overshoot = {}
    for run_set in load([published]):
        entry = score(run_set)
        minutes, samples, quality = PUBLISHED_SCORES[entry.benchmark, entry.configuration]
        assert entry.minutes == pytest.approx(minutes, abs=1e-6)
        assert entry.samples_to_target == samples
        assert entry.quality == pytest.approx(quality, abs=1e-6)
        low, high = RATES[entry.benchmark]
        assert low < entry.samples_per_s < high
        for run in entry.runs:
            assert run.split.total == pytest.approx(run.minutes, rel=1e-12)
        assert sum_of(asdict(entry.factors)) == pytest.approx(np.mean(entry.run_minutes), rel=1e-12)
        overshoot[entry.benchmark] = round(entry.factors.overshoot.value, 2)
    assert overshoot == {"resnet": 1.12, "bert": 0.18}


def sum_of(terms):
    """Return the minutes that the terms of the second table come to."""
    training = terms["samples"]["value"] / (60 * terms["samples_per_s"]["value"])
    return training + sum(terms[part]["value"] for part in ("evaluation", "startup", "overshoot"))


def test_a_complete_set_is_unverified_and_a_short_one_provisional(golden):
    complete, short, proxy = map(scored, (golden.set(), golden.set()[:4], golden.set(size="mini")))
    assert complete.label == "unverified" and len(notes([complete])) == 1
    assert short.label == "unverified, provisional" and "5 of ResNet" in " ".join(notes([short]))
    assert proxy.label == "unverified, proxy" and len(notes([proxy, *reported()])) == 4


def test_aborted_and_below_target_runs_count_as_infinite(golden):
    good = golden.set()
    assert scored([*good[:4], aborted(good[4])]).num_converged == 4
    assert scored([*good[:3], aborted(good[3]), below_target(good[4])]).minutes is None
    assert scored([*good, ["unreadable"]]).num_converged == 5


def test_a_missed_run_is_named_with_the_reason(golden):
    good = golden.set()
    found = scored([good[0], ["binary \0"], good[1] + good[2], aborted(good[3]), below_target(good[4])])
    assert [text.split(":")[0] for text in found.missed] == ["1", "2", "3", "4"]
    words = ("binary", "2 run_start and 2 run_stop", "status aborted", "target 0.759")
    assert all(word in text for word, text in zip(words, found.missed, strict=True))
    assert notes([found])[-4:] == [f"missed: {text}" for text in found.missed]


def test_a_score_that_counts_a_miss_has_no_interval_of_the_others(golden):
    good, slow = golden.set(), golden.set(configuration="baseline", block_s=80)
    one = scored([*good[:4], aborted(good[4])], "fast")
    assert one.minutes and one.interval is None and "1 missed" in one.label
    assert any("no interval" in note for note in notes([one]))
    faster = speedups([scored(slow, "slow"), one])["fast"]
    assert (faster.interval, faster.detectable) == (None, None)
    assert scored(good).interval is not None


@pytest.mark.parametrize(
    ("runs", "counted"),
    [
        ([10, 11, 12, 13, 14], (0, 5)),
        ([10, 11, 12, 13, 14, 20], (1, 6)),  # windows 12 and 13: the slower of two
        ([33, 10, 20, 30, 40, 28, 22], (2, 7)),  # windows 27.67, 26 and 26.67
        ([10, math.inf, 11, 12, math.inf, 13, 14], (0, 5)),  # two of three windows hold two failures
    ],
)
def test_of_more_runs_than_needed_the_window_with_the_median_score_counts(runs, counted):
    window = counting_window(runs, 5)
    assert (window[0], window[-1] + 1) == counted


def test_windows_follow_the_time_of_launch_and_a_failed_median_leaves_no_score(golden):
    shuffled = [golden.log(index=index) for index in (3, 0, 6, 1, 5, 2, 4)]  # `index` is the hour of launch
    found = scored(shuffled)
    assert found.label == "unverified, runs 2 to 6 of 7 by launch"
    assert [run.name for run in found.counting] == ["3", "5", "0", "6", "4"]
    assert found.minutes == pytest.approx(scored([golden.log(index=index) for index in range(1, 6)]).minutes)
    failed = golden.set(num_logs=7)
    failed[1], failed[4] = aborted(failed[1]), aborted(failed[4])
    assert scored(failed).minutes is None


def test_a_log_without_a_time_keeps_its_place(golden):
    found = scored([golden.log(index=0), ["unreadable"], golden.log(index=2), golden.log(index=1)])
    assert [run.name for run in found.runs] == ["0", "1", "3", "2"]


def test_minutes_are_split_at_the_interpolated_crossing(golden):
    # the run crosses 0.72 half-way between its two evaluations of 6 s, start-up 6 s
    split = scored([golden.timeline("bert", [(60, 66, 1000, 0.70), (126, 132, 2000, 0.74)])]).split
    assert split.startup * 60 == pytest.approx(6)
    assert split.overshoot * 60 == pytest.approx(33)  # the crossing at 66 + 33 s, the stop at 132 s
    assert split.evaluation * 60 == pytest.approx(6 + 3)  # half of the second lies behind the crossing
    assert split.training * 60 == pytest.approx(99 - 6 - 9)
    assert split.samples == pytest.approx(1500)
    # nobody knows when a run got there that its first evaluation saw past the target: its overshoot is not 0
    entry = scored([golden.timeline("bert", [(60, 66, 1000, 0.74)])])
    assert (entry.num_converged, entry.split.samples, entry.factors) == (1, None, None)


def test_factors_multiply_and_add_up_to_the_minutes_with_intervals(golden):
    logs = golden.set()
    terms = scored(logs).factors
    assert sum_of(asdict(terms)) == pytest.approx(np.mean(scored(logs).run_minutes), rel=1e-12)
    for estimate in (terms.minutes, terms.samples, terms.samples_per_s, terms.evaluation):
        assert estimate.interval.low <= estimate.value <= estimate.interval.high
    assert scored(logs[:1]).factors.minutes.interval is None


@pytest.mark.parametrize(
    "evaluations",
    [
        [(60, 66, 1000, 0.74)],  # nothing before the crossing
        [(60, 66, None, 0.70), (126, 132, None, 0.74)],  # no samples
        [(60, 66, 1000, 0.70)],  # never reached
        [(600, 660, 1000, 0.70), (126, 132, -5, 0.74)],  # times that run back, samples below zero
    ],
)
def test_odd_evaluations_are_clipped_into_the_run(golden, evaluations):
    found = scored([golden.timeline("bert", evaluations)])
    split = found.split
    assert split.total == pytest.approx(found.runs[0].split.total)
    assert min(split.startup, split.training, split.evaluation, split.overshoot) >= 0


def test_the_interval_is_students_on_log_minutes():
    runs = [1.0, 1.1, 1.3]
    found, logs = intervals.student_of_logs(runs), np.log(runs)
    low, high = stats.t.interval(0.95, 2, loc=logs.mean(), scale=stats.sem(logs))
    assert (found.low, found.high) == pytest.approx(np.exp((low, high)))
    assert intervals.student_of_logs([1.0]) is None
    for runs in ([2.0] * 5, [1e-5, 5e7]):
        found = intervals.student_of_logs(runs)
        assert 0 < found.low <= found.high < math.inf


def test_a_ratio_has_welchs_interval_and_two_one_sided_tests():
    a, b = [1.0, 1.1, 1.2, 1.05], [2.0, 2.1, 2.4]
    found = intervals.ratio(a, b)
    welch = stats.ttest_ind(np.log(a), np.log(b), equal_var=False).confidence_interval(0.95)
    assert (found.interval.low, found.interval.high) == pytest.approx(np.exp(welch))
    close = intervals.ratio([1.0, 1.01, 0.99], [1.0, 1.01, 0.99])
    assert close.is_within(0.05) and not close.is_within(0.005)
    assert not intervals.ratio([1.0], [1.0]).is_within(0.5)
    assert intervals.ratio([2.0, 2.0], [2.0, 2.0]).is_within(0.01)


def test_the_smallest_difference_is_found_with_80_percent_probability():
    spread = np.array([-1.0, 1.0] * 5) * 0.05 * math.sqrt(0.9)  # a deviation of exactly 5 %, ten runs
    found = intervals.detectable(spread, spread)
    assert found == pytest.approx(0.0685, abs=5e-4)  # 2.9627 standard errors of 0.05 sqrt(2 / 10)
    rng = np.random.default_rng(0)
    slow, fast = (rng.normal(shift, 0.05, (4000, 10)) for shift in (math.log1p(found), 0.0))
    assert np.mean(stats.ttest_ind(slow, fast, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.03)
    assert intervals.ratio([1.0], [1.0, 2.0]).detectable is None
    assert 0 < intervals.detectable([0.0, 0.1], [0.0, 0.1]) < 1


def test_a_speed_up_is_the_ratio_to_the_baseline_of_the_same_hardware(golden):
    baseline = scored(golden.set(configuration="baseline", block_s=80), "slow")
    other = scored(golden.set(configuration="optimized", block_s=40), "fast")
    proxy = scored(golden.set(configuration="optimized", size="mini"), "mini")
    easier = replace(other, target=other.target - 0.1, source="easier")
    found = speedups([baseline, other, proxy, easier])
    assert set(found) == {"fast"}
    pair = [replace(baseline, processor="AMD EPYC"), replace(other, processor="Intel(R) Xeon(R) Processor")]
    why = "no speed-up: fast: baseline ran on AMD EPYC, optimized on Intel(R) Xeon(R) Processor."
    assert speedups(pair) == {} and notes(pair)[-1] == why
    beside = replace(pair[1], configuration="baseline", source="slow too")
    assert set(speedups([*pair, beside])) == {"fast"}
    for scores in ([*pair, beside], [pair[0], replace(pair[1], target=0.5)]):
        assert not any("no speed-up" in note for note in notes(scores))
    assert set(speedups([pair[0], replace(other, processor="AMD EPYC 7513")])) == {"fast"}
    old, new = (replace(s, processor="AMD EPYC", instructions=s.configuration) for s in pair)
    assert speedups([old, new]) == {} and set(speedups([old, replace(new, instructions="")])) == {"fast"}
    assert found["fast"].ratio == pytest.approx(baseline.minutes / other.minutes)
    assert found["fast"].interval.low < found["fast"].ratio < found["fast"].interval.high
    assert 0 < found["fast"].detectable < 0.1


def test_the_processor_of_a_score_is_the_logs_or_the_descriptions_and_none_on_accelerators(golden, tmp_path):
    golden.describe(tmp_path / "systems")
    for num_accelerators, expected in ((8, ""), (0, "Intel(R) Xeon(R) Processor")):
        logs = [edit("num_accelerators", value=num_accelerators)(log) for log in golden.set()]
        assert scored(logs).processor == expected
    golden.write(tmp_path / "results", [remove("processor")(log) for log in logs])
    (run_set,) = load([tmp_path / "results"])
    assert score(run_set).processor == "Intel Xeon Platinum 8480C Processor"


def test_of_several_baselines_the_one_beside_a_set_counts(golden):
    baseline, other = (
        scored(golden.set(configuration=name, block_s=s), f"results/8xA100-{name}/resnet")
        for name, s in (("baseline", 80), ("optimized", 40))
    )
    apart = scored(golden.set(configuration="baseline", block_s=100), "results/study/8xA100-baseline/resnet")
    for scores in ([baseline, other, apart], [apart, baseline, other]):
        assert speedups(scores)[other.source].ratio == pytest.approx(baseline.minutes / other.minutes)
    assert speedups([apart, other])[other.source].ratio == pytest.approx(apart.minutes / other.minutes)
    twice = replace(apart, source="elsewhere/8xA100-baseline/resnet")
    assert speedups([apart, twice, other]) == {}


def test_a_broken_reported_file_is_named(tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "reported.yaml").write_text("benchmark: resnet\nsets: [{}]\n")
    with pytest.raises(UserError, match="some/reported.yaml"):
        reported(tmp_path)


def test_score_says_which_runs_count_and_names_the_scaled_score_too(golden, tmp_path):
    folder = golden.write(tmp_path, golden.set(num_logs=6))
    (folder / "scaling.json").write_text('{"scaling_factor": 1.0467}')
    done, as_json = ttt("score", folder), json.loads(ttt("score", "--json", folder).stdout)
    entry = as_json["scores"][0]
    assert entry["counted"] == [1, 2, 3, 4, 5] and len(entry["runs"]) == 6
    assert sum_of(entry["factors"]) == pytest.approx(np.mean(entry["run_minutes"][1:]))
    assert entry["minutes"] == pytest.approx(np.mean(sorted(entry["run_minutes"][1:])[1:-1]))
    assert entry["scaled_minutes"] == pytest.approx(1.0467 * entry["minutes"])
    figures = f"with scaling.json 1.0467 x {entry['minutes']:.3f} = {entry['scaled_minutes']:.3f}"
    assert figures in " ".join(done.stdout.split())
    assert (done.returncode, done.stderr) == (0, "")
    tables, _, sentences = done.stdout.rpartition("\n\n")
    assert max(map(len, sentences.splitlines())) <= 140
    headers = ("95 %", "quality", "speed-up", "runs could", "samples/s", "overshoot", "mean minutes =")
    assert all(header in tables for header in headers)  # a pipe has no width: no column is dropped
    parts = ("runs 2 to 6 of 6 by launch", "publishes the score times this factor", COLUMNS, SPEEDUP)
    assert all(part in " ".join(done.stdout.split()) for part in parts)


@pytest.mark.parametrize(
    "text", ["", "[1.02]", '{"scaling_factor": 0.5}', '{"scaling_factor": "1.02"}', "[" * 999]
)
def test_a_factor_that_no_checker_writes_is_not_applied(golden, tmp_path, text):
    folder = golden.write(tmp_path, golden.set())
    (folder / "scaling.json").write_text(text)
    (run_set,) = load([folder])
    scored = score(run_set)
    assert scored.minutes and scored.scaled_minutes is None and "scaling.json" in scored.label
