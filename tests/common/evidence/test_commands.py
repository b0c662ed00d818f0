import json
import subprocess
import sys

import pytest

from common.evidence.log import load
from common.evidence.submission import official
from tests.command import ttt, ttt_here


@pytest.fixture(scope="module")
def results(golden, tmp_path_factory):
    """A folder with results/<system>/resnet of both configurations."""
    root = tmp_path_factory.mktemp("work")
    for configuration, block_s in (("baseline", 80.0), ("optimized", 40.0)):
        golden.write(root / "results", golden.set(configuration=configuration, block_s=block_s))
    return root


@pytest.fixture
def broken(golden, tmp_path):
    logs = golden.set()
    logs[0] = [
        line.replace('"eval_samples", "value": 50000', '"eval_samples", "value": 6400') for line in logs[0]
    ]
    golden.write(tmp_path / "results", logs)
    return tmp_path


def test_check_passes_good_logs_found_in_the_working_folder(results):
    done = ttt("check", "results", "--no-official", cwd=results)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("results/8xA100-optimized/resnet: 5 logs; rules: 0 errors")


def test_check_names_file_line_rule_and_section_and_exits_1(broken):
    done = ttt("check", "--no-official", "results", cwd=broken)
    assert done.returncode == 1
    first = done.stdout.splitlines()[0]
    assert first.startswith("results/8xA100-optimized/resnet/result_0.txt:28: K108 error ")
    assert first.endswith("(rules: Training and Test Sets)")


def test_check_prints_json(broken):
    found = json.loads(ttt("check", "results", "--no-official", "--json", cwd=broken).stdout)
    assert found["ok"] is False
    assert {finding["rule"] for finding in found["sets"][0]["findings"]} == {"K108", "S405"}


def test_warnings_alone_exit_0(golden, tmp_path):
    golden.write(tmp_path, golden.set()[:3])
    done = ttt("check", "--no-official", tmp_path)
    assert done.returncode == 0
    assert "S406 warning" in done.stdout


@pytest.mark.parametrize("verb", ["check", "score", "report"])
def test_a_missing_path_is_one_line_and_exit_2(verb, tmp_path):
    done = ttt(verb, "nowhere", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == "error: nowhere: no such file or folder"


def test_score_shows_speed_up_label_and_reported_rows(results):
    done = ttt("score", "results", cwd=results)
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "8xA100-optimized",
        "unverified: Result not verified by MLCommons Association.",
        "1.91x",
        "110.513",
    ):
        assert part in done.stdout


def test_score_prints_json_with_both_factors(results):
    entries = json.loads(ttt("score", "results", "--json", cwd=results).stdout)["scores"]
    optimized = next(entry for entry in entries if entry["system"] == "8xA100-optimized")
    assert optimized["speedup"]["ratio"] == pytest.approx(1.91, abs=0.01)
    assert optimized["samples_to_target"] == 20 * 1281167
    assert optimized["label"] == "unverified"


def test_score_without_a_score_exits_1(golden, tmp_path):
    lines = [line.replace('"status": "success"', '"status": "aborted"') for line in golden.log()]
    golden.write(tmp_path, [lines, golden.log(index=1)])
    done = ttt("score", tmp_path)
    assert done.returncode == 1
    assert "no score" in done.stdout


def test_report_writes_one_file_and_nothing_else(results, tmp_path):
    done = ttt("report", "results", "--no-official", "--out", tmp_path / "page", cwd=results)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["index.html"]


def test_report_into_a_file_is_one_line_and_exit_2(results, tmp_path):
    (tmp_path / "file").write_text("")
    done = ttt("report", "results", "--no-official", "--out", tmp_path / "file" / "page", cwd=results)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_report_looks_where_it_will_write_before_it_reads_anything():
    done = ttt_here("report", "nowhere", "--out", "/proc/x")
    assert done.returncode == 2 and done.stderr.startswith("error: /proc/x: cannot write here")


@pytest.mark.parametrize("benchmark", ["resnet", "bert"])
def test_the_official_checker_accepts_a_good_log(golden, tmp_path, benchmark):
    golden.write(tmp_path, golden.set(benchmark, num_logs=1))
    (found,) = load([tmp_path])
    assert [verdict.verdict for verdict in official.judge(found)] == ["SUCCESS"] * len(
        official.RULESETS[benchmark]
    )


def test_the_official_checkers_refusal_is_shown_as_its_own(golden, tmp_path):
    golden.write(tmp_path, [[line for line in golden.log("bert") if '"key": "eval_samples"' not in line]])
    done = ttt("check", tmp_path)
    assert done.returncode == 1
    assert "official compliance checker 2.1.0: FAILED" in done.stdout
    assert "official checkers: compliance 2.1.0: FAILED" in done.stdout


def test_evidence_imports_no_torch_and_no_official_tool():
    code = (
        "import sys, common.evidence.report, common.evidence.submission.official\n"
        "print(sorted({'torch', 'mlperf_logging'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
