"""One place for results: commands write to and read from the same folders in any working folder."""

import re
import shutil
from pathlib import Path

import pytest

from common import repository
from common.arguments import settle_folders
from common.cli import find_part, make_parser
from common.data.status import source_directory
from common.repository import DATA, ROOT, relative_path, relative_paths_in
from common.run import run_sets
from tests.command import one_line, ttt_here

READERS = "score|check|report|reproduce|export --to csv|report --explore"
OPTIONS = {  # by option: the commands that read or write there
    "data": "run --all|run|accept|data fetch|data prepare|data verify|data status|doctor|inspect profile|"
    "inspect neighbour|estimate|sweep|ablate|compare|replay",
    "results": "run --all|run|accept|bench|inspect profile|inspect neighbour|inspect compile|doctor|estimate|"
    f"sweep|ablate|compare|list methods|{READERS}",
    "systems": "run --all|run|check|report|report --explore|export --to submission",
}
DEFAULTS = {
    "data": "default: $TTT_DATA, else data/ of the repository",
    "results": "default: results/ of the repository",
    "systems": "default: systems/ beside results/, else in --results",
}
LOGS = ROOT / "results" / "reference-2cpu-mini-baseline"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A working folder beside the repository."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def settled(command, *more):
    """Return the arguments of a command as its `main` gets them."""
    verb, *words = command.split()
    part, words = find_part(verb, words)
    args = make_parser(verb, part)[0].parse_args([*words, *more])
    settle_folders(args)
    return args


@pytest.mark.parametrize("command", READERS.split("|"))
def test_readers_read_where_writers_write(command):
    (path,) = settled(command).paths
    assert path.resolve() == ROOT / "results" and path.is_dir()
    assert settled(command, "--results", "there").paths == [Path("there")]


@pytest.mark.parametrize(
    ("option", "command"), [(option, name) for option in OPTIONS for name in OPTIONS[option].split("|")]
)
def test_the_help_names_the_folders_of_a_command(option, command):
    text = " ".join(ttt_here(*command.split(), "--help").stdout.split())
    assert f" --{option} DIR " in text and DEFAULTS[option] in text


def test_a_description_is_written_beside_the_results():
    assert settled("run --all").systems.resolve() == ROOT / "systems"
    for folder in ("runs/results", "runs"):
        beside = settled("run --all", "--results", folder).systems
        assert beside.resolve() == Path("runs/systems").resolve()
    assert settled("run --all", "--results", "runs", "--systems", "here").systems == Path("here")


def test_pages_go_to_one_folder():
    for command in ("report", "report --explore"):
        assert settled(command).out.resolve() == ROOT / "report"


@pytest.fixture
def run_all(tmp_path, monkeypatch, prepared_data):
    """Return a function that runs `ttt run --all` with given ends of its runs; its results lie elsewhere."""

    def run(make_runs):
        monkeypatch.setattr(run_sets, "run_all", lambda planned, *_, **__: make_runs(planned))
        where = ("--results", tmp_path / "runs/results", "--data", ROOT / "data")
        of_what = ("--size", "mini", "--benchmarks", "bert", "--runs", 1, "--force")
        return ttt_here("run", "--all", *of_what, *where)

    return run


def fail_but_one(planned):
    """Make one run of the first set, and none of the second."""
    planned[0].directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(LOGS / "bert/result_0.txt", planned[0].directory)
    return 2


def test_the_page_of_all_lies_beside_the_results_and_a_fault_of_the_runs_stays_the_code(run_all, tmp_path):
    done = run_all(fail_but_one)
    assert done.returncode == 2 and "all done" in done.stdout and "error: " not in done.stderr, done.stderr
    assert (tmp_path / "runs/report/index.html").is_file()


def test_all_whose_runs_left_no_result_ends_with_their_code(run_all, tmp_path):
    done = run_all(lambda planned: 1)
    assert done.returncode == 1 and "error: " not in done.stderr, done.stderr
    assert not (tmp_path / "runs/report").exists()


def test_all_refuses_a_place_for_its_page_before_the_first_run(run_all, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/report").touch()
    assert "runs/report: cannot write here" in one_line(run_all(pytest.fail))


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


def test_a_link_to_another_disk_is_printed_from_here(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "data").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(repository, "WORKSPACE", clone)
    assert relative_path(clone / "data/mini") == "../clone/data/mini"
    assert relative_path(tmp_path / "disk/mini") == f"{tmp_path}/disk/mini"


@pytest.mark.parametrize("part", ["fetch", "status"])
def test_a_source_lies_in_the_folder_of_data_unless_it_is_named(part, monkeypatch, tmp_path):
    monkeypatch.setenv(DATA, str(tmp_path))
    text = " ".join(ttt_here("data", part, "--help").stdout.split())
    assert "default: BENCHMARK/source in the folder of --data" in text
    assert source_directory("language_bert") == tmp_path / "language_bert" / "source"
