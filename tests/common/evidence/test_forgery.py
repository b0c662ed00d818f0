"""Ten forgeries of each kind, made from real logs, are found by the rule that is meant to; true logs pass."""

import random
import re
from functools import cache

import pytest

from common.evidence.audit import audit_log, audit_paths, audit_set, find_broken_rules
from common.evidence.log import RunSet, load, parse_log
from common.evidence.rules.copies import SetAndStudies
from tests.committed import committed_results
from tests.common.evidence import forgeries

NUM_FORGERIES = 10
ARITHMETIC = {"K123", "K124", "Q310", "Q315", "Q316", "T205", "T218", "T219", "T220", "T221"}
ARITHMETIC |= {"S402", "S412", "S416", "S417", "S418", "S419", "S421", "X501", "F801"}
AUDITED = {}  # id of a log -> the log, and the rules that it breaks


def broken_rules(run_set, studied=()):
    """Return the rules that find something in a set, with the severity; each log is audited once."""
    of_set = audit_set(run_set) + find_broken_rules("F", SetAndStudies(run_set, studied), run_set.lead)
    for log in run_set.logs:
        if id(log) not in AUDITED:
            AUDITED[id(log)] = log, {(finding.rule, finding.severity) for finding in audit_log(log)}
    found = {(finding.rule, finding.severity) for finding in of_set}
    return found.union(*(AUDITED[id(log)][1] for log in run_set.logs))


@cache
def honest_sets(path):
    """Return the sets below a path, with the lines of their logs and the rules that find something."""
    return [
        (run_set, [log.file.read_text().splitlines() for log in run_set.logs], broken_rules(run_set))
        for run_set in load([path])
    ]


def missed_forgeries(kind, rules, path):
    """Forge real sets; returns those in which no rule finds anything, or one finds what leaves no trace."""
    rng, missed = random.Random(kind.__name__), []
    for number in range(NUM_FORGERIES):
        run_set, lines, before = rng.choice(honest_sets(path))
        forged = kind(rng, lines)

        def parse(index, log_lines, run_set=run_set, lines=lines):
            if index < len(lines) and log_lines is lines[index]:
                return run_set.logs[index]
            return parse_log("\n".join(log_lines).encode(), f"result_{index}.txt", run_set.lead.folders)

        logs = tuple(parse(index, log_lines) for index, log_lines in forged.logs.items())
        studied = [parse(len(lines), log_lines) for log_lines in forged.studied]
        after = broken_rules(RunSet(folder="forged", logs=logs), studied)
        if bool((after - before) & set(rules.items())) == forged.leaves_no_trace:
            missed.append((number, run_set.folder, after - before))
    return missed


@pytest.mark.parametrize("kind", forgeries.KINDS, ids=lambda kind: kind.__name__)
def test_ten_forgeries_of_a_kind_are_found(kind):
    assert missed_forgeries(kind, forgeries.KINDS[kind], committed_results()) == []


@pytest.mark.parametrize("kind", forgeries.OF_ANYBODY, ids=lambda kind: kind.__name__)
def test_ten_forgeries_of_published_logs_are_found(published, kind):
    assert missed_forgeries(kind, forgeries.OF_ANYBODY[kind], published) == []


def test_honest_logs_break_no_rule_of_arithmetic():
    results = committed_results()
    audited = audit_paths([results, results / "study"])
    assert sum(len(entry.run_set.logs) for entry in audited) > 100
    assert [str(f) for entry in audited for f in entry.findings if f.rule in ARITHMETIC] == []


@pytest.mark.parametrize(
    ("configuration", "recorded", "is_found"),
    [
        ("optimized_muon", "muon_adamw", False),
        ("optimized_muon", "adamw", True),
        ("optimized_muon", "muon_lamb", True),
        ("baseline", "adamw", False),
        ("baseline", "muon_adamw", True),
    ],
)
def test_the_record_names_the_optimizer_of_the_head_with_muon_if_that_is_on(
    configuration, recorded, is_found
):
    study = committed_results() / "study" / "compare-baseline-optimized_muon"
    (path,) = study.glob(f"*-mini-{configuration}/bert/result_0.txt")
    text = re.sub(r'("key": "opt_name", "value": )"\w+"', rf'\1"{recorded}"', path.read_text())
    log = parse_log(text.encode(), "result_0.txt")
    assert f'"{recorded}"' in text
    assert any(finding.rule == "K123" for finding in audit_log(log)) == is_found
