"""Ask MLCommons' checkers (mlperf_logging), each in its own process; their verdicts are shown as theirs.

They raise on many bad logs, answer in text and often exit 0 when they find errors, and in the open division
never compare the accuracy with the target: see rules/ beside this file.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from common.evidence.log import Log, RunSet, label
from common.evidence.records import YEAR_2100_MS, printable

RULESETS = {"resnet": ("2.0.0", "2.1.0"), "bert": ("2.1.0",)}  # the rounds of the published runs: ours too
ROUNDS = {  # ruleset: the month after its round, and the benchmarks that it has rules for
    "2.0.0": ("2022-07", ("resnet", "bert")),
    "2.1.0": ("2023-01", ("resnet", "bert")),
    "3.0.0": ("2023-07", ("resnet", "bert")),
    "3.1.0": ("2024-01", ("resnet", "bert")),
    "4.0.0": ("2024-07", ("resnet", "bert")),
    "4.1.0": ("2025-01", ("bert",)),
    "5.0.0": ("2025-07", ("bert",)),
}
NUM_PROCESSES = 2
TIMEOUT_S = 60  # of one log or description; a package takes longer
UNKNOWN = "unknown benchmark or division"
SEEDS = (
    "import sys; from mlperf_logging.package_checker.seed_checker import SeedChecker as S; "
    "print('PASSED' if S(sys.argv[1]).check_seeds(sys.argv[2:]) else 'FAILED', file=sys.stderr)"
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a checker says. verdict: SUCCESS, FAILED, crashed, or not run."""

    path: str
    ruleset: str
    verdict: str
    detail: str = ""
    checker: str = "compliance"  # or system description, package, seeds
    is_applied: bool = True  # False: the rules do not ask for it, so it refuses nothing

    @property
    def refuses(self) -> bool:
        return self.is_applied and self.verdict != "SUCCESS"

    def __str__(self) -> str:
        what = f"official {self.checker} checker {self.ruleset}"
        return f"{self.path}: {what}: {self.verdict}" + (f": {self.detail}" if self.detail else "")


def rulesets(run_set: RunSet, chosen: str | None = None) -> tuple[str, ...]:
    """Return the rulesets of a run set: `chosen`, else by benchmark and date.

    Runs from after the benchmark's last round, as this suite's, are held to those of the published runs, and
    closed bert runs of the 2.1.0 round to 2.0.0: 2.1.0 was edited later and refuses what its round accepted.
    """
    lead, known = run_set.lead, RULESETS.get(run_set.lead.benchmark, ())
    if chosen:
        return (chosen,) if lead.benchmark in ROUNDS[chosen][1] else ()
    start = lead.first("run_start")
    if lead.is_ours or not start or not known or start.time_ms >= YEAR_2100_MS:
        return known
    month = datetime.fromtimestamp(start.time_ms / 1000, UTC).strftime("%Y-%m")
    found = next((r for r, (end, names) in ROUNDS.items() if month < end and lead.benchmark in names), None)
    if found == "2.1.0" and lead.benchmark == "bert" and lead.value("submission_division") == "closed":
        found = "2.0.0"
    return (found,) if found else known


def judge(run_set: RunSet, chosen: str | None = None) -> list[Verdict]:
    """Return the compliance checker's verdict per log and ruleset; one takes up to a second."""
    calls = [(log, ruleset) for log in run_set.logs for ruleset in rulesets(run_set, chosen)]
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        return list(pool.map(lambda call: _compliance(*call), calls))


def judge_seeds(run_set: RunSet, chosen: str | None = None) -> list[Verdict]:
    """Return the seed checker's verdict on a run set; the rules ask for it in the closed division only."""
    files = [str(log.file) for log in run_set.readable if log.file]
    is_closed = any(log.value("submission_division") == "closed" for log in run_set.logs)
    answers = []
    for ruleset in rulesets(run_set, chosen)[-1:] if files else ():
        verdict = _ask(["-c", SEEDS, ruleset, *files], "seeds", run_set.folder, ruleset, "PASSED", "FAILED")
        answers.append(replace(verdict, is_applied=is_closed))
    return answers


def judge_package(run_sets: Sequence[RunSet], chosen: str | None = None) -> list[Verdict]:
    """Return the verdicts on the submissions that these run sets belong to, and on their descriptions.

    The package checker gets a copy, because it writes into what it checks. It is not asked about size mini.
    """
    packages: dict[Path, list[RunSet]] = {}
    for run_set in run_sets:
        folder = run_set.systems_folder
        if folder and folder.is_dir():
            packages.setdefault(folder, []).append(run_set)
    return [verdict for folder, own in packages.items() for verdict in _package(folder, own, chosen)]


def judge_description(file: Path, ruleset: str) -> Verdict:
    """Return the verdict on one systems/<system>.json; the checker crashes on what `system.read` refuses."""
    module = "mlperf_logging.system_desc_checker"
    command = ["-m", module, str(file.absolute()), "training", ruleset, "--log_output", "log"]
    return _ask(command, "system description", label(file), ruleset, "checker passed", "checker failed")


def judge_tree(folder: Path, benchmarks: Sequence[str]) -> list[Verdict]:
    """Return the verdicts on an assembled `<submitter>/`: by each benchmark's round, and as a repository.

    The package checker gets a copy, because it writes into what it checks.
    """
    verdicts = []
    for benchmark in benchmarks:
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name, folder.name)
            shutil.copytree(folder / "systems", copy / "systems")
            for results in sorted(folder.glob(f"results/*/{benchmark}")):
                shutil.copytree(results, copy / results.relative_to(folder))
            verdicts.append(_submission(copy, f"{folder.name} ({benchmark})", RULESETS[benchmark][0]))
    latest = RULESETS["bert"][-1]  # named in the command, and of no effect
    command = ["-m", "mlperf_logging.repo_checker", str(folder), "training", latest, "--log_output", "log"]
    passed, failed = "ALL CHECKS PASSED", "CHECKS FAILED"
    return [*verdicts, _ask(command, "repository", folder.name, latest, passed, failed)]


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return e.g. `compliance 2.1.0: 5 of 5 SUCCESS, package 2.1.0: SUCCESS`."""
    parts = []
    for checker, ruleset in dict.fromkeys((verdict.checker, verdict.ruleset) for verdict in verdicts):
        own = [v.verdict for v in verdicts if (v.checker, v.ruleset) == (checker, ruleset)]
        is_one = len(own) == 1 or set(own) == {"not run"}
        said = own[0] if is_one else f"{own.count('SUCCESS')} of {len(own)} SUCCESS"
        parts.append(f"{checker} {ruleset}: {said}")
    return ", ".join(parts) or "not run"


def _compliance(log: Log, ruleset: str) -> Verdict:
    if log.is_study:
        detail = "a study trains to the end of its budget"
        return Verdict(path=log.path, ruleset=ruleset, verdict="not run", detail=detail, is_applied=False)
    if not log.file or not _has_known_names(log):
        return Verdict(path=log.path, ruleset=ruleset, verdict="not run", detail=UNKNOWN)
    command = ["-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", ruleset]
    command += ["--log_output", "log", str(log.file)]
    verdict = _ask(command, "compliance", log.path, ruleset, "SUCCESS", "FAILED")
    return replace(verdict, is_applied=not log.is_honest_miss)  # a set may have one; rule S408 counts them


def _has_known_names(log: Log) -> bool:
    """Return whether the values from which the checker builds file names are known ones."""
    known = {"submission_benchmark": tuple(RULESETS), "submission_division": ("open", "closed")}
    return all(event.value in values for key, values in known.items() for event in log.events(key))


def _package(folder: Path, run_sets: Sequence[RunSet], chosen: str | None) -> Iterator[Verdict]:
    ruleset = max((r for run_set in run_sets for r in rulesets(run_set, chosen)), default=None)
    if ruleset is None:
        return
    known = [name for run_set in run_sets if (name := run_set.lead.folders[0])]
    files = [file for name in dict.fromkeys(known) if (file := folder / f"{name}.json").is_file()]
    for file in files:
        yield judge_description(file, ruleset)
    root = folder.parent
    say = partial(Verdict, path=label(root), ruleset=ruleset, checker="package")
    if any(run_set.is_proxy for run_set in run_sets):
        yield say(verdict="not run", detail="size mini is no submission", is_applied=False)
    elif not all(_has_known_names(log) for run_set in run_sets for log in run_set.logs):
        yield say(verdict="not run", detail=UNKNOWN)
    else:
        with _copy(run_sets, files) as copy:
            yield _submission(copy, label(root), ruleset)


def _submission(copy: Path, shown: str, ruleset: str) -> Verdict:
    command = ["-m", "mlperf_logging.package_checker", str(copy), "training", ruleset, "--log_output", "log"]
    num_logs = sum(1 for _ in copy.glob("results/*/*/result_*.txt"))
    return _ask(
        *(command, "package", shown, ruleset, "FOUND NO ERRORS", "FOUND ERRORS"),
        timeout_s=TIMEOUT_S + num_logs,
    )


@contextmanager
def _copy(run_sets: Sequence[RunSet], descriptions: Sequence[Path]) -> Iterator[Path]:
    """Give a submission of the readable logs and the descriptions, in a folder for the time being."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "submission")
        (root / "systems").mkdir(parents=True)
        for file in descriptions:
            shutil.copyfile(file, root / "systems" / file.name)
        for run_set in run_sets:
            target = root / "results" / Path(*run_set.lead.folders)
            target.mkdir(parents=True, exist_ok=True)
            for log in run_set.readable:
                if log.file:
                    shutil.copyfile(log.file, target / log.file.name)
        yield root


def _ask(
    arguments: Sequence[str],
    checker: str,
    path: str,
    ruleset: str,
    passed: str,
    failed: str,
    timeout_s: float = TIMEOUT_S,
) -> Verdict:
    """Run a checker in an empty folder; its verdict is the last line that has one of the two texts."""
    say: Callable[..., Verdict] = partial(Verdict, path=path, ruleset=ruleset, checker=checker)
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return say(verdict="crashed", detail=f"no answer in {timeout_s:.0f} s")
    lines = [line for line in done.stderr.splitlines() if line.strip(" -") and "Warning" not in line]
    last = next((line for line in reversed(lines) if passed in line or failed in line), "")
    if done.returncode not in (0, 1) or not last or "Traceback" in done.stderr:
        return say(verdict="crashed", detail=printable(lines[-1] if lines else "no answer"))
    if failed in last:
        errors = [line for line in lines if line.startswith("ERROR") and not line.endswith(failed)]
        return say(verdict="FAILED", detail=printable((errors or lines[:-1] or [""])[-1]))
    return say(verdict="SUCCESS")
