"""`ttt sweep` as a person types it: what is missing is run, what is finished never again."""

import json
import re
import shutil
from dataclasses import asdict

import pytest

from common.evidence.intervals import Difference
from common.evidence.log import read_log
from common.repository import ROOT, benchmark_module, benchmarks, mlperf_name
from common.study.cells import Study
from common.study.curves import Gap
from common.study.sweep import compare_curves, describe_comparisons, describe_gap, draw, sweep_cells
from tests.command import TTT, one_line, start, ttt, ttt_here
from tests.runs import until

SWEEP = ROOT / "results/study/sweep"
TINY = ("max_duration=40ba", "schedule.warmup=4ba", "evaluation_batch_size=128")


def arguments(folder, *more):
    command = ["sweep", "language_bert", "baseline", "optimized", "--size", "mini", "--budgets", "0.5,1"]
    return [*command, "--set", *TINY, "--results", str(folder / "results"), *more]


def is_whole(text):
    """Whether a run came to its end: a fault leaves a reason."""
    return '"run_stop"' in text and '"reason"' not in text


def logs(folder):
    return {path: path.read_text() for path in (folder / "results").rglob("result_*.txt")}


def test_a_dry_run_says_what_would_run_and_runs_nothing(tmp_path):
    done = ttt_here(*arguments(tmp_path, "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert "optimized-0.5" in done.stdout and "to run: 12 runs; the first one will tell" in done.stdout
    named = ("--answers", "--set", "submission.hardware=any")
    assert ttt_here(*arguments(tmp_path, "--dry-run", *named)).stdout == done.stdout
    assert not (tmp_path / "results").exists()


UNBUILDABLE = "optimized-unpad: cannot be built: methods.fused_qkv: needs unpad before it"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sweep bert optimized-unpad --dry-run", UNBUILDABLE),
        ("compare bert baseline optimized-unpad --dry-run", UNBUILDABLE),
        ("compare bert baseline optimized-unpad --dry-run --steps", UNBUILDABLE),
        ("sweep bert optimized --budgets 0.5,x", "--budgets 0.5,x"),
        ("sweep bert optimized --budgets 0", "--budgets 0"),
        ("sweep bert optimized --budgets nan", "--budgets nan"),
        ("sweep bert optimized --budgets 0.0001", "at least one step"),
        ("sweep bert optimized --price -1", "--price: '-1' is not a positive number"),
        ("sweep bert optimized --trials 1", "--trials"),
        ("sweep bert optimized --trials 2 --price 1", "--trials answers neither --budgets nor --price"),
        ("sweep bert optimized --answers", "submission.hardware=NAME"),
        ("sweep bert optimized --study ../x", "'../x' cannot name a study"),
        ("sweep bert optimized --set optimizer.learning_rat=1", "learning_rate?"),
        ("sweep bert optimized --set budget=0.05", "--set: budget: optimized has a budget already"),
        ("sweep bert optimized optimized+budget=0.5", "optimized+budget=0.5 has a budget already"),
        ("sweep bert optimized optimized+sam-sam", "optimized and optimized+sam-sam are the same"),
    ],
)
def test_a_mistake_is_answered_with_one_line(tmp_path, words, message):
    assert message in one_line(ttt_here(*words.split(), "--size", "mini", "--results", tmp_path))
    assert not list(tmp_path.iterdir())


def committed(benchmark):
    """Return the committed sweep of a benchmark, and the logs of its cells by name."""
    cells = sweep_cells(benchmark, ["baseline", "optimized"], [0.15, 0.3, 0.5, 1.0])
    study = Study(name="sweep", benchmark=benchmark, size="mini", cells=tuple(cells))
    runs = f"{mlperf_name(benchmark)}/result_*.txt"
    return study, {
        cell.name: [read_log(path) for path in sorted(SWEEP.glob(f"reference-2cpu-mini-{cell.name}/{runs}"))]
        for cell in cells
    }


def test_one_seed_is_said_to_show_nothing_of_chance():
    study, logs = committed("language_bert")
    answers = compare_curves(study, {name: runs[:1] for name, runs in logs.items()}, None)
    (line,) = describe_comparisons(answers)
    assert "one seed of baseline and of optimized says nothing of chance" in line
    assert "says nothing" not in " ".join(describe_comparisons(compare_curves(study, logs, None)))


@pytest.mark.parametrize("benchmark", benchmarks())
def test_the_committed_curves_are_drawn_from_their_logs_for_light_and_dark(benchmark):
    study, logs = committed(benchmark)
    answers, name = compare_curves(study, logs, None), mlperf_name(benchmark)
    kept = (SWEEP / f"{name}-mini.svg").read_text()
    drawn = str(draw(answers, benchmark_module(benchmark).Benchmark.names.quality, study.title))
    assert re.sub("Matplotlib v.*", "", kept) == re.sub("Matplotlib v.*", "", drawn)
    assert "(prefers-color-scheme: dark)" in kept and f"{benchmark} mini (a proxy), 95 % intervals" in kept
    assert all("fill: currentColor" in text for text in re.findall("<text [^>]*>", kept))
    assert json.loads((SWEEP / f"{name}-mini.json").read_text()) == json.loads(json.dumps(asdict(answers)))
    late = compare_curves(study, logs | {"baseline-0.15": []}, None)  # the first one stays the reference
    assert [curve.configuration for curve in late.curves] == ["baseline", "optimized"]


def test_answers_of_finished_runs_are_json_on_demand(tmp_path):
    for folder in SWEEP.glob("reference-2cpu-mini-*/bert"):
        shutil.copytree(folder, tmp_path / "study/sweep" / folder.parent.name / "bert")
    words = ("sweep", "bert", "baseline", "optimized", "--size", "mini", "--budgets", "0.15,0.3,0.5,1")
    where = ("--results", tmp_path, "--set", "submission.hardware=reference-2cpu")
    done = ttt_here(*words, *where, "--answers", "--json")
    assert done.returncode == 0, done.stderr
    kept = (tmp_path / "study/sweep/bert-mini.json").read_text()
    assert done.stdout == kept and [len(curve["points"]) for curve in json.loads(kept)["curves"]] == [4, 4]
    assert "time at equal quality" in done.stderr


@pytest.mark.on_demand
def test_a_killed_sweep_runs_only_what_is_missing_and_answers(tmp_path):
    command = arguments(tmp_path, "--seeds", "1", "--price", "0.36")
    process = start(TTT, *command)
    until(lambda: process.poll() or sum('"block_start"' in text for text in logs(tmp_path).values()) == 2)
    process.kill()
    process.communicate()
    before = logs(tmp_path)
    finished = {path: text for path, text in before.items() if is_whole(text)}
    assert len(before) == 2 and len(finished) == 1

    done = ttt(*command)
    assert done.returncode == 0, done.stderr
    assert "to run: 3 runs" in done.stdout and "its finished runs" in done.stdout
    after = logs(tmp_path)
    assert len(after) == 5 and all(after[path] == text for path, text in finished.items())
    ended = [text for text in after.values() if is_whole(text)]
    assert len(ended) == 4 and all('"key": "stop_at_target", "value": false' in text for text in ended)
    folder = tmp_path / "results" / "study" / "sweep"
    written = {path.name for path in folder.iterdir() if path.is_file()}
    assert {"bert-mini.json", "bert-mini.svg"} < written and len(written) == 3  # and the machine
    assert "optimized" in (folder / "bert-mini.svg").read_text()
    found = json.loads((folder / "bert-mini.json").read_text())
    for curve in found["curves"]:
        assert [point["budget"] for point in curve["points"]] == [0.5, 1.0]
        assert [point["samples"] for point in curve["points"]] == [320, 640]
        for point in curve["points"]:
            assert point["cost"]["value"] == pytest.approx(point["seconds"]["value"] * 1e-4)
            (run,) = point["runs"]
            assert len(run["way"]) in (5, 6)
            assert run["way"][-1]["samples"] == point["samples"]

    again = ttt(*command, "--dry-run")
    assert again.returncode == 0 and "nothing is missing" in again.stdout and logs(tmp_path) == after
    other = ttt(*command, "--set", "optimizer.learning_rate=0.1")
    assert other.returncode == 2 and "optimizer.learning_rate is" in other.stderr


@pytest.mark.parametrize(
    ("detectable", "text"), [(None, ""), (0.05, " (one of 5.0 points could be)"), (2.9, " (none could be)")]
)
def test_no_difference_of_accuracies_above_1_is_said_to_be_what_runs_could_show(detectable, text):
    difference = Difference(value=0.1, interval=None, p_value=1.0, detectable=detectable)
    assert describe_gap(Gap(seconds=4.25, difference=difference)) == f"4.2 s{text}"
