"""The verdicts of `ttt accept`: the measured rate, the expected one with its source, and advice."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.schema import RunConfig
from common.doctor.devices import NO_ANSWER
from common.evidence.compare.reported import find_published
from common.evidence.disturbance import SPARE
from common.evidence.intervals import error_factors
from common.evidence.records import counted
from common.machine import gpus, hardware, record, system
from common.machine.line import FAULT, OK, WARNING, Line, warning
from common.measure.without_gpu import gpu_model
from common.repository import build_probes, digest_text
from common.study.predict.sources import newest_bench

MOSAIC = "mosaic"  # the recipe of the published sets that are named methods
NOT_RECIPE: dict[str, Any] = {"submission": True, "data": {"directory"}}
PASS, BELOW, UNKNOWN, FAILED = "pass", "below", "no expectation", "failed"
REFUSED = (BELOW, FAILED)  # with one of them a machine is not accepted
DOCTOR = "doctor"  # whose verdict compares no rate
# Checks whose names begin so can explain a slow machine.
OF_SPEED = (
    *("processors", "speed of a core", "GPU", "Xid", "clocks"),
    *("matrix product", "device copy", "all-reduce"),
)
LONGER = "the archive has what it printed; --minutes gives it longer"
AGAIN = "the next `ttt accept` on this machine compares with this rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Samples/s of all ranks together; `error` is the factor by which such a figure is usually wrong."""

    samples_per_s: float
    source: str
    error: float = 1.0

    @property
    def demand(self) -> float:
        """The samples/s that a machine has to reach: the expected ones, divided by the usual error."""
        return self.samples_per_s / self.error


def expect_rate(config: RunConfig, num_ranks: int, results: Path) -> Expectation | None:
    """Return the expectation for such hardware, or this machine's record where that demands more.

    A slow machine's record does not excuse it. `config` has the batch of all ranks.
    """
    of_hardware = from_bench(config, num_ranks, results) or from_such_gpus(config, num_ranks)
    best = record.best_speed(name_speed(config, num_ranks))
    recorded = Expectation(samples_per_s=best, source="this machine's best so far") if best else None
    return find_highest(of_hardware, recorded)


def find_highest(*expectations: Expectation | None) -> Expectation | None:
    """Find the expectation that demands most of a machine; None where none is known."""
    known = filter(None, expectations)
    return max(known, key=lambda expectation: expectation.demand, default=None)


def name_speed(config: RunConfig, num_ranks: int) -> str:
    """Name the entry of a rate in this machine's record: each batch and recipe has its own."""
    recipe = config.model_dump_json(exclude=NOT_RECIPE)
    name = f"{config.benchmark} {config.configuration} {config.size} {digest_text(recipe)}"
    return f"steps of {name}, {num_ranks} rank(s)"


def from_bench(config: RunConfig, num_ranks: int, results: Path) -> Expectation | None:
    """Take the newest `ttt bench` of the same batch on such a device; None for several ranks on a CPU."""
    if num_ranks > 1 and not hardware.count_gpus():
        return None
    probes, batch_size = build_probes(config), config.global_batch_size // num_ranks
    rates = newest_bench(results, system.hardware_name(), probes, config.configuration, batch_size)
    if rates is None:
        return None
    source = f"{num_ranks} x one device, {rates.source.partition(':')[0]}"
    return Expectation(samples_per_s=num_ranks / rates.sample_s(probes.shape_shares()), source=source)


def from_such_gpus(config: RunConfig, num_ranks: int) -> Expectation | None:
    """Take the published rate for a published recipe; else it or a prediction, whichever demands more."""
    published = from_published(config, num_ranks)
    if published is not None and is_published_recipe(config):
        return published
    return find_highest(published, from_model(config, num_ranks))


def is_published_recipe(config: RunConfig) -> bool:
    published = find_published(config.benchmark, config.configuration)
    return published is not None and config.configuration in (published.score.configuration, MOSAIC)


def from_published(config: RunConfig, num_ranks: int) -> Expectation | None:
    """Take the rate of published runs on the same GPUs, without evaluation, for as many as there are."""
    published = find_published(config.benchmark, config.configuration)
    if published is None or config.size != "full":
        return None
    name = system.hardware_name()
    count, model, *memory = published.accelerators.split()  # 8x A100 80 GB
    if gpu_model.find_device(name) != model or "".join(memory) not in name:
        return None
    rates = [run.samples_per_s for run in published.score.runs if run.samples_per_s]
    per_gpu = statistics.median(rates) / int(count.removesuffix("x"))
    recipe = "" if is_published_recipe(config) else ", of another recipe"
    source = f"published, {published.title}, per GPU, which includes a loader{recipe}"
    return Expectation(samples_per_s=num_ranks * per_gpu, source=source)


def from_model(config: RunConfig, num_ranks: int) -> Expectation | None:
    """Predict the rate of GPUs from the launches that `ttt inspect compile` counted; nothing was measured."""
    if config.size != "full":
        return None
    name, batch_size = system.hardware_name(), config.global_batch_size // num_ranks
    of = name, config.benchmark, config.configuration
    sample_s = 0.0
    for shape, share in build_probes(config).shape_shares().items():
        per_s = gpu_model.predict_rate(*of, shape, batch_size)
        if per_s is None:
            return None
        sample_s += share / per_s
    held_out = [row["ratio"] for row in gpu_model.check_published() if row["use"] == "check"]
    error, _ = error_factors(held_out)
    source = f"predicted by the model of a GPU, wrong by a factor of {error:.2f} on average, not measured"
    return Expectation(samples_per_s=num_ranks / sample_s, source=source, error=error)


def judge_checks(checks: Sequence[Line], trouble: str | None) -> Line:
    """Judge the doctor's lines; `trouble` is why some checks are missing, None where none is."""
    faults, warnings = ([line for line in checks if line.state == state] for state in (FAULT, WARNING))
    text = f"{counted(len(faults), 'fault')}, {counted(len(warnings), 'warning')} in {len(checks)} checks"
    state, advice = FAILED, LONGER
    if trouble is not None:
        text += f", then {trouble}"
    elif faults:
        text, advice = f"{text}: {faults[0].check}: {faults[0].found}", faults[0].advice
    else:
        state, advice = PASS, ""
        text += f": {', '.join(line.check for line in warnings)}" if warnings else ""
    numbers = {"faults": len(faults), "warnings": len(warnings), "checks": len(checks)}
    return Line(check=DOCTOR, state=state, found=text, advice=advice, values=numbers)


def find_causes(checks: Sequence[Line], figures: Mapping[str, Any]) -> list[Line]:
    """Return the likely causes of a low rate: those seen during the steps, faults, then warnings."""
    causes = list[Line]()
    if is_disturbed(figures):
        text = f"other programs used {figures['taken_cores']:.1f} of {figures['cores']:g} cores meanwhile"
        causes.append(warning("processors", text, "end them, or wait"))
    for rank, state in enumerate(figures.get("gpus", ())):
        causes += gpus.find_slow_downs(f"GPU of rank {rank}", state.get("reasons", 0))
    ill = [line for line in checks if line.state != OK and line.check.startswith(OF_SPEED)]
    return causes + sorted(ill, key=lambda line: line.state != FAULT)


def is_disturbed(figures: Mapping[str, Any]) -> bool:
    """Return True if other programs took cores while a rate was measured."""
    return bool(figures.get("taken_cores", 0.0) > SPARE)


def judge_failure(name: str, trouble: str, causes: Sequence[Line]) -> Line:
    if not trouble.startswith(NO_ANSWER):
        causes = [cause for cause in causes if cause.state == FAULT]  # a warning slows, but ends no process
    advice = f"likely cause: {causes[0]}; {LONGER}" if causes else LONGER
    return Line(check=name, state=FAILED, found=f"not measured: {trouble}", advice=advice)


def judge_rate(
    name: str, figures: Mapping[str, Any], expected: Expectation | None, share: float, causes: Sequence[Line]
) -> Line:
    """Compare the rate of a configuration, `name`, with the least share of the expected one.

    A prediction may be wrong by its usual error before a machine is called slow.
    """
    per_s, unit = figures["samples_per_s"], f"{figures['samples']}/s"
    text = f"{per_s:,.1f} {unit}"
    values: dict[str, Any] = {"samples_per_s": per_s}
    if expected is None:
        note = f"{text}; no record, published rate or prediction of this hardware"
        advice = f"this rate is not kept: {causes[0]}" if is_disturbed(figures) else AGAIN
        return Line(check=name, state=UNKNOWN, found=note, advice=advice, values=values)
    part, least = per_s / expected.samples_per_s, share / expected.error
    values |= {
        "expected_per_s": expected.samples_per_s,
        "source": expected.source,
        "share": part,
        "least_share": least,
        "causes": [str(cause) for cause in causes],
    }
    text += f", {part:.0%} of {expected.samples_per_s:,.1f} ({expected.source}); {least:.0%} is enough"
    if part >= least:
        return Line(check=name, state=PASS, found=text, values=values)
    command = f"ttt inspect profile {name} --size {figures['size']}"
    advice = f"no cause was seen: compare with another machine; {command} says where a step goes"
    advice = f"likely cause: {causes[0]}" if causes else advice
    return Line(check=name, state=BELOW, found=text, advice=advice, values=values)
