"""The three training loaders by their name in the configuration: workers, dali, resident."""

import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from image_classification.data.dali import dali_batches, gpu_id, import_dali
from image_classification.data.images import Images
from image_classification.data.loader import Meter, TrainSettings, worker_batches
from image_classification.data.resident import EvaluationCache, ResidentLoader, available_bytes, check_budget

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_FOLDER = 107 - len("/pymp-abcdefgh/listener-abcdefgh")  # a socket's path has 107 characters at most
EVALUATION_SHARE = 0.5  # of the memory that is left, at most, for the pixels of the evaluation


def open_loader(
    images: Images,
    settings: TrainSettings,
    data: Any,
    device: torch.device,
    precision: str,
    *,
    micro_batch_size: int | None = None,
    start_step: int = 0,
    meter: Meter | None = None,
) -> Iterable[tuple[np.ndarray, np.ndarray | Tensor]]:
    """Return the batches of `data.loader`: samples, and pixels uint8 or, where resident, normalised images.

    All show the same crops; see loader.py, dali.py and resident.py. Only worker processes use the `meter`.
    """
    if data.loader == "workers":
        return worker_batches(
            images, settings, num_workers=data.num_workers, start_step=start_step, meter=meter
        )
    if data.loader == "dali":
        return dali_batches(
            images, settings, num_threads=data.num_workers, device_id=gpu_id(device), start_step=start_step
        )
    return ResidentLoader(
        images,
        settings,
        stored_px=data.stored_px,
        device=device,
        where=data.stored_on,
        dtype=loaded_dtype(data, precision),
        num_threads=data.num_workers,
        decoder=data.decoder,
        micro_batch_size=micro_batch_size,
        start_step=start_step,
    )


def loaded_dtype(data: Any, precision: str) -> torch.dtype:
    """Return the type of the images that reach the model."""
    return DTYPES[precision] if data.loader == "resident" else torch.float32


def check_loader(data: Any, num_rank_images: int, batch_size: int, device: torch.device) -> None:
    """Raise UserError where a loader cannot work: DALI is missing, a path is too long for workers' sockets,
    or the resident images of this rank do not fit beside a training on `batch_size` at once.
    """
    if data.loader == "workers" and len(folder := tempfile.gettempdir()) > MAX_FOLDER:
        what = f"longer than {MAX_FOLDER} characters: no room for the sockets of worker processes"
        raise UserError(what, where=folder, hint="set TMPDIR to a shorter folder")
    if data.loader == "dali" or (data.loader == "resident" and data.decoder == "dali"):
        import_dali()
    if data.loader == "resident":
        where = data.stored_on
        check_budget(num_rank_images, data.stored_px, device=device, where=where, batch_size=batch_size)


def keep_evaluation(data: Any, batch_size: int, device: torch.device) -> EvaluationCache:
    """Build an empty cache for the pixels of the evaluation."""
    available = int(available_bytes(device, data.stored_on, batch_size=batch_size) * EVALUATION_SHARE)
    return EvaluationCache(device=device, where=data.stored_on, available_bytes=available)
