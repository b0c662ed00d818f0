"""A model of a GPU: predict the time of a step from its launches, for devices on which nothing ran.

The formula is FORMULA. Its shares of the data sheets' rates are fitted, for each architecture, to throughput
that others published or that this suite measured (published_rates.yaml, `use: fit`), and checked with the
rest. Predictions are not measurements, and are labelled so wherever they are shown.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import scipy
import yaml

from common.errors import UserError
from common.evidence.intervals import error_factors
from common.measure import scaling
from common.measure.without_gpu.kernels import (
    ATTENTION,
    CONVOLUTION,
    LIBRARY,
    MATRIX,
    OPTIMIZER,
    OWN_ATTENTION,
    SCALED_PRODUCT,
)
from common.repository import COMMITTED, FIGURES

FORMULA = (
    "step = sum over library calls of max(bytes / bandwidth, FLOPs / rate) + other bytes / bandwidth",
    "       + launches x launch_us + exchange that the backward does not hide (as in `ttt estimate`)",
    "bandwidth = share x data sheet; rate = share of its kind x data sheet, for attention as given",
)
RATES = Path(__file__).with_name("published_rates.yaml")
START, PRIOR_WEIGHT = 0.6, 0.15  # a share that no row tells stays near START, by this weight in the fit


class Shares(NamedTuple):
    """Shares of the data sheet that an architecture reaches: `matrix` in 16 bits, `fp8` in 8."""

    bandwidth: float
    convolution: float
    matrix: float
    fp8: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted milliseconds of a step by class, and `samples_per_s` of one device."""

    device: str
    ms: Mapping[str, float]
    samples_per_s: float

    @property
    def step_ms(self) -> float:
        return sum(self.ms.values())

    @property
    def next_class(self) -> str:
        """The class with most time among those that no library computes."""
        return max((name for name in self.ms if name not in LIBRARY), key=lambda name: self.ms[name])


@cache
def load_rates() -> Mapping[str, Any]:
    published: Mapping[str, Any] = yaml.safe_load(RATES.read_text(encoding="utf-8"))
    return published


@cache
def load_counts(name: str) -> Mapping[str, Any]:
    """Return the figures of a compiled configuration that results/compiled/ holds. Raises UserError."""
    path = COMMITTED / FIGURES / name
    try:
        figures: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = "git restore it, or make it again: ttt inspect compile --help"
        raise UserError(
            "no figures of `ttt inspect compile`", where=str(path.relative_to(COMMITTED)), hint=hint
        ) from error
    return figures


def list_counts(architecture: str, pattern: str) -> Iterator[Mapping[str, Any]]:
    """Yield the figures in results/compiled/ whose files have such names, by name."""
    for path in sorted((COMMITTED / FIGURES / architecture).glob(pattern)):
        yield load_counts(f"{architecture}/{path.name}")


def predict(
    figures: Mapping[str, Any],
    shape: str,
    device: str,
    shares: Shares | None = None,
    row: Mapping[str, Any] = MappingProxyType({}),
    *,
    part: str = "training",
) -> Prediction:
    """Predict a training step of one shape, of figures of `ttt inspect compile`, on a device.

    With `part` "evaluation" it is the evaluation of as many samples. `shares` default to the fitted ones.
    `row` is that of a published rate: its devices, its batch, and what it does otherwise. Times are
    proportional to the batch, except those of the optimizer.
    """
    sheet, assumed = load_rates()["devices"][device], load_rates()["assumed"]
    counts, num_samples = figures[part][shape], figures["batch_size"]
    architecture = sheet["architecture"]
    shares = shares or fit_shares(architecture)
    per_s = sheet["bandwidth"] * 1e9 * shares.bandwidth
    in_8_bits = (sheet["fp8"] or 0.0) * shares.fp8 * 1e12
    flops_per_s = {
        CONVOLUTION: sheet["bf16"] * shares.convolution * 1e12,
        MATRIX: in_8_bits if row.get("matrix") == "fp8" else sheet["bf16"] * shares.matrix * 1e12,
        ATTENTION: assumed["attention"][architecture] * 1e12,
    }
    own_attention = assumed["own_attention"].get(architecture, assumed["attention"][architecture]) * 1e12
    flops_by_name = dict.fromkeys(OWN_ATTENTION, own_attention) | {SCALED_PRODUCT: in_8_bits}
    seconds = dict.fromkeys(counts["classes"], 0.0)
    for kind, name, count, gigabytes, teraflop in counts["library"]:
        rate = flops_by_name.get(name, flops_per_s[kind])
        seconds[kind] += max(gigabytes * 1e9 / per_s, teraflop * 1e12 / rate)
        seconds[kind] += count * assumed["launch_us"] * 1e-6
    for kind, sums in counts["classes"].items():
        if kind not in LIBRARY:
            factor = 1.0 if kind == OPTIMIZER else row.get("elementwise", 1.0)
            seconds[kind] += sums["gb"] * 1e9 * factor / per_s
            seconds[kind] += sums["launches"] * assumed["launch_us"] * 1e-6
    batch = row.get("batch", num_samples)
    ms = {k: s * 1e3 * (1.0 if k == OPTIMIZER else batch / num_samples) for k, s in seconds.items()}
    ms |= predict_waiting(row, sheet, sum(ms.values()))
    return Prediction(device=device, ms=ms, samples_per_s=batch / sum(ms.values()) * 1e3)


def predict_waiting(row: Mapping[str, Any], sheet: Mapping[str, Any], compute_ms: float) -> dict[str, float]:
    """Return the ms that a device waits for others: for the all-reduce, and for the rank with most work."""
    if row.get("devices", 1) == 1:
        return {}
    name, published = row["benchmark"], load_rates()
    links = scaling.Links(inside=scaling.INSIDE[sheet["inside"]], network=1.0)
    exchange = scaling.exchange_s(2 * published["parameters"][name], links, 1, row["devices"])
    waited_ms = {"exchange": scaling.exposed_s(exchange, compute_ms / 1e3, links) * 1e3}
    if row.get("imbalance"):
        spread = {key: published[key][name] for key in ("deviation", "longest")}
        work = scaling.Work(gradient_bytes=0, sample_s=0, **spread)
        waited_ms["imbalance"] = (scaling.imbalance(work, row["batch"], row["devices"]) - 1) * compute_ms
    return waited_ms


def predict_row(row: Mapping[str, Any], shares: Shares | None = None) -> float:
    return predict(load_counts(row["counts"]), row["shape"], row["device"], shares, row).samples_per_s


@cache
def fit_shares(architecture: str) -> Shares:
    """Fit the shares of an architecture to its rows, least squares of the errors' logarithms."""
    names = list_devices(architecture)
    rows = [row for row in load_rates()["rates"] if row["use"] == "fit" and row["device"] in names]

    def errors(logs: Sequence[float]) -> list[float]:
        shares = Shares(*map(math.exp, logs))
        logs_of_ratios = [math.log(predict_row(row, shares) / row["samples_per_s"]) for row in rows]
        return logs_of_ratios + [PRIOR_WEIGHT * (log - math.log(START)) for log in logs]

    start = [math.log(START)] * len(Shares._fields)
    fitted = scipy.optimize.least_squares(errors, start, bounds=(math.log(0.1), 0.0))
    return Shares(*map(math.exp, fitted.x))


def list_devices(architecture: str) -> list[str]:
    devices = load_rates()["devices"]
    return [name for name, sheet in devices.items() if sheet["architecture"] == architecture]


def list_architectures() -> list[str]:
    return sorted({sheet["architecture"] for sheet in load_rates()["devices"].values()})


def check_published() -> list[dict[str, Any]]:
    """Return every row of throughput with its prediction; `ratio` is predicted over measured."""
    rows = [row | {"predicted_per_s": predict_row(row)} for row in load_rates()["rates"]]
    return [row | {"ratio": row["predicted_per_s"] / row["samples_per_s"]} for row in rows]


def predict_devices(
    figures: Mapping[str, Any],
    shape: str,
    part: str = "training",
    row: Mapping[str, Any] = MappingProxyType({}),
) -> list[Prediction]:
    """Return the predictions for one device of each kind that has the architecture of the figures."""
    return [
        predict(figures, shape, name, row=row, part=part) for name in list_devices(figures["architecture"])
    ]


def predict_rate(
    hardware: str, benchmark: str, configuration: str, shape: str, batch: int, torch: str = ""
) -> float | None:
    """Return the predicted samples per second of one GPU of this hardware, such as 1xH100-80GB-HBM3.

    The counts are those with the version of `torch`, else with the newest. None where the hardware is of no
    known device, or no such configuration or shape was compiled.
    """
    if (device := find_device(hardware)) is None:
        return None
    architecture = load_rates()["devices"][device]["architecture"]
    kept = reversed([*list_counts(architecture, f"{benchmark}-*.json")])  # named by their torch
    for figures in sorted(kept, key=lambda row: release(row["versions"]["torch"]) != release(torch)):
        is_asked = (figures["configuration"], figures["size"]) == (configuration, "full")
        if is_asked and shape in figures["training"]:
            return predict(figures, shape, device, row={"batch": batch}).samples_per_s
    return None


def name_today(benchmark: str, configuration: str, commit: str) -> str:
    """Return today's name of a `configuration` of a commit, without its micro-batch: counts have none."""
    base, *settings = (word for word in configuration.split("+") if not word.startswith("micro_batch_size="))
    before = load_rates()["before"].get(benchmark, {}).get(base, {})
    settings += [setting for begin, setting in before.items() if commit.startswith(begin)]
    return "+".join((base, *settings))


def release(version: str) -> list[str]:
    """Return 2 and 11 of 2.11.0."""
    return version.split(".")[:2]


def find_device(hardware: str) -> str | None:
    """Return the name in published_rates.yaml, H100 for 8xH100-80GB-HBM3; None for others."""
    devices = load_rates()["devices"].items()
    return next((name for name, sheet in devices if sheet["name"] == hardware.partition("x")[2]), None)


def format_checks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield predicted against measured throughput, the errors, and what the model is made of."""
    title = f"{'':14}{'samples/s of one device':40} {'on':>8} {'each':>4}"
    yield f"{title} {'predicted':>10} {'measured':>10}  ratio"
    for row in rows:
        device = f"{row['devices']}x{row['device']}"
        title = f"{row['use']:6} {row['benchmark']:7}{row['name']:40} {device:>8} {row['batch']:4}"
        yield f"{title} {row['predicted_per_s']:10,.0f} {row['samples_per_s']:10,.0f} {row['ratio']:6.2f}"
    for use, words in (("fit", "fitted"), ("check", "held out")):
        chosen = [row for row in rows if row["use"] == use]
        largest = max(chosen, key=lambda row: abs(math.log(row["ratio"])))
        typical, most = error_factors(row["ratio"] for row in chosen)
        yield (
            f"{words}: {len(chosen)} rates, wrong by a factor of {typical:.2f} on "
            f"average, at most {most:.2f} ({largest['name']})"
        )
    for architecture in list_architectures():
        shares = fit_shares(architecture)._asdict().items()
        yield f"{architecture}, shares of the data sheet: " + ", ".join(f"{k} {v:.2f}" for k, v in shares)
    yield f"  what the fitted rates of an architecture do not tell, as 8 bits of sm_80, stays near {START}"
    yield from ("formula:", *(f"  {line}" for line in FORMULA), "assumed of others' code:")
    for row in rows:
        if "assumed" in row:
            yield f"  {row['benchmark']}, {row['name']}: {row['assumed']}"
