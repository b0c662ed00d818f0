"""`ttt sweep --trials`: the same search for each configuration, and the best as a file to run."""

import argparse
import json
import math
import re
from dataclasses import replace

import pytest

from common.evidence.log import read_log
from common.evidence.recipes import configuration_of
from common.repository import ROOT, mlperf_name
from common.study import trials
from common.study.cells import from_arguments, load_cell
from common.training import load as loading
from common.training.load import load_config

RESULTS = ROOT / "results"
FAST = [read_log(RESULTS / f"reference-2cpu-mini-optimized/resnet/result_{n}.txt") for n in (0, 1)]


def make_study(folder, configurations, num_trials, num_seeds=1, *, size="mini", fixed=()):
    args = argparse.Namespace(
        benchmark="image_classification", configurations=configurations, size=size, set=list(fixed),
        trials=num_trials, study="trials", seeds=num_seeds, seed=1, results=folder,
    )  # fmt: skip
    return from_arguments(args, trials.trial_cells(args))


def load(configuration, settings=()):
    return load_config("image_classification", configuration, size="mini", settings=settings).config


def settings_of(settings):
    return dict(setting.split("=") for setting in settings)


def test_every_configuration_gets_the_same_draws_around_its_own_values(tmp_path):
    study = make_study(tmp_path, ["baseline", "optimized"], 9)
    cells = study.cells
    assert len(cells) == 18
    recipe, drawn = settings_of(cells[0].settings), [settings_of(cell.settings) for cell in cells[2::2]]
    assert not set(recipe) & set(trials.FACTORS) and not any("budget" in each for each in drawn)
    config = load("baseline")
    rates = [float(each["optimizer.learning_rate"]) / config.optimizer.learning_rate for each in drawn]
    assert min(rates) < 1 / 2 and max(rates) > 2 and all(1 / 4 <= rate <= 4 for rate in rates)
    budgets = [cell.budget for cell in cells[2::2]]
    assert len(set(budgets)) == 8 and all(1 / 3 <= budget <= 1 for budget in budgets)
    assert [cell.budget for cell in cells[3::2]] == budgets and cells[0].budget == config.budget
    assert [load_cell(study, cell).config.budget for cell in cells[2::2]] == budgets


def test_the_best_trial_misses_least_and_is_kept_as_a_file_to_run(tmp_path):
    study = make_study(tmp_path, ["baseline", "optimized"], 3, 2)
    slow = [read_log(RESULTS / f"reference-2cpu-mini-baseline/resnet/result_{n}.txt") for n in (2, 3)]
    missed = read_log(next((RESULTS / "study/sweep/reference-2cpu-mini-baseline-0.15/resnet").iterdir()))
    logs = {
        "baseline-trial0": [FAST[0], missed],  # one miss loses to the slower runs that converge
        "baseline-trial1": slow,
        "baseline-trial2": FAST[:1],  # not all of its runs are there
        "optimized-trial0": FAST,
        "optimized-trial1": slow,
        "optimized-trial2": [],
    }
    ranked = trials.rank_trials(study, logs)
    assert [trial.rank[0] for trial in ranked["baseline"]] == [0, 1]
    assert ranked["baseline"][0].settings and not ranked["optimized"][0].settings
    assert all(0.3 < each < math.inf for each in ranked["optimized"][0].minutes)
    of_one = trials.rank_trials(make_study(tmp_path, ["baseline", "optimized"], 3, 1), logs)
    assert [len(trial.minutes) for trial in of_one["baseline"]] == [1, 1, 1], "the first of each counts"
    (gain,) = trials.describe_best(ranked)
    hits = r"\({} reached the target in every run\)"
    assert re.match(
        rf"The best of 2 trials of optimized {hits.format(2)} is [1-9]\.\d\dx \(.*\) as fast as the best of "
        rf"2 trials of baseline {hits.format(1)}, by 2 runs of each",
        gain,
    )
    (none,) = trials.describe_best(ranked | {"baseline": ranked["baseline"][1:]})
    assert "no trial of baseline reached the target in every run" in none
    as_json, best, of_optimized = trials.save(study, ranked)
    assert trials.read(as_json) == ranked
    assert json.loads(as_json.read_text())["baseline"][1]["minutes"][1] is None
    rate = settings_of(ranked["baseline"][0].settings)["optimizer.learning_rate"]
    assert load(str(best)).optimizer.learning_rate == pytest.approx(float(rate))
    assert "extends: optimized" in of_optimized.read_text()


def test_a_trial_that_was_past_the_target_at_its_first_evaluation_has_minutes_but_no_samples():
    bound = trials.Trial(settings=(), minutes=(1.5, 1.6), samples=(None, None))
    assert trials.describe_runs(bound) == (f"{math.sqrt(1.5 * 1.6):.3f}", "-")
    assert trials.describe_runs(trials.Trial(settings=(), minutes=(None,), samples=(None,))) == ("-", "-")


def test_disturbed_runs_of_the_best_trials_are_named():
    slow = trials.Trial(settings=(), minutes=(3.0, 3.1), samples=(1.0, 1.0), disturbed=("2.0 times slower",))
    fast = replace(slow, minutes=(1.0, 1.1), disturbed=())
    (line,) = trials.describe_best({"baseline": [slow], "optimized": [fast]})
    assert line.endswith("by 2 runs of each, counting 1 disturbed run of baseline.")


def test_a_gain_by_one_run_of_each_trial_is_not_shown():
    slow, fast = (trials.Trial(settings=(), minutes=(minutes,), samples=(1.0,)) for minutes in (3.0, 1.5))
    (line,) = trials.describe_best({"baseline": [slow], "optimized": [fast]})
    assert " is 2.00x as fast as " in line
    assert line.endswith("by 1 run of each; that is not shown to differ from 1.")


def test_the_best_of_a_changed_configuration_can_be_run_too(tmp_path):
    study = make_study(tmp_path, ["baseline+ema"], 2)
    assert [cell.name for cell in study.cells] == ["baseline-trial0+ema", "baseline-trial1+ema"]
    ranked = trials.rank_trials(study, {"baseline-trial0+ema": [], "baseline-trial1+ema": FAST[:1]})
    _, best = trials.save(study, ranked)
    config = load(str(best))
    assert "ema" in config.methods and config.budget < 1


def test_the_settings_of_a_person_are_in_the_file_and_not_drawn(tmp_path):
    fixed = [
        "optimizer.learning_rate=0.5",
        "budget=0.4",
        "methods.ema.every_steps=3",
        "submission.hardware=here",
    ]
    study = make_study(tmp_path, ["optimized"], 2, fixed=fixed)
    assert [cell.budget for cell in study.cells] == [0.4, 0.4]
    ranked = trials.rank_trials(study, {"optimized-trial0": [], "optimized-trial1": FAST[:1]})
    _, best = trials.save(study, ranked)
    kept, ran = load(str(best)), load_cell(study, study.cells[1]).config
    assert kept.methods == ran.methods and kept.methods["ema"]["every_steps"] == 3
    assert kept.optimizer == ran.optimizer and kept.optimizer.learning_rate == 0.5
    assert kept.schedule == ran.schedule and kept.budget == ran.budget == 0.4
    assert kept.stop_at_target and kept.evaluate_every == load("optimized").evaluate_every
    changes = " ".join(ranked["optimized"][0].settings)
    assert "schedule.warmup" in changes and "submission" not in changes


def test_the_trials_of_a_closed_recipe_are_open_and_keep_its_cadence(tmp_path):
    study = make_study(tmp_path, ["closed+ema"], 2, size="full")
    for cell in study.cells:
        config = load_cell(study, cell).config
        assert (config.submission.division, config.evaluate_offset) == ("open", "3ep")
        assert "ema" in config.methods


@pytest.mark.parametrize("configuration", ["baseline", "optimized"])
@pytest.mark.parametrize("benchmark", ["image_classification", "language_bert"])
def test_the_committed_trials_have_the_methods_of_today(benchmark, configuration, monkeypatch):
    monkeypatch.setattr(loading, "fast_precision", lambda: "bf16")  # that of the committed runs
    folder = RESULTS / "study/trials" / f"reference-2cpu-mini-{configuration}-trial0"
    path = folder / mlperf_name(benchmark) / "result_0.txt"
    kept = configuration_of(read_log(path).settings)
    config = load_config(benchmark, configuration, size="mini", settings=[]).config
    assert kept["methods"] == config.model_dump(mode="json")["methods"]
