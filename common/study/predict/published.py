"""Published results of many machines, predicted from smaller ones of the same submitter."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.measure import scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A published set of more devices, predicted from the smaller sets (`measured_on`) of its submitter."""

    benchmark: str
    submitter: str
    round: str
    system: str
    devices: int
    batch: int
    measured_on: str
    predicted_per_s: float
    published_per_s: float
    published_minutes: float

    @property
    def ratio(self) -> float:
        return self.predicted_per_s / self.published_per_s


def check_published(root: Path) -> list[Check]:
    """Predict every larger set of `scaling` in <benchmark>/reported.yaml from the smallest of its family.

    The second set serves too where its batch per device is at most half of the first's: it shows the part of
    a step that is fixed.
    """
    checks: list[Check] = []
    for path in sorted(root.glob("*/reported.yaml")):
        facts = yaml.safe_load(path.read_text(encoding="utf-8"))
        for family in facts["scaling"]["families"]:
            checks += check_family(facts["benchmark"], facts["scaling"], family)
    return checks


def check_family(benchmark: str, facts: dict[str, Any], family: dict[str, Any]) -> list[Check]:
    """Predict the sets of one submitter."""
    inside, network = scaling.INSIDE[family["inside"]], scaling.choose_network(family["network"])
    links = scaling.Links(inside=inside, network=network)
    per_machine, entries = family["devices_per_node"], family["systems"]
    spread = {"deviation": facts["deviation"], "longest": facts["longest"]}
    work = scaling.Work(gradient_bytes=2 * facts["parameters"], sample_s=0, **spread)

    def measured_point(entry: dict[str, Any]) -> tuple[float, float]:
        devices, step_s = entry["nodes"] * per_machine, entry["global_batch_size"] / entry["samples_per_s"]
        exchange_s = scaling.exchange_s(work.gradient_bytes, links, entry["nodes"], per_machine)
        batch = entry["global_batch_size"] / devices
        busiest = batch * scaling.imbalance(work, batch, devices)
        return busiest, step_s - scaling.exposed_s(exchange_s, step_s, links)

    first, second = entries[:2]
    is_half = 2 * second["global_batch_size"] / second["nodes"] <= first["global_batch_size"]
    num_measured = 2 if len(entries) > 2 and is_half else 1
    measured = entries[:num_measured]
    floor_s = facts["parameters"] * scaling.OPTIMIZER_BYTES[facts["optimizer"]] / (family["memory"] * 1e9)
    work = scaling.fit_work(work, [measured_point(entry) for entry in measured], floor_s)
    checks = []
    for entry in entries[num_measured:]:
        batch, machines = entry["global_batch_size"], entry["nodes"]
        step = scaling.step(work, links, machines=machines, per_machine=per_machine, batch=batch)
        checks.append(
            Check(
                benchmark=benchmark,
                submitter=family["submitter"],
                round=family["round"],
                system=entry["system"],
                devices=step.devices,
                batch=batch,
                measured_on=" and ".join(str(entry["nodes"] * per_machine) for entry in measured),
                predicted_per_s=step.samples_per_s,
                published_per_s=entry["samples_per_s"],
                published_minutes=entry["minutes"],
            )
        )
    return checks


def factors(checks: Sequence[Check]) -> tuple[float, float]:
    """Return the geometric mean of the factors of error, and the largest."""
    errors = [abs(math.log(check.ratio)) for check in checks]
    return math.exp(sum(errors) / len(errors)), math.exp(max(errors))


def as_json(checks: Sequence[Check]) -> str:
    """Return the checks and their errors as JSON."""
    rows = [dataclasses.asdict(check) | {"ratio": check.ratio} for check in checks]
    typical, largest = factors(checks)
    return json.dumps({"checks": rows, "largest_factor": largest, "typical_factor": typical})


def describe(checks: Sequence[Check]) -> Iterator[str]:
    """Yield predicted against published throughput, and the errors, as lines."""
    yield (
        f"benchmark submitter round  {'system':29} devices  each  measured on   predicted   published  ratio"
    )
    for check in checks:
        yield (
            f"{check.benchmark:9} {check.submitter:9} {check.round:6} {check.system:30}{check.devices:7} "
            f"{check.batch // check.devices:5}  {check.measured_on:>11} {check.predicted_per_s:11,.0f} "
            f"{check.published_per_s:11,.0f} {check.ratio:6.2f}"
        )
    typical, largest = factors(checks)
    yield (
        f"samples/s; {len(checks)} sets; the factor is {typical:.2f} on average (geometric), {largest:.2f} "
        "at most; above 1: predicted too fast, as where shares are small and launches bound the steps"
    )
