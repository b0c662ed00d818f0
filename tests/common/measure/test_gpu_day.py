"""systems/gpu_day.sh: its rows, a row that fails, and the page."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
import torch

from common import cli
from common.arguments import spread_settings
from common.errors import UserError
from common.measure import captured, gpu_day
from common.repository import ROOT
from common.training.step import Training
from tests.command import ttt_here

STAGES = list(gpu_day.read_stages(0, 0.0))
RATE = {"configuration": "optimized", "shape": "512 tokens", "samples_per_s": 600.0, "tokens_per_s": None}
RATE |= {"step_ms": 93.3, "deviation": 0.01, "num_turns": 4, "flops_per_s": 5e14, "flops_share": 0.5}
RATE |= {"bytes_share": None, "memory_gb": 21.5}


def run_day(tmp_path, *commands, limit_s=60):
    """Run a stage of these commands; returns its exit code, rows and page."""
    rows = [gpu_day.Row(command=command, limit_s=limit_s) for command in commands]
    page = tmp_path / "page.html"
    code = gpu_day.run_stages({"check": rows}, tmp_path / "rows", page, STAGES)
    (folder,) = (tmp_path / "rows").iterdir()
    return code, gpu_day.read_rows(folder, STAGES), page.read_text()


def test_the_wheels_bring_what_such_a_machine_lacks_of_our_dependencies():
    # tokenizers and safetensors come with transformers, Pillow with torchvision, MarkupSafe with jinja2
    there = ["torch", "torchvision", "transformers", "tokenizers", "safetensors", "pillow", "MarkupSafe"]
    by_others, unused = ["scipy"], ["matplotlib"]  # scikit-learn brings it; no report is drawn there
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = project["dependencies"] + project["optional-dependencies"]["train"]
    names = {re.split(r"[><=]", dependency)[0] for dependency in dependencies}
    brought = (ROOT / "systems/wheels.sh").read_text()
    assert {name for name in names.difference(there, by_others, unused) if name not in brought} == set()


@pytest.mark.parametrize("machine", [(0, 0.0), (1, 85.0), (2, 150.0)])
def test_every_row_is_a_command_whose_options_exist(machine):
    stages = gpu_day.read_stages(*machine)
    assert list(stages) == STAGES
    for row in (row for rows in stages.values() for row in rows):
        program, *words = row.command.split()
        assert "{" not in row.command.replace("={}", "")
        if program == "ttt":
            part, rest = cli.find_part(words[0], words[1:])
            cli.make_parser(words[0], part)[0].parse_args(spread_settings(rest))
            assert ("--size full" in row.command) == bool(machine[0]) or words[0] in ("doctor", "data", "run")
    assert all(sum(row.limit_s for row in rows) <= gpu_day.STAGE_S for rows in stages.values())
    assert bool(stages["ranks"]) == (machine[0] > 1) and all(row.is_cold for row in stages["bert_forms"])


def test_a_row_that_fails_says_so_and_the_next_one_runs(tmp_path):
    commands = ["ttt inspect startup language_bert nothing --size mini", "ttt list methods unpad"]
    code, (failed, ok), page = run_day(tmp_path, *commands)
    assert code == 1 and (failed["outcome"], ok["outcome"]) == ("failed", "ok")
    assert any("nothing" in line for line in failed["output"])
    assert 'class="bad"' in page and "ttt list methods unpad" in page
    assert str(ROOT) not in json.dumps([failed, ok]) + page


def test_a_row_that_does_not_end_is_ended_with_its_children(monkeypatch, tmp_path):
    script = tmp_path / "sleeper.py"
    script.write_text(
        "import subprocess, sys, time\nprint('begun', flush=True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, (row,), _ = run_day(tmp_path, "sleeper", limit_s=3)
    assert code == 1 and row["outcome"] == "out of time after 3 s" and row["seconds"] < 20
    assert row["output"] == ["begun"]


def test_what_a_bench_had_measured_before_its_time_was_over_is_kept(monkeypatch, tmp_path):
    def run_command(row, scratch, limit_s):
        assert (scratch / ".running").exists()  # the next start removes it if this process is killed
        path = scratch / "throughput/gpu/x_0.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"rates": [RATE]}))
        path.with_name("a_0.json").write_text("")  # of a bench that was ended as it began the file
        return "out of time after 3 s", f"a line -> {os.path.relpath(scratch, ROOT)}/result_0.txt"

    monkeypatch.setattr(gpu_day, "run_command", run_command)
    record = gpu_day.run_row(gpu_day.Row(command="ttt bench", limit_s=3), 3)
    assert record["figures"] == {"rates": [RATE]} and record["output"] == ["a line -> .../result_0.txt"]
    monkeypatch.setattr(gpu_day, "STAGE_S", 0)
    _, (row,), _ = run_day(tmp_path, "ttt list methods")
    assert row["outcome"].startswith("not started")


@pytest.mark.parametrize(
    ("text", "figures"),
    [('noise\n{"a": 1}', {"a": 1}), ('{\n "a": {\n  "b": 2\n }\n}', {"a": {"b": 2}}), ("{no", None)],
)
def test_figures_are_the_json_that_a_row_printed_last(text, figures):
    assert gpu_day.parse_figures(text.splitlines()) == figures


def test_a_measured_rate_stands_beside_the_predicted_one():
    figures = {"benchmark": "language_bert", "batch_size": 56, "rates": [RATE], "failed": []}
    record = {"hardware": "1xH100-80GB-HBM3", "versions": {"torch": "2.11.0"}, "commit": "0000000"}
    (line,) = gpu_day.describe_figures(record, figures)
    assert "600.0 samples/s (predicted: 8" in line and "21.5 GB" in line
    (line,) = gpu_day.describe_figures(record | {"hardware": "2cpu-EPYC"}, figures)
    assert "600.0 samples/s" in line and "predicted" not in line


def test_a_day_that_ends_early_has_its_page(monkeypatch, tmp_path):
    run_row = gpu_day.run_row

    def run_one(row, limit_s):
        if row.command == "the second":
            raise KeyboardInterrupt
        return run_row(row, limit_s)

    monkeypatch.setattr(gpu_day, "run_row", run_one)
    with pytest.raises(KeyboardInterrupt):
        run_day(tmp_path, "ttt list methods unpad", "the second")
    assert "ttt list methods unpad" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("stage", "text"), [("chek", "'chek'; did you mean check?"), ("ranks", "no row is for this")]
)
def test_a_stage_that_cannot_run_is_named(stage, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_day", "--output", "nowhere", stage])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_day.main() == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"stage": "tr', '{"a": 1}', "[1]"])
def test_a_damaged_row_is_refused_before_the_first_row(text, tmp_path):
    (tmp_path / "bert-00.json").write_text(text)
    with pytest.raises(UserError, match="bert-00.json: not a row of systems/gpu_day.sh"):
        gpu_day.read_rows(tmp_path, ["bert"])


def test_a_python_that_is_none_is_named_in_one_line():
    environment = os.environ | {"PYTHON": "nope"}
    done = subprocess.run([ROOT / "systems/gpu_day.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: nope")


def test_no_option_is_required_and_each_has_its_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_day", "--help"])
    with pytest.raises(SystemExit):
        gpu_day.main()
    help_text = " ".join(capsys.readouterr().out.split())
    assert "[--output OUTPUT] [--page PAGE]" in help_text
    assert "results/throughput/gpu_day" in help_text and "gpu_day.html in $OUT, else in report/" in help_text


def inspect_bert(name, part):
    done = ttt_here("inspect", part, "language_bert", name, "--size", "mini", "--batch-size", 4, "--json")
    return done.returncode, json.loads(done.stdout)


FEW_STEPS = 12
COMPILED = "optimized+methods.compile_layers.backend=aot_eager"


def test_captured_steps_of_bert_are_the_eager_ones():
    code, figures = inspect_bert(f"{COMPILED}+model.num_hidden_layers=2", "graphs")  # the last one is another
    assert code == 0 and figures["is_ok"] and figures["compiled_by"] == ["compile_layers"]
    assert len(figures["losses"]) == captured.NUM_STEPS and figures["num_graphs"] >= 3
    assert figures["losses"][0] > figures["losses"][-1] and figures["evaluation_difference"] < 0.01
    assert figures["gradient_difference"] < 0.03  # residuals are rounded to bf16, by each in its own way


def test_gradients_that_differ_are_findings(monkeypatch):
    add_gradients = Training.add_gradients

    def add_more(run, *args, **named):
        loss = add_gradients(run, *args, **named)
        for parameter in run.model.parameters() if run.model.compiled else ():
            parameter.grad.mul_(1.5)
        return loss

    monkeypatch.setattr(Training, "add_gradients", add_more)
    monkeypatch.setattr(captured, "NUM_STEPS", FEW_STEPS)
    code, figures = inspect_bert(COMPILED, "graphs")
    assert code == 1 and figures["gradient_difference"] == pytest.approx(0.5, abs=0.01)
    assert figures["loss_difference"] < 0.01
    assert captured.largest([0.1, float("nan"), 0.2]) == float("inf")  # a loss that is no number


def test_a_model_that_is_not_compiled_is_a_finding(monkeypatch):
    monkeypatch.setattr(captured, "NUM_STEPS", FEW_STEPS)
    code, figures = inspect_bert("baseline", "graphs")
    assert code == 1 and not figures["is_ok"] and figures["num_graphs"] == 0
    assert figures["reason"].startswith("nothing is compiled")


def test_a_trace_is_summed_by_class_and_start_up_is_timed():
    (summary,) = inspect_bert("baseline", "kernels")[1].values()
    assert summary["classes_ms"]["matrix product"] > 0 and summary["launches"] > 100
    assert 0 <= summary["idle_share"] < 1
    assert sum(summary["classes_ms"].values()) < 2 * summary["step_ms"]  # a profiler slows the host down
    _, figures = inspect_bert("baseline", "startup")
    assert figures["num_evaluated"] == 384 and figures["num_forms"] == 1 and figures["initialization_s"] > 0
