"""Estimates by hand, against logs of real runs, and through the command line."""

import dataclasses
import json
import math
import shutil

import pytest

from common.commands.measure import profile
from common.errors import UserError
from common.evidence.log import read_log
from common.machine import system
from common.study.predict import minutes, records, sources
from common.study.predict.minutes import Rates, Samples
from tests.command import ttt_here
from tests.committed import committed_results

SYSTEM = "reference-2cpu-mini-optimized"
LOGS = sorted((committed_results() / SYSTEM / "bert").glob("result_*.txt"))
PHASES = [("56 px", range(10)), ("84 px", range(10, 30))]
RATES = Rates(source="", per_s={"56 px": 100.0, "84 px": 50.0}, noise=0.02, noise_source="")


def samples(*values, startup_s=0.0):
    return Samples(source="", values=values, startup_s=startup_s)


def bert():
    """Return the configuration that the logs state."""
    return sources.stated_config(read_log(LOGS[0]))


def test_each_phase_takes_its_samples_at_its_own_rate():
    assert minutes.training_seconds(PHASES, 8, 80, RATES) == pytest.approx(0.8)
    assert minutes.training_seconds(PHASES, 8, 180, RATES) == pytest.approx(0.8 + 100 / 50)
    assert minutes.training_seconds(PHASES, 8, 400, RATES) == pytest.approx(0.8 + 320 / 50)  # beyond its end


def test_an_estimate_is_training_evaluation_and_start_up():
    timed = Rates(
        source="", per_s=RATES.per_s, noise=0.02, noise_source="", evaluation_s=(3.0, 1.0), first_pass_s=2.0
    )
    known = {
        "batch": 8,
        "evaluated_at": (10, 20, 30),
        "num_evaluated": 30,
        "samples": samples(180, startup_s=5.0),
    }
    found = minutes.estimate(PHASES, rates=timed, **known)
    assert (found.training_s, found.evaluation_s, found.num_evaluations) == (pytest.approx(4.8), 4.0, 2)
    assert found.minutes == pytest.approx((4.8 + 4.0 + 5.0) / 60)
    assert found.high == pytest.approx((8.8 * math.exp(1.95996 * 0.02) + 5.0) / 60, rel=1e-6)
    assert found.low == pytest.approx((8.8 / math.exp(1.95996 * 0.02) + 5.0) / 60, rel=1e-6)
    plain = minutes.estimate(PHASES, rates=RATES, **known)
    assert plain.evaluation_s == pytest.approx(
        2 * 30 / 3 / 50
    )  # a third of a trained sample, at the last rate
    four = minutes.estimate(PHASES, rates=RATES, slower=0.3, devices=4, **known)
    assert four.training_s == pytest.approx(0.3 * 2.8) and four.evaluation_s == pytest.approx(0.1)


def test_seeds_and_noise_combine_as_the_root_of_the_sum_of_squares():
    assert samples(100.0).half_width is None
    two = samples(100.0 * math.exp(-0.1), 100.0 * math.exp(0.1))
    expected = 12.706 * (0.1 * math.sqrt(2)) * math.sqrt(1.5)  # t, deviation, one further run
    assert two.typical == pytest.approx(100) and two.half_width == pytest.approx(expected, rel=1e-3)
    four = dataclasses.replace(RATES, num_turns=4)
    assert RATES.half_width == pytest.approx(1.959964 * 0.02)  # turns of which nothing is known
    assert four.half_width == pytest.approx(3.182446 * 0.02 * math.sqrt(1.25))
    known = {"batch": 8, "evaluated_at": (), "num_evaluated": 30, "rates": four, "samples": two}
    found = minutes.estimate(PHASES, **known)
    assert math.log(found.high / found.minutes) == pytest.approx(
        math.hypot(expected, four.half_width), rel=1e-3
    )


def test_the_last_evaluation_is_not_lost_to_rounding():
    known = {"evaluated_at": (5, 10, 15), "num_evaluated": 30, "rates": RATES}
    for values in ([180.0], [180.0] * 3, [180.0] * 7, [17600.0] * 5):
        found = minutes.estimate(PHASES, samples=samples(*values), batch=values[0] / 10, **known)
        assert found.num_evaluations == 2


def test_samples_come_from_the_runs_of_the_same_recipe():
    logs = [read_log(path) for path in LOGS]
    found = sources.measured_samples(logs, bert())
    assert found is not None and len(found.values) == len(LOGS)
    assert found.values == tuple(log.reached.samples for log in logs)
    assert sources.measured_samples(logs, bert() | {"target": 0.3}) is None
    other = bert()
    other["methods"] = {name: each for name, each in other["methods"].items() if name != "unpad"}
    assert sources.measured_samples(logs, other) is None
    assert sources.measured_samples(logs, bert() | {"budget": 0.5}) is None
    assert sources.measured_samples(logs, bert() | {"data": bert()["data"] | {"max_seq_length": 8}}) is None
    elsewhere = bert() | {"data": bert()["data"] | {"directory": "there"}}
    assert sources.measured_samples(logs, elsewhere) is not None
    older = bert() | {"model": bert()["model"] | {"a_newer_key": False}}
    assert sources.measured_samples(logs, older) is not None  # the logs do not know it


def test_a_run_is_compared_with_the_estimates_before_it():
    logs = [read_log(path) for path in LOGS]
    first = logs[0].minutes
    record = {"system": SYSTEM, "config": bert(), "time_ms": 0, "minutes": first * 2}
    record |= {"low": first * 0.999, "high": first * 1.001}
    found = records.later_runs(record, logs)
    assert len(found) == len(LOGS) and found[0].ratio == pytest.approx(0.5) and found[0].is_inside
    assert [run.is_inside for run in found].count(True) < len(LOGS)
    started = sorted(log.first("run_start").time_ms for log in logs)
    assert len(records.later_runs(record | {"time_ms": started[-2]}, logs)) == 1
    assert records.later_runs(record | {"system": "another"}, logs) == []
    assert records.later_runs(record | {"devices": 8}, logs) == []
    assert records.later_runs(record | {"config": bert() | {"precision": "fp32"}}, logs) == []


def test_an_estimate_is_kept_repriced_and_scored(tmp_path):
    results = ("--results", tmp_path)
    made = ttt_here(
        *("estimate", "language_bert", "optimized", "--size", "mini", "--hardware", "reference-2cpu"),
        *("--measured", "1300@16", "--samples", 18000, "--price", "own=0.6", *results),
    )
    assert made.returncode == 0, made.stderr
    seconds = (
        18000 / 1300 + 3 * 384 / 3 / 1300 + 3
    )  # with evaluations after 14,400, 16,000 and 17,600 samples
    assert f"{seconds:.1f} s to the target" in made.stdout
    assert "by the rate alone, seeds unknown" in made.stdout and "95 %" not in made.stdout
    assert f"own machine, $0.6 an hour: ${0.6 * seconds / 3600:.4g}" in made.stdout
    (path,) = tmp_path.glob(f"estimates/{SYSTEM}/language_bert_0.json")
    again = ttt_here("estimate", "--reprice", "--price", "own=6", *results)
    assert f"own machine, $6 an hour: ${6 * seconds / 3600:.4g}" in again.stdout
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"time_ms": 0, "config": bert()}))  # as if made before these runs
    folder = tmp_path / SYSTEM / "bert"
    shutil.copytree(LOGS[0].parent, folder)
    scored = json.loads(ttt_here("estimate", "--score", "--json", *results).stdout)
    assert scored["runs"] == len(LOGS) and len(scored["estimates"][0]["runs"]) == len(LOGS)
    text = ttt_here("estimate", "--score", *results).stdout
    assert text.count("measured ") == len(LOGS) and f"of {len(LOGS)} runs lie inside the interval" in text
    path.write_text(json.dumps(record | {"time_ms": 0, "devices": 2}))  # no run had two
    assert json.loads(ttt_here("estimate", "--score", "--json", *results).stdout)["runs"] == 0


def test_published_rates_and_samples_come_to_the_published_minutes_and_cost(tmp_path):
    done = ttt_here(
        *("estimate", "image_classification", "mosaic", "--hardware", "8xA100", "--measured", "3039@256"),
        *("--gpus", 8, "--inside", "nvlink3", "--price", "published-8xA100", "--json", "--results", tmp_path),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["minutes"] == pytest.approx(23.79, rel=0.02)  # the published score
    assert "$13.0" in done.stderr  # of 32.77 an hour


def test_figures_of_another_machine_of_this_model_are_not_taken(monkeypatch, tmp_path):
    """This one is measured, though a committed profile may be of the same processor."""

    def measure(_):
        raise UserError("this machine is measured now")

    monkeypatch.setattr(profile, "measure", measure)
    monkeypatch.setattr(system, "LOCAL", tmp_path)
    shipped = ("--results", committed_results())
    done = ttt_here("estimate", "language_bert", "optimized", "--size", "mini", *shipped)
    assert done.returncode == 2 and "measured now" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no benchmark"),
        (["--score"], "no estimates here"),
        (["language_bert", "optimized", "--size", "mini", "--samples", "0"], "--samples"),
        (["language_bert", "optimized", "--size", "mini"], "how many samples"),
        (["language_bert", "optimized", "--samples", "9", "--hardware", "1xNone"], "no figures of optimized"),
        (["language_bert", "optimized", "--price", "nothing"], "no price is called"),
        (["language_bert", "optimized", "--measured", "fast"], "SAMPLES_PER_S@BATCH"),
    ],
)
def test_what_cannot_be_estimated_is_one_line_and_leaves_nothing(tmp_path, arguments, says):
    done = ttt_here("estimate", *arguments, "--results", tmp_path)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
