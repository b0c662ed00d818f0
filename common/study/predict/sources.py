"""The measurements that a prediction rests on: rates from profiles and benches, samples from logs.

Two configurations count as one if they differ only in keys that the older one lacks.
"""

import argparse
import shlex
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError

from common import yaml_file
from common.arguments import positive_number
from common.config.schema import RunConfig
from common.errors import UserError
from common.evidence.compare.reported import find_published
from common.evidence.log import Log, read_log
from common.evidence.paths import find_logs
from common.evidence.recipes import flat
from common.evidence.text import line_console
from common.machine import system
from common.measure.device_run import load_for_ranks
from common.measure.figures import keep, read_figures
from common.repository import mlperf_name
from common.study.predict.minutes import ASSUMED_NOISE, STARTUP_S, Rates, Samples
from common.training.load import load_open
from common.training.ranks import SINGLE_RANK

if TYPE_CHECKING:
    from common.training.probes import Probes

RECIPE = (
    *("target", "max_duration", "budget", "evaluate_every", "evaluate_offset", "evaluate_from"),
    *("global_batch_size", "precision", "evaluation_precision"),
    *("model", "data", "optimizer", "schedule", "methods"),
)
# keys of `data` that do not change the samples of a batch
OF_MACHINE = {"directory", "loader", "num_workers", "stored_on", "decoder"}
# keys that have to be those of a published run for its samples to target to hold
PUBLISHED = ("model", "target", "max_duration", "budget", "global_batch_size", "optimizer", "schedule")
NUM_TURNS = 4  # of a profile that an estimate measures
FREE = {"micro_batch_size", "submission", "checkpoint_every"}  # that a run may decide for its machine
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._+=-]{1,64}$")]


class StatedConfig(BaseModel):
    """The keys of a configuration that predictions rely on."""

    benchmark: Name
    configuration: Name
    size: Name
    target: float = Field(allow_inf_nan=False)
    methods: dict[str, Any]


class Rate(BaseModel):
    configuration: str
    shape: str
    samples_per_s: PositiveFloat = Field(allow_inf_nan=False)


class Peaks(BaseModel):
    bytes_per_s: PositiveFloat


class BenchFigures(BaseModel):
    """The part of a file of `ttt bench` that predictions rely on."""

    benchmark: str
    size: str
    batch_size: PositiveInt | None = None  # a bench of which nothing could be built has none
    rates: list[Rate]


class WholeBench(BenchFigures):
    """A file of `ttt bench` that a person names: its batch and its peaks are needed, too."""

    batch_size: PositiveInt
    peaks: Peaks


def find_newest(directory: Path, benchmark: str) -> list[Path]:
    """Return the figures of a benchmark, <benchmark>_N.json, the largest N first."""
    numbered = [(path.stem.removeprefix(f"{benchmark}_"), path) for path in directory.glob("*.json")]
    whole = [(int(number), path) for number, path in numbered if number.isdecimal()]
    return [path for _, path in sorted(whole, reverse=True)]


def read_bench(path: Path, probes: "Probes", name: str) -> tuple[dict[str, Any], Rates]:
    """Read a file of `ttt bench`, and the rates in it of a configuration's full name.

    Raises UserError unless it is one, of this benchmark and size, with a rate of each shape.
    """
    config, shapes = probes.config, probes.shape_shares()
    figures = read_figures(path, WholeBench)
    of = figures["benchmark"], figures["size"]
    if of != (config.benchmark, config.size):
        wanted = f"{config.benchmark} {config.size}"
        raise UserError(f"figures of {' '.join(of)}, not of {wanted}", where=str(path))
    rates = rates_of_bench(figures, name, shapes, path.name, probes.rate)
    if rates is None:
        raise UserError(f"no rate of {name} at {', '.join(sorted(shapes))}", where=str(path))
    return figures | {"batch_size": batch_of(figures, name)}, rates


def batch_of(figures: dict[str, Any], name: str) -> int | None:
    """Return the samples of a step of a configuration's full name; older benches state the first one's."""
    stated = (row.get("batch_size") for row in figures.get("rates", []) if row["configuration"] == name)
    return next(stated, None) or figures.get("batch_size")


def parse_measured(text: str) -> tuple[int, float]:
    """Return batch and samples/s of SAMPLES_PER_S@BATCH."""
    rate, _, batch = text.partition("@")
    per_s = positive_number(rate)
    if per_s is None or not batch.isdecimal() or int(batch) == 0:
        raise UserError(f"--measured {text}: expected SAMPLES_PER_S@BATCH, such as 70@56")
    return int(batch), per_s


def rates_of_profile(figures: dict[str, Any], values: dict[str, Any], name: str) -> Rates | None:
    """Return the rates of the loop on one device; None for another configuration or several devices."""
    if not {"config", "num_ranks", "delay_data_ms", "phases", "evaluation_s"} <= figures.keys():
        return None
    keys = values.keys() - FREE - {"global_batch_size"}  # a device has its part of it
    if not agree(pick(figures["config"], keys), pick(values, keys)):
        return None
    if figures["num_ranks"] > 1 or figures["delay_data_ms"]:
        return None
    phases = figures["phases"]
    total = sum(phase["share"] * phase["step_ms"] for phase in phases)
    per_s = {phase["shape"]: phase["batch"] / phase["step_ms"] * 1e3 for phase in phases}
    first = phases[0]
    once = first["first_pass_per_s"] or per_s[first["shape"]]
    return Rates(
        source=f"the loop with its loader, profile {name}",
        per_s=per_s,
        noise=sum(phase["share"] * phase["step_ms"] * phase["deviation"] for phase in phases) / total,
        noise_source="of turns of steps",
        num_turns=min((phase["num_turns"] for phase in phases if phase.get("num_turns")), default=None),
        evaluation_s=tuple(figures["evaluation_s"]),
        first_pass_s=max(0.0, 1 / once - 1 / per_s[first["shape"]]) * values["data"]["num_train_samples"],
    )


def rates_of_bench(
    figures: dict[str, Any],
    name: str,
    shapes: Collection[str],
    source: str,
    rate_of: Callable[[str, dict[str, float]], float | None] = lambda shape, measured: measured.get(shape),
) -> Rates | None:
    """Return the rates of steps without a loader; None where a shape of this configuration has none.

    `rate_of` finds the rate of a shape from those measured, see `Probes.rate`.
    """
    rows = [rate for rate in figures.get("rates", []) if rate["configuration"] == name]
    measured = {rate["shape"]: rate["samples_per_s"] for rate in rows}
    per_s = {shape: per_s for shape in shapes if (per_s := rate_of(shape, measured))}
    if per_s.keys() != set(shapes):
        return None
    stated = [(rate["deviation"], rate.get("num_turns")) for rate in rows if "deviation" in rate]
    noise, num_turns = max(stated, key=lambda pair: pair[0], default=(ASSUMED_NOISE, None))
    return Rates(
        source=f"steps alone, bench {source}: as if the loader keeps up",
        per_s=per_s,
        noise=noise,
        noise_source="of turns of steps" if stated else "assumed: the file states none",
        num_turns=num_turns,
    )


def newest_profile(results: Path, hardware: str, values: dict[str, Any]) -> Rates | None:
    """Take the rates of the newest profile of a configuration on a hardware; None without one."""
    paths = find_newest(results / "profile" / hardware, values["benchmark"])
    every = (rates_of_profile(read_figures(path), values, path.name) for path in paths)
    return next(filter(None, every), None)


def newest_bench(
    results: Path, hardware: str, probes: "Probes", name: str, batch_size: int | None = None
) -> Rates | None:
    """Take the rates of a configuration's full name in the newest bench on a hardware; None without one.

    With a `batch_size` only a bench of so many samples a step counts.
    """
    config, shapes = probes.config, probes.shape_shares()
    for path in find_newest(results / "throughput" / hardware, config.benchmark):
        figures = read_figures(path, BenchFigures)
        is_asked = figures.get("size") == config.size and batch_size in (None, batch_of(figures, name))
        if is_asked and (rates := rates_of_bench(figures, name, shapes, path.name, probes.rate)):
            return rates
    return None


def max_samples(config: RunConfig) -> int:
    """Return the number of samples of a run that does not stop at its target."""
    return config.plan().num_steps * config.global_batch_size


def stated_config(log: Log) -> dict[str, Any]:
    """Return the configuration that a log states; {} if it cannot be read, or lacks a key."""
    stated = yaml_file.parse_head(log.settings)
    try:
        StatedConfig.model_validate(stated, strict=True)
    except ValidationError:
        return {}
    return {"budget": 1.0} | (stated or {})  # older ones trained all of it


def agree(older: dict[str, Any], newer: dict[str, Any]) -> bool:
    """Return whether two configurations are one. Methods have to be the same ones."""
    if set(older.get("methods") or {}) != set(newer.get("methods") or {}):
        return False
    stated = flat(older)
    return all(stated.get(key, value) == value for key, value in flat(newer).items())


def pick(values: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}


def training_keys(config: dict[str, Any]) -> dict[str, Any]:
    recipe = pick(config, RECIPE)
    if isinstance(data := recipe.get("data"), dict):
        recipe["data"] = pick(data, data.keys() - OF_MACHINE)
    return recipe


def has_recipe(log: Log, config: dict[str, Any]) -> bool:
    stated, names = stated_config(log), ("benchmark", "configuration", "size")
    is_named_so = pick(stated, names) == pick(config, names)
    return is_named_so and agree(training_keys(stated), training_keys(config))


def measured_samples(logs: Sequence[Log], config: dict[str, Any]) -> Samples | None:
    """Return the samples to target of the runs of this recipe, on any system; None without one."""
    runs = [log for log in logs if not log.is_resumed and log.minutes and has_recipe(log, config)]
    reached = [point.samples for log in runs if (point := log.reached) and point.samples]
    if not reached:
        return None
    starts = [
        min(event.time_ms for event in blocks) - log.events("run_start")[0].time_ms
        for log in runs
        if (blocks := log.events("block_start"))
    ]
    return Samples(
        source=f"{len(reached)} measured runs",
        values=tuple(reached),
        startup_s=statistics.fmean(ms / 1e3 for ms in starts) if starts else 0.0,
        num_missed=len(runs) - len(reached),
    )


def published_samples(config: RunConfig) -> Samples | None:
    """Return the samples to target of the published runs of a configuration.

    None where there are none, as for another model, target, batch, optimizer or length.
    """
    published = find_published(config.benchmark, config.configuration)
    if published is None or config.size != "full":
        return None
    recipe = load_open(config.benchmark, config.configuration, size=config.size, settings=[]).config
    if any(getattr(config, name) != getattr(recipe, name) for name in PUBLISHED):
        return None
    runs, factor = published.score.runs, published.samples_factor
    startup = [run.split.startup * 60 for run in runs if run.split]
    more = f" times {factor:g}, an estimate: they stopped below the official target" if factor != 1 else ""
    return Samples(
        source=f"{published.title}{more}",
        values=tuple(factor * run.samples for run in runs if run.samples),
        startup_s=sum(startup) / len(startup) if startup else STARTUP_S,
        num_missed=sum(1 for run in runs if not run.samples),
    )


def choose_samples(
    config: RunConfig, results: Path, samples: int | None, settings: Sequence[str] = ()
) -> Samples:
    """Return the samples to the target: as given, measured, or published.

    Raises UserError without any, with the command of a run of these `settings`.
    """
    if samples is not None:
        return Samples(source="as given", values=(float(samples),))
    paths = find_logs(results) if results.is_dir() else []
    logs = [read_log(path) for path in paths if path.parent.name == mlperf_name(config.benchmark)]
    chosen = measured_samples(logs, config.model_dump(mode="json")) or published_samples(config)
    if chosen is None:
        run = f"ttt run {config.benchmark} {config.configuration} --size {config.size}"
        run += "".join(f" --set {shlex.quote(setting)}" for setting in settings)
        hint = f"make a run ({run}), or --samples N"
        raise UserError("nothing says how many samples the target takes", where=str(results), hint=hint)
    return chosen


def full_name(args: argparse.Namespace, config: RunConfig) -> str:
    changes = [setting for setting in args.set if not setting.startswith("submission.")]
    return "+".join([config.configuration, *changes])


def choose_rates(args: argparse.Namespace, probes: "Probes") -> Rates:
    """Return the rates of one device: as given, of figures, or measured now.

    Raises UserError where a hardware is named that has no figures.
    """
    for name in ("hardware", "measured", "bench"):
        if args.measure and getattr(args, name):
            raise UserError(f"--measure and --{name} exclude each other", hint="leave one of them out")
    config: RunConfig = probes.config
    name = full_name(args, config)
    if args.measured:
        _, per_s = parse_measured(args.measured[-1])
        return Rates(
            source=f"{args.measured[-1]}, as given",
            per_s=dict.fromkeys(probes.shape_shares(), per_s),
            noise=ASSUMED_NOISE,
            noise_source="assumed",
        )
    if args.bench:
        return read_bench(args.bench[-1], probes, name)[1]
    if not args.measure:
        hardware, values = args.hardware or system.hardware_name(), config.model_dump(mode="json")
        rates = newest_profile(args.results, hardware, values)
        if rates := rates or newest_bench(args.results, hardware, probes, name):
            return rates
    if args.hardware:
        hint = "run `ttt inspect profile` or `ttt bench` there, or --bench FILE, or --measured"
        where = f"{args.results}/*/{args.hardware}"
        raise UserError(f"no figures of {name} {config.size}", where=where, hint=hint)
    return measure_rates(args, config)


def measure_rates(args: argparse.Namespace, config: RunConfig) -> Rates:
    """Profile the configuration on one device of this machine; keep the figures as `ttt inspect profile`."""
    from common.measure.profiling.profile import profile

    console = line_console(stderr=args.json)
    load = partial(
        load_for_ranks,
        args.benchmark,
        args.configuration,
        size=args.size,
        settings=args.set,
        batch_size=None,
        num_ranks=1,
    )
    measured = profile(load, SINGLE_RANK, num_turns=NUM_TURNS, delay_ms=0.0, trace=None, console=console)
    path = keep(measured, args.results / "profile" / system.hardware_name(), args.benchmark)
    console.print(f"-> {path}")
    rates = rates_of_profile(measured, config.model_dump(mode="json"), "measured now")
    assert rates is not None, "a profile of this configuration is one of it"
    return rates
