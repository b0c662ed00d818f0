"""Kills processes at random moments while they write checkpoints: kill_writers.py FOLDER NUM_KILLS.

Prints how many kills hit a writing, as the draft that was left shows. Fails unless the checkpoint is whole
after each, at least as new as the last one that its writer had finished.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from common.files import draft_folder
from common.training import checkpoint
from common.training.checkpoint_header import Facts, read_facts

NUM_TENSORS, NUM_VALUES = 8, 250_000  # 8 MB together
LONGEST_S = 0.15
FACTS = Facts(
    **dict.fromkeys(("seed", "step"), 1),
    **dict.fromkeys(("system", "dataset_fingerprint", "log"), ""),
    **dict.fromkeys(("started", "block_started", "saved", "quality"), 0.0),
    **dict.fromkeys(("modules", "random"), ()),
    **dict.fromkeys(("config", "scaler"), {}),
    world_size=1,
    log_state="block",
    epoch=None,
)


def write(path, step):
    tensors = {str(number): torch.full((NUM_VALUES,), float(step)) for number in range(NUM_TENSORS)}
    checkpoint.write(path, tensors, FACTS.model_copy(update={"step": step}))


def write_without_end(path, step, told):
    while True:
        step += 1
        write(path, step)
        os.write(told, step.to_bytes(4, "little"))


def main(folder, num_kills):
    torch.set_num_threads(1)  # nothing but this thread is forked
    path, step, num_hit = Path(folder, "result_0.safetensors"), 0, 0
    write(path, step)
    for _ in range(int(num_kills)):
        reading, told = os.pipe()
        writer = os.fork()
        if writer == 0:
            write_without_end(path, step, told)
        os.close(told)
        time.sleep(random.uniform(0, LONGEST_S))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        with open(reading, "rb") as said:
            finished = said.read()
        step = int.from_bytes(finished[-4:], "little") if finished else step
        num_hit += draft_folder(path).exists()
        found = read_facts(path).step
        assert step <= found <= step + 1, (step, found)
        tensors = load_file(path)
        assert len(tensors) == NUM_TENSORS and all((each == found).all() for each in tensors.values())
        step = found
    write(path, step + 1)
    assert [each.name for each in Path(folder).iterdir()] == [path.name]
    print(num_hit, step)


if __name__ == "__main__":
    main(*sys.argv[1:])
