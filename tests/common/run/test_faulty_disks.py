"""Disks that are full, read-only or damaged, and files that others remove: one line names the place."""

import contextlib
import os
import re
import shutil
import subprocess
import time

import numpy as np
import pytest

from common.data import manifest
from common.repository import ROOT
from tests.runs import BERT, failure_in, reason_of_abort

pytestmark = pytest.mark.usefixtures("prepared_data")


@pytest.fixture
def small_disk(mount_disk):
    return mount_disk("1m")


def fill(folder):
    with contextlib.suppress(OSError), (folder / "filler").open("wb") as file:
        while True:
            file.write(bytes(512))
            file.flush()


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_a_log_that_is_whole(place, ttt, small_disk):
    place.results_folder = small_disk

    def faults():
        place.until_logged('"eval_accuracy"')
        fill(small_disk)

    settings = (*BERT, "evaluate_every=1ba", "evaluate_from=1ba", "evaluation_batch_size=64")
    command = place.arguments(settings, "--runs", 2, "--force")  # the preflight would refuse so small a disk
    place.expected_files = {"filler"}
    done = ttt(command, faults)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (path,) = place.results()
    why = reason_of_abort(path)
    assert re.fullmatch(
        r"rank 0 of 1, after step \d+: result_0.txt: cannot write the log \(No space .*\)", why
    )
    assert f"aborted: {why}; the log is kept" in done.stderr
    assert "cannot write results here (No space left on device)" in done.stderr.splitlines()[-1]
    assert "of 2 runs 1 failed, 1 not run; 2 missing" in done.stdout


def test_a_disk_that_fills_up_while_data_are_prepared_is_told_and_cleared(ttt, small_disk):
    directory = small_disk / "digits"
    command = ["data", "prepare", "image_classification", "--size", "mini"]
    done = ttt([*command, "--set", f"data.directory={directory}"])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert list(small_disk.iterdir()) == []


def test_a_results_folder_that_is_read_only_is_named(place, ttt, small_disk):
    place.results_folder = small_disk / "results"
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for more in ([], ["--force"]):  # told by the preflight, or where the result would be written
        done = ttt(place.arguments(BERT, *more))
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert str(small_disk) in line and "Read-only file system" in line


@pytest.mark.slow
def test_a_result_that_is_removed_under_way_costs_that_run_alone(place, ttt):
    def faults():
        place.until_logged('"block_start"').unlink()

    settings = (*BERT, "target=0.005", "evaluate_from=90ba")
    done = ttt(place.arguments(settings, "--runs", 2), faults)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("  aborted: ")]
    assert "was removed while it ran" in line
    assert "of 2 runs 1 converged, 1 failed; 1 missing" in done.stdout
    assert len(place.results()) == 1


@pytest.fixture
def own_data(place):
    """A copy of the text, to be damaged, and the setting that names it."""
    copy = place.folder / "data"
    shutil.copytree(ROOT / "data/language_bert/mini", copy)
    return copy, f"data.directory={copy}"


@pytest.mark.slow
def test_a_shard_that_is_damaged_under_way_is_named_with_its_record(place, ttt, own_data):
    copy, setting = own_data
    shard = copy / "train-00000.shard"

    def faults():
        place.until_logged('"block_start"')
        with shard.open("r+b") as file:
            file.write(bytes(shard.stat().st_size))
        return time.monotonic()

    done = ttt(place.arguments((*BERT, setting)), faults)
    why = failure_in(done, place.results()[0], 2)
    assert re.fullmatch(rf"rank 0 of 1, .*: .../{shard.name} record \d+: is corrupt \(CRC differs\)", why)
    done = ttt(place.arguments((*BERT, setting)))
    assert done.returncode == 2 and "content changed" in done.stderr and len(place.results()) == 1


@pytest.mark.slow
def test_half_of_the_evaluation_set_is_noticed_before_the_clock_or_at_the_evaluation(place, ttt, own_data):
    copy, setting = own_data
    index = np.load(copy / "evaluation.index.npy")
    np.save(copy / "evaluation.index.npy", index[:192])
    done = ttt(place.arguments((*BERT, setting)))
    assert done.returncode == 2 and "evaluation.index.npy" in done.stderr and place.results() == []

    words = (index["num_tokens"].astype(int) + 2 * index["num_masked"])[:192].sum()
    os.truncate(copy / "evaluation-00000.shard", 2 * int(words))
    manifest.write_manifest(copy, manifest.read_manifest(copy, hint="")["facts"])
    done = ttt(place.arguments((*BERT, setting, "evaluate_untrained=true")))
    why = failure_in(done, place.results()[0], 2)
    assert (
        why == f"rank 0 of 1, before the first step: .../{copy.name}: evaluation: 192 samples, expected 384"
    )
