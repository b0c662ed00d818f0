"""NVIDIA DALI, which decodes and resizes in its own threads or on a GPU: a loader, and a resident decoder.

DALI gets the crops of loader.py instead of drawing its own, so that every loader shows the same.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.machine import torch_build
from image_classification.data.ahead import prefetch
from image_classification.data.decoding import (
    Decoded,
    Request,
    decode_behind,
    on_side_stream,
    read_files,
)
from image_classification.data.images import Images, decode
from image_classification.data.loader import PixelBatch, TrainSettings, TrainStep, train_steps


def dali_batches(images: Images, settings: TrainSettings) -> Iterator[PixelBatch]:
    """Yield the batches of `loader.worker_batches`; pixels are tensors on the device.

    One Python thread reads files ahead, `num_workers` of DALI work on their content. Raises UserError without
    DALI and for a file that cannot be decoded.
    """
    dali = import_dali()
    waiting: deque[np.ndarray] = deque()  # the samples of the batches inside the pipeline

    def read(step: TrainStep) -> tuple[np.ndarray, tuple[Any, ...]]:
        boxes, flips = step.crops(images.size)
        content = read_files(images, step.samples)
        sizes = np.full(len(content), step.crop_px, np.float32)
        return step.samples, (content, boxes.astype(np.int32), sizes, flips.astype(np.int32))

    def source() -> Iterator[tuple[Any, ...]]:
        for samples, inputs in prefetch(read, train_steps(len(images), settings)):
            waiting.append(samples)
            yield inputs

    def cut_and_resize(decoding: dict[str, Any], resizing: dict[str, Any]) -> Any:
        fn = dali.fn
        content, boxes, size, flips = fn.external_source(source=source(), num_outputs=4)
        cut = fn.decoders.image_slice(content, start=boxes[:2], shape=boxes[2:], axis_names="HW", **decoding)
        return fn.flip(fn.resize(cut, resize_x=size, resize_y=size, **resizing), horizontal=flips)

    num_samples, num_threads = settings.num_rank_samples, settings.data.num_workers
    with open_pipeline(dali, cut_and_resize, num_samples, num_threads, settings.device) as pipeline:
        while True:
            pixels = run_pipeline(pipeline, images, waiting)
            yield PixelBatch(waiting.popleft(), pixels)


@contextmanager
def dali_decoder(
    images: Images, stored_px: int, *, device: torch.device, num_threads: int, most: int
) -> Iterator[Request]:
    """Open a decoder as `resident.open_decoder` does; pixels are on the device, a GPU decodes by nvJPEG.

    One thread of Python reads files, another runs the pipeline on what was read.
    """
    dali = import_dali()

    def squash(decoding: dict[str, Any], resizing: dict[str, Any]) -> Any:
        image = dali.fn.decoders.image(dali.fn.external_source(name="content"), **decoding)
        return dali.fn.resize(image, resize_x=stored_px, resize_y=stored_px, **resizing)

    def decode_files(samples: np.ndarray, content: list[np.ndarray]) -> Decoded:
        pixels = run_pipeline(pipeline, images, [samples], content=content)
        return pixels, np.array([images.size(int(sample)) for sample in samples], np.int64)

    # with a queue of 1 a run returns the batch that it was fed
    with (
        open_pipeline(dali, squash, most, num_threads, device, prefetch_queue_depth=1) as pipeline,
        decode_behind(images, decode_files) as request,
    ):
        yield request


@contextmanager
def open_pipeline(
    dali: ModuleType,
    operate: Callable[[dict[str, Any], dict[str, Any]], Any],
    batch_size: int,
    num_threads: int,
    device: torch.device,
    **options: Any,
) -> Iterator[Any]:
    """Open a pipeline that returns the result of `operate`, (n, size, size, 3) uint8, n up to `batch_size`.

    `operate` gets the arguments with which DALI's decoder and `resize` agree with PIL: chroma is upsampled
    smoothly, the EXIF orientation is ignored, and `resize` is linear with antialiasing. On a GPU the decoder
    is nvJPEG.
    """
    on_gpu = device.type == "cuda"
    decoding = {
        "device": "mixed" if on_gpu else "cpu",
        "output_type": dali.types.RGB,
        "jpeg_fancy_upsampling": True,
        "adjust_orientation": False,
    }
    pipeline = dali.Pipeline(
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=(device.index or 0) if on_gpu else None,
        exec_dynamic=True,  # a batch owns its memory; else the pipeline would write into it again
        **options,
    )
    try:
        with pipeline:
            pipeline.set_outputs(
                operate(decoding, {"interp_type": dali.types.INTERP_LINEAR, "antialias": True})
            )
        pipeline.build()
        yield pipeline
    finally:
        # Delete it now, even if an exception refers to it: a worker process that is forked later would
        # inherit the pipeline without its threads, and hang or crash when its garbage collector deletes it.
        pipeline.__del__()


def run_pipeline(pipeline: Any, images: Images, waiting: Iterable[np.ndarray], **inputs: Any) -> Tensor:
    """Return the next output of a pipeline.

    Raises UserError for the first of the `waiting` samples that cannot be decoded; DALI does not say which.
    """
    try:
        (pixels,) = pipeline.run(**inputs)
    except RuntimeError:
        for samples in waiting:
            for sample in samples:
                decode(images, int(sample))
        raise
    if pipeline.device_id is None:
        return torch.from_dlpack(pixels.as_tensor())
    # DALI reuses this memory once it is freed here, even if torch's stream has not read it yet.
    device = torch.device("cuda", pipeline.device_id)
    return on_side_stream(device, lambda: torch.from_dlpack(pixels.as_tensor()).clone())


def has_dali() -> bool:
    """Return whether DALI is installed."""
    try:
        import_dali()
    except UserError:
        return False
    return True


def import_dali() -> ModuleType:
    """Return `nvidia.dali` with its operators and types."""
    try:
        for module in ("nvidia.dali.fn", "nvidia.dali.types"):
            import_module(module)
        return import_module("nvidia.dali")
    except ImportError as error:
        hint = f"pip install {torch_build.dali_package(torch.version.cuda)}"
        raise UserError("NVIDIA DALI is not installed", hint=hint) from error
