"""MLCommons' checkers ignore the chain and the files of a seal; a package keeps both."""

import shutil

import pytest

from common.evidence.log import RunSet, read_log
from common.evidence.rules.rule import remove
from common.evidence.rules.sealed_files import rechain
from common.evidence.sealed.seal import RUNS, SEAL
from common.evidence.submission import official
from common.repository import ROOT
from tests.command import ttt_here
from tests.common.evidence.sealed.sealed_sets import bytes_of, seal_folder, write_files
from tests.common.evidence.submission.packages import names, package, refused

CLOSED, OPEN = "rehearsal-2cpu-mini-closed", "reference-2cpu-mini-optimized"


def seal_committed(root, system):
    """Write a committed set of resnet below a folder as if it had been sealed, and its description."""
    (root / "systems").mkdir(parents=True)
    shutil.copy(ROOT / f"systems/{system}.json", root / "systems")
    files = seal_folder(ROOT / f"results/{system}/resnet")
    return write_files(files, root / "results" / system / "resnet")


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


def test_a_package_keeps_a_seal_that_the_official_checkers_accept(tmp_path):
    folder, out = seal_committed(tmp_path, OPEN), tmp_path / "package"
    (folder / "anchors.jsonl").write_text("")
    done = package(folder, "--rehearsal", "--out", out)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for checker in ("package checker 2.0.0", "package checker 4.0.0", "repository checker"):
        assert any(f"official {checker}" in s and "SUCCESS" in s for s in done.stdout.splitlines()), (
            done.stdout
        )
    packed = out / "Example-rehearsal" / "results"
    assert names(packed / OPEN / "resnet") == names(folder) >= {SEAL, RUNS, "anchors.jsonl"}
    assert all(
        (packed / OPEN / "resnet" / path.name).read_bytes() == path.read_bytes() for path in folder.iterdir()
    )
    assert "rehearsal: made to try" in (packed / "README.md").read_text()
    done = ttt_here("check", out, "--no-official")
    assert done.returncode == 0 and "; sealed; rules: 0 errors" in done.stdout


@pytest.mark.parametrize("name", [SEAL, RUNS])
def test_a_package_takes_no_link_for_a_seal_and_no_broken_one(tmp_path, name):
    folder = seal_committed(tmp_path, OPEN)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    done = package(folder, "--rehearsal", "--list")
    refused(done, f"{name}: is not one of the results of this set")
    assert f"{name}: C904 error" in done.stdout
