"""The commands of every page, in order, in one clone, where training is made short; then a clean audit."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from common.cli import COMMANDS
from common.evidence.log import load
from common.evidence.score import score
from common.repository import ROOT, benchmarks
from tests.command import TTT, one_line, run, ttt_here
from tests.committed import tracked
from tests.verbs import run_all

STEPS = ("max_duration=16ba", "evaluate_every=8ba", "schedule.warmup=2ba")
SHORT = {
    "language_bert": ["--set", "target=0.01", "evaluate_from=8ba", *STEPS],
    "image_classification": [
        "--set",
        "target=0.05",
        "methods.progressive_crops=false",
        "precision=fp32",  # not every processor has instructions for bf16
        "evaluation_precision=fp32",
        "global_batch_size=16",
        *STEPS,
    ],
}
MORE = {  # what makes a command short, for a verb or the beginning of a line
    "ttt doctor --size": ["--quick"],
    "ttt accept --size mini": [
        *("--quick", "--benchmarks", "bert", "--seconds", "0.2", "--results", "report/none"),
    ],
    "ttt bench": ["--seconds", "0.2", "--no-parts"],
    "ttt bench image_classification": ["--batch-size", "2", "--shapes", "56"],
    **{f"ttt inspect compile {name} optimized": ["--size", "mini"] for name in benchmarks()},
    "ttt inspect": ["--size", "mini"],
    "ttt check results": ["--no-official"],  # which the last command asks
    "ttt report results": ["--no-official"],
    "ttt run language_bert optimized --size mini --runs 3": ["--runs", "2"],
    "ttt sweep": ["--dry-run"],
    "ttt ablate": ["--dry-run"],
    "ttt compare": ["--max-runs", "1", "--set", "max_duration=20ba", "schedule.warmup=5ba"],
    "ttt compare language_bert baseline baseline+clip_gradients": ["--dry-run"],
    "ttt inspect profile": ["--turns", "2"],
    "ttt run language_bert baseline --size mini -O1": ["--dry-run", "--tune-seconds", "5"],
}
ELSEWHERE = {  # commands that other tests, or a person, run
    "./run_all.sh": "sets up an environment of its own",
    "tests/run.sh": "sets up an environment of its own",
    ".ci/run": "runs these tests",
    "systems/gpu_day.sh": "tests/common/measure/test_gpu_day.py",
    "systems/wheels.sh": "fetches wheels from the network",
    "ttt list methods --measure": "tests/common/study/test_method_steps.py, as slowly",
    "ttt data fetch": "tests/language_bert/data/test_public_data.py, from a server on this machine",
}
COVERED = {  # commands that only the test on demand runs: tests of the same verbs pass before every change
    "ttt accept --size mini": "tests/common/doctor/test_accept.py",
    "ttt ablate": "tests/common/study/ablation",
    "ttt bench": "tests/test_cli.py",
    "ttt doctor --quick": "tests/common/doctor",
    "ttt estimate": "tests/common/study/predict",
    "ttt export --to submission": "tests/common/evidence/submission",
    "ttt compare language_bert baseline": "tests/common/study/compare",
    "ttt inspect compile": "tests/common/measure/test_compile_for.py",
    "ttt inspect graphs": "tests/common/measure/test_gpu_day.py",
    "ttt inspect profile": "tests/common/measure/test_profile.py",
    "ttt run image_classification baseline --size mini --nproc": "tests/common/training/test_distributed.py",
    "ttt run image_classification optimized --size mini --set": "tests/common/config",
    "ttt run language_bert baseline --size mini -O1": "tests/common/study/tuning",
    "ttt sweep": "tests/common/study/test_sweep.py",
}
REFUSED = 2  # where data and GPUs of size full are not at hand
PAGES = [str(path.relative_to(ROOT)) for path in tracked() if path.suffix == ".md"]
README = (ROOT / "README.md").read_text()
SETS = [ROOT / f"results/reference-2cpu-mini-{configuration}" for configuration in ("baseline", "optimized")]


def blocks(language):
    """Return the code blocks of all pages in a language."""
    texts = [(ROOT / page).read_text() for page in PAGES if page != "METHODS.md"]  # see test_plain_loop.py
    return [block for text in texts for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def files():
    """Return the files that the pages write, by their paths: a Python block whose first line names one."""
    named = (re.match(r"# (\S+/\S+\.py)\n", block) for block in blocks("python"))
    return {match[1]: match.string for match in named if match}


def is_method(block):
    return re.match(r"# \w+/methods/\w+\.py\n", block)  # which a command and a test of its page load


def commands():
    """Return every command in the shell blocks of all pages, each once."""
    lines = [line.split(" #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [*dict.fromkeys(filter(None, lines))]


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_pages_is_understood(line):
    program, verb, *words = [*shlex.split(line), ""]
    if program != "ttt":
        assert os.access(ROOT / program, os.X_OK)
        return
    assert verb in COMMANDS
    if "DIR" in words:  # a person's own folder
        assert "DIR" in one_line(ttt_here(*shlex.split(line)[1:]))
        return
    is_written = any(Path(path).stem in line for path in files())  # names a method of a page
    is_elsewhere = line.startswith("ttt data fetch") or (verb == "data" and "--data" in words)
    can_run = not (is_written or is_elsewhere or "--all" in words)
    extra = {"run": ["--dry-run"], "data": []}.get(verb, ["--help"]) if can_run else ["--help"]
    if "-O1" in words:
        extra = [*extra, "--tune-seconds", "1"]
    done = ttt_here(*shlex.split(line)[1:], *extra)
    assert done.returncode == 0, done.stderr


def shortened(line):
    """Return the words of a command that is made short, and the exit code that it has."""
    words = shlex.split(line)
    for beginning, more in MORE.items():
        if line.startswith(beginning):
            words += more
    if "--dry-run" not in words and ("full" in words or line == "ttt accept"):
        return words, REFUSED
    if "--dry-run" not in words and words[1] == "run":
        words += SHORT[words[2]]
    finding = ("ttt inspect graphs", "ttt reproduce results", "ttt doctor --describe --missing", "ttt accept")
    return words, int(line.startswith(finding))  # of mini, on a CPU, before a person stated or measured any


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages") / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    for name in benchmarks():
        shutil.copytree(ROOT / "data" / name / "mini", folder / "data" / name / "mini")
    for path, text in files().items():
        (folder / path).write_text(text)
    subprocess.run(["git", "add", *files()], cwd=folder, check=True)
    author = ["-c", "user.name=reader", "-c", "user.email=reader@example.com"]
    subprocess.run(["git", *author, "commit", "--quiet", "-m", "a method"], cwd=folder, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("skipped", [COVERED, pytest.param({}, marks=pytest.mark.on_demand)])
def test_the_commands_of_the_pages_do_what_they_say_and_the_audit_is_clean(clone, skipped):
    path = os.pathsep.join([str(TTT.parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": str(clone), "PATH": path}
    lines = [line for line in commands() if line != "ttt check"]  # of everything, so once, at the end
    lines = [line for line in [*lines, "ttt check"] if not line.startswith((*ELSEWHERE, *skipped))]
    if skipped:  # the test of each alone makes dry runs
        lines = [line for line in lines if not (line.startswith("ttt run") and "--dry-run" in line)]
    shorter, where = [shortened(line) for line in lines], {"cwd": clone, "env": environment}
    if skipped:  # in one process: to load torch takes longer than most of them
        ended = run_all([shlex.join(words[1:]) for words, _ in shorter], **where, timeout=3600)
    else:  # some of these change their process
        ended = [run(*words, **where) for words, _ in shorter]
    wrong = [
        f"{shlex.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}"
        for (words, code), done in zip(shorter, ended, strict=True)
        if done.returncode != code or "Traceback" in done.stderr
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in blocks("python") if not is_method(block)])
def test_every_python_block_of_the_pages_runs(clone, block):
    short = re.sub(r"seconds=\d+", "seconds=5", block)
    short += "".join(f"\n{name}()" for name in re.findall(r"^def (test_\w+)", block, re.MULTILINE))
    done = run(sys.executable, "-c", short, cwd=clone)
    assert done.returncode == 0, done.stderr


def test_the_picture_is_drawn_from_the_committed_logs(tmp_path):
    picture, committed = tmp_path / "quality.svg", ROOT / "results/quality.svg"
    done = ttt_here("report", *SETS, "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert {child.tag.rpartition("}")[2] for child in ElementTree.parse(picture).getroot()} >= {"style", "g"}
    drawn, kept = (re.sub("Matplotlib v.*", "", path.read_text()) for path in (picture, committed))
    assert drawn == kept, "draw it again: ttt report results/reference-* --plot results/quality.svg"


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
    targets = [link for link in links if not link.startswith("http")]
    assert [link for link in targets if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_table_of_results_is_what_score_computes():
    scores = json.loads(ttt_here("score", *SETS, "--json").stdout)["scores"]
    by_name = {(row["is_proxy"], row["benchmark"], row["configuration"]): row for row in scores}
    for benchmark, title in (("resnet", "ResNet"), ("bert", "BERT")):
        for configuration, published in (("baseline", "baseline"), ("optimized", "methods")):
            ours, theirs = by_name[True, benchmark, configuration], by_name[False, benchmark, published]
            minutes, rate = interval(ours["minutes"], ours["interval"], 60), f"{ours['samples_per_s']:,.0f}"
            row = rf"\| {title} \| {configuration} \| {theirs['minutes']:.2f} min"
            if faster := ours["speedup"]:
                row += f": {theirs['speedup']['ratio']:.2f}x"
            row += rf" \| {minutes.replace(' ', ' s ', 1)}, {rate} \w+/s"
            if faster:
                row += f": {interval(faster['ratio'], faster['interval'], digits=2).replace(' ', 'x ', 1)}"
            row = row.replace("(", r"\(").replace(")", r"\)")
            assert re.search(rf"^{row} \| \[{len(ours['runs'])} runs\]", README, re.MULTILINE), row


def interval(value, limits, scale=1, digits=1):
    low, high = limits["low"] * scale, limits["high"] * scale
    return f"{value * scale:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def test_the_table_of_seeds_is_that_of_the_logs():
    page = (ROOT / "language_bert/README.md").read_text()
    for run_set in load([folder / "bert" for folder in SETS]):
        for timed, log in zip(score(run_set).runs, run_set.logs, strict=True):
            seed, seconds = log.value("seed"), timed.minutes * 60
            assert f"| {seed} | {timed.samples:,.0f} | {timed.quality:.4f} | {seconds:.1f} |" in page


def test_readme_is_short_and_warns_first():
    lines = README.splitlines()
    assert len(lines) <= 130 and "retired from MLPerf" in " ".join(lines[:20])


def test_the_readme_leads_to_every_page_about_a_task():
    pages = [page for page in PAGES if page.startswith("docs/")]
    assert len(pages) >= 4 and [page for page in pages if f"]({page})" not in README] == []
