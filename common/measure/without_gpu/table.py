"""The tables of common/measure/README.md: what methods and optimizers cost on GPUs that are not here.

`python -m common.measure.without_gpu.table --write` makes them again from results/compiled; a test compares.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.evidence.page import fill_block
from common.files import save_text
from common.measure import scaling
from common.measure.without_gpu import gpu_model
from common.measure.without_gpu.kernels import OPTIMIZER

PAGE = Path(__file__).parents[1] / "README.md"
BLOCK, EVALUATIONS, OPTIMIZERS = "switches", "evaluations", "optimizers"
SHAPES = {"language_bert": "512 tokens", "image_classification": "176 px"}
TORCH = "torch2.15"
COUNTED = "sm_90"  # whose launches and bytes are shown
OPTIMIZER_FIGURES = {  # by optimizer: the beginning of their files' names, and a shape
    "adamw": ("language_bert-baseline", "512 tokens"),
    "lamb": ("language_bert-baseline-optimizer.name-lamb", "512 tokens"),
    "decoupled_sgd": ("image_classification-baseline", "224 px"),
    "lars": ("image_classification-baseline-optimizer.name-lars", "224 px"),
}

EVALUATED_EAGERLY = "compile_layers.evaluation=false"  # changes no step

Figures = Mapping[str, Any]  # of `ttt inspect compile`


def begin_table(subject: str) -> list[str]:
    """Write the titles of a table and the line below them."""
    titles = [subject, "launches", "GB", *(f"{device}, ms" for device in gpu_model.load_rates()["devices"])]
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def write_table() -> str:
    """Return a row for `optimized` of each benchmark, and for each of its settings that was switched off."""
    lines = begin_table("a step of")
    for benchmark in SHAPES:
        kept = read(benchmark)
        for name in sorted(kept[COUNTED], key=lambda name: ("+" in name, size(kept[COUNTED][name]))):
            if EVALUATED_EAGERLY not in name:
                lines.append(write_row(name, kept, "training"))
    return "\n".join(lines) + "\n"


def write_evaluations() -> str:
    """Write a row for an evaluation of BERT with compiled layers, and one without."""
    lines = begin_table("an evaluation of")
    kept = read("language_bert")
    for eager in (name for name in kept[COUNTED] if EVALUATED_EAGERLY in name):
        for name in (eager.partition("+")[0], eager):
            lines.append(write_row(name, kept, "evaluation"))
    return "\n".join(lines) + "\n"


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


def size(figures: Figures) -> float:
    """Return the bytes of a step in GB."""
    return float(figures["training"][SHAPES[figures["benchmark"]]]["gb"])


def write_row(name: str, kept: Mapping[str, Mapping[str, Figures]], part: str) -> str:
    """Return the row of a configuration, of all architectures that it is compiled for."""
    compiled = [by_name[name] for by_name in kept.values() if name in by_name]
    shape = SHAPES[compiled[0]["benchmark"]]
    predicted = {
        prediction.device: f"{prediction.step_ms:.1f} ({prediction.samples_per_s:,.0f}/s)"
        for figures in compiled
        for prediction in gpu_model.predict_devices(figures, shape, part)
    }
    (counts,) = (figures[part][shape] for figures in compiled if figures["architecture"] == COUNTED)
    base, _, switch = name.partition("+")
    title = f"{compiled[0]['benchmark']} `{base}`"
    if switch:
        title = (
            f"without `{switch.removesuffix('=false')}`" if switch.endswith("=false") else f"with `{switch}`"
        )
    cells = [title, f"{counts['launches']:,.0f}", f"{counts['gb']:.1f}"]
    cells += [predicted.get(device, "-") for device in gpu_model.load_rates()["devices"]]
    return f"| {' | '.join(cells)} |"


def write_optimizers() -> str:
    """Return a row for each optimizer: what a step of it alone launches and moves, and predicted times."""
    lines = begin_table("the optimizer of a step")
    for name, (stem, shape) in OPTIMIZER_FIGURES.items():
        compiled = {
            architecture: gpu_model.load_counts(f"{architecture}/{stem}-{TORCH}.json")
            for architecture in gpu_model.list_architectures()
        }
        predicted = {
            prediction.device: f"{prediction.ms[OPTIMIZER]:.1f}"
            for figures in compiled.values()
            for prediction in gpu_model.predict_devices(figures, shape)
        }
        counts = compiled[COUNTED]["training"][shape]["classes"][OPTIMIZER]
        cells = [
            f"`{name}`, {compiled[COUNTED]['benchmark']}",
            str(counts["launches"]),
            f"{counts['gb']:.1f}",
        ]
        lines.append(
            f"| {' | '.join(cells + [predicted[device] for device in gpu_model.load_rates()['devices']])} |"
        )
    return "\n".join([*lines, write_apex()]) + "\n"


def write_apex() -> str:
    """Write the row of `fused_lamb`, by the bytes that the source of Apex's kernels reads and writes."""
    rates = gpu_model.load_rates()
    gigabytes = scaling.OPTIMIZER_BYTES["fused_lamb"] * rates["parameters"]["bert"] / 1e9
    cells = ["`fused_lamb`, language_bert, from its source", "-", f"{gigabytes:.1f}"]
    for sheet in rates["devices"].values():
        shares = gpu_model.fit_shares(sheet["architecture"])
        cells.append(f"{gigabytes / (sheet['bandwidth'] * shares.bandwidth) * 1e3:.1f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    page = PAGE.read_text(encoding="utf-8")
    blocks = (BLOCK, write_table()), (EVALUATIONS, write_evaluations()), (OPTIMIZERS, write_optimizers())
    for block, lines in blocks:
        page = fill_block(page, block, lines)
    save_text(PAGE, page)
