"""A run on more devices, predicted from the throughput of one: step time, efficiency, minutes, cost."""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from common.arguments import MAX_BATCH, whole_number
from common.config.duration import FORWARD, evaluation_seconds
from common.config.schema import RunConfig
from common.errors import UserError
from common.evidence.text import size_title
from common.measure import scaling
from common.measure.device_run import NUM_DEVICES
from common.measure.scaling import FORMULA, Links, Work
from common.repository import build_probes
from common.study.predict import sources
from common.study.predict.minutes import STARTUP_S, estimate_run
from common.study.prices import Price
from common.training.load import load_config, load_open

MAX_DEVICES = 1024
PER_MACHINE = 8
Row = dict[str, Any]  # a whole run on so many devices, as JSON has it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The samples that a run trains on. `batch` is that of all devices; None: `share` for each device."""

    batch: int | None
    share: int
    samples_to_target: int
    evaluation_samples: int
    num_evaluations: int
    startup_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    devices = whole_number(1, MAX_DEVICES)
    text = "devices, 8 in a machine unless --gpus says otherwise"
    parser.add_argument("--devices", type=devices, metavar="N", help=text)
    parser.add_argument("--nodes", type=devices, metavar="N", help="machines; default: 1")
    text = "devices of a machine; default: 1, with --scaling 8"
    parser.add_argument("--gpus", type=devices, metavar="N", help=text)
    text = "with --scaling; default: the recipe's global batch"
    parser.add_argument("--batch-per-device", type=whole_number(1, MAX_BATCH), metavar="N", help=text)
    text = f"GB/s, or: {', '.join(scaling.INSIDE)}"
    parser.add_argument("--inside", default="nvlink4", metavar="GB_PER_S", help=text)
    text = f"GB/s of a machine, or links: 8x{', 8x'.join(scaling.NETWORK)}"
    parser.add_argument("--network", default="8xndr", metavar="GB_PER_S", help=text)
    text = "latency of a message"
    parser.add_argument("--latency-us", type=float, default=scaling.LATENCY_US, metavar="US", help=text)
    text = "share of their rates reached"
    parser.add_argument("--link-share", type=float, default=scaling.LINK_SHARE, metavar="SHARE", help=text)
    text = "share of communication hidden"
    parser.add_argument("--overlap", type=float, default=scaling.OVERLAP, metavar="SHARE", help=text)
    parser.add_argument("--startup-s", type=float, metavar="S", help="seconds to the first step")


def choose_machines(args: argparse.Namespace) -> tuple[int, int]:
    """Return the number of machines and of devices in each. Raises UserError for unequal machines."""
    default = min(args.devices or PER_MACHINE, PER_MACHINE) if args.devices or args.scaling else 1
    machines, per_machine = args.nodes or 1, args.gpus or default
    if args.devices is not None:
        if args.nodes is not None:
            raise UserError("--devices and --nodes exclude each other", hint="--nodes N --gpus N")
        machines, rest = divmod(args.devices, per_machine)
        if rest:
            expected = f"expected whole machines of {per_machine} devices"
            raise UserError(f"--devices {args.devices}: {expected}", hint="or --gpus N, devices of a machine")
    if machines * per_machine > MAX_DEVICES:
        raise UserError(f"--nodes {machines} --gpus {per_machine}: expected 1 to {MAX_DEVICES} devices")
    return machines, per_machine


def choose_links(args: argparse.Namespace) -> Links:
    """Return the links that the options describe. Raises UserError for impossible ones."""
    if not (0 < args.link_share <= 1 and 0 <= args.overlap <= 1):
        shares = f"--link-share {args.link_share:g}, --overlap {args.overlap:g}"
        raise UserError(f"{shares}: expected shares of at most 1, such as 0.9")
    if not all(0 <= number < math.inf for number in (args.latency_us, args.startup_s or 0.0)):
        raise UserError("--latency-us and --startup-s: expected numbers from 0")
    return Links(
        inside=scaling.choose_inside(args.inside),
        network=scaling.choose_network(args.network),
        latency_us=args.latency_us,
        share=args.link_share,
        overlap=args.overlap,
    )


def predict(
    work: Work, links: Links, recipe: Recipe, *, machines: int, per_machine: int, price: Price | None
) -> list[Row]:
    """Predict each number of devices: 1, 2, 4 ... of one machine, then 2, 4 ... machines.

    `efficiency` is the throughput of a device over that of one device alone.
    """
    counts = [(1, devices) for devices in doublings(per_machine)]
    counts += [(number, per_machine) for number in doublings(machines)[1:]]
    rows: list[Row] = []
    for number, devices_of_one in counts:
        devices = number * devices_of_one
        batch = recipe.batch or devices * recipe.share
        check_divisible(batch, devices)
        step = scaling.step(work, links, machines=number, per_machine=devices_of_one, batch=batch)
        alone_per_s = rows[0]["samples_per_s"] if rows else step.samples_per_s
        evaluation_s = evaluation_seconds(
            recipe.num_evaluations, recipe.evaluation_samples, devices / work.sample_s
        )
        training_s = math.ceil(recipe.samples_to_target / batch) * step.seconds
        minutes = (training_s + evaluation_s + recipe.startup_s) / 60
        figures = {
            "samples_per_s": step.samples_per_s,
            "efficiency": step.samples_per_s / devices / alone_per_s,
            "minutes": minutes,
            "cost": None if price is None else price.cost(minutes, devices, num_machines=number),
        }
        rows.append(dataclasses.asdict(step) | figures)
    return rows


def doublings(most: int) -> list[int]:
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def check_divisible(batch: int, devices: int) -> None:
    if batch < devices:
        hint = "fewer devices, or a larger batch: with --scaling by --batch-per-device"
        what = f"{devices} devices cannot divide {batch} samples"
        raise UserError(what, where="global_batch_size", hint=hint)


def compare_with_one(
    args: argparse.Namespace,
    config: RunConfig,
    per_s: float,
    links: Links,
    *,
    machines: int,
    per_machine: int,
) -> tuple[float, str]:
    """Return the time of a step on all devices over the time on one, and the assumptions.

    The rates of one device are those of `--measured` and `--bench`, else `per_s`.
    """
    batch, devices = config.global_batch_size, machines * per_machine
    if devices == 1:
        return 1.0, "one device"
    share = max(1, batch // NUM_DEVICES) if config.size == "full" else batch
    is_given = args.measured or args.bench
    points, bytes_per_s = measured_points(args, config) if is_given else ([(share, share / per_s)], None)
    work, assumptions = build_work(config, points, bytes_per_s)
    check_divisible(batch, devices)
    one = scaling.step(work, links, machines=1, per_machine=1, batch=batch)
    together = scaling.step(work, links, machines=machines, per_machine=per_machine, batch=batch)
    efficiency = one.seconds / together.seconds / devices
    by = f"{devices} devices at {efficiency:.0%} of {devices} times one, as `--scaling` shows"
    return together.seconds / one.seconds, f"{by}: {assumptions[1]}"


def measured_points(
    args: argparse.Namespace, config: RunConfig
) -> tuple[list[tuple[int, float]], float | None]:
    """List (batch, seconds of a step) of one device, and its memory's bytes/s where a bench says them."""
    probes = build_probes(config)
    points = [(batch, batch / per_s) for batch, per_s in map(sources.parse_measured, args.measured)]
    bytes_per_s = []
    for path in args.bench:
        figures, rates = sources.read_bench(path, probes, sources.full_name(args, config))
        bytes_per_s.append(figures["peaks"]["bytes_per_s"])
        points.append((figures["batch_size"], figures["batch_size"] * rates.sample_s(probes.shape_shares())))
    return points, max(bytes_per_s, default=None)


def build_work(
    config: RunConfig, points: Sequence[tuple[int, float]], bytes_per_s: float | None = None
) -> tuple[Work, list[str]]:
    """Return the work of a step fitted to measurements of one device, and the assumptions."""
    import torch

    probes = build_probes(config)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in probes.benchmark.build_model().parameters())
    traffic = parameters * scaling.OPTIMIZER_BYTES[config.optimizer.name]
    floor_s = traffic / bytes_per_s if bytes_per_s else 0.0
    width = 2 if config.gradient_compression == "bf16" else 4
    spread, micro_batch = probes.work_spread(), max(batch for batch, _ in points)
    unfitted = Work(
        gradient_bytes=width * parameters,
        sample_s=0.0,
        micro_batch=micro_batch,
        **dataclasses.asdict(spread),
    )
    work = scaling.fit_work(unfitted, points, floor_s)
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


def choose_recipe(args: argparse.Namespace, config: RunConfig) -> tuple[Recipe, list[str]]:
    """Return the training, and the assumptions.

    Samples to target are `--samples`, else the median of published runs, else all that the recipe allows.
    """
    batch, share, samples, source = config.global_batch_size, args.batch_per_device, args.samples, "as given"
    if samples is None and (published := sources.published_samples(config)):
        samples, source = math.ceil(statistics.median(published.values)), f"median of {published.source}"
    elif samples is None:
        samples, source = sources.max_samples(config), "all that the recipe allows"
    recipe = Recipe(
        batch=None if share else batch,
        share=share or 0,
        samples_to_target=samples,
        evaluation_samples=config.data.num_evaluation_samples,  # type: ignore[attr-defined]
        num_evaluations=sum(1 for step in config.plan().evaluation_steps if step * batch <= samples),
        startup_s=STARTUP_S if args.startup_s is None else args.startup_s,
    )
    assumptions = [
        f"samples to the target: {samples:,} ({source}); start-up {recipe.startup_s:g} s; "
        f"{recipe.num_evaluations} evaluations of {recipe.evaluation_samples:,} samples, "
        f"each {FORWARD:.2f} of a trained one"
    ]
    if share is not None:
        assumptions.append(
            "unverified recipe: the batch grows with the devices, but takes as many samples to the target as "
            f"the recipe's {batch:,}; larger ones take more (--samples), and another rate"
        )
    return recipe, assumptions


def project(name: str, figures: dict[str, Any]) -> dict[str, Any] | None:
    """Return the minutes on the devices of a published system, with interval and assumptions.

    `name` is a configuration's full name, `figures` are those of `ttt bench`. None where they lack the rate
    of a shape or are of another batch than a device's share, and where no published run tells how many
    samples the target takes: at size mini, and with another model, target, batch, optimizer or length.
    """
    config = load_open(figures["benchmark"], name, size=figures["size"], settings=[]).config
    samples = sources.published_samples(config)
    is_share = sources.batch_of(figures, name) == config.global_batch_size // NUM_DEVICES
    if samples is None or not is_share:
        return None
    probes = build_probes(config)
    rates = sources.rates_of_bench(figures, name, probes.shape_shares(), "", probes.rate)
    if rates is None:
        return None
    estimated = estimate_run(
        config, probes.phases(), rates=rates, samples=samples, slower=1 / NUM_DEVICES, devices=NUM_DEVICES
    )
    return {key: estimated[key] for key in ("minutes", "low", "high")} | {
        "assuming": f"if the target takes the {samples.typical:,.0f} samples of {samples.source}, the loader "
        f"keeps up, devices scale perfectly and a sample of the {estimated['num_evaluations']} evaluations "
        "takes a third of a trained one"
    }


def predict_scaling(args: argparse.Namespace, price: Price | None) -> tuple[list[Row], list[str]]:
    machines, per_machine = choose_machines(args)
    links = choose_links(args)
    if not args.bench and not args.measured:
        hint = f"--bench FILE of `ttt bench {args.benchmark}`, or --measured"
        raise UserError("no throughput is given", hint=hint)
    config = load_config(args.benchmark, args.configuration, size=args.size, settings=args.set).config
    work, assumptions = build_work(config, *measured_points(args, config))
    recipe, more = choose_recipe(args, config)
    rows = predict(work, links, recipe, machines=machines, per_machine=per_machine, price=price)
    return rows, [
        f"recipe: {config.benchmark} {config.configuration} {size_title(config.size)}",
        *assumptions,
        *more,
        f"links: {links.inside:g} GB/s inside a machine, {links.network:g} GB/s between machines, of which "
        f"{links.share:.0%} is reached; {links.latency_us:g} us a message; {links.overlap:.0%} overlapped",
        "the loader keeps up, no device is slower than the others, nothing else uses the network",
    ]


def describe(rows: Sequence[Row], assumptions: Sequence[str]) -> Iterator[str]:
    has_cost = rows[0]["cost"] is not None
    yield "predicted from the rate of one device, not measured; --check-published says how wrong that can be"
    parts = "step ms  exchange ms  exposed ms"
    heads = f"machines devices  batch/device   {parts}    samples/s  efficiency    minutes"
    yield heads + "   cost, $" * has_cost
    for row in rows:
        step_ms, exchange_ms = (row["compute_s"] + row["exposed_s"]) * 1e3, row["exchange_s"] * 1e3
        exposed_ms, samples_per_s = row["exposed_s"] * 1e3, row["samples_per_s"]
        yield (
            f"{row['machines']:8} {row['devices']:7} {math.ceil(row['batch'] / row['devices']):13,}"
            f" {step_ms:9.1f} {exchange_ms:12.1f} {exposed_ms:11.1f} {samples_per_s:12,.1f}"
            f" {row['efficiency']:11.0%} {row['minutes']:10.2f}"
            + (f"{row['cost']:10,.2f}" if has_cost else "")
        )
    for title, lines in (("formula", FORMULA), ("assumptions", assumptions)):
        yield f"{title}:"
        yield from (f"  {line}" for line in lines)
