"""Pairs of training steps: each pair builds both configurations in new processes and times them in turns.

What a process brings by chance, such as where its memory lies, is the same in all of its turns. So a pair of
processes is one observation: the median of the ratios of its turns. Which one is built first alternates.
"""

import hashlib
import statistics
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from common.config.merge import to_yaml
from common.config.schema import RunConfig
from common.machine import system
from common.measure.device_run import open_run

TURNS_S = 6.0  # of a pair, unless the fewest turns take longer
NUM_TURNS = (3, 24)  # of each side, at least, at most


class Turns:
    """Takes turns of training steps of each shape, in memory; a turn returns the seconds of a sample."""

    def __init__(self, config: RunConfig) -> None:
        from common.measure.throughput import steppers, time_sample

        self.stack = ExitStack()
        run = self.stack.enter_context(open_run(config, warms_up=False))
        self.turn = partial(time_sample, steppers(run), run.device)
        self.close = self.stack.close


def time_pair(configs: tuple[RunConfig, RunConfig], number: int) -> tuple[float, float]:
    """Return the samples per second of both sides in pair `number`, from 0; UserError where one fails."""
    from common.study.tuning.subjects import SubjectProcess, take_pairs

    with ExitStack() as stack:
        subjects = {}
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            subjects[side] = stack.enter_context(closing(SubjectProcess(partial(Turns, configs[side]))))
        turns = take_pairs(subjects[0], subjects[1], seconds=TURNS_S, num_pairs=NUM_TURNS)
    first_s = statistics.median(one for one, _ in turns)
    ratio = statistics.median(one / other for one, other in turns)
    return 1 / first_s, ratio / first_s


def describe_dependences(configs: Mapping[str, RunConfig]) -> dict[str, Any]:
    """Return what step times depend on; each configuration by a digest."""
    texts = {name: to_yaml(config) for name, config in configs.items()}
    return {
        "hardware": system.hardware_name(),
        "versions": system.versions(),
        "configurations": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
    }
