"""Predict a run on more devices from the throughput of one: step time, efficiency, minutes, cost.

The throughput is what `ttt bench` measured (--bench FILE) or a number (--measured SAMPLES_PER_S@BATCH), both
of one device; two batches that differ by a factor of two show what of a step is fixed. Nothing is started.
--check-published predicts published results of many machines from their submitters' smallest, with errors.

examples:
  ttt plan language_bert baseline --nodes 16 --measured 70@56 --inside nvlink3 --network 8xhdr --price 2
  ttt plan image_classification optimized --nodes 128 --measured 3039@256 --batch-per-device 32
  ttt plan language_bert optimized --size mini --nodes 2 --gpus 2 --bench FIGURES.json --network 100
  ttt plan --check-published
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from common.arguments import add_benchmark, list_benchmarks
from common.config.duration import FORWARD
from common.config.schema import RunConfig
from common.errors import EXIT_OK, UserError
from common.measure import scaling
from common.repository import ROOT, SIZES, benchmark_module
from common.training.load import load_config

MAX_DEVICES = 1024
STARTUP_S = 3.0  # published: 0.9 to 2.6 s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_benchmark(parser, nargs="?")
    parser.add_argument("configuration", nargs="?", help="a YAML file of the benchmark")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="devices of a machine")
    parser.add_argument(
        "--bench", type=Path, action="append", default=[], metavar="FILE", help="figures of `ttt bench`"
    )
    parser.add_argument("--measured", action="append", default=[], metavar="SAMPLES_PER_S@BATCH")
    parser.add_argument("--inside", default="nvlink4", help=f"GB/s, or: {', '.join(scaling.INSIDE)}")
    parser.add_argument(
        "--network", default="8xndr", help=f"GB/s of a machine, or links: 8x{', 8x'.join(scaling.NETWORK)}"
    )
    parser.add_argument("--latency-us", type=float, default=scaling.LATENCY_US, help="of a message")
    parser.add_argument("--link-share", type=float, default=scaling.LINK_SHARE, help="of those rates reached")
    parser.add_argument("--overlap", type=float, default=scaling.OVERLAP, help="share hidden by the backward")
    parser.add_argument(
        "--batch-per-device", type=int, metavar="N", help="default: the recipe's global batch"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="to the target; default: published, or all")
    parser.add_argument("--startup-s", type=float, default=STARTUP_S, help="from run_start to the first step")
    parser.add_argument("--price", type=float, metavar="P", help="of a device for an hour")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key")
    parser.add_argument("--check-published", action="store_true", help="predicted against published")
    parser.add_argument("--json", action="store_true", help="for machines")


def main(args: argparse.Namespace) -> int:
    """Print the prediction, or how good predictions are."""
    if args.check_published:
        report_checks(scaling.check_published(ROOT), args.json)
        return EXIT_OK
    check_numbers(args)
    config = load_config(args.benchmark, args.configuration, size=args.size, settings=args.set).config
    work, assumptions = measured_work(args, config)
    recipe, more = choose_recipe(args, config)
    links = scaling.Links(
        inside=scaling.choose_inside(args.inside),
        network=scaling.choose_network(args.network),
        latency_us=args.latency_us,
        share=args.link_share,
        overlap=args.overlap,
    )
    found = scaling.predict(work, links, recipe, machines=args.nodes, per_machine=args.gpus, price=args.price)
    assumptions += more + [
        f"links: {links.inside:g} GB/s inside a machine, {links.network:g} GB/s between machines, of which "
        f"{links.share:.0%} is reached; {links.latency_us:g} us a message; {links.overlap:.0%} overlapped",
        "the loader keeps up, no device is slower than the others, nothing else uses the network",
    ]
    if args.json:
        rows = [row(each) for each in found]
        print(json.dumps({"rows": rows, "formula": scaling.FORMULA, "assumptions": assumptions}))
    else:
        print_predictions(found, assumptions)
    return EXIT_OK


def check_numbers(args: argparse.Namespace) -> None:
    """Raise UserError for what no prediction can be made from."""
    if args.configuration is None:
        hint = f"ttt plan BENCHMARK CONFIGURATION, of {list_benchmarks()}"
        raise UserError("no benchmark and configuration were given", hint=hint)
    if args.nodes < 1 or args.gpus < 1 or args.nodes * args.gpus > MAX_DEVICES:
        raise UserError(f"--nodes {args.nodes} --gpus {args.gpus}: expected 1 to {MAX_DEVICES} devices")
    if not (0 < args.link_share <= 1 and 0 <= args.overlap <= 1):
        raise UserError("--link-share and --overlap are fractions")
    positive = (args.batch_per_device, args.samples, args.price)
    if (
        any(value is not None and value <= 0 for value in positive)
        or min(args.latency_us, args.startup_s) < 0
    ):
        raise UserError("numbers must be positive")
    if not args.bench and not args.measured:
        raise UserError(
            "no throughput is given", hint=f"--bench FILE of `ttt bench {args.benchmark}`, or --measured"
        )


def measured_work(args: argparse.Namespace, config: RunConfig) -> tuple[scaling.Work, list[str]]:
    """Return the work of a step as it was measured on one device, and what that assumes."""
    import torch

    benchmark = benchmark_module(config.benchmark).Benchmark(config, seed=0)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in benchmark.build_model().parameters())
    points = [parse_measured(text) for text in args.measured]
    copy_per_s = []
    for path in args.bench:
        figures = read_figures(path, config)
        copy_per_s.append(figures["peaks"]["bytes_per_s"])
        per_s = {
            rate["shape"]: rate["samples_per_s"]
            for rate in figures["rates"]
            if rate["configuration"] == config.configuration
        }
        shares = benchmark.shape_shares()
        missing = sorted(shares.keys() - per_s.keys())
        if missing:
            raise UserError(f"no rate of {config.configuration} at {missing[0]}", where=str(path))
        batch = figures["batch_size"]
        points.append((batch, batch * sum(share / per_s[shape] for shape, share in shares.items())))
    traffic = parameters * scaling.OPTIMIZER_BYTES[config.optimizer.name]
    floor_s = traffic / max(copy_per_s) if copy_per_s else 0.0
    width = 2 if config.gradient_compression == "bf16" else 4
    spread = benchmark.work_spread()
    work = scaling.fitted(
        scaling.Work(
            gradient_bytes=width * parameters,
            sample_s=0.0,
            micro_batch=max(batch for batch, _ in points),
            **dataclasses.asdict(spread),
        ),
        points,
        floor_s,
    )
    measured = ", ".join(f"{batch / seconds:,.1f}/s at batch {batch}" for batch, seconds in points)
    fixed = "nothing is taken as fixed, which is too fast for small shares: give two batches"
    if work.fixed_s:
        of = "by two batches" if work.fixed_s > floor_s else "the optimizer's memory traffic"
        fixed = f"{work.fixed_s * 1e3:.2f} ms of a micro-batch are fixed ({of})"
    return work, [
        f"one device: {measured}; shares above {work.micro_batch} are accumulated",
        fixed,
        f"gradients: {parameters:,} parameters in {width} bytes, {work.gradient_bytes / 1e6:,.0f} MB",
        f"samples: their work deviates by {spread.deviation:.2f} of the mean, "
        f"the most is {spread.longest:.2f} times it{', ranks are balanced' if spread.is_balanced else ''}",
    ]


def parse_measured(text: str) -> tuple[int, float]:
    """Return batch and seconds of a step from SAMPLES_PER_S@BATCH."""
    rate, _, batch = text.partition("@")
    per_s = scaling.number(rate)
    if per_s is None or not batch.isdecimal() or int(batch) == 0:
        raise UserError(f"--measured {text}: expected SAMPLES_PER_S@BATCH, such as 70@56")
    return int(batch), int(batch) / per_s


def read_figures(path: Path, config: RunConfig) -> dict[str, Any]:
    """Read what `ttt bench` kept. Raises UserError unless it is of this benchmark and size."""
    try:
        figures: dict[str, Any] = json.loads(path.read_text())
        of = figures["benchmark"], figures["size"]
        figures["batch_size"], figures["rates"], figures["peaks"]["bytes_per_s"]  # noqa: B018
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"no figures of `ttt bench` ({error})", where=str(path)) from error
    if of != (config.benchmark, config.size):
        raise UserError(
            f"figures of {' '.join(of)}, not of {config.benchmark} {config.size}", where=str(path)
        )
    return figures


def choose_recipe(args: argparse.Namespace, config: RunConfig) -> tuple[scaling.Recipe, list[str]]:
    """Return what is trained, and what is assumed of the samples to the target."""
    name = benchmark_module(config.benchmark).Benchmark.mlperf_name
    samples, why = args.samples, "as given"
    if samples is None:
        samples, why = samples_to_target(name, config)
    steps = config.plan()
    num_evaluations = sum(1 for step in steps.evaluation_steps if step * config.global_batch_size <= samples)
    num_evaluated: int = config.data.num_evaluation_samples  # type: ignore[attr-defined]
    assumptions = [
        f"samples to the target: {samples:,} ({why}); start-up {args.startup_s:g} s; {num_evaluations} "
        f"evaluations of {num_evaluated:,} samples, each {FORWARD:.2f} of a trained one"
    ]
    if args.batch_per_device is not None:
        assumptions.append(
            "unverified recipe: the batch grows with the devices, but takes as many samples to the target as "
            f"the recipe's {config.global_batch_size:,}; larger ones take more (--samples), and another rate"
        )
    recipe = scaling.Recipe(
        batch=None if args.batch_per_device else config.global_batch_size,
        share=args.batch_per_device or 0,
        samples_to_target=samples,
        evaluation_samples=num_evaluated,
        num_evaluations=num_evaluations,
        startup_s=args.startup_s,
    )
    return recipe, assumptions


def samples_to_target(name: str, config: RunConfig) -> tuple[int, str]:
    """Return the median of the published set of a configuration, else all that it may train on."""
    from statistics import median

    from common.evidence.compare.reported import load_reported

    published = load_reported()[name].of_configuration(config.configuration)
    if published is None or config.size != "full":
        return config.plan().num_steps * config.global_batch_size, "all that the recipe allows"
    reached = [run.samples for run in published.score.runs if run.samples]
    return math.ceil(median(reached)), f"median of {published.title}"


def row(found: scaling.Prediction) -> dict[str, Any]:
    """Return one prediction for machines."""
    rest = {"efficiency": found.efficiency, "minutes": found.minutes, "cost": found.cost}
    return dataclasses.asdict(found.step) | {"samples_per_s": found.step.samples_per_s} | rest


def print_predictions(found: list[scaling.Prediction], assumptions: list[str]) -> None:
    """Print a table, the formula and the assumptions."""
    cost = "" if found[0].cost is None else "      cost"
    heads = "machines devices  batch/device   step ms  exchange   exposed    samples/s  efficiency    minutes"
    print(f"{heads}{cost}")
    for each in found:
        taken = each.step
        cost = "" if each.cost is None else f"{each.cost:10,.2f}"
        print(
            f"{taken.machines:8} {taken.devices:7} {math.ceil(taken.batch / taken.devices):13,}"
            f" {taken.seconds * 1e3:9.1f} {taken.exchange_s * 1e3:9.1f} {taken.exposed_s * 1e3:9.1f}"
            f" {taken.samples_per_s:12,.1f} {each.efficiency:11.0%} {each.minutes:10.2f}{cost}"
        )
    for title, lines in (("formula", scaling.FORMULA), ("assumptions", assumptions)):
        print(f"{title}:", *(f"  {line}" for line in lines), sep="\n")


def report_checks(checks: list[scaling.Check], as_json: bool) -> None:
    """Print predicted against published throughput, and the errors."""
    errors = [abs(math.log(check.ratio)) for check in checks]
    largest, typical = math.exp(max(errors)), math.exp(sum(errors) / len(errors))
    if as_json:
        rows = [dataclasses.asdict(check) | {"ratio": check.ratio} for check in checks]
        print(json.dumps({"checks": rows, "largest_factor": largest, "typical_factor": typical}))
        return
    heads = (
        "benchmark submitter round ",
        "system",
        "devices  each  measured on   predicted   published  ratio",
    )
    print(f"{heads[0]} {heads[1]:29} {heads[2]}")
    for check in checks:
        print(
            f"{check.benchmark:9} {check.submitter:9} {check.round:6} {check.system:30}{check.devices:7} "
            f"{check.batch // check.devices:5}  {check.measured_on:>11} {check.predicted_per_s:11,.0f} "
            f"{check.published_per_s:11,.0f} {check.ratio:6.2f}"
        )
    print(
        f"samples/s; {len(checks)} sets; the factor is {typical:.2f} on average (geometric), {largest:.2f} "
        "at most; above 1: predicted too fast, as where shares are small and launches bound the steps"
    )
