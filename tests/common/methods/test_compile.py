"""Compile: the same numbers, copies that stay plain, no silent fall back."""

import copy

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.methods import compile
from common.methods.compile import compile_model, compile_options, missing_compiler, remove_batch_counters
from tests.common.methods.one_step import EXACT, assert_same_step, network


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[pytest.mark.slow, pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())],
        ),
    ],
)
def test_a_step_is_that_of_the_plain_model(backend):
    model, plain = network(), network()
    compile_model(model, "default", backend=backend)
    for num_images in (4, 7):
        assert_same_step(model, plain, torch.randn(num_images, 3, 9, 7, dtype=torch.float64))


def test_without_counters_of_batches_a_compiled_step_is_the_same():
    model, plain = network(), network()
    remove_batch_counters(model)
    compile_model(model, "default", backend="aot_eager")
    images = torch.randn(4, 3, 9, 7, dtype=torch.float64)
    losses = [each(images).square().mean() for each in (model, plain)]
    torch.testing.assert_close(*losses, **EXACT)
    for loss in losses:
        loss.backward()
    gradients = ([parameter.grad for parameter in each.parameters()] for each in (model, plain))
    torch.testing.assert_close(*gradients, **EXACT)
    state = plain.state_dict()
    assert state.pop("1.num_batches_tracked") == 1
    torch.testing.assert_close(model.state_dict(), state, **EXACT)
    for earlier in (dict(model.state_dict()), plain.state_dict()):
        model.load_state_dict(earlier)
        assert "1.num_batches_tracked" not in model.state_dict()
    with pytest.raises(RuntimeError, match="other"):
        model.load_state_dict(state | {"other": state["1.bias"]})


def test_a_mean_over_all_batches_keeps_its_counter():
    norm = nn.BatchNorm2d(3, momentum=None)
    remove_batch_counters(norm)
    norm(torch.randn(2, 3, 4, 4))
    assert norm.num_batches_tracked == 1


def test_a_copy_of_a_compiled_model_can_be_evaluated_and_names_its_weights_alike():
    model, images = network(), torch.randn(2, 3, 9, 7, dtype=torch.float64)
    compile_model(model, "default", backend="aot_eager")
    model(images)
    average = copy.deepcopy(model)
    assert list(average.state_dict()) == list(network().state_dict())
    torch.testing.assert_close(average(images), model(images))


@pytest.mark.parametrize("options", [{"no_such": 1}, {"combo_kernels": 1}])
def test_wrong_options_are_refused_before_anything_is_compiled(options):
    compile_options("default", "inductor", {"combo_kernels": True})
    with pytest.raises(UserError, match="options of torch.compile: Unexpected"):
        compile_options("default", "inductor", options)


@torch._dynamo.config.patch(recompile_limit=8)  # restored with it
def test_too_many_shapes_stop_the_run_instead_of_running_eagerly(monkeypatch):
    monkeypatch.setattr(compile, "MAX_SHAPES", 4)

    class Model(nn.Module):  # torch 2.11 never compiles a module of torch.nn that no other class calls
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows + 1

    model = Model()
    compile_model(model, "default", backend="aot_eager")
    with pytest.raises(Exception, match="limit"):
        for num_rows in range(2, 9):
            model(torch.ones(num_rows, 6))
