"""Runs that an authority has stamped: a real one from end to end, and forgeries of real ones."""

import random
import shutil
import sys
import threading
import time

import pytest

from common.evidence.log import load
from common.evidence.records import TOKEN
from common.evidence.rules.rule import record_of, retime
from common.evidence.rules.sealed_files import rechain
from common.evidence.sealed.anchors import ANCHORS
from common.evidence.sealed.chain import is_chained, read_chain
from common.evidence.sealed.replies import load_roots
from common.run.sealing.anchoring import anchoring
from tests.authority import serve
from tests.command import run
from tests.committed import committed_results
from tests.common.evidence.anchored import audit_anchors
from tests.common.evidence.forgeries import faster, lasts, scale_times
from tests.runs import SHORT, Place

NUM_FORGERIES = 10


def slower_clock(lines, factor):
    """Return a log whose clocks show `factor` times the time that passed, with rates and hashes to match."""
    return rechain(faster(lasts(scale_times(lines, factor), lambda ms: round(ms * factor)), factor))


@pytest.mark.slow
def test_a_run_is_stamped_and_whoever_makes_its_chain_again_is_found(prepared_data, tmp_path):
    place = Place(tmp_path)
    with serve(tmp_path / "authority") as (authority, url):
        words = place.arguments(("language_bert", "optimized", *SHORT), "--anchor", url)
        done = run(sys.executable, "-m", "common.cli", *words)
    assert done.returncode == 0, done.stderr
    (log,) = place.results()
    lines, folder, roots = log.read_text().splitlines(), log.parent, load_roots(authority.root)
    assert " granted" in done.stdout and not place.processes()
    assert url not in log.read_text() and "--anchor URL" in log.read_text()
    anchored, findings = audit_anchors(folder, roots)
    assert findings == [] and len(anchored.stamps) == len(anchored.places) >= 4, anchored.summary()
    rng = random.Random(1)
    for number in range(NUM_FORGERIES):
        forged = folder.with_name(f"forged-{number}") / "bert"
        shutil.copytree(folder, forged)
        text = "\n".join(slower_clock(lines, rng.uniform(0.5, 0.95))) + "\n"
        (forged / log.name).write_text(text)
        data = text.encode()
        assert is_chained(data) and read_chain(data).breaks == ()
        assert "N901" in {finding.rule for finding in audit_anchors(forged, roots)[1]}


def write_at_pace(lines, path, factor):
    """Write a log at the pace of a run whose clock shows `factor` times the time that passes."""
    (first,) = (record_of(line)["time_ms"] for line in lines if '"key": "run_start"' in line)
    offset_ms, started = round(time.time() * 1000) + 1000 - first, time.monotonic() + 1
    written = slower_clock(retime(lines, lambda ms: ms + offset_ms), factor)
    for before, line in zip(lines, written, strict=True):
        if TOKEN in line:
            time.sleep(max(0, started + (record_of(before)["time_ms"] - first) / 1000 - time.monotonic()))
        with path.open("a") as file:
            file.write(line + "\n")


@pytest.mark.slow
def test_a_clock_that_is_slow_while_an_authority_stamps_is_found_in_runs_of_15_s(tmp_path):
    """The forger writes the log while the run goes on, so that every reply is of its very bytes."""
    sets = load(
        [committed_results() / f"{name}-2cpu-mini-closed/bert" for name in ("reference", "rehearsal")]
    )
    logs = [log for run_set in sets for log in run_set.logs if 13 < log.duration_s < 16]
    rng, threads, factors = random.Random(2), [], {}
    assert len(logs) >= NUM_FORGERIES
    with serve(tmp_path / "authority") as (authority, url), anchoring(url) as anchors:
        for number in range(NUM_FORGERIES + 1):
            folder = tmp_path / str(number) / "bert"
            folder.mkdir(parents=True)
            path = folder / "result_0.txt"
            path.touch()
            anchors.watch(path)
            factors[folder] = rng.uniform(0.5, 0.6) if number else 1.0
            lines = logs[number % len(logs)].file.read_text().splitlines()
            threads.append(threading.Thread(target=write_at_pace, args=(lines, path, factors[folder])))
            threads[-1].start()
        for thread in threads:
            thread.join()
    roots = load_roots(authority.root)
    for folder, factor in factors.items():
        anchored, findings = audit_anchors(folder, roots)
        assert len(anchored.good()) == len(anchored.places) >= 3, (folder / ANCHORS).read_text()
        assert ({finding.rule for finding in findings} & {"N903"}) == ({"N903"} if factor < 1 else set())
