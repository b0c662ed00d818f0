"""Predictions for more devices: the formula by hand, published results, and the command line."""

import json
import math
import sys
from dataclasses import replace

import pytest

from common.cli import main
from common.errors import UserError
from common.measure import scaling
from common.repository import ROOT
from tests.committed import committed_results

LINKS = scaling.Links(inside=100.0, network=10.0, latency_us=0.0, share=0.5, overlap=0.9)
WORK = scaling.Work(gradient_bytes=1e9, sample_s=0.01, fixed_s=0.1)
FACTOR, TYPICAL = 1.7, 1.25  # measured: 1.66 at most, 1.19 on average, with one set of assumptions for all


def test_published_results_of_many_machines_are_predicted_within_a_stated_factor():
    checks = scaling.check_published(ROOT)
    assert {check.benchmark for check in checks} == {"resnet", "bert"}
    assert len(checks) == 22 and max(check.devices for check in checks) == 1024
    assert all(1 / FACTOR < check.ratio < FACTOR for check in checks)
    assert math.exp(sum(abs(math.log(check.ratio)) for check in checks) / len(checks)) < TYPICAL


def test_a_ring_moves_each_gradient_almost_twice_over_its_slowest_link():
    one = scaling.step(WORK, LINKS, machines=1, per_machine=1, batch=32)
    assert (one.compute_s, one.exchange_s, one.seconds) == (0.1 + 32 * 0.01, 0, 0.1 + 32 * 0.01)
    inside = scaling.step(WORK, LINKS, machines=1, per_machine=4, batch=32)
    assert inside.exchange_s == pytest.approx(2 * 3 / 4 * 1e9 / (0.5 * 100e9))
    between = scaling.step(WORK, LINKS, machines=2, per_machine=4, batch=32)
    assert between.exchange_s == pytest.approx(2 * 7 / 8 * 1e9 / (0.5 * 10e9))
    assert between.compute_s == pytest.approx(0.1 + 4 * 0.01)
    hidden = 2 / 3 * between.compute_s  # a backward shorter than nine tenths of the exchange
    assert between.exposed_s == pytest.approx(between.exchange_s - hidden)
    slow = replace(LINKS, latency_us=10.0)
    late = scaling.step(WORK, slow, machines=4, per_machine=4, batch=32)
    soon = scaling.step(WORK, LINKS, machines=4, per_machine=4, batch=32)
    assert late.exchange_s - soon.exchange_s == pytest.approx(
        40 * 2 * 2 * 10e-6
    )  # 40 buckets, two hops, twice


def test_shares_above_the_measured_batch_are_accumulated_and_unequal_samples_wait_for_the_longest():
    work = replace(WORK, micro_batch=16)
    assert scaling.step(work, LINKS, machines=1, per_machine=1, batch=33).compute_s == pytest.approx(0.63)
    uneven = replace(WORK, deviation=0.7, longest=2.0)
    step = scaling.step(uneven, LINKS, machines=1, per_machine=8, batch=400)
    assert step.compute_s == pytest.approx(0.1 + 0.5 * (1 + 0.7 * math.sqrt(2 * math.log(8) / 50)))
    assert scaling.step(uneven, LINKS, machines=128, per_machine=8, batch=1024).compute_s == pytest.approx(
        0.12
    )
    balanced = replace(uneven, is_balanced=True)
    step = scaling.step(balanced, LINKS, machines=1, per_machine=8, batch=400)
    assert step.compute_s == pytest.approx(0.1 + 0.5 * (1 + 1 / 50**2))


def test_two_batches_show_what_of_a_step_is_fixed():
    found = scaling.fitted(replace(WORK, fixed_s=0, sample_s=0), [(8, 0.18), (64, 0.74)], 0.02)
    assert (found.fixed_s, found.sample_s) == (pytest.approx(0.1), pytest.approx(0.01))
    near = scaling.fitted(WORK, [(60, 0.62), (64, 0.66)], 0.02)
    assert (near.fixed_s, near.sample_s) == (0.02, pytest.approx(0.01))
    with pytest.raises(UserError, match="memory traffic"):
        scaling.fitted(WORK, [(8, 0.01)], 0.02)


def test_a_run_of_perfect_links_and_no_fixed_time_scales_without_loss():
    perfect = replace(LINKS, inside=math.inf, network=math.inf)
    recipe = scaling.Recipe(
        batch=1024,
        share=0,
        samples_to_target=102_400,
        evaluation_samples=3000,
        num_evaluations=2,
        startup_s=6,
    )
    work = replace(WORK, fixed_s=0.0)
    found = scaling.predict(work, perfect, recipe, machines=16, per_machine=8, price=3.6)
    assert [each.step.devices for each in found] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert all(each.efficiency == pytest.approx(1) for each in found)
    assert found[-1].minutes == pytest.approx((102_400 * 0.01 / 128 + 2 * 3000 * 0.01 / 3 / 128 + 6) / 60)
    assert found[-1].cost == pytest.approx(found[-1].minutes / 60 * 128 * 3.6)
    with pytest.raises(UserError, match="2048 devices cannot divide 1024 samples"):
        scaling.predict(work, perfect, recipe, machines=256, per_machine=8, price=None)


@pytest.fixture
def ttt_plan(monkeypatch, capsys):
    """Return `ttt plan` in this process: exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ttt", "plan", *arguments])
        code = main()
        return code, *capsys.readouterr()

    return run


def test_the_command_predicts_from_what_bench_measured(ttt_plan):
    figures = next((committed_results() / "throughput").rglob("language_bert_0.json"))
    (rate,) = [
        each["samples_per_s"]
        for each in json.loads(figures.read_text())["rates"]
        if each["configuration"] == "optimized"
    ]
    where = ["language_bert", "optimized", "--size", "mini", "--nodes", "2", "--gpus", "2", "--network", "1"]
    code, out, _ = ttt_plan(*where, "--bench", str(figures), "--json")
    assert code == 0
    found = json.loads(out)
    assert [row["devices"] for row in found["rows"]] == [1, 2, 4] and len(found["formula"]) == 6
    assert found["rows"][0]["samples_per_s"] == pytest.approx(rate)
    assert 0 < found["rows"][2]["efficiency"] < found["rows"][1]["efficiency"] < 1
    assert any("deviates by 0.71" in line for line in found["assumptions"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no benchmark"),
        (["language_bert", "baseline"], "no throughput"),
        (["language_bert", "baseline", "--measured", "70"], "SAMPLES_PER_S@BATCH"),
        (["language_bert", "baseline", "--measured", "70@56", "--nodes", "500"], "1 to 1024"),
        (["language_bert", "baseline", "--measured", "70@56", "--nodes", "128"], "--batch-per-device"),
        (["language_bert", "baseline", "--measured", "70@56", "--inside", "nvlnk4"], "did you mean nvlink4"),
        (["language_bert", "baseline", "--measured", "70@56", "--network", "8xhdd"], "hdr, ndr"),
        (["language_bert", "baseline", "--bench", "pyproject.toml"], "no figures of `ttt bench`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_with_one_line(ttt_plan, arguments, message):
    code, _, errors = ttt_plan(*arguments)
    assert code == 2
    (line,) = errors.splitlines()
    assert message in line
