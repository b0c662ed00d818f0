"""Every method refuses, in its own name, what it cannot work with: one table each of settings and models."""

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.methods.ema import copy_model, ema_smoothing, update_average
from common.methods.label_smoothing import smooth_labels
from common.methods.layer_freezing import freeze_layers
from common.repository import available_methods
from common.training.load import load_config
from common.training.registry import kind_of
from image_classification.methods.colout import drop_lines
from image_classification.methods.progressive_crops import crops_by_epoch
from language_bert.methods.alibi import apply_alibi
from language_bert.methods.fused_qkv import fuse_qkv
from language_bert.methods.gated_linear_units import apply_gated_linear_units
from language_bert.model import PackedBert
from tests.language_bert.test_parity import make_model

BENCHMARKS = {"resnet": "image_classification", "bert": "language_bert"}
MODULES = available_methods("image_classification") | available_methods("language_bert")
SHORT = ("max_duration=20ba", "evaluate_every=5ba", "schedule.warmup=2ba")
COMPILED = "methods.compile={mode: default}"
EMA = "methods.ema={half_life_steps: 4, every_steps: 2}"
SAM = "sam={every_steps: 10}"
RESIZING = "progressive_resizing={finetune_fraction: 0.2, size_increment_px: 4, interpolation: nearest, "
CROPS = "progressive_crops"


def load(where, settings):
    benchmark, configuration, size = where.split()
    return load_config(BENCHMARKS[benchmark], configuration, size=size, settings=settings)


@pytest.mark.parametrize(
    ("where", "method", "settings", "message"),
    [
        ("resnet baseline mini", f"{EMA[8:-1]}, first_step: 999}}", (), "first_step: .*step 1000 of 352"),
        ("resnet baseline mini", EMA[8:].replace("2}", "20}"), SHORT, "every_steps: .*20 of 20"),
        ("bert baseline full", "position_rows={trained_rows: 512}", (), "trained_rows: leaves none of 512"),
        ("resnet baseline full", "scale_schedule={ratio: 1.001}", (), "max_duration stays 90ep"),
        # what scale_schedule and fixres set is known to the others, wherever they stand
        (
            "resnet baseline mini",
            f"{EMA[8:-1]}, first_step: 200}}",
            ("methods.scale_schedule={ratio: 0.5}",),
            "first_step: .*step 200 of 176",
        ),
        (
            "resnet baseline mini",
            "progressive_crops={sizes_px: [56, 112], epochs: [4, 4]}",
            ("methods.fixres={train_crop_px: 84, evaluation_resize_px: 112}",),
            "last size is 112, but train_crop_px is 84",
        ),
        ("resnet baseline mini", "sam={every_steps: 353}", (), "every_steps: the training has 352 steps"),
        ("resnet baseline mini", "selective_backprop={start: 0.9}", (), "start: must lie before end"),
        ("resnet baseline mini", "selective_backprop={whole_every: 1}", (), "leaves no step"),
        ("resnet baseline mini", "selective_backprop={}", (COMPILED,), "differ .*methods.compile=false"),
        ("resnet baseline mini", "layer_freezing={}", (COMPILED,), "differ .*methods.compile=false"),
        ("resnet baseline mini", "stochastic_depth={}", (COMPILED,), "differ .*methods.compile=false"),
        *(
            (
                "resnet baseline mini",
                SAM,
                (f"methods.selective_backprop={{whole_every: {n}}}",),
                "second pass",
            )
            for n in (0, 3, 20)
        ),
        ("resnet baseline mini", "swa={start: 0.9, every: 12ba}", SHORT, "every: training ends before"),
        ("resnet baseline mini", "swa={every: 1ep}", SHORT, "every: training ends before"),
        ("resnet baseline mini", "swa={every: 1ba}", (*SHORT, EMA), "only one average"),
        ("resnet baseline mini", "alternating_flip={}", (), "flip_probability is 0"),
        *(
            ("resnet baseline mini", f"{name}={{}}", (f"data.loader={loader}",), f"'{loader}'")
            for name in ("randaugment", "augmix")
            for loader in ("dali", "resident")
        ),
        (
            "resnet optimized mini",
            "fixres.train_crop_px=84",
            ("data.train_crop_px=84", "data.evaluation_resize_px=112"),
            "have these sizes already",
        ),
        ("resnet baseline mini", RESIZING + "initial_scale: 0.999, delay_fraction: 0.4}", (), "full size"),
        ("resnet baseline mini", RESIZING + "initial_scale: 0.5, delay_fraction: 0.9}", (), "some epochs"),
        ("resnet optimized mini", f"{CROPS}.epochs=[1, 2]", (), "3 epochs .*has 4"),
        ("resnet optimized mini", f"{CROPS}.epochs=[4]", (), "each of sizes_px"),
        (
            "resnet optimized mini",
            f"{CROPS}.sizes_px=[56, 96]",
            (),
            "last size is 96, but train_crop_px is 84",
        ),
        ("resnet optimized mini", f"{CROPS}.epochs=[1, 3]", ("methods.scale_schedule.ratio=0.75",), "has 6"),
        ("bert baseline full", "alibi={}", (), "the starting weights were trained without it"),
        ("bert baseline full", "gated_linear_units={}", (), "the starting weights were trained without it"),
        ("bert baseline mini", "seq_length_warmup={}", (COMPILED,), "differ .*methods.compile=false"),
        (
            "bert baseline mini",
            "seq_length_warmup={how: segment}",
            ("model.next_sentence=true",),
            "no next sentence",
        ),
        ("bert baseline mini", "seq_length_warmup={min_length: 160}", (), "min_length: must be less than"),
        (
            "bert baseline mini",
            "fp8={}",
            ("methods.gated_linear_units={}", "model.num_hidden_layers=2"),
            "needs gated_linear_units before it",
        ),
    ],
)
def test_settings_are_refused(where, method, settings, message):
    name = method.partition("=")[0].partition(".")[0]
    with pytest.raises(UserError, match=rf"^methods\.{name}\b.*{message}"):
        load(where, [f"methods.{method}", *settings])


def test_sizes_that_a_method_sets_are_checked_like_those_of_a_file():
    for setting in (
        "methods.fixres={train_crop_px: 84, evaluation_resize_px: 96}",
        "data.evaluation_crop_px=128",
    ):
        with pytest.raises(UserError, match="data: evaluation_crop_px must be at most evaluation_resize_px"):
            load("resnet baseline mini", [setting])


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("resnet baseline mini", [f"methods.{SAM}", "methods.selective_backprop={}"]),
        ("resnet baseline mini", [f"methods.{SAM}", "methods.selective_backprop={whole_every: 5}"]),
        ("bert baseline mini", ["methods.alibi={}", "methods.gated_linear_units={}"]),
    ],
)
def test_settings_that_fit_are_accepted(where, settings):
    load(where, settings)


LINEAR, WITHOUT_BIAS = (nn.Sequential(nn.Linear(2, 2, bias=has_bias)) for has_bias in (True, False))
CONVOLUTION = nn.Sequential(nn.Conv2d(3, 600, 1))


def make_packed():
    return PackedBert(make_model(False))


@pytest.mark.parametrize(
    ("method", "settings", "model", "message"),
    [
        ("channels_last", {}, LINEAR, "no 2-d convolution"),
        ("ghost_batch_norm", {}, LINEAR, "no batch norm"),
        ("low_precision_layernorm", {}, LINEAR, "no LayerNorm"),
        ("mixup", {}, CONVOLUTION, "no linear layer"),
        ("cutmix", {}, CONVOLUTION, "no linear layer"),
        ("binary_cross_entropy", {"smoothing": 0.08}, WITHOUT_BIAS, "no linear layer with a bias"),
        ("blurpool", {"min_channels": 16}, LINEAR, "no strided layer"),
        ("squeeze_excite", {}, CONVOLUTION, "no convolution has 512"),
        ("stochastic_depth", {}, LINEAR, "no residual block"),
        ("zero_gamma", {}, LINEAR, "no residual block"),
        *((name, {}, LINEAR, "needs unpad") for name in ("fused_qkv", "sparse_head", "fp8")),
        *((name, {}, LINEAR, "needs unpad") for name in ("chunked_head", "compile_layers")),
        ("last_layer_subset", {}, LINEAR, r"needs unpad .*NAME\+unpad\+sparse_head\+last_layer_subset"),
        *((name, {}, make_packed, "needs sparse_head") for name in ("chunked_head", "last_layer_subset")),
    ],
)
def test_models_are_refused(method, settings, model, message):
    kind = kind_of(method, MODULES[method])
    with pytest.raises(UserError, match=rf"^methods\.{method}\b.*: {message}"):
        kind(method, kind.Config(**settings)).model(model() if model is make_packed else model)


def test_an_optimizer_without_vectors_is_refused():
    kind = kind_of("no_norm_decay", MODULES["no_norm_decay"])
    optimizer = torch.optim.SGD(nn.Linear(2, 2, bias=False).parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"^methods\.no_norm_decay: no parameter of one dimension"):
        kind("no_norm_decay", kind.Config()).optimizer(optimizer)


@pytest.mark.parametrize(
    "call",
    [
        lambda: drop_lines(torch.zeros(1, 3, 8, 8), 15),
        lambda: smooth_labels(torch.zeros(1, dtype=torch.int64), 10, -0.1),
        lambda: freeze_layers(nn.Linear(1, 1), 50),
        lambda: update_average(copy_model(LINEAR), LINEAR, 90),
    ],
    ids=["drop_lines", "smooth_labels", "freeze_layers", "update_average"],
)
def test_a_share_in_percent_is_refused_by_the_plain_function(call, request):
    with pytest.raises(UserError, match=rf"^{request.node.callspec.id}: a share of .* expected 0 to 1"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda steps=steps: ema_smoothing(*steps), "ema_smoothing: .* positive")
            for steps in ((0, 1), (9, -1))
        ),
        (lambda: update_average(LINEAR, CONVOLUTION, 0.9), "update_average: .* not of this model"),
        *(
            (lambda crops=crops: crops_by_epoch(*crops), "crops_by_epoch: each size needs")
            for crops in (([], []), ([96], [1, 2]), ([96, 128], [2, 0]))
        ),
        (
            lambda: apply_gated_linear_units(make_model(False), round_to=0),
            "apply_gated_linear_units: .* positive",
        ),
    ],
)
def test_arguments_are_refused_by_the_plain_function(call, message):
    with pytest.raises(UserError, match=f"^{message}"):
        call()


@pytest.mark.parametrize("function", [apply_alibi, apply_gated_linear_units, fuse_qkv])
def test_a_second_call_and_another_model_are_refused_by_the_plain_function(function):
    model = make_packed()
    function(model)
    for wrong, message in ((model, "has been through it"), (LINEAR, "is not|needs unpad")):
        with pytest.raises(UserError, match=f"^{function.__name__}: .*({message})"):
            function(wrong)
