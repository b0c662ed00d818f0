"""The tables of common/measure/README.md: rates measured on a GPU, and predictions for other GPUs.

`python -m common.measure.without_gpu.table --write` makes them again from results/throughput/gpu_day and
results/compiled; a test compares.
"""

import itertools
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.evidence.intervals import error_factors
from common.evidence.page import fill_blocks, markdown_table
from common.files import save_text
from common.measure import scaling
from common.measure.without_gpu import gpu_model
from common.measure.without_gpu.gpu_model import Prediction
from common.measure.without_gpu.kernels import LIBRARY, OPTIMIZER
from common.repository import ROOT

PAGE = Path(__file__).parents[1] / "README.md"
MEASURED = ROOT / "results" / "throughput" / "gpu_day"
SHAPES = {"language_bert": "512 tokens", "image_classification": "176 px"}
TORCH = "torch2.15"
COUNTED = "sm_90"  # whose launches and bytes are shown
OPTIMIZER_FIGURES = {  # by optimizer: the beginning of their files' names, and a shape
    "adamw": ("language_bert-baseline", "512 tokens"),
    "lamb": ("language_bert-baseline-optimizer.name-lamb", "512 tokens"),
    "decoupled_sgd": ("image_classification-baseline", "224 px"),
    "lars": ("image_classification-baseline-optimizer.name-lars", "224 px"),
}

Saving = int | tuple[str, float]
FUSED_PX = 224  # of published runs that fuse batch norm (published_rates.yaml)
# By benchmark: MB at this size that an image no longer moves, or a share of a class of kernels.
FUSIONS: dict[str, dict[str, Saving]] = {
    "image_classification": {
        "batch norm's statistics in epilogues": 45,
        "and its application in prologues": 111,
    },
    # GELU would not read what its product has just made, nor its gradient: 3 passes over memory of 5
    "language_bert": {"GELU and its gradient in epilogues": ("activation", 3 / 5)},
}
NO_SAVING: Saving = ("activation", 0.0)
LEAST_SHARE = 0.02  # of the kernels of a traced step: smaller classes have no column
EVALUATED_EAGERLY = "compile_layers.evaluation=false"  # changes no step

Figures = Mapping[str, Any]  # of `ttt inspect compile`


def device_titles() -> list[str]:
    return [f"{device}, ms" for device in gpu_model.load_rates()["devices"]]


def describe_step(step: Prediction) -> str:
    return f"{step.step_ms:.1f} ({step.samples_per_s:,.0f}/s)"


def write_costs(subject: str, rows: Iterable[list[str]]) -> str:
    return markdown_table([subject, "launches", "GB", *device_titles()], rows)


def make_row(title: str, launches: str, gigabytes: float, times_ms: Mapping[str, str]) -> list[str]:
    """Make the cells of a row; `times_ms` are those of some devices."""
    times = (times_ms.get(device, "-") for device in gpu_model.load_rates()["devices"])
    return [title, launches, f"{gigabytes:.1f}", *times]


def write_switches() -> str:
    """Write a row for `optimized` of each benchmark, and for each of its settings that was switched off."""
    rows = []
    for benchmark, shape in SHAPES.items():
        kept = read(benchmark)
        gigabytes = {name: figures["training"][shape]["gb"] for name, figures in kept[COUNTED].items()}
        names = sorted(gigabytes, key=lambda name: ("+" in name, gigabytes[name]))
        names = [name for name in names if EVALUATED_EAGERLY not in name]
        rows += [describe_configuration(name, kept, "training") for name in names]
    return write_costs("a step of", rows)


def write_evaluations() -> str:
    """Write a row for an evaluation of BERT with compiled layers, and one without."""
    kept = read("language_bert")
    (eager,) = (name for name in kept[COUNTED] if EVALUATED_EAGERLY in name)
    names = eager.partition("+")[0], eager
    rows = [describe_configuration(name, kept, "evaluation") for name in names]
    return write_costs("an evaluation of", rows)


def read(benchmark: str) -> dict[str, dict[str, Figures]]:
    """Return the committed figures of `optimized` and its variants at size full, by architecture and name."""
    return {
        architecture: {
            figures["configuration"]: figures
            for figures in gpu_model.list_counts(architecture, f"{benchmark}-optimized*-{TORCH}.json")
            if figures["size"] == "full" and SHAPES[benchmark] in figures["training"]
        }
        for architecture in gpu_model.list_architectures()
    }


def describe_configuration(name: str, kept: Mapping[str, Mapping[str, Figures]], part: str) -> list[str]:
    """Return the row of a configuration, of all architectures that it is compiled for."""
    compiled = kept[COUNTED][name]
    shape = SHAPES[compiled["benchmark"]]
    times_ms = {
        prediction.device: describe_step(prediction)
        for by_name in kept.values()
        if name in by_name
        for prediction in gpu_model.predict_devices(by_name[name], shape, part)
    }
    base, _, switch = name.partition("+")
    title = f"{compiled['benchmark']} `{base}`"
    if switch.endswith("=false"):
        title = f"without `{switch.removesuffix('=false')}`"
    elif switch:
        title = f"with `{switch}`"
    counts = compiled[part][shape]
    return make_row(title, f"{counts['launches']:,.0f}", counts["gb"], times_ms)


def write_optimizers() -> str:
    """Write a row for each optimizer: launches and bytes of its step alone, and predicted times."""
    rows = []
    for name, (stem, shape) in OPTIMIZER_FIGURES.items():
        files = [f"{architecture}/{stem}-{TORCH}.json" for architecture in gpu_model.list_architectures()]
        times_ms = {
            prediction.device: f"{prediction.ms[OPTIMIZER]:.1f}"
            for file in files
            for prediction in gpu_model.predict_devices(gpu_model.load_counts(file), shape)
        }
        compiled = gpu_model.load_counts(f"{COUNTED}/{stem}-{TORCH}.json")
        counts = compiled["training"][shape]["classes"][OPTIMIZER]
        title = f"`{name}`, {compiled['benchmark']}"
        rows.append(make_row(title, str(counts["launches"]), counts["gb"], times_ms))
    return write_costs("the optimizer of a step", [*rows, describe_apex()])


def describe_apex() -> list[str]:
    """Describe `fused_lamb` in a row, by the bytes that the source of Apex's kernels reads and writes."""
    rates = gpu_model.load_rates()
    gigabytes = scaling.OPTIMIZER_BYTES["fused_lamb"] * rates["parameters"]["bert"] / 1e9
    times_ms = {}
    for device, sheet in rates["devices"].items():
        share = gpu_model.fit_shares(sheet["architecture"]).bandwidth
        times_ms[device] = f"{gigabytes / (sheet['bandwidth'] * share) * 1e3:.1f}"
    return make_row("`fused_lamb`, language_bert, from its source", "-", gigabytes, times_ms)


def write_measured() -> str:
    """Write a row for each rate that systems/gpu_day.sh measured, with the predicted one beside it.

    A ratio is to the first configuration of the same process, whose steps took turns with these.
    """
    titles = ["on", "configuration", "shape", "batch", "samples/s", "predicted", "to the first beside it"]
    fitted = {row["samples_per_s"] for row in gpu_model.load_rates()["rates"] if row["use"] == "fit"}
    return markdown_table(
        titles,
        (
            cells
            for row in read_rows()
            if "rates" in (row["figures"] or ())
            for cells in describe_rates(row, fitted)
        ),
    )


def read_rows() -> Iterator[Figures]:
    """Yield the committed rows of systems/gpu_day.sh, by hardware and stage."""
    for path in sorted(MEASURED.glob("*/*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


def describe_rates(row: Figures, fitted: Collection[float]) -> Iterator[list[str]]:
    """Yield the cells of each rate in a file of systems/gpu_day.sh; `fitted` are those that fit the model."""
    benchmark, rates = row["figures"]["benchmark"], row["figures"]["rates"]
    is_alone = len({rate["configuration"] for rate in rates}) == 1
    firsts = {rate["shape"]: rate["samples_per_s"] for rate in reversed(rates)}
    for rate in rates:
        shape, per_s = rate["shape"], rate["samples_per_s"]
        name = gpu_model.name_today(benchmark, rate["configuration"], row["commit"])
        part = re.search(r"micro.batch.size[= ](\d+)", f"{rate['configuration']} {row['command']}")
        parts = f" in parts of {part[1]}" if part else ""
        of = row["hardware"], benchmark, name, shape, rate["batch_size"]
        predicted_per_s = gpu_model.predict_rate(*of, row["versions"]["torch"])
        predicted = "-" if predicted_per_s is None else f"{predicted_per_s:,.0f}"
        yield [
            *(row["hardware"], f"{benchmark} `{name}`", shape, f"{rate['batch_size']}{parts}"),
            *(f"{per_s:,.0f}", f"{predicted}, fitted" if round(per_s, 1) in fitted else predicted),
            "-" if is_alone else f"{per_s / firsts[shape]:.2f}x",
        ]


def write_traced() -> str:
    """Write the milliseconds of a step by class of kernel, of each trace that systems/gpu_day.sh took."""
    steps = []
    for row in read_rows():
        if row["stage"] == "trace" and row["outcome"] == "ok":
            benchmark, name = row["command"].split()[3:5]
            (samples,) = re.findall(r"--batch-size (\d+)", row["command"])
            name = gpu_model.name_today(benchmark, name, row["commit"])
            for shape, step in row["figures"].items():
                steps.append((f"{benchmark} `{name}`, {samples}, {shape}", step["classes_ms"]))
    classes = {
        name: max(ms.get(name, 0.0) / sum(ms.values()) for _, ms in steps) for _, ms in steps for name in ms
    }
    columns = [name for name, share in classes.items() if share > LEAST_SHARE]
    titles = ["ms of kernels in a step of", *columns, "all kernels"]
    return markdown_table(
        titles,
        (
            [title, *(f"{ms.get(name, 0.0):.1f}" for name in columns), f"{sum(ms.values()):.1f}"]
            for title, ms in steps
        ),
    )


def write_model() -> str:
    """Write how many rates the model of a GPU is fitted to, and its errors."""
    rows = gpu_model.check_published()
    fitted, held_out = ([row["ratio"] for row in rows if row["use"] == use] for use in ("fit", "check"))
    (error, _), (held_out_error, most) = error_factors(fitted), error_factors(held_out)
    return (
        f"It is fitted to {len(fitted)} of {len(rows)} measured rates, and wrong by a factor of {error:.2f} "
        f"on these, of {held_out_error:.2f} on the {len(held_out)} held out, and of {most:.2f} at most. The "
        "rates of attention on Hopper come from traces of two configurations whose rates are held out: these "
        "rates are no independent check. Rates that a loader bounded are left out.\n"
    )


def write_fusions() -> str:
    """Write the possible gain of more fusion with convolutions and matmuls, if these stayed as fast."""
    rows = []
    for benchmark, fusions in FUSIONS.items():
        optimized = [by_name[min(by_name, key=len)] for by_name in read(benchmark).values()]  # no variant
        for title, saving in {f"{benchmark} `optimized`, as it is": NO_SAVING, **fusions}.items():
            steps = [predict_fused(figures, SHAPES[benchmark], saving) for figures in optimized]
            rows.append([title, *map(describe_step, itertools.chain.from_iterable(steps))])
    return markdown_table(["fused with convolutions or products", *device_titles()], rows)


def predict_fused(figures: Figures, shape: str, saving: Saving) -> list[Prediction]:
    """Predict a step whose kernels outside of libraries and optimizer move less by `saving`, see FUSIONS."""
    classes = figures["training"][shape]["classes"]
    others_gb = sum(sums["gb"] for name, sums in classes.items() if name not in (*LIBRARY, OPTIMIZER))
    if isinstance(saving, tuple):
        name, share = saving
        saved_gb = share * classes[name]["gb"]
    else:
        area = (int(shape.removesuffix(" px")) / FUSED_PX) ** 2
        saved_gb = saving / 1e3 * area * figures["batch_size"]
    return gpu_model.predict_devices(figures, shape, row={"elementwise": 1 - saved_gb / others_gb})


TABLES = {
    "measured": write_measured,
    "traced": write_traced,
    "model": write_model,
    "fusions": write_fusions,
    "switches": write_switches,
    "evaluations": write_evaluations,
    "optimizers": write_optimizers,
}


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    save_text(PAGE, fill_blocks(PAGE.read_text(encoding="utf-8"), TABLES))
