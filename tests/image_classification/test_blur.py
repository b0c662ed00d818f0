"""The Triton kernel of the blur, interpreted, against the depthwise convolution that it stands for."""

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


def test_the_kernel_and_its_gradient_are_those_of_the_convolution():
    run_interpreted(KERNEL_AGAINST_CONVOLUTION)
