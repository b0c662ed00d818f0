"""What `ttt compile` finds of a configuration, as it is kept and printed."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from common import atomic, system
from common.config import RunConfig
from common.errors import UserError
from common.launch import commit
from common.measure import gpu_model
from common.measure.compile_for import Compiled, Compiler, graph_breaks
from common.measure.kernels import GIGA, LIBRARY, NAMES, TERA, Kernel, Tally

COUNTED = (
    "operators of the traced step, each reading its inputs and writing its outputs once",
    "kernels of the code that Inductor generates; what it does not compile, by operators of the traced step",
)
NUM_LARGEST = 12


def describe(
    name: str, config: RunConfig, architecture: str, compiler: Compiler, shapes: Sequence[Compiled]
) -> dict[str, Any]:
    """Return all figures of a configuration, as they are kept."""
    kernels = [each for each in compiler.kernels if each.kind != "own"]
    spilling = [kernel_facts(each) for each in compiler.kernels if each.spilled_bytes]
    return {
        "benchmark": config.benchmark,
        "configuration": name,
        "size": config.size,
        "architecture": architecture,
        "batch_size": shapes[0].num_samples,
        "precision": config.precision,
        "commit": commit(),
        "versions": system.versions() | {"triton": metadata.version("triton")},
        "counted": COUNTED[bool(kernels)],
        "graph_breaks": graph_breaks(),
        "recompiles": compiler.num_recompiles,
        "kernels": len(kernels),
        "most_registers": max((each.registers for each in compiler.kernels), default=0),
        "spilling": spilling,
        "own_kernels": [kernel_facts(each) for each in compiler.kernels if each.kind == "own"],
        "shapes": {
            each.shape: {
                "graphs": each.num_graphs,
                "training": describe_tally(each.training),
                "evaluation": describe_tally(each.evaluation),
            }
            for each in shapes
        },
    }


def kernel_facts(kernel: Kernel) -> dict[str, Any]:
    """Return what a cubin needs of a processor."""
    return {"name": kernel.name, "registers": kernel.registers, "spilled_bytes": kernel.spilled_bytes}


def describe_tally(tally: Tally) -> dict[str, Any]:
    """Return the sums of classes, the library's calls one by one, and the kernels that move most."""
    classes = tally.by_class()
    return {
        "launches": sum(row["launches"] for row in classes.values()),
        "gb": round(sum(row["gb"] for row in classes.values()), 3),
        "tflop": round(sum(row["tflop"] for row in classes.values()), 4),
        "classes": classes,
        "largest": tally.largest(NUM_LARGEST),
        "library": [
            [each.kind, each.name, each.count, round(each.num_bytes / GIGA, 5), round(each.flops / TERA, 6)]
            for each in tally.of(LIBRARY)
        ],
    }


def keep(figures: Mapping[str, Any], directory: Path) -> Path:
    """Write the figures in the place of earlier ones of the same configuration and torch.

    Raises UserError where nothing can be written.
    """
    path = result_path(directory, figures["architecture"], figures["benchmark"], figures["configuration"])
    try:
        atomic.write_text(path, json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write figures here ({error.strerror})", where=str(directory)) from error
    return path


def result_path(directory: Path, architecture: str, benchmark: str, name: str) -> Path:
    """Return where figures of this torch lie; `name` may carry settings, optimized+methods.blurpool=false."""
    version = ".".join(metadata.version("torch").split(".")[:2])
    safe = re.sub(r"[^A-Za-z0-9._]+", "-", name)
    return directory / "compiled" / architecture / f"{benchmark}-{safe}-torch{version}.json"


def prediction_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the predicted time of each shape of training on each device of the architecture."""
    for shape in figures["shapes"]:
        for each in gpu_model.predict_devices(figures, shape):
            parts = sorted(each.ms.items(), key=lambda part: -part[1])
            shares = ", ".join(
                f"{name} {ms / each.step_ms:.0%}" for name, ms in parts if ms >= 0.02 * each.step_ms
            )
            yield (
                f"  predicted on one {each.device}, {shape}: {each.step_ms:.1f} ms a step, "
                f"{each.samples_per_s:,.0f} samples/s ({shares}); attack next: {each.next_class}"
            )


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the figures of a configuration for people."""
    yield (
        f"{figures['benchmark']} {figures['configuration']} for {figures['architecture']}, "
        f"{figures['batch_size']} samples a step, {figures['precision']}; counted: {figures['counted']}"
    )
    num_breaks = sum(figures["graph_breaks"].values())
    yield (
        f"  {figures['kernels']} kernels compiled, {len(figures['spilling'])} spill registers, at most "
        f"{figures['most_registers']} registers; graph breaks: {num_breaks or 'none'}; "
        f"recompiles where a shape returns: {figures['recompiles'] or 'none'}"
    )
    for each in figures["spilling"]:
        yield f"    spills {each['spilled_bytes']:5} bytes a thread: {each['name']}"
    for each in figures["own_kernels"]:
        uses = f"{each['registers']} registers, {each['spilled_bytes']} bytes spilled"
        yield f"    own kernel {each['name']}: {uses}"
    for shape, sides in figures["shapes"].items():
        for side in ("training", "evaluation"):
            yield from shape_lines(f"{shape}, {side}", sides[side])


def shape_lines(title: str, figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of one shape."""
    yield f"  {title:38}  launches        GB    TFLOP"
    rows = {name: figures["classes"].get(name) for name in (*LIBRARY, *NAMES)}
    for name, row in rows.items():
        if row:
            tflop = f"{row['tflop']:9.3f}" if row["tflop"] else ""
            yield f"    {name:36} {row['launches']:9,.0f} {row['gb']:9.2f}{tflop}"
    yield f"    {'all':36} {figures['launches']:9,.0f} {figures['gb']:9.2f}{figures['tflop']:9.3f}"
