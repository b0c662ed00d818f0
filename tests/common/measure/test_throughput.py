"""The steps that are timed, and the figures that stay when a configuration or the bench itself fails."""

import errno
import json
from types import SimpleNamespace

import pytest
import torch

from common.cli import dispatch
from common.errors import EXIT_FINDINGS, UserError
from common.measure import device_run, steptime
from common.measure import figures as figures_files
from common.measure.points import Point
from common.measure.throughput import stepper, steps_of_turn, turn_length
from common.study.predict.sources import batch_of
from common.training.load import load_config
from common.training.method import Batch
from common.training.probes import Part
from common.training.registry import build_methods
from common.training.step import Training
from language_bert.probes import Probes

BATCH = Batch(inputs={}, targets={}, num_samples=1)


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
    config = load_config("image_classification", "optimized", size=size, settings=list(settings)).config
    assert turn_length(build_methods(config), at_least) == num_steps


def test_turns_take_the_steps_of_a_point_one_after_the_other():
    taken = []
    run = SimpleNamespace(
        device=torch.device("cpu"), train_step=lambda batch, step: taken.append(step), methods=[]
    )
    turn = stepper(run, BATCH, Point(window=range(30, 50), share=1.0, shape="", loaded=""), 4)
    for _ in range(25):
        turn()
    assert taken[:20] == list(range(30, 50)) and taken[20] == taken[0]
    updates = [sum((step + 1) % 4 == 0 for step in taken[i : i + 4]) for i in range(0, 100, 4)]
    assert updates == [1] * 25  # of an average that moves every 4 steps


def test_the_log_of_measured_steps_goes_with_the_next_start_if_the_command_is_killed(monkeypatch):
    folders = []

    def build(config, directory, *_, **__):
        assert (directory / ".running").exists()
        folders.append(directory)
        return SimpleNamespace(log=SimpleNamespace(close=lambda: None))

    monkeypatch.setattr(device_run, "build", build)
    with device_run.open_run(None), device_run.open_run(None):
        assert len(set(folders)) == 2 and all(folder.is_dir() for folder in folders)
    assert not any(folder.exists() for folder in folders)


def test_every_state_is_first_in_a_turn_once(monkeypatch):
    order = []
    monkeypatch.setattr(steptime, "steppers", lambda run: [(lambda: order.append(run.name), 1.0)])
    runs = {name: SimpleNamespace(name=name, device=torch.device("cpu")) for name in "abc"}
    found = steptime.measure_turns(runs, 4, lambda turn: None)
    assert "".join(order) == "abcbcacababc"
    assert [len(times) for times in found.values()] == [4, 4, 4]


BENCH = ["bench", "language_bert", "eager", "baseline", "--size", "mini"]


def bench(tmp_path, *options):
    return dispatch([*BENCH, "--seconds", "0.01", "--batch-size", "4", "--results", str(tmp_path), *options])


def fail_eager(monkeypatch):
    forward_backward = Training.forward_backward

    def fail(run, *args):
        if run.config.model.attention == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        assert run.num_micro_batches == 2
        return forward_backward(run, *args)

    monkeypatch.setattr(Training, "forward_backward", fail)


def test_a_configuration_that_is_out_of_memory_is_a_row_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    fail_eager(monkeypatch)
    assert bench(tmp_path, "--micro-batch-size", "2", "--no-parts", "--json") == EXIT_FINDINGS
    figures = json.loads(capsys.readouterr().out)
    (failed,) = figures["failed"]
    assert (failed["configuration"], failed["shape"]) == ("eager", "160 tokens")
    assert "out of memory" in failed["error"] and "2.00 GiB" in failed["error"]
    assert [rate["configuration"] for rate in figures["rates"]] == ["baseline"] and not figures["parts"]


def test_what_was_measured_is_kept_when_a_bench_is_interrupted(tmp_path, monkeypatch):
    def interrupt(probes):
        yield Part(name="quick", call=lambda: None, num_samples=1)
        raise KeyboardInterrupt

    fail_eager(monkeypatch)
    monkeypatch.setattr(Probes, "bench_parts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path, "--micro-batch-size", "2")
    (path,) = tmp_path.rglob("*.json")
    figures = json.loads(path.read_text())
    assert len(figures["failed"]) == len(figures["rates"]) == 1 and figures["peaks"]
    assert list(figures["parts"]) == ["quick"]


def test_figures_that_cannot_be_written_leave_no_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(figures_files, "save_json", fail)
    with pytest.raises(OSError, match="No space left"):
        figures_files.keep({}, tmp_path, "language_bert")
    assert not list(tmp_path.iterdir())


def test_an_unknown_shape_is_named_and_nothing_is_written(tmp_path):
    with pytest.raises(UserError, match="--shapes: no shape '96'; known: 160 tokens"):
        bench(tmp_path, "--shapes", "96")
    assert not list(tmp_path.rglob("*.json"))


def test_each_row_states_its_batch_and_the_option_comes_before_the_name(tmp_path, capsys):
    words = ["bench", "language_bert", "baseline", "baseline+global_batch_size=8", "--size", "mini", "--json"]
    words += ["--no-parts", "--seconds", "0.01", "--results", str(tmp_path)]
    for options, batches in (([], [16, 8]), (["--batch-size", "4"], [4, 4])):
        assert dispatch(words + options) == 0
        found = capsys.readouterr()
        figures = json.loads(found.out)
        assert [rate["batch_size"] for rate in figures["rates"]] == batches
        assert f"{', '.join(dict.fromkeys(map(str, batches)))} samples a step" in found.err
        assert [batch_of(figures, rate["configuration"]) for rate in figures["rates"]] == batches


def test_a_configuration_with_a_shape_that_no_other_has_is_timed_there(tmp_path, capsys):
    words = ["bench", "language_bert", "baseline", "closed", "--size", "mini", "--batch-size", "4", "--json"]
    assert dispatch([*words, "--no-parts", "--seconds", "0.01", "--results", str(tmp_path)]) == 0
    rates = json.loads(capsys.readouterr().out)["rates"]
    shapes = [(rate["configuration"], rate["shape"]) for rate in rates]
    assert shapes == [("baseline", "160 tokens"), ("closed", "64 tokens")]


def test_logging_is_a_share_of_a_step(capsys):
    words = ["bench", "language_bert", "optimized", "--size", "mini", "--batch-size", "4", "--logging"]
    dispatch([*words, "--json"])  # on a busy machine it may be above its limit
    (cost,) = json.loads(capsys.readouterr().out)
    assert cost["block_steps"] == 100 and 0 < cost["share"] < 0.1
    cost_us = cost["layer_us"] + cost["block_us"] / cost["block_steps"]
    assert cost["share"] == pytest.approx(cost_us / (1e3 * cost["step_ms"]))


@pytest.mark.parametrize(
    ("on_gpu", "step_s", "num_steps"), [(True, 0.5, 4), (True, 1.5, 1), (False, 0.5, 1), (False, 0.01, 4)]
)
def test_a_gpu_takes_several_steps_of_half_a_second_in_a_turn(monkeypatch, on_gpu, step_s, num_steps):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    assert steps_of_turn([], step_s) == num_steps
