"""Ghost batch norm against one plain batch norm for each group."""

from functools import partial

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.methods.ghost_batch_norm import GhostBatchNorm, apply_ghost_batch_norm
from common.training.method import Batch
from tests.common.methods.one_step import at


@pytest.mark.parametrize(
    ("kind", "shape", "groups"),
    [
        (nn.BatchNorm1d, (8, 3), (4, 4)),
        (nn.BatchNorm2d, (11, 3, 4, 5), (6, 5)),
        (nn.BatchNorm3d, (8, 3, 2, 2, 2), (4, 4)),
    ],
)
def test_groups_are_normalized_one_by_one(kind, shape, groups):
    torch.manual_seed(0)
    model, plain = nn.Sequential(kind(3)).double(), kind(3).double()
    nn.init.uniform_(model[0].weight)
    plain.load_state_dict(model[0].state_dict())
    names, weight = list(model.state_dict()), model[0].weight
    assert apply_ghost_batch_norm(model, 4) == 1
    assert list(model.state_dict()) == names and model[0].weight is weight
    values = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    outputs, expected = model(values), torch.cat([plain(group) for group in values.split(groups)])
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(outputs)
    gradients = [torch.autograd.grad(each, values, weight) for each in (outputs, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert model[0].num_batches_tracked == 1


@pytest.mark.parametrize("num_groups", [1, 2, 8])
def test_running_statistics_move_once_a_batch_by_the_momentum(num_groups):
    torch.manual_seed(0)
    model, plain = nn.Sequential(nn.BatchNorm1d(3)).double(), nn.BatchNorm1d(3).double()
    apply_ghost_batch_norm(model, 4)
    five = torch.randn(4 * num_groups, 3, dtype=torch.float64)
    five += 5 - five.mean(dim=0)
    model(five)
    assert model[0].running_mean.tolist() == pytest.approx([0.5] * 3, rel=1e-12)
    plain(five)
    for size in (4 * num_groups, 4 * num_groups + 3, 3):  # groups of unequal sizes too
        values = torch.randn(size, 3, dtype=torch.float64)
        groups = values.tensor_split(max(1, size // 4))
        expected = sum(group.var(dim=0) * len(group) / size for group in groups)
        expected = 0.9 * model[0].running_var + 0.1 * expected
        model(values), plain(values)
        torch.testing.assert_close(model[0].running_mean, plain.running_mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model[0].running_var, expected, rtol=1e-12, atol=1e-12)
    assert model[0].num_batches_tracked == plain.num_batches_tracked == 4
    values = torch.randn(8, 3, dtype=torch.float64)
    means, scale = model[0].running_mean, (model[0].running_var + model[0].eps).sqrt()
    torch.testing.assert_close(model.eval()(values), (values - means) / scale, rtol=1e-12, atol=1e-12)


def test_running_statistics_are_those_of_composer_but_for_the_compounding():
    """Composer 0.7, algorithms/ghost_batchnorm: one plain norm, `momentum / groups` for each chunk."""
    torch.manual_seed(0)
    model, composers = nn.Sequential(nn.BatchNorm2d(3)).double(), nn.BatchNorm2d(3).double()
    apply_ghost_batch_norm(model)
    values = torch.randn(256, 3, 2, 2, dtype=torch.float64) + 5
    composers.momentum /= 8
    expected = torch.cat([composers(chunk) for chunk in values.chunk(8)])
    torch.testing.assert_close(model(values), expected, rtol=1e-12, atol=1e-12)
    assert composers.running_mean.tolist() == pytest.approx([0.48] * 3, rel=0.02)
    assert model[0].running_mean.tolist() == pytest.approx((values.mean(dim=(0, 2, 3)) / 10).tolist())


def test_without_momentum_the_running_statistics_are_plain_means():
    torch.manual_seed(0)
    kind = partial(nn.BatchNorm1d, 3, momentum=None)
    model, plain, untracked = nn.Sequential(kind()), kind(), nn.Sequential(kind(track_running_stats=False))
    apply_ghost_batch_norm(model, 4), apply_ghost_batch_norm(untracked, 4)
    for _ in range(3):
        values = torch.randn(8, 3)
        torch.testing.assert_close(model(values), untracked(values))
        plain(values)
    torch.testing.assert_close(model[0].running_mean, plain.running_mean)
    assert untracked[0].running_mean is None and untracked.eval()(values).shape == (8, 3)


def test_a_norm_with_a_forward_of_its_own_stays():
    class NormAct(nn.BatchNorm1d):
        def forward(self, input):
            return super().forward(input).relu()

    model = nn.Sequential(NormAct(3), nn.BatchNorm1d(3))
    assert apply_ghost_batch_norm(model) == 1 and type(model[0]) is NormAct


def test_micro_batches_of_less_than_two_groups_are_refused():
    method = GhostBatchNorm("ghost_batch_norm", GhostBatchNorm.Config(samples=4))
    small, enough = (Batch(inputs={}, targets={}, num_samples=size) for size in (7, 8))
    with pytest.raises(UserError, match="groups of 4 need 8 samples at a time, found 7"):
        method.batch(small, at(0))
    assert method.batch(enough, at(0)) is enough and method.batch(small, None) is small
