"""A rank is bound to the processors beside its GPU, by the kernel's files of an invented machine."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common.machine import numa
from common.machine.load import affinity
from common.training import distributed
from common.training.ranks import STORE, RankInfo
from tests.command import run

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
TWO_NODES = {0: "0-3,8-11\n", 1: "4-7,12-15\n"}


@pytest.fixture
def bound(monkeypatch):
    """Let this process have processors 0 to 15, and keep those that it binds itself to."""
    calls = []
    monkeypatch.setattr(numa, "affinity", lambda: frozenset(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, processors: calls.append(processors))
    return calls


def machine(folder, nodes, node_of_gpu):
    """Write the kernel's files of a machine with these nodes, and the node of its GPU."""
    for number, processors in nodes.items():
        (folder / f"devices/system/node/node{number}").mkdir(parents=True)
        (folder / f"devices/system/node/node{number}/cpulist").write_text(processors)
    (folder / "bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
    (folder / "bus/pci/devices/0000:3b:00.0/numa_node").write_text(f"{node_of_gpu}\n")
    return folder


@pytest.mark.parametrize(
    ("nodes", "node_of_gpu", "expected"),
    [
        (TWO_NODES, 1, {4, 5, 6, 7, 12, 13, 14, 15}),
        (TWO_NODES, 0, {0, 1, 2, 3, 8, 9, 10, 11}),
        (TWO_NODES | {2: "\n"}, 0, {0, 1, 2, 3, 8, 9, 10, 11}),
        (TWO_NODES | {2: "\n"}, 2, set()),  # the memory of a GPU is a node without processors
        (TWO_NODES, -1, set()),  # the kernel does not know
        (TWO_NODES, "?", set()),
        ({0: "0-15\n"}, 0, set()),  # one node
        ({0: "0-7\n", 1: "16-31\n"}, 1, set()),  # which this process may not use
        ({0: "0-7\n", 1: "9,14-31\n"}, 1, {9, 14, 15}),
    ],
)
def test_a_rank_is_bound_to_the_node_of_its_gpu(nodes, node_of_gpu, expected, bound, tmp_path):
    assert numa.bind_near(GPU, machine(tmp_path, nodes, node_of_gpu)) == expected
    assert bound == [expected] * bool(expected)


def test_a_machine_without_such_files_binds_nothing(bound, tmp_path):
    assert numa.bind_near(GPU, tmp_path) == set() and bound == []


@pytest.mark.parametrize(("num_local", "calls"), [(2, ["bind", "group"]), (1, ["group"])])
def test_ranks_of_one_machine_are_bound_before_their_group_starts(num_local, calls, monkeypatch, tmp_path):
    made = []
    monkeypatch.setenv(STORE, str(tmp_path / "store"))
    for name, answer in {"is_available": True, "device_count": 2, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: GPU)
    monkeypatch.setattr(numa, "bind_near", lambda gpu: made.append("bind"))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: made.append("group"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    with distributed.process_group(RankInfo(rank=1, local_rank=1, world_size=2, num_local=num_local)):
        assert made == calls


@pytest.mark.skipif(sys.platform != "linux" or len(affinity()) < 2, reason="needs two processors of Linux")
def test_the_watch_of_the_machine_sees_all_processors_after_the_rank_is_bound():
    code = """
import os
from common.machine.load import affinity
before = affinity()
os.sched_setaffinity(0, {min(before)})
print(affinity() == before)
"""
    assert run(sys.executable, "-c", code).stdout == "True\n"
