"""Figures for the explorer that no log here measured: bench results, published run sets, and predictions.

A prediction is a kept estimate, the projection of a bench, or the estimate that `ttt estimate` would make
now: the samples to target of scored runs at the rates of a profile or bench on a hardware. A bench is
taken only if its batches have one shape, because it does not state the share of each.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from common.evidence.compare.masked_accuracy import MARK
from common.evidence.compare.reported import Published, Reported, load_reported
from common.evidence.log import MAX_BYTES, RunSet
from common.evidence.paths import find_files, label
from common.evidence.records import finite, printable, read_bytes
from common.evidence.score import Run
from common.measure.device_run import NUM_DEVICES
from common.repository import ROOT
from common.study.predict.minutes import Rates, estimate, name_devices
from common.study.predict.records import KeptEstimate
from common.study.predict.sources import measured_samples, rates_of_bench, rates_of_profile, stated_config

MAX_RATES = 1000  # of one bench result
RATE = ("samples_per_s", "tokens_per_s", "step_ms", "flops_share", "bytes_share", "memory_gb")
NOISE = ("deviation", "num_turns")
Profile = tuple[Path, dict[str, Any]]
Bench = Mapping[str, Any]  # as `read_benches` reads it
Measured = tuple[Rates, str, dict[str, float]]  # its file, and the shares that shapes have of a training


@dataclass(frozen=True, kw_only=True)
class Points:
    """The runs of a published set, or one prediction with the 95 % interval of its minutes.

    `benchmark` is MLPerf's name; `hardware` begins with the number of devices, where that is known.
    """

    kind: Literal["published", "predicted"]
    benchmark: str
    size: str
    hardware: str
    configuration: str
    name: str
    target: float
    source: str
    path: str  # of the file that states it
    runs: tuple[Run, ...]  # or the one that is predicted
    methods: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None


@cache
def by_folder() -> dict[str, Reported]:
    return {facts.folder: facts for facts in load_reported().values()}


def published_points() -> list[Points]:
    return [
        published_set(entry, facts) for facts in by_folder().values() for entry in facts.sets + facts.peers
    ]


def published_set(entry: Published, facts: Reported) -> Points:
    what = entry.score.configuration if entry.configurations else ""
    return Points(
        kind="published",
        benchmark=entry.score.benchmark,
        size="full",
        hardware=re.sub(r"^(\d+x) | (?=GB)", r"\1", entry.accelerators).replace(" ", "-"),
        configuration=f"{entry.submitter} {what}".strip(),
        name=entry.label,
        target=facts.target,
        source=f"{entry.division} division, {f'{MARK}, ' * (MARK in entry.score.label)}{entry.score.source}",
        path=label(ROOT / facts.folder / "reported.yaml"),
        runs=entry.score.runs,
    )


def predicted_points(
    paths: Sequence[Path], benches: Sequence[Bench], run_sets: Sequence[RunSet], report: Callable[[str], None]
) -> list[Points]:
    """Return the predictions that estimates and profiles below `paths`, benches and run sets allow.

    `report` gets a line for each file that is left out.
    """
    folders = [path.absolute() for path in paths]
    kept = read_each(find_files(folders, "estimates/*/*.json"), KeptEstimate.model_validate, report)
    profiles = list(read_each(find_files(folders, "profile/*/*.json"), dict, report))
    points = [kept_estimate(*pair) for pair in kept]
    points += [point for bench in benches for point in projections(bench)]
    return points + [point for run_set in run_sets for point in elsewhere(run_set, benches, profiles, report)]


def read_each(
    files: Iterable[Path], parse: Callable[[Any], Any], report: Callable[[str], None]
) -> Iterator[tuple[Path, Any]]:
    for file in files:
        try:
            yield file, parse(json.loads(read_bytes(file, MAX_BYTES)))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            report(f"{label(file)} is left out: {printable(str(error))}")


def read_benches(paths: Sequence[Path], report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the figures of throughput/<hardware>/*.json below `paths`; `report` gets the faults."""
    files = find_files((path.absolute() for path in paths), "throughput/*/*.json")
    return [
        {"file": label(file), "hardware": printable(file.parent.name, 64)} | figures
        for file, figures in read_each(files, parse_bench, report)
    ]


def parse_bench(figures: object) -> dict[str, Any]:
    """Return one bench result; `model` is MLPerf's name. Raises ValueError for anything else."""
    if not isinstance(figures, dict) or not isinstance(rates := figures.get("rates"), list):
        raise ValueError("not what `ttt bench` writes")
    rows = []
    for rate in rates[:MAX_RATES]:
        if not isinstance(rate, dict) or (finite(rate.get("samples_per_s")) or 0) <= 0:
            raise ValueError("a rate states no samples_per_s above 0")
        row: dict[str, Any] = {name: printable(rate.get(name, ""), 80) for name in ("configuration", "shape")}
        noise = {name: value for name in NOISE if (value := finite(rate.get(name))) is not None}
        row["batch"] = finite(rate.get("batch_size")) or finite(figures.get("batch_size"))
        rows.append(row | {name: finite(rate.get(name)) for name in RATE} | noise)
    benchmark = printable(figures.get("benchmark", ""), 64)
    return {
        "benchmark": benchmark,
        "model": facts.benchmark if (facts := by_folder().get(benchmark)) else benchmark,
        "size": printable(figures.get("size", ""), 16),
        "rates": rows,
        "projected": parse_projections(figures.get("projected")),
    }


def parse_projections(stated: object) -> dict[str, dict[str, Any]]:
    """Read the minutes that a bench projects, their interval and assumptions, by configuration."""
    rows = {}
    for name, projection in stated.items() if isinstance(stated, dict) else ():
        if isinstance(projection, dict):
            stated_figures = {key: finite(projection.get(key)) for key in ("minutes", "low", "high")}
            row = {key: value for key, value in stated_figures.items() if value and value > 0}
            if "minutes" in row:
                rows[printable(name, 80)] = row | {"assuming": printable(projection.get("assuming", ""), 400)}
    return rows


def kept_estimate(file: Path, kept: KeptEstimate) -> Points:
    return predicted_point(
        kept.config.model_dump(),
        f"{kept.config.configuration} (estimate {file.stem})",
        name_devices(kept.hardware, kept.devices),
        {"minutes": kept.minutes, "low": kept.low, "high": kept.high, "evaluation_s": kept.evaluation_s},
        samples=finite(kept.samples.get("typical")),
        source=f"`ttt estimate` on {kept.time}",
        path=label(file),
    )


def projections(bench: Bench) -> Iterator[Points]:
    """Yield the minutes that a bench at size full projects for the devices of a published system."""
    for configuration, projection in bench["projected"].items():
        if facts := by_folder().get(bench["benchmark"]):
            config = {"benchmark": facts.folder, "configuration": configuration, "target": facts.target}
            yield predicted_point(
                config | {"size": bench["size"]},
                f"{configuration} ({Path(bench['file']).stem})",
                name_devices(bench["hardware"], NUM_DEVICES),
                projection,
                samples=None,
                source=f"the projection of `ttt bench`, {projection['assuming']}",
                path=bench["file"],
            )


def elsewhere(
    run_set: RunSet, benches: Sequence[Bench], profiles: Sequence[Profile], report: Callable[[str], None]
) -> list[Points]:
    """Predict the minutes of a set's runs on one device of each hardware with measured rates."""
    lead, config = run_set.lead, stated_config(run_set.lead)
    num_steps, batch = (
        finite(lead.value(key)) for key in ("opt_learning_rate_training_steps", "global_batch_size")
    )
    samples = measured_samples(run_set.logs, config) if config and not lead.lies_in_study else None
    if samples is None or not num_steps or not batch:
        return []
    evaluated_at = max((log.curve for log in run_set.logs), key=len)
    points = []
    for hardware, (rates, path, shares) in rates_by_hardware(config, benches, profiles).items():
        try:
            phases = [(shape, range(round(share * num_steps))) for shape, share in shares.items()]
            predicted = estimate(
                phases,
                batch=int(batch),
                evaluated_at=[round(point.samples / batch) for point in evaluated_at if point.samples],
                num_evaluated=int(finite(lead.value("eval_samples")) or 0),
                rates=rates,
                samples=samples,
            )
            if any(finite(figure) is None for figure in predicted.values()):
                raise ValueError("a figure is not finite")
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            report(f"{path} is left out: no rates ({printable(str(error))})")
            continue
        points.append(
            predicted_point(
                config,
                f"{config['configuration']} ({Path(path).stem})",
                name_devices(hardware, 1),
                predicted,
                samples=samples.typical,
                source=f"samples to the target of {samples.source} in {run_set.folder}; {rates.source}",
                path=path,
            )
        )
    return points


def rates_by_hardware(
    config: Mapping[str, Any], benches: Sequence[Bench], profiles: Sequence[Profile]
) -> dict[str, Measured]:
    """Return the rates of a configuration: of the newest profile, else of the newest bench."""
    by_hardware: dict[str, Measured] = {}
    for bench in benches:
        shapes = {rate["shape"] for rate in bench["rates"]}
        is_of = (bench["benchmark"], bench["size"]) == (config["benchmark"], config["size"])
        if is_of and len(shapes) == 1:
            name = Path(bench["file"]).name
            if rates := rates_of_bench(dict(bench), config["configuration"], shapes, name):
                by_hardware[bench["hardware"]] = rates, bench["file"], dict.fromkeys(shapes, 1.0)
    for file, figures in profiles:
        with suppress(LookupError, TypeError, AttributeError, ArithmeticError):  # nothing of a profile
            if rates := rates_of_profile(figures, dict(config), file.name):
                shares = {phase["shape"]: phase["share"] for phase in figures["phases"]}
                by_hardware[file.parent.name] = rates, label(file), shares
    return by_hardware


def predicted_point(
    config: Mapping[str, Any],
    name: str,
    hardware: str,
    figures: Mapping[str, Any],
    *,
    samples: float | None,
    source: str,
    path: str,
) -> Points:
    """Return a point at the target; `figures` are those of `estimate`, or some of them with the minutes."""
    evaluation_s = figures.get("evaluation_s")
    facts = by_folder().get(config["benchmark"])
    run = Run(
        name="prediction",
        minutes=figures["minutes"],
        quality=config["target"],
        samples=samples,
        samples_per_s=samples / figures["training_s"] if samples and "training_s" in figures else None,
        samples_per_s_overall=None,
        evaluation=None if evaluation_s is None else evaluation_s / 60,
        split=None,
    )
    return Points(
        kind="predicted",
        benchmark=facts.benchmark if facts else config["benchmark"],
        size=config["size"],
        hardware=hardware,
        configuration=config["configuration"],
        name=name,
        target=config["target"],
        source=source,
        path=path,
        runs=(run,),
        methods=tuple(config.get("methods") or ()),
        interval=(figures["low"], figures["high"]) if {"low", "high"} <= figures.keys() else None,
    )
