"""Ask the official compliance checker, one process a log; its verdict is shown as its own.

It raises on many bad logs and never compares the accuracy with the target: see the rules beside this file.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common.evidence.log import Log, RunSet, printable

RULESETS = {"resnet": ("2.0.0", "2.1.0"), "bert": ("2.1.0",)}  # the rounds of the published runs
MODULE = "mlperf_logging.compliance_checker"
NUM_PROCESSES = 2
TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the checker says of one log. verdict: SUCCESS, FAILED, crashed, or not run."""

    path: str
    ruleset: str
    verdict: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path}: official checker {self.ruleset}: {self.verdict} {self.detail}".rstrip()


def judge(run_set: RunSet) -> list[Verdict]:
    """Return a verdict per log and ruleset of its benchmark; one takes up to a second."""
    calls = [(log, ruleset) for log in run_set.logs for ruleset in RULESETS.get(log.benchmark, ())]
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        return list(pool.map(lambda call: _judge(*call), calls))


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return e.g. `2.0.0: 5 of 5 SUCCESS, 2.1.0: 5 of 5 SUCCESS`."""
    parts = []
    for ruleset in sorted({verdict.ruleset for verdict in verdicts}):
        own = [verdict for verdict in verdicts if verdict.ruleset == ruleset]
        parts.append(f"{ruleset}: {sum(v.verdict == 'SUCCESS' for v in own)} of {len(own)} SUCCESS")
    return ", ".join(parts) or "not run"


def _judge(log: Log, ruleset: str) -> Verdict:
    def answer(verdict: str, detail: str = "") -> Verdict:
        return Verdict(path=log.path, ruleset=ruleset, verdict=verdict, detail=printable(detail))

    # The checker builds file names from these two values, so unknown ones do not reach it.
    for key, known in (
        ("submission_benchmark", tuple(RULESETS)),
        ("submission_division", ("open", "closed")),
    ):
        if not log.file or any(event.value not in known for event in log.events(key)):
            return answer("not run", f"{key} is unknown")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", MODULE, "--usage", "training", "--ruleset", ruleset]
        command += ["--log_output", str(Path(folder, "log")), str(log.file)]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return answer("crashed", f"no answer in {TIMEOUT_S} s")
    lines = [line for line in done.stderr.splitlines() if line.strip(" -")]
    last = lines.pop() if lines else ""
    if done.returncode == 0 and last.endswith("SUCCESS"):
        return answer("SUCCESS")
    return answer("FAILED", "".join(lines[-1:])) if last.endswith("FAILED") else answer("crashed", last)
