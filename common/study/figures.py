"""Rates from figures that `ttt profile` and `ttt bench` kept."""

import json
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.study.estimate import ASSUMED_NOISE, FREE, Rates, agree, picked


def newest(directory: Path, benchmark: str) -> list[Path]:
    """Return the figures of a benchmark, the last number first."""
    numbers = {
        path: path.stem.removeprefix(f"{benchmark}_") for path in directory.glob(f"{benchmark}_*.json")
    }
    found = [path for path, number in numbers.items() if number.isdecimal()]
    return sorted(found, key=lambda path: -int(numbers[path]))


def read_json(path: Path) -> dict[str, Any]:
    """Read figures. Raises UserError for what is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"no figures ({error})", where=str(path)) from error
    if not isinstance(found, dict):
        raise UserError("no figures", where=str(path))
    return found


def of_profile(figures: dict[str, Any], values: dict[str, Any], name: str) -> Rates | None:
    """Return the rates of the loop on one device; None of another configuration or of several devices."""
    if not {"config", "num_ranks", "delay_data_ms", "phases", "evaluation_s"} <= figures.keys():
        return None
    keys = values.keys() - FREE - {"global_batch_size"}  # a device has its part of it
    there, here = picked(figures["config"], keys), picked(values, keys)
    if not agree(there, here) or figures["num_ranks"] > 1 or figures["delay_data_ms"]:
        return None
    phases = figures["phases"]
    total = sum(each["share"] * each["step_ms"] for each in phases)
    per_s = {each["shape"]: each["batch"] / each["step_ms"] * 1e3 for each in phases}
    first = phases[0]
    once = first["first_pass_per_s"] or per_s[first["shape"]]
    return Rates(
        source=f"the loop with its loader, profile {name}",
        per_s=per_s,
        noise=sum(each["share"] * each["step_ms"] * each["deviation"] for each in phases) / total,
        noise_source="of turns of steps",
        num_turns=min((each["num_turns"] for each in phases if each.get("num_turns")), default=None),
        evaluation_s=tuple(figures["evaluation_s"]),
        first_pass_s=max(0.0, 1 / once - 1 / per_s[first["shape"]]) * values["data"]["num_train_samples"],
    )


def of_bench(figures: dict[str, Any], name: str, shapes: set[str], source: str) -> Rates | None:
    """Return the rates of steps without a loader; None where a shape of this configuration is missing."""
    rates = [
        each for each in figures.get("rates", []) if each["configuration"] == name and each["shape"] in shapes
    ]
    if {each["shape"] for each in rates} != shapes:
        return None
    stated = [(each["deviation"], each.get("num_turns")) for each in rates if "deviation" in each]
    noise, num_turns = max(stated, key=lambda each: each[0], default=(ASSUMED_NOISE, None))
    return Rates(
        source=f"steps alone, bench {source}: as if the loader keeps up",
        per_s={each["shape"]: each["samples_per_s"] for each in rates},
        noise=noise,
        noise_source="of turns of steps" if stated else "assumed: the file states none",
        num_turns=num_turns,
    )
