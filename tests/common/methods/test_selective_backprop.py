"""Selective backprop: the selected samples, and a loss that is their mean, however a batch is divided."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.errors import UserError
from common.measure.device_run import build
from common.methods.selective_backprop import SelectiveBackprop, sample_losses, select_samples
from common.training.load import load_config
from common.training.method import Batch
from tests.common.methods.one_step import at


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(self.norm(x))


def built(**settings):
    torch.manual_seed(0)
    method = SelectiveBackprop("selective_backprop", SelectiveBackprop.Config(**settings))
    settings = ["precision=fp32"]
    method.config = load_config("image_classification", "baseline", size="mini", settings=settings).config
    model = method.model(Classifier())
    inputs, labels = torch.randn(10, 4), torch.arange(10) % 3
    return method, model, Batch(inputs={"x": inputs}, targets={"labels": labels}, num_samples=10)


def test_samples_are_drawn_by_the_rank_of_their_loss_without_repetition():
    losses = torch.tensor([3.0, 9.0, 1.0, 7.0, 5.0, 2.0])
    torch.manual_seed(0)
    counts = torch.zeros(6)
    for _ in range(3000):
        kept = select_samples(losses, 1 / 3)
        assert len(kept) == 2 == len(kept.unique())
        counts += F.one_hot(kept, 6).sum(dim=0)
    weights = ((torch.arange(6) + 0.5) / 6).double() ** 2
    first = weights / weights.sum()
    others = [weights.where(torch.arange(6) != i, 0) / (weights.sum() - weights[i]) for i in range(6)]
    expected = (first + first @ torch.stack(others))[losses.argsort().argsort()]
    torch.testing.assert_close(counts.double() / 3000, expected, atol=0.03, rtol=0)


def test_the_least_part_that_may_be_kept_can_be_drawn_from_a_small_batch():
    least = SelectiveBackprop.Config.model_json_schema()["properties"]["keep"]["minimum"]
    assert all(len(select_samples(torch.rand(size), least)) == 1 for size in (1, 2, 3, 32))


def test_losses_are_those_of_each_sample_and_leave_the_model_as_it_was():
    _, model, batch = built()
    model.layer.eval()
    before = model.norm.running_mean.clone()
    losses = sample_losses(model, batch.inputs, batch.targets["labels"])
    assert model.training and model.norm.training and not model.layer.training
    assert torch.equal(model.norm.running_mean, before) and not losses.requires_grad
    logits = model.layer(batch.inputs["x"] / (1 + 1e-5) ** 0.5)
    expected = F.cross_entropy(logits, batch.targets["labels"], reduction="none")
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)


def test_a_batch_is_thinned_out_between_start_and_end_and_pairs_stay_together():
    method, _, batch = built(start=0.2, end=0.6, keep=0.4, whole_every=3)
    for step in range(100):
        found = method.batch(batch, at(step))
        if not 20 <= step < 60 or (step + 1) % 3 == 0:
            assert found is batch
            continue
        assert found.num_samples == len(found.inputs["x"]) == len(found.targets["labels"]) == 4
        for row, label in zip(found.inputs["x"], found.targets["labels"], strict=True):
            (number,) = (batch.inputs["x"] == row).all(dim=1).nonzero().flatten().tolist()
            assert int(batch.targets["labels"][number]) == int(label)
    assert torch.equal(method.batch(batch, at(30)).inputs["x"], method.batch(batch, at(30)).inputs["x"])
    assert method.batch(batch, None) is batch


def test_a_micro_batch_counts_by_the_samples_that_it_had(tmp_path):
    settings = ["global_batch_size=7", "micro_batch_size=4", "precision=fp32", "data.train_crop_px=64"]
    settings += ["methods.selective_backprop={start: 0.0}", "methods.label_smoothing=false"]
    run = build(
        load_config("image_classification", "baseline", size="mini", settings=settings).config, tmp_path
    )
    (method,) = (each for each in run.methods if each.name == "selective_backprop")
    batch, state = run.benchmark.noise(7, 64), copy.deepcopy(run.model.state_dict())
    run.clear_gradients()
    loss = run.forward_backward(batch, 0)
    found = [parameter.grad.clone() for parameter in run.model.parameters()]
    run.model.load_state_dict(state)
    run.clear_gradients()
    expected = 0.0
    for part, num_kept in zip(batch.parts(2), (1, 2), strict=True):
        kept = method.batch(part, run.progress(0))
        assert kept.num_samples == num_kept
        share = F.cross_entropy(run.model(**kept.inputs), kept.targets["labels"]) * part.num_samples / 7
        share.backward()
        expected += share.item()
    run.log.close()
    assert loss.item() == pytest.approx(expected)
    torch.testing.assert_close(found, [parameter.grad for parameter in run.model.parameters()])


def test_samples_without_a_label_each_are_refused():
    method, _, batch = built(start=0.0)
    method.settings = method.settings.model_copy(update={"start": 0.5})
    for labels in (torch.zeros(3), torch.zeros(10, 160, dtype=torch.int64)):
        wrong = Batch(inputs=batch.inputs, targets={"labels": labels}, num_samples=10)
        with pytest.raises(UserError, match="methods.selective_backprop: this benchmark has no label"):
            method.batch(wrong, at(2))  # before it selects anything
