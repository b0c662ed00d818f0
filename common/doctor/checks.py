"""The checks of `ttt doctor`, the cheap ones first.

The checks of a benchmark are about its data, its kernels, its first steps and the minutes of a run.

`ttt accept` runs them in a process of their own: `python -m common.doctor.checks OUTPUT RESULTS SIZE
NUM_RANKS EXTENT BENCHMARK...` writes a line of JSON for each check when its answer is known. NUM_RANKS 0: one
for each GPU. EXTENT: `quick`, or `whole`.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveFloat

from common.config.schema import RunConfig
from common.data import preparation
from common.data.manifest import MANIFEST, read_manifest
from common.doctor import devices, first_steps
from common.errors import UserError, list_some
from common.evidence.compare.reported import find_published
from common.evidence.disturbance import SPARE
from common.evidence.log import Log, read_log
from common.evidence.records import counted
from common.machine import gpus, host, system
from common.machine.hardware import count_gpus
from common.machine.line import OK, Line, fault, judge, ok, warning
from common.machine.load import Load, Meter, read_alone
from common.machine.preflight import cheap_checks, num_shards
from common.machine.record import judge_speed
from common.measure.device_run import NUM_DEVICES
from common.measure.figures import read_figures
from common.repository import build_probes, mlperf_name, relative_paths_in
from common.run import launch
from common.study.predict.minutes import ASSUMED_NOISE, Rates, Samples, estimate_run
from common.study.predict.sources import find_newest
from common.training.load import load_config

PROCESSES_ON_CPU = 2  # the fewest that can exchange messages


class Projection(BaseModel):
    minutes: PositiveFloat
    assuming: str


class ProjectedBench(BaseModel):
    """The part of a file of `ttt bench` that predicts a run; older files have no projection."""

    size: str
    projected: dict[str, Projection] = {}


def load_configs(
    benchmarks: Iterable[str], size: str, settings: Sequence[str] = ()
) -> dict[str, dict[str, RunConfig]]:
    """Return the configurations of each benchmark that have a band, by their names."""
    return {
        benchmark: {
            name: load_config(benchmark, name, size=size, settings=[*settings]).config
            for name in first_steps.read_bands(benchmark)
        }
        for benchmark in benchmarks
    }


def check_machine(
    configs: dict[str, dict[str, RunConfig]],
    results: Path,
    *,
    size: str,
    num_ranks: int | None = None,
    is_quick: bool = False,
) -> Iterator[Line]:
    """Yield the line of every check; `configs` are the configurations of each benchmark, by name.

    `num_ranks` None: one for each GPU, two without one. With `is_quick` no process is started and nothing is
    trained.
    """
    most_shards = max(num_shards(config) for named in configs.values() for config in named.values())
    yield from cheap_checks(size, results, most_shards)
    if is_quick:
        return
    num_gpus = count_gpus()
    if num_gpus:
        yield gpus.kernel_xids()
    with gpus.watch_xids() as xid_lines:
        num_ranks = num_ranks or num_gpus or PROCESSES_ON_CPU
        yield from answer("devices", partial(devices.check_devices, num_ranks))
        for named in configs.values():
            yield from check_benchmark(list(named.values()), results, num_gpus or 1)
    yield from xid_lines


def check_benchmark(configs: list[RunConfig], results: Path, num_devices: int) -> Iterator[Line]:
    """Yield the lines about one benchmark, whose `configs` read the same data."""
    config = configs[0]
    benchmark = config.benchmark
    line, manifest = check_data(config, results)
    yield line
    if manifest is not None:
        yield host.read_rate(benchmark, config.data_directory, manifest)
    yield from answer(f"kernels of {benchmark}", partial(check_kernels, config))
    if config.size != "mini":
        advice = f"to compare at size mini: ttt doctor --benchmarks {benchmark} --size mini"
        yield warning(f"first steps of {benchmark}", f"no band is known at size {config.size}", advice)
    for config in configs:
        samples_per_s, meter = None, Meter()
        if config.size == "mini" and manifest is not None:
            check = f"first steps of {benchmark} {config.configuration}"
            for line in answer(check, partial(first_steps.check, check, config)):
                samples_per_s = line.values.get("samples_per_s")
                yield line
        yield check_minutes(config, results, samples_per_s, num_devices, read_alone(meter))


def answer(check: str, function: Callable[[], Iterable[Line]]) -> Iterable[Line]:
    """Return the lines of a check, or a fault with the error that ended it."""
    try:
        return function()
    except (UserError, OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
        first = (str(error).strip().splitlines() or [""])[0]
        advice = "`ttt run` would end the same way"
        return [fault(check, f"{type(error).__name__}: {first}".removeprefix("UserError: "), advice)]


def check_data(config: RunConfig, results: Path) -> tuple[Line, dict[str, Any] | None]:
    """Compare the prepared data with their manifest and with those of earlier runs; returns the manifest.

    At size full only sizes are compared: reading everything takes longer than a person waits.
    """
    check, directory = f"data of {config.benchmark}", config.data_directory
    if not (directory / MANIFEST).is_file():
        return warning(check, f"not prepared at size {config.size}", config.prepared_hint), None
    has_content = config.size == "mini"
    try:
        problems = preparation.verify(directory, config, hint="", has_content=has_content)
        manifest = read_manifest(directory, hint="")
    except UserError as error:
        problems = [str(error)]
    if problems:
        text = relative_paths_in(list_some(problems))
        return fault(check, text, config.prepared_hint, problems=len(problems)), None
    data = manifest["fingerprint"]
    earlier = {log.value("dataset_fingerprint") for log in logs(config, results, "*")} - {None}
    is_other = bool(earlier) and data not in earlier
    text = f"{len(manifest['files'])} files intact{'' if has_content else ' by their sizes'}, {data[:12]}"
    text += ", not the data of earlier runs" * is_other
    advice = "times to target do not compare; another Python or suite prepared those"
    return judge(check, text, advice, is_warning=is_other, fingerprint=data), manifest


def logs(config: RunConfig, results: Path, configuration: str) -> list[Log]:
    """Return the logs of a benchmark and size, of a configuration or `*`, on any system."""
    pattern = f"*-mini-{configuration}" if config.size == "mini" else f"*-{configuration}"
    paths = sorted(results.glob(f"{pattern}/{mlperf_name(config.benchmark)}/result_*.txt"))
    return [log for log in map(read_log, paths) if log.is_ours and log.is_proxy == (config.size == "mini")]


def check_kernels(config: RunConfig) -> list[Line]:
    """Compare each kernel that this machine can run with its plain form."""
    lines = []
    for pair in build_probes(config).kernel_pairs():
        error = pair.error()
        text = f"differs from its plain form by {error:.1e} of the largest value, {pair.tolerance:g} allowed"
        advice = "switch its method off with --set methods.NAME=false, and report it with the versions above"
        is_wrong = not error <= pair.tolerance  # also NaN
        lines.append(judge(f"kernel {pair.name}", text, advice, is_fault=is_wrong, error=error))
    return lines


def check_minutes(
    config: RunConfig,
    results: Path,
    samples_per_s: float | None,
    num_devices: int,
    load: Load | None = None,
) -> Line:
    """Predict the time to the target: from runs of this system, else from speed and usual samples.

    `samples_per_s` is the speed of the first steps; that of later shapes is scaled by their FLOPs. `load` is
    the load of the machine while the speed was measured.
    """
    check = f"time of {config.benchmark} {config.configuration}"
    seconds = launch.expected_seconds(results / system.system_id(config) / mlperf_name(config.benchmark))
    if seconds is not None:
        line = ok(check, f"{seconds / 60:.2f} min, the median of this system's runs", minutes=seconds / 60)
        return line if samples_per_s is None else judge_minutes(line, samples_per_s, load)
    if config.size == "full":
        return predict_from_bench(check, config, results, num_devices)
    if samples_per_s is None:
        return warning(check, "not predicted: its speed was not measured", config.prepared_hint)
    reached = [log.reached.samples for log in logs(config, results, config.configuration) if log.reached]
    needed = tuple(samples for samples in reached if samples)
    if not needed:
        return ok(check, "not predicted: no run of this configuration is known", samples_per_s=samples_per_s)
    probes = build_probes(config)
    phases, flops = probes.phases(), cache(lambda shape: probes.work(shape).flops)
    per_s = {shape: samples_per_s * flops(phases[0][0]) / flops(shape) for shape, _ in phases}
    rates = Rates(source="", per_s=per_s, noise=ASSUMED_NOISE, noise_source="assumed")
    samples = Samples(source=f"{len(needed)} runs", values=needed, startup_s=0.0)
    estimated = estimate_run(config, phases, rates=rates, samples=samples)
    minutes, low, high = (estimated[key] for key in ("minutes", "low", "high"))
    text = f"{minutes:.2f} min ({low:.2f} to {high:.2f}), {samples_per_s:.0f} samples/s and the samples"
    line = ok(check, f"{text} of {samples.source}", minutes=minutes)
    return judge_minutes(line, samples_per_s, load)


def judge_minutes(line: Line, samples_per_s: float, load: Load | None) -> Line:
    line = judge_speed(line, line.check, samples_per_s)
    if line.state != OK or load is None or load.taken <= SPARE:
        return line
    advice = f"other programs used {load.taken:.1f} of {load.cores:g} cores meanwhile: end them, or wait"
    return warning(line.check, line.found, advice, **line.values)


def predict_from_bench(check: str, config: RunConfig, results: Path, num_devices: int) -> Line:
    """Predict from the figures of `ttt bench` on this hardware, and the samples of published runs."""
    folder = results / "throughput" / system.hardware_name()
    for path in find_newest(folder, config.benchmark):
        figures = read_figures(path, ProjectedBench)
        projected = figures.get("projected", {}).get(config.configuration)
        if figures["size"] == "full" and projected:
            minutes = projected["minutes"] * NUM_DEVICES / num_devices
            text = f"{minutes:.1f} min on {counted(num_devices, 'device')}, {projected['assuming']}"
            return ok(check, text, minutes=minutes)
    published = find_published(config.benchmark, config.configuration)
    note = f"; published: {published.score.minutes:.1f} min on {published.accelerators}" if published else ""
    advice = f"ttt bench {config.benchmark} {config.configuration} measures it"
    return warning(check, f"not predicted: no speed of this hardware is known{note}", advice)


def main() -> None:
    output, results, size, num_ranks, extent, *benchmarks = sys.argv[1:]
    options: dict[str, Any] = {
        "size": size,
        "num_ranks": int(num_ranks) or None,
        "is_quick": extent == "quick",
    }
    lines = check_machine(load_configs(benchmarks, size), Path(results), **options)
    with Path(output).open("w") as stream:
        for line in lines:
            print(json.dumps(asdict(line)), file=stream, flush=True)
            print(f"{line.state:8} {line}", flush=True)


if __name__ == "__main__":
    main()
