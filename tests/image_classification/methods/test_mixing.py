"""Methods that change batches: their results, the labels of the losses, evaluation untouched."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.methods.label_smoothing import LabelSmoothing
from common.training.method import Batch, Progress
from image_classification.methods.binary_cross_entropy import BinaryCrossEntropy
from image_classification.methods.colout import Colout, drop_lines
from image_classification.methods.cutmix import Cutmix, cut_mix
from image_classification.methods.mixup import Mixup, mix_up
from image_classification.methods.progressive_resizing import ProgressiveResizing, image_size_px

RANDOM = (Mixup, Cutmix, Colout)
RESIZING = {"initial_scale": 0.5, "delay_fraction": 0.4, "finetune_fraction": 0.2, "size_increment_px": 4}
SETTINGS = {ProgressiveResizing: RESIZING | {"interpolation": "nearest"}}
METHODS = (*RANDOM, ProgressiveResizing)


def batch(num_samples=4, size_px=12):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(num_samples, 3, size_px, size_px, dtype=torch.float64, generator=generator)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.tensor([2, 0, 1, 4])[:num_samples]
    return Batch(inputs={"x": images}, targets={"labels": labels}, num_samples=num_samples)


def at(step, seed=7):
    return Progress(step=step, num_steps=100, epoch=0, num_epochs=1, seed=seed)


def built(kind, **settings):
    method = kind(kind.__name__.lower(), kind.Config(**SETTINGS.get(kind, {}) | settings))
    method.model(nn.Linear(2, 5))
    return method


def test_mixed_images_and_labels_are_the_same_weighted_mean():
    given = batch()
    found = built(Mixup, alpha=0.5).batch(given, at(3))
    labels = found.targets["labels"]
    assert labels.shape == (4, 5) and labels.dtype == torch.float32
    torch.testing.assert_close(labels.sum(dim=1), torch.ones(4))
    weight = float(labels[0, 2])  # of sample 0, whose class is 2; it meets the last one
    assert 0 < weight < 1
    images = given.inputs["x"]
    expected = torch.stack([weight * images[n] + (1 - weight) * images[n - 1] for n in range(4)])
    torch.testing.assert_close(found.inputs["x"], expected, atol=1e-6, rtol=0)
    one_hot = F.one_hot(given.targets["labels"], 5).float()
    expected = torch.stack([weight * one_hot[n] + (1 - weight) * one_hot[n - 1] for n in range(4)])
    torch.testing.assert_close(labels, expected)


def test_weights_have_the_moments_of_their_distribution():
    labels, images = torch.tensor([0, 1]), torch.zeros(2, 1, 1, 1)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        drawn = [mix_up(images, labels, num_classes=2, alpha=0.2)[1][0, 0] for _ in range(2000)]
    weights = torch.stack(drawn).double()
    assert float(weights.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(weights.var()) == pytest.approx(1 / (4 * (2 * 0.2 + 1)), abs=0.01)  # of Beta(a, a)


def test_the_foreign_rectangle_has_the_area_that_the_labels_say():
    for step in range(20):
        given = batch()
        found = built(Cutmix).batch(given, at(step))
        images = given.inputs["x"]
        foreign = (found.inputs["x"] != images).any(dim=1)
        share = float(foreign[0].double().mean())
        assert all(torch.equal(foreign[n], foreign[0]) for n in range(4))
        rows, columns = foreign[0].any(dim=1), foreign[0].any(dim=0)
        assert torch.equal(foreign[0], rows[:, None] & columns)  # a rectangle
        torch.testing.assert_close(
            found.inputs["x"], torch.where(foreign[:, None], images.roll(1, 0), images), atol=0, rtol=0
        )
        labels = found.targets["labels"].double()
        assert float(labels[0, 2]) == pytest.approx(1 - share, abs=1e-6)
        assert float(labels[0, 4]) == pytest.approx(share, abs=1e-6)  # the class of the last sample


def test_dropped_lines_leave_the_others_in_order():
    lines = torch.arange(40.0, dtype=torch.float64)
    images = (100 * lines[:, None] + lines).expand(2, 3, 40, 40)
    found = drop_lines(images, 0.15)
    assert found.shape == (2, 3, 34, 34)
    rows, columns = found[0, 0, :, 0].div(100).floor(), found[0, 0, 0] % 100
    assert (rows.diff() > 0).all() and (columns.diff() > 0).all()
    assert torch.equal(found, (100 * rows[:, None] + columns).expand(2, 3, 34, 34))
    assert not torch.equal(rows, columns)


def test_resizing_changes_at_epoch_borders():
    method, sizes = built(ProgressiveResizing), []
    for step in range(0, 280, 5):  # ten steps an epoch
        progress = Progress(step=step, num_steps=280, epoch=step // 10, num_epochs=28)
        sizes.append(method.batch(batch(size_px=176), progress).inputs["x"].shape[-1])
    assert sizes == [image_size_px(number // 2, 28, 176) for number in range(56)]


@pytest.mark.parametrize("kind", RANDOM)
def test_what_is_drawn_depends_on_seed_and_step_alone(kind):
    method, given = built(kind), batch()
    before = torch.get_rng_state()
    first = method.batch(given, at(3)).inputs["x"]
    assert torch.equal(torch.get_rng_state(), before)  # dropout draws what it would have drawn
    torch.rand(5)
    assert torch.equal(built(kind).batch(given, at(3)).inputs["x"], first)
    for other in (at(4), at(3, seed=8)):
        found = method.batch(given, other).inputs["x"]
        assert found.shape == first.shape and not torch.equal(found, first)


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_and_type_of_a_batch_stay(kind, dtype):
    given = batch()
    images = given.inputs["x"].to(dtype).contiguous(memory_format=torch.channels_last)
    given = Batch(inputs={"x": images}, targets=given.targets, num_samples=4)
    found = built(kind).batch(given, at(0)).inputs["x"]
    assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", METHODS)
def test_evaluation_sees_batches_as_they_are(kind):
    given = batch()
    assert built(kind).batch(given, None) is given


@pytest.mark.parametrize("mix", [mix_up, cut_mix])
def test_losses_of_mixed_labels_are_the_mixed_losses(mix):
    """Every loss here is linear in its targets: the mixed one is the mean of two plain ones."""
    given = batch()
    labels = given.targets["labels"]
    _, mixed = mix(given.inputs["x"], labels, num_classes=5)
    weight = float(mixed[0, 2])
    torch.manual_seed(0)
    outputs = torch.randn(4, 5, dtype=torch.float64)
    smoothing = LabelSmoothing("label_smoothing", LabelSmoothing.Config(smoothing=0.1))
    binary = BinaryCrossEntropy("binary_cross_entropy", BinaryCrossEntropy.Config(smoothing=0.08))
    losses = [
        lambda outputs, targets: F.cross_entropy(outputs, targets["labels"]),
        smoothing.loss(lambda outputs, targets: F.cross_entropy(outputs, targets["labels"].double())),
        binary.loss(lambda outputs, targets: pytest.fail("replaced")),
    ]
    for loss in losses:
        own, other = (loss(outputs, {"labels": each}) for each in (labels, labels.roll(1)))
        expected = weight * own + (1 - weight) * other
        torch.testing.assert_close(loss(outputs, {"labels": mixed.double()}), expected, atol=1e-6, rtol=0)
