"""One self-contained HTML page over every run and bench result: filters, curves, trade-offs, prices.

Logs are read by common.evidence; here a run becomes a row of numbers, and facts that runs of one folder share
(above all settings) are kept once. The page's own script filters, draws and prices these rows. Nothing of
a log is ever markup: the rows are one JSON block, and the script shows text as text.
"""

import base64
import hashlib
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.config.merge import merge_files
from common.evidence import recipes
from common.evidence.audit import Audited, Finding
from common.evidence.compare.factors import evaluation_minutes
from common.evidence.compare.masked_accuracy import MARK
from common.evidence.intervals import student_t
from common.evidence.log import QUALITIES, Log, Point
from common.evidence.page import fill_template
from common.evidence.plots import PALETTE
from common.evidence.records import finite, printable
from common.evidence.report import link
from common.evidence.score import BASELINE, COLOURED_FIRST, run_of
from common.evidence.text import NOTES
from common.repository import benchmarks, configurations
from common.study.compare.comparison import resolution_of
from common.study.points import Points
from common.study.prices import Price
from common.study.ranking import bound_cells, bound_qualities, bound_times

TEMPLATES = Path(__file__).with_name("templates")
MAX_POINTS = 200  # of a run's curve; longer ones are thinned
MAX_FINDINGS = 5  # of one run that are named; all are counted
REACHED, ENDED, BROKEN_OFF, RESUMED, UNREADABLE, PREDICTED = range(6)
STATUSES = ("reached its target", "ended without it", "broken off", "resumed", "unreadable", "predicted")
COLUMNS = (
    "cell", "file", "href", "seed", "status", "minutes", "evaluation", "quality", "samples", "samples_per_s",
    "commit", "errors", "warnings", "findings", "curve",
)  # fmt: skip
Numbers = defaultdict[str, int]  # of distinct values, in the order in which they come


def render(data: dict[str, Any]) -> str:
    """Return the page. It may load nothing, and of scripts run only the one whose hash it states."""
    script = "\n" + (TEMPLATES / "explore.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    block = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # so that no text can end the block
        block = block.replace(character, f"\\u{ord(character):04x}")
    return fill_template(
        TEMPLATES / "explore.html",
        style=Markup((TEMPLATES / "explore.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        data=Markup(block),
        notes=[NOTES[mark] for mark in ("unverified", "proxy", "study", MARK)],
    )


def page_data(
    audited: Sequence[Audited],
    benches: Sequence[dict[str, Any]],
    prices: Sequence[Price],
    folder: Path,
    points: Sequence[Points] = (),
) -> dict[str, Any]:
    """Return the data of the page: cells (runs of one folder with the same settings), runs by column, prices.

    `points` have no log: published and predicted. Links are relative to `folder`, where the page will lie.
    """
    methods, lines, texts = (defaultdict[str, int](itertools.count().__next__) for _ in range(3))
    cells: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for entry in audited:
        logs, by_log = entry.run_set.logs, defaultdict[str, list[Finding]](list)
        for finding in entry.findings:
            by_log[finding.path].append(finding)
        numbers: dict[object, int] = {}
        for log in logs:
            kind = (log.configuration, log.is_proxy, recipes.identity(log))
            if kind not in numbers:
                same = f" ({len(numbers) + 1}{describe_difference(logs, log)})" if numbers else ""
                numbers[kind] = len(cells)
                cells.append(cell(log, entry.run_set.folder, same, methods, lines))
            mine = cells[numbers[kind]]
            mine["quality_step"] = max(mine["quality_step"], resolution_of(log))
            shared = {"cell": numbers[kind], "href": link(log.path, folder)}
            rows.append(shared | run_row(log) | verdict(by_log.pop(log.path, []), texts))
        others = list(itertools.chain(*by_log.values()))  # of the system's description
        for number in numbers.values():
            cells[number]["about"] = verdict(others, texts)
    for point in points:
        cells.append(point_cell(point, methods, lines) | {"about": verdict([], texts)})
        shared = {"cell": len(cells) - 1, "href": link(point.path, folder)}
        rows += [shared | row | verdict([], texts) for row in point_rows(point)]
    add_bounds(cells, rows)
    hardware = sorted({shared["hardware"] for shared in cells})
    return {
        "reference": BASELINE,
        "qualities": QUALITIES,
        "palette": PALETTE,
        "coloured_first": COLOURED_FIRST,
        "statuses": STATUSES,
        "methods": list(methods),
        "lines": list(lines),
        "texts": list(texts),
        "cells": cells,
        "runs": {name: [row[name] for row in rows] for name in COLUMNS},
        "benches": benches,
        "prices": [price_row(price, hardware) for price in prices],
        "t": [round(student_t(degrees), 4) for degrees in range(1, 31)],
    }


def add_bounds(cells: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """Give each cell the bounds of its mean quality and minutes, of whole runs and without evaluations."""
    of_cell = [row["cell"] for row in rows]
    columns: dict[str, list[float | None]] = {"run": [], "training": [], "quality": []}
    for row in rows:
        minutes, evaluation, quality = row["minutes"], row["evaluation"], row["quality"]
        if row["status"] > ENDED or quality is None or minutes is None:
            minutes = quality = None
        training = None if None in (minutes, evaluation) else minutes - evaluation
        columns["run"].append(minutes or None)
        columns["training"].append(training if training and training > 0 else None)
        columns["quality"].append(quality)
    steps = {number: shared["quality_step"] for number, shared in enumerate(cells)}
    for name, counted in columns.items():
        bound = partial(bound_qualities, steps=steps) if name == "quality" else bound_times
        for shared, bounds in zip(cells, bound_cells(cells, of_cell, counted, bound), strict=True):
            limits = bounds and [round(value, 5) for value in bounds]
            shared.setdefault("bounds", {})[name] = limits


def cell(log: Log, folder: str, same: str, methods: Numbers, lines: Numbers) -> dict[str, Any]:
    """Return the facts that the runs of one folder share, from one of their logs."""
    study, hardware, name = place(log)
    size = log.text("benchmark_size") or "full"
    return {
        "kind": "measured",
        "range": None,
        "folder": folder + same,
        "study": study,
        "name": name + same,
        "benchmark": log.benchmark or "unknown",
        "size": size,
        "proxy": log.is_proxy,
        "hardware": hardware,
        "configuration": recipe_name(log, name),
        "methods": sorted({methods[printable(event.value, 64)] for event in log.events("method")}),
        "duration": setting(log, "max_duration"),
        "budget": budget(log, size),
        "target": log.target if math.isfinite(log.target) else None,
        "quality_step": 0.0,
        "trains_on": log.is_study,
        "settings": [lines[line] for line in log.settings],
    }


def recipe_name(log: Log, name: str) -> str:
    """Return a configuration with the switches of its cell: `baseline+unpad` for `with-unpad`.

    A switch `no_ema` that is on leaves `ema` out: `baseline-ema`, as `ttt run` takes it.
    """
    turned = re.fullmatch(r"(with|without)-(.+)", name) if log.is_ours and log.lies_in_study else None
    if turned is None:
        return recipes.recipe_name(log)
    methods, is_on = {printable(event.value, 64) for event in log.events("method")}, turned[1] == "with"
    changes = []
    for switch in turned[2].split("."):
        removed = switch.removeprefix("no_")
        is_removal = switch not in methods if is_on else removed in methods
        if removed != switch and is_removal:
            changes.append("+-"[is_on] + removed)
        else:
            changes.append("-+"[is_on] + switch)
    return log.configuration + "".join(changes)


def point_cell(points: Points, methods: Numbers, lines: Numbers) -> dict[str, Any]:
    return {
        "kind": points.kind,
        "range": points.interval,
        "folder": f"{points.kind}: {points.benchmark} {points.name} on {points.hardware}",
        "study": points.kind,
        "name": points.name,
        "benchmark": points.benchmark,
        "size": points.size,
        "proxy": points.size != "full",
        "hardware": points.hardware,
        "configuration": points.configuration,
        "methods": sorted({methods[printable(name, 64)] for name in points.methods}),
        "duration": "",
        "budget": None,
        "target": points.target,
        "quality_step": 0.0,
        "trains_on": False,
        "settings": [lines[f"source: {printable(points.source, 300)}"]],
    }


def point_rows(points: Points) -> Iterator[dict[str, Any]]:
    for run in points.runs:
        minutes = finite(run.minutes)  # infinite of a run that missed its target
        yield {
            "file": run.name,
            "seed": "",
            "status": PREDICTED if points.kind == "predicted" else REACHED if minutes else ENDED,
            "minutes": round_figure(minutes),
            "evaluation": round_figure(run.evaluation),
            "quality": round_figure(run.quality),
            "samples": round_figure(run.samples),
            "samples_per_s": round_figure(run.samples_per_s or run.samples_per_s_overall),
            "commit": "",
            "curve": [],
        }


def describe_difference(logs: Sequence[Log], log: Log) -> str:
    """Name the key in which a result differs from the first of its folder, which then holds two recipes."""
    differences = (difference for _, other, difference in recipes.differing_logs(logs) if other is log)
    return "".join(f": {key} {after}" for key, _, after in differences)


def place(log: Log) -> tuple[str, str, str]:
    """Return study ('' for a scored run), hardware and name, from where a log lies.

    results/study/<study>/<hardware>[-mini]-<cell>/... or results/<hardware>[-mini]-<configuration>/... A cell
    need not name its configuration; at full size the hardware is then the one that the settings state.
    """
    study = printable(log.file.parts[-4], 64) if log.file and log.lies_in_study else ""
    stated = re.search(r"hardware: ([A-Za-z0-9._-]+)", setting(log, "submission"))
    if stated and log.system.startswith(f"{stated[1]}-"):
        return study, stated[1], log.system.removeprefix(f"{stated[1]}-").removeprefix("mini-")
    if not study:
        name = recipes.recipe_name(log)
        return "", log.system.removesuffix(f"-{name}").removesuffix("-mini"), name
    for mark, prefix in (("-mini-", ""), (f"-{log.configuration}", log.configuration)):
        hardware, there, name = log.system.partition(mark)
        if there:
            return study, hardware, prefix + name
    return study, log.system, log.system


def setting(log: Log, name: str) -> str:
    """Return a top-level value of the merged configuration at the head of a log; '' without one."""
    return next((line[len(name) + 2 :] for line in log.settings if line.startswith(f"{name}: ")), "")


def budget(log: Log, size: str) -> float | None:
    """Return a run's training duration over that of its configuration as it stands in the YAML files."""
    batch, train = finite(log.value("global_batch_size")), finite(log.value("train_samples"))
    share = re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,20})?", setting(log, "budget") or "1")
    whole = own_samples(log.header("benchmark"), log.configuration, size)
    samples = num_samples(setting(log, "max_duration"), batch, train)
    return round(samples * float(share[0]) / whole, 2) if samples and whole and share else None


@cache
def own_samples(benchmark: str, configuration: str, size: str) -> float | None:
    """Return the samples that a configuration of this checkout trains; None if it has no such configuration.

    Of its methods only `scale_schedule` changes the duration.
    """
    if benchmark not in benchmarks() or configuration not in configurations(benchmark):
        return None
    values = merge_files(benchmark, configuration, size).values
    scale = (values["methods"].get("scale_schedule") or {}).get("ratio", 1.0)
    duration = re.sub(r"^\d+", lambda count: str(int(int(count[0]) * scale)), values["max_duration"])
    return num_samples(duration, values["global_batch_size"], values["data"]["num_train_samples"])


def num_samples(duration: str, batch: float | None, train: float | None) -> float | None:
    """Return a duration such as `90ep`, `55ba` or `24640sp` in samples; None where something is missing."""
    if not re.fullmatch(r"[0-9]{1,12}(ep|ba|sp)", duration) or not batch or not train or batch < 1:
        return None
    return recipes.count_steps(duration, int(batch), int(train // batch)) * batch


def run_row(log: Log) -> dict[str, Any]:
    """Return the columns of one run; a point of its curve is minutes, evaluation, samples and accuracy."""
    run = run_of(log)
    curve = thin_out([point for point in log.curve if 0 <= point.minutes < 1e7])
    minutes = log.minutes or (curve[-1].minutes if curve else None)
    samples = curve[-1].samples if curve else None
    return {
        "file": printable(Path(log.path).name, 64),
        "seed": log.text("seed"),
        "status": status(log),
        "minutes": None if minutes is None else round(minutes, 5),
        "evaluation": round(evaluation_minutes(log), 5),
        "quality": None if run.quality is None else round(run.quality, 6),
        "samples": None if samples is None else round(samples),
        "samples_per_s": round_figure(run.samples_per_s or run.samples_per_s_overall),
        "commit": log.header("commit"),
        "curve": [
            value
            for minutes, samples, accuracy in curve
            for value in (
                round(minutes, 4),
                round(evaluation_minutes(log, minutes), 4),
                None if samples is None else round(samples),
                round(accuracy, 5),
            )
        ],
    }


def round_figure(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def thin_out(curve: Sequence[Point]) -> Sequence[Point]:
    if len(curve) <= MAX_POINTS:
        return curve
    return [curve[round(i * (len(curve) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]


def status(log: Log) -> int:
    """Return which of `STATUSES` a run has; a fault, or a person, that ended it leaves a reason."""
    if not log.is_readable:
        return UNREADABLE
    if log.is_resumed:
        return RESUMED
    if log.minutes is None or not log.came_to_its_end:
        return BROKEN_OFF
    return REACHED if log.is_converged else ENDED


def verdict(findings: Iterable[Finding], texts: Numbers) -> dict[str, Any]:
    """Count errors and warnings, and return the first findings, errors before warnings."""
    ordered = sorted(findings, key=lambda finding: finding.severity != "error")
    errors, first = sum(finding.severity == "error" for finding in ordered), []
    for finding in ordered[:MAX_FINDINGS]:
        line = f" (line {finding.line})" if finding.line else ""
        first.append(texts[f"{finding.rule} {finding.severity}: {finding.message}{line}"])
    return {"errors": errors, "warnings": len(ordered) - errors, "findings": first}


def price_row(price: Price, hardware: Sequence[str]) -> dict[str, Any]:
    """Return a price with the dollars for an hour of each hardware that it is of."""
    fits = {}
    for name in hardware:
        if price.is_of(name):
            number = re.match(r"([0-9]{1,4})x", name)
            devices = int(number[1]) if number else price.num_devices
            fits[name] = [
                None if (dollars := price.cost(60, devices, spot=spot)) is None else round(dollars, 4)
                for spot in (False, True)
            ]
    return price.model_dump() | {"fits": fits}
