"""Predict published results of many machines from the same submitter's results of fewer machines."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.evidence.compare.reported import read_facts
from common.evidence.intervals import error_factors
from common.measure import scaling

Check = dict[str, Any]  # a published set of more devices, its throughput as predicted and as published


def check_published(root: Path) -> list[Check]:
    """Predict every larger set of `scaling` in <benchmark>/reported.yaml from the smallest of its family.

    The second set is used, too, if its batch per device is at most half of the first's: it shows the fixed
    part of a step.
    """
    files = sorted(root.glob("*/reported.yaml"))
    return [
        check
        for facts in map(read_facts, files)
        for family in facts["scaling"]["families"]
        for check in check_family(facts["benchmark"], facts["scaling"], family)
    ]


def check_family(benchmark: str, facts: dict[str, Any], family: dict[str, Any]) -> Iterator[Check]:
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
    fitted = scaling.fit_work(work, [measured_point(entry) for entry in measured], floor_s)
    for entry in entries[num_measured:]:
        batch, machines = entry["global_batch_size"], entry["nodes"]
        step = scaling.step(fitted, links, machines=machines, per_machine=per_machine, batch=batch)
        yield {
            "benchmark": benchmark,
            "submitter": family["submitter"],
            "round": family["round"],
            "system": entry["system"],
            "devices": step.devices,
            "batch": batch,
            "measured_on": " and ".join(str(entry["nodes"] * per_machine) for entry in measured),
            "predicted_per_s": step.samples_per_s,
            "published_per_s": entry["samples_per_s"],
            "published_minutes": entry["minutes"],
            "ratio": step.samples_per_s / entry["samples_per_s"],
        }


def as_json(checks: Sequence[Check]) -> str:
    typical, largest = error_factors(check["ratio"] for check in checks)
    return json.dumps({"checks": checks, "largest_factor": largest, "typical_factor": typical})


def describe(checks: Sequence[Check]) -> Iterator[str]:
    yield (
        f"benchmark submitter round  {'system':29} devices batch  measured on   predicted   published  ratio"
    )
    row = (
        "{benchmark:9} {submitter:9} {round:6} {system:30}{devices:7} {each:5}  {measured_on:>11} "
        "{predicted_per_s:11,.0f} {published_per_s:11,.0f} {ratio:6.2f}"
    )
    yield from (row.format(**check, each=check["batch"] // check["devices"]) for check in checks)
    typical, largest = error_factors(check["ratio"] for check in checks)
    yield (
        "batch: of one device; measured on: devices of the sets that the model took; predicted, published: "
        f"samples/s; {len(checks)} sets; the factor is {typical:.2f} on average (geometric), {largest:.2f} "
        "at most; above 1: predicted too fast, as where shares are small and launches bound the steps"
    )
