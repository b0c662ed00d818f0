"""Sets whose records have time-stamps: with invented replies, and with real ones of an authority."""

import base64
import json
import time

from common.evidence.audit import find_broken_rules
from common.evidence.log import load
from common.evidence.records import TOKEN
from common.evidence.rules.rule import retime
from common.evidence.sealed.anchors import (
    ANCHORED_KEYS,
    ANCHORS,
    Anchor,
    Anchored,
    Place,
    Stamp,
    read_anchored,
)
from common.evidence.sealed.chain import digest
from common.evidence.sealed.replies import Reply
from common.evidence.sealed.seal import SEAL
from tests.common.evidence.conftest import write_set

SET_FORWARD_MS = 123_456  # the clock of the authority
DELAY_MS = 300


def stamped(run_set):
    """Return a set with a good reply for each place: the seal a minute before the first run."""
    start_ms = min(log.first("run_start").time_ms for log in run_set.readable)
    places = [(Place(SEAL, 0), start_ms - 60_000)]
    for number, log in enumerate(run_set.readable):
        for event in log.events(*ANCHORED_KEYS):
            places.append((Place(f"result_{number}.txt", event.line, log, event), event.time_ms))
    stamps = tuple(stamp(number, *place) for number, place in enumerate(places, 1))
    return Anchored("here/anchors.jsonl", None, tuple(place for place, _ in places), stamps)


def stamp(number, place, time_ms, delay_ms=DELAY_MS):
    """Return the reply for a place that was reached at a time."""
    stamp_ms = (time_ms + SET_FORWARD_MS + delay_ms // 2) // 1000 * 1000
    reply = Reply(bytes(32), stamp_ms, 5.0, None, "CN=Test Authority", True, "")
    anchor = Anchor(of=place.of, line=place.line, sha256="0" * 64, delay_ms=delay_ms)
    return Stamp(number, anchor, place, "", "", reply)


def write_anchored(folder, lines, authority):
    """Write one run that takes no time, and the real replies for its records; returns its folder."""
    now_ms = round(time.time() * 1000)
    folder = write_set(folder, [retime(lines, lambda ms: now_ms)])
    (folder / SEAL).write_text("{}\n")
    pieces = [(SEAL, 0, b"{}\n")]
    for number, line in enumerate((folder / "result_0.txt").read_bytes().splitlines(keepends=True), 1):
        if TOKEN.encode() in line and json.loads(line[len(TOKEN) :])["key"] in ANCHORED_KEYS:
            pieces.append(("result_0.txt", number, line))
    for piece in pieces:
        append_reply(folder, *piece, authority.stamp(piece[2]), time.time() * 1000 - now_ms)
    return folder


def append_reply(folder, of, line, data, reply, delay_ms=0):
    fields = {"of": of, "line": line, "sha256": digest(data), "delay_ms": round(delay_ms)}
    with (folder / ANCHORS).open("a") as file:
        file.write(json.dumps(fields | {"reply": base64.b64encode(reply).decode()}) + "\n")


def audit_anchors(folder, roots=()):
    """Return the set below a folder as read, and what the rules of time-stamps find."""
    (run_set,) = load([folder])
    anchored = read_anchored(run_set, roots)
    return anchored, find_broken_rules("N", anchored, run_set.lead)
