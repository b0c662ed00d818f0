"""Ten forgeries of each kind, made of real logs that were sealed, are found; honest sealed sets pass."""

import json
import random
from functools import cache

import pytest

from common.evidence.audit import audit, audit_set, find_broken_rules
from common.evidence.log import load
from common.evidence.records import TOKEN
from common.evidence.rules.rule import add, edit, retime
from common.evidence.rules.sealed_files import (
    bytes_of,
    cut_last_hash,
    decide_one_less,
    edit_event,
    edit_last_log,
    edit_line,
    edit_list,
    edit_seal,
    rechained,
    results_of,
    seal_of,
    state_in_head,
    unseal,
)
from common.evidence.sealed.chain import digest
from common.evidence.sealed.runs import read_sealing
from common.evidence.sealed.seal import RUNS
from tests.committed import committed_results
from tests.common.evidence.sealed import sealed_forgeries
from tests.common.evidence.sealed.sealed_sets import kill, numbered, seal_logs, with_killed, write_files

NUM_FORGERIES = 10


@cache
def honest_sets():
    """Return committed sets, and their files as they would be if they had been sealed."""
    run_sets = load([committed_results()])
    return [
        (run_set, seal_logs(numbered([log.file.read_text().splitlines() for log in run_set.logs])))
        for run_set in run_sets
    ]


def read_set(files, folder, folders):
    (run_set,) = load([write_files(files, folder.joinpath(*folders))])
    return run_set


def broken_rules(run_set):
    return {f.rule for f in find_broken_rules("C", read_sealing(run_set), run_set.lead)}


def find_broken_seals(kind, folder):
    """Forge sealed sets; yields the rules of seals that each of them breaks."""
    rng = random.Random(kind.__name__)
    for number in range(NUM_FORGERIES):
        run_set, files = rng.choice(honest_sets())
        yield broken_rules(read_set(kind(rng, files), folder / str(number), run_set.lead.folders))


def test_honest_sets_that_are_sealed_break_no_further_rule(tmp_path):
    for number, (run_set, files) in enumerate(honest_sets()):
        sealed = read_set(files, tmp_path / str(number), run_set.lead.folders)
        before, after = ({f.rule for f in audit_set(s) if f.rule[0] != "Y"} for s in (run_set, sealed))
        assert after == before and read_sealing(sealed).describe() == "sealed"


def test_a_log_of_no_known_benchmark_does_not_differ_from_the_seal_too(tmp_path):
    run_set, files = honest_sets()[0]
    rename = edit("submission_benchmark", value="x")
    unknown = {name: rename(files[name]) for name in results_of(files)}
    forged = read_set(files | unknown, tmp_path, (run_set.lead.folders[0], "other"))
    assert forged.lead.benchmark == "" and "C913" not in broken_rules(forged)


def test_an_honest_miss_breaks_no_rule_of_seals(tmp_path):
    rng = random.Random(0)
    for number, (run_set, files) in enumerate(honest_sets()):
        missed, _ = sealed_forgeries.with_miss(rng, files)
        assert broken_rules(read_set(missed, tmp_path / str(number), run_set.lead.folders)) == set()


def test_a_run_that_was_killed_before_its_first_evaluation_breaks_no_rule_but_warnings(tmp_path):
    for number, (run_set, files) in enumerate(honest_sets()):
        folder = tmp_path / str(number)
        killed = read_set(
            with_killed([files[name] for name in results_of(files)], 1), folder, run_set.lead.folders
        )
        before, after = (
            {f.rule for f in audit(one) if f.rule[0] != "Y" and f.severity == "error"}
            for one in (run_set, killed)
        )
        assert after == before and read_sealing(killed).describe().startswith("sealed, extended after")


def test_a_result_that_was_lost_is_missing(tmp_path):
    for number, (run_set, files) in enumerate(honest_sets()):
        lost = edit_list(edit_line(-1, outcome="lost", head=""))(files)
        del lost[results_of(lost)[-1]]
        assert broken_rules(read_set(lost, tmp_path / str(number), run_set.lead.folders)) == {"C906"}


def with_resumed(files, seed=None):
    """Return a sealed set whose last run was killed, and went on in a result with the head of the first."""
    *logs, last = (files[name] for name in results_of(files))
    resumed = add("eval_accuracy", key="resumed", value=7)(last)
    sealed = seal_logs(numbered([*logs, kill(last), retime(resumed, lambda ms: ms + 1)]))
    seeds = seal_of(sealed)["seeds"]
    seed = seeds[-1] if seed is None else seed
    facts = {"time": json.loads(sealed[RUNS][-3])["time"], "resumed": results_of(sealed)[-2], "seed": seed}
    going_on = edit_event(sealed[RUNS][-2], **facts)
    sealed = sealed | {RUNS: [*sealed[RUNS][:-2], going_on, sealed[RUNS][-1]]}
    sealed = edit_seal(lambda seal: {"seeds": seeds[:-1], "num_runs": len(seeds) - 1})(sealed)
    started = digest(bytes_of(sealed[RUNS][-4:-3]))
    return edit_last_log(rechained(lambda lines: state_in_head(lines, started=started)))(sealed)


def test_a_resumed_run_breaks_no_rule_of_seals_unless_it_has_another_seed(tmp_path):
    for number, (run_set, files) in enumerate(honest_sets()):
        folder, folders = tmp_path / str(number), run_set.lead.folders
        honest = read_set(with_resumed(files), folder / "honest", folders)
        assert broken_rules(honest) == set() and read_sealing(honest).describe() == "sealed"
        assert honest.logs[-1].is_resumed and "T215" in {f.rule for f in audit(honest)}
        other = read_set(with_resumed(files, seed=7), folder / "other", folders)
        assert broken_rules(other) == {"C910", "C911"}


def test_a_run_that_only_the_list_calls_resumed_has_no_seed_of_its_choice(tmp_path):
    for number, (run_set, files) in enumerate(honest_sets()):
        last = results_of(files)[-1]
        chosen = {last: edit("seed", value=7)(files[last])}
        going_on = edit_line(-2, resumed="result_99.txt", seed=7)(files[RUNS])
        forged = decide_one_less(files | chosen | {RUNS: going_on})
        forged_set = read_set(forged, tmp_path / str(number), run_set.lead.folders)
        assert not forged_set.logs[-1].is_resumed and broken_rules(forged_set) == {"C911"}


def test_a_log_stays_chained_when_its_first_hash_is_deleted(tmp_path):
    def cut_first_hash(lines):
        after = next(number for number, line in enumerate(lines, 1) if TOKEN in line)
        return [*cut_last_hash(lines[:after]), *lines[after:]]

    for number, (run_set, files) in enumerate(honest_sets()):
        cut = edit_last_log(cut_first_hash)(unseal(files))
        forged = read_set(cut, tmp_path / str(number), run_set.lead.folders)
        assert broken_rules(forged) == {"C902", "C903"}


@pytest.mark.parametrize("kind", sealed_forgeries.KINDS, ids=lambda kind: kind.__name__)
def test_ten_forgeries_of_a_sealed_set_are_found(kind, tmp_path):
    rules = sealed_forgeries.KINDS[kind]
    assert [broken for broken in find_broken_seals(kind, tmp_path) if not broken & rules] == []


@pytest.mark.parametrize("kind", sealed_forgeries.UNFOUND, ids=lambda kind: kind.__name__)
def test_whoever_computes_all_hashes_anew_leaves_no_trace_in_a_seal(kind, tmp_path):
    assert set().union(*find_broken_seals(kind, tmp_path)) == set()
