"""Random crops from squashed images: gather, antialiased resize, mirror and normalisation in one pass.

A crop from `low` to `high` (in stored pixels, fractions allowed) becomes `size_px` values. Value i has its
centre at low + (i + 0.5) * scale, scale = (high - low) / size_px. The weight of a stored pixel is a triangle
around that centre, which reaches as far to either side as the larger of `scale` and one pixel, times the part
of the pixel that lies inside the crop. The weights of a value add up to one. For a crop of whole pixels this
is PIL's crop() and then its bilinear resize(), without the rounding in between.
"""

import os

import torch
from torch import Tensor

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, in [0, 1]
STD = (0.229, 0.224, 0.225)
SCALE = [1 / (255 * deviation) for deviation in STD]  # a level of 0 to 255 becomes level * SCALE + SHIFT
SHIFT = [-centre / deviation for centre, deviation in zip(MEAN, STD, strict=True)]


def crop_resize(
    pixels: Tensor, samples: Tensor, boxes: Tensor, flips: Tensor, *, size_px: int, dtype: torch.dtype
) -> Tensor:
    """Return crops (batch, 3, size_px, size_px) in `dtype`, channels last: (value / 255 - MEAN) / STD.

    `pixels` (num_stored, stored_px, stored_px, 3) uint8, contiguous, are images squashed to squares;
    `samples` (batch,) int64 choose among them. `boxes` (batch, 4) float32 are top, left, height and width as
    fractions of the image; crops with `flips` (batch,) bool are mirrored. All on one device. On a GPU, or
    with TRITON_INTERPRET=1, it is one Triton kernel that the host does not wait for and a graph can capture;
    elsewhere it is the reference.
    """
    if not uses_triton(pixels.is_cuda):
        return crop_resize_reference(pixels, samples, boxes, flips, size_px=size_px, dtype=dtype)
    from image_classification.kernels.crop_resize_triton import crop_resize_triton

    return crop_resize_triton(
        pixels, samples, boxes, flips, size_px=size_px, scale=SCALE, shift=SHIFT, dtype=dtype
    )


def uses_triton(on_gpu: bool) -> bool:
    return on_gpu or os.environ.get("TRITON_INTERPRET") == "1"


def crop_resize_reference(
    pixels: Tensor, samples: Tensor, boxes: Tensor, flips: Tensor, *, size_px: int, dtype: torch.dtype
) -> Tensor:
    """Return what `crop_resize` does, as two matrix products in float32, on any device."""
    stored_px = pixels.shape[1]
    tops, lefts, heights, widths = boxes.unbind(dim=1)
    rows = axis_weights(tops, heights, stored_px, size_px)
    columns = axis_weights(lefts, widths, stored_px, size_px)
    columns = torch.where(flips[:, None, None], columns.flip(1), columns)
    values = torch.einsum("byr,brsc,bxs->byxc", rows, pixels[samples].float(), columns)
    scale, shift = (torch.tensor(three, device=pixels.device) for three in (SCALE, SHIFT))
    return (values * scale + shift).permute(0, 3, 1, 2).to(dtype, memory_format=torch.channels_last)


def axis_weights(starts: Tensor, lengths: Tensor, stored_px: int, size_px: int) -> Tensor:
    """Return the weights (batch, size_px, stored_px) of the stored pixels along one axis.

    `starts` and `lengths` (batch,) are fractions of the image.
    """
    starts, lengths = starts[:, None, None], lengths[:, None, None]
    low, high = starts * stored_px, (starts + lengths) * stored_px
    scale = lengths * (stored_px / size_px)
    centres = low + (torch.arange(size_px, device=starts.device)[:, None] + 0.5) * scale
    stored = torch.arange(stored_px, device=starts.device)
    triangle = (1 - (stored + 0.5 - centres).abs() / scale.clamp(min=1)).clamp(min=0)
    part_inside = (torch.minimum(stored + 1, high) - torch.maximum(stored, low)).clamp(min=0)
    weights = triangle * part_inside
    return weights / weights.sum(dim=-1, keepdim=True)
