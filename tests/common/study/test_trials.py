"""`ttt sweep --trials`: the same search for each configuration, and the best as a file to run."""

import argparse
import json
import math

import pytest

from common.evidence.log import read_log
from common.repository import ROOT
from common.study import trials
from common.study.cells import Study, from_arguments, load_cell, settings
from common.training.load import load_config

ARGUMENTS = argparse.Namespace(
    benchmark="image_classification", configurations=["baseline", "optimized"], size="mini", set=[], trials=9
)


def settings_of(cell):
    return dict(setting.split("=") for setting in cell.settings)


def study_of(cells, num_seeds, results):
    return Study(
        name="trials",
        benchmark="image_classification",
        size="mini",
        cells=tuple(cells),
        num_seeds=num_seeds,
        results=results,
    )


def test_every_configuration_gets_the_same_draws_around_its_own_values():
    cells = trials.trial_cells(ARGUMENTS)
    assert len(cells) == 18
    recipe, drawn = settings_of(cells[0]), [settings_of(cell) for cell in cells[2::2]]
    assert not set(recipe) & set(trials.FACTORS) and not any("budget" in each for each in drawn)
    config = load_config("image_classification", "baseline", size="mini", settings=()).config
    rates = [float(each["optimizer.learning_rate"]) / config.optimizer.learning_rate for each in drawn]
    assert min(rates) < 1 / 2 and max(rates) > 2 and all(1 / 4 <= rate <= 4 for rate in rates)
    budgets = [cell.budget for cell in cells[2::2]]
    assert len(set(budgets)) == 8 and all(1 / 3 <= budget <= 1 for budget in budgets)
    assert [cell.budget for cell in cells[3::2]] == budgets and cells[0].budget == config.budget
    for cell in cells:
        load_config("image_classification", cell.configuration, size="mini", settings=cell.settings)


def test_the_best_trial_misses_least_and_is_kept_as_a_file_to_run(tmp_path):
    cells = trials.trial_cells(argparse.Namespace(**vars(ARGUMENTS) | {"trials": 3}))
    study = study_of(cells, 2, tmp_path)
    folder = ROOT / "results/reference-2cpu-mini-optimized/resnet"
    fast, fast_too = (read_log(folder / f"result_{number}.txt") for number in (0, 1))
    slow = [read_log(ROOT / f"results/reference-2cpu-mini-baseline/resnet/result_{n}.txt") for n in (2, 3)]
    missed = read_log(next((ROOT / "results/study/sweep/reference-2cpu-mini-baseline-0.15/resnet").iterdir()))
    logs = {
        "baseline-trial0": [fast, missed],  # one miss loses to the slower runs that converge
        "baseline-trial1": slow,
        "baseline-trial2": [fast],  # not all of its runs are there
        "optimized-trial0": [fast, fast_too],
        "optimized-trial1": slow,
        "optimized-trial2": [],
    }
    ranked = trials.rank_trials(study, logs)
    assert [trial.rank[0] for trial in ranked["baseline"]] == [0, 1]
    assert ranked["baseline"][0].settings and not ranked["optimized"][0].settings
    assert all(0.3 < each < math.inf for each in ranked["optimized"][0].minutes)
    as_json, best, of_optimized = trials.save(study, ranked)
    assert json.loads(as_json.read_text())["baseline"][1]["minutes"][1] is None
    rate = dict(setting.split("=") for setting in ranked["baseline"][0].settings)["optimizer.learning_rate"]
    config = load_config("image_classification", str(best), size="mini", settings=()).config
    assert config.optimizer.learning_rate == pytest.approx(float(rate))
    assert "extends: optimized" in of_optimized.read_text()


def test_the_best_of_a_changed_configuration_can_be_run_too(tmp_path):
    asked = vars(ARGUMENTS) | {"trials": 2, "configurations": ["baseline+ema"]}
    cells = trials.trial_cells(argparse.Namespace(**asked))
    assert [cell.name for cell in cells] == ["baseline-trial0+ema", "baseline-trial1+ema"]
    study = study_of(cells, 1, tmp_path)
    log = read_log(ROOT / "results/reference-2cpu-mini-optimized/resnet/result_0.txt")
    ranked = trials.rank_trials(study, {"baseline-trial0+ema": [], "baseline-trial1+ema": [log]})
    _, best = trials.save(study, ranked)
    config = load_config("image_classification", str(best), size="mini", settings=()).config
    assert "ema" in config.methods and config.budget < 1


def test_the_settings_of_a_person_are_in_the_file_and_not_drawn(tmp_path):
    fixed = ["optimizer.learning_rate=0.5", "budget=0.4", "methods.ema.every_steps=3"]
    args = argparse.Namespace(
        **vars(ARGUMENTS) | {"trials": 2, "configurations": ["optimized"], "set": fixed},
        study="trials", seeds=1, seed=1, results=tmp_path,
    )  # fmt: skip
    study = from_arguments(args, args.benchmark, trials.trial_cells(args))
    assert [cell.budget for cell in study.cells] == [0.4, 0.4]
    log = read_log(ROOT / "results/reference-2cpu-mini-optimized/resnet/result_0.txt")
    ranked = trials.rank_trials(study, {"optimized-trial0": [], "optimized-trial1": [log]})
    _, best = trials.save(study, ranked)
    kept = load_config("image_classification", str(best), size="mini", settings=()).config
    ran = load_cell(study, study.cells[1]).config
    assert kept.methods == ran.methods and kept.methods["ema"]["every_steps"] == 3
    assert kept.optimizer == ran.optimizer and kept.optimizer.learning_rate == 0.5
    assert kept.schedule == ran.schedule and kept.budget == ran.budget == 0.4
    assert (
        kept.stop_at_target
        and kept.evaluate_every
        == load_config("image_classification", "optimized", size="mini", settings=()).config.evaluate_every
    )
    assert "schedule.warmup" in " ".join(ranked["optimized"][0].settings)


def test_the_drawn_budget_is_that_of_the_plan_and_of_the_run(tmp_path):
    cell = trials.trial_cells(argparse.Namespace(**vars(ARGUMENTS) | {"trials": 2}))[2]
    study = Study(name="t", benchmark="image_classification", size="mini", cells=(cell,), results=tmp_path)
    assert 1 / 3 <= cell.budget < 1 and load_cell(study, cell).config.budget == cell.budget
    assert sum(key.startswith("budget=") for key in settings(study, cell)) == 1


def test_the_trials_of_a_closed_recipe_are_open_and_keep_its_cadence(tmp_path):
    asked = vars(ARGUMENTS) | {"trials": 2, "size": "full", "configurations": ["closed+ema"]}
    cells = trials.trial_cells(argparse.Namespace(**asked))
    study = Study(
        name="t", benchmark="image_classification", size="full", cells=tuple(cells), results=tmp_path
    )
    for cell in cells:
        config = load_cell(study, cell).config
        assert (config.submission.division, config.evaluate_offset) == ("open", "3ep")
        assert "ema" in config.methods
