"""Many large logs: several processes read the same records as one."""

import json

from common.evidence import log
from common.evidence.audit import audit_paths
from common.evidence.log import load
from common.evidence.rules.rule import replace_record, rewrite
from common.evidence.score import score, score_json

# Logs of NVIDIA hold thousands of records like these, whose values are JSON objects.
with_statistics = replace_record(
    "block_stop", lambda line: [line, *[rewrite(line, key="tracked_stats", value={"mfu": 0.41})] * 500]
)


def test_sets_read_by_several_processes_are_judged_as_by_one(golden, tmp_path, monkeypatch):
    golden.write(tmp_path / "long", list(map(with_statistics, golden.set("bert"))))
    golden.write(tmp_path / "others", golden.set())
    whole = [score(run_set) for run_set in load([tmp_path])]
    judged = {}
    for few in (log.FEW_BYTES, 0):
        monkeypatch.setattr(log, "FEW_BYTES", few)
        brief = load([tmp_path], is_brief=True)
        assert [score_json(score(run_set)) for run_set in brief] == list(map(score_json, whole))
        assert sum(len(entry.records) for run_set in brief for entry in run_set.logs) < 10 * 300
        judged[few] = json.dumps([entry.as_json() for entry in audit_paths([tmp_path])])
    assert len(set(judged.values())) == 1 and all(entry.minutes for entry in whole)
