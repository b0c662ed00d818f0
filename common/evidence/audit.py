"""Run the rules over logs, run sets and what lies between them, and order what they find."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from common.evidence.log import MAX_BYTES, Log, RunSet, find_sets, label, read_log
from common.evidence.records import printable
from common.evidence.rules import RULES, Found, Rule, systems

MAX_FOUND = 10  # findings of one rule in one log
FEW_BYTES = 32 * 2**20  # read in one process; starting others takes longer


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A broken rule. severity: error or warning; line 0 is the whole file."""

    path: str
    line: int
    rule: str
    severity: str
    message: str
    section: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.rule} {self.severity} {self.message} ({self.section})"


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A run set and what the rules find in it."""

    run_set: RunSet
    findings: tuple[Finding, ...]


def audit_paths(
    paths: Sequence[Path], report: Callable[[Path, int], None] = lambda file, num_files: None
) -> list[Audited]:
    """Audit every log below `paths`, the sets they form, and the sets against each other.

    Many logs are read by one process for each processor; what comes back holds only the records that scores
    and sets need. `report` is told each file that was read, and of how many. Raises: UserError as `log.load`.
    """
    folders = find_sets(paths)
    files = [file for group in folders.values() for file in group]
    logs: dict[Path, tuple[Log, list[Finding]]] = {}
    with ExitStack() as stack:
        if sum(min(os.lstat(file).st_size, MAX_BYTES) for file in files) < FEW_BYTES:
            read: Iterable[tuple[Log, list[Finding]]] = map(_read, files)
        else:
            pool = stack.enter_context(ProcessPoolExecutor())
            read = pool.map(_read_brief, files, chunksize=4)
        for file, found in zip(files, read, strict=True):
            logs[file] = found
            report(file, len(files))
    audited = []
    for folder, group in folders.items():
        run_set = RunSet(folder=label(folder), logs=tuple(logs[file][0] for file in group))
        findings = [finding for file in group for finding in logs[file][1]] + audit_set(run_set)
        audited.append(Audited(run_set=run_set, findings=tuple(findings)))
    return _with(audited, audit_sets([entry.run_set for entry in audited]))


def audit(run_set: RunSet) -> list[Finding]:
    """Return what the rules find in one run set: file by file, then about the set."""
    return [finding for log in run_set.logs for finding in audit_log(log)] + audit_set(run_set)


def audit_log(log: Log) -> list[Finding]:
    """Return what the rules find in one log, by line. Without a record only the parsing rules speak."""
    findings = broken("PKTQ" if log.is_readable else "P", log, log)
    return sorted(findings, key=lambda finding: (finding.line, finding.rule))


def audit_set(run_set: RunSet) -> list[Finding]:
    """Return what the rules about a whole set find, and those about its system's description."""
    findings = broken("S", run_set.readable, run_set.lead) if run_set.readable else []
    described = systems.described(run_set)
    return findings + (broken("Y", described, run_set.lead) if described else [])


def audit_sets(run_sets: Sequence[RunSet]) -> list[Finding]:
    """Return what the rules find between run sets."""
    readable = [run_set for run_set in run_sets if run_set.readable]
    return broken("X", readable, readable[0].lead) if len(readable) > 1 else []


def num_errors(findings: Iterable[Finding]) -> int:
    return sum(finding.severity == "error" for finding in findings)


def by_rule(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Return the findings of each rule that was broken, an error of a rule apart from its warnings."""
    rules: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        rules.setdefault((finding.rule, finding.severity), []).append(finding)
    return list(rules.values())


def named_once(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each rule that was broken: the first place, and how many more there are."""
    lines = []
    for same in by_rule(findings):
        num_logs = len({finding.path for finding in same})
        more = f"; {len(same) - 1} more, in {num_logs} logs" if len(same) > 1 else ""
        lines.append(f"{same[0]}{more}")
    return lines


def _with(audited: Sequence[Audited], findings: Sequence[Finding]) -> list[Audited]:
    """Add each finding to the set of its log."""
    result = []
    for entry in audited:
        own = {log.path for log in entry.run_set.logs}
        more = tuple(finding for finding in findings if finding.path in own)
        result.append(replace(entry, findings=entry.findings + more))
    return result


def _read(path: Path) -> tuple[Log, list[Finding]]:
    log = read_log(path)
    return log, audit_log(log)


def _read_brief(path: Path) -> tuple[Log, list[Finding]]:
    log, findings = _read(path)
    return log.brief(), findings


def broken(families: str, subject: object, log: Log) -> list[Finding]:
    """Return what the rules of these families find in their subject; `log` is where, unless they say it."""
    findings = []
    for about in RULES:
        if about.id[0] in families:
            found = list(about.check(subject))
            findings += [_finding(about, one, log) for one in found[:MAX_FOUND]]
            if len(found) > MAX_FOUND:
                more = found[MAX_FOUND]._replace(text=f"{len(found) - MAX_FOUND} more of these")
                findings.append(_finding(about, more, log))
    return findings


def _finding(about: Rule, found: Found, log: Log) -> Finding:
    strict = "error" if (found.log or log).is_ours else "warning"
    return Finding(
        path=found.path or (found.log or log).path,
        line=found.line,
        rule=about.id,
        severity=strict if about.severity == "strict" else about.severity,
        message=printable(f"{about.message}: {found.text}" if found.text else about.message, 300),
        section=about.section,
    )
