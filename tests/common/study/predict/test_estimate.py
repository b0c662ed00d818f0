"""Estimates by hand, against logs of real runs, and through the command line."""

import dataclasses
import json
import math
import re
import shutil

import pytest
from pytest import approx

from common.evidence.log import parse_log, read_log
from common.machine import system
from common.measure.profiling import profile
from common.study.predict import minutes, records, sources
from common.study.predict.minutes import Rates, Samples
from common.training import load as loading
from tests.command import one_line, ttt_here
from tests.committed import committed_results

SYSTEM = "reference-2cpu-mini-optimized"
LOGS = sorted((committed_results() / SYSTEM / "bert").glob("result_*.txt"))
PHASES = [("56 px", range(10)), ("84 px", range(10, 30))]
RATES = Rates(source="", per_s={"56 px": 100.0, "84 px": 50.0}, noise=0.02, noise_source="")
MINI = ("language_bert", "optimized", "--size", "mini")
SCALING = ("--scaling", "language_bert", "baseline", "--measured", "70@56")


def samples(*values, startup_s=0.0):
    return Samples(source="", values=values, startup_s=startup_s)


def bert():
    """Return the configuration that the logs state."""
    return sources.stated_config(read_log(LOGS[0]))


def test_each_phase_takes_its_samples_at_its_own_rate():
    for num_samples, seconds in ((80, 0.8), (180, 0.8 + 100 / 50), (400, 0.8 + 320 / 50)):  # beyond its end
        assert minutes.training_seconds(PHASES, 8, num_samples, RATES) == approx(seconds)


def test_an_estimate_is_training_evaluation_and_start_up():
    timed = dataclasses.replace(RATES, evaluation_s=(3.0, 1.0), first_pass_s=2.0)
    known = {"batch": 8, "evaluated_at": (10, 20, 30), "num_evaluated": 30}
    known |= {"samples": samples(180, startup_s=5.0)}
    estimate = minutes.estimate(PHASES, rates=timed, **known)
    assert estimate["training_s"] == approx(4.8)
    assert (estimate["evaluation_s"], estimate["num_evaluations"]) == (4.0, 2)
    assert estimate["minutes"] == approx((4.8 + 4.0 + 5.0) / 60)
    assert estimate["high"] == approx((8.8 * math.exp(1.95996 * 0.02) + 5.0) / 60, rel=1e-6)
    assert estimate["low"] == approx((8.8 / math.exp(1.95996 * 0.02) + 5.0) / 60, rel=1e-6)
    calculated = minutes.estimate(PHASES, rates=RATES, **known)
    assert calculated["evaluation_s"] == approx(2 * 30 / 3 / 50)  # a third of a sample, at the last rate
    four = minutes.estimate(PHASES, rates=RATES, slower=0.3, devices=4, **known)
    assert (four["training_s"], four["evaluation_s"]) == approx((0.3 * 2.8, 0.1))


def test_seeds_and_noise_combine_as_the_root_of_the_sum_of_squares():
    assert samples(100.0).half_width is None
    two = samples(100.0 * math.exp(-0.1), 100.0 * math.exp(0.1))
    expected = 12.706 * (0.1 * math.sqrt(2)) * math.sqrt(1.5)  # t, deviation, one further run
    assert two.typical == approx(100) and two.half_width == approx(expected, rel=1e-3)
    four = dataclasses.replace(RATES, num_turns=4)
    assert RATES.half_width == approx(1.959964 * 0.02)  # turns of which nothing is known
    assert four.half_width == approx(3.182446 * 0.02 * math.sqrt(1.25))
    estimate = minutes.estimate(PHASES, batch=8, evaluated_at=(), num_evaluated=30, rates=four, samples=two)
    half = math.log(estimate["high"] / estimate["minutes"])
    assert half == approx(math.hypot(expected, four.half_width), rel=1e-3)


def test_the_last_evaluation_is_not_lost_to_rounding():
    known = {"evaluated_at": (5, 10, 15), "num_evaluated": 30, "rates": RATES}
    for values in ([180.0], [180.0] * 3, [180.0] * 7, [17600.0] * 5):
        estimate = minutes.estimate(PHASES, samples=samples(*values), batch=values[0] / 10, **known)
        assert estimate["num_evaluations"] == 2


def test_samples_come_from_the_runs_of_the_same_recipe():
    logs, config = [read_log(path) for path in LOGS], bert()
    measured = sources.measured_samples(logs, config)
    assert measured is not None and measured.values == tuple(log.reached.samples for log in logs)
    fewer = {name: settings for name, settings in config["methods"].items() if name != "unpad"}
    for changes, is_same in (
        ({"target": 0.3}, False),
        ({"methods": fewer}, False),
        ({"budget": 0.5}, False),
        ({"data": config["data"] | {"max_seq_length": 8}}, False),
        ({"data": config["data"] | {"directory": "there"}}, True),
        ({"model": config["model"] | {"a_newer_key": False}}, True),  # the logs do not know it
    ):
        assert (sources.measured_samples(logs, config | changes) is not None) == is_same, changes


def test_a_run_is_compared_with_the_estimates_before_it():
    logs = [read_log(path) for path in LOGS]
    first = logs[0].minutes
    record = {"system": SYSTEM, "config": bert(), "time_ms": 0, "minutes": first * 2}
    record |= {"low": first * 0.999, "high": first * 1.001}
    runs = records.later_runs(record, logs)
    assert len(runs) == len(LOGS) and runs[0]["ratio"] == approx(0.5) and runs[0]["is_inside"]
    assert [run["is_inside"] for run in runs].count(True) < len(LOGS)
    started = sorted(log.first("run_start").time_ms for log in logs)
    assert len(records.later_runs(record | {"time_ms": started[-2]}, logs)) == 1
    for changes in ({"system": "another"}, {"devices": 8}, {"config": bert() | {"precision": "fp32"}}):
        assert records.later_runs(record | changes, logs) == []


def test_an_estimate_is_kept_repriced_and_scored(tmp_path):
    results = ("--results", tmp_path)
    where = ("--hardware", "reference-2cpu", "--measured", "1300@16")
    made = ttt_here("estimate", *MINI, *where, "--samples", 18000, "--price", "own=0.6", *results)
    assert made.returncode == 0, made.stderr
    seconds = 18000 / 1300 + 3 * 384 / 3 / 1300 + 3  # evaluated after 14,400, 16,000, 17,600 samples
    assert (
        f"optimized mini (a proxy) on reference-2cpu: predicted {seconds:.1f} s to the target" in made.stdout
    )
    assert "by the rate alone, seeds unknown" in made.stdout and "95 %" not in made.stdout
    assert f"own machine, $0.6 an hour: ${0.6 * seconds / 3600:.4g}" in made.stdout
    (path,) = tmp_path.glob(f"estimates/{SYSTEM}/language_bert_0.json")
    again = ttt_here("estimate", "--reprice", "--price", "own=6", *results)
    assert f"own machine, $6 an hour: ${6 * seconds / 3600:.4g}" in again.stdout
    (priced,) = json.loads(ttt_here("estimate", "--reprice", "--price", "own=6", "--json", *results).stdout)
    (cost,) = priced["costs"]
    assert cost["low"] < cost["dollars"] == pytest.approx(6 * seconds / 3600)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"time_ms": 0, "config": bert()}))  # as if made before these runs
    run_set = tmp_path / f"{SYSTEM}+code=0123456" / "bert"  # a set of the same recipe by other code
    shutil.copytree(LOGS[0].parent, run_set)
    scored = json.loads(ttt_here("estimate", "--score", "--json", *results).stdout)
    assert scored["runs"] == len(LOGS) == len(scored["estimates"][0]["runs"])
    log = next(run_set.glob("*_0.txt"))
    reached = log.read_text()
    log.write_text(reached.replace('"status": "success"', '"status": "aborted"'))
    missed = ttt_here("estimate", "--score", "--json", *results).stdout
    assert "Infinity" not in missed and '"minutes": null' in missed
    log.write_text(reached)
    text = ttt_here("estimate", "--score", *results).stdout
    assert "optimized mini (a proxy) on" in text
    assert text.count("measured ") == len(LOGS) and f"of {len(LOGS)} runs lie inside the interval" in text
    path.write_text(json.dumps(record | {"time_ms": 0, "devices": 2}))  # no run had two
    assert json.loads(ttt_here("estimate", "--score", "--json", *results).stdout)["runs"] == 0


def test_a_cost_has_no_exponent():
    assert [records.dollars(cost) for cost in (3.9e-6, 0.0123, 12345.6)] == [
        "$0.000004",
        "$0.0123",
        "$12,346",
    ]


def test_published_rates_and_samples_come_to_the_published_minutes_and_cost(tmp_path):
    done = ttt_here(
        *("estimate", "image_classification", "mosaic", "--hardware", "8xA100", "--measured", "3039@256"),
        *("--gpus", 8, "--inside", "nvlink3", "--price", "published-8xA100", "--json", "--results", tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["minutes"] == approx(23.79, rel=0.02)  # the published score
    assert "$13.0" in done.stderr  # of 32.77 an hour


def test_this_machine_is_measured_where_only_another_of_its_model_was(monkeypatch, tmp_path):
    """The profile that is then made is kept, and taken by the next estimate."""
    committed = committed_results() / "profile" / "2cpu-EPYC" / "language_bert_1.json"
    figures = json.loads(committed.read_text())
    made = []

    def measure(load, *_, **options):
        made.append(load().config)
        return figures | {"config": json.loads(made[0].model_dump_json())}

    monkeypatch.setattr(profile, "profile", measure)
    monkeypatch.setattr(system, "LOCAL", tmp_path / "machine")
    monkeypatch.setattr(loading, "fast_precision", lambda: "bf16")  # that of the committed runs
    shutil.copytree(committed_results(), tmp_path / "results")
    for _ in range(2):
        done = ttt_here("estimate", *MINI, "--results", tmp_path / "results", "--json")
        assert done.returncode == 0, done.stderr
        rates = json.loads(done.stdout)["rates"]
        (phase,) = figures["phases"]
        assert rates["per_s"] == {phase["shape"]: approx(phase["batch"] / phase["step_ms"] * 1e3)}
    assert len(made) == 1 and "profile language_bert_0.json" in rates["source"]


BENCH = {"benchmark": "language_bert", "size": "mini", "batch_size": 16, "peaks": {"bytes_per_s": 1e9}}
BENCH["rates"] = [{"configuration": "optimized", "shape": "160 tokens", "samples_per_s": 1e3}]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"rates": [{}]}, "rates.0.configuration"),
        ({"rates": None}, "rates"),
        ({"rates": [BENCH["rates"][0] | {"samples_per_s": "x"}]}, "rates.0.samples_per_s"),
        ({"batch_size": 0}, "batch_size"),
        ({"benchmark": ["x"]}, "benchmark"),
        ({"peaks": {}}, "peaks.bytes_per_s"),
    ],
)
def test_a_damaged_bench_is_refused_in_one_line(tmp_path, damage, says):
    (path := tmp_path / "bench.json").write_text(json.dumps(BENCH | damage))
    command = ("estimate", *MINI, "--bench", path, "--samples", 9000, "--results", tmp_path / "results")
    assert f"bench.json: not the expected figures ({says}" in one_line(ttt_here(*command))
    path.write_text(json.dumps(BENCH))
    assert ttt_here(*command).returncode == 0


@pytest.mark.parametrize("text", ["{}", '{"time_ms": 5}'])
def test_a_damaged_estimate_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "estimates/here/language_bert_0.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    for command in ("--score", "--reprice"):
        assert "not the expected figures" in one_line(ttt_here("estimate", command, "--results", tmp_path))


@pytest.mark.parametrize("key", ["benchmark", "configuration", "size", "target", "methods"])
def test_a_log_whose_head_lacks_a_key_states_no_configuration(key):
    text = LOGS[0].read_text()
    assert sources.stated_config(parse_log(text.encode(), "result_0.txt")) == bert()
    damaged = re.sub(rf"(?m)^#   {key}:.*\n(#    .*\n)*", "", text)
    assert damaged != text and sources.stated_config(parse_log(damaged.encode(), "result_0.txt")) == {}


def test_the_estimate_of_a_file_is_found_again(tmp_path):
    (path := tmp_path / "folder" / "mine.yaml").parent.mkdir()
    path.write_text("extends: optimized\n")
    results = ("--results", tmp_path / "results")
    known = ("--measured", "70@16", "--samples", 9000)
    made = ttt_here("estimate", "language_bert", path, *MINI[2:], *known, *results)
    assert made.returncode == 0, made.stderr
    assert ttt_here("estimate", "--reprice", "--price", "own=1", *results).returncode == 0


def test_the_path_of_an_estimate_is_printed_as_it_is(tmp_path):
    results = tmp_path / "old[/x] [a]"
    options = ["--size", "mini", "--measured", "900@32", "--samples", "18000", "--results", results]
    done = ttt_here("estimate", "language_bert", "optimized", *options)
    (written,) = results.rglob("*.json")
    assert done.returncode == 0 and done.stdout.endswith(f"-> {written}\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no benchmark"),
        ([*SCALING, "--latency-us", "nan"], "expected numbers from 0"),
        ([*SCALING, "--startup-s", "inf"], "expected numbers from 0"),
        ([*MINI, "--samples", "9", "--measure", "--hardware", "1xH100"], "exclude each other"),
        ([*MINI, "--samples", "9", "--measure", "--measured", "9@16"], "--measured exclude each other"),
        ([*MINI, "--samples", "9", "--batch-per-device", "8"], "--batch-per-device: needs --scaling"),
        (["--score", "--reprice"], "not allowed with argument --score"),
        (["--score"], "no estimates here"),
        ([*MINI, "--samples", "0"], "--samples"),
        ([*MINI], "how many samples"),
        ([*SCALING[1:], "--set", "budget=0.25"], "how many samples"),  # the published runs had all of it
        (["language_bert", "optimized", "--samples", "9", "--hardware", "1xNone"], "no figures of optimized"),
        (["language_bert", "optimized", "--price", "nothing"], "no price is called"),
        (["language_bert", "optimized", "--measured", "fast"], "SAMPLES_PER_S@BATCH"),
        (["--scaling"], "no benchmark"),
        (["language_bert"], "no configuration was given"),
        (SCALING[:3], "no throughput"),
        ([*SCALING[:4], "70"], "SAMPLES_PER_S@BATCH"),
        ([*SCALING, "--nodes", "500"], "1 to 1024"),
        ([*SCALING, "--price", "2", "--price", "4"], "--scaling takes one price"),
        ([*SCALING, "--devices", "0"], "--devices"),
        ([*SCALING, "--devices", "12"], "whole machines of 8 devices; or --gpus N"),
        ([*SCALING, "--devices", "8", "--nodes", "2"], "exclude each other"),
        ([*SCALING, "--nodes", "128"], "--batch-per-device"),
        ([*SCALING, "--overlap", "90"], "--overlap 90: expected shares"),
        ([*SCALING, "--inside", "nvlnk4"], "did you mean nvlink4"),
        ([*SCALING, "--network", "8xhdd"], "hdr, ndr"),
        ([*SCALING, "--network", "0xhdr"], "hdr, ndr"),
        ([*SCALING[:3], "--bench", "pyproject.toml"], "pyproject.toml: no figures (not JSON"),
        ([*SCALING[:3], "--bench", "nope.json"], "nope.json: no figures (No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_estimated_is_one_line_and_leaves_nothing(tmp_path, arguments, says):
    assert says in one_line(ttt_here("estimate", *arguments, "--results", tmp_path))
    assert not list(tmp_path.iterdir())
