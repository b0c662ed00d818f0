"""reuse_memory: the same bits, and no page that is cleared anew; each in a process of its own."""

import json
import sys

from common.measure.device_run import load
from common.training.registry import refuse_process_wide
from tests.command import one_line, run, ttt

PROGRAM = """
import json, resource, sys
import torch
from torch import nn
from common.methods.reuse_memory import reuse_memory

if sys.argv[1] == "reused":
    assert reuse_memory()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(8):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    optimizer.zero_grad()
    model(torch.randn(1 << 16, 64)).square().mean().backward()
    optimizer.step()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
weights = [value.hex() for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
print(json.dumps([faults, weights]))
"""


def trained(how):
    done = run(sys.executable, "-c", PROGRAM, how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_memory_is_used_again_and_training_has_the_same_bits():
    (plain_faults, plain), (faults, weights) = trained("plain"), trained("reused")
    assert weights == plain
    assert faults < plain_faults / 10


def test_a_bench_refuses_it_where_another_configuration_lacks_it():
    refused = ttt("bench", "language_bert", "baseline", "baseline+reuse_memory", "--size", "mini")
    assert refused.returncode == 2 and "acts on the whole process" in one_line(refused)
    both = [load("language_bert", f"{name}+reuse_memory", size="mini") for name in ("baseline", "optimized")]
    refuse_process_wide(both)
