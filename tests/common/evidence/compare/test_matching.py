"""Find the published set that a run set is compared with, also by accelerator."""

import json

import pytest

from common.evidence.compare.devices import Devices, devices_of, of_name, of_text
from common.evidence.compare.reported import load_reported
from common.evidence.log import load
from common.evidence.rules.rule import add, chain, edit, remove
from tests.command import ttt_here as ttt

NVIDIA = "dgxh100_ngc23.04_pytorch"


def write_foreign(golden, folder, rows, *, org="NVIDIA"):
    """Write logs of (minutes, samples, accuracy) that state nothing of this suite."""
    logs = []
    for index, (minutes, samples, accuracy) in enumerate(rows):
        stop = (60 * minutes - 2, 60 * minutes, samples, accuracy)
        names = {"submission_org": org, "submission_platform": folder.parent.name}
        strip = chain(remove("configuration_name"), *(edit(key, value=name) for key, name in names.items()))
        logs.append(strip(golden.timeline("bert", [stop], launch_s=4000 * index)))
    return golden.write(folder.parents[1], logs)


def rows_of(name, factor=1.0):
    runs = load_reported()["bert"].find(name).score.runs
    return [(factor * run.minutes, run.samples, run.quality) for run in runs]


def test_identical_runs_are_one_verdict_whatever_they_are_called(golden, tmp_path):
    folder = write_foreign(golden, tmp_path / "another_name" / "bert", rows_of("nvidia v3.0 dgxh100"))
    for options in ([], ["--against", NVIDIA]):
        done = ttt("reproduce", folder, *options)
        assert (done.returncode, done.stdout.count("REPRODUCED")) == (0, 0)
        assert "  IDENTICAL: these are the published runs themselves" in done.stdout
        assert f"against NVIDIA v3.0 {NVIDIA}" in done.stdout


def test_runs_of_equal_times_that_ended_elsewhere_are_others(golden, tmp_path):
    rows = [(minutes, samples, 0.7206) for minutes, samples, _ in rows_of("nvidia v3.0 dgxh100")]
    folder = write_foreign(golden, tmp_path / "another_name" / "bert", rows)
    assert "not compared: no published result belongs to" in ttt("reproduce", folder).stdout


@pytest.mark.parametrize(
    ("place", "org", "is_found"),
    [
        (f"training_results_v3.0/NVIDIA/results/{NVIDIA}", "NVIDIA", True),
        (f"training_results_v3.0/Nvidia/results/{NVIDIA}", "anybody", True),
        (f"training_results_v3.1/NVIDIA/results/{NVIDIA}", "NVIDIA", False),
        (f"training_results_v3.0/Dell/results/{NVIDIA}", "NVIDIA", False),
        (NVIDIA, "NVIDIA", True),
        (NVIDIA, "Dell", False),
        ("D74H-7U", "Quanta_Cloud_Technology", False),  # of v3.1, v4.0 and v4.1
    ],
)
def test_a_foreign_set_is_matched_by_submitter_round_and_system(golden, tmp_path, place, org, is_found):
    folder = write_foreign(golden, tmp_path / place / "bert", rows_of(f"nvidia v3.0 {NVIDIA}", 1.01), org=org)
    done = ttt("reproduce", folder)
    assert (f"against NVIDIA v3.0 {NVIDIA} (8x H100" in done.stdout) == is_found
    assert ("not compared" in done.stdout) != is_found and "IDENTICAL" not in done.stdout


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("8xA100-optimized", Devices(8, "A100")),
        ("8xA100_80GB-methods", Devices(8, "A100", "", "80 GB")),
        ("dgxh100_n8_ngc23.04_pytorch", Devices(64, "H100")),
        ("h200_ngc24.04_mxnet", Devices(0, "H200")),
        ("2xXE8545x4A100-SXM-40GB", Devices(8, "A100", "SXM", "40 GB")),
        ("R750xax4A100-PCIE-80GB", Devices(4, "A100", "PCIe", "80 GB")),
        ("XE9680x8H200-SXM-141GB", Devices(8, "H200", "SXM", "141 GB")),
        ("X660G45_A100-SXM4-80GB_mxnet", Devices(0, "A100", "SXM", "80 GB")),
        ("AS-A126GS-TNBR", Devices()),
        ("reference-2cpu-mini-optimized", Devices()),
    ],
)
def test_names_of_systems_tell_devices(name, devices):
    assert of_name(name) == devices


def test_logs_come_before_the_description_and_that_before_the_name(golden, tmp_path):
    stated = {"num_accelerators": 2, "device": "NVIDIA H200"}
    nameless = chain(*map(remove, stated))
    folder = golden.write(tmp_path / "results", [nameless(log) for log in golden.set()])
    assert devices_of(load([folder])[0]) == Devices(8, "A100")
    fields = {"accelerator_model_name": "NVIDIA H100-SXM5-80GB", "accelerators_per_node": "4"}
    description = golden.describe(tmp_path / "systems")
    description.write_text(json.dumps(golden.description() | fields))
    assert devices_of(load([folder])[0]) == Devices(4, "H100", "SXM", "80 GB")
    state = chain(*(add("run_stop", key=key, value=value) for key, value in stated.items()))
    for file in folder.iterdir():
        file.write_text("\n".join(state(file.read_text().splitlines())) + "\n")
    assert devices_of(load([folder])[0]) == Devices(2, "H200", "SXM", "80 GB")


def test_devices_of_every_entry_are_read_as_they_are_written():
    entries = [entry for reported in load_reported().values() for entry in reported.sets + reported.peers]
    assert all(str(of_text(entry.accelerators)) == entry.accelerators for entry in entries)
    assert Devices(8, "A100").are_those_of(of_text("8x A100 80 GB"))
    assert Devices(8, "A100", "", "40 GB").are_others_than(of_text("8x A100 80 GB"))
    assert of_text("8x A100 PCIe 80 GB").are_others_than(of_text("8x A100 80 GB"))
