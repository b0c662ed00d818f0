"""MLCommons' checkers ignore the chain and the files of a seal; a package keeps both."""

import json

import pytest

from common.evidence.log import RunSet, load, read_log
from common.evidence.rules.rule import edit, remove, retime
from common.evidence.rules.sealed_files import extend, rechain
from common.evidence.score import score
from common.evidence.sealed.seal import RUNS, SEAL
from common.evidence.submission import official
from common.repository import ROOT
from common.study.replay import replay
from tests.command import ttt_here
from tests.common.evidence.sealed.sealed_sets import (
    bytes_of,
    numbered,
    seal_committed,
    seal_logs,
    with_killed,
)
from tests.common.evidence.submission.packages import package, refused

CLOSED, OPEN = "rehearsal-2cpu-mini-closed", "reference-2cpu-mini-optimized"


def judge_log(folder, benchmark, system, lines):
    """Return what the compliance checker says of a log, by ruleset."""
    path = folder / system / benchmark / "result_0.txt"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes_of(lines))
    verdicts = official.judge(RunSet(folder="here", logs=(read_log(path),)))
    return {verdict.ruleset: (verdict.verdict, verdict.detail) for verdict in verdicts}


@pytest.mark.slow
@pytest.mark.parametrize("system", [CLOSED, OPEN])
@pytest.mark.parametrize("benchmark", ["resnet", "bert"])
def test_the_official_checker_says_the_same_of_chained_logs(tmp_path, benchmark, system):
    good = (ROOT / f"results/{system}/{benchmark}/result_0.txt").read_text().splitlines()
    for name, lines in (("good", good), ("bad", remove("eval_samples")(good))):
        plain, chained = (
            judge_log(tmp_path / name / kind, benchmark, system, log)
            for kind, log in (("plain", lines), ("chained", rechain(lines)))
        )
        assert chained == plain and len(plain) == (
            1 if system == CLOSED else len(official.RULESETS[benchmark])
        )
        assert {verdict for verdict, _ in plain.values()} == {"SUCCESS" if name == "good" else "FAILED"}


def test_a_package_keeps_a_seal_and_every_run_and_the_official_checkers_accept_it(tmp_path):
    """A run of the set was killed, so that it has one more than MLPerf counts: the first, by the score."""
    folder = seal_committed(tmp_path, OPEN, lambda logs: with_killed(logs.values(), 1))
    (folder / "anchors.jsonl").write_text("")
    out, uncounted = tmp_path / "package", "uncounted_result_0.txt"
    done = package(folder, "--rehearsal", "--out", out)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for checker in ("package checker 2.0.0", "package checker 4.0.0", "repository checker"):
        assert any(f"official {checker}" in s and "SUCCESS" in s for s in done.stdout.splitlines()), (
            done.stdout
        )
    assert "result_1.txt: missed its target" in done.stdout
    assert f"result_0.txt: does not count, and is packaged as {uncounted}" in done.stdout
    packed = out / "Example-rehearsal" / "results" / OPEN / "resnet"
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {SEAL, RUNS, "anchors.jsonl"} < contents.keys()
    contents[uncounted] = contents.pop("result_0.txt")
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == contents
    assert "rehearsal: made to try" in (packed.parents[1] / "README.md").read_text()
    text = next(out.rglob(f"{OPEN}/README.md")).read_text()
    assert f"| {uncounted} | 0." in text and "| result_1.txt | missed the target |" in text
    assert "The set is sealed, extended after 5 runs; `runs.jsonl` lists every run that was started" in text
    assert "Of 6 results the 5 consecutive ones with the median score count" in text
    scores = [score(run_set).minutes for path in (folder, packed) for run_set in load([path])]
    assert len(scores) == 2 and scores[0] == scores[1] is not None
    drawn = {replay.choose([packed], f"beacon:{value}")[0].name for value in range(60)}
    assert drawn == {name for name in contents if name.endswith(".txt")}
    done = ttt_here("check", out, "--no-official")
    assert done.returncode == 0 and "6 logs" in done.stdout and "; sealed, extended after" in done.stdout
    (packed / uncounted).unlink()
    done = ttt_here("check", out, "--no-official")
    assert done.returncode == 1 and "no result_0.txt; line 2 says that it ended" in done.stdout


def test_runs_that_were_added_to_a_whole_sealed_set_are_no_submission(tmp_path):
    def add_one(logs):
        first, *others = logs.values()
        later = [edit("seed", value=7)(retime(first, lambda ms: ms + 10**6))]
        return extend(seal_logs(numbered([first, *others, *later])))

    done = package(seal_committed(tmp_path, OPEN, add_one), "--rehearsal", "--list")
    refused(done, "6 runs came to their end, and runset.json decided 5")


def test_a_package_takes_no_log_that_was_changed_after_it_was_stamped(tmp_path):
    folder, reply = seal_committed(tmp_path, OPEN), {"delay_ms": 0, "reply": "AA=="}
    stamp = {"of": "result_1.txt", "line": 1, "sha256": "0" * 64} | reply
    (folder / "anchors.jsonl").write_text(json.dumps(stamp) + "\n")
    done = package(folder, "--rehearsal", "--list")
    refused(done, "N901 error found: line 1 of result_1.txt was changed after it was stamped")


@pytest.mark.parametrize("name", [SEAL, RUNS])
def test_a_package_takes_no_link_for_a_seal_and_no_broken_one(tmp_path, name):
    folder = seal_committed(tmp_path, OPEN)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    done = package(folder, "--rehearsal", "--list")
    refused(done, f"{name}: is not one of the results of this set")
    assert f"{name}: C904 error" in done.stdout
