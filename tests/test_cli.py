"""What a person meets at the command line: exit codes, one line per error, logs that survive."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from common.cli import COMMANDS, dispatch
from common.errors import UserError
from common.repository import ROOT
from tests.command import TTT, one_line, ttt, ttt_here
from tests.committed import tracked

TINY = ("max_duration=20ba", "evaluate_every=10ba", "evaluate_from=10ba", "schedule.warmup=5ba")


def run_arguments(folder, *settings):
    sets = [part for setting in settings for part in ("--set", setting)]
    where = ["--results", folder / "results", "--systems", folder / "systems"]
    return ["run", "language_bert", "optimized", "--size", "mini", *where, *sets]


def results(folder):
    return sorted((folder / "results").rglob("result_*.txt"))


def status(path):
    last = json.loads(path.read_text().splitlines()[-1].split(" ", 1)[1])
    assert last["key"] == "run_stop"
    return last["metadata"]["status"]


@pytest.fixture(scope="session", autouse=True)
def data():
    for benchmark in ("language_bert", "image_classification"):
        done = ttt("data", "prepare", benchmark, "--size", "mini")
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def reached(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reached")
    return folder, ttt(*run_arguments(folder, "target=0.01", *TINY), "--seed", 5)


def test_help_of_every_command_exits_0():
    for command in (["--help"], *([verb, "--help"] for verb in COMMANDS)):
        done = ttt(*command)
        assert done.returncode == 0 and "exit codes" in done.stdout


def test_a_run_that_reaches_its_target_exits_0_and_passes_every_checker(reached):
    folder, done = reached
    assert done.returncode == 0, done.stderr
    assert "success" in done.stdout and "masked-LM accuracy" in done.stdout
    (path,) = results(folder)
    assert status(path) == "success"
    checked = ttt("check", folder / "results")
    assert checked.returncode == 0 and "compliance 2.1.0: SUCCESS" in checked.stdout
    (system,) = (folder / "systems").glob("*.json")
    assert json.loads(system.read_text())["system_name"] == system.stem == path.parts[-3]


def test_a_log_starts_with_its_configuration_and_names_no_folder_of_the_machine(reached):
    folder, _ = reached
    text = results(folder)[0].read_text()
    assert "# size: mini (a proxy: not a submission)" in text and "#   methods:" in text
    assert str(ROOT) not in text
    order = [json.loads(line[9:])["key"] for line in text.splitlines() if line.startswith(":::MLLOG ")]
    assert order[0] == "cache_clear" and order[-1] == "run_stop"
    assert order.index("run_start") < order.index("dataset_fingerprint") < order.index("block_start")


def test_a_run_that_misses_its_target_exits_1_and_keeps_its_log(tmp_path):
    done = ttt(*run_arguments(tmp_path, "target=0.99", *TINY))
    (line,) = done.stderr.rstrip("\n").splitlines()
    assert line.startswith("  aborted") and done.returncode == 1
    assert status(results(tmp_path)[0]) == "aborted"


def test_an_evaluation_of_the_untrained_model_passes_the_audit(tmp_path):
    done = ttt(*run_arguments(tmp_path, "target=0.01", "evaluate_untrained=true", *TINY))
    assert done.returncode == 0 and "  untrained  masked-LM accuracy 0.0" in done.stdout
    checked = ttt("check", tmp_path / "results")
    assert checked.returncode == 0, checked.stdout


def test_a_result_that_exists_is_refused_and_stays(reached):
    folder, _ = reached
    (path,) = results(folder)
    before = path.read_bytes()
    line = one_line(ttt(*run_arguments(folder, "target=0.01", *TINY), "--index", 0))
    assert "never overwritten" in line
    assert path.read_bytes() == before


def test_a_results_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "results").write_text("a file")
    assert "results" in one_line(ttt(*run_arguments(tmp_path, *TINY)))


def test_corrupted_data_are_named_before_anything_is_timed(tmp_path):
    copy = tmp_path / "data"
    shutil.copytree(ROOT / "data/language_bert/mini", copy)
    content = bytearray((copy / "train-00000.shard").read_bytes())
    content[1000] ^= 1
    (copy / "train-00000.shard").write_bytes(content)
    line = one_line(ttt(*run_arguments(tmp_path, f"data.directory={copy}")))
    assert "train-00000.shard" in line and "content changed" in line
    verified = ttt("data", "verify", "language_bert", "--size", "mini", "--set", f"data.directory={copy}")
    assert verified.returncode == 1 and "train-00000.shard" in verified.stdout
    assert results(tmp_path) == []


def start_long_run(folder, until='"run_start"'):
    """Start a run in a session of its own and wait until a text, its clock's start, is in the log."""
    command = [TTT, *map(str, run_arguments(folder, "target=0.99"))]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(until in path.read_text() for path in results(folder)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    return process


def test_ctrl_c_closes_the_log_as_aborted(tmp_path):
    process = start_long_run(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors
    assert status(results(tmp_path)[0]) == "aborted"


def test_ctrl_c_before_the_clock_starts_leaves_no_result_and_no_traceback(tmp_path):
    process = start_long_run(tmp_path, until="# --- configuration")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert results(tmp_path) == []


def test_the_log_of_a_killed_process_is_closed_by_the_launcher(tmp_path):
    process = start_long_run(tmp_path)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout
    os.kill(int(children.split()[0]), signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "Traceback" not in errors and "aborted" in errors
    assert status(results(tmp_path)[0]) == "aborted"


def test_a_dry_run_prints_configuration_plan_and_memory_and_runs_nothing(tmp_path):
    done = ttt(*run_arguments(tmp_path), "--dry-run")
    assert done.returncode == 0 and results(tmp_path) == []
    for expected in (
        "target: 0.2",
        "language_bert/mini.yaml:",
        "#   steps: 1,800",
        "#   evaluations:",
        "#   memory:",
    ):
        assert expected in done.stdout


def page_commands():
    """Yield the words of every command in the shell blocks of all pages, each once."""
    texts = [path.read_text() for path in tracked() if path.suffix == ".md"]
    blocks = [block for text in texts for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line.split() for line in dict.fromkeys(filter(None, lines))]


@pytest.mark.parametrize("command", page_commands(), ids=" ".join)
def test_every_command_of_the_pages_is_understood(command):
    if command[0] != "ttt":
        assert os.access(ROOT / command[0], os.X_OK)
        return
    assert command[1] in COMMANDS
    if "DIR" in command:  # a person's own folder
        with pytest.raises(UserError, match="DIR"):
            dispatch(command[1:])
        return
    extra = {"run": ["--dry-run"], "data": []}.get(command[1], ["--help"])
    if "-O1" in command:
        extra = [*extra, "--tune-seconds", "1"]
    done = ttt_here(*command[1:], *extra)
    assert done.returncode == 0, done.stderr


def test_bench_compares_configurations_and_keeps_the_figures(tmp_path):
    arguments = ["bench", "image_classification", "baseline", "optimized+methods.blurpool=false"]
    arguments += ["--size", "mini", "--batch-size", "4", "--seconds", "0.05", "--results", str(tmp_path)]
    done = ttt_here(*arguments)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("image_classification_0.json")
    figures = json.loads(path.read_text())
    assert {rate["configuration"] for rate in figures["rates"]} == set(arguments[2:4])
    assert {rate["shape"] for rate in figures["rates"]} == {"56 px", "84 px", "112 px"}
    assert all(0 < rate["flops_share"] < 1 and rate["samples_per_s"] > 0 for rate in figures["rates"])
    assert any("loader" in name for name in figures["parts"])
    assert ttt_here(*arguments).returncode == 0 and len(list(tmp_path.rglob("*.json"))) == 2


def test_bench_of_bert_compares_attention_and_packing_and_times_the_pieces(tmp_path):
    arguments = ["bench", "language_bert", "baseline", "eager", "optimized", "--size", "mini"]
    done = ttt_here(*arguments, "--batch-size", "4", "--seconds", "0.05", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("language_bert_0.json")
    figures = json.loads(path.read_text())
    assert [rate["configuration"] for rate in figures["rates"]] == ["baseline", "eager", "optimized"]
    assert all(rate["tokens_per_s"] > rate["samples_per_s"] > 0 for rate in figures["rates"])
    assert {"attention", "head"} <= {word for name in figures["parts"] for word in name.split()}
