import pytest

from common.evidence.audit import audit, audit_log, audit_sets, broken
from common.evidence.log import RunSet, load, parse_log
from common.evidence.rules import RULES
from common.evidence.rules.systems import Described


def rules_of(*families):
    return [pytest.param(about, id=about.id) for about in RULES if about.id[0] in families]


def run_set(logs, folders=("8xA100-optimized", "resnet"), folder="here"):
    parsed = [
        parse_log("\n".join(lines).encode(), f"{folder}/result_{index}.txt", folders)
        for index, lines in enumerate(logs)
    ]
    return RunSet(folder=folder, logs=tuple(parsed))


def ids(findings):
    return {finding.rule for finding in findings}


@pytest.mark.parametrize("benchmark", ["resnet", "bert"])
@pytest.mark.parametrize("size", ["full", "mini"])
def test_no_rule_fires_on_good_logs(golden, tmp_path, benchmark, size):
    golden.write(tmp_path / "results", golden.set(benchmark, size=size))
    golden.describe(tmp_path / "systems", size=size)
    (found,) = load([tmp_path])
    assert [str(finding) for finding in audit(found)] == []


@pytest.mark.parametrize("about", rules_of(*"PKTQ"))
def test_a_rule_finds_its_change_of_a_log_alone(golden, about):
    (log,) = run_set([about.breaks(golden.log())]).logs
    assert ids(audit_log(log)) == {about.id}


@pytest.mark.parametrize("about", rules_of("S"))
def test_a_rule_finds_its_change_of_a_set_alone(golden, about):
    assert ids(audit(run_set(about.breaks(golden.set())))) == {about.id}


@pytest.mark.parametrize("about", rules_of("X"))
def test_a_rule_finds_its_change_between_sets_alone(golden, about):
    names = ("baseline", "optimized")
    good = [golden.set(configuration=name, block_s=80) for name in names]

    def sets(logs):
        pairs = zip(names, logs, strict=True)
        return [run_set(lines, (f"8xA100-{name}", "resnet"), name) for name, lines in pairs]

    assert ids(audit_sets(sets(good))) == set()
    changed = sets(about.breaks(good))
    assert ids(audit_sets(changed)) == {about.id}
    assert [ids(audit(each)) for each in changed] == [set(), set()]


@pytest.mark.parametrize("about", rules_of("Y"))
def test_a_rule_finds_its_change_of_a_description_alone(golden, about):
    good = golden.description()
    subject = Described(run_set(golden.set()), "here.json", good)
    assert [finding for finding in broken("Y", subject, subject.run_set.lead)] == []
    description, why = broken_by if isinstance(broken_by := about.breaks(good), tuple) else (broken_by, "")
    changed = subject._replace(description=description, why=why)
    assert ids(broken("Y", changed, changed.run_set.lead)) == {about.id}


def test_rules_have_distinct_ids_a_message_and_a_section():
    assert len({about.id for about in RULES}) == len(RULES)
    assert all(
        about.message and about.section and about.severity in ("error", "warning", "strict")
        for about in RULES
    )


def test_a_broken_file_does_not_hide_the_others(golden):
    findings = audit(run_set([["binary \0"], *golden.set()[:3], golden.log(index=3)[:-1]]))
    assert {(finding.path, finding.rule) for finding in findings} >= {
        ("here/result_0.txt", "P001"),
        ("here/result_4.txt", "K101"),
    }


def test_a_run_that_was_cut_off_may_leave_an_interval_open(golden):
    lines = golden.log()
    start = next(i for i, line in enumerate(lines) if '"key": "epoch_stop"' in line)
    stop = lines[-1].replace('"success"', '"aborted"')
    (log,) = run_set([lines[:start] + [stop]]).logs
    assert "K110" not in ids(audit_log(log))
