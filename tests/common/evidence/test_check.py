"""`ttt check` on the genuine published logs, and on changes of them that the official tools let pass."""

import json
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from common.evidence.audit import audit_paths
from common.evidence.log import load
from common.evidence.rules.rule import edit, edit_all, replace_record, shift_record
from common.evidence.score import score
from common.evidence.submission import official
from tests.command import ttt

BERT, RESNET = ("v2.1", "8xA100_80GB-methods", "bert"), ("v2.0", "8xA100_80GB-methods", "resnet")


def names(path):
    return {finding.rule for entry in audit_paths([path]) for finding in entry.findings}


def test_published_sets_have_their_score_and_no_error(published):
    entries = audit_paths([published])
    assert [score(entry.run_set).minutes for entry in entries] == pytest.approx([23.7885, 7.896], abs=1e-3)
    assert not [str(f) for entry in entries for f in entry.findings if f.severity == "error"]


def test_each_genuine_irregularity_is_named_once(published):
    done = ttt("check", "--no-official", published)
    assert (done.returncode, done.stderr) == (0, "")
    warnings = [line for line in done.stdout.splitlines() if " warning " in line]
    named = Counter(line.split(": ")[1].split()[0] for line in warnings)
    both = {"K110": 2, "K111": 2, "K112": 2, "Y603": 2}  # open blocks, epochs from 0, no interval, fields
    assert named == both | {"K108": 1, "T212": 1, "S409": 1}  # 1,281,168 images; no initialization; 435,181
    assert "fractions of 435181, not 428235" in done.stdout


@pytest.mark.slow
def test_the_official_checkers_accept_the_published_sets(published):
    done = ttt("check", published)
    assert done.returncode == 0
    for part in (
        "compliance 2.0.0: 5 of 5 SUCCESS, seeds 2.0.0: SUCCESS, system description 2.0.0: SUCCESS",
        "package 2.0.0: SUCCESS",
        "compliance 2.1.0: 10 of 10 SUCCESS",
    ):
        assert part in done.stdout


@pytest.fixture
def copy(published, tmp_path):
    """A submission with the published bert set; `change` rewrites the lines of some of its logs."""
    folder = tmp_path / "results" / Path(*BERT[1:])
    shutil.copytree(published / Path(*BERT), folder)
    (tmp_path / "systems").mkdir()
    shutil.copy(published / BERT[0] / "systems" / f"{BERT[1]}.json", tmp_path / "systems")
    return tmp_path, folder


def change(folder, mutation, *numbers):
    for number in numbers or range(10):
        path = folder / f"result_{number}.txt"
        path.write_text("\n".join(mutation(path.read_text().splitlines())) + "\n")


def no_success(lines):
    return edit_all("eval_accuracy", lambda r: {"value": min(r["value"], 0.4)})(lines)


CHANGES = {  # what the package checker calls a success (its score beside it), and what finds it here
    "aborted": (edit("run_stop", status="aborted"), (), "S408"),  # 7.896
    "stopped before it started": (shift_record("run_stop", -4_000_000), (), "T201"),  # -56.14
    "target never reached": (no_success, (), "Q302"),  # 7.896
    "started 200 s later": (shift_record("run_start", 200_000), (), "T202"),  # 4.563
    "another batch size": (edit("global_batch_size", value=4480), (3,), "S405"),  # 7.896
    "another configuration": (edit("submission_platform", value="8xA100_80GB-baseline"), (4,), "S401"),
    "seed twice": (edit("seed", value=25827), (5,), "S403"),
    "NaN accuracy": (edit("eval_accuracy", value=float("nan")), (6,), "Q301"),
    "accuracy in percent": (edit("eval_accuracy", at=-1, value=72.04), (6,), "Q301"),
    "accuracy as text": (edit("eval_accuracy", value="0.72"), (6,), "Q301"),
    "no time": (edit("eval_accuracy", time_ms=None), (6,), "P003"),
    "a number for a record": (replace_record("seed", lambda line: [line, ":::MLLOG 5"]), (6,), "P002"),
    "deep nesting": (replace_record("seed", lambda line: [line, ":::MLLOG " + "[" * 100_000]), (6,), "P002"),
    "a path for a benchmark": (edit("submission_benchmark", value="../../etc/passwd"), (6,), "K102"),
    "run_start twice": (
        replace_record("eval_stop", lambda s: [s, s.replace("eval_stop", "run_start")]),
        (),
        "K101",
    ),
}


@pytest.mark.parametrize(("mutation", "numbers", "rule"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_published_logs_is_an_error(copy, mutation, numbers, rule):
    root, folder = copy
    change(folder, mutation, *numbers)
    (entry,) = audit_paths([root])
    assert rule in {finding.rule for finding in entry.findings if finding.severity == "error"}


def test_copies_of_the_fastest_run_are_an_error(copy):
    root, folder = copy
    for number in range(1, 10):
        shutil.copy(folder / "result_0.txt", folder / f"result_{number}.txt")
    assert {"S402", "S403"} <= names(root)


def test_a_link_among_the_logs_is_refused(copy):
    root, folder = copy
    (folder / "result_0.txt").unlink()
    (folder / "result_0.txt").symlink_to("/etc/passwd")
    assert "P001" in names(root)
    assert "root:" not in ttt("check", root, "--no-official").stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [9, 11])
def test_a_wrong_number_of_runs_is_named_by_both(copy, number):
    root, folder = copy
    path = folder / "result_9.txt"
    path.unlink() if number == 9 else shutil.copy(path, folder / "result_10.txt")
    done = ttt("check", root)
    assert done.returncode == 1
    assert f"S406 warning A set has 5 runs (resnet) or 10 (bert): {number} instead of 10" in done.stdout
    assert "official package checker 2.1.0: FAILED" in done.stdout


@pytest.mark.parametrize("content", [None, "{", "[]", "null", "\ufeff{}", '{"a":' * 900, "[" * 100_000])
def test_a_bad_system_description_is_one_finding(copy, content):
    root, _ = copy
    path = root / "systems" / f"{BERT[1]}.json"
    path.unlink() if content is None else path.write_text(content, encoding="utf-8")
    done = ttt("check", root, "--no-official")
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.count("Y601 error") + done.stdout.count("Y602 error") == 1


def test_an_archive_is_audited_like_its_folder(copy, tmp_path):
    root, _ = copy
    with tarfile.open(tmp_path / "package.tar.gz", "w:gz") as archive:
        for name in ("results", "systems"):
            archive.add(root / name, name)
    done = ttt("check", "package.tar.gz", "--no-official", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"package.tar.gz:results/{BERT[1]}/bert: 10 logs; rules: 0 errors")


def hostile(name, **fields):
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    return member


@pytest.mark.parametrize(
    "member",
    [
        hostile("../result_0.txt"),
        hostile("/tmp/result_0.txt"),
        hostile("results/a/bert/result_0.txt", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        hostile("results/a/bert/result_0.txt", type=tarfile.LNKTYPE, linkname="results/b"),
        hostile("results/a/bert/result_0.txt", type=tarfile.CHRTYPE),
        hostile(f"results/{BERT[1]}/bert/result_0.txt"),  # a second time
        hostile("result_0.txt/result_1.txt"),  # below a file
    ],
    ids=lambda member: f"{member.name}-{member.type.decode()}",
)
def test_a_hostile_member_is_refused_by_name(copy, tmp_path, member):
    root, folder = copy
    path = tmp_path / "package.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root / "results", "results")
        archive.add(folder / "result_0.txt", "result_0.txt")
        archive.addfile(member)
    done = ttt("check", path, "--no-official")
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.count("A001 error") == 1


@pytest.mark.parametrize("content", [b"", b"not an archive", b"\x1f\x8b\x08\x00damaged"])
def test_a_broken_archive_is_one_line_and_exit_2(tmp_path, content):
    (tmp_path / "package.tar.gz").write_bytes(content)
    done = ttt("check", "package.tar.gz", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_the_ruleset_follows_benchmark_and_date(golden, published, tmp_path):
    golden.write(tmp_path, golden.set(num_logs=1))
    sets = load([published, tmp_path])
    inferred = sorted(official.rulesets(found) for found in sets)
    assert inferred == [("2.0.0",), ("2.0.0", "2.1.0"), ("2.1.0",)]
    resnet = [found for found in sets if found.lead.benchmark == "resnet"]
    assert [official.rulesets(found, "4.1.0") for found in resnet] == [(), ()]


def test_rules_are_listed_with_severity_and_section():
    done = ttt("check", "--rules")
    assert done.returncode == 0
    assert "S402 error    No run stands in a set twice" in done.stdout


def test_json_has_every_finding(copy):
    root, folder = copy
    change(folder, edit("run_stop", status="done"))
    done = ttt("check", root, "--no-official", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["ok"] is False
    assert Counter(finding["rule"] for finding in found["sets"][0]["findings"])["Q312"] == 10
