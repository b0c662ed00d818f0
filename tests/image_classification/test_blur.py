"""The Triton kernels of the blur, without and with a max-pool, interpreted, against torch's operators."""

from tests.command import run_interpreted

KERNEL_AGAINST_CONVOLUTION = """
import sys
import torch
import torch.nn.functional as F
from image_classification.methods.blurpool import Blur

torch.manual_seed(0)
line = torch.tensor([1.0, 2.0, 1.0])
weight = (line[:, None] * line / 16)[None, None]
for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 2**-9), (torch.bfloat16, 2**-6)):
    for stride in (1, 2):
        for channels, height, width in ((24, 7, 8), (3, 5, 5), (512, 3, 2)):  # the last: 3 programs an image
            images = torch.randn(2, channels, height, width).to(dtype).float().requires_grad_()
            filters = weight.expand(channels, 1, 3, 3)
            expected = F.conv2d(images, filters, stride=stride, padding=1, groups=channels)
            upstream = torch.randn_like(expected).to(dtype)
            (expected_gradient,) = torch.autograd.grad(expected, images, upstream.float())
            given = images.detach().to(dtype, memory_format=torch.channels_last).requires_grad_()
            blurred = Blur(stride=stride)(given)
            (gradient,) = torch.autograd.grad(blurred, given, upstream)
            assert blurred.is_contiguous(memory_format=torch.channels_last) and blurred.dtype == dtype
            torch.testing.assert_close(blurred.float(), expected, rtol=0, atol=tolerance)
            torch.testing.assert_close(gradient.float(), expected_gradient, rtol=0, atol=tolerance)
assert "image_classification.kernels.blur_triton" in sys.modules
"""


MAX_BLUR_AGAINST_ITS_PARTS = """
import torch
import torch.nn.functional as F
from torch import nn
from image_classification.methods.blurpool import apply_blurpool

def reduce_in_parts(images):
    return torch.ops.ttt.blur(F.max_pool2d(images, 3, 1, 1), 2)

torch.manual_seed(0)
model = nn.Sequential(nn.MaxPool2d(3, 2, 1))
assert apply_blurpool(model) == 1
shapes = (8, 7, 9), (16, 1, 1), (24, 2, 3), (192, 3, 4)  # the last: 2 and 3 programs an image
layouts = torch.channels_last, torch.contiguous_format
for row, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
    for column, shape in enumerate(shapes):
        # both with each type, and with each shape
        has_ties, layout = (row + column) % 2, layouts[(row + column // 2) % 2]
        images = torch.randn(2, *shape)
        images = (2 * images).round().relu() if has_ties else images
        images = images.to(dtype).contiguous(memory_format=layout).requires_grad_()
        expected, reduced = reduce_in_parts(images), model(images)
        assert reduced.is_contiguous(memory_format=torch.channels_last) and reduced.dtype == dtype
        assert torch.equal(reduced, expected), (dtype, shape)
        # every sum is a whole number below 256: exact in any order and type
        upstream = 16.0 * torch.randint(-1, 2, expected.shape).to(dtype)
        gradients = [torch.autograd.grad(one, images, upstream)[0] for one in (reduced, expected)]
        assert torch.equal(*gradients), (dtype, shape)

images = torch.randn(2, 8, 7, 9, requires_grad=True)
expected, reduced = reduce_in_parts(images), model(images)
assert "max_blur" in reduced.grad_fn.name()
upstream = torch.randn_like(expected)
gradients = [torch.autograd.grad(one, images, upstream)[0] for one in (reduced, expected)]
torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)

with torch.no_grad():
    images[0, 0, 3, 3], images[0, 1, 6, 8] = float("nan"), float("inf")
    assert torch.equal(model(images).nan_to_num(), reduce_in_parts(images).nan_to_num())
    assert model(images)[0, 0].isnan().any() and model(images)[0, 1].isinf().any()
    assert model(images[:0]).shape == (0, 8, 4, 5)
torch.library.opcheck(torch.ops.ttt.max_blur.default, (torch.randn(1, 8, 3, 4, requires_grad=True),))
"""


OTHER_POOLS = """
import torch
from torch import nn
from image_classification.methods.blurpool import apply_blurpool

torch.manual_seed(0)
images = torch.randn(2, 4, 7, 9)
for settings in ({"kernel_size": 2}, {"kernel_size": 3}, {"kernel_size": 5, "padding": 2}):
    pool = nn.MaxPool2d(**settings | {"stride": 2})
    model = nn.Sequential(pool)
    assert apply_blurpool(model) == 1
    dense = nn.MaxPool2d(pool.kernel_size, 1, pool.padding)
    assert torch.equal(model(images), torch.ops.ttt.blur(dense(images), 2))
"""


def test_blur_with_and_without_a_max_pool_is_that_of_the_convolution_and_of_its_parts():
    """In one process, which takes seconds to start."""
    run_interpreted(KERNEL_AGAINST_CONVOLUTION + MAX_BLUR_AGAINST_ITS_PARTS + OTHER_POOLS)
