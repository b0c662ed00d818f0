"""Muon: singular values, the steps of torch's Muon and AdamW, overflow, saved states, refusals."""

import copy

import pytest
import torch
from torch.optim import AdamW

from common.errors import UserError
from common.training.optim import build_schedule, optimizer_name
from common.training.step import Training
from language_bert.benchmark import Benchmark
from language_bert.methods.muon import MuonAdamW, hidden_matrices, orthogonalize
from language_bert.methods.unpad import unpad
from tests.language_bert.configs import config_of, mini
from tests.language_bert.test_parity import make_model

SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-6}


@pytest.mark.parametrize(
    ("dtype", "iterations"), [(torch.float32, 5), (torch.bfloat16, 5), (torch.float32, 3)]
)
def test_singular_vectors_stay_and_singular_values_become_about_one(dtype, iterations):
    torch.manual_seed(0)
    matrices = [torch.randn(shape) for shape in [(8, 20), (20, 8), (12, 12), (8, 20)]]
    matrices.append(1e-3 * matrices[2])  # their size does not matter
    for matrix, result in zip(matrices, orthogonalize(matrices, dtype, iterations), strict=True):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        inner = left.mT @ result.float() @ right.mT
        assert inner.diagonal().min() > 0.6 and inner.diagonal().max() < 1.3
        off_diagonal = inner - inner.diagonal().diag()
        assert off_diagonal.abs().max() < (1e-4 if dtype == torch.float32 else 0.1)
    torch.testing.assert_close(*orthogonalize([matrices[2], matrices[4]]))


def test_matrices_are_those_of_the_encoder_and_the_transform():
    model = make_model(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = [names[id(matrix)] for matrix in hidden_matrices(model)]
    assert len(chosen) == 6 * len(model.bert.encoder.layer) + 1
    assert all("encoder" in name or "transform" in name for name in chosen)
    assert all(name.endswith("weight") and "LayerNorm" not in name for name in chosen)
    assert [*map(id, hidden_matrices(unpad(model)))] == [*map(id, hidden_matrices(model))]


def make_pair():
    torch.manual_seed(0)
    model = make_model(False).float()
    return model, copy.deepcopy(model)


def set_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_steps_are_those_of_torch():
    """Torch computes in bfloat16 alone, and divides by the norm after rounding."""
    (model, other), (started, _) = make_pair(), make_pair()
    ours = MuonAdamW(
        model.parameters(), hidden_matrices(model), rate_ratio=3.0, dtype=torch.bfloat16, **SETTINGS
    )
    matrices = hidden_matrices(other)
    muon = torch.optim.Muon(matrices, lr=0.03, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    ids = {*map(id, matrices)}
    adamw = AdamW([each for each in other.parameters() if id(each) not in ids], fused=True, **SETTINGS)
    for step in range(5):
        for each in (model, other):
            set_gradients(each, step)
        for optimizer in (ours, muon, adamw):
            optimizer.step()
    for start, one, two in zip(started.parameters(), model.parameters(), other.parameters(), strict=True):
        difference, distance = (one - two).norm(), (two - start).norm()
        assert difference <= (0.02 if id(two) in ids else 0.0) * distance and distance > 0
    assert optimizer_name(ours) == "muon_adamw"


def test_where_all_matrices_are_frozen_the_others_move():
    model, started = make_pair()
    optimizer = MuonAdamW(model.parameters(), hidden_matrices(model), **SETTINGS)
    set_gradients(model, 0)
    for matrix in hidden_matrices(model):
        matrix.grad = None
    optimizer.step()
    for one, start in zip(hidden_matrices(model), hidden_matrices(started), strict=True):
        assert torch.equal(one, start)
    assert not torch.equal(model.cls.predictions.bias, started.cls.predictions.bias)


def test_a_matrix_that_is_not_trained_is_refused():
    model, other = make_pair()
    with pytest.raises(ValueError, match="a matrix is not among the parameters"):
        MuonAdamW(model.parameters(), hidden_matrices(other), **SETTINGS)


def test_a_schedule_scales_both_rates_and_groups_without_decay_stay():
    model = make_model(False)
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    groups = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = MuonAdamW(groups, hidden_matrices(model), rate_ratio=3.0, **SETTINGS)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.1]
    config = mini("optimized_muon")
    build_schedule(optimizer, config.schedule, config.plan())(50)  # half of the warm-up
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.005, 0.005, 0.015])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])


def test_after_an_overflow_nothing_moves_and_nothing_is_kept():
    model, _ = make_pair()
    optimizer = MuonAdamW(model.parameters(), hidden_matrices(model), **SETTINGS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy.deepcopy(model.state_dict())
    for step, is_finite in enumerate((False, True)):
        set_gradients(model, step)
        next(model.parameters()).grad *= 1.0 if is_finite else torch.inf
        scaler.scale(torch.zeros(1))
        scaler.step(optimizer)
        scaler.update()
        now = model.state_dict()
        assert all(torch.equal(now[name], value) for name, value in before.items()) != is_finite
        assert bool(optimizer.state) == is_finite


def test_a_saved_state_goes_on_as_if_nothing_had_happened():
    model, other = make_pair()
    first, second = (
        MuonAdamW(each.parameters(), hidden_matrices(each), **SETTINGS) for each in (model, other)
    )
    set_gradients(model, 0)
    first.step()
    other.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for each, optimizer in ((model, first), (other, second)):
        set_gradients(each, 1)
        optimizer.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def train(*settings):
    config = mini("optimized_muon", *settings)
    training = Training(config, Benchmark(config, seed=0), seed=0)
    training.initialize(warms_up=False)
    return training


def test_the_method_gives_the_matrices_their_own_rate_and_iterations():
    training = train()
    rest, matrices = training.optimizer.param_groups
    assert (rest["lr"], matrices["lr"], matrices["momentum"]) == pytest.approx((0.002, 0.01, 0.9))
    assert training.optimizer.iterations == 3
    assert rest["betas"] == (0.9, 0.98) and len(matrices["params"]) == 5  # one projection for three
    kept = {*map(id, training.model.parameters())}
    assert {id(each) for group in (rest, matrices) for each in group["params"]} == kept


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["optimizer.name=lamb"], "adamw alone, not lamb"),
        (["methods.gated_linear_units={}"], "a method after it replaces layers"),
    ],
)
def test_refusals(settings, what):
    with pytest.raises(UserError, match=what):
        train(*settings)


def test_hyperparameters_differ_in_the_method_alone_and_the_file_says_so():
    one, other = (config_of(name).model_dump() for name in ("optimized", "optimized_muon"))
    differing = {key for key in one if one[key] != other[key]}
    assert differing == {"configuration", "evaluate_from", "methods"}
    assert [*other["methods"]] == [*one["methods"], "muon"]
