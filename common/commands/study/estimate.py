"""Estimate minutes and cost to the target, here or on other hardware, with an interval; score it later.

Rates come from what is there: the newest profile of this configuration in results/profile/<hardware>/, else
the newest `ttt bench` in results/throughput/<hardware>/, else a profile is measured now. Samples to the
target come from the logs in results/ of the same recipe (seeds give the spread), else from the published
runs. Evaluation and start-up count. More devices: the model of `ttt plan`. Every estimate is kept below
results/estimates/; --score compares each with the runs that came after it, --reprice prices them anew.

examples:
  ttt estimate language_bert optimized --size mini
  ttt estimate language_bert optimized --size mini --price own=0.04
  ttt estimate image_classification mosaic --hardware 8xA100 --measured 3039@256 --gpus 8 --inside nvlink3
  ttt estimate image_classification optimized --hardware 1xH200 --gpus 8
  ttt estimate --score
  ttt estimate --reprice --prices my_prices.yaml
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from common.arguments import add_benchmark, add_results, list_benchmarks
from common.commands.study import plan as planning
from common.config.schema import RunConfig
from common.errors import EXIT_OK, UserError
from common.evidence.log import STUDY, find_logs, read_log
from common.machine import system
from common.measure import figures
from common.measure import scaling as plan
from common.measure.device_run import NUM_DEVICES
from common.repository import NAME, SIZES, benchmark_module
from common.study import estimate as estimating
from common.study.estimate import Rates, Samples
from common.study.figures import newest, of_bench, of_profile, read_json
from common.study.prices import PRICES, Price, choose_prices, load_prices
from common.training.load import load_config

ESTIMATES = "estimates"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_benchmark(parser, nargs="?")
    parser.add_argument("configuration", nargs="?", help="a YAML file of the benchmark")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key")
    parser.add_argument("--hardware", metavar="NAME", help="read figures of this folder, measure nothing")
    parser.add_argument("--bench", type=Path, metavar="FILE", help="figures of `ttt bench` to use")
    parser.add_argument("--measured", metavar="SAMPLES_PER_S@BATCH", help="the rate of one device")
    parser.add_argument("--measure", action="store_true", help="profile now, whatever there is")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="to the target; default: measured, or published"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="devices of a machine")
    parser.add_argument("--inside", default="nvlink4", help=f"GB/s, or: {', '.join(plan.INSIDE)}")
    parser.add_argument(
        "--network", default="8xndr", help=f"GB/s of a machine, or links: 8x{', 8x'.join(plan.NETWORK)}"
    )
    parser.add_argument("--prices", type=Path, default=PRICES, metavar="FILE", help="dated prices")
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME",
        help="a row of them, or own=DOLLARS: an hour of your own machine; default: every row",
    )
    parser.add_argument("--score", action="store_true", help="earlier estimates against later runs")
    parser.add_argument("--reprice", action="store_true", help="earlier estimates at these prices")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_results(parser)


def main(args: argparse.Namespace) -> int:
    """Estimate, or look back at estimates."""
    rows = choose_prices(load_prices(args.prices), args.price)
    if args.score:
        score(args, read_records(args.results))
        return EXIT_OK
    if args.reprice:
        for record in read_records(args.results):
            print(f"{record['title']} on {record['hardware']}, {record['time']}: {predicted(record)}")
            print(*price_lines(record, rows), sep="\n")
        return EXIT_OK
    if args.configuration is None:
        hint = f"ttt estimate BENCHMARK CONFIGURATION, of {list_benchmarks()}"
        raise UserError("no benchmark and configuration were given", hint=hint)
    devices = args.nodes * args.gpus
    if args.nodes < 1 or args.gpus < 1 or devices > planning.MAX_DEVICES:
        raise UserError(
            f"--nodes {args.nodes} --gpus {args.gpus}: expected 1 to {planning.MAX_DEVICES} devices"
        )
    record = make(args, devices)
    path = figures.keep(record, args.results / ESTIMATES / record["system"], args.benchmark)
    console = Console(stderr=args.json, highlight=False, soft_wrap=True)
    console.print(*describe(record), *price_lines(record, rows), f"-> {path}", sep="\n")
    if args.json:
        print(json.dumps(record))
    return EXIT_OK


def make(args: argparse.Namespace, devices: int) -> dict[str, Any]:
    """Return an estimate with everything that it rests on."""
    config = load_config(args.benchmark, args.configuration, size=args.size, settings=args.set).config
    benchmark = benchmark_module(config.benchmark).Benchmark(config, seed=0)
    if not NAME.fullmatch(args.hardware or "here"):
        raise UserError(f"'{args.hardware}' is not {NAME.pattern}", where="--hardware")
    phases, steps = benchmark.phases(), config.plan()
    values = as_json(config)
    samples = choose_samples(args, config, values, benchmark.mlperf_name)  # before anything is measured
    rates = choose_rates(args, config, values, {shape for shape, _ in phases})
    slower, scaling = scaled(args, config, phases, rates, samples) if devices > 1 else (1.0, "one device")
    found = estimating.estimate(
        phases,
        batch=config.global_batch_size,
        evaluated_at=steps.evaluation_steps,
        num_evaluated=config.data.num_evaluation_samples,  # type: ignore[attr-defined]
        rates=rates,
        samples=samples,
        slower=slower,
        devices=devices,
    )
    hardware, name = system.hardware_name(), system.system_id(config)
    if args.hardware or args.measured:
        hardware = args.hardware or "elsewhere"
        name = f"{hardware}{'-mini' if args.size == 'mini' else ''}-{args.configuration}"
    return dataclasses.asdict(found) | {
        "title": f"{args.benchmark} {args.configuration} {args.size}",
        "system": name,
        "hardware": hardware,
        "devices": devices,
        "machines": args.nodes,
        "time_ms": round(time.time() * 1e3),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rates": dataclasses.asdict(rates),
        "samples": dataclasses.asdict(samples) | {"typical": samples.typical},
        "samples_half_width": samples.half_width,
        "scaling": scaling,
        "config": values,
    }


def as_json(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as a log states it."""
    found: dict[str, Any] = json.loads(config.model_dump_json())
    return found


def choose_samples(
    args: argparse.Namespace, config: RunConfig, values: dict[str, Any], mlperf_name: str
) -> Samples:
    """Return the samples to the target: as given, measured, or published. Raises UserError."""
    from common.evidence.compare.reported import load_reported

    if args.samples is not None:
        if args.samples < 1:
            raise UserError("--samples must be positive")
        return Samples(source="as given", values=(float(args.samples),), startup_s=planning.STARTUP_S)
    paths = find_logs(args.results) if args.results.is_dir() else []
    logs = [read_log(path) for path in paths if path.parent.name == mlperf_name]
    measured = estimating.measured_samples(logs, values)
    if measured is not None:
        return measured
    published = load_reported()[mlperf_name].of_configuration(config.configuration)
    if published is None or config.size != "full":
        run = f"ttt run {config.benchmark} {config.configuration} --size {config.size}"
        hint = f"make a run ({run}), or --samples N"
        raise UserError("nothing says how many samples the target takes", where=str(args.results), hint=hint)
    runs = published.score.runs
    startup = [run.split.startup * 60 for run in runs if run.split]
    return Samples(
        source=published.title,
        values=tuple(run.samples for run in runs if run.samples),
        startup_s=sum(startup) / len(startup) if startup else planning.STARTUP_S,
        num_missed=sum(1 for run in runs if not run.samples),
    )


def choose_rates(
    args: argparse.Namespace, config: RunConfig, values: dict[str, Any], shapes: set[str]
) -> Rates:
    """Return the rates of one device: as given, or of the newest figures, or measured now."""
    name = "+".join(
        [config.configuration, *(each for each in args.set if not each.startswith("submission."))]
    )
    if args.measured:
        batch, seconds = planning.parse_measured(args.measured)
        return Rates(
            source=f"{args.measured}, as given",
            per_s=dict.fromkeys(shapes, batch / seconds),
            noise=estimating.ASSUMED_NOISE,
            noise_source="assumed",
        )
    if args.bench:
        found = of_bench(planning.read_figures(args.bench, config), name, shapes, args.bench.name)
        if found is None:
            raise UserError(f"no rate of {name} at {', '.join(sorted(shapes))}", where=str(args.bench))
        return found
    hardware = args.hardware or system.hardware_name()
    profiles, benches = (
        [] if args.measure else newest(args.results / kind / hardware, config.benchmark)
        for kind in ("profile", "throughput")
    )
    for path in profiles:
        if found := of_profile(read_json(path), values, path.name):
            return found
    for path in benches:
        figures = read_json(path)
        if figures.get("size") == config.size and (found := of_bench(figures, name, shapes, path.name)):
            return found
    if args.hardware:
        hint = "run `ttt profile` or `ttt bench` there, or --bench FILE, or --measured"
        where = f"{args.results}/*/{args.hardware}"
        raise UserError(f"no figures of {name} {config.size}", where=where, hint=hint)
    return measure(args, values)


def measure(args: argparse.Namespace, values: dict[str, Any]) -> Rates:
    """Profile the configuration on one device of this machine; the figures are kept as `ttt profile` does."""
    from common.commands.measure import profile

    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    settings = [option for each in args.set for option in ("--set", each)]
    arguments = [args.benchmark, args.configuration, "--size", args.size, *settings, *["--json"] * args.json]
    figures = profile.measured(parser.parse_args([*arguments, "--results", str(args.results)]))
    found = of_profile(figures, values, "measured now")
    assert found is not None, "a profile of this configuration is one of it"
    return found


def scaled(
    args: argparse.Namespace,
    config: RunConfig,
    phases: list[tuple[str, range]],
    rates: Rates,
    samples: Samples,
) -> tuple[float, str]:
    """Return the step of all devices relative to one's, by the model of `ttt plan`, and what it assumes."""
    batch = config.global_batch_size
    per_s = samples.typical / estimating.training_seconds(phases, batch, samples.typical, rates)
    each = max(1, batch // NUM_DEVICES) if args.size == "full" else batch
    measured = argparse.Namespace(measured=[f"{per_s:f}@{each}"], bench=[])
    work, assumptions = planning.measured_work(measured, config)
    links = plan.Links(inside=plan.choose_inside(args.inside), network=plan.choose_network(args.network))
    one = plan.step(work, links, machines=1, per_machine=1, batch=batch)
    devices = args.nodes * args.gpus
    if batch < devices:
        raise UserError(f"{devices} devices cannot divide {batch} samples", where="global_batch_size")
    all_of_them = plan.step(work, links, machines=args.nodes, per_machine=args.gpus, batch=batch)
    efficiency = one.seconds / all_of_them.seconds / devices
    said = f"{devices} devices at {efficiency:.0%} of {devices} times one, by `ttt plan`: {assumptions[1]}"
    return all_of_them.seconds / one.seconds, said


def describe(record: dict[str, Any]) -> list[str]:
    """Return the estimate, and what it rests on."""
    rates, samples, half = record["rates"], record["samples"], record["samples_half_width"]
    seeds = (
        f"x{math.exp(half):.3f} either way, one more run by Student's t" if half is not None else "unknown"
    )
    missed = f", {samples['num_missed']} more missed the target" if samples["num_missed"] else ""
    shapes = ", ".join(f"{shape} {per_s:,.0f}/s" for shape, per_s in rates["per_s"].items())
    return [
        f"{record['title']} on {record['hardware']}: {predicted(record, ' to the target')}",
        f"  training {record['training_s']:.1f} s, {record['num_evaluations']} evaluations "
        f"{record['evaluation_s']:.1f} s, start-up {record['startup_s']:.1f} s",
        f"  samples to the target: {samples['typical']:,.0f}, {samples['source']}{missed}; seeds: {seeds}",
        f"  rates: {shapes} ({rates['source']}); deviation {rates['noise']:.1%} {rates['noise_source']}",
        f"  devices: {record['scaling']}",
        "  interval: of one further run, on logarithms; seeds, where known, and rate combined as squares",
    ]


def predicted(record: dict[str, Any], end: str = "") -> str:
    """Return an estimate with its interval, in seconds where those are easier to read."""
    scale, unit, digits = (60, "s", 1) if record["minutes"] < 5 else (1, "min", 2)
    minutes, low, high = (f"{record[name] * scale:.{digits}f}" for name in ("minutes", "low", "high"))
    is_known = record["samples_half_width"] is not None
    held = "95 % of runs" if is_known else "by the rate alone, seeds unknown"
    return f"{minutes} {unit}{end} ({low} to {high}, {held})"


def price_lines(record: dict[str, Any], rows: list[Price]) -> list[str]:
    """Return the cost at each price; of other devices there is none without their figures."""
    lines, others = [], []
    for row in rows:
        where = f"  {row.name:20} {row.cloud} {row.instance}, {row.num_devices}x {row.device}, {row.date}: "
        if row.cloud == "own":
            where = f"  own machine, ${row.on_demand:g} an hour: "
        if not row.is_of(record["hardware"]):
            others.append(row.name)
            continue
        told = []
        for kind, spot in (("on demand", False), ("spot", True)):
            low, cost, high = (
                row.cost(record[name], record["devices"], num_machines=record.get("machines", 1), spot=spot)
                for name in ("low", "minutes", "high")
            )
            if cost is not None and low is not None and high is not None:
                told.append(f"${cost:.4g} {kind} (${low:.4g} to ${high:.4g})")
        lines.append(where + ", ".join(told))
    if others:
        lines.append(f"  no cost without a rate there (--hardware, --measured): {', '.join(others)}")
    return lines


def read_records(results: Path) -> list[dict[str, Any]]:
    """Return the estimates that were kept, the first one first."""
    records = [read_json(path) | {"path": path} for path in (results / ESTIMATES).glob("*/*.json")]
    if not records:
        raise UserError("no estimates here", where=str(results / ESTIMATES), hint="`ttt estimate` makes them")
    return sorted(records, key=lambda record: int(record["time_ms"]))


def score(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Print each estimate with the runs that came after it, and how good all of them were."""
    systems = {record["system"] for record in records}
    folders = [folder for folder in (args.results, args.results / STUDY) if folder.is_dir()]
    paths = (path for folder in folders for path in find_logs(folder))
    logs = [read_log(path) for path in paths if path.absolute().parent.parent.name in systems]
    told, checked = [], []
    for record in records:
        runs = estimating.check(record, logs)
        checked += runs
        told.append(f"{record['title']} on {record['system']}, {record['time']}: {predicted(record)}")
        told += [f"  {outcome(run)}  {run.path}" for run in runs] or ["  no run since"]
    inside = sum(run.is_inside for run in checked)
    finite = [abs(math.log(run.ratio)) for run in checked if math.isfinite(run.ratio)]
    typical = f"; wrong by a factor of {math.exp(sum(finite) / len(finite)):.3f} on average" if finite else ""
    told.append(f"{inside} of {len(checked)} runs lie inside the interval of their estimate{typical}")
    if args.json:
        rows = [
            {"estimate": str(record["path"].name), "system": record["system"], "minutes": record["minutes"]}
            | {"runs": [dataclasses.asdict(run) for run in estimating.check(record, logs)]}
            for record in records
        ]
        print(json.dumps({"estimates": rows, "inside": inside, "runs": len(checked)}))
    else:
        print(*told, sep="\n")


def outcome(run: estimating.Checked) -> str:
    """Return how a run compares."""
    if not math.isfinite(run.minutes):
        return "missed the target, outside"
    place = "inside" if run.is_inside else "outside"
    return f"measured {run.minutes:.3f} min ({run.minutes * 60:.1f} s), {run.ratio - 1:+.1%}, {place}"
