import pytest

from common.evidence.audit import audit, audit_log
from common.evidence.log import RunSet, load, parse_log
from common.evidence.rules import RULES

LOG_RULES = [about for about in RULES if not about.id.startswith("S")]
SET_RULES = [about for about in RULES if about.id.startswith("S")]


def run_set(logs, folders=("8xA100-optimized", "resnet")):
    parsed = [
        parse_log("\n".join(lines).encode(), f"result_{index}.txt", folders)
        for index, lines in enumerate(logs)
    ]
    return RunSet(folder="here", logs=tuple(parsed))


def broken_rules(logs):
    return {finding.rule for finding in audit(run_set(logs))}


@pytest.mark.parametrize("benchmark", ["resnet", "bert"])
@pytest.mark.parametrize("size", ["full", "mini"])
def test_no_rule_fires_on_good_logs(golden, tmp_path, benchmark, size):
    golden.write(tmp_path, golden.set(benchmark, size=size))
    (found,) = load([tmp_path])
    assert [str(finding) for finding in audit(found)] == []


@pytest.mark.parametrize("about", LOG_RULES, ids=lambda about: about.id)
def test_a_rule_finds_its_change_of_a_log_alone(golden, about):
    (log,) = run_set([about.breaks(golden.log())]).logs
    assert {finding.rule for finding in audit_log(log)} == {about.id, *about.also}


@pytest.mark.parametrize("about", SET_RULES, ids=lambda about: about.id)
def test_a_rule_finds_its_change_of_a_set_alone(golden, about):
    assert broken_rules(about.breaks(golden.set())) == {about.id, *about.also}


def test_rules_have_distinct_ids_a_message_and_a_section():
    assert len({about.id for about in RULES}) == len(RULES)
    assert all(
        about.message and about.section and about.severity in ("error", "warning", "strict")
        for about in RULES
    )


def test_published_logs_break_no_rule(published):
    assert [str(finding) for found in load([published]) for finding in audit(found)] == []


def test_a_broken_file_does_not_hide_the_others(golden):
    findings = audit(run_set([["binary \0"], *golden.set()[:3], golden.log(index=3)[:-1]]))
    assert {(finding.path, finding.rule) for finding in findings} >= {
        ("result_0.txt", "P001"),
        ("result_4.txt", "K101"),
    }
