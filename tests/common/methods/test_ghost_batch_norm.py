"""Ghost batch norm against one plain batch norm for each group."""

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.methods.ghost_batch_norm import GhostBatchNorm, apply_ghost_batch_norm
from common.training.method import Batch, Progress


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
    found, expected = model(values), torch.cat([plain(group) for group in values.split(groups)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    mean = values[: groups[0]].transpose(0, 1).flatten(1).mean(dim=1)
    by_hand = found[: groups[0]].transpose(0, 1).flatten(1).mean(dim=1) - plain.bias
    torch.testing.assert_close(by_hand, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    assert mean.abs().max() > 1e-3  # it was not normalized before
    cotangent = torch.randn_like(found)
    gradients = [torch.autograd.grad(each, values, cotangent)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model[0].state_dict()[name], value)
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
    progress = Progress(step=0, num_steps=1, epoch=0, num_epochs=1)
    small, enough = (Batch(inputs={}, targets={}, num_samples=size) for size in (7, 8))
    with pytest.raises(UserError, match="groups of 4 need 8 samples at a time, found 7"):
        method.batch(small, progress)
    assert method.batch(enough, progress) is enough and method.batch(small, None) is small
