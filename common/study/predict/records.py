"""Estimates, kept as JSON below results/estimates/, and the later runs that score them."""

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from common.config.schema import RunConfig
from common.errors import UserError
from common.evidence.intervals import error_factors
from common.evidence.log import Log, read_log
from common.evidence.paths import STUDY, find_logs
from common.evidence.text import size_title
from common.machine import system
from common.measure.figures import read_figures
from common.repository import NAME, build_probes
from common.study.predict import devices, sources
from common.study.predict.minutes import estimate_run, name_devices, training_seconds
from common.study.predict.sources import FREE, Name, StatedConfig, agree, pick, stated_config
from common.study.prices import Price

ESTIMATES = "estimates"
ELSEWHERE = "elsewhere"  # hardware without a name
TITLES = {  # of prices that a person states
    "own": "own machine, ${0.on_demand:g} an hour",
    "any": "${0.on_demand:g} an hour of a device",
}

Record = dict[str, Any]


class KeptEstimate(BaseModel):
    """The part of a file of `ttt estimate` that is read again."""

    title: str
    system: str
    minutes: PositiveFloat = Field(allow_inf_nan=False)
    low: PositiveFloat = Field(allow_inf_nan=False)
    high: PositiveFloat = Field(allow_inf_nan=False)
    evaluation_s: NonNegativeFloat = Field(allow_inf_nan=False)
    samples_half_width: NonNegativeFloat | None
    hardware: Name
    devices: PositiveInt
    machines: PositiveInt = 1
    time: str = Field(max_length=64)
    time_ms: int
    samples: dict[str, Any]
    config: StatedConfig


def make_record(args: argparse.Namespace, config: RunConfig) -> Record:
    """Return an estimate with its rates, samples and configuration; unstated rates are measured now."""
    if args.batch_per_device:
        raise UserError("needs --scaling", where="--batch-per-device")
    (machines, per_machine), links = devices.choose_machines(args), devices.choose_links(args)
    if not NAME.fullmatch(args.hardware or "here"):
        raise UserError(f"'{args.hardware}' is not {NAME.pattern}", where="--hardware")
    probes = build_probes(config)
    phases, batch = probes.phases(), config.global_batch_size
    samples = sources.choose_samples(
        config, args.results, args.samples, args.set
    )  # before anything is measured
    if args.startup_s is not None:
        samples = dataclasses.replace(samples, startup_s=args.startup_s)
    rates = sources.choose_rates(args, probes)
    per_s = samples.typical / training_seconds(phases, batch, samples.typical, rates)
    slower, scaling = devices.compare_with_one(
        args, config, per_s, links, machines=machines, per_machine=per_machine
    )
    estimated = estimate_run(
        config, phases, rates=rates, samples=samples, slower=slower, devices=machines * per_machine
    )
    hardware, name = system.hardware_name(), system.system_id(config)
    is_elsewhere = args.measured or any(path.resolve().parent.name != hardware for path in args.bench)
    if args.hardware or is_elsewhere:
        hardware = args.hardware or ELSEWHERE
        name = f"{hardware}{'-mini' if args.size == 'mini' else ''}-{config.configuration}"
    return estimated | {
        "title": f"{config.benchmark} {config.configuration} {config.size}",
        "system": name,
        "hardware": hardware,
        "devices": machines * per_machine,
        "machines": machines,
        "time_ms": round(time.time() * 1e3),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rates": dataclasses.asdict(rates),
        "samples": dataclasses.asdict(samples) | {"typical": samples.typical},
        "samples_half_width": samples.half_width,
        "scaling": scaling,
        "config": config.stated(mode="json"),
    }


def describe(record: Record) -> Iterator[str]:
    rates, samples, half = record["rates"], record["samples"], record["samples_half_width"]
    seeds = "unknown" if half is None else f"x{math.exp(half):.3f} either way, one more run by Student's t"
    missed = f", {samples['num_missed']} more missed the target" if samples["num_missed"] else ""
    shapes = ", ".join(f"{shape} {per_s:,.0f}/s" for shape, per_s in rates["per_s"].items())
    yield f"{headline(record)}: predicted {describe_minutes(record, ' to the target')}"
    yield (
        f"  training {record['training_s']:.1f} s, {record['num_evaluations']} evaluations "
        f"{record['evaluation_s']:.1f} s, start-up {record['startup_s']:.1f} s"
    )
    yield f"  samples to the target: {samples['typical']:,.0f}, {samples['source']}{missed}; seeds: {seeds}"
    yield f"  rates: {shapes} ({rates['source']}); deviation {rates['noise']:.1%} {rates['noise_source']}"
    yield f"  devices: {record['scaling']}"
    yield "  interval: for one further run, from the spread over seeds, where known, and that of the rate"


def headline(record: Record) -> str:
    hardware = record["hardware"]
    on = hardware if hardware == ELSEWHERE else name_devices(hardware, record["devices"])
    return f"{title_of(record)} on {on}"


def title_of(record: Record) -> str:
    size = record["config"]["size"]
    return f"{record['title'].removesuffix(size)}{size_title(size)}"


def describe_minutes(record: Record, end: str = "") -> str:
    """Describe the minutes of an estimate with their interval, below 5 minutes in seconds."""
    scale, unit, digits = (60, "s", 1) if record["minutes"] < 5 else (1, "min", 2)
    minutes, low, high = (f"{record[name] * scale:.{digits}f}" for name in ("minutes", "low", "high"))
    is_known = record["samples_half_width"] is not None
    coverage = "95 % of runs" if is_known else "by the rate alone, seeds unknown"
    return f"{minutes} {unit}{end} ({low} to {high}, {coverage})"


def list_costs(record: Record, prices: Sequence[Price]) -> list[dict[str, Any]]:
    """Return the dollars of an estimate at the prices of its hardware: on demand and spot, or as stated."""
    rows = []
    for price in (price for price in prices if price.is_of(record["hardware"])):
        for kind, spot in (("as stated" if price.cloud in TITLES else "on demand", False), ("spot", True)):
            low, cost, high = (
                price.cost(record[name], record["devices"], num_machines=record.get("machines", 1), spot=spot)
                for name in ("low", "minutes", "high")
            )
            if cost is not None:
                rows.append({"price": price.name, "kind": kind, "low": low, "dollars": cost, "high": high})
    return rows


def describe_costs(record: Record, prices: Sequence[Price]) -> Iterator[str]:
    """Yield the cost at each price as a line; other devices have none without their figures."""
    usual = "{0.name:20} {0.cloud} {0.instance}, {0.num_devices}x {0.device}, {0.date}"
    others = []
    for price in prices:
        if not price.is_of(record["hardware"]):
            others.append(price.name)
            continue
        costs = [
            "{dollars} {kind} ({low} to {high})".format_map(
                row | {name: dollars(row[name]) for name in ("dollars", "low", "high")}
            )
            for row in list_costs(record, [price])
        ]
        yield f"  {TITLES.get(price.cloud, usual).format(price)}: {', '.join(costs)}"
    if others:
        yield f"  no cost without a rate there (--hardware, --measured): {', '.join(others)}"


def dollars(amount: float) -> str:
    """Return an amount in four digits, without an exponent."""
    if amount >= 1000:
        return f"${amount:,.0f}"
    return f"${amount:.4g}" if amount >= 0.001 else f"${amount:.6f}"


def reprice(kept: Sequence[Record], prices: Sequence[Price]) -> tuple[list[str], list[Record]]:
    """Price kept estimates; returns lines, and for each estimate its facts and costs."""
    lines, priced = [], []
    for record in kept:
        minutes = describe_minutes(record)
        lines.append(f"{headline(record)}, {record['time']}: {minutes}")
        lines += describe_costs(record, prices)
        facts = {name: record[name] for name in ("title", "hardware", "time", "minutes", "low", "high")}
        priced.append(facts | {"costs": list_costs(record, prices)})
    return lines, priced


def read_records(results: Path) -> list[Record]:
    """Return the estimates that were kept, the first one first."""
    paths = (results / ESTIMATES).glob("*/*.json")
    records = [read_figures(path, KeptEstimate) | {"path": path} for path in paths]
    if not records:
        raise UserError("no estimates here", where=str(results / ESTIMATES), hint="`ttt estimate` makes them")
    return sorted(records, key=lambda record: int(record["time_ms"]))


def later_runs(record: Record, logs: Sequence[Log]) -> list[Record]:
    """Return the runs on the estimate's system and devices that started after it, with its settings only.

    `ratio` is measured over predicted; it and `minutes` are None where a run missed the target.
    """
    runs = []
    for log in logs:
        start = log.first("run_start")
        if not is_of(log.system, record["system"]) or start is None or start.time_ms <= record["time_ms"]:
            continue
        if log.value("num_ranks") not in (None, record.get("devices", 1)):
            continue
        if not states(log, record["config"]) or log.is_resumed or log.minutes is None:
            continue
        minutes = log.minutes if log.is_converged else None
        ratio = None if minutes is None else minutes / record["minutes"]
        is_inside = minutes is not None and record["low"] <= minutes <= record["high"]
        runs.append({"path": log.path, "minutes": minutes, "ratio": ratio, "is_inside": is_inside})
    return runs


def is_of(name: str, system: str) -> bool:
    """Return whether a run set's folder is a system's: variants are named SYSTEM+what, see set_folder.py."""
    return name == system or name.startswith(f"{system}+")


def describe_run(run: Record) -> str:
    if run["minutes"] is None:
        return f"missed the target, outside  {run['path']}"
    place = "inside" if run["is_inside"] else "outside"
    minutes = f"measured {run['minutes']:.3f} min ({run['minutes'] * 60:.1f} s)"
    return f"{minutes}, {run['ratio'] - 1:+.1%}, {place}  {run['path']}"


def states(log: Log, config: dict[str, Any]) -> bool:
    """Return whether a log states this configuration, apart from the keys that a run may decide (FREE)."""
    stated, keys = stated_config(log), config.keys() - FREE
    return "benchmark" in stated and agree(pick(stated, keys), pick(config, keys))


def score(results: Path, records: Sequence[Record]) -> tuple[list[str], Record]:
    """Compare each estimate with the runs that came after it; returns lines of text, and figures for JSON."""
    folders = [folder for folder in (results, results / STUDY) if folder.is_dir()]
    paths = (path for folder in folders for path in find_logs(folder))
    logs = [
        read_log(path)
        for path in paths
        if any(is_of(path.absolute().parent.parent.name, record["system"]) for record in records)
    ]
    lines, rows, scored = [], [], list[Record]()
    for record in records:
        runs = later_runs(record, logs)
        scored += runs
        minutes = describe_minutes(record)
        lines.append(f"{title_of(record)} on {record['system']}, {record['time']}: {minutes}")
        lines += [f"  {describe_run(run)}" for run in runs] or ["  no run since"]
        row = {"estimate": record["path"].name} | pick(record, ("system", "minutes"))
        rows.append(row | {"runs": runs})
    inside = sum(run["is_inside"] for run in scored)
    ratios = [run["ratio"] for run in scored if run["ratio"] is not None]
    typical = f"; wrong by a factor of {error_factors(ratios)[0]:.3f} on average" if ratios else ""
    if scored:
        lines.append(f"{inside} of {len(scored)} runs lie inside the interval of their estimate{typical}")
    return lines, {"estimates": rows, "inside": inside, "runs": len(scored)}
