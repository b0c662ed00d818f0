"""Secrets, addresses and names of machines in a log are found, and harmless text is not."""

import base64
import json
import random
import re
import string
import time
from pathlib import Path

import pytest
import yaml

from common.evidence.rules.sealed_files import edit_line, edit_list, edit_seal
from common.evidence.sealed.anchors import Anchor
from common.evidence.sealed.seal import SEAL
from common.evidence.submission.leaks import (
    ALSO_IN_LOGS,
    ESCAPE,
    EVERY,
    MAX_LENGTH,
    ORGANIZATION,
    SHOWN,
    STAMP,
    leaks,
)
from common.repository import ELSEWHERE, ROOT
from tests.common.evidence.sealed.sealed_sets import seal_committed, seal_logs
from tests.common.evidence.submission.packages import package, refused

PATTERNS = [
    *EVERY.items(),
    *ALSO_IN_LOGS.items(),
    ("absolute path", ELSEWHERE),
    ("stamp", STAMP),
    ("organization", ORGANIZATION),
    ("escape", ESCAPE),
]
INVENTED = yaml.safe_load(Path(__file__).with_name("invented.yaml").read_text())
SECRETS, PLACES = INVENTED["secrets"], INVENTED["places"]
ALPHABETS = {
    "b": string.ascii_letters + string.digits,
    "h": "0123456789abcdef",
    "U": string.ascii_uppercase + string.digits,
    "x": string.ascii_letters + string.digits + "+/",
}


def invent(sample):
    """Fill in a sample; always the same."""
    chance = random.Random(sample)

    def fill(match):
        text = "".join(chance.choice(ALPHABETS[match[1]]) for _ in range(int(match[2]) - 1))
        return text + "7"  # no word is all letters

    return re.sub(r"\{([bhUx])(\d+)\}", fill, sample.replace("|", ""))


def kinds(text, is_log=True):
    return {leak.kind for leak in leaks(text, is_log=is_log)}


def escape(text):
    return "".join(f"\\u{ord(letter):04x}" for letter in text)


FORMS = {
    "a value in a log": lambda text: f":::MLLOG {json.dumps({'value': f'note{chr(10)}{text} end'})}",
    "a comment in a head": lambda text: f"#   note: {text}, and so on",
    "escapes of JSON": lambda text: f'{{"value": "{escape(text)}"}}',
    "a description of a system": lambda text: json.dumps({"sw_notes": text}, indent=4),
    "JSON in JSON": lambda text: json.dumps({"line": json.dumps({"value": f"\t{text}"})}),
    "the end of a sentence": lambda text: f"it said {text}.",
}


@pytest.mark.parametrize("table", [SECRETS, PLACES], ids=["secrets", "places"])
@pytest.mark.parametrize("form", FORMS)
def test_each_invented_text_is_found_as_its_kind(table, form):
    texts = [(kind, invent(sample)) for kind, samples in table.items() for sample in samples]
    assert len(texts) >= 60
    missed = [(kind, text) for kind, text in texts if kind not in kinds(FORMS[form](text))]
    assert not missed


def test_each_kind_has_a_sample_and_secrets_are_found_in_code_too():
    assert set(SECRETS) == set(EVERY) and set(PLACES) | set(SECRETS) >= set(ALSO_IN_LOGS)
    assert all(kind in kinds(invent(texts[0]), is_log=False) for kind, texts in SECRETS.items())


@pytest.mark.parametrize("text", INVENTED["harmless"])
def test_harmless_text_is_left_alone(text):
    assert list(leaks(invent(text), is_log=True)) == []


def test_nothing_is_found_in_committed_logs_and_descriptions():
    files = [*ROOT.glob("results/**/result_0.txt"), *ROOT.glob("results/reference-*/*/result_1.txt")]
    files += ROOT.glob("systems/*.json")
    assert len(files) > 40
    assert [(file.name, leak) for file in files for leak in leaks(file.read_text(), is_log=True)] == []


def test_authority_and_reply_of_a_time_stamp_are_left_alone_and_its_failure_is_searched():
    reply = base64.b64encode(random.Random(1).randbytes(30_000)).decode()
    stamp = Anchor(
        of="runset.json", line=0, sha256="ab" * 32, url="https://tsa.acme-stamps.eu:80", reply=reply
    )
    assert list(leaks(stamp.model_dump_json(exclude_defaults=True), is_log=True)) == []
    failed = stamp.model_copy(update={"delay_ms": 7, "failure": "no route to dgx017.hpc.example.com"})
    assert kinds(failed.model_dump_json(exclude_defaults=True)) == {"host name"}


def test_a_hit_shows_no_more_than_the_first_letters():
    text = invent("# one\n# note: NGC_API|_KEY=nv|api-{b60}")
    hits = {hit.kind: hit for hit in leaks(text, is_log=True)}
    assert hits["NGC key"] == (2, "NGC key", "nvap")
    assert all(hit.line == 2 and len(hit.shown) <= SHOWN for hit in hits.values())


def seconds_to_search(pattern, part, size):
    text = (part * size)[:size]
    start = time.process_time()
    pattern.search(text)
    return time.process_time() - start


@pytest.mark.parametrize(
    ("kind", "pattern"), PATTERNS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_no_pattern_takes_more_than_linear_time(kind, pattern):
    texts = map(invent, [*SECRETS.get(kind, ()), *PLACES.get(kind, ())])
    parts = [*INVENTED["slow"], *(text[: len(text) // 2] for text in texts)]
    slowest = sorted(parts, key=lambda part: seconds_to_search(pattern, part, 20_000))[-3:]
    for part in slowest:
        short, long = (seconds_to_search(pattern, part, size) for size in (20_000, 200_000))
        assert long < max(0.2, 30 * short), part


def test_a_line_too_long_to_be_searched_is_refused():
    assert kinds("x" * (MAX_LENGTH + 1)) == {"line too long to be searched"}


def name_machines(logs):
    """Seal logs on a machine that the seal, the list and a failed time stamp name."""
    sealed = edit_list(edit_line(1, reason="no space in /projects/acme"))(seal_logs(logs))
    files = edit_seal(lambda seal: {"machine": {"host": "dgx017"}})(sealed)
    failed = Anchor(of=SEAL, line=0, sha256="0" * 64, failure="no route to tsa01.corp")
    return files | {"anchors.jsonl": [failed.model_dump_json(exclude_defaults=True)]}


def test_a_seal_its_list_and_its_time_stamps_are_refused_by_file_and_line(tmp_path, monkeypatch):
    folder = seal_committed(tmp_path, "reference-2cpu-mini-optimized", name_machines)
    monkeypatch.chdir(tmp_path)
    done = package(folder, "--rehearsal", "--list")
    for line in ("runset.json:1: host name", "runs.jsonl:2: absolute path", "anchors.jsonl:1: host name"):
        refused(done, f"resnet/{line}")
