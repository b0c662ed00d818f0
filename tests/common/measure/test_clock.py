"""Trials of the one timer: their rounds, their order, and the peaks of a device."""

import time
from functools import partial

import pytest
import torch

from common.measure import clock

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rotates", "order"), [(False, "abcabcabcabc"), (True, "abcbcacababc")])
def test_trials_are_interleaved_and_each_may_begin_a_round(rotates, order):
    calls, rounds = [], []
    trials = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    results = clock.interleave(trials, rounds=4, rotates=rotates, report=rounds.append)
    assert "".join(calls) == order and rounds == [1, 2, 3, 4]
    assert results["a"] == [1 + position for position, name in enumerate(order) if name == "a"]


def test_trials_take_at_least_the_rounds_and_the_seconds():
    assert clock.interleave({"a": lambda: 1}, rounds=2) == {"a": [1, 1]}
    started = time.perf_counter()
    assert len(clock.interleave({"a": lambda: time.sleep(0.01)}, seconds=0.05)["a"]) > 1
    assert time.perf_counter() - started >= 0.05
    assert clock.interleave({}, seconds=60.0) == {}


def test_a_call_takes_as_long_as_it_takes():
    wait = partial(time.sleep, 0.02)
    for seconds in (clock.time_call(wait, CPU), clock.time_launching(wait, CPU)):
        assert 0.02 <= seconds < 1.0


def test_peaks_count_the_work_of_one_matmul_and_one_copy(monkeypatch):
    monkeypatch.setattr(clock, "GEMM_SIZE", {"cpu": 16})
    monkeypatch.setattr(clock, "COPY_BYTES", {"cpu": 1000})
    load, taken = clock.PeakLoad(CPU), []
    peaks = load.measure(lambda call: taken.append(call()) or 2.0)
    assert (peaks.flops_per_s, peaks.bytes_per_s, len(taken)) == (16**3, 1000, 2)
    assert torch.equal(load.product, load.matrix @ load.matrix) and torch.equal(load.target, load.source)
    assert torch.equal(load.matrix, clock.PeakLoad(CPU).matrix)  # devices are compared by a checksum


@pytest.mark.parametrize(("instructions", "dtype"), [([], "float32"), (["amx_bf16"], "bfloat16")])
def test_a_processor_without_bf16_multiplies_in_float32(monkeypatch, instructions, dtype):
    monkeypatch.setattr(clock, "GEMM_SIZE", {"cpu": 16})
    monkeypatch.setattr(clock, "bf16_instructions", lambda: instructions)
    assert clock.measure_peaks(CPU).dtype == dtype
