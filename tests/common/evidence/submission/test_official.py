"""Verdicts of MLCommons' checkers that count, and those that refuse what MLCommons accepted."""

import json
from functools import partial

import pytest

from common.evidence import system
from common.evidence.log import RunSet, read_log
from common.evidence.rules.rule import add, chain, edit, miss_target, remove, replace_record, retime, rewrite
from common.evidence.submission import official
from tests.common.evidence.conftest import of_another_suite

LAMB = [f"opt_lamb_{name}" for name in ("epsilon", "beta_1", "beta_2", "weight_decay_rate")]
LAMB += ["opt_learning_rate_training_steps", "opt_learning_rate_warmup_steps", "num_warmup_steps"]
LAMB += ["start_warmup_step"]


def submitted(golden, tmp_path, *mutations, benchmark="resnet"):
    """Return a set of one log as another suite would write it, changed."""
    logs = of_another_suite([chain(*mutations)(golden.log(benchmark))])
    folder = golden.write(tmp_path / "results", logs)
    return RunSet(folder="here", logs=(read_log(folder / "result_0.txt"),))


@pytest.mark.parametrize(
    ("status", "missing", "counts"),
    [
        ("onprem", "", False),
        ("available", "", False),
        ("Cloud", "", False),
        ("banana", "", True),
        ("onprem", "cooling", True),
    ],
)
def test_a_word_for_the_status_that_rounds_accepted_refuses_nothing(
    golden, tmp_path, status, missing, counts
):
    path = tmp_path / "system.json"
    described = golden.description() | {"status": status}
    described.pop(missing, None)
    path.write_text(json.dumps(described))
    verdict = official.judge_description(path, "4.0.0")
    assert (verdict.verdict, verdict.refuses) == ("FAILED", counts)
    assert counts or f"does not count: MLCommons accepts the status '{status}'" in str(verdict)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_description_that_is_a_link_or_too_large_has_no_status_to_mend(golden, tmp_path, is_large):
    text = json.dumps(golden.description() | {"status": "Cloud"})
    (file := tmp_path / "system.json").write_text(text)
    assert official.other_status(file) == "Cloud"
    if is_large:
        file.write_text(text + " " * system.MAX_BYTES)
    else:
        file.rename(tmp_path / "other.json")
        file.symlink_to(tmp_path / "other.json")
    assert official.other_status(file) == ""


@pytest.mark.parametrize("has_seed", [False, True])
def test_a_closed_set_without_any_seed_is_not_refused_for_it(golden, tmp_path, has_seed):
    change = edit("seed", value=None) if has_seed else remove("seed")
    run_set = submitted(golden, tmp_path, edit("submission_division", value="closed"), change)
    (verdict,) = official.judge_seeds(run_set)
    assert verdict.verdict != "SUCCESS" and verdict.refuses == has_seed


@pytest.mark.parametrize("is_miss", [True, False])
def test_a_run_that_breaks_off_below_its_target_refuses_nothing(golden, tmp_path, is_miss):
    run_set = submitted(golden, tmp_path, remove("run_stop"), *[miss_target] * is_miss)
    (verdict,) = official.judge(run_set, "2.0.0")
    assert (verdict.verdict, verdict.refuses) == ("FAILED", not is_miss)


@pytest.mark.parametrize("chosen", [None, "2.0.0"])
def test_logs_that_the_next_round_accepts_are_not_refused_by_their_date(golden, tmp_path, chosen):
    closed = replace_record("opt_name", lambda s: [s, *(rewrite(s, key=key, value=1) for key in LAMB)])
    division = edit("submission_division", value="closed")
    of_2022 = partial(retime, change=lambda ms: ms - 55 * 10**9)
    run_set = submitted(golden, tmp_path, of_2022, closed, division, benchmark="bert")
    assert official.rulesets(run_set) == ("2.0.0",)
    (verdict,) = official.judge(run_set, chosen)
    assert (verdict.ruleset, verdict.verdict, verdict.refuses) == ("2.0.0", "FAILED", chosen is not None)
    assert chosen or "ruleset 3.0.0 accepts them" in verdict.why


def test_a_refusal_names_the_check_that_failed(golden, tmp_path):
    (verdict,) = official.judge(submitted(golden, tmp_path, add("run_start", key="init_stop")), "2.0.0")
    assert "CHECK for 'init_stop' failed in line " in verdict.detail
    assert verdict.detail.endswith("failed test: not s['run_started']")
