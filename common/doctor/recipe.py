"""Checks of a benchmark on this machine: its data, its kernels, the minutes that a run will take."""

from pathlib import Path
from typing import Any

from common import repository
from common.config.schema import RunConfig
from common.data import manifest as fingerprint
from common.data import preparation
from common.errors import UserError
from common.evidence.compare.reported import load_reported
from common.evidence.disturbance import SPARE
from common.evidence.log import Log, read_log
from common.machine import system
from common.machine.line import OK, Line, fault, ok, warning
from common.machine.load import Load
from common.machine.record import judge_speed
from common.measure.device_run import NUM_DEVICES
from common.repository import ROOT, benchmark_module, build_probes
from common.run import launch
from common.study.predict.sources import find_newest, read_json


def check_data(config: RunConfig, results: Path) -> tuple[Line, dict[str, Any] | None]:
    """Compare the prepared data with their manifest and with those of earlier runs; returns the manifest.

    At size full only sizes are compared: reading everything takes longer than a person waits.
    """
    check, directory = f"data of {config.benchmark}", ROOT / config.data.directory  # type: ignore[attr-defined]
    if not (directory / fingerprint.MANIFEST).is_file():
        return warning(check, f"not prepared at size {config.size}", config.prepared_hint), None
    has_content = config.size == "mini"
    try:
        problems = preparation.verify(directory, config, hint="", has_content=has_content)
        manifest = fingerprint.read_manifest(directory, hint="")
    except UserError as error:
        return fault(check, repository.relative_paths_in(str(error)), config.prepared_hint), None
    if problems:
        first = repository.relative_paths_in(problems[0]) + (
            f" and {len(problems) - 1} more" * (len(problems) > 1)
        )
        return fault(check, first, config.prepared_hint, problems=len(problems)), None
    data = manifest["fingerprint"]
    earlier = {log.value("dataset_fingerprint") for log in logs(config, results, "*")} - {None}
    shown = f"{len(manifest['files'])} files intact{'' if has_content else ' by their sizes'}, {data[:12]}"
    if earlier and data not in earlier:
        advice = "times to target do not compare; another Python or suite prepared those"
        return warning(check, f"{shown}, not the data of earlier runs", advice, fingerprint=data), manifest
    return ok(check, shown, fingerprint=data), manifest


def logs(config: RunConfig, results: Path, configuration: str) -> list[Log]:
    """Return the logs of a benchmark and size, of a configuration or `*`, on any system."""
    name = benchmark_module(config.benchmark).Benchmark.names.mlperf
    pattern = f"*-mini-{configuration}" if config.size == "mini" else f"*-{configuration}"
    all_logs = [read_log(path) for path in sorted(results.glob(f"{pattern}/{name}/result_*.txt"))]
    return [log for log in all_logs if log.is_ours and log.is_proxy == (config.size == "mini")]


def check_kernels(config: RunConfig) -> list[Line]:
    """Compare each kernel that this machine can run with its plain form."""
    lines = []
    for pair in build_probes(config).kernel_pairs():
        check, error = f"kernel {pair.name}", pair.error()
        shown, values = f"{error:.1e} of the largest value, {pair.tolerance:g} allowed", {"error": error}
        if error <= pair.tolerance:
            lines.append(ok(check, f"differs from its plain form by {shown}", **values))
        else:  # also NaN
            advice = (
                "switch its method off with --set methods.NAME=false, and report it with the versions above"
            )
            lines.append(fault(check, f"differs from its plain form by {shown}", advice, **values))
    return lines


def check_minutes(
    config: RunConfig,
    results: Path,
    samples_per_s: float | None,
    num_devices: int,
    load: Load | None = None,
) -> Line:
    """Predict the time to the target: from runs of this system, else from speed and usual samples.

    `load` is that of the machine while the speed was measured.
    """
    check = f"time of {config.benchmark} {config.configuration}"
    name = benchmark_module(config.benchmark).Benchmark.names.mlperf
    if (seconds := launch.expected_seconds(results / system.system_id(config) / name)) is not None:
        line = ok(check, f"{seconds / 60:.2f} min, the median of this system's runs", minutes=seconds / 60)
        return line if samples_per_s is None else judged_now(line, samples_per_s, load)
    if config.size == "full":
        return benched(check, config, results, num_devices)
    if samples_per_s is None:
        return warning(check, "not predicted: its speed was not measured", config.prepared_hint)
    reached = [log.reached.samples for log in logs(config, results, config.configuration) if log.reached]
    needed = sorted(samples for samples in reached if samples)
    if not needed:
        return ok(check, "not predicted: no run of this configuration is known", samples_per_s=samples_per_s)
    low, middle, high = (
        needed[number] / samples_per_s / 60 for number in (0, len(needed) // 2, len(needed) - 1)
    )
    text = f"{middle:.2f} min ({low:.2f} to {high:.2f}) without evaluation, {samples_per_s:.0f} samples/s"
    line = ok(check, f"{text} and the samples of {len(needed)} runs", minutes=middle)
    return judged_now(line, samples_per_s, load)


def judged_now(line: Line, samples_per_s: float, load: Load | None) -> Line:
    line = judge_speed(line, line.check, samples_per_s)
    if line.state == OK and load is not None and load.taken > SPARE:
        meanwhile = (
            f"other programs used {load.taken:.1f} of {load.cores:g} cores meanwhile: end them, or wait"
        )
        return warning(line.check, line.found, meanwhile, **line.values)
    return line


def benched(check: str, config: RunConfig, results: Path, num_devices: int) -> Line:
    """Predict from what `ttt bench` measured on this hardware, and the samples of published runs."""
    folder = results / "throughput" / system.hardware_name()
    for path in find_newest(folder, config.benchmark):
        figures = read_json(path)
        projected = figures.get("projected", {}).get(config.configuration)
        if figures.get("size") == "full" and projected:
            minutes = projected["minutes"] * NUM_DEVICES / num_devices
            text = f"{minutes:.1f} min on {num_devices} device(s), {projected['assuming']}"
            return ok(check, text, minutes=minutes)
    name = benchmark_module(config.benchmark).Benchmark.names.mlperf
    published = load_reported()[name].of_configuration(config.configuration)
    note = f"; published: {published.score.minutes:.1f} min on {published.accelerators}" if published else ""
    advice = f"ttt bench {config.benchmark} {config.configuration} measures it"
    return warning(check, f"not predicted: no speed of this hardware is known{note}", advice)
