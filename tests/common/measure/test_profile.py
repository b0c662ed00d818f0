"""`ttt inspect profile` as a person types it, on a tiny batch: parts add up, a slow loader is found."""

import json
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch._C._autograd import DeviceType

from common.measure.device_run import load_for_ranks, of_all_devices
from common.measure.profiling.marks import PARTS
from common.measure.profiling.trace import list_operators
from common.training.load import load_open
from common.training.probes import probes_of
from tests.command import ttt, ttt_here
from tests.runs import make_benchmark

TINY = ("profile", "language_bert", "optimized", "--size", "mini", "--batch-size", 4, "--turns", 2, "--json")
TINY += ("--results",)


def profile(tmp_path, *more, run=ttt_here):
    done = run(*TINY, tmp_path, *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done


def test_the_parts_of_a_step_add_up_and_the_figures_are_kept(tmp_path):
    found, done = profile(tmp_path, "--trace", tmp_path / "trace.json")
    (phase,) = found["phases"]
    assert set(phase["parts_ms"]) == set(PARTS)
    assert all(ms >= 0 for ms in phase["parts_ms"].values())
    assert sum(phase["parts_ms"].values()) == pytest.approx(phase["step_ms"], rel=0.02)
    assert phase["loader_per_s"] > 0 and phase["step_per_s"] > 0 and len(found["evaluation_s"]) == 2
    (path,) = tmp_path.glob("profile/*/language_bert_0.json")
    assert json.loads(path.read_text()) == found and found["verdict"] in done.stderr
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_slow_storage_makes_it_input_bound(tmp_path):
    found, _ = profile(tmp_path, "--delay-data", 100)
    (phase,) = found["phases"]
    assert found["verdict"].startswith("input-bound: ")
    assert phase["loader_per_s"] == pytest.approx(4 / 0.1, rel=0.1)  # a true rate
    assert phase["savings"]["kept batches"]["share"] > 0.1


def image_probes(*settings):
    return probes_of(make_benchmark("image_classification", *settings))


def test_images_have_a_phase_for_each_size_and_loaders_that_read_once():
    fast = image_probes("optimized")
    assert fast.phases() == [("56 px", range(44)), ("84 px", range(44, 176))]
    assert fast.loads_once and "decoding" not in fast.without_loading()
    workers = image_probes("baseline", "data.num_workers=2")
    assert workers.phases() == [("112 px", range(352))]
    assert not workers.loads_once and workers.num_readers == 2 and "decoding" in workers.without_loading()


def test_operators_follow_each_other_without_those_that_they_call():
    layer, images = torch.nn.Linear(64, 64), torch.randn(64, 64)
    with torch.profiler.profile(acc_events=True) as profiler:
        torch.nn.functional.gelu(layer(images)).sum().backward()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CPU]
    spans = [*list_operators(events)]
    assert spans[-1][2] == pytest.approx(sum(event.self_cpu_time_total for event in events))
    assert all(end == start for (*_, end), (_, start, _) in pairwise(spans)) and len(spans) > 5


def test_methods_that_need_worker_processes_are_left_out_with_the_augmentation():
    chosen = ("baseline", "methods.randaugment={}", "methods.augmix={}")
    variants = image_probes(*chosen).without_loading()
    assert list(variants) == ["augmentation"]
    without = image_probes(*chosen, *variants["augmentation"])
    assert not {"randaugment", "augmix"} & without.config.methods.keys()
    for settings in image_probes(*chosen).other_loaders(1000.0).values():
        assert image_probes(*chosen, *settings).config.data.loader == "workers"


@pytest.mark.parametrize(
    "wrong", [("--turns", 1), ("--delay-data", -1), ("--trace", "no/such/folder/t.json")]
)
def test_what_cannot_be_profiled_is_one_line(tmp_path, wrong):
    done = ttt_here(*TINY, tmp_path, *wrong)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.on_demand
def test_two_ranks_show_their_communication(tmp_path):
    from_here = partial(ttt, cwd=tmp_path)  # the ranks start in the repository
    found, _ = profile(tmp_path, "--nproc", 2, "--trace", "trace.json", run=from_here)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (phase,) = found["phases"]
    assert found["num_ranks"] == 2 and found["batch_size"] == 8
    assert "communication" in phase["parts_ms"] and "no communication" in phase["savings"]


@pytest.mark.parametrize("configuration", ["baseline", "closed"])
def test_the_evaluations_of_a_run_are_those_of_its_whole_batch(configuration):
    part = load_for_ranks("language_bert", configuration, size="full", num_ranks=2).config
    whole = of_all_devices(part, 2)
    plan = load_open("language_bert", configuration, size="full", settings=[]).config.plan()
    assert (part.global_batch_size, whole.global_batch_size) == (112, 448)
    assert list(whole.plan().evaluation_steps) == list(plan.evaluation_steps)
