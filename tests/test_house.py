"""The conventions of the code base (CONTRIBUTING.md), as tests."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from common import yaml_file
from common.commands import methods
from common.evidence.log import QUALITIES
from common.repository import ROOT, benchmark_module, benchmarks, configurations
from common.training.benchmark import Benchmark
from common.training.card import cards, list_faults, names_in
from common.training.load import load_config
from tests.committed import tracked

PACKAGES = ("common", *benchmarks())
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TEXTS = {path: path.read_text() for path in FILES}
NUM_FILES = Counter(word for text in TEXTS.values() for word in set(re.findall(r"\w+", text)))
NAMES_ALLOWED_IN = {"common/commands/all.py", "common/commands/data.py", "common/evidence/score.py"}


def name(path):
    return path.relative_to(ROOT).as_posix()


def num_lines(path):
    return TEXTS[path].count("\n")


NOT_YET = {"variable": ("common/machine/line.py",)}  # rule of English -> files; `found` is a key in JSON
FLOORS = (  # of the house, from the top: a room imports from lower floors alone
    ("cli",),
    ("commands",),
    ("doctor",),
    ("study",),
    ("measure",),
    ("run", *benchmarks()),
    ("methods", "data"),
    ("training",),
    ("machine",),
    ("config",),
    ("evidence",),
    ("arguments",),
    ("files", "repository", "processes"),
    ("yaml_file",),
    ("errors",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MODULES = {name(path)[:-3].replace("/", ".").removesuffix(".__init__"): path for path in FILES}


def imports(path):
    """Yield (line, module) of every import of the suite, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield node.lineno, module if module in MODULES else node.module


def room(module):
    package, *inner = module.split(".")
    return inner[0] if package == "common" and inner else package


def test_every_room_imports_from_lower_floors_alone():
    upward = [
        f"{name(path)}:{line} imports {target}"
        for module, path in MODULES.items()
        for line, target in imports(path)
        if target in MODULES and room(target) != room(module) and FLOOR[room(target)] <= FLOOR[room(module)]
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: {target for _, target in imports(path)} for module, path in MODULES.items()}
    graph = {module: targets & MODULES.keys() - {module} for module, targets in graph.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_rooms_are_small():
    folders = Counter(path.parent for path in FILES if path.parent.name != "methods")
    assert {name(folder): count for folder, count in folders.items() if count > 15} == {}
    assert len([path for path in FILES if path.parent == ROOT / "common"]) <= 8


def test_a_benchmark_answers_at_most_15_questions_of_the_loop():
    members = {name: value for name, value in vars(Benchmark).items() if not name.startswith("_")}
    functions = {name: getattr(value, "fget", value) for name, value in members.items()}
    derived = {name for name, function in functions.items() if getattr(function, "__final__", False)}
    questions = {*members, *Benchmark.__annotations__} - derived
    assert len(questions) <= 15, sorted(questions)


def test_evidence_names_what_the_benchmarks_measure():
    names = [benchmark_module(benchmark).Benchmark.names for benchmark in benchmarks()]
    assert {name.mlperf: name.quality for name in names} == QUALITIES


def test_commands_parse_call_and_print():
    long = {name(path) for path in (ROOT / "common/commands").rglob("*.py") if num_lines(path) > 120}
    assert long == set()


def test_only_the_log_writer_imports_the_official_logger():
    users = {
        name(path)
        for path in FILES
        if any(target.startswith("mlperf_logging") for _, target in imports(path))
    }
    assert users == {"common/run/mllog.py"}


@pytest.mark.parametrize("package", ["common.evidence", "common.commands"])
def test_reading_logs_and_starting_a_command_load_no_torch(package):
    folder = ROOT / package.replace(".", "/")
    modules = ", ".join(f"{package}.{path.stem}" for path in folder.glob("[a-z]*.py"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_are_short_ascii_and_name_no_configuration(path):
    text = TEXTS[path]
    assert num_lines(path) <= 400
    assert text.isascii()
    if name(path) not in NAMES_ALLOWED_IN:
        assert not re.search(r"""["'](baseline|optimized)["']""", text)


HEADLESS = re.compile(r"(What|How|Where|Which|Who(ever|se)?)\b")
NO_FUNCTIONS = {"dealt", "shown", "kept", "timed", "there", "told", "judged", "named"}
NO_VARIABLES = {"found", "each", "own", "told", "said"}
SHORT_LINES = 8


def english_faults(path):
    """Yield (rule, line, name) where a docstring or a name breaks a rule of English in CONTRIBUTING.md."""
    for node in ast.walk(ast.parse(TEXTS[path])):
        is_function = isinstance(node, ast.FunctionDef)
        if is_function or isinstance(node, ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if HEADLESS.match(text):
                yield "headless", getattr(node, "lineno", 1), text
        if is_function:
            num_lines = node.end_lineno - node.body[min(1, len(node.body) - 1)].lineno + 1
            is_helper = (
                num_lines <= SHORT_LINES and NUM_FILES[node.name] == 1 and path.parent.name != "methods"
            )
            if re.fullmatch("Return .*", text) and (node.name.startswith("_") or is_helper):
                yield "return", node.lineno, node.name
            if node.name in NO_FUNCTIONS:
                yield "function", node.lineno, node.name
        variable = getattr(node, "id", "") if isinstance(getattr(node, "ctx", None), ast.Store) else ""
        if isinstance(node, ast.arg):
            variable = node.arg
        if variable in NO_VARIABLES:
            yield "variable", node.lineno, variable


def test_docstrings_and_names_are_plain_english():
    faults = [
        f"{rule}: {name(path)}:{line}: {what}"
        for path in FILES
        for rule, line, what in english_faults(path)
        if not name(path).startswith(NOT_YET.get(rule, ()))
    ]
    assert faults == []


def repeated(values, base, path=""):
    """Yield the key paths of `values` that say what `base` says already."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            yield from repeated(value, base[key], f"{path}{key}.")
        elif key in base and base[key] == value:
            yield f"{path}{key}"


@pytest.mark.parametrize("benchmark", benchmarks())
def test_configurations_load_and_state_only_differences(benchmark):
    base = yaml_file.parse((ROOT / benchmark / "baseline.yaml").read_text(), "baseline.yaml")
    for configuration in configurations(benchmark):
        text = (ROOT / benchmark / f"{configuration}.yaml").read_text()
        assert len(text.splitlines()) <= 60
        for size in ("full", "mini"):
            load_config(benchmark, configuration, size=size, settings=[])
        if configuration == "baseline":
            continue
        values = yaml_file.parse(text, configuration).values
        assert list(repeated(values, base.values)) == []


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_every_method_has_a_card_and_a_test(card):
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert card.module in tests or f'"{card.name}"' in tests, card.module
    missing = [setting.name for setting in card.settings if not setting.description]
    assert not missing, f"{card.module}: say in Field(description=...) what these settings are: {missing}"


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_a_card_holds_the_lines_of_a_plain_loop(card):
    assert list(list_faults(card)) == [], card.module
    own = {node.name for node in ast.parse(card.path.read_text()).body if isinstance(node, ast.FunctionDef)}
    called = set().union(*(names_in(code) for _, code in card.use))
    assert own & called, f"{card.module}: `Use.` calls one of this file's functions: {', '.join(sorted(own))}"


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_the_settings_of_a_card_are_those_of_its_config(card):
    kind = getattr(importlib.import_module(card.module), card.name.title().replace("_", ""))
    assert [setting.name for setting in card.settings] == list(kind.Config.model_fields)


def test_the_page_of_methods_is_made_from_the_cards():
    page = (ROOT / "METHODS.md").read_text()
    assert page == methods.page(), "write it again: ttt list methods --out METHODS.md"


def test_no_path_of_a_machine_is_tracked():
    forbidden = re.compile(r"(?<![A-Za-z0-9._/-])/(work|root|home)/[A-Za-z0-9._-]+")
    here = Path(__file__)
    faults = [
        name(path)
        for path in tracked()
        if path != here and forbidden.search(path.read_text(errors="replace"))
    ]
    assert faults == []


def test_shell_scripts_are_short_and_strict():
    scripts = [path for path in tracked() if path.read_bytes().startswith(b"#!/usr/bin/env bash")]
    assert {ROOT / "run_all.sh", ROOT / "tests/run.sh"} <= set(scripts)
    for path in scripts:
        lines = path.read_text().splitlines()
        assert len(lines) <= 25 and "set -euo pipefail" in lines, path
        assert subprocess.run(["bash", "-n", path]).returncode == 0, path
    assert all(len(path.read_text().splitlines()) <= 25 for path in tracked() if path.suffix == ".sh")
