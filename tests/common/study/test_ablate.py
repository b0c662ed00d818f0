"""Switches of the real configurations, and a small ablation as a person types it."""

import json

import pytest

from common.evidence.ledger import Ledger, find_ledgers, read_ledger
from common.study.ablate import builder
from common.study.ablation import plan
from common.study.switches import Switches
from tests.command import ttt_here

CUT = ("--set", "max_duration=20ba", "--set", "schedule.warmup=5ba")
TINY = (*CUT, "--turns", "6", "--target", "0.02", "--end-seeds", "1")


@pytest.fixture(scope="module")
def bert():
    return Switches("language_bert", "optimized", size="mini", settings=[], build=builder("language_bert"))


@pytest.fixture(scope="module")
def resnet():
    return Switches("image_classification", "optimized", size="mini", settings=[], build=lambda config: None)


def test_every_state_is_the_configuration_that_its_settings_say(bert):
    assert bert.in_order(bert.all) == ("unpad", "fused_qkv", "sparse_head", "last_layer_subset")
    for names in ({"unpad"}, {"unpad", "sparse_head", "last_layer_subset"}, {"unpad", "sparse_head"}):
        config = bert.load(frozenset(names)).config
        assert tuple(config.methods) == bert.in_order(frozenset(names))
        assert config.methods["unpad"] == {"round_to": 64}


def test_what_a_method_needs_is_found_by_building(bert):
    needs = {switch.name: set(bert.needs(switch.name)) for switch in bert.switches}
    assert needs == {
        "unpad": set(),
        "fused_qkv": {"unpad"},
        "sparse_head": {"unpad"},
        "last_layer_subset": {"unpad", "sparse_head"},
    }
    left_out = bert.left_out(bert.by_name["sparse_head"])
    assert left_out.together == ("last_layer_subset",) and left_out.reason == "needs sparse_head before it"
    assert bert.left_out(bert.by_name["unpad"]).before == frozenset()


def test_a_method_that_is_switched_off_is_a_switch_too(resnet):
    switch = resnet.by_name["no_label_smoothing"]
    assert switch.on == ("methods.label_smoothing=false",)
    assert "label_smoothing" not in resnet.load(frozenset({switch.name})).config.methods
    back = resnet.load(resnet.all - {switch.name}).config
    assert back.methods["label_smoothing"] == {"smoothing": 0.1}
    assert next(iter(back.methods)) == "channels_last"  # the order of application stays


def test_a_factorial_holds_what_others_need(resnet):
    ablation = plan(resnet, 16)
    assert ablation.held == {"scale_schedule", "fixres"}
    assert len(ablation.factorial) == 16 and ablation.design.resolution == 5
    assert all(ablation.held <= state for state in ablation.factorial)
    names = [ablation.name(state) for state in ablation.states]
    assert len(set(names)) == len(names) and max(map(len, names)) <= 44
    assert names[:2] == ["baseline", "optimized"]


def test_a_configuration_that_extends_none_is_refused():
    done = ttt_here("ablate", "language_bert", "baseline", "--size", "mini")
    assert done.returncode == 2
    assert done.stderr == (
        "error: language_bert/baseline.yaml: extends no other configuration: there is nothing to leave out\n"
    )


def test_a_dry_run_tells_the_plan_and_writes_nothing(tmp_path):
    done = ttt_here(
        "ablate", "language_bert", "optimized", "--size", "mini", "--dry-run", "--results", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "fused_qkv: with unpad (needs unpad before it)" in done.stdout
    assert "7 states are timed, 9 runs of 7 cells trained" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_small_ablation_keeps_what_it_measured_and_reaches_the_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = (
        "ablate",
        "language_bert",
        "optimized",
        "--size",
        "mini",
        *TINY,
        "--results",
        tmp_path / "results",
    )
    first = ttt_here(*command)
    assert first.returncode == 0, first.stderr
    assert "7 runs of 7 cells" in first.stdout and "each alone on baseline" in first.stdout
    ((path, ledger),) = find_ledgers([tmp_path / "results"])
    assert isinstance(ledger, Ledger) and path.endswith("bert-mini.ledger.json")
    assert sum(len(state.runs) for state in ledger.states) == 7
    unpad = next(row for row in ledger.rows if row.name == "unpad")
    assert unpad.alone.throughput.interval.low > 1  # half of the tokens are padding
    assert unpad.relieves[:2] == ["forward pass", "backward pass"] and unpad.bound > 1
    assert unpad.alone.minutes_saved is not None
    assert sum(ledger.shares.values()) == pytest.approx(1)
    logs = {each: each.read_bytes() for each in (tmp_path / "results").rglob("result_*.txt")}
    again = ttt_here(*command)
    assert again.returncode == 0 and "nothing is missing" in again.stdout and "are kept" in again.stdout
    assert {each: each.read_bytes() for each in (tmp_path / "results").rglob("result_*.txt")} == logs
    cell = next(each.parent for each in logs)
    assert ttt_here("report", cell, tmp_path / "results", "--no-official").returncode == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Ablation: language_bert optimized" in page and "last_layer_subset" in page
    hostile = json.loads((tmp_path / path).read_text())
    hostile["warnings"] = ["<script>alert(1)</script>"]
    (tmp_path / path).write_text(json.dumps(hostile))
    (tmp_path / "results" / "other.ledger.json").write_text('{"benchmark": 1}')
    assert ttt_here("report", cell, tmp_path / "results", "--no-official").returncode == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<script" not in page and "no ledger that can be read" in page


def test_a_file_that_is_no_ledger_is_told_not_raised(tmp_path):
    path = tmp_path / "x.ledger.json"
    for content in (b"", b"{}", b"[1", b"\xff\xfe", b'{"rows": 3}'):
        path.write_bytes(content)
        assert isinstance(read_ledger(path), str)
