"""Compare two logs of one run: equal values, values within the tolerance, and values beyond it."""

import json
import re
from pathlib import Path

import pytest

from common.evidence.compare.replayed import (
    ACCURACY,
    LOSS,
    TOLERANCES,
    as_json,
    compare,
    stated_processor,
    verdict_lines,
)
from common.evidence.log import read_log
from common.evidence.rules.rule import (
    chain,
    edit,
    edit_all,
    has_key,
    record_of,
    remove,
    replace_record,
    retime,
    rewrite,
)
from common.repository import ROOT
from tests.committed import committed_results, tracked

SAME, OTHER = ("EPYC", "EPYC"), ("EPYC", "Xeon")
BERT = ("reference-2cpu-mini-baseline", "reference-2cpu-mini-optimized", "rehearsal-2cpu-mini-closed")
SETS = [
    ("reference-2cpu-mini-baseline", "bert"),
    ("reference-2cpu-mini-optimized", "bert"),
    ("reference-2cpu-mini-baseline", "resnet"),
    ("rehearsal-2cpu-mini-closed", "resnet"),
]


def committed(system="reference-2cpu-mini-optimized", benchmark="bert"):
    return committed_results() / system / benchmark / "result_0.txt"


@pytest.fixture(scope="module")
def log():
    return read_log(committed())


def edited(path, folder, mutation):
    """Read a copy of a log whose lines are mutated."""
    copy = folder / "system" / path.parent.name / "result_0.txt"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text("\n".join(mutation(path.read_text().splitlines())) + "\n")
    return read_log(copy)


def change(key, raised, at=0):
    """Return a mutation of the value of record number `at` of a key."""
    return replace_record(key, lambda line: [rewrite(line, value=raised(record_of(line)["value"]))], at)


def without(keys, *, from_sample=0):
    """Return a mutation that removes the records of some keys from a sample on."""

    def is_kept(line):
        is_one = any(has_key(line, key) for key in keys)
        return not is_one or record_of(line)["metadata"]["samples"] < from_sample

    return lambda lines: list(filter(is_kept, lines))


@pytest.mark.parametrize(("system", "benchmark"), SETS)
def test_a_run_that_repeats_is_counted_record_by_record(system, benchmark):
    log = read_log(committed(system, benchmark))
    replayed = compare(log, log, SAME)
    assert replayed.is_accepted and replayed.first is None and replayed.elsewhere == ()
    losses, accuracies = len(log.events("train_loss")), len(log.events("eval_accuracy"))
    assert verdict_lines(replayed)[0].endswith(f": {losses} losses, {accuracies} accuracies")


def test_times_and_the_load_of_the_machine_are_not_compared(log, tmp_path):
    slow = chain(
        lambda lines: retime(lines, lambda time_ms: 2 * time_ms),
        edit_all("throughput", lambda _: {"value": 0.5}),
        edit_all("machine_load", lambda _: {"value": 0.5}),
        edit("run_stop", duration_ms=10**9),
    )
    assert compare(log, edited(committed(), tmp_path, slow), SAME).is_accepted


@pytest.mark.parametrize(
    ("key", "raised", "word"),
    [
        ("train_loss", lambda value: value * (1 + 2**-52), "train_loss at 14,400 samples"),
        ("eval_accuracy", lambda value: value + 1e-9, "eval_accuracy at 14,400 samples"),
        ("dataset_fingerprint", lambda value: "0" * 64, "dataset_fingerprint"),
        ("seed", lambda value: value + 1, "seed"),
        ("opt_base_learning_rate", lambda value: 1.1 * value, "opt_base_learning_rate"),
    ],
)
def test_the_last_bit_of_one_record_is_named_by_its_line(log, key, raised, word, tmp_path):
    forged = edited(committed(), tmp_path, change(key, raised))
    replayed = compare(forged, log, SAME)
    assert not replayed.is_accepted
    line = forged.first(key).line
    assert re.search(
        rf"result_0\.txt:{line} {re.escape(word)}: \S+ there, \S+ now", verdict_lines(replayed)[1]
    )
    assert as_json(replayed)["accepted"] is False


def test_a_record_that_was_removed_or_added_is_named(log, tmp_path):
    forged = edited(committed(), tmp_path, remove("eval_accuracy", at=2))
    for processors in (SAME, OTHER):
        for pair in ((forged, log), (log, forged)):
            replayed = compare(*pair, processors)
            assert not replayed.is_accepted
            assert "eval_accuracy" in verdict_lines(replayed)[1]


def test_a_claimed_success_is_told_from_a_miss(log, tmp_path):
    missed = edited(committed(), tmp_path, edit("run_stop", status="aborted"))
    replayed = compare(log, missed, SAME)
    assert "run_stop" in verdict_lines(replayed)[1] and not replayed.is_accepted


def test_elsewhere_a_small_distance_agrees_and_a_large_one_does_not(log, tmp_path):
    allowed = TOLERANCES["bert"]
    for factor, agrees in ((0.9, True), (1.1, False)):
        for key, raised in (
            ("train_loss", lambda value, factor=factor: value * (1 + factor * allowed.loss)),
            ("eval_accuracy", lambda value, factor=factor: value + factor * allowed.accuracy),
        ):
            again = edited(committed(), tmp_path, change(key, raised, at=1))
            elsewhere = compare(log, again, OTHER)
            assert elsewhere.is_accepted is agrees and "bits may differ" in "".join(verdict_lines(elsewhere))
            assert compare(log, again, SAME).is_accepted is False


def test_elsewhere_one_of_them_may_end_an_evaluation_sooner(log, tmp_path):
    """The accuracies up to there decide; later records of one log are not compared."""
    last = log.last("eval_accuracy").metadata["samples"]
    end_sooner = chain(without((LOSS, ACCURACY), from_sample=last), edit("run_stop", samples=last - 1600))
    sooner = edited(committed(), tmp_path, end_sooner)
    for pair in ((log, sooner), (sooner, log)):
        replayed = compare(*pair, OTHER)
        assert replayed.is_accepted and replayed.count(LOSS) == len(log.events(LOSS)) - 1
        assert not compare(*pair, SAME).is_accepted


def test_versions_threads_and_unknown_processors_make_it_elsewhere(log, tmp_path):
    text = committed().read_text()
    for before, after, word in (
        ("torch 2.15.0", "torch 2.14.0", "torch 2.15.0 there, 2.14.0 here"),
        ('"num_threads", "value": 2', '"num_threads", "value": 1', "threads 2 there, 1 here"),
    ):
        assert before in text
        copy = tmp_path / "result_0.txt"
        copy.write_text(text.replace(before, after))
        assert word in " ".join(compare(log, read_log(copy), SAME).elsewhere)
    for processors in (("", "Xeon"), ("", "")):
        equal = compare(log, log, processors)
        assert equal.elsewhere and "may differ" not in "".join(verdict_lines(equal))
    (tmp_path / "result_0.txt").write_text(text.replace("mlperf-logging 4.1.68", "mlperf-logging 9"))
    assert compare(log, read_log(tmp_path / "result_0.txt"), SAME).elsewhere == ()


def test_a_log_that_a_fault_ended_is_compared_up_to_there(log, tmp_path):
    stop = edit("run_stop", status="aborted", reason="interrupted")
    aborted = edited(committed(), tmp_path, chain(without((LOSS, ACCURACY), from_sample=16000), stop))
    replayed = compare(aborted, log, SAME)
    assert replayed.is_accepted and replayed.count(LOSS) == 1
    assert any("fault" in line for line in verdict_lines(replayed))


def test_a_log_without_losses_decides_nothing(tmp_path):
    empty = edited(committed(), tmp_path, without((LOSS, ACCURACY)))
    replayed = compare(empty, empty, SAME)
    assert not replayed.is_accepted and "decides nothing" in verdict_lines(replayed)[0]


def test_every_result_of_the_committed_sets_repeats_unless_its_threads_were_lowered():
    """A result is known by its seed: entries of other seeds are of runs that newer ones replaced."""
    files = [path for path in tracked("results/replay") if path.match("same-processor*.json")]
    entries = [entry for path in files for entry in json.loads(path.read_text())["replays"]]
    results = [path for path in tracked("results") if path.match("results/*/*/result_*.txt")]
    seeds = {str(path.relative_to(ROOT)): read_log(path).value("seed") for path in results}
    replays = [entry for entry in entries if seeds.get(entry["result"]) == entry["seed"]]
    assert sorted(entry["result"] for entry in replays) == sorted(seeds)
    others = [entry for entry in replays if not entry["repeats"]]
    assert all(entry["accepted"] and "threads lowered there" in entry["elsewhere"] for entry in others)
    page = (ROOT / "common/evidence/README.md").read_text()
    assert f"{len(replays) - len(others)} of the {len(replays)} results" in page


def test_replays_on_another_processor_lie_well_within_the_tolerance():
    replays = list(measured("bert"))
    assert replays
    for entry, loss, accuracy in replays:
        assert entry["elsewhere"] and entry["accepted"]
        assert loss < TOLERANCES["bert"].loss / 1.5 and accuracy < TOLERANCES["bert"].accuracy / 1.5


def measured(benchmark):
    """Yield each replay of results/replay, made on another processor, with its largest two distances."""
    for path in tracked("results/replay"):
        for entry in json.loads(path.read_text())["replays"] if path.name.startswith(benchmark) else ():
            losses = [abs(now - there) / there for _, there, now in entry["losses"]]
            accuracies = [abs(now - there) for _, there, now in entry["accuracies"]]
            yield entry, max(losses), max(accuracies)


def test_resnet_has_no_tolerance_that_tells_replays_on_another_processor_from_other_seeds():
    """With the margin of 1.5 it would accept more than the 5 % of other seeds that BERT's may."""
    replays = list(measured("resnet"))
    loss, accuracy = (1.5 * max(replay[key] for replay in replays) for key in (1, 2))
    pairs = []
    for folder in {Path(entry["result"]).parent for entry, *_ in replays}:
        logs = [read_log(path) for path in sorted((ROOT / folder).glob("result_*.txt"))]
        pairs += [compare(a, b, OTHER) for a in logs for b in logs if a is not b]
    near = [pair for pair in pairs if pair.largest(LOSS) <= loss and pair.largest(ACCURACY) <= accuracy]
    assert all(entry["elsewhere"] for entry, *_ in replays) and "resnet" not in TOLERANCES
    assert len(near) > 0.05 * len(pairs) > 0


@pytest.mark.parametrize("system", BERT)
def test_on_another_processor_forged_logs_are_told_from_true_ones(system, tmp_path):
    """Losses and accuracies of another seed, and accuracies that are two points higher, or only the last."""
    paths = sorted((committed_results() / system / "bert").glob("result_*.txt"))
    logs = [read_log(path) for path in paths]
    pairs = [(path, log) for path in paths for log in logs if Path(log.path).name != path.name]
    others = [
        compare(edited(path, tmp_path, edit("seed", value=log.value("seed"))), log, OTHER)
        for path, log in pairs
    ]
    assert sum(not replayed.is_accepted for replayed in others) >= 0.95 * len(others) > 0
    for path, log in zip(paths, logs, strict=True):
        higher = edit_all(ACCURACY, lambda record: {"value": record["value"] + 0.02})
        for mutation in (higher, change(ACCURACY, lambda value: value + 0.02, at=-1)):
            assert not compare(edited(path, tmp_path, mutation), log, OTHER).is_accepted


def test_without_a_measured_tolerance_another_machine_decides_nothing(tmp_path):
    path = committed("reference-2cpu-mini-baseline", "resnet")
    log, again = read_log(path), edited(path, tmp_path, change("train_loss", lambda value: value * 1.0001))
    replayed = compare(log, again, OTHER)
    assert not replayed.is_accepted and "no tolerance for resnet" in verdict_lines(replayed)[0]
    assert replayed.largest(LOSS) == pytest.approx(1e-4)
    assert compare(log, log, OTHER).is_accepted


def test_the_processor_of_an_older_log_is_that_of_its_system_description(log):
    copy = committed("rehearsal-2cpu-mini-closed")  # without its description
    path = ROOT / copy.relative_to(committed_results().parent)
    assert stated_processor(read_log(path)).startswith("AMD EPYC, with L1d")
    assert stated_processor(read_log(copy)) == ""
    assert stated_processor(log).startswith("Intel(R) Xeon(R) Processor")
