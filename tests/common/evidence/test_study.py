"""A study beside timed runs: audited without errors, never scored, never packaged, passed over."""

import pytest

from common.errors import UserError
from common.evidence.audit import audit_paths, summary
from common.evidence.log import load
from common.evidence.paths import find_others, find_sets
from common.evidence.rules.rule import chain, edit, edit_all
from common.evidence.score import score
from common.evidence.submission.official import judge
from common.evidence.submission.package import stated_findings

STUDIED = chain(
    edit("quality_target", value=0.8),  # passed on the way, and missed at the end
    edit("eval_accuracy", at=-1, value=0.4, correct=144),
    edit_all("run_stop", lambda record: {"status": "aborted"}),
    edit("stop_at_target", value=False),
)


@pytest.fixture
def logs(golden):
    return [STUDIED(lines) for lines in golden.set(size="mini")[:3]]


def test_a_study_has_no_errors_no_score_and_no_place_in_a_package(golden, logs, tmp_path):
    folder = tmp_path / "results" / "study" / "sweep"
    golden.write(folder, logs)
    (entry,) = audit_paths([folder])
    assert [str(finding) for finding in entry.findings] == []
    found = score(entry.run_set)
    assert found.minutes is None and found.runs == () and "3 of a study not counted" in found.label
    assert sum("a study is no submission" in finding for finding in stated_findings(entry.run_set)) == 3
    said = summary(judge(entry.run_set))
    assert "not run" in said and "SUCCESS" not in said
    assert not any(verdict.refuses for verdict in judge(entry.run_set))


def test_study_folders_are_passed_over_unless_a_path_lies_inside(golden, logs, tmp_path):
    results = tmp_path / "results"
    golden.write(results / "study" / "sweep", logs)
    golden.write(results / "study" / "sweep", [[line.replace("resnet", "ssd") for line in logs[0]]])
    with pytest.raises(UserError, match="no result"):
        find_sets([results])
    timed = golden.write(results, golden.set(size="mini"))
    assert list(find_sets([results])) == [timed] and find_others([results]) == []
    for inside in ("study", "study/sweep"):
        assert sum(map(len, find_sets([results / inside]).values())) == 3
    assert load([results])[0].lead.is_study is False


def test_cells_of_a_study_may_agree_to_the_bit(golden, logs, tmp_path):
    for cell in (logs, [[line.replace("-optimized", "-again") for line in lines] for lines in logs]):
        golden.write(tmp_path / "results" / "study" / "sweep", cell)
    assert [entry.findings for entry in audit_paths([tmp_path / "results" / "study"])] == [(), ()]
