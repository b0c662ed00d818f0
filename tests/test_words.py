"""Commands describe themselves correctly, and answer a mistake in one line with a command to type."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from common.arguments import spread_settings
from common.cli import COMMANDS, GROUPS, OLD_NAMES, OTHER_WORDS, PARTS, find_part, make_parser
from common.machine import preflight, torch_build
from common.repository import ROOT, SIZES, configurations
from tests.command import one_line, run, ttt_here

MINI = ("--size", "mini")
FORMS = [(verb, part) for verb in COMMANDS for part in ("", *PARTS.get(verb, ()))]
VERSION = r"ttt [0-9]+\.[0-9]+\S*, commit [0-9a-f]{40} \((clean|modified)\), code [0-9a-f]{12}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data", "statsu", "bert"], "did you mean data status?"),
        (["explor"], "did you mean report --explore?"),
        (["sweeep"], "did you mean sweep?"),
        (["list", "methods", "bert", "--measure", "mini"], "ttt list methods bert lists its methods"),
        (["install"], "see docs/install.md"),
        (["data", "bert"], "one of: fetch, prepare, verify, status"),
        (["data", "status", "--size", "mini"], "--size; it is of ttt data"),
        (["data", "bert", "verify", "--source", "x"], "--source; it is of ttt data prepare"),
        (["data", "prepare", "bert", "--source", "status"], "--source status: no such folder"),
        (["run", "bert", "--all"], "did you mean --benchmarks bert?"),
        (["run", "bert", "--al"], "did you mean --all?"),
        (["report", "--prices", "x"], "--prices; it is of ttt report --explore"),
        (["score", "--help-me"], "see ttt score --help"),
        (["inspect", "bert", "optimized", "kernel"], "did you mean inspect kernels?"),
        (["report", "--explor"], "did you mean --explore?"),
        (["doctor", "--benchmarks", "gpt"], "known: bert (language_bert), resnet (image_classification)"),
        (["run", "bert", "baseline", *MINI, "--set", "schedule.warmup=7x"], "write 7ep, 7ba or 7sp"),
        (["run", "bert", "baseline", *MINI, "--set", "target=0.1", "precision=fp8"], "precision: "),
        (["run", "bert", "baseline", *MINI, "--set", "target=\x01"], "--set"),
        (["run", "bert", "baseline", *MINI, "--set", "data.directory=data/none"], "ttt data prepare"),
        (["data", "verify", "bert", "--set", "data.directory=data/none"], "ttt data prepare"),
        (["inspect", "kernels", "bert", "eager", *MINI, "--trace", "no/t.json"], "no/t.json: no such folder"),
        (["inspect", "kernels", "bert", "eager", *MINI, "--trace", "/tmp"], "--trace /tmp: is a folder"),
        (["bench"], "required: benchmark; see"),
        (["bench", "resnet", "fast"], "known: baseline"),
        (["bench", "bert", "baseline+bogus=1", *MINI], "unknown key"),
        (["bench", "bert", "--batch-size", "0", *MINI], "not a whole number from 1"),
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
    assert done.returncode == 0 and re.fullmatch(VERSION, done.stdout)
    overview = ttt_here("--help").stdout
    assert "exit codes" in overview and all(f"\n  {verb} " in overview for verb in COMMANDS)
    headings = re.findall(r"^(\w+):$", overview, re.MULTILINE)
    assert headings == list(GROUPS) == ["run", "evidence", "study"] and len(COMMANDS) <= 16
    assert max(map(len, overview.splitlines())) < 80


@pytest.mark.parametrize(("verb", "part"), FORMS)
def test_help_names_a_command_and_no_default_that_says_nothing(verb, part, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = (verb, *part.split())
    done = ttt_here("help", *words)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: ttt {' '.join(words)} ")
    assert "exit codes" in done.stdout and done.stdout == ttt_here(*words, "--help").stdout
    assert not re.search(r"default: (None|True|False|\[|\)|/)|PosixPath", " ".join(done.stdout.split()))
    assert max(map(len, done.stdout.splitlines())) < 80
    assert not re.search(r" --?\S+ \\\n +[^- ]", done.stdout)  # no option without its value
    assert all(f"\n  ttt {verb} {name}" in done.stdout for name in PARTS.get(verb, ()) if not part)
    assert not part or not any(f"\n\n{name}: " in done.stdout for name in PARTS[verb] if name != part)


FIGURES = ["list", "doctor", "check", "score", "reproduce", "bench", "compare", "ablate", "sweep"]
PRINT_FIGURES = {
    ("data", "status"),
    ("check", "--replay"),
    *((verb, "") for verb in (*FIGURES, "accept", "estimate")),
    *(("inspect", part) for part in PARTS["inspect"]),
}


@pytest.mark.parametrize(("verb", "part"), FORMS)
def test_one_rule_for_size_json_and_out(verb, part):
    options = make_parser(verb, part)[0]._option_string_actions
    if "--size" in options:
        assert (options["--size"].default, options["--size"].choices) == ("full", SIZES)
    assert options.get("--out") is options.get("-o")
    assert ("--json" in options) == ((verb, part) in PRINT_FIGURES)
    assert "--json" not in options or options["--json"].help == "print the figures as JSON"


@pytest.mark.parametrize(
    ("line", "part", "rest"),
    [
        ("inspect bert kernels --trace profile", "kernels", "bert --trace profile"),  # a value is no part
        ("inspect --trace profile kernels bert", "kernels", "--trace profile bert"),
        ("inspect --set=a=1 kernels", "kernels", "--set=a=1"),
        ("report --json --explore", "--explore", "--json"),
        ("data prepare status", "prepare", "status"),
        ("export results --to submission --list", "--to submission", "results --list"),
        ("export results --to=submission --list", "--to submission", "results --list"),
        ("check --all", "", "--all"),
    ],
)
def test_a_part_may_stand_anywhere_and_only_as_whole_words(line, part, rest):
    verb, *words = line.split()
    assert find_part(verb, words) == (part, rest.split())


def test_every_suggestion_is_a_command():
    for line in (*OTHER_WORDS, *(" ".join(words) for words in OLD_NAMES.values())):
        verb, *words = line.split()
        parser, _ = make_parser(verb, find_part(verb, words)[0])
        rest = find_part(verb, words)[1]
        options = {*parser._option_string_actions, "-O1", "prepare", "verify", "mini"}
        options |= {choice for action in parser._actions for choice in action.choices or ()}
        assert verb in COMMANDS and set(rest) <= options, line


def test_help_loads_nothing_that_takes_its_time():
    slow = ("torch", "numpy", "scipy", "pydantic", "yaml", "rich", "matplotlib", "argcomplete")
    code = "import sys; from common.cli import dispatch; dispatch(['--help'])"
    done = run(sys.executable, "-c", f"{code}; sys.exit(' '.join({{*{slow}}} & {{*sys.modules}}) or 0)")
    assert done.returncode == 0, done.stderr


COMPLETE = """
import json, os, sys
from common.cli import complete
for line, file in json.loads(sys.argv[1]).items():
    os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": file}
    if not os.fork():
        complete()
    os.wait()
"""


def test_a_shell_completes_verbs_benchmarks_configurations_and_sizes(tmp_path):
    pytest.importorskip("argcomplete")
    expected = {
        "ttt ": set(COMMANDS),
        "ttt re": {"report", "reproduce"},
        "ttt run b": {"bert"},
        "ttt run bert opt": {"optimized", "optimized_fp8", "optimized_muon"},
        "ttt run resnet opt": {"optimized", "optimized_short"},
        "ttt run bert optimized --size ": {"full", "mini"},
        "ttt inspect k": {"kernels"},
        "ttt inspect kernels bert mos": {"mosaic"},
        "ttt report --expl": {"--explore"},
        "ttt list m": {"methods"},
        "ttt explore --pric": {"--prices"},
    }
    files = {line: str(tmp_path / str(number)) for number, line in enumerate(expected)}
    shell = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    done = run(sys.executable, "-c", COMPLETE, json.dumps(files), env=os.environ | shell)
    assert done.returncode == 0, done.stderr
    for line, words in expected.items():
        assert {word.strip() for word in Path(files[line]).read_text().splitlines()} == words, line


def test_list_has_every_size_and_configuration():
    (entry,) = json.loads(ttt_here("list", "bert", "--json").stdout)["benchmarks"]
    assert [*entry["sizes"], *entry["configurations"]] == [*SIZES, *configurations("language_bert")]


def test_the_settings_of_a_logged_command_are_read_as_they_were_meant():
    words = ["run", "bert", "baseline", "--set", "a.b=1", "c=2", "--size", "mini", "x=3"]
    spread = spread_settings(words)
    assert [b for a, b in zip(spread, spread[1:], strict=False) if a == "--set"] == ["a.b=1", "c=2"]
    assert spread == [*words[:5], "--set", *words[5:]]
    assert spread_settings(["--set=a=1", "b=2"]) == ["--set=a=1", "--set", "b=2"]
    assert spread_settings(["--set", "a=1", "optimized+b=2"]) == ["--set", "a=1", "optimized+b=2"]


def test_the_rules_are_json_on_demand():
    rules = json.loads(ttt_here("check", "--rules", "--json").stdout)["rules"]
    listed = ttt_here("check", "--rules")
    text = listed.stdout
    assert listed.returncode == 0 and "S402 error    No run stands in a set twice" in text
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


def test_the_doctor_counts_its_seconds_from_the_start(monkeypatch):
    def load_torch():
        time.sleep(0.5)
        return False

    monkeypatch.setattr(torch_build, "has_torch", load_torch)
    monkeypatch.setattr(preflight, "cheap_checks", lambda *_: [])
    printed = re.search(r"0 lines in ([0-9.]+) s", ttt_here("doctor", "--quick").stdout)
    assert float(printed[1]) >= 0.5
