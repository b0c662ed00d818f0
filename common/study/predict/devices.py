"""A run on more devices, predicted from the throughput of one: step time, efficiency, minutes, cost."""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.duration import FORWARD, evaluation_seconds
from common.config.schema import RunConfig
from common.errors import UserError
from common.measure import scaling
from common.measure.device_run import NUM_DEVICES
from common.measure.scaling import FORMULA, Links, Step, Work
from common.repository import build_probes
from common.study.predict.minutes import STARTUP_S
from common.study.predict.sources import (
    max_samples,
    parse_measured,
    published_samples,
    rates_of_bench,
    read_bench,
)
from common.study.prices import Price
from common.training.load import load_config

MAX_DEVICES = 1024
PER_MACHINE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The samples that a run trains on. `batch` is that of all devices; None: `share` for each device."""

    batch: int | None
    share: int
    samples_to_target: int
    evaluation_samples: int
    num_evaluations: int
    startup_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A whole run on so many devices; `efficiency` is relative to as many times one device alone."""

    step: Step
    efficiency: float
    minutes: float
    cost: float | None

    def row(self) -> dict[str, Any]:
        """Return all figures for JSON."""
        rest = {"efficiency": self.efficiency, "minutes": self.minutes, "cost": self.cost}
        return dataclasses.asdict(self.step) | {"samples_per_s": self.step.samples_per_s} | rest


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the number of devices and the links between them."""
    inside, network = ", ".join(scaling.INSIDE), ", 8x".join(scaling.NETWORK)
    numbers = {
        "--devices": "devices, 8 in a machine unless --gpus says otherwise",
        "--nodes": "machines; default: 1",
        "--gpus": "devices of a machine; default: 1, with --scaling 8",
        "--batch-per-device": "with --scaling; default: the recipe's global batch",
    }
    for name, help in numbers.items():
        parser.add_argument(name, type=int, metavar="N", help=help)
    parser.add_argument("--inside", default="nvlink4", help=f"GB/s, or: {inside}")
    parser.add_argument("--network", default="8xndr", help=f"GB/s of a machine, or links: 8x{network}")
    parser.add_argument("--latency-us", type=float, default=scaling.LATENCY_US, help="of a message")
    parser.add_argument("--link-share", type=float, default=scaling.LINK_SHARE, help="of those rates reached")
    parser.add_argument("--overlap", type=float, default=scaling.OVERLAP, help="share hidden by the backward")
    parser.add_argument("--startup-s", type=float, help="from run_start to the first step")


def choose_machines(args: argparse.Namespace) -> tuple[int, int]:
    """Return machines and devices of a machine. Raises UserError for numbers that no prediction can have."""
    machines = 1 if args.nodes is None else args.nodes
    per_machine = args.gpus
    if per_machine is None:
        per_machine = min(args.devices or PER_MACHINE, PER_MACHINE) if args.devices or args.scaling else 1
    if args.devices is not None and per_machine > 0:
        machines, rest = divmod(args.devices, per_machine)
        if rest or args.nodes is not None:
            raise UserError(f"--devices {args.devices}: expected whole machines of {per_machine}, no --nodes")
    if machines < 1 or per_machine < 1 or machines * per_machine > MAX_DEVICES:
        raise UserError(f"--nodes {machines} --gpus {per_machine}: expected 1 to {MAX_DEVICES} devices")
    if not (0 < args.link_share <= 1 and 0 <= args.overlap <= 1):
        raise UserError("--link-share and --overlap are fractions")
    positive = [value for value in (args.batch_per_device, args.samples) if value is not None]
    if min(positive, default=1) <= 0 or min(args.latency_us, args.startup_s or 0.0) < 0:
        raise UserError("--samples, --batch-per-device, --latency-us and --startup-s must be positive")
    return machines, per_machine


def choose_links(args: argparse.Namespace) -> Links:
    """Return the links that the options say."""
    return Links(
        inside=scaling.choose_inside(args.inside),
        network=scaling.choose_network(args.network),
        latency_us=args.latency_us,
        share=args.link_share,
        overlap=args.overlap,
    )


def predict(
    work: Work, links: Links, recipe: Recipe, *, machines: int, per_machine: int, price: Price | None
) -> list[Prediction]:
    """Return a prediction for each number of devices: 1, 2, 4 ... of one machine, then 2, 4 ... machines."""
    counts = [(1, devices) for devices in doublings(per_machine)]
    counts += [(number, per_machine) for number in doublings(machines)[1:]]
    predictions: list[Prediction] = []
    for number, devices_of_one in counts:
        devices = number * devices_of_one
        batch = recipe.batch or devices * recipe.share
        check_divisible(batch, devices)
        step = scaling.step(work, links, machines=number, per_machine=devices_of_one, batch=batch)
        alone = predictions[0].step if predictions else step
        num_steps = math.ceil(recipe.samples_to_target / batch)
        per_s = devices / work.sample_s
        evaluation_s = evaluation_seconds(recipe.num_evaluations, recipe.evaluation_samples, per_s)
        minutes = (num_steps * step.seconds + evaluation_s + recipe.startup_s) / 60
        predictions.append(
            Prediction(
                step=step,
                efficiency=step.samples_per_s / devices / alone.samples_per_s,
                minutes=minutes,
                cost=None if price is None else price.cost(minutes, devices, num_machines=number),
            )
        )
    return predictions


def doublings(most: int) -> list[int]:
    return sorted({1 << power for power in range(most.bit_length()) if 1 << power < most} | {most})


def check_divisible(batch: int, devices: int) -> None:
    if batch < devices:
        hint = "fewer devices, or a larger batch: with --scaling by --batch-per-device"
        what = f"{devices} devices cannot divide {batch} samples"
        raise UserError(what, where="global_batch_size", hint=hint)


def compare_with_one(
    config: RunConfig, per_s: float, links: Links, *, machines: int, per_machine: int
) -> tuple[float, str]:
    """Return the time of a step on all devices over that on one of rate `per_s`, and what this assumes."""
    batch, devices = config.global_batch_size, machines * per_machine
    if devices == 1:
        return 1.0, "one device"
    share = max(1, batch // NUM_DEVICES) if config.size == "full" else batch
    work, assumptions = build_work(config, [(share, share / per_s)])
    check_divisible(batch, devices)
    one = scaling.step(work, links, machines=1, per_machine=1, batch=batch)
    together = scaling.step(work, links, machines=machines, per_machine=per_machine, batch=batch)
    efficiency = one.seconds / together.seconds / devices
    by = f"{devices} devices at {efficiency:.0%} of {devices} times one, as `--scaling` shows"
    return together.seconds / one.seconds, f"{by}: {assumptions[1]}"


def measured_points(
    measured: Sequence[str], benches: Sequence[Path], config: RunConfig
) -> tuple[list[tuple[int, float]], float | None]:
    """Return (batch, seconds of a step) of one device, and its memory's bytes/s where a bench says them."""
    shares = build_probes(config).shape_shares()
    points = [(batch, batch / per_s) for batch, per_s in map(parse_measured, measured)]
    bytes_per_s = []
    for path in benches:
        figures = read_bench(path, config)
        bytes_per_s.append(figures["peaks"]["bytes_per_s"])
        rates = rates_of_bench(figures, config.configuration, set(shares), path.name)
        if rates is None:
            what = f"no rate of {config.configuration} at {', '.join(sorted(shares))}"
            raise UserError(what, where=str(path))
        sample_s = sum(share / rates.per_s[shape] for shape, share in shares.items())
        points.append((figures["batch_size"], figures["batch_size"] * sample_s))
    return points, max(bytes_per_s, default=None)


def build_work(
    config: RunConfig, points: Sequence[tuple[int, float]], bytes_per_s: float | None = None
) -> tuple[Work, list[str]]:
    """Return the work of a step as it was measured on one device, and what that assumes."""
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


def choose_recipe(
    config: RunConfig, *, samples: int | None, share: int | None, startup_s: float
) -> tuple[Recipe, list[str]]:
    """Return the training, and what is assumed of its samples to the target.

    These are `samples`, else the median of the published runs, else all that the recipe allows.
    """
    plan, batch, source = config.plan(), config.global_batch_size, "as given"
    if samples is None and (published := published_samples(config)):
        samples, source = math.ceil(published.median), f"median of {published.source}"
    elif samples is None:
        samples, source = max_samples(config), "all that the recipe allows"
    num_evaluations = sum(1 for step in plan.evaluation_steps if step * batch <= samples)
    num_evaluated: int = config.data.num_evaluation_samples  # type: ignore[attr-defined]
    assumptions = [
        f"samples to the target: {samples:,} ({source}); start-up {startup_s:g} s; {num_evaluations} "
        f"evaluations of {num_evaluated:,} samples, each {FORWARD:.2f} of a trained one"
    ]
    if share is not None:
        assumptions.append(
            "unverified recipe: the batch grows with the devices, but takes as many samples to the target as "
            f"the recipe's {batch:,}; larger ones take more (--samples), and another rate"
        )
    recipe = Recipe(
        batch=None if share else batch,
        share=share or 0,
        samples_to_target=samples,
        evaluation_samples=num_evaluated,
        num_evaluations=num_evaluations,
        startup_s=startup_s,
    )
    return recipe, assumptions


def predict_scaling(args: argparse.Namespace, price: Price | None) -> tuple[list[Prediction], list[str]]:
    """Return the predictions that the options ask for, and what they assume."""
    machines, per_machine = choose_machines(args)
    if not args.bench and not args.measured:
        hint = f"--bench FILE of `ttt bench {args.benchmark}`, or --measured"
        raise UserError("no throughput is given", hint=hint)
    config = load_config(args.benchmark, args.configuration, size=args.size, settings=args.set).config
    work, assumptions = build_work(config, *measured_points(args.measured, args.bench, config))
    startup_s = STARTUP_S if args.startup_s is None else args.startup_s
    recipe, more = choose_recipe(
        config, samples=args.samples, share=args.batch_per_device, startup_s=startup_s
    )
    links = choose_links(args)
    predictions = predict(work, links, recipe, machines=machines, per_machine=per_machine, price=price)
    return predictions, [
        *assumptions,
        *more,
        f"links: {links.inside:g} GB/s inside a machine, {links.network:g} GB/s between machines, of which "
        f"{links.share:.0%} is reached; {links.latency_us:g} us a message; {links.overlap:.0%} overlapped",
        "the loader keeps up, no device is slower than the others, nothing else uses the network",
    ]


def describe(predictions: Sequence[Prediction], assumptions: Sequence[str]) -> Iterator[str]:
    """Yield a table, the formula and the assumptions as lines."""
    has_cost = predictions[0].cost is not None
    heads = "machines devices  batch/device   step ms  exchange   exposed    samples/s  efficiency    minutes"
    yield heads + "      cost" * has_cost
    for prediction in predictions:
        step = prediction.step
        yield (
            f"{step.machines:8} {step.devices:7} {math.ceil(step.batch / step.devices):13,}"
            f" {step.seconds * 1e3:9.1f} {step.exchange_s * 1e3:9.1f} {step.exposed_s * 1e3:9.1f}"
            f" {step.samples_per_s:12,.1f} {prediction.efficiency:11.0%} {prediction.minutes:10.2f}"
            + (f"{prediction.cost:10,.2f}" if has_cost else "")
        )
    for title, lines in (("formula", FORMULA), ("assumptions", assumptions)):
        yield f"{title}:"
        yield from (f"  {line}" for line in lines)
