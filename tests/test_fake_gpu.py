"""A step and an evaluation of every configuration at full size on tensors that say they lie on a GPU.

They have no values: code that asks for one (`.item()`, a condition, a shape that depends on data), so that a
GPU's host would wait, fails. So does an operation on tensors of two devices, or of a type that a kernel does
not take. Not covered: the backward pass, which needs a real device; messages between ranks; compiled
code; Triton's kernels.
"""

import dataclasses
from functools import partial, reduce

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from common.config.division import OPEN
from common.repository import benchmark_module, benchmarks, configurations
from common.training import step as training
from common.training.load import load_config
from common.training.method import Batch
from common.training.step import Training

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # the copy of an average
GPU = torch.device("cuda", 0)
FULL = [(benchmark, name) for benchmark in benchmarks() for name in configurations(benchmark)]
NOT_COMPILED = ("compile", "compile_layers")
PLAIN = ("colout", "cutmix", "mixup", "no_norm_decay", "squeeze_excite", "stochastic_depth", "zero_gamma")
OF_RESNET = ["ghost_batch_norm={samples: 2}", "layer_freezing={start: 0}", "sam={every_steps: 1}"]
OF_RESNET += ["swa={start: 0, every: 1ba}", *(f"{name}={{}}" for name in PLAIN)]
OFF_EVERYWHERE = [  # but for alibi, which needs flash-attn, and selective_backprop, which moves batches
    *(("image_classification", "baseline", [f"methods.{method}"]) for method in OF_RESNET),
    ("language_bert", "optimized", ["methods.gated_linear_units={}", "model.start=random"]),
    ("language_bert", "optimized", ["methods.seq_length_warmup={}"]),
    ("language_bert", "baseline", ["optimizer.name=lamb"]),
    ("image_classification", "baseline", ["optimizer.name=lars"]),
    ("image_classification", "baseline", ["optimizer.name=lamb", "precision=fp16"]),
]


def on_gpu(mode, value):
    """Return a value with its tensors replaced by fake ones on the GPU."""
    if isinstance(value, Tensor):
        with mode:
            return (value if isinstance(value, FakeTensor) else mode.from_tensor(value)).to(GPU)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: on_gpu(mode, getattr(value, name)) for name in names})
    if isinstance(value, dict):
        return {name: on_gpu(mode, part) for name, part in value.items()}
    return type(value)(on_gpu(mode, part) for part in value) if isinstance(value, tuple) else value


def to_device(mode, batch, device):
    """Stand in for `to_device` of common.training.step."""
    assert device == GPU
    return on_gpu(mode, batch)


def moved(mode, module, *args, **named):
    """Stand in for `Module.to`: torch cannot exchange parameters for fake ones."""
    target = args[0] if args else None
    if GPU in (target, getattr(target, "device", None)):
        known = {}  # a parameter may stand in two places
        for each in module.modules():
            for name, value in each._parameters.items():
                if value is not None:
                    on = known.setdefault(id(value), nn.Parameter(on_gpu(mode, value.detach())))
                    each._parameters[name] = on
            each._buffers = {name: on_gpu(mode, value) for name, value in each._buffers.items()}
    return module


def on_host(function):
    """Return the function for a loader's batches, which have values."""

    def called(*args):
        with unset_fake_temporarily():
            return function(*args)

    return called


@pytest.fixture
def mode(monkeypatch):
    """Fake tensors, and answers in place of a driver's."""
    mode = FakeTensorMode()
    monkeypatch.setattr(training, "to_device", partial(to_device, mode))
    monkeypatch.setattr(nn.Module, "to", lambda module, *args, **named: moved(mode, module, *args, **named))
    monkeypatch.setattr(Training, "prepare_batch", on_host(Training.prepare_batch))
    monkeypatch.setattr(Batch, "parts", on_host(Batch.parts))
    for kind in (benchmark_module(benchmark).Benchmark for benchmark in benchmarks()):
        monkeypatch.setattr(kind, "num_targets", on_host(kind.num_targets))
    monkeypatch.setattr(FakeTensorMode, "__deepcopy__", lambda self, memo: self, raising=False)
    answers = [
        (torch, "_fused_sgd_", None),  # has no fake form
        (torch.cuda, "current_device", GPU.index),
        (torch.cuda, "get_device_capability", (9, 0)),
        (torch.cuda, "is_bf16_supported", True),
        (torch.cuda.amp.common, "amp_definitely_not_available", False),
        (torch.backends.cudnn, "version", 91000),
    ]
    for module, name, answer in answers:
        monkeypatch.setattr(module, name, lambda *args, answer=answer, **named: answer)
    return mode


def built(benchmark, name, mode, monkeypatch, *settings):
    """Return a training on the GPU, and the first and the last of its synthetic batches."""
    on = load_config(benchmark, name, size="full", settings=[]).config.methods
    settings = [OPEN, "global_batch_size=4", "micro_batch_size=4", *settings]
    settings += [f"methods.{method}=false" for method in NOT_COMPILED if method in on]
    settings += ["methods.ema.every_steps=1"] if "ema" in on else []
    settings += ["model.num_hidden_layers=3"] if benchmark == "language_bert" else []  # all are alike
    config = load_config(benchmark, name, size="full", settings=settings).config
    kind = benchmark_module(benchmark).Benchmark
    monkeypatch.setattr(kind, "device", GPU)
    run = Training(config, kind(config, seed=0), seed=0)
    batches = list(run.benchmark.synthetic_batches())
    with mode:
        run.build(from_scratch=True)
    run.replica = run.model
    assert {value.device for value in run.model.state_dict().values()} == {GPU}

    def backward(loss):
        assert loss.device == GPU and loss.ndim == 0 and loss.dtype == torch.float32
        for parameter in run.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    monkeypatch.setattr(Tensor, "backward", backward)
    return run, [batches[0], batches[-1]]


def doubled(batch):
    """Return a batch that holds every sample twice."""
    twice = [
        {name: torch.cat([value] * 2) for name, value in part.items()}
        for part in (batch.inputs, batch.targets)
    ]
    return dataclasses.replace(batch, inputs=twice[0], targets=twice[1], num_samples=2 * batch.num_samples)


def train(run, batches, mode):
    """Take two steps on each batch, then evaluate one."""
    with mode:
        for step, batch in enumerate([*batches, *batches]):
            loss = run.train_step(batch, step)
            assert loss.device == GPU and not loss.requires_grad
        model = reduce(lambda used, method: method.evaluation_model(used), run.methods, run.model)
        model.eval()
        evaluated = run.prepare_batch(batches[0], None)
        with torch.no_grad(), run.autocast(run.config.evaluation_precision):
            outputs = model(**evaluated.inputs)
        counts = run.benchmark.count_correct(outputs, evaluated.targets)
    assert all(count.device == GPU and count.ndim == 0 for count in counts)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(("benchmark", "name"), FULL)
def test_nothing_in_a_step_or_an_evaluation_waits_for_the_gpu(benchmark, name, num_parts, mode, monkeypatch):
    run, batches = built(benchmark, name, mode, monkeypatch, f"micro_batch_size={4 // num_parts}")
    assert run.num_micro_batches == num_parts and run.scaler.is_enabled() == (run.config.precision == "fp16")
    train(run, batches if num_parts == 1 else list(map(doubled, batches)), mode)


@pytest.mark.parametrize(("benchmark", "name", "settings"), OFF_EVERYWHERE)
def test_no_method_or_optimizer_waits_for_the_gpu(benchmark, name, settings, mode, monkeypatch):
    train(*built(benchmark, name, mode, monkeypatch, *settings), mode)


def test_a_value_that_is_asked_for_is_noticed(mode, monkeypatch):
    run, batches = built("image_classification", "baseline", mode, monkeypatch)
    plain = run.loss
    run.loss = lambda outputs, targets: plain(outputs, targets) * (1 if outputs.max() > 0 else 2)
    with mode, pytest.raises(DataDependentOutputException):
        run.train_step(batches[0], 1)
