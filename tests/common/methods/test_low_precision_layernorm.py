"""LayerNorm in low precision: its type under autocast, its numbers against float64, parameters kept."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from common.methods.low_precision_layernorm import apply_low_precision_layernorm
from common.training.load import load_config


def make_norm():
    torch.manual_seed(0)
    norm = nn.LayerNorm(96, eps=1e-12)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("is_compiled", [False, True])
def test_under_autocast_only_input_and_output_are_rounded(is_compiled):
    """The parameters are no bf16 numbers: rounded as well, they would double the error."""
    norm, hidden = make_norm(), (torch.randn(32, 96) * 3 + 1).bfloat16()
    given, exact = hidden.float().requires_grad_(), hidden.double().requires_grad_()
    expected = F.layer_norm(exact, (96,), norm.weight.double(), norm.bias.double(), 1e-12)
    low = nn.Sequential(norm)
    assert apply_low_precision_layernorm(low) == 1
    torch._dynamo.reset()
    call = torch.compile(low, backend="aot_eager", fullgraph=True) if is_compiled else low
    with torch.autocast("cpu", torch.bfloat16):
        found = call(given)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)
    cotangent = torch.randn(32, 96)
    (found.float() * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    assert norm.weight.grad.dtype == torch.float32 and given.grad.dtype == torch.float32
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=0.05, atol=2**-5)


def test_on_a_gpu_only_training_rounds_the_parameters(monkeypatch):
    """An evaluation is never compiled; fake tensors stand for those of a GPU."""
    taken, plain = [], F.layer_norm

    def layer_norm(input, shape, weight, *others):
        taken.append(weight.dtype)
        return plain(input, shape, weight, *others)

    monkeypatch.setattr(F, "layer_norm", layer_norm)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of autocast, that there is no GPU
        low = nn.Sequential(nn.LayerNorm(96, device="cuda"))
        apply_low_precision_layernorm(low)
        hidden = torch.zeros(4, 96, device="cuda", dtype=torch.bfloat16)
        assert low(hidden).dtype == torch.bfloat16
        with torch.no_grad():
            assert low(hidden).dtype == torch.bfloat16
    assert taken == [torch.bfloat16, torch.float32]


def test_float32_drops_it_and_says_so():
    loaded = load_config("language_bert", "optimized", size="mini", settings=["precision=fp32"])
    assert "low_precision_layernorm" not in loaded.config.methods
    assert [change for change in loaded.changes if "low_precision_layernorm" in change]


def test_without_autocast_it_is_the_plain_one_and_keeps_names_and_parameters():
    plain = nn.Sequential(nn.Linear(96, 96), make_norm())
    low = copy.deepcopy(plain)
    parameters = list(low.parameters())
    apply_low_precision_layernorm(low)
    assert list(low.state_dict()) == list(plain.state_dict())
    assert all(one is other for one, other in zip(low.parameters(), parameters, strict=True))
    hidden = torch.randn(4, 96)
    assert torch.equal(low(hidden), plain(hidden))
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(low, backend="aot_eager", fullgraph=True)(hidden)
        torch.testing.assert_close(compiled, low(hidden))
