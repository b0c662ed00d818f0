"""Rounds of MLPerf Training that have a benchmark, and those that skip it and say SUCCESS."""

import json

import pytest
from mlperf_logging.benchmark_meta import get_allowed_benchmarks

from common.evidence.rules.rounds import ROUNDS, last_round
from common.evidence.submission import official
from tests.command import ttt_here as ttt


@pytest.mark.parametrize("ruleset", ROUNDS)
def test_a_round_has_the_benchmarks_that_mlcommons_lists(ruleset):
    allowed = get_allowed_benchmarks("training", ruleset)
    assert set(ROUNDS[ruleset][1]) == {"resnet", "bert"} & set(allowed)


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "verdict"),
    [
        ("resnet", "4.1.0", "SUCCESS"),
        ("bert", "5.0.0", "FAILED"),
        ("bert", "5.1.0", "SUCCESS"),
    ],
)
def test_the_official_package_checker_reads_no_log_of_a_benchmark_that_a_round_skips(
    golden, tmp_path, benchmark, ruleset, verdict
):
    golden.describe(tmp_path / "systems")
    folder = tmp_path / "results" / "8xA100-optimized" / benchmark
    folder.mkdir(parents=True)
    (folder / "result_0.txt").write_text("this is no log\n")
    assert official._submission(tmp_path, "here", ruleset).verdict == verdict


@pytest.mark.parametrize("benchmark", ["resnet", "bert"])
def test_a_chosen_round_that_skips_the_benchmark_is_an_error(golden, tmp_path, benchmark):
    folder = golden.write(tmp_path / "results", golden.set(benchmark))
    living = last_round(benchmark)
    for ruleset in ROUNDS:
        done = ttt("check", folder, "--no-official", "--ruleset", ruleset)
        expected = (1, True) if ruleset > living else (0, False)
        assert (done.returncode, "R701 error" in done.stdout) == expected
    done = ttt("check", folder, "--ruleset", "6.1.0", "--json")
    (entry,) = json.loads(done.stdout)["sets"]
    assert entry["official"] == []  # nothing was asked, and nothing says SUCCESS
    (finding,) = entry["findings"]
    assert (finding["rule"], finding["severity"]) == ("R701", "error")
    assert f"6.1.0 skips {benchmark}, whose last round was {living}" in finding["message"]


def test_own_sets_are_held_to_the_last_round_with_their_benchmark(golden, tmp_path):
    for benchmark, living in (("resnet", "4.0.0"), ("bert", "5.0.0")):
        logs = golden.set(benchmark, num_logs=1)
        done = ttt("check", golden.write(tmp_path / benchmark, logs))
        for ruleset in {living, "2.1.0", *official.RULESETS[benchmark]}:
            assert f"compliance {ruleset}: SUCCESS" in done.stdout
