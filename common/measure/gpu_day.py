"""The first hours on a GPU, stage by stage: each row a command in its own process and a JSON file of its own.

Started by systems/gpu_day.sh. A row that fails, or does not end in its time, says so in its file; the others
go on, and the exit code is 1. After each row, all rows in the folder become one HTML page.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from common import repository, yaml_file
from common.errors import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE, UserError, nearest
from common.evidence.page import fill_template
from common.files import save_json, save_text, temporary_folder
from common.machine import system
from common.measure.bench import format_rate
from common.measure.throughput import Rate
from common.measure.without_gpu import gpu_model
from common.processes import Processes
from common.repository import ROOT, hide_folders

ROWS = ROOT / "systems" / "gpu_day.yaml"
STAGE_S = 520  # a stage ends before 9 minutes have passed
LAST_LINES = 15  # of a row's output
OUTCOMES = {0: "ok", 1: "findings"}
MARK = "pytest.mark.gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command, and the seconds that it has at most. `command` starts with ttt or pytest.

    `is_cold`: it finds no compiled code of the rows before it.
    """

    command: str
    limit_s: int
    is_cold: bool = False


def main() -> int:
    """Run the stages that are named, or all, and write the page of all rows in the folder."""
    parser = argparse.ArgumentParser(prog="systems/gpu_day.sh", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {ROWS.name}; default: all")
    text = "folder of the rows' JSON files; default: $OUT, else results/throughput/gpu_day"
    out = os.environ.get("OUT")
    output = out or ROOT / "results" / "throughput" / "gpu_day"
    parser.add_argument("--output", type=Path, default=output, help=text)
    text = "the page of all rows; default: gpu_day.html in $OUT, else in report/"
    parser.add_argument("--page", type=Path, default=Path(out or ROOT / "report") / "gpu_day.html", help=text)
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory_gb = torch.cuda.get_device_properties(0).total_memory / 1e9 if num_gpus else 0.0
    try:
        stages = read_stages(num_gpus, memory_gb)
        for stage in args.stages:
            if stage not in stages:
                raise UserError(f"no stage '{stage}'", hint=nearest(stage, stages))
        chosen = {name: stages[name] for name in args.stages or stages}
        if not any(chosen.values()):
            raise UserError(f"{' '.join(chosen)}: no row is for this machine", where=ROWS.name)
        return run_stages(chosen, args.output.resolve(), args.page.absolute(), list(stages))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def read_stages(num_gpus: int, memory_gb: float) -> dict[str, list[Row]]:
    """Return the rows by stage for a machine with so many GPUs, the first with that memory."""
    document = yaml_file.parse(ROWS.read_text(), ROWS.name).values
    files = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text())
    names = document["gpu" if num_gpus else "cpu"]
    names["tests"] = " ".join(str(path.relative_to(ROOT)) for path in files)

    have = {"gpus": num_gpus, "memory_gb": memory_gb, "cold": 1}

    def rows(lines: list[str]) -> Iterable[Row]:
        for line in lines:
            limit_s, needs, command = re.fullmatch(r"(\d+) ((?:\w+=\d+ )*)(.*)", line).groups()  # type: ignore[union-attr]
            least = {name: int(number) for name, number in (need.split("=") for need in needs.split())}
            if all(have[name] >= number for name, number in least.items()):
                named = re.sub(r"\{(\w+)\}", lambda match: names[match[1]], command)
                yield Row(command=" ".join(named.split()), limit_s=int(limit_s), is_cold="cold" in least)

    return {stage: list(rows(lines)) for stage, lines in document["stages"].items()}


def run_stages(stages: dict[str, list[Row]], output: Path, page: Path, order: list[str]) -> int:
    """Run rows, each printed as it ends; returns 1 where one of them was not ok."""
    facts = {"hardware": system.hardware_name(), "versions": system.versions(), "commit": repository.commit()}
    print(f"{facts['hardware']}, {', '.join(f'{k} {v}' for k, v in system.versions().items())}", flush=True)
    output = output / system.hardware_name()
    read_rows(output, order)  # a damaged one is refused before the GPU works
    is_ok = True
    for stage, rows in stages.items():
        ends = time.monotonic() + STAGE_S
        for number, row in enumerate(rows):
            record = facts | {"stage": stage, "command": row.command}
            record |= run_row(row, min(row.limit_s, ends - time.monotonic()))
            save_json(output / f"{stage}-{number:02}.json", record)
            print(describe_row(record), flush=True)
            is_ok = is_ok and record["outcome"] == "ok"
            write_page(read_rows(output, order), page)  # the machine may be taken back before the last row
    print(f"-> {repository.relative_path(page)}")
    return EXIT_OK if is_ok else EXIT_FINDINGS


def run_row(row: Row, limit_s: float) -> dict[str, Any]:
    """Return outcome, seconds, figures and the last lines of a row that had `limit_s` seconds.

    The figures are those that it printed, or that it had written when it ended.
    """
    if limit_s < 1:
        return {"outcome": "not started: the stage's time was over", "seconds": 0.0}
    with temporary_folder() as scratch:
        started = time.monotonic()
        outcome, text = run_command(row, scratch, limit_s)
        seconds = round(time.monotonic() - started, 1)
        paths = scratch.rglob("throughput/*/*.json")  # the first lines may not be there yet
        written = [parse_figures(path.read_text().splitlines()) for path in paths]
    text = text.replace(os.path.relpath(scratch, ROOT), "...")
    lines = [hide_folders(line) for line in text.splitlines() if line.strip()]
    figures = parse_figures(lines) or next(filter(None, written), None)
    last_lines = [] if figures and outcome == "ok" else [line[:400] for line in lines[-LAST_LINES:]]
    return {"outcome": outcome, "seconds": seconds, "figures": figures, "output": last_lines}


def run_command(row: Row, scratch: Path, limit_s: float) -> tuple[str, str]:
    """Return the outcome and the output of a row's command, which keeps its own files in `scratch`."""
    program, *words = shlex.split(row.command)
    if program == "ttt":
        program = "common.cli"
        words += ["--results", str(scratch)] * (words[0] in ("bench", "run"))
        words += ["--systems", str(scratch / "systems")] * (words[0] == "run")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if row.is_cold:
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        environment |= {name: str(scratch / name) for name in caches}
    with (scratch / "output.txt").open("w+", errors="replace") as stream:
        streams = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
        with Processes(["-m", program, *words], [environment], cwd=ROOT, **streams) as processes:
            ended = processes.wait(limit_s)
        stream.seek(0)
        if ended is None:
            return f"out of time after {limit_s:.0f} s", stream.read()
        return OUTCOMES.get(ended.code, "failed"), stream.read()


def parse_figures(lines: list[str]) -> dict[str, Any] | None:
    text = "\n".join(lines)
    for start in [*(match.start() for match in re.finditer(r"^\{", text, re.MULTILINE))][-3:]:
        try:
            figures, _ = json.JSONDecoder().raw_decode(text[start:])
            return dict(figures)
        except ValueError:
            continue
    return None


def read_rows(output: Path, order: list[str]) -> list[dict[str, Any]]:
    known = []
    for path in sorted(output.glob("*-[0-9][0-9].json")):
        try:
            record = dict(json.loads(path.read_text()))
            known += [record] * (record["stage"] in order)
        except (OSError, ValueError, TypeError, KeyError) as error:
            hint = "remove it, or choose another --output"
            raise UserError("not a row of systems/gpu_day.sh", where=str(path), hint=hint) from error
    return sorted(known, key=lambda record: order.index(record["stage"]))


def describe_row(record: dict[str, Any]) -> str:
    """Describe stage, row, outcome and the figures that matter, in one line or a few."""
    head = f"{record['stage']:9} {record['outcome']:10} {record['seconds']:6.1f} s  {record['command']}"
    figures = record.get("figures")
    details = describe_figures(record, figures) if figures else []
    if not figures or record["outcome"] != "ok":
        details += record.get("output", [])[-3:]
    return "\n".join([head, *(f"{'':29}{line}" for line in details)])


def describe_figures(record: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    if "rates" not in figures:
        return list_levels(figures)
    lines = []
    for values in figures["rates"]:
        rate = Rate(**{field.name: values.get(field.name) for field in fields(Rate)})  # a row of other code
        name = gpu_model.name_today(figures["benchmark"], rate.configuration, record["commit"])
        named = record["hardware"], figures["benchmark"], name, rate.shape
        batch_size = rate.batch_size or figures["batch_size"]
        predicted_per_s = gpu_model.predict_rate(*named, batch_size, record["versions"]["torch"])
        lines.append(format_rate(rate, "samples", predicted_per_s))
    lines += [f"{name:44} {per_s:10.1f}/s" for name, per_s in figures.get("parts", {}).items()]
    return lines + [f"{failure['shape']}  {failure['error']}" for failure in figures["failed"]]


def list_levels(figures: dict[str, Any], title: str = "") -> list[str]:
    """Describe each level of nested figures that has numbers or text in a line; lists are left out."""
    plain = {name: value for name, value in figures.items() if isinstance(value, int | float | str)}
    texts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in plain.items()]
    lines = [title + ", ".join(texts)] if texts else []
    for name, value in figures.items():
        if isinstance(value, dict) and name != "kernels_ms":  # too many
            lines += list_levels(value, f"{title}{name}: ")
    return lines


def write_page(rows: Sequence[dict[str, Any]], path: Path) -> None:
    template = Path(__file__).parent / "templates" / "gpu_day.html"
    described = [(row, describe_row(row).splitlines()[1:]) for row in rows]
    save_text(path.resolve(), fill_template(template, rows=described))


if __name__ == "__main__":
    sys.exit(main())
