"""Label smoothing: the published vectors."""

import pytest
import torch
import torch.nn.functional as F

from common.errors import UserError
from common.methods.label_smoothing import LabelSmoothing, smooth_labels


@pytest.mark.parametrize(("smoothing", "positive", "negative"), [(0.08, 0.92008, 8e-5), (0.1, 0.9001, 1e-4)])
def test_vectors_are_the_published_ones(smoothing: float, positive: float, negative: float) -> None:
    labels = smooth_labels(torch.tensor([3, 999]), 1000, smoothing)
    assert labels.shape == (2, 1000)
    assert float(labels[0, 3]) == pytest.approx(positive) == float(labels[1, 999])
    assert float(labels[0, 0]) == pytest.approx(negative)
    torch.testing.assert_close(labels.sum(dim=1), torch.ones(2))


def test_loss_equals_pytorchs() -> None:
    method = LabelSmoothing("label_smoothing", LabelSmoothing.Config(smoothing=0.1))
    loss = method.loss(lambda outputs, targets: F.cross_entropy(outputs, targets["labels"]))
    outputs, targets = torch.randn(8, 10), {"labels": torch.arange(8)}
    expected = F.cross_entropy(outputs, targets["labels"], label_smoothing=0.1)
    torch.testing.assert_close(loss(outputs, targets), expected)
    assert targets["labels"].equal(torch.arange(8))  # accuracy still sees the hard labels


def test_a_benchmark_without_class_labels_is_refused() -> None:
    method = LabelSmoothing("label_smoothing", LabelSmoothing.Config(smoothing=0.1))
    with pytest.raises(UserError, match="no class labels"):
        method.loss(lambda outputs, targets: outputs)((torch.zeros(1),), {"labels": torch.zeros(1)})
