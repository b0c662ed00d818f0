"""Ask MLCommons' checkers (mlperf_logging), each in its own process; their verdicts are shown as theirs.

They raise on many bad logs, answer in text and often exit 0 when they find errors, and in the open division
never compare the accuracy with the target: see rules/ beside this file.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from common.evidence.audit import Audited, Verdict
from common.evidence.compare.rcp import committed_points, is_committed
from common.evidence.log import NUM_RUNS, Log, RunSet, load
from common.evidence.paths import label
from common.evidence.records import YEAR_2100_MS, printable
from common.evidence.rules.rounds import ROUNDS, last_round
from common.evidence.system import CHOICES, STATUS, read

PUBLISHED = {"resnet": ("2.0.0", "2.1.0"), "bert": ("2.1.0",)}  # the rounds of the published runs
RULESETS = {  # that our own sets are held to: those, and the last that had the benchmark
    name: (*rulesets, last_round(name)) for name, rulesets in PUBLISHED.items()
}
NUM_PROCESSES = 2
TIMEOUT_S = 60  # of one log or description; a package takes longer
MAX_MEMORY = 2 * 2**30  # of a checker; it takes 0.3 GB for a log of 2 MB
MAX_WRITTEN = 64 * 2**20  # of a file that a checker writes
UNKNOWN = "unknown benchmark or division"
LIMITS = """
import resource, runpy, sys
limits = {{"AS": {memory}, "FSIZE": {written}, "CPU": {cpu}}}
for name, most in limits.items():
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
"""
MODULE = "runpy.run_module('mlperf_logging.{}', run_name='__main__', alter_sys=True)"
SEEDS = (
    "from mlperf_logging.package_checker.seed_checker import SeedChecker as S; "
    "print('PASSED' if S(sys.argv[1]).check_seeds(sys.argv[2:]) else 'FAILED', file=sys.stderr)"
)
CHECKERS = {  # name -> code that runs it, and words of its last line where it passes or refuses
    "compliance": (MODULE.format("compliance_checker"), "SUCCESS", "FAILED"),
    "system description": (MODULE.format("system_desc_checker"), "checker passed", "checker failed"),
    "package": (MODULE.format("package_checker"), "FOUND NO ERRORS", "FOUND ERRORS"),
    "repository": (MODULE.format("repo_checker"), "ALL CHECKS PASSED", "CHECKS FAILED"),
    "seeds": (SEEDS, "PASSED", "FAILED"),
    "RCP": (MODULE.format("rcp_checker"), "RCP test PASSED", "RCP test FAILED"),
}
FAILED_CHECK = re.compile(r"(?:CHECK for .*\n.*\n)?failed test: .*")  # a record stands in between
BYPASSED = "with --rcp-bypass: MLCommons has no reference convergence points of size mini"
LOG = ("--log_output", "log")  # in the empty folder in which a checker runs
SEEDS_ASKED = "4.1.0"  # the round from which the rules, and not the checker alone, ask for seeds
STATUS_LISTED = "4.0.0"  # the ruleset from which the checker knows a list of words for `status`


def rulesets(run_set: RunSet, chosen: str | None = None) -> tuple[str, ...]:
    """Return the rulesets of a run set: `chosen`, else by benchmark and date.

    Runs from after the benchmark's last round, as this suite's, are held to that round, and open ones also to
    those of the published runs. Closed bert runs of the 2.1.0 round are held to 2.0.0: 2.1.0 was edited later
    and refuses what its round accepted.
    """
    lead, known = run_set.lead, RULESETS.get(run_set.lead.benchmark, ())
    if chosen:
        return (chosen,) if lead.benchmark in ROUNDS[chosen][1] else ()
    start = lead.first("run_start")
    if lead.is_ours and lead.is_closed:
        return known[-1:]
    if lead.is_ours or not start or not known or start.time_ms >= YEAR_2100_MS:
        return known
    month = datetime.fromtimestamp(start.time_ms / 1000, UTC).strftime("%Y-%m")
    ruleset = next((r for r, (end, names) in ROUNDS.items() if month < end and lead.benchmark in names), None)
    if ruleset == "2.1.0" and lead.benchmark == "bert" and lead.is_closed:
        ruleset = "2.0.0"
    return (ruleset,) if ruleset else known


def judge_sets(audited: Sequence[Audited], chosen: str | None = None) -> list[Audited]:
    """Add the checkers' verdicts to audited sets; those on a whole submission stand with its first set."""
    package = judge_package([entry.run_set for entry in audited], chosen)
    judged = []
    for entry in audited:
        verdicts = judge(entry.run_set, chosen) + judge_seeds(entry.run_set, chosen)
        verdicts += judge_convergence(entry.run_set, chosen)
        judged.append(replace(entry, verdicts=(*verdicts, *package)))
        package = []
    return judged


def judge(run_set: RunSet, chosen: str | None = None) -> list[Verdict]:
    """Return the compliance checker's verdict per log and ruleset; one takes up to a second."""
    calls = [(log, ruleset) for log in run_set.logs for ruleset in rulesets(run_set, chosen)]
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        verdicts = list(pool.map(lambda call: _compliance(*call), calls))
        refused = [index for index, verdict in enumerate(verdicts) if verdict.refuses]
        if not refused or any(verdicts[index].verdict != "FAILED" for index in refused):
            return verdicts
        for ruleset in later_rulesets([run_set], chosen):
            again = pool.map(lambda index, ruleset=ruleset: _compliance(calls[index][0], ruleset), refused)
            if all(verdict.verdict == "SUCCESS" for verdict in again):
                why = f"the logs may be of the next round, and ruleset {ruleset} accepts them"
                return [verdict.excuse(why) if verdict.refuses else verdict for verdict in verdicts]
    return verdicts


def later_rulesets(run_sets: Sequence[RunSet], chosen: str | None = None) -> list[str]:
    """Return the rulesets of the rounds after these run sets': logs are often submitted a round late.

    None where a person chose one, nor for logs of this suite, which are written for theirs.
    """
    if chosen or any(run_set.lead.is_ours for run_set in run_sets):
        return []
    last = max((r for run_set in run_sets for r in rulesets(run_set)), default="")
    names = {run_set.lead.benchmark for run_set in run_sets}
    return [ruleset for ruleset, (_, known) in ROUNDS.items() if ruleset > last and names <= set(known)]


def judge_seeds(run_set: RunSet, chosen: str | None = None) -> list[Verdict]:
    """Return the seed checker's verdict on a run set; the rules ask for it in the closed division only."""
    files = [str(log.file) for log in run_set.readable if log.file]
    known = rulesets(run_set, chosen)
    if not files or not known:
        return []
    verdict = _ask("seeds", run_set.folder, known[-1], known[-1], *files)
    if not any(log.is_closed for log in run_set.logs):
        verdict = replace(verdict, is_applied=False)
    elif verdict.refuses and lacks_seeds(run_set, known[-1]):
        verdict = verdict.excuse(f"the rules ask for seeds from {SEEDS_ASKED} on")
    return [verdict]


def lacks_seeds(run_set: RunSet, ruleset: str) -> bool:
    """True if no log of a run set has a seed, in a round that did not ask for one."""
    return ruleset < SEEDS_ASKED and not any(log.first("seed") for log in run_set.logs)


def judge_convergence(run_set: RunSet, chosen: str | None = None) -> list[Verdict]:
    """Return the verdict of the RCP checker on a closed set of this suite.

    MLCommons has no reference convergence points of size mini: there the other committed runs of the
    configuration stand for them, and the verdict refuses nothing.
    """
    lead, known = run_set.lead, rulesets(run_set, chosen)
    if not (known and lead.is_ours and lead.is_closed):
        return []
    leave_out = partial(
        Verdict, path=run_set.folder, ruleset=known[-1], checker="RCP", verdict="not run", is_applied=False
    )
    expected = NUM_RUNS[lead.benchmark]
    if len(run_set.readable) != expected:
        return [leave_out(detail=f"{len(run_set.readable)} runs, and the round wants {expected}")]
    points = committed_points(lead) if run_set.is_proxy else {}
    if run_set.is_proxy and not points:
        none = f"no runs of {lead.configuration} at size mini are committed"
        return [leave_out(detail="the set itself is the reference" if is_committed(lead) else none)]
    with _copy([run_set]) as copy:
        results = copy / "results" / Path(*lead.folders)
        arguments = [str(results), "--rcp_version", known[-1], *LOG]
        if not run_set.is_proxy:
            return [_ask("RCP", run_set.folder, known[-1], *arguments)]
        file = copy / "points.json"
        file.write_text(json.dumps(points), encoding="utf-8")
        verdict = _ask("RCP", run_set.folder, known[-1], *arguments, "--custom_rcps", str(file))
    return [verdict.excuse("size mini stands beside the committed runs of this suite, not MLCommons'")]


def judge_package(run_sets: Sequence[RunSet], chosen: str | None = None) -> list[Verdict]:
    """Return the verdicts on the submissions that these run sets belong to, and on their descriptions.

    The package checker gets a copy, because it writes into the folder that it checks; no set of size mini.
    """
    packages: dict[Path, list[RunSet]] = {}
    for run_set in run_sets:
        folder = run_set.systems_folder
        if folder and folder.is_dir():
            packages.setdefault(folder, []).append(run_set)
    return [verdict for folder, group in packages.items() for verdict in _package(folder, group, chosen)]


def judge_description(file: Path, ruleset: str) -> Verdict:
    """Return the verdict on one systems/<system>.json; the checker crashes on what `system.read` refuses."""

    def ask(asked: Path) -> Verdict:
        arguments = (str(asked.absolute()), "training", ruleset, *LOG)
        return _ask("system description", label(file), ruleset, *arguments)

    verdict = ask(file)
    if verdict.refuses and ruleset >= STATUS_LISTED and (word := other_status(file)):
        with tempfile.TemporaryDirectory() as name:
            copy_description(file, Path(name, file.name), mends_status=True)
            if ask(Path(name, file.name)).verdict == "SUCCESS":
                return verdict.excuse(f"MLCommons accepts the status '{word}', and all else is right")
    return verdict


def other_status(file: Path) -> str:
    """Read the status of a description if only the checker's list of words lacks it; else ''."""
    status = described(file).get("status")
    known = [word.lower() for word in (*STATUS, "available", *STATUS.values())]
    is_word = isinstance(status, str) and status.lower().startswith(tuple(known))
    return printable(status, 40) if is_word and status not in CHOICES["status"] else ""


def described(file: Path) -> dict[str, object]:
    """Return the fields of a description; none if `system.read` refuses it."""
    try:
        fields = read(file, takes_repeated=True)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def copy_description(file: Path, target: Path, *, mends_status: bool) -> None:
    if not (mends_status and other_status(file)):
        shutil.copyfile(file, target)
        return
    fields = described(file) | {"status": STATUS["onprem"]}
    target.write_text(json.dumps(fields), encoding="utf-8")


def judge_tree(folder: Path) -> list[Verdict]:
    """Return the verdicts on an assembled `<submitter>/`: by each benchmark's rounds, and as a repository.

    For size mini the package checker has no reference convergence points and skips that check.
    """
    verdicts = []
    run_sets = load([folder / "results"])
    for benchmark in sorted({run_set.lead.benchmark for run_set in run_sets}):
        group = [run_set for run_set in run_sets if run_set.lead.benchmark == benchmark]
        has_proxy = any(run_set.is_proxy for run_set in group)
        for ruleset in RULESETS[benchmark]:
            judged = [run_set for run_set in group if ruleset in rulesets(run_set)]
            if not judged:
                continue
            with _copy(judged, _descriptions(folder / "systems", judged)) as copy:
                options = ["--rcp-bypass"] * has_proxy
                verdict = _submission(copy, f"{folder.name} ({benchmark})", ruleset, *options)
            is_bypassed = has_proxy and any(run_set.lead.is_closed for run_set in judged)
            if is_bypassed and not verdict.refuses:
                verdict = replace(verdict, detail=BYPASSED)
            verdicts.append(verdict)
    latest = RULESETS["bert"][-1]  # named in the command, and of no effect
    return [*verdicts, _ask("repository", folder.name, latest, str(folder), "training", latest, *LOG)]


def _compliance(log: Log, ruleset: str) -> Verdict:
    leave_out = partial(Verdict, path=log.path, ruleset=ruleset, verdict="not run")
    if log.is_study:
        return leave_out(detail="a study trains to the end of its budget", is_applied=False)
    if not log.file or not log.is_readable:
        return leave_out(detail="refused before: no text with records", is_applied=False)
    if not _has_known_names(log):
        return leave_out(detail=UNKNOWN)
    arguments = ("--usage", "training", "--ruleset", ruleset, *LOG, str(log.file))
    verdict = _ask("compliance", log.path, ruleset, *arguments)
    if verdict.refuses and log.is_honest_miss:  # rule S408 counts them
        return verdict.excuse("the run missed its target and says so; a set may have one")
    return verdict


def _has_known_names(log: Log) -> bool:
    """True if the values from which the checker builds file names are known ones."""
    known = {"submission_benchmark": tuple(RULESETS), "submission_division": ("open", "closed")}
    return all(event.value in values for key, values in known.items() for event in log.events(key))


def _package(folder: Path, run_sets: Sequence[RunSet], chosen: str | None) -> Iterator[Verdict]:
    groups: dict[str, list[RunSet]] = {}  # by round
    for run_set in run_sets:
        for ruleset in rulesets(run_set, chosen):
            groups.setdefault(ruleset, []).append(run_set)
    if not groups:
        return
    for ruleset, group in sorted(groups.items()):
        yield from (judge_description(file, ruleset) for file in _descriptions(folder, group))
    leave_out = partial(Verdict, path=label(folder.parent), checker="package", verdict="not run")
    if any(run_set.is_proxy for run_set in run_sets):
        yield leave_out(ruleset=max(groups), detail="size mini is no submission", is_applied=False)
        return
    for ruleset, group in sorted(groups.items()):
        if all(_has_known_names(log) for run_set in group for log in run_set.logs):
            yield _judge_group(folder, group, ruleset, chosen)
        else:
            yield leave_out(ruleset=ruleset, detail=UNKNOWN)


def _descriptions(folder: Path, run_sets: Sequence[RunSet]) -> list[Path]:
    names = dict.fromkeys(name for run_set in run_sets if (name := run_set.lead.folders[0]))
    return [file for name in names if (file := folder / f"{name}.json").is_file()]


def _judge_group(folder: Path, run_sets: Sequence[RunSet], ruleset: str, chosen: str | None) -> Verdict:
    """Judge the run sets of one round; a refusal of only what MLCommons accepts is excused."""
    files, shown = _descriptions(folder, run_sets), label(folder.parent)
    with _copy(run_sets, files) as copy:
        verdict = _submission(copy, shown, ruleset)
    if verdict.verdict != "FAILED" or any(run_set.lead.is_ours for run_set in run_sets):
        return verdict
    seedless = ["--seed-checker-bypass"] * any(lacks_seeds(run_set, ruleset) for run_set in run_sets)
    has_other_words = any(map(other_status, files))
    with _copy(run_sets, files, mends_status=True) as copy:
        for other in (ruleset, *later_rulesets(run_sets, chosen)):
            differs = ["without the check of seeds"] * len(seedless)
            differs += ["with another word for the status"] * (has_other_words and other >= STATUS_LISTED)
            differs += [f"by ruleset {other}"] * (other != ruleset)
            if differs and _submission(copy, shown, other, *seedless).verdict == "SUCCESS":
                return verdict.excuse(f"accepted {', '.join(differs)}")
    return verdict


def _submission(copy: Path, shown: str, ruleset: str, *options: str) -> Verdict:
    num_logs = sum(1 for _ in copy.glob("results/*/*/result_*.txt"))
    arguments = (str(copy), "training", ruleset, *LOG, *options)
    return _ask("package", shown, ruleset, *arguments, timeout_s=TIMEOUT_S + num_logs)


@contextmanager
def _copy(
    run_sets: Sequence[RunSet], descriptions: Sequence[Path] = (), *, mends_status: bool = False
) -> Iterator[Path]:
    """Yield a temporary folder with a submission of the readable logs and the descriptions."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "submission")
        (root / "systems").mkdir(parents=True)
        for file in descriptions:
            copy_description(file, root / "systems" / file.name, mends_status=mends_status)
        for run_set in run_sets:
            target = root / "results" / Path(*run_set.lead.folders)
            target.mkdir(parents=True, exist_ok=True)
            for log in run_set.readable:
                if log.file:
                    shutil.copyfile(log.file, target / log.file.name)
        yield root


def _ask(checker: str, path: str, ruleset: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> Verdict:
    """Run a checker in an empty folder; its verdict is the last line that has one of its two texts."""
    code, passed, failed = CHECKERS[checker]
    make_verdict = partial(Verdict, path=path, ruleset=ruleset, checker=checker)
    limits = LIMITS.format(memory=MAX_MEMORY, written=MAX_WRITTEN, cpu=round(timeout_s))
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(folder, "stderr").open("w+", errors="replace") as output,
    ):
        try:
            done = subprocess.run(
                [sys.executable, "-c", limits + code, *arguments],
                cwd=folder,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # each thread takes addresses
                stdout=subprocess.DEVNULL,
                stderr=output,
                timeout=10 * timeout_s,  # a busy machine gives it less
            )
        except subprocess.TimeoutExpired:
            return make_verdict(verdict="crashed", detail=f"no answer in {10 * timeout_s:.0f} s")
        output.seek(0)
        text = output.read()
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return make_verdict(verdict="crashed", detail=f"stopped after {timeout_s:.0f} s of processor time")
    lines = [line for line in text.splitlines() if line.strip(" -") and "Warning" not in line]
    if lines and lines[-1].startswith("MemoryError"):
        return make_verdict(verdict="crashed", detail=f"stopped at {MAX_MEMORY // 2**30} GiB of memory")
    last = next((line for line in reversed(lines) if passed in line or failed in line), "")
    if done.returncode not in (0, 1) or not last or "Traceback" in text:
        return make_verdict(verdict="crashed", detail=printable(lines[-1] if lines else "no answer"))
    if failed in last:
        errors = [line for line in lines if line.startswith("ERROR") and not line.endswith(failed)]
        checks = [re.sub(r"\n.*\n", " ", check) for check in FAILED_CHECK.findall(text)]
        return make_verdict(verdict="FAILED", detail=printable((errors or checks or lines[:-1] or [""])[-1]))
    return make_verdict(verdict="SUCCESS")
