"""A busy process beside real runs: it starts in time, is gone afterwards, and its cost is reported."""

import itertools
import time

import psutil
import pytest

from common.config.division import OPEN
from common.measure import neighbour
from common.training.load import load_config
from tests.runs import until


def spinning():
    """Return the processes below this one that keep a core busy."""
    children = psutil.Process().children()
    code = ["-c", neighbour.SPIN]
    return [one for one in children if one.status() != "zombie" and one.cmdline()[1:3] == code]


def test_the_neighbour_comes_when_it_is_to_and_is_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbour, "COMES_S", 0.1)
    with neighbour.busy_process("quiet", tmp_path):
        assert not spinning()
    with neighbour.busy_process("busy", tmp_path):
        until(spinning)
    assert not spinning()
    with neighbour.busy_process("comes", tmp_path):
        time.sleep(0.3)
        assert not spinning()
        path = tmp_path / "1cpu-mini-optimized/bert/result_0.txt"
        path.parent.mkdir(parents=True)
        path.write_text("block_start")
        until(spinning)
    assert not spinning()


def test_the_runs_of_a_closed_configuration_are_of_the_open_division(monkeypatch):
    commands = []
    seconds = {"seconds": 1.0}
    monkeypatch.setattr(neighbour, "time_run", lambda command, *_: commands.append(command) or seconds)
    options = {"size": "mini", "num_steps": 20, "rounds": 1, "num_pairs": 0}
    neighbour.measure_neighbour("image_classification", "closed", **options)
    settings = [after for before, after in itertools.pairwise(commands[0]) if before == "--set"]
    assert "--seed" in commands[0] and OPEN in settings
    config = load_config("image_classification", "closed", size="mini", settings=settings).config
    assert config.plan().evaluation_steps == (20,)


def test_the_table_tells_medians_ranges_and_runs_that_were_ended():
    def runs(*seconds):
        return [{"seconds": each, "more_than_s": 96.0} for each in seconds]

    moments = {"quiet": runs(5.5, 5.4, 5.9), "busy": runs(None), "comes": runs(6.7)}
    figures = {"benchmark": "b", "configuration": "c", "size": "mini", "steps": 900, "cores": 2}
    figures |= {"runs": {"now": moments}, "quiet_pairs": [[10.0, 10.1]] * 5 + [[10.0, 10.2]]}
    *_, row, empty, pairs = neighbour.write_table(figures).splitlines()
    assert row == "| now | 5.5 (5.4 to 5.9) | over 96.0 | 6.7 |" and not empty
    assert "1.010 (median of 6 pairs, 95 % 1.010 to 1.020)" in pairs


def test_the_files_of_a_run_whose_command_was_killed_go_with_the_next_start(monkeypatch):
    def look_into(_, results):
        assert (results.parent / ".running").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(neighbour, "busy_process", look_into)
    with pytest.raises(KeyboardInterrupt):
        neighbour.time_run([], {}, "quiet", 1.0)


@pytest.mark.on_demand
def test_a_run_is_timed_beside_a_busy_process_with_the_threads_that_were_set(monkeypatch, prepared_data):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # is not taken over
    steps = ("max_duration=4ba", "evaluate_every=4ba", "evaluate_from=4ba", "schedule.warmup=1ba")
    sets = [part for setting in (*steps, "target=0.99") for part in ("--set", setting)]
    command = ["run", "language_bert", "optimized", "--size", "mini", *sets]
    timed = neighbour.time_run(command, {"OMP_NUM_THREADS": "1"}, "busy", 100.0)
    assert timed["seconds"] > 0 and timed["threads"] == timed["threads_at_the_end"] == 1
    assert len(timed["others"]) == 1
    ended = neighbour.time_run(command, {"OMP_NUM_THREADS": "1"}, "quiet", 0.5)
    assert ended["seconds"] is None
    assert not spinning()
