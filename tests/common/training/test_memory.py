"""Out of memory: real allocations that fail, and the change that the message proposes."""

import sys

import pytest
import torch

from common.errors import UserError
from common.training import memory
from tests.command import run

FOLLOW = """
import re, resource
import psutil
from common.training.load import load_config
from common.errors import UserError
from common.training.step import Training
from language_bert.benchmark import Benchmark

setting = "micro_batch_size=null"
for attempt in range(12):
    settings = ["global_batch_size=2048", "schedule.warmup=5ba", setting]
    config = load_config("language_bert", "baseline", size="mini", settings=settings).config
    run = Training(config, Benchmark(config, seed=0), seed=0)
    run.build(from_scratch=True)
    run.replica = run.model
    if attempt == 0:
        limit = psutil.Process().memory_info().vms + 700_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        run.warm_up()
    except UserError as error:
        print(error)
        setting = re.search(r"--set (micro_batch_size=[0-9]+) keeps the global batch of 2,048", str(error))[1]
    else:
        print("fits", setting, config.global_batch_size, run.step_s > 0)
        break
"""


@pytest.mark.slow
def test_following_the_message_leads_to_micro_batches_that_fit():
    done = run(sys.executable, "-c", FOLLOW)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("micro_batch_size: out of memory with 2,048 samples at a time")
    assert first.endswith("--set micro_batch_size=1024 keeps the global batch of 2,048")
    assert last.startswith("fits micro_batch_size=") and last.endswith(" 2048 True")


@pytest.mark.parametrize(
    ("allocate", "asked"),
    [
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), ", asking for 1152921504606846976 bytes"),
        (lambda: bytearray(1 << 60), ""),
    ],
    ids=["torch", "python"],
)
def test_a_failed_allocation_names_the_next_smaller_size(allocate, asked):
    with (
        pytest.raises(UserError) as met,
        memory.explain_out_of_memory(
            "evaluation_batch_size", 256, num_samples=256, kept="the result", num_ranks=8
        ),
    ):
        allocate()
    hint = "--set evaluation_batch_size=128 keeps the result"
    assert str(met.value) == f"evaluation_batch_size: out of memory with 32 samples at a time{asked}; {hint}"


def test_other_errors_pass():
    with (
        pytest.raises(RuntimeError, match="shapes"),
        memory.explain_out_of_memory("k", 2, num_samples=2, kept=""),
    ):
        torch.ones(2, 3) @ torch.ones(2, 3)


@pytest.mark.parametrize(
    ("size", "num_samples", "smaller"),
    [
        (256, 256, 128),
        (56, 56, 28),
        (28, 56, 14),
        (30, 60, 20),
        (7, 7, 4),
        (4, 7, 2),
        (2, 2, 1),
        (1, 5, None),
    ],
)
def test_the_next_smaller_size_divides_where_that_at_most_halves_it(size, num_samples, smaller):
    assert memory.next_smaller(size, num_samples) == smaller
