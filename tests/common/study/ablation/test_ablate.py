"""Switches of the real configurations, and a small ablation as a person types it."""

import json
import re
import shutil
from argparse import Namespace
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from common.config.merge import merge_base
from common.errors import UserError
from common.evidence.intervals import sign_p_value
from common.evidence.ledger import Ledger, find_ledgers, read_ledger
from common.evidence.log import Log, Point
from common.files import save_text
from common.machine import hardware
from common.measure.steptime import buildable
from common.methods.ema import Ema
from common.repository import ROOT, benchmarks
from common.study.ablation import experiment as experiments
from common.study.ablation.design import plan
from common.study.ablation.experiment import Experiment
from common.study.ablation.ledger import other_commits
from common.study.ablation.measurements import turns_to_show
from common.study.ablation.switches import State, Switches
from common.study.cells import Study
from common.training import load
from tests.command import one_line, ttt_here

BERT = ("language_bert", "optimized", "--size", "mini")
TINY = ("--set", "max_duration=20ba", "--set", "schedule.warmup=5ba", "--turns", "6", "--target", "0.02")


@pytest.fixture(scope="module", autouse=True)
def in_bf16():
    """Take the precision of the committed runs, also on a processor that only emulates it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "fast_precision", lambda: "bf16")
        yield


def switches(benchmark, build=lambda config: None, settings=()):
    return Switches(benchmark, "optimized", size="mini", settings=settings, build=build)


@pytest.fixture(scope="module")
def bert():
    return switches("language_bert", buildable)


@pytest.fixture(scope="module")
def resnet():
    return switches("image_classification")


def by_name(switches, name):
    return next(switch for switch in switches.switches if switch.name == name)


def experiment(ablation, results="", **options):
    study = Study(name="x", benchmark="image_classification", size="mini", cells=(), results=results)
    return Experiment(ablation=ablation, study=study, args=Namespace(**options), console=Console(quiet=True))


@pytest.mark.parametrize(
    "names", [{"unpad"}, {"unpad", "sparse_head", "last_layer_subset"}, {"unpad", "sparse_head"}]
)
def test_every_state_is_the_configuration_that_its_settings_say(bert, names):
    methods = bert.load(frozenset(names)).config.methods
    assert tuple(methods) == bert.in_order(frozenset(names)) and methods["unpad"] == {"round_to": 64}


def test_what_a_method_needs_is_found_by_building(bert):
    needs = {switch.name: set(bert.needs(switch.name)) for switch in bert.switches}
    assert needs == {
        "unpad": set(),
        "fused_qkv": {"unpad"},
        "sparse_head": {"unpad"},
        "last_layer_subset": {"unpad", "sparse_head"},
        "chunked_head": {"unpad", "sparse_head"},
        "low_precision_layernorm": set(),
    }
    left_out = bert.left_out(by_name(bert, "sparse_head"))
    assert left_out.together == ("last_layer_subset", "chunked_head")
    assert left_out.reason == "needs sparse_head before it"
    assert bert.left_out(by_name(bert, "unpad")).before == {"low_precision_layernorm"}


def test_a_method_that_drops_itself_on_this_machine_is_no_switch(resnet, monkeypatch):
    assert by_name(resnet, "im2col")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    on_gpu = switches("image_classification")
    assert {*resnet.all - on_gpu.all} == {"im2col"}


def test_a_method_that_acts_on_the_process_of_all_states_is_refused(monkeypatch):
    monkeypatch.setattr(Ema, "is_process_wide", True)
    with pytest.raises(UserError, match="acts on the whole process"):
        switches("image_classification")


def test_a_method_that_is_switched_off_is_a_switch_too(resnet):
    switch = by_name(resnet, "no_label_smoothing")
    assert switch.on == ("methods.label_smoothing=false",)
    assert "label_smoothing" not in resnet.load(frozenset({switch.name})).config.methods
    back = resnet.load(resnet.all - {switch.name}).config
    assert back.methods["label_smoothing"] == {"smoothing": 0.1}
    assert next(iter(back.methods)) == "channels_last"  # the order of application stays


def test_a_factorial_holds_what_others_need_and_is_refused_where_it_is_too_small(resnet):
    ablation = plan(resnet, 16)
    assert resnet.needed == {"scale_schedule", "fixres"}
    assert len(ablation.factorial) == 16 and ablation.design.resolution == 4
    assert all(resnet.needed <= state for state in ablation.factorial)
    names = [resnet.cell_name(state) for state in ablation.states]
    assert len(set(names)) == len(names) and max(map(len, names)) <= 44
    assert names[:2] == ["baseline", "optimized"]
    assert plan(resnet, 0).design is None
    for too_small in (1, 7):
        with pytest.raises(UserError, match="7 switches need a larger factorial; --max-design 8 or more"):
            plan(resnet, too_small)


@pytest.mark.parametrize("setting", ["methods.ema.every_steps=2", "methods.ema=false", "methods={}"])
def test_cadence_is_no_switch_and_a_switch_cannot_be_set(resnet, setting):
    assert not resnet.all & {"evaluate_every", "evaluate_from"}
    with pytest.raises(UserError, match="is a switch of this ablation"):
        switches("image_classification", settings=[setting])


@pytest.mark.parametrize("benchmark", benchmarks())
def test_a_closed_configuration_is_ablated_in_the_open_division(benchmark):
    closed = Switches(benchmark, "closed", size="full", settings=(), build=lambda config: None)
    assert not closed.all & {"submission.division", "evaluate_offset", "evaluate_every"}
    assert "max_duration" in closed.all  # without it the cadence breaks a rule
    state = closed.load(closed.all - {"max_duration"}).config
    assert state.submission.division == "open"


def test_steps_of_size_mini_are_timed_in_the_micro_batches_that_are_trained(resnet, monkeypatch):
    def merge_small(*words):
        merged = merge_base(*words)
        merged.values["micro_batch_size"] = 8
        return merged

    monkeypatch.setattr(load, "merge_base", merge_small)
    assert experiment(plan(resnet, 0)).config_on_one_device(State()).micro_batch_size == 8


def test_step_times_are_kept_for_the_same_configurations_and_versions_only(resnet, tmp_path):
    ablation = experiment(plan(resnet, 0), tmp_path, turns=9, remeasure=False)
    wanted = ablation.describe_steps()
    assert len(set(wanted["configurations"].values())) == len(ablation.ablation.states)
    kept = json.loads(json.dumps(wanted)) | {"date": "", "commit": "abc (clean)", "base_s": 1.0}
    kept |= {"turns": {}, "shares": {}}
    other = kept | {"configurations": wanted["configurations"] | {"baseline": "another"}}
    for figures, is_kept in ((kept, True), (other, False), (kept | {"versions": {}}, False), ({}, False)):
        save_text(ablation.steps_path, json.dumps(figures))
        assert (ablation.load_steps() is not None) == is_kept


def test_runs_of_another_commit_than_the_step_times_are_named():
    logs = {State(): [Log(path="", preamble=(f"# commit: {name} (clean)",)) for name in ("abc", "def")]}
    (line,) = other_commits(logs, "abc (clean)")
    assert "abc (clean), runs also of def (clean)" in line
    assert other_commits({State(): logs[State()][:1]}, "abc (clean)") == []


@pytest.mark.parametrize(
    ("codes", "fail_fast", "tried", "worst"),
    [([1, 0], False, 2, 1), ([1, 0], True, 1, 1), ([130, 0], False, 1, 130), ([0, 0], False, 2, 0)],
)
def test_a_failure_keeps_no_other_cell_from_its_turn(resnet, monkeypatch, codes, fail_fast, tried, worst):
    asked = iter(codes)
    monkeypatch.setattr(experiments.cells, "run", lambda study, args: next(asked))
    options = {"seeds": 1, "max_seeds": 1, "end_seeds": 2, "factorial_seeds": 0, "fail_fast": fail_fast}
    options["dry_run"] = False
    assert experiment(plan(resnet, 16), **options).run_cells() == worst
    assert len(list(asked)) == 2 - tried


def test_seeds_are_added_only_where_they_may_decide_something(resnet, monkeypatch):
    """One switch costs quality and samples, the others do nothing: all is over before the last seed."""
    rng, harmful, counts = np.random.default_rng(1), resnet.switches[-1].name, Counter()

    def make_log(state, seed):
        loss = 0.2 * (harmful in state) + rng.normal(0, 0.01)
        curve = [Point(1.0, 100.0, 0.1), Point(2.0, 1000.0, 0.9 - loss)]
        return SimpleNamespace(curve=curve, target=0.3, value={"seed": seed}.get, last=lambda key: None)

    logs = {}

    def run(study, args):
        for cell in study.cells:
            counts[cell.name] = study.num_seeds
            there = logs.setdefault(cell.name, [])
            there.extend(make_log(states[cell.name], seed) for seed in range(len(there), study.num_seeds))
        return 0

    monkeypatch.setattr(experiments.cells, "run", run)
    monkeypatch.setattr(
        Experiment,
        "read_logs",
        lambda self: {state: tuple(logs[name]) for name, state in states.items() if name in logs},
    )
    options = {"seeds": 2, "max_seeds": 30, "end_seeds": 2, "factorial_seeds": 0, "fail_fast": False}
    ablation = experiment(plan(resnet, 0), **options, dry_run=False, target=0.3, nproc=None)
    states = {resnet.cell_name(state): state for state in ablation.ablation.states}
    assert ablation.run_cells() == 0
    assert set(counts) == set(states) and min(counts.values()) >= 3 and max(counts.values()) < 30
    lines = ablation.describe_decisions()
    claims = [line for line in lines if "it is worse" in line or "it is better" in line]
    assert claims and all(line.startswith(harmful) for line in claims)
    assert any(line.startswith(f"{harmful} alone, quality: -0.") for line in claims)

    counts.clear()
    fixed = experiment(plan(resnet, 0), **options | {"max_seeds": 2}, dry_run=False, target=0.3)
    assert fixed.run_cells() == 0 and set(counts.values()) == {2} and fixed.describe_decisions() == []


def test_the_time_of_all_runs_follows_from_the_steps_of_each_state(resnet):
    ablation = experiment(plan(resnet, 0), seeds=2, end_seeds=2, factorial_seeds=0, nproc=1)
    turns = {resnet.cell_name(state): [1.0, 2.0, 9.0] for state in ablation.ablation.states}
    samples = sum(
        count * resnet.load(state).config.plan().num_steps * 32 for state, count in ablation.num_runs.items()
    )
    minutes = f"{samples * 0.01 * 2 / 60:.1f} minutes"
    assert minutes in ablation.expect_training({"base_s": 0.01, "turns": turns})


@pytest.mark.parametrize("name", ["baseline", "baseline+ema"])
def test_a_configuration_that_extends_none_is_refused(name):
    line = one_line(ttt_here("ablate", "language_bert", name, "--size", "mini"))
    assert f"'{name}' is no configuration that extends another" in line and "one of: closed, " in line


def test_turns_are_enough_to_show_an_effect_after_the_correction_for_all_switches():
    for num_switches in (1, 8, 12, 13, 40):
        num_turns = turns_to_show(num_switches)
        least, fewer = (num_switches * sign_p_value([1.0] * number) for number in (num_turns, num_turns - 1))
        assert least < 0.05 <= fewer


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_method_that_drops_itself_at_the_chosen_precision_is_no_switch(precision):
    chosen = switches("language_bert", settings=[f"precision={precision}"])
    names = {switch.name for switch in chosen.switches}
    assert ("low_precision_layernorm" in names) == (precision == "bf16")


def test_a_dry_run_tells_the_plan_and_writes_nothing(tmp_path):
    done = ttt_here("ablate", *BERT, "--dry-run", "--turns", "6", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fused_qkv: with unpad (needs unpad before it)" in done.stdout
    assert "8 turns instead of 6: fewer cannot show an effect on throughput" in done.stdout
    assert "21 states are timed, 26 runs of 13 cells trained" in done.stdout
    assert "to run: 26 runs" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.on_demand
def test_a_small_ablation_keeps_what_it_measured_and_reaches_the_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("ablate", *BERT, *TINY, "--seeds", "1", "--end-seeds", "1", "--results", tmp_path / "results")
    first = ttt_here(*command)
    assert first.returncode == 0, first.stderr
    assert "13 runs of 13 cells" in first.stdout and "each alone on baseline" in first.stdout
    ((path, ledger),) = find_ledgers([tmp_path / "results"])
    assert isinstance(ledger, Ledger) and path.endswith("bert-mini.ledger.json")
    assert sum(len(state.runs) for state in ledger.states) == 13
    unpad = next(row for row in ledger.rows if row.name == "unpad")
    assert unpad.alone.throughput.interval.low > 1  # half of the tokens are padding
    assert unpad.relieves[:2] == ["forward pass", "backward pass"] and unpad.bound > 1
    steps = json.loads(next((tmp_path / "results").rglob("*.steps.json")).read_text())
    assert (ledger.commit, ledger.versions) == (steps["commit"], steps["versions"])
    assert unpad.alone.minutes_saved is not None
    assert sum(ledger.shares.values()) == pytest.approx(1)
    logs = {each: each.read_bytes() for each in (tmp_path / "results").rglob("result_*.txt")}
    again = ttt_here(*command)
    assert again.returncode == 0 and "nothing is missing" in again.stdout and "are kept" in again.stdout
    assert {each: each.read_bytes() for each in (tmp_path / "results").rglob("result_*.txt")} == logs
    cell = next(each.parent for each in logs)
    report = ("report", cell, tmp_path / "results", "--no-official", "--out", tmp_path / "report")
    assert ttt_here(*report).returncode == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Ablation: language_bert optimized" in page and "last_layer_subset" in page
    hostile = json.loads((tmp_path / path).read_text())
    hostile["warnings"] = ["<script>alert(1)</script>"]
    (tmp_path / path).write_text(json.dumps(hostile))
    (tmp_path / "results" / "other.ledger.json").write_text('{"benchmark": 1}')
    assert ttt_here(*report).returncode == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<script" not in page and "no ledger that can be read" in page


COMMITTED = ROOT / "results/study/ablate-optimized/bert-mini.ledger.json"
NO_TIME = re.sub(rb'"before_ms": [0-9.]+', b'"before_ms": 0.0', COMMITTED.read_bytes())


@pytest.mark.parametrize("content", [b"", b"[1", b"\xff\xfe", b'{"rows": 3}', NO_TIME])
def test_a_file_that_is_no_ledger_is_told_not_raised(tmp_path, content):
    path = tmp_path / "x.ledger.json"
    path.write_bytes(content)
    assert isinstance(read_ledger(path), str)


@pytest.mark.skipif(not hardware.bf16_instructions(), reason="such a processor rounds otherwise")
def test_the_committed_ledger_is_what_finished_runs_and_kept_steps_answer(tmp_path):
    committed = ROOT / "results/study/ablate-optimized"
    shutil.copytree(committed, tmp_path / "study/ablate-optimized")
    named = ("--set", "submission.hardware=reference-2cpu")
    words = ("ablate", *BERT, *named, "--answers", "--results", tmp_path)
    (ledger := tmp_path / "study/ablate-optimized/bert-mini.ledger.json").unlink()
    assert ttt_here(*words).returncode == 0
    assert ledger.read_text() == (committed / ledger.name).read_text()
    (steps := ledger.with_name("bert-mini.steps.json")).write_text("{")
    assert "no figures (not JSON" in one_line(ttt_here(*words))
    steps.unlink()
    assert "no step times are kept" in one_line(ttt_here(*words))
