"""`ttt compare` as a person types it, on pairs with a known truth, and on real ones of a few steps."""

import json
import math
import signal
from argparse import Namespace
from xml.etree import ElementTree

import numpy as np
import pytest

from common import repository
from common.evidence.log import read_log
from common.repository import ROOT
from common.run import run_sets
from common.study import cells
from common.study.compare import step_pairs
from common.study.compare.compare import Command
from common.study.compare.comparison import (
    OF_RUNS,
    THROUGHPUT,
    Margins,
    Rule,
    judge,
    judge_runs,
    judge_targets,
    read_value,
)
from common.study.compare.report import Comparison, describe
from tests.command import TTT, one_line, start, ttt, ttt_here

MINI = ("--size", "mini")
TINY = ("--set", "max_duration=60ba", "schedule.warmup=4ba", "evaluation_batch_size=128")
RULE = Rule(margins=Margins(ratio=0.05, quality=0.005), max_pairs=20, alpha=0.05)
SWEEP = ROOT / "results/study/sweep"


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """Return a function that compares two configurations by steps; pairs are drawn around a ratio."""

    def compare(ratio, *more, noise=0.05, stops_at=None, names=("baseline", "optimized")):
        made = []

        def time_pair(configs, number):
            if number == stops_at:
                raise KeyboardInterrupt
            made.append(number)
            return 100.0, 100 * ratio * math.exp(np.random.default_rng(number).normal(0, noise))

        monkeypatch.setattr(step_pairs, "time_pair", time_pair)
        done = ttt_here("compare", "bert", *names, *MINI, "--steps", "--results", tmp_path, *more)
        return done, made

    return compare


def read(folder, name="compare-baseline-optimized", file="bert-mini.steps.json"):
    return json.loads((folder / "study" / name / file).read_text())


def test_steps_are_timed_until_the_question_is_decided(steps, tmp_path):
    done, made = steps(1.5)
    assert done.returncode == 0, done.stderr
    (result,) = read(tmp_path)["results"]
    assert result["verdict"] == "better" and 3 <= result["decided_after"] == len(made) < 10
    assert result["low"] > 1 and result["p"] < 0.05 and result["value"] == pytest.approx(1.5, rel=0.1)
    assert "B is better than A" in done.stdout and f"p={result['p']:.4f}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80 + len(str(tmp_path))
    table = [line for line in done.stdout.splitlines() if line.startswith("samples/s")]
    assert len(table) == 1 and len(table[0]) <= 80
    picture = tmp_path / "study/compare-baseline-optimized/bert-mini.steps.svg"
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")

    again, made = steps(1.5)
    assert again.returncode == 0 and made == [] and "B is better than A" in again.stdout
    figures, made = steps(1.5, "--json")
    assert json.loads(figures.stdout) == read(tmp_path) and "B is better than A" in figures.stderr
    assert "--dry-run makes no figures" in one_line(steps(1.5, "--json", "--dry-run")[0])


@pytest.mark.parametrize(
    ("ratio", "noise", "other", "verdict"),
    [
        (0.6, 0.05, "optimized", "worse"),
        (1.0, 0.01, "baseline", "equivalent"),  # one may be compared with itself
        (1.02, 0.3, "optimized", "undecided"),
    ],
)
def test_each_verdict_is_reached(steps, tmp_path, ratio, noise, other, verdict):
    done, made = steps(ratio, "--max-runs", "12", noise=noise, names=("baseline", other))
    assert done.returncode == 0, done.stderr
    (result,) = read(tmp_path, f"compare-baseline-{other}")["results"]
    assert result["verdict"] == verdict and len(made) <= 12
    assert ("the same configuration" in done.stdout) == (other == "baseline")
    if verdict == "undecided":
        assert result["more"] > 0 and "more would decide, if mean" in done.stdout and result["is_futile"]


def test_an_interrupted_comparison_reports_what_it_has_and_goes_on(steps, tmp_path, monkeypatch):
    done, made = steps(1.02, "--max-runs", "6", noise=0.02, stops_at=2)
    assert done.returncode == 130 and made == [0, 1] and "2 pairs" in done.stdout
    assert len(read(tmp_path)["results"][0]["pairs"]) == 2
    done, made = steps(1.02, "--max-runs", "6", noise=0.02)
    assert done.returncode == 0 and made[0] == 2 and len(read(tmp_path)["results"][0]["pairs"]) > 2
    message = one_line(steps(1.02, "--set", "optimizer.learning_rate=0.1")[0])
    assert "other configurations" in message and "--study NAME" in message
    monkeypatch.setattr(repository, "code_state", lambda: repository.CodeState("", (), "abc", ""))
    assert "other code" in one_line(steps(1.02)[0])
    (tmp_path / "study/compare-baseline-optimized/bert-mini.steps.json").write_text("{")
    assert "bert-mini.steps.json: no figures (not JSON" in one_line(steps(1.02)[0])


def test_pairs_that_another_command_adds_before_the_lock_are_kept(steps, tmp_path, monkeypatch):
    lock, path = run_sets.lock_folders, tmp_path / "study/compare-baseline-optimized/bert-mini.steps.json"
    steps(1.02, "--max-runs", "3", noise=0.02)
    there = path.read_text()
    path.unlink()

    def lock_folders(folders):
        path.write_text(there)
        return lock(folders)

    monkeypatch.setattr(run_sets, "lock_folders", lock_folders)
    done, made = steps(1.02, "--max-runs", "3", noise=0.02)
    assert done.returncode == 0 and made == [] and path.read_text() == there


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("baseline fast", "unknown configuration 'fast'"),
        ("baseline baseline", "--steps compares one with itself"),
        ("baseline optimized --margin 0", "'0' is not a positive number"),
        ("baseline optimized --margin 5", "'5' is not a positive number below 1, such as 0.05"),
        ("baseline optimized --quality-margin nan", "'nan' is not a positive number"),
        ("baseline optimized --max-runs 0", "'0' is not a whole number from 1"),
        ("baseline optimized --measures speed", "invalid choice: 'speed'"),
        ("baseline optimized --study a%b", "'a%b' cannot name a study"),
        ("baseline optimized --study ..", "'..' cannot name a study"),
        ("baseline optimized --steps --measures time", "--steps compares throughput alone"),
        ("baseline optimized --steps --nproc 2", "--nproc: --steps compares throughput alone, on one device"),
        ("baseline optimized --set targt=0.1", "target?"),
        ("baseline", "the following arguments are required: B"),
    ],
)
def test_a_mistake_is_answered_with_one_line(tmp_path, words, message):
    assert message in one_line(ttt_here("compare", "bert", *words.split(), *MINI, "--results", tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_would_run_at_most(tmp_path):
    words = ("compare", "bert", "baseline", "optimized", *MINI, "--dry-run", "--results", tmp_path)
    done = ttt_here(*words, "--max-runs", "4")
    assert done.returncode == 0 and "to run: 8 runs" in done.stdout and list(tmp_path.iterdir()) == []
    done = ttt_here(*words, "--steps")
    assert done.returncode == 0 and "0 of at most 20 pairs" in done.stdout and list(tmp_path.iterdir()) == []


def test_a_dry_run_that_is_interrupted_writes_nothing(tmp_path, monkeypatch):
    def interrupt(study, planned):
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "show", interrupt)
    monkeypatch.setattr(cells, "finished_runs", lambda folder: sweep_logs("baseline"))
    words = ("compare", "bert", "baseline", "optimized", *MINI, "--dry-run", "--results", tmp_path)
    done = ttt_here(*words)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_side_may_have_a_method_more_or_be_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "extends: baseline\nmethods: {ema: {half_life_steps: 100, every_steps: 20}}\n"
    )
    words = (*MINI, "--dry-run", "--max-runs", "2", "--results", tmp_path / "results")
    for name, cell in (("baseline+ema", "baseline+ema"), (tmp_path / "mine.yaml", "mine")):
        done = ttt_here("compare", "bert", "baseline", name, *words)
        assert done.returncode == 0 and f"\n{cell} " in done.stdout, done.stderr


def sweep_logs(configuration, budget="1"):
    folder = SWEEP / f"reference-2cpu-mini-{configuration}-{budget}" / "bert"
    return [read_log(path) for path in sorted(folder.glob("result_*.txt"))]


def test_measures_are_read_from_committed_runs():
    logs = (sweep_logs("baseline"), sweep_logs("optimized"))
    names = ("baseline", "optimized")
    time, samples, quality = judge_runs(list(OF_RUNS.values()), logs, names, RULE)
    for result, is_ratio in ((time, True), (samples, True), (quality, False)):
        assert len(result.pairs) == 3 and result.measure.is_ratio is is_ratio and result.note == ""
    assert time.value < 0.5 and time.verdict == "undecided" and time.more == 1
    assert quality.pairs[0] == tuple(side[0].curve[-1].accuracy for side in logs)
    log = logs[0][0]
    below, above = (
        [point for point in log.curve if (point.accuracy >= log.target) is is_above]
        for is_above in (False, True)
    )
    assert below[-1].samples <= samples.pairs[0][0] <= above[0].samples
    assert 0 < time.pairs[0][0] < 60 * log.minutes


def test_a_run_without_a_crossing_leaves_the_measure_unknown_and_says_whose():
    long, short = sweep_logs("baseline"), sweep_logs("baseline", "0.15")
    assert all(read_value(OF_RUNS["time"], log) is None for log in short)
    (result,) = judge_runs([OF_RUNS["time"]], (long, short), ("long", "short"), RULE)
    assert result.verdict == "unknown" and result.is_over and result.value is None
    assert "short did not cross the target" in result.note and "in 3 of 3 runs" in result.note


def test_runs_are_paired_by_seed_and_one_without_its_like_is_left_out():
    one, other = sweep_logs("baseline"), sweep_logs("optimized")
    rotated, names = (one[:2], [*other[1:], other[0]]), ("one", "other")
    (quality,) = judge_runs([OF_RUNS["quality"]], rotated, names, RULE)
    ends = [tuple(side[place].curve[-1].accuracy for side in (one, other)) for place in (0, 1)]
    assert [log.value("seed") for log in one] == [log.value("seed") for log in other]
    assert list(quality.pairs) == ends
    (none,) = judge_runs([OF_RUNS["quality"]], (one[:1], other[1:]), names, RULE)
    assert none.pairs == () and none.verdict == "undecided"


def test_a_sentence_says_of_the_target_only_what_is_shown():
    def sentences(logs):
        comparison = Comparison(
            benchmark="language_bert",
            size="mini",
            names=("a", "b"),
            differences=(),
            quality_name="accuracy",
            rule=RULE,
            results=(),
            targets=judge_targets({"a": logs}, RULE),
        )
        return next(describe(comparison))

    assert "runs, target 0.2: not shown to be above or below (p=" in sentences(sweep_logs("baseline")[:2])
    short = sweep_logs("baseline", "0.15")
    assert "of 12 runs, target 0.2: shown to be below (p=0.0" in sentences(4 * short)


def test_the_direction_of_better_is_that_of_the_measure():
    pairs = [(1.0, 2.0), (1.0, 2.1), (1.0, 1.9), (1.0, 2.05)]
    verdicts = {
        measure.name: judge(measure, pairs, RULE).verdict for measure in (THROUGHPUT, *OF_RUNS.values())
    }
    assert verdicts == {"throughput": "better", "time": "worse", "samples": "worse", "quality": "better"}


def test_the_error_rate_is_shared_among_the_measures_of_a_comparison():
    args = Namespace(steps=False, measures=list(OF_RUNS), margin=0.05, quality_margin=0.005, seeds=20)
    rule, pairs = Command(args, None).rule, [(1.0, 2.0), (1.0, 2.1), (1.0, 1.9)]
    alone, shared = (judge(THROUGHPUT, pairs, by) for by in (RULE, rule))
    assert rule.alpha == pytest.approx(0.05 / 3) and shared.p == pytest.approx(3 * alone.p)
    assert alone.p < 0.05 < shared.p and (alone.verdict, shared.verdict) == ("better", "undecided")


@pytest.mark.on_demand
def test_real_pairs_of_runs_and_of_steps_are_made_and_continued(tmp_path):
    words = ("compare", "bert", "baseline", "optimized", *MINI, *TINY, "--results", tmp_path, "--max-runs")
    process = start(TTT, *map(str, words), "3")
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("after 1 of at most 3 pairs") for line in lines)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "bert-mini.json" in rest
    comparison = read(tmp_path, file="bert-mini.json")
    assert [len(result["pairs"]) for result in comparison["results"]] == [1, 1, 1]
    assert (
        comparison["names"] == ["baseline", "optimized"]
        and "methods.unpad.round_to" in comparison["differences"]
    )
    done = ttt(*words, "2", "--measures", "quality")
    assert done.returncode == 0, done.stderr
    (quality,) = read(tmp_path, file="bert-mini.json")["results"]
    assert len(quality["pairs"]) == 2 and quality["verdict"] in ("undecided", "equivalent")
    text = " ".join(done.stdout.split())  # lines are folded at 80 columns
    assert "of 2 runs, target 0.2: not shown to be above or below (p=" in text
    logs = [path.read_text() for path in tmp_path.rglob("result_*.txt")]
    ended = [log for log in logs if '"run_stop"' in log and '"reason"' not in log]
    assert len(ended) == 4 and all('"key": "stop_at_target", "value": false' in log for log in ended)

    done = ttt(*words, "1", "--steps")
    assert done.returncode == 0, done.stderr
    ((one, other),) = read(tmp_path)["results"][0]["pairs"]
    assert 0 < one < other  # unpadding is worth more than any noise
