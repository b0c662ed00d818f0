"""Crop and resize: PIL's pixels, known answers, and the Triton kernel against the reference."""

import numpy as np
import pytest
import torch
from PIL import Image

from image_classification.kernels.crop_resize import MEAN, STD, crop_resize, crop_resize_reference
from tests.command import run_interpreted

STORED_PX = 40
MAX_ERROR = 1.01  # levels: PIL rounds after each of its two passes, and its weights to 22 bits


def drawn(seed):
    """Return 30 images, a box in each (stored pixels, sides of at least 6), and which are mirrored."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (30, STORED_PX, STORED_PX, 3), dtype=np.uint8)
    lengths = rng.uniform(6, STORED_PX, (30, 2))
    return (
        pixels,
        np.concatenate([rng.uniform(0, STORED_PX - lengths), lengths], axis=1),
        rng.random(30) < 0.5,
    )


def cropped(pixels, boxes, flips, size_px):
    """Return one crop of each image, (batch, size_px, size_px, 3) in levels of 255."""
    fractions, samples = torch.from_numpy(boxes / pixels.shape[1]).float(), torch.arange(len(pixels))
    flips, pixels = torch.from_numpy(np.asarray(flips)), torch.from_numpy(pixels)
    crops = crop_resize(pixels, samples, fractions, flips, size_px=size_px, dtype=torch.float32)
    return (crops.permute(0, 2, 3, 1).double().numpy() * STD + MEAN) * 255


@pytest.mark.parametrize("size_px", [7, 16, 40, 61])
def test_crops_of_whole_pixels_are_pils(size_px):
    pixels, boxes, flips = drawn(0)
    boxes = boxes.astype(int)
    for image, box, flip, crop in zip(
        pixels, boxes.tolist(), flips, cropped(pixels, boxes, flips, size_px), strict=True
    ):
        top, left, height, width = box
        cut = Image.fromarray(image).crop((left, top, left + width, top + height))
        expected = np.asarray(cut.resize((size_px, size_px), Image.Resampling.BILINEAR), np.float64)
        assert abs(crop - (expected[:, ::-1] if flip else expected)).max() <= MAX_ERROR


@pytest.mark.parametrize("size_px", [7, 16, 40, 61])
def test_inside_of_fractional_crops_is_pils(size_px):
    """PIL's `box` lets the filter see beyond the crop, so that its outermost pixels differ."""
    pixels, boxes, _ = drawn(1)
    num_compared = 0
    for image, box, crop in zip(
        pixels, boxes, cropped(pixels, boxes, np.zeros(30, bool), size_px), strict=True
    ):
        corners = (box[1], box[0], box[1] + box[3], box[0] + box[2])
        resized = Image.fromarray(image).resize((size_px, size_px), Image.Resampling.BILINEAR, box=corners)
        inner = []  # whose triangle meets no pixel that lies beyond the crop or is cut by it
        for low, length in zip(box, box[2:], strict=False):
            scale = length / size_px
            centres, reach = low + (np.arange(size_px) + 0.5) * scale, max(scale, 1) + 0.5
            inner.append((centres - reach >= low) & (centres + reach <= low + length))
        differences = abs(crop - np.asarray(resized, np.float64))[np.ix_(*inner)]
        assert differences.max(initial=0) <= MAX_ERROR
        num_compared += differences.size
    assert num_compared > 30 * size_px * size_px


def test_a_cut_pixel_counts_by_its_part_inside():
    pixels = np.broadcast_to(np.array([10, 100, 250, 40], np.uint8)[None, None, :, None], (1, 4, 4, 3)).copy()
    box = np.array([[0, 1 / 2, 4, 2]])  # columns 0.5 to 2.5, seen from their middle
    expected = (10 * 0.25 + 100 * 1 + 250 * 0.25) / 1.5
    assert cropped(pixels, box, [False], 1).flatten().tolist() == pytest.approx([expected] * 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_whole_image_at_its_size_is_the_image_normalised(dtype):
    pixels = torch.from_numpy(drawn(2)[0])
    samples, boxes = torch.tensor([4, 0, 4]), torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 3)
    flips = torch.tensor([False, False, True])
    crops = crop_resize(pixels, samples, boxes, flips, size_px=STORED_PX, dtype=dtype)
    mean, std = torch.tensor([MEAN, STD], dtype=torch.float64)
    expected = ((pixels[samples].double() / 255 - mean) / std).permute(0, 3, 1, 2)
    expected[2] = expected[2].flip(-1)
    assert crops.dtype == dtype and crops.is_contiguous(memory_format=torch.channels_last)
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    torch.testing.assert_close(crops.double(), expected, rtol=rounding, atol=1e-6)


KERNEL_AGAINST_REFERENCE = """
import sys
import torch
from image_classification.kernels.crop_resize import crop_resize, crop_resize_reference

torch.manual_seed(0)
pixels = torch.randint(0, 256, (5, 24, 24, 3), dtype=torch.uint8)
samples, flips = torch.tensor([3, 0, 3]), torch.tensor([True, False, True])
lengths = torch.tensor([[1.0, 1.0], [0.9, 0.4], [0.2, 0.7]])
boxes = torch.cat([torch.rand(3, 2) * (1 - lengths), lengths], dim=1)
for size_px in (8, 11, 24):  # the last: two programs along each axis
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2**-9), (torch.bfloat16, 2**-6)):
        given = dict(size_px=size_px, dtype=dtype)
        found = crop_resize(pixels, samples, boxes, flips, **given)
        expected = crop_resize_reference(pixels, samples, boxes, flips, **given)
        assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)  # one unit of values below 4
assert "image_classification.kernels.crop_resize_triton" in sys.modules
"""


def test_the_kernel_computes_what_the_reference_does():
    if pytest.importorskip("triton").__version__.startswith("3.6."):
        pytest.skip("the interpreter of Triton 3.6 cannot count a loop with NumPy 2.4")
    run_interpreted(KERNEL_AGAINST_REFERENCE)


def test_the_kernel_compiles_for_a_gpu():
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from image_classification.kernels import crop_resize_triton

    kernel = crop_resize_triton.crop_resize_kernel
    blocks = {name: getattr(crop_resize_triton, name) for name in ("NUM_ROWS", "NUM_VALUES")}
    types = {"pixels": "*u8", "samples": "*i64", "boxes": "*fp32", "flips": "*i1", "crops": "*bf16"}
    types |= {"stored_px": "i32", "size_px": "i32"} | dict.fromkeys(blocks, "constexpr")
    signature = {name: types.get(name, "fp32") for name in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=blocks),
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": True},
    )
    assert "fma.rn.f32" in compiled.asm["ptx"] and compiled.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_on_a_gpu_beyond_32_bits_and_in_a_graph(dtype):
    stored_px, num_images, batch_size = 256, 11_000, 64  # 2.16e9 bytes
    pixels = torch.randint(0, 256, (num_images, stored_px, stored_px, 3), dtype=torch.uint8, device="cuda")
    samples = torch.arange(num_images - batch_size, num_images, device="cuda")
    lengths = torch.rand(batch_size, 2, device="cuda") * 0.8 + 0.2
    boxes = torch.cat([torch.rand(batch_size, 2, device="cuda") * (1 - lengths), lengths], dim=1)
    flips = torch.rand(batch_size, device="cuda") < 0.5
    given = {"size_px": 176, "dtype": dtype}
    found = crop_resize(pixels, samples, boxes, flips, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = crop_resize(pixels, samples, boxes, flips, **given)
    boxes.copy_(boxes.flip(0))
    graph.replay()
    # fused multiply-add moves centres by up to 1.5e-5 pixels, at up to 4.4 per pixel along either axis
    tolerance = {torch.float32: 2e-4, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    expected = crop_resize_reference(pixels, samples, boxes.flip(0), flips, **given)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    expected = crop_resize_reference(pixels, samples, boxes, flips, **given)
    torch.testing.assert_close(captured, expected, rtol=0, atol=tolerance)
