"""Each rule alone finds its change of good logs; published logs have no error."""

from dataclasses import replace

import pytest

from common.evidence.audit import audit, audit_log, audit_sets, find_broken_rules
from common.evidence.log import RunSet, load, parse_log
from common.evidence.rules import RULES
from common.evidence.rules.copies import SetAndStudies, borrow_trace
from common.evidence.rules.rounds import ChosenRound, last_round
from common.evidence.rules.rule import (
    add,
    chain,
    delay_run,
    edit,
    edit_all,
    miss_target,
    move,
    remove,
    replace_record,
    shift_from,
    shift_record,
)
from common.evidence.score import score
from common.evidence.system import Described
from tests.common.evidence.anchored import stamped
from tests.common.evidence.conftest import of_another_suite
from tests.common.evidence.sealed.sealed_sets import numbered, seal_logs, write_files


def run_set(logs, folders=("8xA100-optimized", "resnet"), folder="here"):
    parsed = [
        parse_log("\n".join(lines).encode(), f"{folder}/result_{index}.txt", folders)
        for index, lines in enumerate(logs)
        if lines
    ]
    return RunSet(folder=folder, logs=tuple(parsed))


def ids(findings):
    return {finding.rule for finding in findings}


NAMES = ("baseline", "optimized")


def two_sets(golden):
    return [golden.set(configuration=name, block_s=80) for name in NAMES]


def two_systems(logs):
    pairs = zip(NAMES, logs, strict=True)
    return [run_set(lines, (f"8xA100-{name}", "resnet"), name) for name, lines in pairs]


def audit_changed(golden, folder, family, breaks=lambda good: good, size="full"):
    """Return the findings in good logs, or in the other input of a family of rules, after a change."""
    good = run_set(golden.set())
    match family:
        case "P" | "K" | "T" | "Q":
            folders = (f"8xA100{'-mini' if size == 'mini' else ''}-optimized", "resnet")
            return audit_log(run_set([breaks(golden.log(size=size))], folders).lead)
        case "S":
            return audit(run_set(breaks(golden.set())))
        case "X":
            sets = two_systems(breaks(two_sets(golden)))
            return audit_sets(sets) + [finding for one in sets for finding in audit(one)]
        case "C":
            write_files(breaks(seal_logs(numbered(golden.set()))), folder / "results/8xA100-optimized/resnet")
            golden.describe(folder / "systems")
            return audit(load([folder])[0])
        case "Y":
            broken = breaks(golden.description())
            description, why = broken if isinstance(broken, tuple) else (broken, "")
            subject = Described(good, "here.json", description, why)
        case "F":
            subject = breaks(SetAndStudies(good, []))
        case "R":
            subject = breaks(ChosenRound(good, last_round("resnet")))
        case "N":
            subject = breaks(stamped(good))
    return find_broken_rules(family, subject, good.lead)


@pytest.mark.parametrize("about", RULES, ids=lambda about: about.id)
def test_a_rule_finds_its_change_alone(golden, tmp_path, about):
    assert ids(audit_changed(golden, tmp_path, about.id[0], about.breaks, about.size)) == {about.id}


@pytest.mark.parametrize("family", sorted({about.id[0] for about in RULES}))
def test_no_rule_of_a_family_fires_without_a_change(golden, tmp_path, family):
    assert audit_changed(golden, tmp_path, family) == []


@pytest.mark.parametrize("benchmark", ["resnet", "bert"])
@pytest.mark.parametrize("size", ["full", "mini"])
def test_no_rule_fires_on_good_logs(golden, tmp_path, benchmark, size):
    golden.write(tmp_path / "results", golden.set(benchmark, size=size))
    golden.describe(tmp_path / "systems", size=size)
    (good,) = load([tmp_path])
    assert [str(finding) for finding in audit(good)] == []


def test_one_seed_on_two_systems_may_give_equal_runs(golden):
    logs = borrow_trace(two_sets(golden))
    logs[1][-1] = edit("seed", value=1004)(logs[1][-1])
    assert ids(audit_sets(two_systems(logs))) == set()


def test_open_fields_are_a_warning_of_full_sets_alone(golden):
    described = golden.description() | {"cooling": "not collected: nobody looked", "sw_notes": "unknown"}
    for size, expected in (("full", {"Y608"}), ("mini", set())):
        subject = Described(run_set(golden.set(size=size)), "here.json", described)
        findings = find_broken_rules("Y", subject, subject.run_set.lead)
        assert ids(findings) == expected and errors(findings) == set()


aborted = chain(miss_target, edit("run_stop", status="aborted"))
interrupted = edit_all("run_stop", lambda r: {"metadata": {"status": "aborted", "reason": "interrupted"}})
without_status = replace_record("run_stop", lambda s: [s.replace('"status": "success", ', "")])
CLEARED_LAST = add("run_stop", key="cache_clear", value=True)
NOT_HONEST = {  # no published log is like these
    "aborted at the target": (edit("run_stop", status="aborted"), "Q313"),
    "no status": (without_status, "Q312"),
    "no status below the target": (chain(miss_target, without_status), "Q312"),
    "a null status": (chain(miss_target, edit("run_stop", status=None)), "Q312"),
    "an unknown status": (chain(miss_target, edit("run_stop", status="banana")), "Q312"),
    "an epoch that falls": (edit("eval_accuracy", at=2, epoch_num=1), "Q314"),
    "an epoch as text": (edit("eval_accuracy", at=2, epoch_num="12"), "Q314"),
    "an epoch of null": (edit("eval_accuracy", at=2, epoch_num=None), "Q314"),
    "a null submitter": (edit("submission_org", value=None), "K117"),
    "a number for a submitter": (edit("submission_org", value=1), "K117"),
    "caches left": (edit("cache_clear", value=False), "K107"),
    "caches cleared after the run": (chain(remove("cache_clear"), CLEARED_LAST), "K118"),
    "ten hours before the run": (shift_from("run_start", 0, 36_000_000), "T217"),
    "an epoch before the run": (move("epoch_start", before="run_start"), "T209"),
    "ten samples evaluated": (edit("eval_samples", value=10), "K119"),
    "the evaluation set trained on": (edit("train_samples", value=1281167 + 50000), "K119"),
    "a seed as text": (edit("seed", value="abc"), "K120"),
    "a batch of nothing": (edit("global_batch_size", value=0), "K103"),
    "a path for a benchmark": (edit("submission_benchmark", value="../../etc/passwd"), "K102 K104"),
    "a run that stops before it starts": (shift_record("run_stop", -4_000_000), "T201 T202"),
    "a run that starts 200 s later": (shift_record("run_start", 200_000), "T202"),
    "an accuracy of NaN": (edit("eval_accuracy", value=float("nan")), "Q301"),
    "an accuracy in percent": (edit("eval_accuracy", value=72.04), "Q301"),
    "an accuracy as text": (edit("eval_accuracy", value="0.72"), "Q301"),
}
HONEST = {  # published logs are like these
    "another word for aborted": chain(miss_target, edit("run_stop", status="abort")),
    "a miss without run_stop": chain(miss_target, remove("run_stop")),
    "no seed": remove("seed"),
    "an epoch twice": edit("eval_accuracy", at=2, epoch_num=8),
    "a minute before the run": shift_from("run_start", 0, 56_615),
    "an eighth of the set evaluated": edit("eval_samples", value=6400),
    "an epoch rounded up": edit("train_samples", value=1281168),
}


def errors(findings):
    return {finding.rule for finding in findings if finding.severity == "error"}


@pytest.mark.parametrize(("mutation", "rules"), NOT_HONEST.values(), ids=NOT_HONEST)
def test_what_no_published_log_does_is_an_error_on_any_log(golden, mutation, rules):
    good = of_another_suite(golden.set())
    (log,) = run_set([mutation(good[0])]).logs
    assert not log.is_ours and errors(audit_log(log)) == set(rules.split())


@pytest.mark.parametrize("mutation", HONEST.values(), ids=HONEST)
def test_what_published_logs_do_is_no_error(golden, mutation):
    good = of_another_suite(golden.set())
    changed = run_set([mutation(good[0]), *good[1:]])
    assert errors(audit(changed)) <= {"S405"}  # where it changes what a set shares
    assert errors(audit_log(changed.lead)) == set()


def without(key, *names):
    def drop(record):
        metadata = {name: value for name, value in record["metadata"].items() if name not in names}
        return {"metadata": metadata}

    return edit_all(key, drop)


def disable_head(line):
    """Replace the settings by one line under the title of the configuration."""
    return lambda lines: [line if text.startswith("#   ") else text for text in lines]


LEFT_OUT = {
    "a head of comments": disable_head("#   # none"),
    "a head that is no YAML": disable_head("#   {"),
    "head": lambda lines: [line for line in lines if not line.startswith("# ---")],
    "name": remove("configuration_name"),
    "name and size": chain(remove("configuration_name"), remove("benchmark_size")),
    "samples at the end": without("run_stop", "samples"),
    "the monotonic clock": without("run_stop", "duration_ms", "clock_drift_ms"),
    "the monotonic clock of a success that has a reason": chain(
        without("run_stop", "duration_ms", "clock_drift_ms"), edit("run_stop", reason="interrupted")
    ),
    "samples of evaluations": without("eval_accuracy", "samples"),
    "samples of losses": without("train_loss", "samples"),
    "the start of an evaluation": remove("eval_start", at=1),
    "the evaluation of an accuracy": chain(remove("eval_start", at=1), remove("eval_stop", at=1)),
    "a throughput": remove("throughput"),
    "who else computed": remove("machine_load"),
    "the threads": remove("num_threads"),
    "a rate that the head states": remove("opt_base_learning_rate"),
    "a block": chain(*(remove(key) for key in ("block_start", "block_stop", "throughput", "train_loss"))),
}


@pytest.mark.parametrize("mutation", LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_a_rule_reads_cannot_be_left_out_of_an_own_log(golden, mutation):
    (log,) = run_set([mutation(golden.log())]).logs
    assert log.is_ours and "K124" in errors(audit_log(log))


def without_setting(name):
    return lambda lines: [line for line in lines if not line.startswith(f"#   {name}: ")]


@pytest.mark.parametrize("name", ["global_batch_size", "evaluate_every", "data"])
def test_a_head_without_the_plan_of_evaluations_is_found(golden, name):
    (log,) = run_set([without_setting(name)(golden.log())]).logs
    (finding,) = audit_log(log)
    assert finding.rule == "Q315" and "does not say when it was to be evaluated" in finding.message


def test_the_samples_of_a_loss_by_which_copies_are_found_are_those_of_its_block(golden):
    later = edit_all("train_loss", lambda r: {"samples": r["metadata"]["samples"] + 1})
    for benchmark in ("resnet", "bert"):
        (log,) = run_set([later(golden.log(benchmark))], ("8xA100-optimized", benchmark)).logs
        assert ids(audit_log(log)) == {"Q316"}


def shorten_evaluations(lines):
    return next(about for about in RULES if about.id == "T219").breaks(lines)


EVALUATED_IN_NO_TIME = {  # but nothing that says how fast the machine trains
    "resumed": (add("epoch_stop", at=2, key="resumed", value=7), {"T215"}),
    "interrupted": (chain(miss_target, interrupted), set()),
    "beside other programs": (
        edit_all("machine_load", lambda _: {"value": 1.5, "cores": 2.0, "threads": 2}),
        {"T232"},
    ),
    "ranks on processors": (chain(edit("num_ranks", value=2), edit("num_accelerators", value=0)), set()),
}


@pytest.mark.parametrize(("mutation", "rules"), EVALUATED_IN_NO_TIME.values(), ids=EVALUATED_IN_NO_TIME)
def test_the_pace_of_a_broken_run_tells_nothing_of_its_evaluations(golden, mutation, rules):
    (log,) = run_set([mutation(shorten_evaluations(golden.log()))]).logs
    assert ids(audit_log(log)) == rules


def beside_others(*blocks):
    return chain(*(edit("machine_load", at=at, value=1.5, cores=2.0, threads=2) for at in blocks))


def lower_threads(at):
    return add("block_start", at=at, key="threads_lowered", value=1, before=2)


LOWERED_LAST = add("eval_accuracy", at=-1, key="threads_lowered", value=1, before=2)
EARLY_LOAD = add("run_start", key="machine_load", value=1.5, cores=2.0, threads=2)
SLOW_BLOCKS = {  # and whether these are all
    "one, by several events": (chain(beside_others(0), *[lower_threads(0)] * 4), False),
    "each, by one event or the other": (
        chain(beside_others(0, 1, 2), lower_threads(3), lower_threads(4)),
        True,
    ),
    "all but the last, and events behind it": (chain(beside_others(0, 1, 2, 3), LOWERED_LAST), False),
    "all but the first, and events before it": (chain(beside_others(1, 2, 3, 4), EARLY_LOAD), False),
}


@pytest.mark.parametrize(("mutation", "is_each"), SLOW_BLOCKS.values(), ids=SLOW_BLOCKS)
def test_the_pace_of_evaluations_is_known_by_each_block_that_was_not_slowed(golden, mutation, is_each):
    (log,) = run_set([mutation(shorten_evaluations(golden.log()))]).logs
    assert ("T219" in ids(audit_log(log))) is not is_each


def test_a_success_came_to_its_end_whatever_reason_it_has(golden):
    with_reason = edit("run_stop", reason="interrupted")
    (log,) = run_set([with_reason(shorten_evaluations(golden.log()))]).logs
    assert ids(audit_log(log)) == {"T219"}


def test_the_time_after_the_last_evaluation_is_no_training(golden):
    late = delay_run("run_stop", 0, 36_000_000)
    (log,) = run_set([late(of_another_suite([golden.log()])[0])]).logs
    assert ids(audit_log(log)) == {"T210"}
    (short,) = run_set(of_another_suite([shorten_evaluations(golden.log())])).logs
    assert ids(audit_log(short)) == {"T219"} and errors(audit_log(short)) == set()


def test_a_step_back_of_the_clock_by_ntp_is_a_warning(golden):
    for step, rule, severity in ((400, "T221", "warning"), (128, "", ""), (1500, "T220", "error")):
        back = edit("run_stop", duration_ms=210_030 + step, clock_drift_ms=-step)
        (log,) = run_set([back(golden.log())]).logs
        found = {(finding.rule, finding.severity) for finding in audit_log(log)}
        assert found == ({(rule, severity)} if rule else set())
        assert all(f"set back by {step / 1000:.2f} s; make the run again" in str(f) for f in audit_log(log))


def test_threads_count_where_the_cpu_computes(golden):
    for num_accelerators, expected in ((0, {"S414", "S416"}), (8, set())):
        logs = golden.set()
        logs = [add("seed", key="num_accelerators", value=num_accelerators)(lines) for lines in logs]
        others = [add("seed", key="num_threads", value=2 + (n == 4))(lines) for n, lines in enumerate(logs)]
        assert ids(audit(run_set(others))) == expected
        logs[4] = edit("processor", bf16_instructions=["amx_bf16"])(logs[4])
        assert ids(audit(run_set(logs))) == expected - {"S414"}


def test_the_first_trial_of_a_search_may_miss_with_the_recipe_of_a_set(golden):
    (about,) = [about for about in RULES if about.id == "F801"]
    hidden = about.breaks(SetAndStudies(run_set(golden.set()), []))
    reached = hidden._replace(studied=hidden.run_set.logs)
    assert find_broken_rules("F", reached, hidden.run_set.lead) == []
    for name, expected in (("trial0", set()), ("trial0+ema", set()), ("trial01", {"F801"}), ("x", {"F801"})):
        folders = (f"8xA100-optimized-{name}", "resnet")
        studied = [replace(log, folders=folders) for log in hidden.studied]
        assert ids(find_broken_rules("F", hidden._replace(studied=studied), hidden.run_set.lead)) == expected


def test_one_run_of_a_set_may_miss_and_not_its_only_one(golden):
    missed = aborted(golden.log())
    assert errors(audit(run_set([missed, *golden.set()[1:]]))) == set()
    assert "S408" in errors(audit(run_set([missed])))


def test_runs_may_miss_that_do_not_count(golden):
    logs = golden.set(num_logs=10)
    for others in ((0, 9), (4, 5)):
        some = [aborted(log) if index in others else log for index, log in enumerate(logs)]
        audited = run_set(some)
        assert ("S408" in errors(audit(audited))) is (others == (4, 5)) is (score(audited).minutes is None)


def test_a_search_of_a_study_may_miss_and_has_as_many_runs_as_it_likes(golden, tmp_path):
    logs = [aborted(golden.log())] * 2
    of_study = load([golden.write(tmp_path / "results" / "study" / "search", logs)])
    of_score = load([golden.write(tmp_path / "results", logs)])
    assert not ids(audit(*of_study)) & {"S406", "S408"} and ids(audit(*of_score)) >= {"S406", "S408"}


def test_a_study_outside_its_folder_is_one_by_what_its_logs_say(golden):
    to_the_end = chain(aborted, edit("stop_at_target", value=False))
    logs = [to_the_end(lines) for lines in golden.set(num_logs=3)]
    other_code = [*logs[:2], ["# commit: another", *logs[2]]]
    assert ids(audit(run_set(other_code))) == {"T216"}  # and S406, S407, S408 for logs of timed runs


def test_rules_have_distinct_ids_a_message_and_a_section():
    assert len({about.id for about in RULES}) == len(RULES)
    assert {about.severity for about in RULES} == {"error", "warning", "strict"}
    assert all(about.message and about.section for about in RULES)


def test_two_runs_in_one_file_are_named_as_such_and_not_as_other_settings(golden):
    good = golden.set()
    findings = audit(run_set([*good[:4], good[4] + golden.log(index=5)]))
    assert ("K101", "here/result_4.txt") in {(finding.rule, finding.path) for finding in findings}
    assert not ids(findings) & {"S405", "S411", "S416"}


def test_a_broken_file_does_not_hide_the_others(golden):
    findings = audit(run_set([["binary \0"], *golden.set()[:3], golden.log(index=3)[:-1]]))
    places = {(finding.path, finding.rule) for finding in findings}
    assert places >= {("here/result_0.txt", "P001"), ("here/result_4.txt", "K101")}
    assert not ids(findings) & {"S406", "S418", "S420"}  # all five are there


def test_a_run_that_was_cut_off_may_leave_an_interval_open(golden):
    lines = golden.log()
    start = next(i for i, line in enumerate(lines) if '"key": "epoch_stop"' in line)
    stop = lines[-1].replace('"success"', '"aborted"')
    (log,) = run_set([lines[:start] + [stop]]).logs
    assert "K110" not in ids(audit_log(log))
