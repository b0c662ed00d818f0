"""A profiler's trace of training steps, summed by class of kernel."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from common.config.schema import RunConfig
from common.measure.clock import time_call, time_launching, warm_up
from common.measure.device_run import open_run
from common.measure.throughput import bench_batches, loaded_points, stepper

CLASSES = {  # the first that a kernel's name matches, in lower case; names of CUDA 12 and 13 and of ATen
    "own": r"^(blur|cross_entropy|crop_resize|max_blur(_backward)?|quantize)_kernel",  # the suite's
    "compiled": r"^triton_|graph_\d+_cpp|cpp_fused",  # named after all that they fuse
    "communication": r"nccl|all_?reduce",
    "attention": r"flash|fmha|attention",
    "optimizer": r"multi_tensor|fused_?adam|fused_?sgd",
    "normalisation": r"bn_|batch_?norm|layer_?norm",
    "convolution": r"conv|wgrad|dgrad|fprop|cudnn",
    "matrix product": r"gemm|nvjet|cutlass|cublas|aten::(addmm|mm|bmm|baddbmm)|scaled_mm",
    "copy": r"memcpy|memset|copy_|aten::to\b",
    "reduction": r"reduce|softmax",
    "element-wise": r"elementwise|vectorized|aten::",
}
TOP = 12  # kernels that are named one by one
NUM_STEPS = 4  # of a trace

Span = tuple[str, float, float]  # name, start and end in microseconds


def summarize_trace(
    config: RunConfig, shapes: Sequence[str] = (), *, file: Path | None = None
) -> dict[str, Any]:
    """Return by shape the milliseconds a step of each class of kernel, the idle share and the host's time.

    The steps are those of the longest part of training with the shape.
    On a CPU the operators of torch stand in for kernels. `file` is given a Chrome trace (.json or .json.gz).
    """
    summaries = {}
    with open_run(config, warms_up=False) as run:
        list_spans = list_kernels if run.device.type == "cuda" else list_operators
        batches = bench_batches(run)
        for shape in bench_batches(run, shapes):
            point, batch = max(loaded_points(run, batches, shape), key=lambda pair: pair[0].share)
            step = stepper(run, batch, point, NUM_STEPS)
            warm_up(step)
            step_s = time_call(step, run.device)  # a profiler slows the host down
            host_s = time_launching(stepper(run, batch, point, 1), run.device)
            with torch.profiler.profile(acc_events=True) as profiler:
                time_call(step, run.device)
            summaries[shape] = summarize_spans([*list_spans(profiler.events())], step_s)
            summaries[shape]["host_ms"] = host_s * 1e3
            if file is not None:
                profiler.export_chrome_trace(str(file))
    return summaries


def list_kernels(events: Iterable[Any]) -> Iterator[Span]:
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            yield event.name, event.time_range.start, event.time_range.end


def list_operators(events: Iterable[Any]) -> Iterator[Span]:
    """Yield each operator's time without those that it calls, one after another, since operators nest."""
    end = 0.0
    for event in events:
        if event.device_type == DeviceType.CPU:
            start, end = end, end + event.self_cpu_time_total
            yield event.name, start, end


def summarize_spans(spans: list[Span], wall_s: float) -> dict[str, Any]:
    """Return the milliseconds a step by class and by kernel, launches a step, and the share of idle time."""
    by_class: dict[str, float] = defaultdict(float)
    by_kernel: dict[str, float] = defaultdict(float)
    busy_us, until = 0.0, float("-inf")
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        label = next((one for one, pattern in CLASSES.items() if re.search(pattern, name.lower())), "other")
        by_class[label] += (end - start) / 1e3 / NUM_STEPS
        by_kernel[name[:120]] += (end - start) / 1e3 / NUM_STEPS
        busy_us += max(0.0, end - max(start, until))
        until = max(until, end)
    return {
        "step_ms": wall_s / NUM_STEPS * 1e3,
        "launches": len(spans) / NUM_STEPS,
        "idle_share": max(0.0, 1 - busy_us / (wall_s * 1e6)),
        "classes_ms": dict(sorted(by_class.items(), key=lambda item: -item[1])),
        "kernels_ms": dict(sorted(by_kernel.items(), key=lambda item: -item[1])[:TOP]),
    }
