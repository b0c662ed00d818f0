"""Damaged logs and descriptions raise nothing. `FUZZ_INPUTS=100000 tests/run.sh -k fuzz` for a long test."""

import json
import os
import random
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.evidence.audit import audit, audit_sets, find_broken_rules
from common.evidence.log import RunSet, parse_log, split_lines
from common.evidence.records import TOKEN, Event, decode_all, parse_record
from common.evidence.rules.rule import add
from common.evidence.score import score
from common.evidence.system import Described
from tests.committed import committed_results

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", "2000"))
HOSTILE_VALUES = [None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**400, 1e308, 75.9, "", "x" * 5000]
HOSTILE_VALUES += ["\x1b[2J", "resnet", "../../etc/passwd", "<script>", [], {}, [[[]]], {"a": {"b": [None]}}]
PAYLOADS = ["", "5", "null", "[" * 100_000, '{"a":' * 900, "9" * 5000, "{}", "["]
PAYLOADS += [
    '{"time_ms": "1", "key": "run_stop", "value": null, "metadata": {}}',
    '{"time_ms": 1700000000000, "key": ["run_stop"], "value": null, "metadata": {}}',
    '{"time_ms": 1700000000000, "key": "run_stop", "value": null, "metadata": []}',
]
HOSTILE_TEXT = ["", "\x00", "\ufeff", "\u2028", "\x1b]0;title\x07", ":::mllog {}"]
HOSTILE_TEXT += [":::MLLOG " + payload for payload in PAYLOADS]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["run_start", "run_stop", "eval_accuracy", "block_start", "seed", "cache_clear"])
RECORDS = st.fixed_dictionaries(
    {
        "time_ms": st.integers(1_600_000_000_000, 1_700_000_000_000) | JSON,
        "key": KEYS | JSON,
        "value": st.floats() | st.sampled_from(["resnet", "bert", "open"]) | JSON,
        "metadata": st.dictionaries(st.sampled_from(["epoch_num", "status", "total"]), JSON) | JSON,
    }
)


def mutated(lines, rng):
    """Damage one to four lines: a value, a field, the bytes, the order, or the whole line."""
    lines = list(lines)
    for _ in range(rng.randint(1, 4)):
        index = rng.randrange(len(lines))
        kind = rng.randrange(6)
        if kind == 0:
            lines[index] = rng.choice(HOSTILE_TEXT)
        elif kind == 1:
            del lines[index]
        elif kind == 2:
            lines.insert(rng.randrange(len(lines)), lines[index])
        elif kind == 3 and lines[index]:
            cut = rng.randrange(len(lines[index]))
            lines[index] = lines[index][:cut] + chr(rng.randrange(256)) + lines[index][cut + 1 :]
        elif lines[index].startswith(":::MLLOG {"):
            try:
                event = json.loads(lines[index][9:])
            except ValueError:
                continue
            fields = event["metadata"] if kind == 5 and isinstance(event.get("metadata"), dict) else event
            fields[rng.choice(list(fields) or ["x"])] = rng.choice(HOSTILE_VALUES)
            lines[index] = ":::MLLOG " + json.dumps(event)
    return "\n".join(lines).encode("utf-8", "replace")


def read_one_by_one(data):
    """Return the records of a log and the numbers of its other lines, with one call for each line."""
    records, problems = [], []
    with suppress(ValueError):
        for number, line in enumerate(split_lines(data), 1):
            _, token, payload = line.rpartition(TOKEN)
            if token:
                event = parse_record(payload, number, problems)
                (records if isinstance(event, Event) else problems).append(event)
    return records, problems


def assert_equal_one_by_one(log, data):
    records, problems = read_one_by_one(data)
    assert repr(log.records) == repr(tuple(records))
    others = [problem for problem in log.problems if problem.kind in ("record", "time", "duplicate")]
    assert others == problems


def judged(logs, description):
    """Run every reader on logs, given as bytes, and on a description."""
    parsed = [parse_log(data, f"{number}.txt", ("8xA100", "resnet")) for number, data in enumerate(logs)]
    for log, data in zip(parsed, logs, strict=True):
        assert_equal_one_by_one(log, data)
    run_set = RunSet(folder="here", logs=tuple(parsed))
    findings = audit(run_set) + audit_sets([run_set, run_set])
    findings += find_broken_rules("Y", Described(run_set, "here.json", description), run_set.lead)
    assert all(str(finding).isprintable() for finding in findings)
    score(run_set)


def test_fuzz_damaged_logs_raise_nothing(golden):
    rng = random.Random(0)
    real = sorted(committed_results().glob("*/*/result_0.txt"))
    good = [path.read_text().splitlines()[-60:] for path in real]
    good += [golden.log("resnet"), golden.log("bert"), golden.log("resnet", size="mini")]
    assert real
    for _ in range(NUM_INPUTS // 2):
        field = rng.choice(["division", "status", "cooling", "number_of_nodes"])
        description = golden.description() | {field: rng.choice(HOSTILE_VALUES)}
        logs = [mutated(rng.choice(good), rng) for _ in range(2)]
        judged(logs, rng.choice([description, *HOSTILE_VALUES]))


@settings(
    max_examples=NUM_INPUTS // 10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.lists(st.lists(RECORDS, max_size=12), min_size=1, max_size=3), JSON)
def test_fuzz_arbitrary_records_raise_nothing(logs, description):
    judged(["\n".join(TOKEN + json.dumps(record) for record in log).encode() for log in logs], description)


@settings(max_examples=NUM_INPUTS // 10, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_fuzz_arbitrary_bytes_raise_nothing(data):
    judged([data, TOKEN.encode() + data], None)


RECORD = '{"time_ms": 1, "key": "a", "value": {"b": 1.5}, "metadata": {}}'
TOGETHER = [  # payloads that are no records, or others, one by one
    ['{"time_ms": 1, "key": "a", "metadata": {}, "value": [{"b": 1}', '{"c": 2}]}', f"{RECORD},{RECORD}"],
    ['{"time_ms": 1, "key": "a", "metadata": {}, "value": [{"b": 1}', '{"c": 2}]}', f"{RECORD} ,  {RECORD}"],
    ['{"time_ms": 1, "key": "a", "metadata": {}, "value": {"b": 1}', '"c": {}}', f"{RECORD}, {RECORD}"],
    [f"{RECORD},5", f"5,{RECORD}"],
    [RECORD.replace('"b": 1.5', '"b": 1.5, "b": 2'), RECORD],
    [RECORD.replace('"b": 1.5', '"b" : 1.5, "b": 2'), RECORD],
    [RECORD.replace("{}", '{"d": {"e": 1, "e": 2}}'), RECORD],
    [RECORD.replace('"b": 1.5', '"b": ' + "[" * 120 + "]" * 120), RECORD],
    [RECORD.replace('"b": 1.5', '"b": "' + "{" * 250 + '"'), RECORD],
    [RECORD.replace('"b": 1.5', '"b": ' + '{"b":' * 250 + "1" + "}" * 250), RECORD],
    [RECORD.replace("1.5", "9" * 5000), RECORD],
    ["", RECORD],
    [RECORD, ""],
    [RECORD.replace("1.5", '"'), RECORD.replace("1.5", '"')],
    [RECORD[:-1], RECORD[1:]],
    ["[]", RECORD],
]
PIECES = [RECORD, '{"c": 2}', '{"a": [{"b": 1}', '{"c": 2}]}', *'{}[], "\\1', '":']


@pytest.mark.parametrize("payloads", TOGETHER)
def test_what_is_no_record_alone_is_none_beside_others(payloads):
    assert decode_all(payloads) is None


@settings(max_examples=NUM_INPUTS, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=5).map("".join), max_size=6))
def test_fuzz_records_are_the_same_together_and_one_by_one(payloads):
    data = "\n".join(TOKEN + payload for payload in payloads).encode()
    assert_equal_one_by_one(parse_log(data, "a.txt"), data)


def test_good_logs_are_decoded_in_one_call(golden):
    lines = add("seed", value={"mfu": 0.41})(golden.log("bert"))
    payloads = [line.rpartition(TOKEN)[2] for line in lines if TOKEN in line]
    assert decode_all(payloads) == [json.loads(payload) for payload in payloads]
