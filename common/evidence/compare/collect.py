"""Entries of reported.yaml, made from logs in MLCommons' result repositories: `ttt reproduce --entries`."""

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from common.evidence.compare import masked_accuracy
from common.evidence.compare.devices import of_description, read_count
from common.evidence.compare.masked_accuracy import MOSAIC, OFFICIAL
from common.evidence.compare.rcp import last_step
from common.evidence.compare.reported import SOURCE
from common.evidence.compare.reproduce import first_reaching
from common.evidence.log import TARGETS, Log, RunSet, load
from common.evidence.paths import find_sets
from common.evidence.records import finite
from common.evidence.score import Run, olympic_mean, run_of
from common.evidence.system import describe_set, fields_of
from common.repository import digest_text

Entry = dict[str, Any]
LISTED = re.compile(r"\b(A100|H100|H200)\b")
MOSAIC_DEVICES = "8x A100 80 GB"  # of MosaicML; other BERT sets on these get figures by its count, too
WIDTH = 140


def entry_lines(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the sets below `paths` as entries, by benchmark, then those that are left out and why.

    Sets of the closed division on one node of A100, H100 or H200 GPUs are listed, and any set whose own
    folder is in `paths`, with its curve and, for bert, where it passed the target by MosaicML's count. A set
    with the same logs as an earlier one is named in the earlier entry.
    Raises: UserError.
    """
    named = {path.absolute() for path in paths}
    entries: dict[str, list[Entry]] = {benchmark: [] for benchmark in TARGETS}
    by_digest: dict[str, Entry] = {}
    faults = []
    for folder in find_sets(paths):
        (run_set,) = load([folder])
        fields = fields_of(describe_set(run_set))
        if folder not in named and not is_listed(fields):
            continue
        try:
            entry = make_entry(run_set, fields, is_named=folder in named)
        except ValueError as error:  # of a set without a score
            faults.append(f"# left out: {'/'.join(folder.parts[-5:])}: {error}")
            continue
        if folder in named and (curve := mean_curve(run_set.logs)):
            entry["curve"] = curve
        first = by_digest.setdefault(digest(run_set.logs), entry)
        if first is entry:
            entries[run_set.lead.benchmark].append(entry)
        else:
            first.setdefault("repeated_in", []).append(entry["source"])
    for benchmark, sets in entries.items():
        yield f"# {benchmark}: {len(sets)} sets"
        yield from map(as_yaml, sets)
    yield from faults


def is_listed(fields: Mapping[str, object]) -> bool:
    is_gpu = LISTED.search(str(fields.get("accelerator_model_name")))
    return fields.get("division") == "closed" and read_count(fields, "number_of_nodes") == 1 and bool(is_gpu)


def make_entry(run_set: RunSet, fields: Mapping[str, object], *, is_named: bool) -> Entry:
    """Make the entry of a set with its system's description. Raises ValueError for a set without figures."""
    place = SOURCE.search(run_set.logs[0].file.parent.as_posix() if run_set.logs[0].file else "")
    if place is None:
        raise UserError(
            "lies in no folder training_results_vN.N/SUBMITTER/results/SYSTEM", where=run_set.folder
        )
    if run_set.lead.benchmark not in TARGETS:
        raise ValueError("neither resnet nor bert")
    logs, runs = run_set.logs, [run_of(log) for log in run_set.logs]
    sizes = {finite(log.value("global_batch_size")) for log in logs}
    size, score = sizes.pop(), olympic_mean([run.minutes for run in runs])
    minutes = [log.minutes for log in logs]
    if size is None or sizes:
        raise ValueError("no batch size is that of all runs")
    if None in minutes or score is None:
        raise ValueError("a log breaks off, or two runs missed the target")
    reached = [samples_at_target(log, run, size) for log, run in zip(logs, runs, strict=True)]
    counts_samples = all(samples in (None, run.samples) for samples, run in zip(reached, runs, strict=True))
    entry: Entry = {
        "system": place[3],
        "submitter": place[2],
        "round": place[1],
        "division": fields.get("division", run_set.lead.text("submission_division")),
        "accelerators": str(of_description(fields)),
        "global_batch_size": int(size),
        "score": round(score, 3),
        "minutes": [round(value or 0, 4) for value in minutes],
        "samples_to_target": [samples and int(samples) for samples in reached],
    }
    step = max(last_step([point.samples for point in log.curve]) for log in logs)
    if counts_samples and step:
        entry["evaluated_every"] = int(step)
    if counts_samples and all(run.samples_per_s for run in runs):
        entry["training_samples_per_s"] = [round(run.samples_per_s or 0, 1) for run in runs]
    entry["quality"] = [round(run.quality or 0, 6) for run in runs]
    is_counted_twice = is_named or entry["accelerators"] == MOSAIC_DEVICES
    if counts_samples and run_set.lead.benchmark == "bert" and is_counted_twice:
        entry |= mosaic_figures(logs)
    return entry | {"source": place[0], "digest": digest(logs)}


def samples_at_target(log: Log, run: Run, batch_size: float) -> float | None:
    """Read a run's samples, None if it missed; `train_samples` where epoch_num counts no samples."""
    if not math.isfinite(run.minutes):
        return None
    if run.samples is not None and run.samples >= batch_size:
        return run.samples
    stated = log.last("train_samples")
    return finite(stated.value) if stated else None


def mosaic_figures(logs: Sequence[Log]) -> Entry:
    """Tell where the runs of a set that counts officially passed the target by MosaicML's count."""
    if any(masked_accuracy.counted_tokens(log) != OFFICIAL for log in logs):
        return {}
    curves = [masked_accuracy.curve(log, MOSAIC) for log in logs]
    points = [point for curve in curves if (point := first_reaching(curve, TARGETS["bert"]))]
    return {
        "mosaic_minutes": [round(point.minutes, 4) for point in points],
        "mosaic_samples": [int(point.samples or 0) for point in points],
    }


def mean_curve(logs: Sequence[Log]) -> list[tuple[int, float]]:
    """Average the evaluations that every run made: samples and accuracy, at equal samples."""
    rows = zip(*(log.curve for log in logs), strict=False)  # runs stop one by one
    return [
        (int(row[0].samples or 0), round(statistics.fmean(point.accuracy for point in row), 5))
        for row in takewhile(lambda row: len({point.samples for point in row}) == 1, rows)
    ]


def digest(logs: Sequence[Log]) -> str:
    """Hash times and accuracies: the same runs under another name have the same digest."""
    keys = ("run_start", "eval_accuracy", "run_stop")
    facts = sorted(json.dumps([(e.key, e.time_ms, e.value) for e in log.events(*keys)]) for log in logs)
    return digest_text("\n".join(facts), 12)


def as_yaml(entry: Entry) -> str:
    """Write an entry as a YAML flow mapping in an indented list."""
    text = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=WIDTH)
    return "  - " + text.strip().replace("\n", "\n    ")
