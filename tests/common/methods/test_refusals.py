"""Every method refuses, in its own name, what it cannot work with."""

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.repository import available_methods
from common.training.load import load_config
from common.training.registry import kind_of
from language_bert.model import PackedBert
from tests.language_bert.test_parity import make_model

MODULES = available_methods("image_classification") | available_methods("language_bert")
SHORT = ("max_duration=20ba", "evaluate_every=5ba", "schedule.warmup=2ba")
COMPILED = "methods.compile={mode: default}"
SAM = "methods.sam={every_steps: 10}"


@pytest.mark.parametrize(
    ("where", "method", "settings", "message"),
    [
        ("resnet full", "ema={half_life_steps: 4, every_steps: 2, first_step: 1000000}", (), "not before"),
        ("resnet full", "scale_schedule={ratio: 1.001}", (), "max_duration stays 90ep"),
        ("resnet mini", "selective_backprop={start: 0.9}", (), "start: must lie before end"),
        ("resnet mini", "selective_backprop={whole_every: 1}", (), "leaves no step"),
        ("resnet mini", "selective_backprop={}", (COMPILED,), "differ .*methods.compile=false"),
        ("resnet mini", "layer_freezing={}", (COMPILED,), "differ .*methods.compile=false"),
        ("resnet mini", SAM[8:], ("methods.selective_backprop={whole_every: 0}",), "second pass"),
        ("resnet mini", SAM[8:], ("methods.selective_backprop={whole_every: 3}",), "second pass"),
        ("resnet mini", SAM[8:], ("methods.selective_backprop={whole_every: 20}",), "second pass"),
        ("resnet mini", "swa={start: 0.9, every: 12ba}", SHORT, "every: training ends before"),
        ("resnet mini", "swa={every: 1ep}", SHORT, "every: training ends before"),
        (
            "resnet mini",
            "swa={every: 1ba}",
            (*SHORT, "methods.ema={half_life_steps: 4, every_steps: 2}"),
            "only one average",
        ),
        ("bert full", "alibi={}", (), "the starting weights were trained without it"),
        ("bert full", "gated_linear_units={}", (), "the starting weights were trained without it"),
        ("bert mini", "seq_length_warmup={}", (COMPILED,), "differ .*methods.compile=false"),
        ("bert mini", "seq_length_warmup={how: segment}", ("model.next_sentence=true",), "no next sentence"),
        ("bert mini", "seq_length_warmup={min_length: 161}", (), "min_length is more than"),
        (
            "bert mini",
            "fp8={}",
            ("methods.gated_linear_units={}", "model.num_hidden_layers=2"),
            "needs gated_linear_units before it",
        ),
    ],
)
def test_settings_are_refused(where, method, settings, message):
    benchmark, size = where.split()
    benchmark = {"resnet": "image_classification", "bert": "language_bert"}[benchmark]
    name = method.partition("=")[0]
    with pytest.raises(UserError, match=rf"^methods\.{name}\b.*{message}"):
        load_config(benchmark, "baseline", size=size, settings=[f"methods.{method}", *settings])


@pytest.mark.parametrize(
    ("benchmark", "settings"),
    [
        ("image_classification", [SAM, "methods.selective_backprop={}"]),
        ("image_classification", [SAM, "methods.selective_backprop={whole_every: 5}"]),
        ("language_bert", ["methods.alibi={}", "methods.gated_linear_units={}"]),
    ],
)
def test_settings_that_fit_are_accepted(benchmark, settings):
    load_config(benchmark, "baseline", size="mini", settings=settings)


def make_packed():
    return PackedBert(make_model(False))


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("channels_last", lambda: nn.Linear(2, 2), "no 2-d convolution"),
        ("ghost_batch_norm", lambda: nn.Linear(2, 2), "no batch norm"),
        ("low_precision_layernorm", lambda: nn.Linear(2, 2), "no LayerNorm"),
        *((name, lambda: nn.Linear(2, 2), "needs unpad") for name in ("fused_qkv", "sparse_head", "fp8")),
        *((name, lambda: nn.Linear(2, 2), "needs unpad") for name in ("chunked_head", "compile_layers")),
        ("last_layer_subset", lambda: nn.Linear(2, 2), "needs unpad"),
        *((name, make_packed, "needs sparse_head") for name in ("chunked_head", "last_layer_subset")),
    ],
)
def test_models_are_refused(name, make, message):
    kind = kind_of(name, MODULES[name])
    with pytest.raises(UserError, match=rf"^methods\.{name}: {message}"):
        kind(name, kind.Config()).model(make())


def test_an_optimizer_without_vectors_is_refused():
    kind = kind_of("no_norm_decay", MODULES["no_norm_decay"])
    optimizer = torch.optim.SGD(nn.Linear(2, 2, bias=False).parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"^methods\.no_norm_decay: no parameter of one dimension"):
        kind("no_norm_decay", kind.Config()).optimizer(optimizer)
