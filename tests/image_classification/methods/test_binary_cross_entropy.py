"""Binary cross-entropy against its definition and the published values."""

import pytest
import torch
from torch import nn

from common.methods.label_smoothing import smooth_labels
from image_classification.methods.binary_cross_entropy import (
    BinaryCrossEntropy,
    apply_log_bias,
    binary_cross_entropy,
)


def test_loss_at_the_initial_bias_is_published() -> None:
    layer = nn.Linear(4, 1000)
    assert apply_log_bias(nn.Sequential(nn.Linear(4, 4), layer)) == 1
    logits = layer(torch.zeros(3, 4)).detach()
    labels = smooth_labels(torch.tensor([0, 1, 2]), 1000, 0.0)
    assert float(binary_cross_entropy(logits.double(), labels)) == pytest.approx(7.907256, abs=2e-6)
    zeros = torch.zeros(3, 1000)
    assert float(binary_cross_entropy(zeros, labels)) == pytest.approx(693.147, abs=1e-2)


def test_floor_of_the_smoothed_loss_is_published() -> None:
    labels = smooth_labels(torch.tensor([7]), 1000, 0.08).double()
    assert float(binary_cross_entropy(torch.logit(labels), labels)) == pytest.approx(1.112415, abs=1e-6)


def test_gradient_is_sigmoid_minus_target_over_batch() -> None:
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    labels = smooth_labels(torch.arange(5), 11, 0.08).double()
    (gradient,) = torch.autograd.grad(binary_cross_entropy(logits, labels), logits)
    torch.testing.assert_close(gradient, (logits.sigmoid() - labels) / 5)


def test_method_computes_bfloat16_outputs_in_float32() -> None:
    method = BinaryCrossEntropy("binary_cross_entropy", BinaryCrossEntropy.Config(smoothing=0.08))
    outputs, labels = torch.randn(4, 10).bfloat16(), torch.arange(4)
    loss = method.loss(lambda outputs, targets: outputs.sum())(outputs, {"labels": labels})
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, binary_cross_entropy(outputs.float(), smooth_labels(labels, 10, 0.08)))
