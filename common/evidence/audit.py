"""Run the rules over run sets and order what they find; the rules about a whole set (family S) are here."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from common.evidence.log import NUM_RUNS, TOKEN, Log, RunSet, printable
from common.evidence.rules import RULES, Found, Lines, Mutation, Rule, edited, rewritten, rule, time_of

MAX_FOUND = 10  # findings of one rule in one log
CONSTANT = {"global_batch_size", "gradient_accumulation_steps", "train_samples", "eval_samples"}
CONSTANT |= {"quality_target", "dataset_fingerprint", "method"}


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


def audit(run_set: RunSet) -> list[Finding]:
    """Return what the rules find in one run set: file by file, then about the set."""
    findings = [finding for log in run_set.logs for finding in audit_log(log)]
    if run_set.readable:
        findings += _findings("S", run_set.readable, run_set.lead)
    return findings


def audit_log(log: Log) -> list[Finding]:
    """Return what the rules find in one log, by line. Without a record only the parsing rules speak."""
    findings = _findings("PKTQ" if log.is_readable else "P", log, log)
    return sorted(findings, key=lambda finding: (finding.line, finding.rule))


def num_errors(findings: Sequence[Finding]) -> int:
    return sum(finding.severity == "error" for finding in findings)


def _findings(families: str, subject: Log | Sequence[Log], log: Log) -> list[Finding]:
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
    strict = "error" if log.is_ours else "warning"
    return Finding(
        path=(found.log or log).path,
        line=found.line,
        rule=about.id,
        severity=strict if about.severity == "strict" else about.severity,
        message=printable(f"{about.message}: {found.text}" if found.text else about.message, 300),
        section=about.section,
    )


# Changes to the logs of a good set.

SetMutation = Callable[[list[Lines]], list[Lines]]


def in_last(mutation: Mutation, num_logs: int = 1) -> SetMutation:
    return lambda logs: logs[:-num_logs] + [mutation(lines) for lines in logs[-num_logs:]]


def same_seed(logs: list[Lines]) -> list[Lines]:
    line = next(line for line in logs[0] if '"key": "seed"' in line)
    return in_last(edited("seed", value=json.loads(line.partition(TOKEN)[2])["value"]))(logs)


def at_once(logs: list[Lines]) -> list[Lines]:
    first, last = (time_of(next(line for line in lines if TOKEN in line)) for lines in (logs[0], logs[-1]))
    shift = first - last + 1000
    return in_last(
        lambda lines: [rewritten(s, time_ms=time_of(s) + shift) if TOKEN in s else s for s in lines]
    )(logs)


# Run sets.


def differing(logs: Sequence[Log], describe: Callable[[Log], str]) -> Iterator[Found]:
    """Yield the logs that differ from the first; `describe` says in what."""
    first = describe(logs[0])
    return (
        Found(0, f"{describe(log)}; {logs[0].path} has {first}", log)
        for log in logs
        if describe(log) != first
    )


def repeated(logs: Sequence[Log], describe: Callable[[Log], object]) -> Iterator[Found]:
    """Yield the logs whose description (None: none) another log has had before."""
    seen: dict[str, Log] = {}
    for log in logs:
        if (value := describe(log)) is not None:
            earlier = seen.setdefault(repr(value), log)
            if earlier is not log:
                yield Found(0, f"as in {earlier.path}", log)


@rule(
    "S401", "error", "rules: Benchmark Results", breaks=in_last(edited("configuration_name", value="another"))
)
def set_has_one_configuration(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set share benchmark, system, configuration and size."""
    return differing(
        logs,
        lambda log: f"{log.benchmark} {log.system} {log.configuration} {'mini' if log.is_proxy else 'full'}",
    )


@rule("S402", "error", "rules: Benchmark Results", breaks=lambda s: [*s[:-1], s[0]], also=("S403", "S404"))
def logs_differ(logs: Sequence[Log]) -> Iterator[Found]:
    """No run stands in a set twice: equal losses and accuracies."""

    def trace(log: Log) -> object:
        values = [event.value for event in log.records if event.key in ("train_loss", "eval_accuracy")]
        return values if len(values) > 3 else None  # few evaluations of few samples may agree by chance

    return repeated(logs, trace)


@rule("S403", "error", "rules: Random numbers", breaks=same_seed)
def seeds_differ(logs: Sequence[Log]) -> Iterator[Found]:
    """Every run has its own seed."""
    return repeated(logs, lambda log: log.value("seed"))


@rule("S404", "strict", "house: one run at a time", breaks=at_once)
def runs_do_not_overlap(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set follow each other."""
    timed = [(log.events("run_start")[0].time_ms, log) for log in logs if log.minutes]
    timed.sort(key=lambda pair: pair[0])
    for (start, log), (next_start, other) in zip(timed, timed[1:], strict=False):
        if next_start < start + (log.minutes or 0) * 60000:
            yield Found(0, f"starts before {log.path} ends", other)


@rule("S405", "strict", "rules: Hyperparameters", breaks=in_last(edited("global_batch_size", value=1)))
def settings_are_constant(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set share every hyperparameter and the data set."""

    def settings(log: Log) -> str:
        return str(
            sorted(
                (e.key, repr(e.value)) for e in log.records if e.key in CONSTANT or e.key.startswith("opt_")
            )
        )

    return differing(logs, settings)


@rule("S406", "warning", "rules: Benchmark Results", breaks=lambda logs: logs[:-1])
def set_is_complete(logs: Sequence[Log]) -> Iterator[Found]:
    """A set has 5 runs (resnet) or 10 (bert)."""
    expected = NUM_RUNS.get(logs[0].benchmark)
    if expected and len(logs) != expected:
        yield Found(0, f"{len(logs)} instead of {expected}", logs[0])


@rule(
    "S407",
    "warning",
    "rules: System and framework must be consistent",
    breaks=in_last(lambda s: ["# commit: another", *s]),
)
def software_is_the_same(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set share commit and versions."""
    return differing(logs, lambda log: f"{log.header('commit')} {log.header('versions')}")


@rule("S408", "warning", "rules: Benchmark Results", breaks=in_last(edited("run_stop", status="aborted"), 2))
def at_most_one_run_failed(logs: Sequence[Log]) -> Iterator[Found]:
    """At most one run of a set misses its target; two leave it without a score."""
    failed = [log for log in logs if not log.is_converged]
    if len(failed) > 1:
        yield Found(0, f"{len(failed)} of {len(logs)} missed it", failed[-1])
