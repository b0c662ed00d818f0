"""`ttt package`: the official tree, what it refuses, and that nothing is ever written by halves."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from common.evidence.submission import official
from common.evidence.system import problems
from common.repository import ROOT
from tests.command import ttt_here as ttt

RESNET = "results/8xA100-optimized/resnet"
HOME = "/".join(("", "home", "jane", "run"))  # the rules of the house want no such path in a file
READY = json.loads((ROOT / "systems/8xA100-SXM4-80GB.json").read_text())


def package(*arguments):
    return ttt("package", "--submitter", "Example", "--commit", "HEAD", *arguments)


def refused(done, message):
    """Assert findings, exit code 1, and no traceback."""
    assert (done.returncode, done.stderr) == (1, ""), done
    assert message in done.stdout, done.stdout
    assert done.stdout.splitlines()[-1].endswith("nothing was written")


def mistaken(done, message):
    """Assert one line and exit code 2."""
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line, line


def later(line, hours):
    """Return a log line with its time, if it has one, moved."""
    return re.sub(r'(?<="time_ms": )\d+', lambda time: str(int(time.group()) + hours * 3_600_000), line)


def prepare(golden, root, *benchmarks, **kwargs):
    """Write full run sets as this suite logs them, and their system."""
    folders = {"resnet": "image_classification", "bert": "language_bert"}
    for benchmark in benchmarks:
        logs = [
            [
                later(line, 0 if benchmark == "resnet" else 100)
                .replace(f"# benchmark: {benchmark}", f"# benchmark: {folders[benchmark]}")
                .replace("# command: ttt run", "# command: ttt run x optimized --set optimizer.beta2=0.9")
                .replace(
                    "#   optimizer:", "#   precision: bf16\n#   model: {start: checkpoint}\n#   optimizer:"
                )
                for line in lines
            ]
            for lines in golden.set(benchmark, **kwargs)
        ]
        golden.write(root / "results", logs)
    (root / "systems").mkdir()
    described = READY | {"system_name": "8xA100-optimized", "submitter": "Example"}
    (root / "systems/8xA100-optimized.json").write_text(json.dumps(described))
    return root


@pytest.fixture
def work(golden, tmp_path, monkeypatch):
    """A working folder with a full run set of resnet."""
    monkeypatch.chdir(prepare(golden, tmp_path, "resnet"))
    return tmp_path


@pytest.fixture
def unjudged(monkeypatch):
    """Leave out the official checkers, which take seconds, where a test is about something else."""
    monkeypatch.setattr(official, "judge_tree", lambda folder, benchmarks: [])


@pytest.fixture(scope="module")
def full(golden, tmp_path_factory):
    """A package of both benchmarks, written by the real thing."""
    root = prepare(golden, tmp_path_factory.mktemp("full"), "resnet", "bert")
    done = package(root / "results", "--out", root / "package")
    assert (done.returncode, done.stderr) == (0, ""), done
    return root / "package", done


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_official_tree_is_complete(full):
    folder, done = full
    found = names(folder / "Example")
    for benchmark, count in (("resnet", 5), ("bert", 10)):
        results = {name for name in found if name.startswith(f"results/8xA100-optimized/{benchmark}/")}
        assert results == {f"results/8xA100-optimized/{benchmark}/result_{n}.txt" for n in range(count)}
        beside = f"benchmarks/{benchmark}/implementations"
        material = ("README.md", "setup.sh", "init_datasets.sh", "run_and_time.sh")
        statement = "8xA100-optimized_time-to-train.json"
        assert found >= {f"{beside}/8xA100-optimized/{name}" for name in (*material, statement)}
        code = ("README.md", "LICENSE", "pyproject.toml", "run_all.sh", "ci/constraints.txt", "common/cli.py")
        assert found >= {f"{beside}/time-to-train/{name}" for name in code}
    assert "benchmarks/bert/implementations/time-to-train/language_bert/optimized.yaml" in found
    assert not any("/time-to-train/image_classification/" in name for name in found if "/bert/" in name)
    assert not any(part.startswith(".") for name in found for part in name.split("/"))
    assert "official package checker 2.0.0: SUCCESS" in done.stdout
    assert "official package checker 2.1.0: SUCCESS" in done.stdout
    assert "official repository checker 2.1.0: SUCCESS" in done.stdout


def test_the_package_passes_our_own_audit(full):
    done = ttt("check", "--no-official", full[0] / "Example")
    assert done.returncode == 0, done.stdout


def test_every_field_of_the_system_is_filled(full):
    described = json.loads((full[0] / "Example/systems/8xA100-optimized.json").read_text())
    assert problems(described) == [] and described["submitter"] == "Example"


def test_the_statement_says_what_the_runs_started_from(full):
    path = "benchmarks/{0}/implementations/8xA100-optimized/8xA100-optimized_time-to-train.json"
    bert = json.loads((full[0] / "Example" / path.format("bert")).read_text())
    assert list(bert) == [
        "starting_weights_filename",
        "weight_transformations",
        "weight_data_types",
        "input_data_types",
        "retraining",
    ]
    assert bert["starting_weights_filename"].startswith("model.safetensors")
    assert bert["weight_transformations"].endswith("methods applied: blurpool")
    assert bert["weight_data_types"] == "fp32, matrix products in bf16"


def test_the_scripts_repeat_the_runs_with_the_logged_changes(full):
    folder = full[0] / "Example/benchmarks/bert/implementations/8xA100-optimized"
    scripts = sorted(folder.glob("*.sh"))
    assert len(scripts) == 3
    for script in scripts:
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)
    command = "ttt run language_bert optimized --size full --runs official --set optimizer.beta2=0.9"
    assert f"\n.venv/bin/{command}\n" in (folder / "run_and_time.sh").read_text()
    assert '--source "$source"' in (folder / "init_datasets.sh").read_text()


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
    done = subprocess.run(
        [*command, "--dry-run"], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
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


def mini_sets():
    return sorted(ROOT.glob("results/reference-2cpu-mini-*/resnet"))  # not those of whoever runs the tests


def test_size_mini_is_refused(tmp_path):
    done = package(mini_sets()[0], "--out", tmp_path / "package")
    mistaken(done, "size mini is a proxy and cannot be submitted; --rehearsal")
    assert list(tmp_path.iterdir()) == []


def test_a_rehearsal_of_the_committed_results_is_marked_in_every_file(tmp_path):
    out = tmp_path / "package"
    done = package(*mini_sets(), "--rehearsal", "--out", out)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "official package checker 2.0.0: SUCCESS" in done.stdout
    files = [path for path in (out / "Example-rehearsal").rglob("*") if path.is_file()]
    assert len(files) > 50
    for path in files:
        assert "rehearsal: made to try" in path.read_text()[:3000], path
        assert not os.access(path, os.X_OK) or path.read_text().startswith("#!"), path
    assert ttt("check", "--no-official", out).returncode == 0
    described = next((out / "Example-rehearsal/systems").glob("*.json"))
    assert json.loads(described.read_text())["hw_notes"].startswith("rehearsal: ")


def test_a_list_writes_nothing(work, unjudged):
    before = names(work)
    done = package(RESNET, "--list")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()[:-1]]
    (listed,) = [line for line in lines if line[2] == f"Example/{RESNET}/result_4.txt"]
    log = (work / RESNET / "result_4.txt").read_bytes()
    assert listed[:2] == [hashlib.sha256(log).hexdigest(), str(len(log))]
    assert names(work) == before


def test_the_commit_that_the_logs_name_is_published(work, unjudged):
    def listed(state):
        for path in (work / RESNET).iterdir():
            path.write_text(re.sub(r"(?m)^# commit: .*$", f"# commit: {head} ({state})", path.read_text()))
        return ttt("package", RESNET, "--submitter", "Example", "--list")

    git = ["git", "-C", ROOT, "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    refused(ttt("package", RESNET, "--submitter", "Example", "--list"), "the logs name no commit; --commit")
    refused(listed("modified"), "uncommitted changes")
    assert listed("clean").returncode == 0
    mistaken(package(RESNET, "--commit", "0" * 40, "--list"), "commit 000")
    mistaken(package(RESNET, "--commit=-x;ls", "--list"), "is not a commit")


def test_results_are_renumbered_from_zero(work, unjudged):
    for index in reversed(range(5)):
        (work / RESNET / f"result_{index}.txt").rename(work / RESNET / f"result_{index + 8}.txt")
    last = (work / RESNET / "result_12.txt").read_bytes()
    assert package(RESNET, "--out", "package").returncode == 0
    results = work / "package/Example" / RESNET
    assert names(results) == {f"result_{n}.txt" for n in range(5)}
    assert (results / "result_4.txt").read_bytes() == last


def four(folder):
    (folder / "result_4.txt").unlink()


def six(folder):
    (folder / "result_5.txt").write_text((folder / "result_4.txt").read_text().replace("1004", "1005"))


def link(folder):
    four(folder)
    (folder / "result_4.txt").symlink_to("/etc/hostname")


def linked_folder(folder):
    moved = folder.parent.parent.parent / "elsewhere"
    folder.rename(moved)
    folder.symlink_to(moved)


def directory(folder):
    four(folder)
    (folder / "result_4.txt").mkdir()


def pipe(folder):
    four(folder)
    os.mkfifo(folder / "result_4.txt")


def scaling(folder):
    (folder / "scaling.json").write_text('{"scaling_factor": 0.5}')


def odd_name(folder):
    (folder / "result_4.txt").rename(folder / "result_ 4\n.txt")


def accuracy_as_text(folder):
    path = folder / "result_2.txt"
    found = r'("key": "eval_accuracy", "value": )([0-9.]+)'
    path.write_text(re.sub(found, r'\1"\2"', path.read_text()))


def binary(folder):
    (folder / "result_3.txt").write_bytes(b"\0\xff" * 100)


def two_missed(folder):
    for index in (0, 1):
        path = folder / f"result_{index}.txt"
        path.write_text(path.read_text().replace('"status": "success"', '"status": "aborted"'))


def another_org(folder):
    for path in folder.iterdir():
        path.write_text(path.read_text().replace('"value": "Example"', '"value": "Other"'))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (four, "resnet: 4 runs, and resnet has exactly 5"),
        (six, "resnet: 6 runs, and resnet has exactly 5"),
        (link, "resnet/result_4.txt: is not one of the results"),
        (linked_folder, "is reached through a link"),
        (directory, "resnet/result_4.txt: is not one of the results"),
        (pipe, "resnet/result_4.txt: is not one of the results"),
        (scaling, "resnet/scaling.json: is not one of the results"),
        (odd_name, "result_ 4?.txt: is not one of the results"),
        (accuracy_as_text, "result_2.txt"),
        (binary, "result_3.txt: P0"),
        (two_missed, "resnet: 2 runs missed the target"),
        (another_org, "name the submitter 'Other', not 'Example'"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_run_set_that_cannot_be_published_is_refused(work, change, message):
    change(work / RESNET)
    refused(package(RESNET, "--out", "package"), message)
    assert not (work / "package").exists()


def secret(*parts):
    """Join at run time, so that no scanner takes this file for a leak."""
    return "".join(parts)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (secret("-----BEGIN RSA ", "PRIVATE KEY-----"), "private key"),
        (secret("AKIA", "ABCDEFGHIJKLMNOP"), "AWS access key"),
        (secret("aws_secret_access_key", " = ", "a1B2" * 10), "AWS secret key"),
        (secret("AIza", "x" * 35), "Google API key"),
        (secret("DefaultEndpointsProtocol;AccountKey", "=", "Ab1/" * 20), "Azure storage key"),
        (secret("hf", "_", "aB3" * 12), "Hugging Face token"),
        (secret("WANDB_API_KEY", "=", "0123456789" * 4), "Weights & Biases key"),
        (secret("gh", "p_", "aB3" * 12), "GitHub token"),
        (secret("github", "_pat_", "aB3" * 12), "GitHub token"),
        ("https://jane:hunter22@registry.example/simple", "URL with a login"),
        ("https://token123@github.com/x/y", "URL with a login"),
        ("/nfs/jane.doe@example.com/x", "e-mail address"),
        ("saved to " + HOME, "home folder"),
        ("C:\\Users\\jane", "home folder"),
        ("saved to /scratch/run", "absolute path"),
        ("rank 3 at 10.12.0.7", "IP address"),
        ("rank 3 at gpu-17.cluster", "host name"),
        ('{"hostname": "gpu17"}', "host name"),
        ("USER=jane", "user name"),
        ("SUBMISSION_PLATFORM_" + "PLACEHOLDER", "placeholder"),
        ("x" * 30_000, "line too long"),
    ],
    ids=lambda value: "",
)
def test_a_secret_in_a_log_is_named_by_line_and_kind_and_never_shown(work, text, kind):
    path = work / RESNET / "result_2.txt"
    before = path.read_text()
    path.write_text(before + f"note {text} end\n")
    done = package(RESNET, "--out", "package")
    refused(done, f"{RESNET}/result_2.txt:{before.count(chr(10)) + 1}: {kind}")
    assert text not in done.stdout and not (work / "package").exists()


def test_secrets_in_a_description_and_in_the_configuration_are_found(work):
    path = work / "systems/8xA100-optimized.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sw_notes": HOME}, indent=1))
    refused(package(RESNET, "--list"), "systems/8xA100-optimized.json:34: home folder")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"framework": ["PyTorch"]}, "framework: must be text, found list"),
        ({"host_networking": ""}, "host_networking: empty"),
        ({"cooling": "TBD"}, "cooling: holds a placeholder"),
        ({"division": "closed"}, "division is closed"),
        ({"status": "Preview"}, "status is Preview"),
        ({"submitter": "Other"}, "submitter is Other"),
        ({"system_name": "other"}, "other for 8xA100-optimized"),
    ],
)
def test_a_description_that_disagrees_is_refused(work, changes, message):
    path = work / "systems/8xA100-optimized.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(package(RESNET, "--list"), message)


def test_a_missing_description_names_the_command_that_makes_one(work):
    (work / "systems/8xA100-optimized.json").unlink()
    refused(package(RESNET, "--list"), "`ttt system --out 8xA100-optimized.json` makes one")


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_an_existing_output_stays(work, kind):
    out = work / "package"
    {"file": out.touch, "folder": out.mkdir, "dangling": lambda: out.symlink_to("nowhere")}[kind]()
    mistaken(package(RESNET, "--out", out), "never overwrites")
    assert out.is_symlink() or out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "/proc/package"], "cannot write here"),
        (["--out", "no/such/folder"], "its folder does not exist"),
        (["--out", "package.zip"], "name it NAME.tar.gz"),
        ([], "--out FOLDER_OR_TAR"),
        (["--list", "--out", "package"], "--out FOLDER_OR_TAR"),
        (["--list", "--submitter", "../Example"], "--submitter"),
        (["--list", "--submitter", ".hidden"], "--submitter"),
        (["--list", "--submitter", "a b"], "--submitter"),
        (["--list", "--implementation", "x/../y"], "--implementation"),
        (["nowhere", "--list"], "nowhere: no such file"),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line(work, unjudged, arguments, message):
    before = names(work)
    mistaken(package(RESNET, *arguments), message)
    assert names(work) == before


@pytest.mark.parametrize("name", ["package", "package.tar.gz"])
def test_a_full_disk_leaves_nothing_behind(work, unjudged, monkeypatch, name):
    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    before = sorted(work.iterdir())
    monkeypatch.setattr("common.evidence.submission.package.os.replace", full_disk)
    mistaken(package(RESNET, "--out", name), "No space left on device")
    assert sorted(work.iterdir()) == before


def test_a_crash_of_the_official_checker_is_its_verdict(full, tmp_path):
    folder = tmp_path / "Example"
    log = folder / RESNET / "result_0.txt"
    log.parent.mkdir(parents=True)
    source = full[0] / "Example" / RESNET
    for path in source.iterdir():
        (log.parent / path.name).write_bytes(path.read_bytes())
    accuracy_as_text(log.parent)
    (folder / "systems").mkdir()
    (folder / "systems/8xA100-optimized.json").write_text(json.dumps(READY))
    (folder / ".hidden").touch()
    verdicts = {verdict.checker: verdict for verdict in official.judge_tree(folder, ["resnet"])}
    assert verdicts["package"].verdict == "crashed"
    assert verdicts["repository"].verdict == "FAILED"
    assert "\n" not in str(verdicts["package"])


def test_logs_of_another_suite_are_refused(published):
    paths = [published / "v2.0/8xA100_80GB-methods/resnet"]
    refused(package(*paths, "--list"), "result_0.txt: not a log of this suite")


def test_run_sets_that_were_timed_at_once_are_refused(golden, work):
    for index, lines in enumerate(golden.set("bert")):
        folder = work / "results/8xA100-optimized/bert"
        folder.mkdir(exist_ok=True)
        text = "\n".join(lines).replace("# benchmark: bert", "# benchmark: language_bert")
        (folder / f"result_{index}.txt").write_text(text + "\n")
    refused(package("results", "--list"), "The runs of two sets on one system follow each other")


def test_the_default_systems_folder_can_be_replaced(work, unjudged):
    Path("systems").rename("described")
    refused(package(RESNET, "--list"), "systems/8xA100-optimized.json")
    assert package(RESNET, "--systems", "described", "--list").returncode == 0
