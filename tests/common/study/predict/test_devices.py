"""Predictions for more devices: the formula by hand, published results, and the command line."""

import json
import math

import pytest

from common.errors import UserError
from common.evidence.intervals import error_factors
from common.measure.scaling import Links, Work
from common.repository import ROOT
from common.study.predict.devices import Recipe, predict
from common.study.predict.published import check_published
from common.study.predict.sources import published_samples
from common.study.prices import stated_price
from common.training.load import load_open
from tests.command import ttt_here
from tests.committed import committed_results

FACTOR, TYPICAL = 1.55, 1.2  # measured: 1.49 at most, 1.17 on average, with one set of assumptions for all
BERT = ("language_bert", "baseline", "--measured", "70@56")


def test_published_results_of_many_machines_are_predicted_within_a_stated_factor():
    checks = check_published(ROOT)
    assert {check["benchmark"] for check in checks} == {"resnet", "bert"}
    assert len(checks) == 22 and max(check["devices"] for check in checks) == 1024
    typical, largest = error_factors(check["ratio"] for check in checks)
    assert typical < TYPICAL and largest < FACTOR


def test_a_run_of_perfect_links_and_no_fixed_time_scales_without_loss():
    links, work = (
        Links(inside=math.inf, network=math.inf, latency_us=0),
        Work(gradient_bytes=1e9, sample_s=0.01),
    )
    counts = {"samples_to_target": 102_400, "evaluation_samples": 3000, "num_evaluations": 2}
    recipe = Recipe(batch=1024, share=0, startup_s=6, **counts)
    price = stated_price(3.6, is_machine=False)
    rows = predict(work, links, recipe, machines=16, per_machine=8, price=price)
    assert [row["devices"] for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert all(row["efficiency"] == pytest.approx(1) for row in rows)
    last = rows[-1]
    assert last["minutes"] == pytest.approx((102_400 * 0.01 / 128 + 2 * 3000 * 0.01 / 3 / 128 + 6) / 60)
    assert last["cost"] == pytest.approx(last["minutes"] / 60 * 128 * 3.6)
    with pytest.raises(UserError, match="2048 devices cannot divide 1024 samples"):
        predict(work, links, recipe, machines=256, per_machine=8, price=None)


def test_the_command_predicts_from_what_bench_measured():
    figures = next((committed_results() / "throughput").rglob("language_bert_0.json"))
    rates = json.loads(figures.read_text())["rates"]
    (rate,) = [rate["samples_per_s"] for rate in rates if rate["configuration"] == "optimized"]
    where = ("language_bert", "optimized", "--size", "mini", "--nodes", "2", "--gpus", "2", "--network", "1")
    done = ttt_here("estimate", "--scaling", *where, "--bench", figures, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [row["devices"] for row in answer["rows"]] == [1, 2, 4] and len(answer["formula"]) == 8
    assert answer["rows"][0]["samples_per_s"] == pytest.approx(rate)
    assert 0 < answer["rows"][2]["efficiency"] < answer["rows"][1]["efficiency"] < 1
    assert any("deviates by 0.71" in line for line in answer["assumptions"])


def test_the_command_predicts_from_a_row_of_a_gpu_day(tmp_path):
    row = ROOT / "results/throughput/gpu_day/1xH200/bert_large-01.json"
    (per_s,) = [
        rate["samples_per_s"]
        for rate in json.loads(row.read_text())["figures"]["rates"]
        if rate["configuration"] == "optimized"
    ]
    named = ("language_bert", "optimized", "--bench", row, "--results", tmp_path, "--json")
    done = ttt_here("estimate", *named, "--hardware", "1xH200")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rates"]["per_s"] == {"512 tokens": per_s}
    record, scaled = (
        json.loads(ttt_here("estimate", *named, "--devices", 8, *more).stdout) for more in ([], ["--scaling"])
    )
    assert record["hardware"] == "elsewhere"  # the row lies in no folder of this machine
    assert f"8 devices at {scaled['rows'][-1]['efficiency']:.0%}" in record["scaling"]
    assert any(map(record["scaling"].endswith, scaled["assumptions"]))


def test_a_benchmark_without_published_runs_has_no_published_samples():
    config = load_open("language_bert", "baseline", size="full", settings=[]).config
    assert published_samples(config) and published_samples(config.replaced(benchmark="digits")) is None


def test_devices_are_whole_machines():
    done = ttt_here("estimate", *BERT, "--scaling", "--devices", 16, "--price", 2)
    assert done.returncode == 0, done.stderr
    title, _, *rows = done.stdout.splitlines()[:7]
    assert title.startswith("predicted") and "not measured" in title
    assert [row.split()[:2] for row in rows] == [["1", "1"], ["1", "2"], ["1", "4"], ["1", "8"], ["2", "16"]]
    old = ttt_here("plan", *BERT, "--nodes", 2, "--price", 2)
    assert old.stdout == done.stdout and old.stderr == ""
