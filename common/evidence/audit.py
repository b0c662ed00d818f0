"""Audit logs and run sets by the rules; the findings, and the verdicts of MLCommons' checkers, as data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common.evidence.log import Log, RunSet, read_all, read_brief, read_log
from common.evidence.paths import STUDY, find_logs, find_sets, label
from common.evidence.records import counted, printable
from common.evidence.rules import RULES, Found, Rule
from common.evidence.rules.copies import SetAndStudies
from common.evidence.rules.rounds import ChosenRound
from common.evidence.rules.sets import is_of_study
from common.evidence.sealed.anchors import read_anchored
from common.evidence.sealed.runs import read_sealing
from common.evidence.system import describe_set

SPELLED_OUT = {"RCP": "reference convergence points (RCP)"}
MAX_FOUND = 10  # findings of one rule in one log
OF_FILES = ("S406", "S418", "S420")  # rules that count the results of a set, unreadable ones included
OF_LOGS = tuple(rule.id for rule in RULES if rule.id[0] == "S" and rule.id not in OF_FILES)


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
class Verdict:
    """The answer of an official checker. verdict: SUCCESS, FAILED, crashed, or not run."""

    path: str
    ruleset: str
    verdict: str
    detail: str = ""
    checker: str = "compliance"  # or system description, package, seeds, repository
    is_applied: bool = True  # False: it refuses nothing
    why: str = ""  # the reason if it is not applied

    @property
    def refuses(self) -> bool:
        return self.is_applied and self.verdict != "SUCCESS"

    def __str__(self) -> str:
        text = f"{self.path}: official {self.checker} checker {self.ruleset}: {self.verdict}"
        text += f": {self.detail}" if self.detail else ""
        return text + (f"; does not count: {self.why}" if self.why else "")

    def excuse(self, why: str) -> "Verdict":
        """Return the verdict as one that refuses nothing."""
        return replace(self, is_applied=False, why=why)


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A run set, the findings of the rules and the verdicts of the official checkers that were run."""

    run_set: RunSet
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...] = ()
    seal: str = ""  # in words; '' for a set without one
    anchors: str = ""  # how much is stamped by an authority, in words

    @property
    def num_errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def passes(self) -> bool:
        """True if no rule finds an error and no checker refuses the set."""
        return not self.num_errors and not any(verdict.refuses for verdict in self.verdicts)

    def lines(self, *, shows_all: bool = False) -> Iterator[str]:
        """Yield a line for each broken rule (`shows_all`: each finding) and failed verdict, and a summary."""
        yield from map(str, self.findings) if shows_all else first_of_rules(self.findings)
        yield from (str(v) for v in self.verdicts if v.refuses or v.verdict == "FAILED")
        kind = " (mini: a proxy)" if self.run_set.is_proxy else ""
        num_warnings = len(self.findings) - self.num_errors
        yield (
            f"{self.run_set.folder}: {counted(len(self.run_set.logs), 'log')}{kind}; "
            f"{self.seal}{'; ' * bool(self.seal)}"
            f"rules: {counted(self.num_errors, 'error')}, {counted(num_warnings, 'warning')}; "
            f"official checkers: {summary(self.verdicts)}"
            f"{'; time-stamps: ' * bool(self.anchors)}{self.anchors}"
        )

    def as_json(self) -> dict[str, object]:
        return {
            "folder": self.run_set.folder,
            "num_logs": len(self.run_set.logs),
            "is_proxy": self.run_set.is_proxy,
            **({"seal": self.seal} if self.seal else {}),
            **({"anchors": self.anchors} if self.anchors else {}),
            "findings": [asdict(finding) for finding in self.findings],
            "official": [asdict(verdict) for verdict in self.verdicts],
        }


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return e.g. `compliance 2.1.0: 5 of 5 SUCCESS, package 2.1.0: SUCCESS`."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.checker, verdict.ruleset), []).append(verdict)
    parts = []
    for (checker, ruleset), same in groups.items():
        words = [verdict.verdict for verdict in same]
        is_one = len(words) == 1 or set(words) == {"not run"}
        text = words[0] if is_one else f"{words.count('SUCCESS')} of {len(words)} SUCCESS"
        text += f" ({same[0].detail})" if set(words) == {"not run"} else ""
        parts.append(f"{SPELLED_OUT.get(checker, checker)} {ruleset}: {text}")
    return ", ".join(parts) or "not run"


def audit_paths(
    paths: Sequence[Path],
    report: Callable[[Path, int], None] = lambda file, num_files: None,
    *,
    ruleset: str = "",
    systems: Path | None = None,
    roots: Sequence[object] = (),
) -> list[Audited]:
    """Audit every log below `paths`, the sets they form, and the sets against each other.

    Many logs are read by one process per processor; the returned logs hold only the records that scores and
    sets need. `report` gets each file that was read and the number of files. `ruleset` is the round that the
    user chose, `roots` are certificates of time-stamp authorities; `systems` and errors as in `log.load`.
    """
    folders = find_sets(paths)
    files = [file for group in folders.values() for file in group]
    logs: dict[Path, tuple[Log, list[Finding]]] = {}
    for file, audited_log in zip(files, read_all(files, _read_brief), strict=True):
        logs[file] = audited_log
        report(file, len(files))
    run_sets = [
        RunSet(folder=label(folder), logs=tuple(logs[file][0] for file in group), systems=systems)
        for folder, group in folders.items()
    ]
    between = audit_sets(run_sets) + audit_left_out(run_sets)
    audited = []
    for run_set, group in zip(run_sets, folders.values(), strict=True):
        places = {log.path for log in run_set.logs}
        findings = [finding for file in group for finding in logs[file][1]] + audit_set(run_set)
        findings += [finding for finding in between if finding.path in places]
        findings += find_broken_rules("R", ChosenRound(run_set, ruleset), run_set.lead) if ruleset else []
        is_broken = any(f.rule.startswith("C") and f.severity == "error" for f in findings)
        seal = read_sealing(run_set).describe(is_broken=is_broken)
        anchored = read_anchored(run_set, roots)
        findings += find_broken_rules("N", anchored, run_set.lead) if anchored else []
        stamped = anchored.summary() if anchored else ""
        audited.append(Audited(run_set=run_set, findings=tuple(findings), seal=seal, anchors=stamped))
    return audited


def audit(run_set: RunSet) -> list[Finding]:
    """Return the findings in one run set: those in each log, those about the set and its time-stamps."""
    anchored = read_anchored(run_set)
    stamped = find_broken_rules("N", anchored, run_set.lead) if anchored else []
    return [finding for log in run_set.logs for finding in audit_log(log)] + audit_set(run_set) + stamped


def audit_log(log: Log) -> list[Finding]:
    """Audit one log; findings are sorted by line. Only the parsing rules apply to a log without a record."""
    findings = find_broken_rules("PKTQ" if log.is_readable else "P", log, log)
    return sorted(findings, key=lambda finding: (finding.line, finding.rule))


def audit_set(run_set: RunSet) -> list[Finding]:
    """Audit the facts that the logs of a set share, its seal, and the description of its system."""
    findings = []
    if run_set.readable:
        findings = find_broken_rules(OF_LOGS, run_set.readable, run_set.lead)
        files = sorted(run_set.logs, key=lambda log: not log.is_readable)
        findings += find_broken_rules(OF_FILES, files, run_set.lead)
    findings += find_broken_rules("C", read_sealing(run_set), run_set.lead)
    system = describe_set(run_set)
    return findings + (find_broken_rules("Y", system, run_set.lead) if system else [])


def audit_sets(run_sets: Sequence[RunSet]) -> list[Finding]:
    """Audit the run sets by the rules that compare them."""
    readable = [run_set for run_set in run_sets if run_set.readable]
    return find_broken_rules("X", readable, readable[0].lead) if len(readable) > 1 else []


def audit_left_out(run_sets: Sequence[RunSet]) -> list[Finding]:
    """Find runs that missed the target and were moved out of their set into a study beside it."""
    studied: dict[Path, list[Log]] = {}
    findings = []
    for run_set in run_sets:
        lead = run_set.lead
        if lead.file and lead.is_ours and not is_of_study(lead):
            folder = lead.file.parent.parent.parent / STUDY
            if folder not in studied:
                files = list(find_logs(folder)) if folder.is_dir() else []
                studied[folder] = list(read_all(files, read_brief))
            findings += find_broken_rules("F", SetAndStudies(run_set, studied[folder]), lead)
    return findings


def by_rule(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Group findings by rule; the errors of a rule are one group, its warnings another."""
    rules: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        rules.setdefault((finding.rule, finding.severity), []).append(finding)
    return list(rules.values())


def first_of_rules(findings: Sequence[Finding]) -> list[str]:
    """Describe each broken rule in a line: its first finding, and the number of further ones."""
    groups = [(same, len({finding.path for finding in same})) for same in by_rule(findings)]
    return [
        f"{same[0]}; {len(same) - 1} more, in {counted(num_logs, 'log')}" if len(same) > 1 else str(same[0])
        for same, num_logs in groups
    ]


def _read_brief(path: Path) -> tuple[Log, list[Finding]]:
    log = read_log(path)
    return log.brief(), audit_log(log)


def find_broken_rules(families: Sequence[str], subject: object, log: Log) -> list[Finding]:
    """Apply the rules whose id begins with one of `families`; a finding that names no log is put in `log`."""
    findings = []
    for rule in RULES:
        if rule.id.startswith(tuple(families)):
            places = list(rule.check(subject))
            if len(places) > MAX_FOUND:
                more = places[MAX_FOUND]._replace(text=f"{len(places) - MAX_FOUND} more of these")
                places[MAX_FOUND:] = [more]
            findings += [_finding(rule, place, place.log or log) for place in places]
    return findings


def _finding(rule: Rule, place: Found, log: Log) -> Finding:
    strict = "error" if log.is_ours else "warning"
    message = f"found: {place.text}; rule: {rule.message}" if place.text else f"rule: {rule.message}"
    return Finding(
        path=place.path or log.path,
        line=place.line,
        rule=rule.id,
        severity=strict if rule.severity == "strict" else rule.severity,
        message=printable(message, 300),
        section=rule.section,
    )
