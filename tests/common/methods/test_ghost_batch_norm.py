"""Ghost batch norm against one plain batch norm for each group."""

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
    torch.testing.assert_close(model[0].state_dict(), plain.state_dict())
    torch.testing.assert_close(model.eval()(values), plain.eval()(values))


def test_a_last_small_batch_is_one_group():
    torch.manual_seed(0)
    model, plain = nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2)
    apply_ghost_batch_norm(model, 4)
    for size in (7, 4, 3, 2):
        values = torch.randn(size, 2)
        torch.testing.assert_close(model(values), plain(values))
    torch.testing.assert_close(model[0].running_var, plain.running_var)


def test_micro_batches_of_less_than_two_groups_are_refused():
    method = GhostBatchNorm("ghost_batch_norm", GhostBatchNorm.Config(samples=4))
    small, enough = (Batch(inputs={}, targets={}, num_samples=size) for size in (7, 8))
    with pytest.raises(UserError, match="groups of 4 need 8 samples at a time, found 7"):
        method.batch(small, at(0))
    assert method.batch(enough, at(0)) is enough and method.batch(small, None) is small
