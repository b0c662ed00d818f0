"""LARS and LAMB beside timm's and loops of the published formulas; skipped steps, saved states, Apex."""

import copy
import math
import sys
from types import SimpleNamespace
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from common.config.schema import OptimizerConfig, Plan, ScheduleConfig
from common.errors import UserError
from common.measure import scaling
from common.measure.dry_run import STATES_PER_PARAMETER
from common.methods.no_norm_decay import NoNormDecay
from common.training import optim
from common.training.load import load_config
from common.training.optim import build_optimizer, build_schedule, optimizer_name, schedule_factor, unscale

NUM_STEPS = 20
RATES = [0.02 * (step + 1) if step < 5 else 0.1 * (1 - step / 25) ** 2 for step in range(NUM_STEPS)]
EXACT = {"rtol": 1e-12, "atol": 1e-14}  # float64; sums in another order
SHAPES = [(4, 3), (5,), (2, 3, 2, 2), (3, 2), (3, 3), (2,), (6, 2), (1, 1)]
CHANNELS_LAST, ZERO_WEIGHTS, ZERO_GRADIENTS, NO_GRADIENTS = 2, 3, 4, 6
LARS = {"name": "lars", "epsilon": 0.0, "trust_coefficient": 0.02}
LAMB = {"name": "lamb", "beta2": 0.95, "epsilon": 1e-6}


def config(**changes):
    return OptimizerConfig(**{"learning_rate": 0.1, "weight_decay": 0.01} | changes)


def make_model(dtype=torch.float64):
    """Return parameters of every kind; one has only weights of 0."""
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    values[CHANNELS_LAST] = values[CHANNELS_LAST].to(memory_format=torch.channels_last)
    values[ZERO_WEIGHTS].zero_()
    return nn.ParameterList(map(nn.Parameter, values))


def make_gradients(step, dtype=torch.float64):
    """Return gradients of norms below and above 1; a weight of 0 has a gradient of 0 in the first step."""
    generator = torch.Generator().manual_seed(step)
    size = 0.05 if step % 3 else 1.0
    gradients = [size * torch.randn(shape, dtype=dtype, generator=generator) for shape in SHAPES]
    gradients[CHANNELS_LAST] = gradients[CHANNELS_LAST].to(memory_format=torch.channels_last)
    gradients[ZERO_GRADIENTS].zero_()
    if step == 0:
        gradients[ZERO_WEIGHTS].zero_()
    gradients[NO_GRADIENTS] = None
    return gradients


def train(model, optimizer, steps=range(NUM_STEPS)):
    """Take the steps and return the parameters."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        for parameter, gradient in zip(model, make_gradients(step, model[0].dtype), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in model]


def ratio(above, below):
    return float(above / below) if above > 0 and below > 0 else 1.0


def lars_formula(settings):
    """MXNet's SGDwFASTLARS: the learning rate in the buffer, momentum times its change."""
    values, previous = [parameter.detach().clone() for parameter in make_model()], RATES[0]
    buffers = [torch.zeros_like(value) for value in values]
    for step, rate in enumerate(RATES):
        for value, buffer, gradient in zip(values, buffers, make_gradients(step), strict=True):
            if gradient is None:
                continue
            trust = 1.0
            if value.ndim > 1:
                weight, slope = value.norm(), gradient.norm()
                if weight > 0 and slope > 0:
                    below = slope + settings.weight_decay * weight + settings.epsilon
                    trust = settings.trust_coefficient * weight / below
                gradient = gradient + settings.weight_decay * value
            buffer.mul_(settings.momentum * rate / previous).add_(rate * trust * gradient)
            value -= buffer
        previous = rate
    return values


def lamb_formula(settings):
    """The reference's LAMB: clipped by the norm of all gradients, then Adam, decay, trust ratio."""
    values = [parameter.detach().clone() for parameter in make_model()]
    averages, squares = ([torch.zeros_like(value) for value in values] for _ in range(2))
    beta1, beta2, most = settings.momentum, settings.beta2, settings.max_gradient_norm
    for step, rate in enumerate(RATES):
        gradients = make_gradients(step)
        norm = math.sqrt(sum(float(one.square().sum()) for one in gradients if one is not None))
        for value, average, square, gradient in zip(values, averages, squares, gradients, strict=True):
            if gradient is None:
                continue
            gradient = gradient / max(1.0, norm / (most or math.inf))
            average.mul_(beta1).add_((1 - beta1) * gradient)
            square.mul_(beta2).add_((1 - beta2) * gradient**2)
            unbiased = square / (1 - beta2 ** (step + 1))
            update = average / (1 - beta1 ** (step + 1)) / (unbiased.sqrt() + settings.epsilon)
            if value.ndim > 1:
                update += settings.weight_decay * value
                update *= ratio(value.norm(), update.norm())
            value -= rate * update
    return values


@pytest.mark.parametrize(
    ("formula", "settings"),
    [
        (lars_formula, LARS),
        (lars_formula, LARS | {"momentum": 0.0}),
        (lars_formula, LARS | {"epsilon": 0.5, "weight_decay": 0.2}),
        (lamb_formula, LAMB),
        (lamb_formula, LAMB | {"max_gradient_norm": None, "weight_decay": 0.3}),
        (lamb_formula, LAMB | {"momentum": 0.0, "max_gradient_norm": 1e-4}),
    ],
)
def test_twenty_steps_are_those_of_the_published_formula(formula, settings):
    model, settings = make_model(), config(**settings)
    torch.testing.assert_close(train(model, build_optimizer(model, settings)), formula(settings), **EXACT)


@pytest.mark.parametrize(
    "settings", [LARS, LARS | {"nesterov": True}, LAMB, LAMB | {"max_gradient_norm": None}]
)
def test_twenty_steps_are_those_of_timm(settings):
    timm = pytest.importorskip("timm.optim")
    model, other, settings = make_model(), make_model(), config(**settings)
    groups = [
        {"params": [one for one in other if one.ndim > 1]},
        {"params": [one for one in other if one.ndim < 2], "weight_decay": 0.0},
    ]
    named = {"weight_decay": settings.weight_decay, "eps": settings.epsilon}
    if settings.name == "lars":
        named |= {"trust_coeff": settings.trust_coefficient, "nesterov": settings.nesterov}
        library = timm.Lars(groups, momentum=settings.momentum, **named)
    else:
        named |= {"betas": (settings.momentum, settings.beta2)}
        library = timm.Lamb(groups, max_grad_norm=settings.max_gradient_norm, **named)
    expected = train(other, library)
    torch.testing.assert_close(train(model, build_optimizer(model, settings)), expected, **EXACT)


def take_scaled_step(model, optimizer, scaler, *, overflows, unscales):
    """Take the fourth step under loss scaling, as the training loop does or a loop that does not unscale."""
    scaler.scale(torch.zeros(()))  # starts it
    for parameter, gradient in zip(model, make_gradients(3, torch.float32), strict=True):
        parameter.grad = None if gradient is None else gradient * scaler.get_scale()
    if overflows:
        model[0].grad[0, 0] = torch.inf
    for group in optimizer.param_groups:
        group["lr"] = RATES[3]
    if unscales:
        unscale(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("settings", [LARS, LAMB])
def test_an_overflow_leaves_parameters_and_state_and_the_next_step_is_unscaled(settings, unscales):
    def snapshot():
        kept = [value for values in optimizer.state.values() for value in values.values()]
        return [value.detach().clone() for value in (*model, *kept)]

    model, plain = make_model(torch.float32), make_model(torch.float32)
    optimizer, scaler = (
        build_optimizer(model, config(**settings)),
        torch.amp.GradScaler("cpu", init_scale=4.0),
    )
    train(model, optimizer, range(3))
    before = snapshot()
    take_scaled_step(model, optimizer, scaler, overflows=True, unscales=unscales)
    torch.testing.assert_close(snapshot(), before, rtol=0, atol=0)
    take_scaled_step(model, optimizer, scaler, overflows=False, unscales=unscales)
    assert scaler.get_scale() == 2
    expected = train(plain, build_optimizer(plain, config(**settings)), range(4))
    torch.testing.assert_close([one.detach() for one in model], expected, rtol=0, atol=0)


@pytest.mark.parametrize("overflows", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["sgd", "decoupled_sgd", "adamw", "lars", "lamb"])
def test_an_overflow_in_any_pass_of_a_step_leaves_the_parameters(name, overflows):
    model = make_model(torch.float32)
    before = [one.detach().clone() for one in model]
    optimizer = build_optimizer(model, config(name=name))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for overflow in overflows:
        for parameter, gradient in zip(model, make_gradients(0, torch.float32), strict=True):
            parameter.grad = None if gradient is None else gradient * (torch.inf if overflow else 4.0)
        unscale(scaler, optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close([one.detach() for one in model], before, rtol=0, atol=0)


@pytest.mark.parametrize("settings", [LARS, LAMB])
def test_training_goes_on_from_a_saved_state(settings):
    model = make_model(torch.float32)
    whole = train(model, build_optimizer(model, config(**settings)))
    first, second = make_model(torch.float32), make_model(torch.float32)
    one, other = (build_optimizer(each, config(**settings)) for each in (first, second))
    train(first, one, range(8))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    second.load_state_dict(first.state_dict())
    assert all(value.dtype == torch.float32 for values in other.state.values() for value in values.values())
    torch.testing.assert_close(train(second, other, range(8, NUM_STEPS)), whole, rtol=0, atol=0)


def test_a_closure_computes_the_gradients_of_the_step():
    for settings in (LARS, LAMB):
        layer = nn.Linear(2, 2)
        optimizer = build_optimizer(layer, config(**settings))

        def closure(layer=layer):
            loss = layer(torch.ones(1, 2)).square().sum()
            loss.backward()
            return loss

        before = layer.weight.detach().clone()
        assert optimizer.step(closure).item() > 0 and not torch.equal(layer.weight, before)


def test_vectors_are_exempt_already():
    with pytest.raises(UserError, match="methods.no_norm_decay: .*weight decay"):
        NoNormDecay("no_norm_decay", None).optimizer(build_optimizer(make_model(), config(**LAMB)))
    with pytest.raises(UserError, match="methods.no_norm_decay: lars gives them no weight decay itself"):
        load_config("image_classification", "closed", size="mini", settings=["methods.no_norm_decay={}"])


@pytest.mark.parametrize("name", [name for name in STATES_PER_PARAMETER if name != "fused_lamb"])
def test_the_tables_of_optimizers_know_each_and_its_state(name):
    names = set(get_args(OptimizerConfig.model_fields["name"].annotation))
    assert names == STATES_PER_PARAMETER.keys() == scaling.OPTIMIZER_BYTES.keys()
    layer = nn.Linear(3, 3)
    optimizer = build_optimizer(layer, config(name=name))
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer_name(optimizer) == name
    kept = [value for value in optimizer.state[layer.weight].values() if value.shape == (3, 3)]
    assert len(kept) == STATES_PER_PARAMETER[name]


def rates(schedule, *, peak, steps, **plan):
    """Return the learning rates that a schedule sets at some steps of a plan."""
    layer = nn.Linear(1, 1)
    optimizer = build_optimizer(layer, config(name="sgd", learning_rate=peak))
    plan = Plan(steps_per_epoch=1, num_epochs=1, evaluation_steps=(), **plan)
    set_rate, found = build_schedule(optimizer, ScheduleConfig(name="polynomial", **schedule), plan), []
    for step in steps:
        set_rate(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_the_polynomial_of_lars_warms_up_decays_with_power_two_and_stays():
    """Peak and decay steps that the reference point at batch 3,264 states: 37 epochs of 392.5 batches.

    closed.yaml decays for 35 epochs of 392. Rates: the reference's PolynomialDecayWithWarmup at these steps.
    """
    warmup, decay, end = 784, 14523, 1e-4
    steps = [0, 392, 783, 784, 8000, warmup + decay, warmup + decay + 500]
    expected = [10.5 * step / warmup for step in steps[:3]]
    expected += [end + (10.5 - end) * (1 - min(step - warmup, decay) / decay) ** 2 for step in steps[3:]]
    schedule = {"warmup": "784ba", "power": 2.0, "end_learning_rate": end}
    plan = {"num_steps": 16000, "warmup_steps": warmup, "decay_steps": decay}
    assert rates(schedule, peak=10.5, steps=steps, **plan) == pytest.approx(expected, rel=1e-12)
    assert expected[-1] == expected[-2] == end


def test_the_polynomial_of_lamb_counts_the_warm_up_as_decay():
    """The reference at batch 3,072: 100 steps of warm-up among 1,141 of decay to 0."""
    schedule = {"warmup": "100ba", "decay_from": "start"}
    plan = {"num_steps": 1300, "warmup_steps": 100, "decay_steps": 1141}
    found = rates(schedule, peak=0.002, steps=[50, 99, 100, 1000, 1141, 1200], **plan)
    left = [(1 - step / 1141) * 0.002 for step in (100, 1000)]
    assert found == pytest.approx([0.001, 0.00198, *left, 0, 0], rel=1e-12, abs=1e-18)


@pytest.mark.parametrize(
    ("settings", "decay_steps"),
    [
        ([], 90),
        (["schedule.decay=60ba"], 60),
        (["schedule.decay_from=start"], 100),
        (["schedule.decay=60ba", "budget=0.5"], 30),
    ],
)
def test_a_decay_is_stated_or_lasts_to_the_end(settings, decay_steps):
    sets = ["schedule.name=polynomial", "schedule.warmup=10ba", "max_duration=100ba", *settings]
    loaded = load_config("language_bert", "baseline", size="mini", settings=sets).config
    plan = loaded.plan()
    assert plan.decay_steps == decay_steps
    last = (0 if "schedule.decay_from=start" in settings else plan.warmup_steps) + decay_steps
    assert schedule_factor(last - 1, loaded.schedule, plan) > 0
    assert schedule_factor(last, loaded.schedule, plan) == 0


class StandIn(torch.optim.Optimizer):
    """Apex's interface: the count of steps stands in the group, `zero_grad` takes nothing."""

    def __init__(self, groups, *, lr, weight_decay, betas, eps, max_grad_norm):
        self.betas, self.eps, self.max_grad_norm = betas, eps, max_grad_norm
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def zero_grad(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state.setdefault("exp_avg", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 1 - self.betas[0])
                    corrected = average / (1 - self.betas[0] ** group["step"])
                    parameter.data.sub_(group["lr"] * corrected)


@pytest.fixture
def apex(monkeypatch):
    """An installed Apex and a GPU, as far as Python sees."""
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedLAMB=StandIn))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


FUSED = LAMB | {"name": "fused_lamb", "max_gradient_norm": None}


def test_apex_is_built_with_the_settings_and_its_steps_survive_a_checkpoint(apex):
    model = make_model(torch.float32)
    optimizer = build_optimizer(model, config(**FUSED))
    assert (optimizer.betas, optimizer.max_grad_norm) == ((0.9, 0.95), math.inf)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    whole = train(model, optimizer)
    first, second = make_model(torch.float32), make_model(torch.float32)
    one, other = (build_optimizer(each, config(**FUSED)) for each in (first, second))
    train(first, one, range(8))
    saved = one.state_dict()["state"]
    assert {int(values["step"]) for values in saved.values()} == {8}
    assert all("step" not in values for values in one.state.values())
    second.load_state_dict(first.state_dict())
    other.load_state_dict({"state": saved, "param_groups": other.state_dict()["param_groups"]})
    torch.testing.assert_close(train(second, other, range(8, NUM_STEPS)), whole, rtol=0, atol=0)


def test_fused_lamb_is_refused_in_one_line_where_apex_is_missing(apex, monkeypatch):
    def refusal():
        with pytest.raises(UserError, match="optimizer.name: fused_lamb: .*lamb computes the same") as raised:
            optim.build_optimizer(make_model(), config(**FUSED))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    missing = RuntimeError("apex.optimizers.FusedLAMB requires CUDA extensions")
    monkeypatch.setattr(StandIn, "__init__", Mock(side_effect=missing))
    assert "CUDA extensions" in refusal()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in refusal()
    monkeypatch.delitem(sys.modules, "apex.optimizers")  # PyPI's apex has none
    assert "another project" in refusal()
