"""The first hours on a GPU, stage by stage: each row a command in its own process and a JSON file of its own.

Started by systems/gpu_day.sh. A row that fails, or does not end in its time, says so in its file; the others
go on, and the exit code is 1.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import atomic, launch, system
from common.config import ROOT
from common.errors import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE, UserError, nearest
from common.measure.gpu_day_rows import STAGES, Machine, Row

STAGE_S = 520  # a stage ends before 9 minutes have passed
LAST_LINES = 15  # of what a row printed
OUTCOMES = {0: "ok", 1: "findings"}
SCRATCH = "scratch"  # what rows themselves keep: their figures are in the row


def main() -> int:
    """Run the stages that are named, or all, then write table and page of all rows in the folder."""
    parser = argparse.ArgumentParser(prog="systems/gpu_day.sh", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--output", type=Path, required=True, help="folder of the rows' JSON files")
    parser.add_argument("--page", type=Path, default=ROOT / "report" / "gpu_day.html")
    args = parser.parse_args()
    for stage in args.stages:
        if stage not in STAGES:
            print(f"error: no stage '{stage}'; {nearest(stage, STAGES)}", file=sys.stderr)
            return EXIT_USAGE
    try:
        return run_stages(args.stages or list(STAGES), args.output.resolve(), args.page)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def run_stages(stages: Iterable[str], output: Path, page: Path) -> int:
    """Run rows, each printed as it ends; returns 1 where one of them was not ok."""
    from common.measure.gpu_day_page import describe_row, write_page

    machine = this_machine()
    output.mkdir(parents=True, exist_ok=True)
    facts = {"hardware": system.hardware_name(), "versions": system.versions(), "commit": launch.commit()}
    print(f"{facts['hardware']}, {', '.join(f'{k} {v}' for k, v in system.versions().items())}", flush=True)
    is_ok = True
    for stage in stages:
        ends = time.monotonic() + STAGE_S
        for number, row in enumerate(STAGES[stage](machine)):
            left_s = ends - time.monotonic()
            record = (
                facts | {"stage": stage, "row": row.name} | run_row(row, output, min(row.limit_s, left_s))
            )
            atomic.write_text(output / f"{stage}-{number:02}.json", json.dumps(record, indent=1) + "\n")
            print(describe_row(record), flush=True)
            is_ok = is_ok and record["outcome"] == "ok"
    print(f"-> {write_page(read_rows(output), page)}")
    return EXIT_OK if is_ok else EXIT_FINDINGS


def this_machine() -> Machine:
    """Return the GPUs of this machine. Raises UserError where torch is missing."""
    try:
        import torch
    except ImportError as error:
        raise UserError("torch is not installed", hint="PYTHON names the interpreter that has it") from error
    if not torch.cuda.is_available():
        return Machine(num_gpus=0, memory_gb=0.0)
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return Machine(num_gpus=torch.cuda.device_count(), memory_gb=memory_bytes / 1e9)


def run_row(row: Row, output: Path, limit_s: float) -> dict[str, Any]:
    """Return command, outcome, seconds, figures and the last lines of a row that had `limit_s` seconds."""
    shown = " ".join((*(["python", "-m"] if row.is_module else ["ttt"]), *row.words))
    if limit_s < 1:
        return {"command": shown, "outcome": "not started: the stage's time was over", "seconds": 0.0}
    words = [*row.words]
    if not row.is_module:
        words = ["common.cli", *words]
        words += ["--results", str(output / SCRATCH)] * (row.words[0] in ("bench", "run"))
        words += ["--systems", str(output / SCRATCH / "systems")] * (row.words[0] == "run")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=limit_s)
        outcome = OUTCOMES.get(process.returncode, "failed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        outcome = f"out of time after {limit_s:.0f} s"
    lines = [hide_folders(line) for line in text.splitlines() if line.strip()]
    figures = parse_figures(lines)
    return {
        "command": shown,
        "outcome": outcome,
        "seconds": round(time.monotonic() - started, 1),
        "figures": figures,
        "output": [] if figures and outcome == "ok" else [line[:400] for line in lines[-LAST_LINES:]],
    }


def parse_figures(lines: list[str]) -> dict[str, Any] | None:
    """Return the JSON object that a row printed last; None where there is none."""
    text = "\n".join(lines)
    for start in [*(match.start() for match in re.finditer(r"^\{", text, re.MULTILINE))][-3:]:
        try:
            figures, _ = json.JSONDecoder().raw_decode(text[start:])
            return dict(figures)
        except ValueError:
            continue
    return None


def hide_folders(line: str) -> str:
    """Return a line without the folders of this machine."""
    line = line.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    return re.sub(r"(?<![\w.])/[\w.~+-]+(/[\w.~+-]+)+/(?=[\w.~+-])", ".../", line)


def read_rows(output: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder in the order of the stages."""
    rows = [json.loads(path.read_text()) for path in sorted(output.glob("*-[0-9][0-9].json"))]
    return sorted(rows, key=lambda record: list(STAGES).index(record["stage"]))


if __name__ == "__main__":
    sys.exit(main())
