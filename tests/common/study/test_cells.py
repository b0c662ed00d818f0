"""Budgets and cells: a share of a training, and no score that reads a study."""

import math
import re
from dataclasses import replace
from itertools import product

import pytest

from common.config.division import OPEN
from common.evidence.log import Log, read_log
from common.repository import ROOT, benchmarks, configurations
from common.study import cells
from common.study.cells import Cell, Study
from common.training.load import load_config
from common.training.optim import schedule_factor

RECIPES = [
    (benchmark, configuration, size)
    for benchmark in benchmarks()
    for configuration in configurations(benchmark)
    for size in ("full", "mini")
]
STUDY_KEYS = {"stop_at_target", "evaluate_every", "evaluate_offset", "evaluate_from"}


def loaded(benchmark, configuration, size, *settings):
    return load_config(benchmark, configuration, size=size, settings=[OPEN, *settings]).config


@pytest.mark.parametrize(("benchmark", "configuration", "size"), RECIPES)
def test_a_budget_shrinks_a_run_with_its_whole_schedule(benchmark, configuration, size):
    config = loaded(benchmark, configuration, size)
    whole = config.plan()
    for budget in (0.25, 0.33, 0.67, 0.8, 1.0, 2.0):
        part = loaded(benchmark, configuration, size, f"budget={budget}").plan()
        assert part.num_steps == round(whole.num_steps * budget)
        assert part.warmup_steps == round(whole.warmup_steps * budget) < part.num_steps
        assert part.milestones == tuple(round(step * budget) for step in whole.milestones)
        assert part.steps_per_epoch == whole.steps_per_epoch  # of the data
        epochs = [part.epoch(step) for step in range(0, part.num_steps, max(1, part.num_steps // 500))]
        assert epochs == sorted(epochs) and set(epochs) == set(range(whole.num_epochs))
        for share in (0.05, 0.3, 0.5, 0.9):  # the same rate at the same share of the way
            one, other = (
                schedule_factor(round(share * p.num_steps), config.schedule, p) for p in (whole, part)
            )
            assert one == pytest.approx(other, abs=0.02 + 1 / max(1, part.warmup_steps))


def test_the_first_step_of_an_epoch_counts_to_it():
    plan = replace(loaded("image_classification", "baseline", "mini").plan(), steps_per_epoch=5, budget=0.07)
    assert [plan.epoch(step) for step in (6, 7)] == [17, 20]  # 7 / 0.07 is 99.99999999999999


def test_images_grow_at_the_same_shares_of_every_budget():
    for size, budget in (("full", 0.33), ("mini", 0.25), ("mini", 0.75)):
        config = loaded("image_classification", "optimized", size, f"budget={budget}")
        plan = config.plan()
        sizes = [config.data.crop_px(plan.epoch(step)) for step in range(plan.num_steps)]
        assert sizes == sorted(sizes) and sizes[-1] == config.data.train_crop_px
        for px in set(sizes):
            share = config.data.crop_px_by_epoch.count(px) / len(config.data.crop_px_by_epoch)
            assert sizes.count(px) / len(sizes) == pytest.approx(share, abs=1 / len(sizes))


@pytest.mark.parametrize(("benchmark", "configuration", "size"), RECIPES)
def test_a_cell_of_budget_1_is_the_recipe(benchmark, configuration, size):
    study = Study(name="x", benchmark=benchmark, size=size, cells=())
    cell = Cell(name="a", configuration=configuration)
    assert cells.load_cell(study, cell).config.submission.division == "open"
    recipe = loaded(benchmark, configuration, size)
    cell_config = loaded(benchmark, configuration, size, *cells.settings(study, cell))
    different = {key for key, value in cell_config.model_dump().items() if value != recipe.model_dump()[key]}
    assert different <= STUDY_KEYS and not cell_config.stop_at_target
    before, after = recipe.plan(), cell_config.plan()
    assert replace(after, evaluation_steps=before.evaluation_steps) == before


@pytest.mark.parametrize(
    ("configuration", "size", "budget"),
    [
        *product(["closed"], ["mini", "full"], [0.013, 0.1, 0.33, 0.67, 1.0]),
        *product(["optimized"], ["mini"], [0.05, 0.1, 0.33, 0.67, 1.0]),  # ema refuses an average of 2 steps
    ],
)
def test_every_budget_is_evaluated_as_often(configuration, size, budget):
    for benchmark in benchmarks():
        study = Study(name="x", benchmark=benchmark, size=size, cells=(), num_evaluations=5)
        cell = Cell(name="a", configuration=configuration, budget=budget)
        plan = loaded(benchmark, configuration, size, *cells.settings(study, cell)).plan()
        first, *_, last = steps = plan.evaluation_steps
        assert last == plan.num_steps and len(steps) == min(5, math.ceil(plan.num_steps / first))
        every = {after - before for before, after in zip(steps[:-1], steps[1:-1], strict=False)}
        assert every <= {first}


def test_cells_with_runs_of_other_code_are_named():
    one, other = (Log(path="", preamble=(f"# code: {code}",)) for code in ("abc", "def"))
    (line,) = cells.describe_codes({"a-1": [one, one], "b-1": [one], "c-1": [one, other], "d-1": []})
    assert "other code than abc" in line and line.endswith(": c-1 (abc, def)")
    assert cells.describe_codes({"a-1": [one], "b-1": [one]}) == []


def test_disturbed_runs_of_cells_are_named_and_said_to_count():
    trials = ROOT / "results/study/trials/reference-2cpu-mini-baseline-trial5/bert"
    logs = [read_log(path) for path in sorted(trials.glob("result_*.txt"))]
    (line,) = cells.list_warnings({"a-1": logs[:1], "trial5": logs})
    assert re.fullmatch(r"warning: trial5, run 1: .*threads lowered to 1 .* no measure; it counts", line)


def test_a_cell_without_a_budget_has_that_of_its_configuration():
    study = Study(name="x", benchmark="language_bert", size="mini", cells=())
    assert cells.load_cell(study, Cell(name="a", configuration="optimized+budget=0.5")).config.budget == 0.5


def test_what_a_person_sets_stands_after_the_studys_own():
    study = Study(name="x", benchmark="language_bert", size="mini", cells=())
    cell = Cell(name="a", configuration="optimized", settings=("evaluate_every=7ba",), budget=0.5)
    assert loaded("language_bert", "optimized", "mini", *cells.settings(study, cell)).evaluate_every == "7ba"
