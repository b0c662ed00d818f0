"""Data, results and descriptions outside the repository: every command finds them, and no log names them."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from common.evidence.log import parse_log
from common.evidence.submission.leaks import leaks
from common.repository import DATA, ROOT, hide_folders, locate_data, name_data
from common.run import launch, resume
from common.run.mllog import RunLog
from common.training.load import load_config
from tests.command import one_line, run, ttt_here
from tests.common.evidence.submission.packages import entry_of
from tests.runs import records

MINI = ("--size", "mini")
TINY = (
    *(
        "target=0.05",
        "max_duration=16ba",
        "evaluate_every=8ba",
        "schedule.warmup=2ba",
        "global_batch_size=16",
    ),
    *("methods.progressive_crops=false", "submission.hardware=elsewhere"),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder of prepared data outside the repository, with the digits in it."""
    folder = tmp_path_factory.mktemp("acme") / "prepared"
    done = ttt_here("data", "prepare", "resnet", *MINI, "--data", folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "image_classification/mini/manifest.json").is_file()
    return folder


@pytest.mark.parametrize(
    ("directory", "place", "name"),
    [
        ("data/language_bert/mini", "/raid/acme/language_bert/mini", "data/language_bert/mini"),
        ("data", "/raid/acme", "data"),
        ("others/text", f"{ROOT}/others/text", "others/text"),
        (f"{ROOT}/others/text", f"{ROOT}/others/text", "others/text"),
        ("/raid/acme/text", "/raid/acme/text", "data/text"),
        ("/scratch/acme/text/", "/scratch/acme/text", "data/text"),
        ("../acme/text", f"{ROOT}/../acme/text", "data/text"),
    ],
)
def test_data_are_found_where_they_are_and_named_without_folders(directory, place, name, monkeypatch):
    monkeypatch.setenv(DATA, "/raid/acme")
    assert (str(locate_data(directory)), name_data(directory)) == (place, name)
    config = load_config(
        "language_bert", "baseline", size="mini", settings=[f"data.directory={directory}"]
    ).config
    assert str(config.data_directory) == place
    assert config.stated(mode="json")["data"]["directory"] == name


def test_without_the_variable_data_lie_in_the_repository(monkeypatch):
    monkeypatch.setenv(DATA, "")
    assert locate_data("data/language_bert/mini") == ROOT / "data/language_bert/mini"


TEXTS = {
    f"{ROOT}/common/files.py: is damaged": "common/files.py: is damaged",
    f"runs in {ROOT}, or in {ROOT}-2": "runs in ., or in {parent}-2",
    "/raid/acme/bert/train-00000.shard record 3": "data/bert/train-00000.shard record 3",
    "--data /raid/acme --nproc 2": "--data data --nproc 2",
    "[Errno 28] Full: '/lustre/jane/runs/result_0.txt'": "[Errno 28] Full: '.../result_0.txt'",
    "from /scratch/jane to /scratch/jane/": "from .../jane to .../jane/",
    "nas:/export/acme, -I/opt/include, 2>/scratch/log": "nas:.../acme, -I.../include, 2>.../log",
    "/projects and <benchmark>/data": ".../projects and <benchmark>/data",
    "/proc/cpuinfo, /dev/shm/x, 5 and/or 6 samples/s": "/proc/cpuinfo, /dev/shm/x, 5 and/or 6 samples/s",
    "https://pytorch.org/docs/stable and a/b/c": "https://pytorch.org/docs/stable and a/b/c",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_for_a_log_names_no_folder_of_this_machine(text, monkeypatch, tmp_path):
    monkeypatch.setenv(DATA, "/raid/acme")
    expected = TEXTS[text].replace("{parent}", f".../{ROOT.name}")
    assert hide_folders(text) == expected == hide_folders(expected)
    assert not list(leaks(expected, is_log=True))
    log = RunLog(tmp_path / "log.txt", state="run")
    log.stop("run_stop", status="aborted", reason=text)
    log.close()
    assert records(tmp_path / "log.txt")[0]["metadata"]["reason"] == expected


@pytest.mark.parametrize("directory", ["/scratch/acme/text", "/scratch/acme corp/text", "../acme/text"])
def test_the_head_of_a_log_names_no_folder_of_this_machine(directory, tmp_path, monkeypatch):
    monkeypatch.setenv(DATA, "/raid/acme")
    settings = [f"data.directory={directory}", "submission.hardware=here"]
    loaded = load_config("language_bert", "optimized", size="mini", settings=settings)
    run_set = launch.plan_run_set(loaded, results=tmp_path / "acme", runs="1", seed=None)
    words = ["run", "bert", "optimized", *MINI, "--data", "/raid/acme", "--results=/lustre/acme/results"]
    words += [
        "--systems",
        "../acme/systems",
        "--set",
        settings[0],
        "--resume",
        "/lustre/acme/result_3.txt",
    ]
    text = launch.compose_head(run_set, words)
    assert "acme" not in text and not list(leaks(text, is_log=True))
    log = parse_log(text.encode(), "log")
    options = "--data data --results=results --systems systems --set data.directory=data/text"
    assert log.header("command") == f"ttt run bert optimized --size mini {options} --resume .../result_3.txt"
    assert any("directory: data/text" in line for line in log.settings)
    assert entry_of(log).changes == ["data.directory=data/text"]


def test_folders_inside_the_repository_stay_in_the_command():
    loaded = load_config("language_bert", "optimized", size="mini", settings=[])
    words = ["run", "--results", "results/study/tuned", "--systems", f"{ROOT}/results/study"]
    assert launch.describe_command(words, loaded.config) == (
        f"ttt run --results results/study/tuned --systems {ROOT}/results/study"
    )  # whose path compose_head makes relative


def test_an_option_that_is_cut_short_keeps_its_folder_and_its_address_out_of_the_command():
    loaded = load_config("language_bert", "optimized", size="mini", settings=[])
    words = ["run", "--anch", "http://tsa.acme.example/key", "--resu=/lustre/acme", "--data", "--dry-run"]
    command = launch.describe_command(words, loaded.config)
    assert command == "ttt run --anch URL --resu=results --data --dry-run"


def test_a_run_goes_on_from_its_checkpoint_after_the_data_have_moved():
    before, now = ({"benchmark": "x", "data": {"directory": place, "num_workers": 2}} for place in "ab")
    assert resume.run_recipe(before, 1, 1, "f", "s") == resume.run_recipe(now, 1, 1, "f", "s")


def test_the_option_and_the_variable_name_the_data_of_a_command(prepared, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    verify = ("data", "verify", "resnet", *MINI)
    assert "intact" in ttt_here(*verify, "--data", os.path.relpath(prepared)).stdout
    monkeypatch.setenv(DATA, os.path.relpath(prepared))
    assert "intact" in ttt_here(*verify).stdout
    monkeypatch.setenv(DATA, "nowhere")
    assert "intact" in ttt_here(*verify, "--data", prepared).stdout
    line = one_line(ttt_here(*verify))
    assert f"{tmp_path}/nowhere/image_classification/mini: " in line
    assert f"ttt data prepare image_classification --size mini --data {tmp_path}/nowhere" in line
    assert os.environ[DATA] == "nowhere"  # the command's own is gone with it
    file = tmp_path / "file"
    file.touch()
    assert f"--data {file}: is not a folder" in one_line(ttt_here(*verify, "--data", file))
    assert f"--results {file}: is not a folder" in one_line(ttt_here("score", "--results", file))
    monkeypatch.setenv(DATA, "file")
    assert "TTT_DATA file: is not a folder" in one_line(ttt_here(*verify))


def test_results_and_descriptions_are_named_by_options_or_paths(tmp_path):
    results = tmp_path / "runs" / "results"
    source = next(ROOT.glob("results/reference-2cpu-mini-optimized/bert"))
    shutil.copytree(source, results / source.parent.name / "bert")
    for verb in ("score", "check", "reproduce", "report", "explore"):
        more = {"check": ["--no-official"], "report": ["--no-official", "--out", tmp_path / "page"]}
        more["explore"] = ["--out", tmp_path / "page.html"]
        done = [ttt_here(verb, *words, *more.get(verb, [])) for words in (["--results", results], [results])]
        assert done[0].stdout == done[1].stdout != "" and done[0].returncode == done[1].returncode
        assert "--results" in one_line(ttt_here(verb, results, "--results", tmp_path))
    check = ("check", "--no-official", "--json", results)
    assert "no such folder" in one_line(ttt_here(*check, "--systems", tmp_path / "none"))
    for folder in (tmp_path / "described", tmp_path / "runs" / "systems"):
        folder.mkdir()
        options = ["--systems", folder] if folder.name == "described" else []
        (entry,) = json.loads(ttt_here(*check, *options).stdout)["sets"]
        assert {finding["rule"] for finding in entry["findings"]} >= {"Y601"}


@pytest.mark.on_demand
def test_a_set_made_with_data_and_results_elsewhere_is_packaged_after_the_clone_has_moved(prepared, tmp_path):
    first, second, results = tmp_path / "first", tmp_path / "second", tmp_path / "acme" / "results"
    subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, first], check=True)

    def ttt(clone, *words, **variables):
        environment = os.environ | {"PYTHONPATH": str(clone)} | variables
        done = run(sys.executable, "-m", "common.cli", *words, cwd=clone, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run_set = ("run", "resnet", "optimized", *MINI, "--runs", "official")
    command = (*run_set, "--set", *TINY, "--results", results)
    ttt(first, *command, **{DATA: os.path.relpath(prepared, first)})
    written = [*results.glob("*/resnet/*"), *results.parent.glob("systems/*")]
    assert len(written) == 8  # five logs, the seal and its list, a description
    fingerprint = json.loads((prepared / "image_classification/mini/manifest.json").read_text())[
        "fingerprint"
    ]
    for path in written:
        text, is_log = path.read_text(), path.suffix == ".txt"
        assert "acme" not in text and not list(leaks(text, is_log=is_log)), path
        if is_log:
            assert fingerprint in text and "directory: data/image_classification/mini" in text
            assert "--results results\n" in text
    first.rename(second)
    assert "0 errors" in ttt(second, "check", "--no-official", "--results", results)
    options = ("--submitter", "Example", "--rehearsal", "--out", tmp_path / "package")
    assert "absolute path" not in ttt(second, "package", results, *options)
    files = [file for file in (tmp_path / "package").rglob("*") if file.is_file()]
    assert len(files) > 100 and not any("acme" in file.read_text() for file in files)
