"""One place for results: commands write to and read from the same folders wherever a person stands."""

import re
from pathlib import Path

import pytest

from common.cli import find_part, make_parser
from common.repository import ROOT, relative_path, relative_paths_in
from tests.command import ttt_here

FOLDERS = {"results": ROOT / "results", "systems": ROOT / "systems"}
READERS = ("score", "check", "report", "reproduce", "export", "report --explore")
WRITERS = {
    "results": "accept|run --all|run|bench|inspect neighbour|inspect compile|inspect profile|doctor|estimate|"
    "sweep|ablate",
    "systems": "run --all|run",
}
LOGS = ROOT / "results" / "reference-2cpu-mini-baseline"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A person stands in a folder beside the repository."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def defaults(command):
    """Return the defaults of a command's arguments."""
    verb, *words = command.split()
    parser, _ = make_parser(verb, find_part(verb, words)[0])
    return {action.dest: action.default for action in parser._actions}


@pytest.mark.parametrize("verb", READERS)
def test_readers_read_where_writers_write(verb):
    (path,) = defaults(verb)["paths"]
    assert path.resolve() == FOLDERS["results"] and path.is_dir()


@pytest.mark.parametrize(
    ("option", "verb"), [(name, verb) for name in WRITERS for verb in WRITERS[name].split("|")]
)
def test_writers_name_their_folder_in_their_help(option, verb):
    assert defaults(verb)[option].resolve() == FOLDERS[option]
    text = ttt_here(*verb.split(), "--help").stdout
    (line,) = re.findall(rf"^  --{option} DIR +(.+\n.+)", text, re.MULTILINE)
    assert f"default: {option}/ of the" in " ".join(line.split())


def test_pages_go_to_one_folder():
    for command in ("report", "report --explore"):
        assert defaults(command)["out"].resolve() == ROOT / "report"


def test_results_are_read_from_anywhere():
    here = ttt_here("score", "--json")
    assert here.returncode == 0, here.stderr
    paths = re.findall(r'"source": "(\S+reference-2cpu\S+)"', here.stdout)
    assert paths and all(Path(path).is_dir() for path in paths)


def test_a_path_is_echoed_as_it_was_given(tmp_path):
    for page in (tmp_path / "page.html", "page.html"):
        assert f"wrote {page}: " in ttt_here("report", "--explore", LOGS, "-o", page).stdout
        assert Path(page).is_file()
    for folder in (tmp_path / "report", "report"):
        done = ttt_here("report", LOGS, "--no-official", "--out", folder)
        assert f"wrote {folder}/index.html\n" in done.stdout and Path(folder, "index.html").is_file()


def test_a_printed_path_is_one_from_here(tmp_path):
    results = tmp_path / "results"
    measured = ("--samples", 9, "--measured", "1000@16", "--results", "../results")
    done = ttt_here("estimate", "bert", "optimized", "--size", "mini", *measured)
    (path,) = re.findall(r"^-> (.+)$", done.stdout, re.MULTILINE)
    assert Path(path).resolve().is_relative_to(results) and Path(path).is_file()
    assert Path(relative_path(ROOT / "README.md")).samefile(ROOT / "README.md")
    assert Path(relative_paths_in(f"{ROOT}/README.md: changed").partition(":")[0]).is_file()
