"""Checkpoints: a resumed training ends as one that was not interrupted; a kill leaves the last one whole."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from common import checkpoint, launch, resume
from common.commands.data import prepare
from common.config import ROOT, benchmarks, load
from common.errors import UserError
from tests.common import checkpointed

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TTT = [sys.executable, "-c", "import sys; from common.cli import main; sys.exit(main())"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
SCRIPT = ROOT / "tests/common/checkpointed.py"
TINY = ("max_duration=80ba", "evaluate_every=10ba", "evaluate_from=20ba", "schedule.warmup=5ba")


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """The data of size mini, and one thread: the same sums in the same order."""
    for name in benchmarks():
        prepare(load(name, "baseline", size="mini", settings=[]).config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


KEPT = {"language_bert": range(checkpointed.NUM_STEPS), "image_classification": (1, 4)}


@pytest.fixture(scope="module", params=KEPT)
def whole(request, tmp_path_factory):
    """A training that was not interrupted: its benchmark, what it ended with, checkpoints of some steps."""
    folder = tmp_path_factory.mktemp("whole")
    run = checkpointed.start(request.param, folder)
    before = {name: value.clone() for name, value in checkpoint.captured(run)[0].items()}
    ended = checkpointed.train(run, KEPT[request.param])
    unmoved = {name for name, value in before.items() if torch.equal(value, ended[0][name])}
    assert not any(name.startswith("model.") for name in unmoved)
    assert any(name.startswith("methods.ema.") for name in ended[0])
    return request.param, ended, folder


def run(script, *arguments, timeout=120):
    command = [sys.executable, script, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.slow
def test_resumed_at_any_step_it_ends_as_without_an_interruption(whole, tmp_path):
    name, ended, folder = whole
    for step in KEPT[name]:
        resumed = checkpointed.start(name, tmp_path, source=folder / f"{step}.safetensors")
        assert resumed.first_step == step
        assert checkpointed.are_equal(checkpointed.train(resumed), ended)


@pytest.mark.slow
def test_killed_between_two_micro_batches_it_goes_on_from_the_step_before(whole, tmp_path):
    name, ended, _ = whole
    done = run(SCRIPT, tmp_path, name)
    assert done.returncode == -signal.SIGKILL, done.stderr
    source = tmp_path / "result_0.safetensors"
    assert resume.read_facts(source).step == checkpointed.DIES_IN_STEP
    resumed = checkpointed.start(name, tmp_path, source=source)
    assert checkpointed.are_equal(checkpointed.train(resumed), ended)


@pytest.mark.slow
def test_each_of_two_ranks_gets_its_own_buffers_and_random_state_back(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node=2", SCRIPT, tmp_path]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = [f"{name} True False" for name in checkpointed.SETTINGS for _ in range(2)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_writing_leaves_a_whole_checkpoint(tmp_path):
    done = run(ROOT / "tests/common/kill_writers.py", tmp_path, 60)
    assert done.returncode == 0, done.stderr
    num_hit, num_written = map(int, done.stdout.split())
    assert num_hit >= 10 and num_written >= 10
