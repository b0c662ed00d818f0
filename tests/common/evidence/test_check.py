"""`ttt check` of good, broken and packed results, and of the genuine published logs."""

import json
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from common.evidence.audit import audit_paths
from common.evidence.log import load
from common.evidence.rules import RULES
from common.evidence.score import score
from common.evidence.submission import official
from tests.command import ttt, ttt_here
from tests.common.evidence.sealed.sealed_sets import numbered, seal_logs, write_files

BERT = Path("v2.1", "8xA100_80GB-methods", "bert")
FOLDER = "results/8xA100-optimized/resnet"


@pytest.fixture
def work(golden, tmp_path, monkeypatch):
    """A working folder with good results and their system's description."""
    monkeypatch.chdir(tmp_path)
    golden.write(Path("results"), golden.set())
    golden.describe(Path("systems"))
    return tmp_path


def test_a_finding_names_file_line_rule_and_section_and_exits_1(work):
    for number in (0, 1):
        path = Path(FOLDER, f"result_{number}.txt")
        path.write_text(
            path.read_text().replace('"eval_samples", "value": 50000', '"eval_samples", "value": 6400')
        )
    done = ttt_here("check", "--no-official", "results")
    first = done.stdout.splitlines()[0]
    assert done.returncode == 1 and first.startswith(f"{FOLDER}/result_0.txt:40: K108 error ")
    assert "(rules: Training and Test Sets); 1 more" in first
    report = json.loads(ttt_here("check", "results", "--no-official", "--json").stdout)
    assert report["ok"] is False and "seal" not in report["sets"][0]
    assert Counter(finding["rule"] for finding in report["sets"][0]["findings"]) == {"K108": 2, "S405": 3}


def sealed_results(golden, change=lambda files: files):
    shutil.rmtree(FOLDER)
    return write_files(change(seal_logs(numbered(golden.set()))), Path(FOLDER))


SEALED = {  # a change of a sealed set: exit code, what it is called, a line about it
    "": (0, "sealed", "8xA100"),
    "C915": (0, "sealed", "C915 warning"),  # as on an honest machine whose clock was set
    "C916": (0, "sealed, extended after 4 runs", "C916 warning"),
    "C917": (0, "sealed, 1 not sealed", f"{FOLDER}/result_4.txt: C917 warning found: result_4.txt lay here"),
    "C918": (0, "sealed, 1 never ended", f"{FOLDER}/runs.jsonl:9: C918 warning found: no line ends result_4"),
    "C919": (0, "sealed, 1 not started", "C919 warning"),
    "C909": (1, "its seal is broken", "C909 error"),
    "C902": (0, None, "C902 warning"),
}


@pytest.mark.parametrize("rule", SEALED)
def test_a_sealed_set_is_called_sealed_and_what_is_not_is_said(work, golden, rule):
    code, words, line = SEALED[rule]
    sealed_results(golden, *(about.breaks for about in RULES if about.id == rule))
    done = ttt_here("check", "results", "--no-official")
    report = json.loads(ttt_here("check", "results", "--no-official", "--json").stdout)
    assert (done.returncode, report["sets"][0].get("seal")) == (code, words) and line in done.stdout
    assert f"{FOLDER}: 5 logs; {words}; rules: " in done.stdout or words is None


@pytest.mark.parametrize(
    ("name", "place", "text"),
    [
        ("result_2.txt", "result_2.txt:17: C901", "changed, added or removed"),
        ("runs.jsonl", "runs.jsonl:2: C904", "line 1 was changed after this line was written"),
        ("runset.json", "runs.jsonl:1: C904", "runset.json was changed"),
    ],
)
def test_an_edit_is_named_with_file_and_line(work, golden, name, place, text):
    path = sealed_results(golden) / name
    path.write_text(path.read_text().replace("0123abc", "0123abd").replace("1000,", "1007,"))
    done = ttt_here("check", "results", "--no-official")
    (line,) = [line for line in done.stdout.splitlines() if f"{FOLDER}/{place} error" in line]
    assert done.returncode == 1 and text in line


def test_a_sealed_set_stays_sealed_in_an_archive_and_when_one_log_is_named(work, golden):
    folder = sealed_results(golden)
    with tarfile.open("packed.tar.gz", "w:gz") as archive:
        archive.add("results")
        archive.add("systems")
    for path in ("packed.tar.gz", folder / "result_3.txt"):
        done = ttt_here("check", path, "--no-official")
        assert done.returncode == 0 and "; sealed; " in done.stdout, done.stdout


@pytest.mark.parametrize("verb", ["check", "score", "report"])
def test_a_missing_path_is_one_line_and_exit_2(verb):
    done = ttt_here(verb, "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: nowhere: no such file or folder\n"


def test_the_official_checkers_refusal_is_shown_as_its_own(golden, tmp_path):
    golden.write(tmp_path, [[line for line in golden.log("bert") if '"key": "eval_samples"' not in line]])
    done = ttt_here("check", tmp_path)
    assert done.returncode == 1
    assert "official compliance checker 2.1.0: FAILED" in done.stdout
    assert "official checkers: compliance 2.1.0: FAILED" in done.stdout


def test_published_sets_have_their_score_no_error_and_each_irregularity_once(published):
    entries = audit_paths([published])
    assert [score(entry.run_set).minutes for entry in entries] == pytest.approx([23.7885, 7.896], abs=1e-3)
    assert all(entry.passes for entry in entries)
    warnings = [line for entry in entries for line in entry.lines() if " warning " in line]
    named = Counter(line.split(": ")[1].split()[0] for line in warnings)
    both = {"K110": 2, "K111": 2, "K112": 2, "Y603": 2}  # open blocks, epochs from 0, no interval, fields
    assert named == both | {"K108": 1, "T212": 1, "S409": 1}  # 1,281,168 images; no initialization; 435,181
    assert "fractions of 435181, not 428235" in "".join(warnings)


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


@pytest.mark.slow
@pytest.mark.parametrize("number", [9, 11])
def test_a_wrong_number_of_runs_is_named_by_both(published, tmp_path, number):
    folder = tmp_path / "results" / BERT.relative_to("v2.1")
    shutil.copytree(published / BERT, folder)
    shutil.copytree(published / "v2.1" / "systems", tmp_path / "systems")
    path = folder / "result_9.txt"
    path.unlink() if number == 9 else shutil.copy(path, folder / "result_10.txt")
    done = ttt("check", tmp_path)
    assert done.returncode == 1
    assert f"S406 warning found: {number} runs instead of 10; rule: A set has 5 runs (resnet)" in done.stdout
    assert "official package checker 2.1.0: FAILED" in done.stdout


def test_the_ruleset_follows_benchmark_and_date(golden, published, tmp_path):
    golden.write(tmp_path, golden.set(num_logs=1))
    sets = load([published, tmp_path])
    inferred = sorted(official.rulesets(run_set) for run_set in sets)
    assert inferred == [("2.0.0",), ("2.0.0", "2.1.0", "4.0.0"), ("2.1.0",)]
    resnet = [run_set for run_set in sets if run_set.lead.benchmark == "resnet"]
    assert [official.rulesets(run_set, "4.1.0") for run_set in resnet] == [(), ()]


@pytest.mark.parametrize("content", [None, "{", "[]", "null", "\ufeff{}", '{"a":' * 900, "[" * 100_000])
def test_a_bad_system_description_is_one_finding(work, content):
    path = Path("systems", "8xA100-optimized.json")
    path.unlink() if content is None else path.write_text(content, encoding="utf-8")
    done = ttt_here("check", "results", "--no-official")
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.count("Y601 error") + done.stdout.count("Y602 error") == 1


def hostile(name, **fields):
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    return member


@pytest.mark.parametrize(
    "member",
    [
        None,
        hostile("../result_0.txt"),
        hostile("/tmp/result_0.txt"),
        hostile("results/a/bert/result_0.txt", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        hostile("results/a/bert/result_0.txt", type=tarfile.LNKTYPE, linkname="results/b"),
        hostile("results/a/bert/result_0.txt", type=tarfile.CHRTYPE),
        hostile(f"{FOLDER}/result_0.txt"),  # a second time
        hostile(f"{FOLDER}/result_1.txt/result_2.txt"),  # below a file
    ],
    ids=lambda member: member and f"{member.name}-{member.type.decode()}",
)
def test_an_archive_is_audited_like_its_folder_and_a_hostile_member_refused(work, member):
    with tarfile.open("package.tar.gz", "w:gz") as archive:
        for name in ("results", "systems"):
            archive.add(name)
        if member:
            archive.addfile(member)
    done = ttt_here("check", "package.tar.gz", "--no-official")
    assert (done.returncode, done.stderr) == (int(bool(member)), "")
    assert done.stdout.count("A001 error") == done.returncode
    assert f"package.tar.gz:{FOLDER}: 5 logs; rules: 0 errors" in done.stdout
