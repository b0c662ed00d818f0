"""Many large logs: each record is decoded once, and several processes read what one would."""

import json

import pytest

from common.evidence import log, records
from common.evidence.audit import audit_paths
from common.evidence.log import load, parse_log
from common.evidence.score import score, score_json
from tests.common.evidence import nvidia_like


class Never:
    def decode(self, payload):
        pytest.fail(f"decoded twice: {payload}")


def test_a_record_with_an_object_for_its_value_is_decoded_once(golden, monkeypatch):
    monkeypatch.setattr(records, "STRICT_DECODER", Never())
    for lines in (list(nvidia_like.lines(0, 300)), golden.log()):
        parsed = parse_log("\n".join(lines).encode(), "here")
        assert len(parsed.records) > 30 and not parsed.problems


def test_sets_read_by_several_processes_are_judged_as_by_one(golden, tmp_path, monkeypatch):
    nvidia_like.write_sets(tmp_path, nvidia_like.RUNS, 600)
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
