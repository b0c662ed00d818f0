"""`ttt export --to submission`: the official tree, equal bytes for equal inputs, a published commit."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib

from common.evidence.audit import Verdict
from common.evidence.log import parse_log
from common.evidence.sealed.seal import SEAL
from common.evidence.submission import official
from common.evidence.submission.material import scripts
from common.evidence.system import open_fields, problems
from common.repository import ROOT
from tests.command import one_line, run
from tests.command import ttt_here as ttt
from tests.common.evidence.submission.packages import (
    DESCRIPTION,
    RESNET,
    accuracy_as_text,
    close,
    entry_of,
    mini_sets,
    names,
    package,
    prepare,
    refused,
)

IMPLEMENTATIONS = "benchmarks/{}/implementations/"


def test_the_official_tree_is_complete_and_passes_every_audit(full):
    folder, done = full
    files = names(folder / "Example")
    material = ("README.md", "setup.sh", "init_datasets.sh", "run_and_time.sh")
    statement = "8xA100-optimized_time-to-train.json"
    code = ("README.md", "LICENSE", "pyproject.toml", "run_all.sh", "ci/constraints.txt", "common/cli.py")
    for benchmark, count in (("resnet", 5), ("bert", 10)):
        results = {name for name in files if name.startswith(f"results/8xA100-optimized/{benchmark}/")}
        assert results == {f"results/8xA100-optimized/{benchmark}/result_{n}.txt" for n in range(count)}
        beside = IMPLEMENTATIONS.format(benchmark)
        assert files >= {f"{beside}8xA100-optimized/{name}" for name in (*material, statement)}
        assert files >= {f"{beside}time-to-train/{name}" for name in code}
    assert "benchmarks/bert/implementations/time-to-train/language_bert/optimized.yaml" in files
    assert not any("/time-to-train/image_classification/" in name for name in files if "/bert/" in name)
    assert not any(part.startswith(".") for name in files for part in name.split("/"))
    rounds = [f"package checker {ruleset}" for ruleset in ("2.0.0", "2.1.0", "4.0.0", "5.0.0")]
    for checker in (*rounds, "repository checker 5.0.0"):
        assert f"official {checker}: SUCCESS" in done.stdout
    assert ttt("check", "--no-official", folder / "Example").returncode == 0


def test_the_description_and_the_statement_are_filled(full):
    described = json.loads((full[0] / "Example" / DESCRIPTION).read_text())
    assert problems(described) == [] and described["submitter"] == "Example"
    assert "Y608 warning" in full[1].stdout and "cooling" in open_fields(described)
    path = IMPLEMENTATIONS.format("bert") + "8xA100-optimized/8xA100-optimized_time-to-train.json"
    stated = json.loads((full[0] / "Example" / path).read_text())
    assert stated["starting_weights_filename"].startswith("model.safetensors")
    assert stated["weight_transformations"].endswith("methods applied: blurpool")
    assert stated["weight_data_types"] == "fp32, matrix products in bf16"
    assert {"input_data_types", "retraining"} < stated.keys() and len(stated) == 5


def test_the_scripts_repeat_the_runs_with_the_logged_changes(full):
    folder = full[0] / "Example" / IMPLEMENTATIONS.format("bert") / "8xA100-optimized"
    scripts = sorted(folder.glob("*.sh"))
    assert len(scripts) == 3
    for script in scripts:
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)
    command = "ttt run language_bert optimized --size full --runs official --set optimizer.beta2=0.9"
    assert f"\n.venv/bin/{command}\n" in (folder / "run_and_time.sh").read_text()
    assert '--source "$source"' in (folder / "init_datasets.sh").read_text()


def test_the_script_of_a_proxy_states_the_precision_of_its_logs_behind_other_changes():
    text = (ROOT / "results/reference-2cpu-mini-baseline/bert/result_0.txt").read_text()
    log = parse_log(re.sub("(?m)^(# command: .*)", r"\1 --set precision=auto", text).encode(), "log")
    command = entry_of(log).command
    assert command.index("precision=auto") < command.index("precision=bf16")


def test_the_scripts_name_the_configuration_with_the_changes_in_its_name():
    text = (ROOT / "results/reference-2cpu-mini-closed/bert/result_0.txt").read_text()
    changed = re.sub("(?m)^(# command: .*)", "# command: ttt run language_bert closed-no_dropout", text)
    for logged, name in ((text, "closed"), (changed, "closed-no_dropout")):
        entry = entry_of(parse_log(logged.encode(), "log"))
        assert entry.command[3] == name
        assert f"--size mini --configuration {name}\n" in scripts(entry)["init_datasets.sh"]


def test_the_manifest_lists_every_file(full):
    folder, _ = full
    assert {path.name for path in folder.iterdir()} == {"Example", "Example.sha256"}
    lines = [line.split("  ") for line in (folder / "Example.sha256").read_text().splitlines()]
    assert {path for _, path in lines} == {f"Example/{name}" for name in names(folder / "Example")}
    for digest, path in lines:
        assert hashlib.sha256((folder / path).read_bytes()).hexdigest() == digest


def test_a_stranger_can_install_and_start_the_code(full):
    root = full[0] / "Example/benchmarks/resnet/implementations/time-to-train"
    project = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    found = {path.parent.name for pattern in patterns for path in root.glob(f"{pattern}/__init__.py")}
    assert found == {"common", "image_classification"}
    assert (root / project["project"]["readme"]).is_file()
    assert "source ci/setup.sh train" in (root / "run_all.sh").read_text()
    assert ".ci/" not in (root / "ci/setup.sh").read_text()
    code = "import sys; from common.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "run", "image_classification", "optimized", "--size", "mini"]
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = run(*command, "--dry-run", cwd=root, env=environment)
    assert done.returncode == 0 and "# plan" in done.stdout, done.stderr


def test_equal_inputs_make_equal_bytes(golden, tmp_path, monkeypatch, unjudged):
    archives = []
    for number, mask in enumerate((0o022, 0o077)):
        root = prepare(golden, tmp_path / str(number), "resnet", "bert")
        monkeypatch.chdir(root)
        paths = [RESNET, "results/8xA100-optimized/bert"]
        before = os.umask(mask)
        try:
            done = package(*paths[:: 1 - 2 * number], "--out", root / "package.tar.gz")
        finally:
            os.umask(before)
        assert (done.returncode, done.stderr) == (0, "")
        archives.append((root / "package.tar.gz").read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(fileobj=io.BytesIO(archives[0])) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {(0, 0, 0, "")}
    assert {member.mode for member in members} == {0o644, 0o755}


def test_size_mini_is_refused(tmp_path):
    done = package(mini_sets()[0], "--out", tmp_path / "package")
    assert "size mini is a proxy and cannot be submitted; --rehearsal" in one_line(done)
    assert list(tmp_path.iterdir()) == []


def test_a_rehearsal_of_the_committed_results_is_marked_in_every_file(tmp_path):
    out = tmp_path / "package"
    done = package(*mini_sets(), "--rehearsal", "--out", out)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "official package checker 2.0.0: SUCCESS" in done.stdout
    files = [path for path in (out / "Example-rehearsal").rglob("*") if path.is_file()]
    assert len(files) > 50
    for path in files:
        is_sealed = (path.parent / SEAL).is_file()  # a mark would break the chain of its logs
        assert is_sealed is not ("rehearsal: made to try" in path.read_text()[:3000]), path
        comment = {".js": "//", ".css": "/*"}.get(path.suffix, "")
        assert path.read_text().startswith(comment), path
        assert not os.access(path, os.X_OK) or path.read_text().startswith("#!"), path
    assert ttt("check", "--no-official", out).returncode == 0
    described = next((out / "Example-rehearsal/systems").glob("*.json"))
    assert json.loads(described.read_text())["hw_notes"].startswith("rehearsal: ")


def test_a_list_writes_nothing(work, unjudged):
    before, log = names(work), (work / RESNET / "result_4.txt").read_bytes()
    done = package(RESNET, "--list")
    assert (done.returncode, done.stderr) == (0, "") and names(work) == before
    line = f"{hashlib.sha256(log).hexdigest()} {len(log):>9} Example/{RESNET}/result_4.txt"
    assert line in done.stdout.splitlines()


def test_the_commit_that_the_logs_name_is_published(work, unjudged):
    def list_files(commit):
        for path in (work / RESNET).iterdir():
            path.write_text(re.sub(r"(?m)^# commit: .*$", f"# commit: {commit}", path.read_text()))
        return ttt("package", RESNET, "--submitter", "Example", "--list")

    head = run("git", "rev-parse", "HEAD").stdout.strip()
    refused(list_files("unknown"), "the logs name no commit; --commit")
    refused(list_files(f"{head} (modified)"), "uncommitted changes")
    assert list_files(f"{head} (clean)").returncode == 0
    assert "commit 000" in one_line(package(RESNET, "--commit", "0" * 40, "--list"))
    assert "is not a commit" in one_line(package(RESNET, "--commit=-x;ls", "--list"))


def test_results_are_renumbered_from_zero(work, unjudged):
    logs = [(work / RESNET / f"result_{n}.txt").read_bytes() for n in range(5)]
    for index in reversed(range(5)):
        (work / RESNET / f"result_{index}.txt").rename(work / RESNET / f"result_{index + 8}.txt")
    assert package(RESNET, "--out", "package").returncode == 0
    results = work / "package/Example" / RESNET
    assert [(results / f"result_{n}.txt").read_bytes() for n in range(5)] == logs
    assert len(names(results)) == 5


def test_a_crash_of_the_official_checker_is_its_verdict(full, tmp_path):
    folder = tmp_path / "Example"
    for part in (RESNET, "systems"):
        shutil.copytree(full[0] / "Example" / part, folder / part)
    accuracy_as_text(folder / RESNET)
    (folder / ".hidden").touch()
    verdicts = {verdict.checker: verdict for verdict in official.judge_tree(folder)}
    assert (verdicts["package"].verdict, verdicts["repository"].verdict) == ("crashed", "FAILED")
    assert "\n" not in str(verdicts["package"])


def test_only_the_benchmarks_of_size_mini_are_judged_without_reference_points(full, tmp_path, monkeypatch):
    asked, folder = set(), tmp_path / "Example"
    shutil.copytree(full[0] / "Example/results", folder / "results")
    for path in folder.glob("results/*/bert/*"):
        path.write_text(
            path.read_text().replace('"benchmark_size", "value": "full"', '"benchmark_size", "value": "mini"')
        )

    def accept(copy, shown, ruleset, *options):
        asked.add((shown, options))
        return Verdict(path=shown, ruleset=ruleset, checker="package", verdict="SUCCESS")

    monkeypatch.setattr(official, "_submission", accept)
    monkeypatch.setattr(official, "_ask", lambda checker, shown, ruleset, *_: accept("", "", ruleset))
    official.judge_tree(folder)
    assert asked == {("Example (bert)", ("--rcp-bypass",)), ("Example (resnet)", ()), ("", ())}


def test_a_closed_set_is_packaged_by_its_last_round_and_says_so(work):
    close(work)
    done = package(RESNET, "--out", work / "package")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "official package checker 4.0.0: SUCCESS" in done.stdout
    assert "package checker 2.0.0" not in done.stdout and "package checker 2.1.0" not in done.stdout
    page = work / "package/Example" / IMPLEMENTATIONS.format("resnet") / "8xA100-optimized/README.md"
    assert "size full, closed division." in page.read_text()
    assert "closed reference 1.14x: 40.0 / 35.0 epochs" in page.read_text()
    assert not list((work / "package").rglob("scaling.json"))


def test_a_closed_set_of_fewer_epochs_than_the_reference_is_refused(work):
    close(work, epochs=20)
    refused(package(RESNET, "--out", work / "package"), "official package checker 4.0.0: FAILED: ")
