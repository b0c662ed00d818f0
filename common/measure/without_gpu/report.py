"""Figures of `ttt inspect compile`, as they are kept and printed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from common.config.schema import RunConfig
from common.files import save_json
from common.machine import system
from common.measure.without_gpu import gpu_model
from common.measure.without_gpu.compile_for import (
    Compiled,
    build_training,
    compile_evaluation,
    compile_training,
    count_graph_breaks,
    open_compiler,
)
from common.measure.without_gpu.kernels import (
    GIGA,
    LIBRARY,
    NAMES,
    OWN,
    TERA,
    Kernel,
    list_largest,
    sum_classes,
)
from common.measure.without_gpu.pretend import find_gpu
from common.repository import benchmark_module, commit, shorten_name

COUNTED = (
    "operators of the traced step, each reading its inputs and writing its outputs once",
    "kernels of the code that Inductor generates; what it does not compile, by operators of the traced step",
)
NUM_LARGEST = 12
MAX_NAME = 150  # characters of a file's name


def compile_configuration(
    name: str, config: RunConfig, architecture: str, shapes: Sequence[str]
) -> dict[str, Any]:
    """Compile a configuration, and return all figures as they are kept; `shapes` empty: all of training."""
    with open_compiler(find_gpu(architecture)) as compiler:
        benchmark = benchmark_module(config.benchmark).Benchmark(config, seed=0)
        run = build_training(benchmark)
        training = list(compile_training(compiler, run, shapes))
        evaluation = compile_evaluation(compiler, run)
        compiler.add_own_kernels(benchmark)
        return {
            "benchmark": config.benchmark,
            "configuration": name,
            "size": config.size,
            "architecture": architecture,
            "batch_size": benchmark.num_rank_samples,
            "precision": config.precision,
            "commit": commit(),
            "versions": system.versions() | {"triton": metadata.version("triton")},
            "counted": COUNTED[any(shape.kernels for shape in training)],
            "graph_breaks": count_graph_breaks(),
            "recompiles": compiler.num_recompiles,
            "own_kernels": [describe_kernel(kernel) for kernel in compiler.kernels if kernel.kind == OWN],
            "training": {shape.shape: describe_compiled(shape) for shape in training},
            "evaluation": {evaluation.shape: describe_compiled(evaluation)},
        }


def describe_kernel(kernel: Kernel) -> dict[str, Any]:
    return {"name": kernel.name, "registers": kernel.registers, "spilled_bytes": kernel.spilled_bytes}


def describe_compiled(compiled: Compiled) -> dict[str, Any]:
    """Return the sums of classes, the library's calls one by one, and the kernels that move most."""
    kernels, classes = compiled.kernels, sum_classes(compiled.tally)
    return {
        "launches": sum(row["launches"] for row in classes.values()),
        "gb": round(sum(row["gb"] for row in classes.values()), 3),
        "tflop": round(sum(row["tflop"] for row in classes.values()), 4),
        "graphs": compiled.num_graphs,
        "kernels": len(kernels),
        "most_registers": max((kernel.registers for kernel in kernels), default=0),
        "spilling": [describe_kernel(kernel) for kernel in kernels if kernel.spilled_bytes],
        "classes": classes,
        "largest": list_largest(compiled.tally, NUM_LARGEST),
        "library": [
            [call.kind, call.name, n, round(n * call.num_bytes / GIGA, 5), round(n * call.flops / TERA, 6)]
            for call, n in compiled.tally.items()
            if call.kind in LIBRARY
        ],
    }


def keep(figures: Mapping[str, Any], directory: Path) -> Path:
    """Write the figures in the place of earlier ones of the same configuration and torch.

    Raises UserError where nothing can be written.
    """
    name = figures["configuration"] + ("-mini" if figures["size"] == "mini" else "")
    safe = shorten_name(re.sub(r"[^A-Za-z0-9._]+", "-", name), MAX_NAME, whole=name)
    version = ".".join(metadata.version("torch").split(".")[:2])
    file = f"{figures['benchmark']}-{safe}-torch{version}.json"
    path = Path(directory, "compiled", figures["architecture"], file)
    save_json(path, figures)
    return path


def format_figures(figures: Mapping[str, Any]) -> Iterator[str]:
    num_breaks = sum(figures["graph_breaks"].values()) or "none"
    yield (
        f"{figures['benchmark']} {figures['configuration']} for {figures['architecture']}, "
        f"{figures['batch_size']} samples a step, {figures['precision']}; graph breaks: {num_breaks}; "
        f"recompiles where a shape returns: {figures['recompiles'] or 'none'}"
    )
    yield f"  counted: {figures['counted']}"
    for kernel in figures["own_kernels"]:
        uses = f"{kernel['registers']} registers, {kernel['spilled_bytes']} bytes spilled"
        yield f"  own kernel {kernel['name']}: {uses}"
    for part in ("training", "evaluation"):
        for shape, counts in figures[part].items():
            yield from format_shape(f"{part}, {shape}", counts)


def format_shape(title: str, counts: Mapping[str, Any]) -> Iterator[str]:
    spilling = counts["spilling"]
    yield (
        f"  {title}: {counts['graphs']} graphs, {counts['kernels']} kernels compiled with at most "
        f"{counts['most_registers']} registers, of which {len(spilling)} spill"
    )
    for kernel in spilling:
        yield f"      {kernel['spilled_bytes']} bytes a thread: {kernel['name']}"
    yield f"    {'':28}  launches        GB    TFLOP"
    for name in (*LIBRARY, *NAMES):
        if row := counts["classes"].get(name):
            tflop = f"{row['tflop']:9.3f}" if row["tflop"] else ""
            yield f"    {name:28} {row['launches']:9,.0f} {row['gb']:9.2f}{tflop}"
    yield f"    {'all':28} {counts['launches']:9,.0f} {counts['gb']:9.2f}{counts['tflop']:9.3f}"


def format_predictions(figures: Mapping[str, Any]) -> Iterator[str]:
    rows = [(part, shape) for part in ("training", "evaluation") for shape in figures[part]]
    for part, shape in rows:
        for prediction in gpu_model.predict_devices(figures, shape, part):
            step_ms = prediction.step_ms
            parts = sorted(prediction.ms.items(), key=lambda part: -part[1])
            shares = [f"{name} {ms / step_ms:.0%}" for name, ms in parts if ms >= 0.02 * step_ms]
            yield (
                f"  predicted on one {prediction.device}, {part}, {shape}: {step_ms:.1f} ms a step, "
                f"{prediction.samples_per_s:,.0f} samples/s ({', '.join(shares)}); "
                f"attack next: {prediction.next_class}"
            )
