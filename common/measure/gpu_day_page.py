"""Rows of a GPU day as lines of text and as one HTML page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import files
from common.evidence.page import fill_template
from common.measure.without_gpu import gpu_model
from common.repository import relative_path


def describe_row(record: dict[str, Any]) -> str:
    """Return stage, row, outcome and the figures that matter, in one line or a few."""
    head = f"{record['stage']:9} {record['outcome']:10} {record['seconds']:6.1f} s  {record['command']}"
    figures = record.get("figures")
    details = describe_figures(record, figures) if figures else []
    if not figures or record["outcome"] != "ok":
        details += record.get("output", [])[-3:]
    return "\n".join([head, *(f"{'':29}{line}" for line in details)])


def describe_figures(record: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    """Return lines with the figures of a row."""
    if "rates" in figures:
        return [describe_rate(rate, predict(record, figures, rate)) for rate in figures["rates"]] + [
            f"{failure['shape']}  {failure['error']}" for failure in figures["failed"]
        ]
    if "loss_difference" in figures:
        compiled, eager = figures["compiled"], figures["eager"]
        return [
            f"{figures['num_steps']} steps: losses differ by {figures['loss_difference']:.2g} at most, "
            f"gradients by {figures['gradient_difference']:.2g}, "
            f"evaluations by {figures['evaluation_difference']:.2g}",
            f"{figures['skipped_graphs']} graphs skipped, {figures['graph_breaks']} breaks, "
            f"{figures['compiled_late']} of {figures['num_graphs']} compiled after the warm-up",
            f"{eager['step_ms']:.2f} ms a step eagerly, {compiled['step_ms']:.2f} ms compiled; "
            f"host {eager['host_us_per_step']:.0f} and {compiled['host_us_per_step']:.0f} us",
        ]
    if "initialization_s" in figures:
        return [
            f"{figures['initialization_s']:.1f} s to start with {figures['num_forms']} forms; "
            f"{figures['num_evaluated']:,} samples evaluated in {figures['evaluation_s']:.1f} s"
        ]
    if record["stage"] == "trace":
        return [describe_trace(shape, summary) for shape, summary in figures.items()]
    if "faults" in figures:
        return [f"{figures['faults']} faults, {figures['warnings']} warnings"]
    return []


def predict(record: dict[str, Any], figures: dict[str, Any], rate: dict[str, Any]) -> float | None:
    """Return the samples per second that were predicted for a rate; None where there is no prediction."""
    asked = record["hardware"], figures["benchmark"], rate["configuration"], rate["shape"]
    return gpu_model.predict_rate(*asked, figures["batch_size"])


def describe_rate(rate: dict[str, Any], predicted_per_s: float | None) -> str:
    predicted = "" if predicted_per_s is None else f" (predicted: {predicted_per_s:.1f})"
    memory = "" if rate["memory_gb"] is None else f", {rate['memory_gb']:.1f} GB"
    traffic = "" if rate["bytes_share"] is None else f", {rate['bytes_share']:.0%} of the copy peak"
    return (
        f"{rate['shape']:>10}  {rate['samples_per_s']:9.1f} samples/s{predicted}, "
        f"{rate['step_ms']:.2f} ms a step, "
        f"{rate['flops_share']:.0%} of the matmul peak{traffic}{memory}"
    )


def describe_trace(shape: str, summary: dict[str, Any]) -> str:
    classes = ", ".join(f"{name} {ms:.2f}" for name, ms in summary["classes_ms"].items())
    return (
        f"{shape:>10}  {summary['step_ms']:.2f} ms a step, {summary['idle_share']:.0%} idle, host "
        f"{summary['host_ms']:.2f} ms, {summary['launches']:.0f} launches: {classes}"
    )


def write_page(rows: Sequence[dict[str, Any]], path: Path) -> str:
    """Write the page; returns its path, relative to the repository where it lies inside."""
    details = [describe_row(row).splitlines()[1:] for row in rows]
    template = Path(__file__).parent / "templates" / "gpu_day.html"
    files.write_text(path.resolve(), fill_template(template, rows=list(zip(rows, details, strict=True))))
    return relative_path(path)
