"""Training batches from NVIDIA DALI, which decodes and resizes in its own threads or on a GPU.

DALI gets the crops of loader.py instead of drawing its own, so that every loader shows the same.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from image_classification.data.images import Images, decode
from image_classification.data.loader import TrainSettings, TrainStep, prefetch, train_steps


def dali_batches(
    images: Images,
    settings: TrainSettings,
    *,
    num_threads: int,
    device_id: int | None = None,
    start_step: int = 0,
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield the batches of `loader.worker_batches`; pixels are tensors on the GPU `device_id`, None: a CPU.

    One Python thread reads files ahead, `num_threads` of DALI work on their content. Raises UserError without
    DALI and for a file that cannot be decoded.
    """
    dali = import_dali()
    waiting: deque[np.ndarray] = deque()  # the samples of the batches inside the pipeline

    def read(step: TrainStep) -> tuple[np.ndarray, tuple[Any, ...]]:
        crops = step.crops(images.size)
        content = [np.frombuffer(images.jpeg(int(sample)), np.uint8) for sample in step.samples]
        sizes = np.full(len(content), step.crop_px, np.float32)
        return step.samples, (content, crops.boxes.astype(np.int32), sizes, crops.flips.astype(np.int32))

    def source() -> Iterator[tuple[Any, ...]]:
        for samples, inputs in prefetch(read, train_steps(len(images), settings, start_step=start_step)):
            waiting.append(samples)
            yield inputs

    pipeline = build_pipeline(dali, source(), settings.num_rank_samples, num_threads, device_id)
    try:
        while True:
            (pixels,) = pipeline.run()
            yield waiting.popleft(), torch.from_dlpack(pixels.as_tensor())
    except RuntimeError:
        raise_damaged(images, waiting)
        raise
    finally:
        # Now, whatever an exception keeps alive: a worker process that is forked later would inherit the
        # pipeline without its threads, and hang or crash when its garbage collector comes to it.
        pipeline.__del__()


def build_pipeline(
    dali: ModuleType, source: Iterator[Any], batch_size: int, num_threads: int, device_id: int | None
) -> Any:
    """Return a built pipeline that gives (batch, size, size, 3) uint8 for what `source` gives."""
    fn, decoding, resizing = dali.fn, *pil_options(dali, device_id)
    pipeline = dali.Pipeline(
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=device_id,
        exec_dynamic=True,  # a batch owns its memory; else the pipeline would write into it again
    )
    with pipeline:
        content, boxes, size, flips = fn.external_source(source=source, num_outputs=4)
        cut = fn.decoders.image_slice(content, start=boxes[:2], shape=boxes[2:], axis_names="HW", **decoding)
        resized = fn.resize(cut, resize_x=size, resize_y=size, **resizing)
        pipeline.set_outputs(fn.flip(resized, horizontal=flips))
    pipeline.build()
    return pipeline


def build_squashing(
    dali: ModuleType, size_px: int, batch_size: int, num_threads: int, device_id: int | None
) -> Any:
    """Return a built pipeline whose `run(content=files)` gives whole images (n, size, size, 3) uint8.

    n may be up to `batch_size`.
    """
    fn, decoding, resizing = dali.fn, *pil_options(dali, device_id)
    pipeline = dali.Pipeline(
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=device_id,
        exec_dynamic=True,
        prefetch_queue_depth=1,  # what is fed comes out of the same run
    )
    with pipeline:
        image = fn.decoders.image(fn.external_source(name="content"), **decoding)
        pipeline.set_outputs(fn.resize(image, resize_x=size_px, resize_y=size_px, **resizing))
    pipeline.build()
    return pipeline


def pil_options(dali: ModuleType, device_id: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments of the decoder and of `resize` with which both agree with PIL.

    Colours are upsampled smoothly, the EXIF orientation is ignored, and `resize` is linear with antialiasing.
    On a GPU the decoder is nvJPEG.
    """
    decoding = {
        "device": "cpu" if device_id is None else "mixed",
        "output_type": dali.types.RGB,
        "jpeg_fancy_upsampling": True,
        "adjust_orientation": False,
    }
    return decoding, {"interp_type": dali.types.INTERP_LINEAR, "antialias": True}


def raise_damaged(images: Images, waiting: Iterable[np.ndarray]) -> None:
    """Raise UserError for the first of these samples that cannot be decoded; DALI does not say which."""
    for samples in waiting:
        for sample in samples:
            decode(images, int(sample))


def gpu_id(device: torch.device) -> int | None:
    """Return DALI's number of a device, None for the CPU."""
    return (device.index or 0) if device.type == "cuda" else None


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
        raise UserError("NVIDIA DALI is not installed", hint="pip install nvidia-dali-cuda130") from error
