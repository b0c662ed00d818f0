"""Which steps are timed: what methods do every few of them has its share."""

from types import SimpleNamespace

import pytest
import torch

from common.config import load
from common.method import Batch, build_methods
from common.study import steptime
from common.throughput import LAST_STEPS, stepper, turn_length

BATCH = Batch(inputs={}, targets={}, num_samples=1)


def methods(size, *settings):
    return build_methods(load("image_classification", "optimized", size=size, settings=list(settings)).config)


@pytest.mark.parametrize(
    ("size", "settings", "at_least", "num_steps"),
    [
        ("mini", (), 1, 4),  # ema: every 4
        ("mini", (), 6, 8),
        ("full", (), 4, 20),
        ("mini", ("methods.ema=false",), 1, 1),
        ("mini", ("methods.sam={every_steps: 10}",), 4, 20),
        ("mini", ("methods.ema=false", "methods.swa={every: 3ep}"), 4, 4),  # too seldom to matter
    ],
)
def test_a_turn_holds_whole_periods_of_methods(size, settings, at_least, num_steps):
    assert turn_length(methods(size, *settings), at_least) == num_steps


def test_turns_take_the_last_steps_one_after_the_other():
    taken = []
    run = SimpleNamespace(
        device=torch.device("cpu"),
        plan=SimpleNamespace(num_steps=100),
        train_step=lambda batch, step: taken.append(step),
    )
    turn = stepper(run, BATCH, 4)
    for _ in range(25):
        turn()
    assert taken[:LAST_STEPS] == list(range(100 - LAST_STEPS, 100)) and taken[LAST_STEPS] == taken[0]
    updates = [sum((step + 1) % 4 == 0 for step in taken[i : i + 4]) for i in range(0, 100, 4)]
    assert updates == [1] * 25  # of an average that moves every 4 steps


def test_every_state_is_first_in_a_turn_once(monkeypatch):
    order = []
    monkeypatch.setattr(steptime, "steppers", lambda run: [(lambda: order.append(run.name), 1.0)])
    runs = {name: SimpleNamespace(name=name, device=torch.device("cpu")) for name in "abc"}
    found = steptime.measure_turns(runs, 4, lambda turn: None)
    assert "".join(order) == "abcbcacababc"
    assert [len(times) for times in found.values()] == [4, 4, 4]
