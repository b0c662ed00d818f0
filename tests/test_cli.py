"""The command line: exit codes, one line per error, logs that survive."""

import errno
import json
import os
import re
import shutil
import signal
from contextlib import closing
from dataclasses import fields

import psutil
import pytest

from common import cli
from common.repository import ROOT
from common.run import worker
from common.run.heartbeat import Heartbeat
from common.run.run_set import Spec
from common.training.ranks import SINGLE_RANK
from tests.command import TTT, one_line, start, ttt, ttt_here
from tests.runs import records, until

pytestmark = pytest.mark.usefixtures("prepared_data")

TINY = ("max_duration=20ba", "evaluate_every=10ba", "evaluate_from=10ba", "schedule.warmup=5ba")


def run_arguments(folder, *settings):
    run = ["run", "language_bert", "optimized", "--size", "mini"]
    where = ["--results", folder / "results", "--systems", folder / "systems"]
    return [*run, *where, *["--set"] * bool(settings), *settings]


def results(folder):
    return sorted((folder / "results").rglob("result_*.txt"))


def status(path):
    assert records(path)[-1]["key"] == "run_stop"
    return records(path)[-1]["metadata"]["status"]


def test_a_run_that_reaches_its_target_passes_every_checker_and_is_never_overwritten(tmp_path):
    command = run_arguments(tmp_path, "target=0.01", "evaluate_untrained=true", *TINY)
    done = ttt(*command, "--seed", 5)
    assert done.returncode == 0, done.stderr
    assert "success" in done.stdout and "  untrained  masked-LM accuracy 0.0" in done.stdout
    (path,) = results(tmp_path)
    assert status(path) == "success"
    (system,) = (tmp_path / "systems").glob("*.json")
    assert json.loads(system.read_text())["system_name"] == system.stem == path.parts[-3]
    checked = ttt("check", tmp_path / "results")
    assert checked.returncode == 0
    assert "compliance 2.1.0: SUCCESS, compliance 5.0.0: SUCCESS" in checked.stdout
    text = path.read_text()
    assert "# size: mini (a proxy: not a submission)" in text and "#   methods:" in text
    assert str(ROOT) not in text
    order = [record["key"] for record in records(path)]
    assert order[0] == "cache_clear" and order[-1] == "run_stop"
    assert order.index("run_start") < order.index("dataset_fingerprint") < order.index("block_start")
    assert "never overwritten" in one_line(ttt_here(*command, "--index", 0))
    assert path.read_text() == text


def test_a_run_that_misses_its_target_exits_1_and_keeps_its_log(tmp_path):
    done = ttt_here(*run_arguments(tmp_path, "target=0.99", *TINY))
    (line,) = done.stderr.rstrip("\n").splitlines()
    assert line.startswith("  aborted") and done.returncode == 1
    assert status(results(tmp_path)[0]) == "aborted"


def test_a_results_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "results").write_text("a file")
    assert "results" in one_line(ttt_here(*run_arguments(tmp_path, *TINY)))


def test_corrupted_data_are_named_before_anything_is_timed(tmp_path):
    copy = tmp_path / "data"
    shutil.copytree(ROOT / "data/language_bert/mini", copy)
    content = bytearray((copy / "train-00000.shard").read_bytes())
    content[1000] ^= 1
    (copy / "train-00000.shard").write_bytes(content)
    line = one_line(ttt_here(*run_arguments(tmp_path, f"data.directory={copy}")))
    assert "train-00000.shard" in line and "content changed" in line
    verified = ttt_here(
        "data", "verify", "language_bert", "--size", "mini", "--set", f"data.directory={copy}"
    )
    assert verified.returncode == 1 and "train-00000.shard" in verified.stdout
    assert results(tmp_path) == []


@pytest.mark.parametrize(
    ("begun", "is_rank", "number", "code", "statuses"),
    [
        ('"run_start"', False, signal.SIGINT, 130, ["aborted"]),
        ("# --- configuration", False, signal.SIGINT, 130, []),  # before the clock starts
        ('"run_start"', True, signal.SIGKILL, 1, ["aborted"]),  # its launcher closes the log
    ],
)
def test_a_signal_to_launcher_or_rank_leaves_a_closed_log_or_none(
    begun, is_rank, number, code, statuses, tmp_path
):
    process = start(TTT, *run_arguments(tmp_path, "target=0.99"), start_new_session=True)
    until(lambda: process.poll() is not None or any(begun in path.read_text() for path in results(tmp_path)))
    if is_rank:
        psutil.Process(process.pid).children()[0].send_signal(number)
    else:
        os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in errors
    assert [status(path) for path in results(tmp_path)] == statuses


def test_a_dry_run_prints_configuration_plan_and_memory_and_runs_nothing(tmp_path):
    done = ttt_here(*run_arguments(tmp_path), "--dry-run")
    assert done.returncode == 0 and results(tmp_path) == []
    for words in ("target: 0.2", "language_bert/mini.yaml:", "steps: 1,800", "evaluations:", "memory:"):
        assert words in done.stdout


def bench(folder, benchmark, *names):
    """Return the figures that a short `ttt bench` prints and keeps."""
    options = ["--size", "mini", "--batch-size", "4", "--seconds", "0.05", "--results", folder, "--json"]
    done = ttt_here("bench", benchmark, *names, *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert json.loads(max(folder.rglob(f"{benchmark}_*.json")).read_text()) == figures
    return figures


def test_bench_compares_configurations_and_keeps_the_figures(tmp_path):
    fp32 = "precision=fp32"  # not every processor has instructions for bf16
    names = [f"baseline+{fp32}", f"optimized+methods.blurpool=false+{fp32}"]
    figures = bench(tmp_path, "image_classification", *names)
    assert {rate["configuration"] for rate in figures["rates"]} == set(names)
    assert {rate["shape"] for rate in figures["rates"]} == {"56 px", "84 px", "112 px"}
    for rate in figures["rates"]:
        assert rate["samples_per_s"] == pytest.approx(4 / rate["step_ms"] * 1e3)
        assert 0 < rate["flops_share"] < 1 and 0 < rate["bytes_share"] < 1 and rate["num_turns"] >= 2
        assert rate["memory_gb"] is None  # of a CPU
    assert figures["projected"] == {}  # of size full only
    assert any("loader" in name for name in figures["parts"])
    bench(tmp_path, "image_classification", *names, "--shapes", 56, "--no-parts")
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_bench_of_bert_compares_attention_and_packing_and_times_the_pieces(tmp_path):
    names = ["baseline", "eager", "optimized"]
    figures = bench(tmp_path, "language_bert", *names)
    assert [rate["configuration"] for rate in figures["rates"]] == names
    assert all(rate["tokens_per_s"] > rate["samples_per_s"] > 0 for rate in figures["rates"])
    assert {"attention", "head"} <= {word for name in figures["parts"] for word in name.split()}


def test_a_signal_before_the_command_begins_is_told_in_one_line(monkeypatch):
    def interrupt_at_once(handler):
        handler(signal.SIGTERM, None)

    monkeypatch.setattr(cli, "handle_ending_signals", interrupt_at_once)
    assert one_line(ttt_here("list"), code=130) == "error: interrupted"


def test_an_interrupted_clean_up_is_no_internal_fault(monkeypatch):
    def interrupt_twice(arguments):
        try:
            raise cli.Interrupted
        finally:
            raise OSError("the second signal came while a folder was removed")

    monkeypatch.setattr(cli, "dispatch", interrupt_twice)
    assert one_line(ttt_here("list"), code=130) == "error: interrupted"


def raise_error(error):
    raise error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ESTALE, "Stale file handle", "a.shard"), "a.shard: Stale file handle"),
        (PermissionError(errno.EACCES, "Permission denied", "b"), "b: Permission denied"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "c"), "c: File name too long"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "(ulimit -v)"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "TMPDIR"),
    ],
)
def test_a_fault_of_the_machine_is_told_in_one_line_by_commands_and_ranks(error, words, monkeypatch, capsys):
    monkeypatch.setattr("common.commands.list.main", lambda _: raise_error(error))
    assert words in one_line(ttt_here("list"), code=2)

    monkeypatch.setattr(worker, "make_run", lambda *_: raise_error(error))
    with closing(Heartbeat.create(1, {field.name: None for field in fields(Spec)})) as heartbeat:
        assert worker.run_rank(SINGLE_RANK, heartbeat, heartbeat.slots[0]) == 2
        assert words in heartbeat.failure()
    assert capsys.readouterr().err == ""


def test_help_that_nobody_reads_is_lost_output():
    process = start(TTT, "check", "--help")
    process.stdout.close()
    assert process.wait(60) == 141 and process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize("words", ["status --json", "--json status", "--data x status", "-o x status"])
def test_a_part_is_found_wherever_it_stands_but_for_the_value_of_an_option(words):
    part, rest = cli.find_part("data", words.split())
    assert (part, rest) == ("status", [word for word in words.split() if word != "status"])
    assert cli.find_part("data", ["--data", "status"])[0] == ""


def test_the_help_of_a_part_has_only_its_examples():
    for part in cli.PARTS["data"]:
        parser, _ = cli.make_parser("data", part)
        assert set(re.findall("ttt data (.*?) ", parser.description)) == {part}
    parser, command = cli.make_parser("list", "")
    assert parser.description.strip() == command.__doc__.strip()
