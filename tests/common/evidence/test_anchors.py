"""Time-stamps beside results: real replies of OpenSSL are read, and every later change is found."""

import base64
import json
import sys

import pytest

from common.errors import UserError
from common.evidence.log import load
from common.evidence.sealed.anchors import ANCHORS, MAX_ANCHORS_BYTES, read_anchored
from common.evidence.sealed.replies import load_roots, read_reply
from tests.authority import Authority
from tests.command import ttt_here
from tests.common.evidence.anchored import append_reply, audit_anchors, write_anchored


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def folder(golden, tmp_path, authority):
    return write_anchored(tmp_path / "results", golden.log(), authority)


def rules(folder, roots=()):
    return {finding.rule: str(finding) for finding in audit_anchors(folder, roots)[1]}


def change_line(folder, number, change):
    """Rewrite a line of anchors.jsonl (from 0), or remove it."""
    path = folder / ANCHORS
    lines = path.read_text().splitlines()
    lines[number : number + 1] = [json.dumps(after)] if (after := change(json.loads(lines[number]))) else []
    path.write_text("\n".join(lines) + "\n")


def test_good_replies_break_no_rule_and_the_summary_says_who_is_known(folder, authority):
    anchored, findings = audit_anchors(folder)
    assert findings == [] and anchored.summary().startswith(
        "8 of 8 places stamped by CN=Test Authority, whose"
    )
    anchored, findings = audit_anchors(folder, load_roots(authority.root))
    assert findings == [] and anchored.summary() == "8 of 8 places stamped by CN=Test Authority"


def test_a_root_of_another_authority_is_refused(folder, tmp_path):
    other = Authority(tmp_path / "other")  # of the same name
    assert rules(folder, load_roots(other.root)).keys() == {"N902"}


def test_a_line_that_was_edited_or_removed_after_its_time_stamp_is_named(folder, golden):
    path, last = folder / "result_0.txt", f"line {len(golden.log())} of result_0.txt was"
    path.write_text(path.read_text().replace('"success"', '"aborted"'))
    broken = rules(folder)
    assert broken.keys() == {"N901"} and f"{last} changed" in broken["N901"]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert f"{last} removed" in rules(folder)["N901"]


def test_a_result_that_was_removed_or_put_in_its_place_is_named(folder):
    (folder / "result_0.txt").rename(folder / "result_1.txt")
    assert "of result_0.txt was removed" in rules(folder)["N901"]


def test_a_seal_that_was_changed_is_named(folder):
    (folder / "runset.json").write_text("{ }\n")
    assert "runset.json was changed" in rules(folder)["N901"]


def test_a_reply_for_other_bytes_is_found_whatever_hash_stands_beside_it(folder, authority):
    reply = base64.b64encode(authority.stamp(b"a log that was stamped")).decode()
    change_line(folder, 3, lambda fields: fields | {"reply": reply})
    assert rules(folder).keys() == {"N901"}


def test_no_byte_of_a_reply_can_be_changed_to_another_time(folder, authority):
    good = authority.stamp(b"data")
    before = read_reply(good)
    assert not before.fault
    num_faults = 0
    for index in range(len(good)):
        changed = good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :]
        try:
            after = read_reply(changed)
        except ValueError:
            continue
        num_faults += bool(after.fault)
        same = (after.imprint, after.time_ms, after.accuracy_ms) == before[:3]
        assert same or after.fault
    assert num_faults > 100


def test_missing_and_late_replies_are_counted_in_a_warning(folder):
    change_line(folder, 2, lambda fields: fields | {"delay_ms": 4000})
    change_line(folder, 3, lambda fields: {**fields, "reply": "", "failure": "HTTP status 503"})
    change_line(folder, 4, lambda fields: None)
    _, findings = audit_anchors(folder)
    assert {(finding.rule, finding.severity) for finding in findings} == {("N905", "warning")}
    ends = ("result_0.txt line 63 (eval_accuracy)", "1 came more than 2 s late and bound no interval")
    assert all(f"{end}; rule: " in finding.message for end, finding in zip(ends, findings, strict=True))
    assert "2 of 8 have none, 1 without a reason" in findings[0].message


@pytest.mark.parametrize("option", ["--anchor URL", "--anch=URL"])
def test_a_set_that_asked_for_replies_and_has_no_file_of_them_has_a_warning(folder, option):
    (folder / ANCHORS).unlink()
    (run_set,) = load([folder])
    assert read_anchored(run_set) is None
    log = folder / "result_0.txt"
    log.write_text(f"# command: ttt run resnet optimized {option}\n{log.read_text()}")
    anchored, findings = audit_anchors(folder)
    assert anchored.summary().startswith("0 of 8 places stamped")
    assert [(finding.rule, finding.severity) for finding in findings] == [("N905", "warning")]
    assert "8 of 8 have none, 8 without a reason" in findings[0].message


def test_a_made_up_log_that_is_stamped_at_once_is_found(golden, tmp_path, authority):
    """All records have replies, but 230 s of the log took the authority a second."""
    folder = golden.write(tmp_path, [golden.log()])
    for number, line in enumerate((folder / "result_0.txt").read_bytes().splitlines(keepends=True), 1):
        if b'"run_start"' in line or b'"run_stop"' in line:
            append_reply(folder, "result_0.txt", number, line, authority.stamp(line))
    assert "210.0 s from line" in rules(folder)["N903"]


def test_without_the_library_a_warning_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "rfc3161_client", None)
    broken = rules(folder)
    assert broken.keys() == {"N906"} and "pip install" in broken["N906"] and "warning" in broken["N906"]
    (folder / "runset.json").write_text("{ }\n")
    assert rules(folder).keys() == {"N901", "N906"}


HOSTILE = {
    "nothing": b"",
    "binary": bytes(range(256)) * 100,
    "an array": b"[1]\n",
    "nested": b"[" * 100_000 + b"\n",
    "a path": b'{"of": "../../etc/passwd", "line": 0, "sha256": "%s", "reply": "AA=="}\n' % (b"0" * 64),
    "a line far away": b'{"of": "result_0.txt", "line": 99999999999, "sha256": "%s", "reply": "AA=="}\n'
    % (b"0" * 64),
    "no base64": b'{"of": "result_0.txt", "line": 1, "sha256": "%s", "reply": "A"}\n' % (b"0" * 64),
    "a huge number": b'{"of": "result_0.txt", "line": 1e400, "sha256": "%s", "reply": "A"}\n' % (b"0" * 64),
    "too many lines": b"{}\n" * 20_000,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_get_findings_and_no_traceback(folder, content):
    (folder / ANCHORS).write_bytes(content)
    _, findings = audit_anchors(folder)
    assert findings and {finding.rule for finding in findings} <= {"N901", "N902", "N905"}


def test_links_and_files_without_an_end_are_not_read(folder):
    path = folder / ANCHORS
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    assert "links are refused" in rules(folder)["N905"]
    path.unlink()
    with path.open("wb") as file:
        file.truncate(MAX_ANCHORS_BYTES + 1)
    assert "larger than" in rules(folder)["N905"]


def test_check_takes_a_root_and_refuses_what_is_none(folder, authority, tmp_path):
    done = ttt_here("check", folder, "--no-official", "--anchor-root", authority.root)
    assert done.stdout.strip().endswith("time-stamps: 8 of 8 places stamped by CN=Test Authority")
    (tmp_path / "not.pem").write_text("no certificate")
    for path in (tmp_path / "not.pem", tmp_path / "absent.pem"):
        with pytest.raises(UserError, match="--anchor-root"):
            load_roots(path)
