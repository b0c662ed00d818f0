"""A step and an evaluation of every configuration at full size on tensors that say they lie on a GPU.

They have no values: what asks for one (`.item()`, a condition, a shape that depends on data), where a GPU
would make its host wait, fails. So does an operation on tensors of two devices, or of a type that a kernel
does not take. Not covered: the backward pass, which needs a real device, compiled code and Triton's kernels.
"""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from common import training
from common.config import benchmark_module, configurations, load
from common.training import Training

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # the copy of an average
GPU = torch.device("cuda", 0)
FULL = [
    (benchmark, name)
    for benchmark in ("image_classification", "language_bert")
    for name in configurations(benchmark)
]
NOT_COMPILED = ("compile", "compile_layers")


@pytest.fixture
def mode(monkeypatch):
    """Fake tensors, and what asks for a driver answered for them."""
    mode = FakeTensorMode()

    def on_gpu(value):
        if isinstance(value, Tensor):
            with mode:
                return mode.from_tensor(value).to(GPU)
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            return dataclasses.replace(value, **{name: on_gpu(getattr(value, name)) for name in names})
        return type(value)(map(on_gpu, value)) if isinstance(value, tuple) else value

    def to_device(batch, device):
        assert device == GPU
        parts = (
            {name: on_gpu(each) for name, each in part.items()} for part in (batch.inputs, batch.targets)
        )
        inputs, targets = parts
        return dataclasses.replace(batch, inputs=inputs, targets=targets)

    def prepared(run, batch, progress, real=Training.prepared):
        with unset_fake_temporarily():  # methods work on batches of the loader, on the host
            return real(run, batch, progress)

    monkeypatch.setattr(training, "to_device", to_device)
    monkeypatch.setattr(Training, "prepared", prepared)
    monkeypatch.setattr(nn.Module, "to", lambda module, *args, **named: module)  # it is there already
    monkeypatch.setattr(FakeTensorMode, "__deepcopy__", lambda self, memo: self, raising=False)
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **named: None)  # has no fake form
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    return mode


def built(benchmark, name, mode, monkeypatch, *settings):
    """Return a training on the GPU, and the first and the last of its synthetic batches."""
    on = load(benchmark, name, size="full", settings=[]).config.methods
    settings = [*settings, *(f"methods.{method}=false" for method in NOT_COMPILED if method in on)]
    config = load(benchmark, name, size="full", settings=["global_batch_size=4", *settings]).config
    kind = benchmark_module(benchmark).Benchmark
    monkeypatch.setattr(kind, "device", GPU)
    run = Training(config, kind(config, seed=0), seed=0)
    batches = list(run.benchmark.synthetic_batches())
    with mode, GPU:
        run.build(from_scratch=True)
    run.replica = run.model
    places = {value.device for value in run.model.state_dict().values()}
    assert places == {GPU}

    def backward(loss):
        assert loss.device == GPU and loss.ndim == 0 and loss.dtype == torch.float32
        for parameter in run.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    monkeypatch.setattr(Tensor, "backward", backward)
    return run, [batches[0], batches[-1]]


@pytest.mark.parametrize(("benchmark", "name"), FULL)
def test_nothing_in_a_step_or_an_evaluation_waits_for_the_gpu(benchmark, name, mode, monkeypatch):
    run, batches = built(benchmark, name, mode, monkeypatch)
    with mode:
        for step, batch in enumerate([*batches, *batches], 18):  # 20 steps end here: the average moves
            loss = run.train_step(batch, step)
            assert loss.device == GPU and not loss.requires_grad
        model = run.model
        for method in run.methods:
            model = method.evaluation_model(model)
        model.eval()
        with torch.no_grad(), run.autocast(run.config.evaluation_precision):
            evaluated = run.prepared(batches[0], None)
            outputs = model(**evaluated.inputs)
        counts = run.benchmark.count_correct(outputs, evaluated.targets)
    assert all(count.device == GPU and count.ndim == 0 for count in counts)
    assert run.scaler.is_enabled() == (run.config.precision == "fp16")


def test_a_value_that_is_asked_for_is_noticed(mode, monkeypatch):
    run, batches = built("image_classification", "baseline", mode, monkeypatch)
    plain = run.loss
    run.loss = lambda outputs, targets: plain(outputs, targets) * (1 if outputs.max() > 0 else 2)
    with mode, pytest.raises(DataDependentOutputException):
        run.train_step(batches[0], 1)
