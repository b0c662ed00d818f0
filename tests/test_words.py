"""Commands describe themselves and mistakes truly, in one line, with what to type."""

import json
import re
import sys
import time

import pytest

from common.arguments import spread_settings
from common.cli import COMMANDS
from common.repository import ROOT
from tests.command import one_line, run, ttt_here

MINI = ("--size", "mini")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prepare"], "data prepare"),
        (["list"], "ttt methods"),
        (["run"], "see ttt run --help"),
        (["run", "bert", "baseline", "--dryrun"], "did you mean --dry-run?"),
        (["run", "brt", "baseline"], "did you mean bert?"),
        (["doctor", "--benchmarks", "gpt"], "known: bert (language_bert), resnet (image_classification)"),
        (["run", "bert", "baseline", *MINI, "--set", "learning_rate=1"], "optimizer.learning_rate?"),
        (["run", "bert", "baseline", *MINI, "--set", "max_duration=7"], "write 7ep, 7ba or 7sp"),
        (["run", "bert", "baseline", *MINI, "--set", "schedule.warmup=7x"], "write 7ep, 7ba or 7sp"),
        (["run", "resnet", "baseline", *MINI, "--set", "methods.unpad={}"], "belongs to language_bert"),
        (["run", "bert", "baseline", *MINI, "--set", "target=0.1", "precision=fp8"], "precision: "),
        (["data", "prepare", "bert", "--source", "/nonexistent"], "--source /nonexistent: no such folder"),
        (["score", "README.md"], "README.md: is no log"),
        (["run", "bert", "baseline", *MINI, "--set", "target=\x01"], "--set"),
        (["run", "bert", "baseline", "--runs", "0"], "--runs 0"),
        (["run", "langage_bert", "baseline"], "did you mean language_bert?"),
        (["run", "bert", "fast"], "known: baseline, compiled, eager"),
        (["rum"], "did you mean run?"),
        (["check", "no/such/folder"], "no/such/folder"),
        (["run", "bert", "baseline", *MINI, "--set", "data.directory=data/none"], "ttt data prepare"),
        (["data", "verify", "bert", "--set", "data.directory=data/none"], "ttt data prepare"),
        (["bench", "image_clasification"], "did you mean image_classification"),
        (["bench", "resnet", "fast"], "known: baseline"),
        (["bench", "bert", "baseline+bogus=1", *MINI], "unknown key"),
        (["bench", "bert", "--batch-size", "0", *MINI], "must be positive"),
        (["bench", "bert", "baseline", "baseline+data.max_seq_length=64", *MINI], "at 160 tokens and"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_with_what_to_type(arguments, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert words in one_line(ttt_here(*arguments))


def test_a_log_of_another_name_is_read(tmp_path):
    path = next((ROOT / "results/reference-2cpu-mini-baseline/bert").glob("result_*.txt"))
    copy = tmp_path / "mine.log"
    copy.write_bytes(path.read_bytes())
    assert ttt_here("score", copy).returncode == 0


def test_the_version_is_named_and_the_overview_lists_every_command():
    done = ttt_here("--version")
    assert done.returncode == 0 and re.fullmatch(r"ttt [0-9]+\.[0-9]+\S*\n", done.stdout)
    overview = ttt_here("--help").stdout
    assert "exit codes" in overview and all(f"\n  {verb} " in overview for verb in COMMANDS)


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_names_a_command_and_no_default_that_says_nothing(verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = ttt_here("help", verb)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: ttt {verb} ")
    assert "exit codes" in done.stdout and done.stdout == ttt_here(verb, "--help").stdout
    assert not re.search(r"default: (None|True|False|\[|\))|PosixPath", " ".join(done.stdout.split()))
    prose = [line for line in done.stdout.splitlines() if not line.startswith("  ttt ")]
    assert max(map(len, prose)) < 80


def test_the_settings_of_a_logged_command_are_read_as_they_were_meant():
    words = ["run", "bert", "baseline", "--set", "a.b=1", "c=2", "--size", "mini", "x=3"]
    spread = spread_settings(words)
    assert [b for a, b in zip(spread, spread[1:], strict=False) if a == "--set"] == ["a.b=1", "c=2"]
    assert spread == [*words[:5], "--set", *words[5:]]
    assert spread_settings(["--set=a=1", "b=2"]) == ["--set=a=1", "--set", "b=2"]
    assert spread_settings(["--set", "a=1", "optimized+b=2"]) == ["--set", "a=1", "optimized+b=2"]


def test_the_rules_are_json_on_demand():
    rules = json.loads(ttt_here("check", "--rules", "--json").stdout)["rules"]
    text = ttt_here("check", "--rules").stdout
    assert len(rules) == len(text.splitlines()) > 50
    assert all(rule["id"] in text and rule["message"] in text for rule in rules)


def test_a_dry_run_knows_both_names_and_several_settings_and_names_the_file_of_each_key():
    settings = ("schedule.warmup=7ba", "methods.progressive_crops.epochs=[2, 2]")
    done = ttt_here("run", "resnet", "optimized", *MINI, "--dry-run", "--set", *settings)
    assert done.returncode == 0, done.stderr
    printed, listed = done.stdout.split("# where each key was written\n")
    origins = dict(re.findall(r"^#   (\S+): (\S+)$", listed.split("# changed")[0], re.MULTILINE))
    assert {key for key, where in origins.items() if where == "--set"} == {
        "schedule.warmup",
        "methods.progressive_crops.epochs",
    }
    assert not any(key.startswith("methods.label_smoothing") for key in origins)  # optimized has none
    for key in origins:
        assert re.search(rf"\b{key.rpartition('.')[2]}:", printed), key


def test_the_doctor_counts_its_seconds_from_the_start():
    started = time.monotonic()
    command = [sys.executable, "-m", "common.cli", "doctor", "--quick", "--benchmarks", "bert"]
    done = run(*command)
    whole_s, printed_s = time.monotonic() - started, float(re.search(r"lines in ([0-9.]+) s", done.stdout)[1])
    assert whole_s / 4 < printed_s < whole_s  # loading torch is most of it
