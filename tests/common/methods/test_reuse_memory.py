"""reuse_memory: the same bits, and no page that is cleared anew."""

import resource

import pytest
import torch
from torch import nn

from common.methods.reuse_memory import reuse_memory


@pytest.fixture(autouse=True)
def afterwards_as_before():
    yield
    reuse_memory(is_on=False)


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def num_page_faults():
    for _ in range(3):
        torch.ones(4 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(4 << 20)  # 16 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_training_has_the_same_bits():
    plain = train()
    assert reuse_memory()
    assert torch.equal(train(), plain)


def test_memory_that_is_used_again_causes_no_page_faults():
    reuse_memory(is_on=False)
    handed_back = num_page_faults()
    reuse_memory()
    assert num_page_faults() < handed_back / 10
