"""Assemble MLPerf's `<submitter>/{benchmarks,results,systems}`, judge it, and write it whole or not at all.

Every file is held in memory until it has passed: our audit, the search for secrets, the official checkers on
a copy. Nothing depends on the clock, the machine or the order of the paths: equal inputs make equal bytes.
"""

import gzip
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import IO

from common.errors import UserError
from common.evidence.audit import Finding, audit, audit_sets, find_broken_rules
from common.evidence.log import NUM_RUNS, RunSet
from common.evidence.paths import UNCOUNTED, label
from common.evidence.records import counted, printable
from common.evidence.score import score
from common.evidence.sealed.chain import digest, is_chained
from common.evidence.sealed.runs import read_sealing
from common.evidence.sealed.seal import SEAL
from common.evidence.submission import official
from common.evidence.submission.leaks import leaks
from common.evidence.submission.material import SEALED_FILES, Entry, implementation_readme, material
from common.evidence.submission.snapshot import Item, code, installed, logged_commit, resolve, tracked
from common.evidence.system import read_description
from common.files import explain_os_error, undo_on_failure
from common.repository import STATE

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a submitter, system, implementation, configuration
SYSTEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,63}")  # may state changes: +key=value
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,199}")
RESULT = re.compile(r"result_[0-9]{1,4}\.txt")
MAX_BYTES = 50 * 2**20  # of a file; the official repository checker refuses more
TAR_ENDINGS = (".tar.gz", ".tgz")
OTHER_ARCHIVES = (".tar", ".zip", ".gz", ".xz", ".bz2", ".zst")
NO_OVERWRITE = "exists; a package never overwrites anything"
REHEARSAL = "rehearsal: made to try the packaging; not a submission"
UNMARKED = "; the logs and seals below are as they were written, since a mark would break their hashes"
MARKS = {  # of a rehearsal; other files have a comment that begins with #
    ".md": "> **{}**\n\n",
    ".html": "<!-- {} -->\n",
    ".css": "/* {} */\n",
    ".js": "// {}\n",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of a package. `revision` '': the commit that the logs name."""

    submitter: str
    implementation: str
    repository: Path
    revision: str = ""
    is_rehearsal: bool = False

    @property
    def folder(self) -> str:
        return f"{self.submitter}-rehearsal" if self.is_rehearsal else self.submitter


@dataclass
class Package:
    """The files by path below the submitter's folder; findings keep it from being written, notes do not."""

    folder: str
    items: dict[str, Item] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, items: Sequence[Item]) -> None:
        for item in items:
            if item.path in self.items:
                self.findings.append(f"{item.path}: two files claim this place")
            self.items[item.path] = item

    @property
    def listing(self) -> list[tuple[str, int, str]]:
        """Path, bytes and SHA-256 of every file, sorted."""
        return [
            (f"{self.folder}/{path}", len(item.content), digest(item.content))
            for path, item in sorted(self.items.items())
        ]


def assemble(run_sets: Sequence[RunSet], request: Request) -> Package:
    """Return the package of these run sets. Raises UserError for a proxy that is not to be a rehearsal."""
    package, entries = Package(folder=request.folder), []
    for run_set in sorted(run_sets, key=lambda run_set: (run_set.lead.system, run_set.lead.benchmark)):
        if run_set.is_proxy and not request.is_rehearsal:
            hint = "--rehearsal packages it, every file marked as such"
            raise UserError("size mini is a proxy and cannot be submitted", where=run_set.folder, hint=hint)
        errors = _errors(audit(run_set))
        findings = [str(error) for error in errors if not error.rule.startswith("Y")]  # see add_system
        findings += shape_findings(run_set) or stated_findings(run_set)
        package.findings += findings
        if not findings:
            entries.append(Entry(run_set=run_set, implementation=request.implementation))
    package.findings += map(str, _errors(audit_sets(run_sets)))
    for entry in entries:
        compare_submitters(package, entry, request)
        package.notes += result_notes(entry)
        package.add(results(entry))
        package.add(material(entry, f"benchmarks/{entry.benchmark}/implementations"))
    for system in sorted({entry.system for entry in entries}):
        add_system(package, [entry for entry in entries if entry.system == system])
    for benchmark in sorted({entry.benchmark for entry in entries}):
        add_code(package, [entry for entry in entries if entry.benchmark == benchmark], request)
    for _, item in sorted(package.items.items()):
        package.findings += item_findings(item)
    if request.is_rehearsal:
        mark_all(package)
    if not package.findings:
        judge(package)
    return package


def _errors(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == "error"]


# One run set.


def shape_findings(run_set: RunSet) -> list[str]:
    """Return the faults of a run set's folder: its names, its number of runs, other files in it."""
    where, lead = run_set.folder, run_set.lead
    system, benchmark = lead.folders
    if not benchmark or not SYSTEM.fullmatch(system) or lead.file is None:
        return [f"{where}: not a folder results/<system>/<resnet|bert> of results"]
    findings = []
    folder = lead.file.parent
    if folder.is_symlink() or folder.parent.is_symlink():
        findings.append(f"{where}: is reached through a link")
    taken = {Path(log.path).name for log in run_set.logs}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        is_known = entry.name in SEALED_FILES or (RESULT.fullmatch(entry.name) and entry.name in taken)
        if not is_known or not entry.is_file(follow_symlinks=False):
            findings.append(f"{where}/{printable(entry.name)}: is not one of the results of this set")
    expected = NUM_RUNS[benchmark]
    seal = read_sealing(run_set).seal
    num_ended = sum(log.came_to_its_end for log in run_set.logs)
    if seal and len(run_set.logs) > expected:
        if num_ended > max(seal.num_runs, expected):
            what = f"{num_ended} runs came to their end, and {SEAL} decided {seal.num_runs}"
            findings.append(f"{where}: {what}; make the set again in a new folder, without more runs")
    elif len(run_set.logs) != expected:
        findings.append(
            f"{where}: {counted(len(run_set.logs), 'run')}, and {benchmark} has exactly {expected}"
        )
    return findings


def stated_findings(run_set: RunSet) -> list[str]:
    """Return the facts that the logs of a run set lack, or state so that they cannot be published."""
    where, lead = run_set.folder, run_set.lead
    findings = [f"{log.path}: not a log of this suite" for log in run_set.readable if not log.is_ours]
    findings += [f"{log.path}: a study is no submission" for log in run_set.logs if log.is_study]
    for what, name in (("configuration", lead.configuration), ("benchmark", lead.header("benchmark"))):
        if not NAME.fullmatch(name):
            findings.append(f"{where}: the logs name no {what}")
    if score(run_set).minutes is None:
        findings.append(f"{where}: the set has no score; `ttt score` says why")
    if len(lead.header("command")) >= 480:  # the reader cuts lines there
        findings.append(f"{lead.path}: its command is too long to be repeated")
    return findings


def compare_submitters(package: Package, entry: Entry, request: Request) -> None:
    """Compare the submitter in the logs with the package's; a rehearsal only notes it."""
    named = sorted({log.text("submission_org") for log in entry.run_set.logs})
    if named != [request.submitter]:
        names = ", ".join(named)
        what = f"{entry.run_set.folder}: the logs name the submitter '{names}', not '{request.submitter}'"
        hint = "`ttt run --set submission.org=NAME` writes it"
        (package.notes if request.is_rehearsal else package.findings).append(f"{what}; {hint}")


def results(entry: Entry) -> list[Item]:
    """Return the logs as they are, by their names in the package, and the files of a sealed set."""
    named = [(entry.names[log.file], log.file) for log in entry.run_set.logs if log.file]
    named += [(path.name, path) for path in entry.sealed_files]
    return [
        Item(
            path=f"results/{entry.system}/{entry.benchmark}/{name}",
            content=file.read_bytes(),
            source=label(file),
            is_log=True,
        )
        for name, file in named
    ]


def result_notes(entry: Entry) -> list[str]:
    """Name the runs that missed their target, and the runs of a sealed set that do not count."""
    notes = [f"{log.path}: missed its target" for log in entry.run_set.logs if not log.is_converged]
    named = [(log.path, entry.names[log.file]) for log in entry.run_set.logs]
    extra = [(path, name) for path, name in named if name.startswith(UNCOUNTED)]
    return notes + [f"{path}: does not count, and is packaged as {name}" for path, name in extra]


def add_system(package: Package, entries: Sequence[Entry]) -> None:
    """Judge the description of one system by the rules Y, from the folder it is taken from, and add it."""
    system = entries[0].system
    path = (entries[0].run_set.systems_folder or Path("systems")) / f"{system}.json"
    judged = [read_description(path, entry.run_set) for entry in entries]
    description = judged[0].description
    if description is None:
        hint = f"; `ttt doctor --describe --out {system}.json` makes one"
        judged = [one._replace(why=one.why + hint) for one in judged]
    findings = [finding for one in judged for finding in find_broken_rules("Y", one, one.run_set.lead)]
    errors = _errors(findings)
    package.findings += dict.fromkeys(map(str, errors))
    package.notes += dict.fromkeys(str(finding) for finding in findings if finding not in errors)
    if isinstance(description, dict):
        content = json.dumps(description, indent=4) + "\n"
        described = Item(
            path=f"systems/{system}.json", content=content.encode(), source=label(path), is_log=True
        )
        package.add([described])


def add_code(package: Package, entries: Sequence[Entry], request: Request) -> None:
    """Add the code that the run sets of one benchmark share: from git, or as it is installed."""
    lead, logs = entries[0], [log for entry in entries for log in entry.run_set.logs]
    if len({entry.folder for entry in entries}) != 1:
        package.findings.append(f"{lead.run_set.folder}: the run sets name several benchmark folders")
        return
    is_installed = (request.repository / STATE).is_file()
    if request.revision and is_installed:
        raise UserError("only a clone holds other code than the installed", where="--commit")
    commit, why = (request.revision, "") if request.revision else logged_commit(logs)
    if is_installed and not why:
        files, why = installed(request.repository, logs)
    elif not why:
        commit = resolve(request.repository, commit)
        files = tracked(request.repository, commit)
    if why:
        package.findings.append(f"{lead.run_set.folder}: {why}")
        return
    if f"{lead.folder}/benchmark.py" not in files:
        package.findings.append(f"{lead.run_set.folder}: commit {commit[:12]} holds no {lead.folder}")
        return
    prefix = f"benchmarks/{lead.benchmark}/implementations/{lead.implementation}"
    items, findings = code(files, lead.folder, prefix)
    page = Item(path=f"{prefix}/README.md", content=implementation_readme(entries, commit).encode())
    package.add([page, *items])
    package.findings += findings


# Every file.


def item_findings(item: Item) -> list[str]:
    """Return the faults that keep a file from being published: in its name, its size, its content."""
    where = printable(item.source or item.path)
    findings = []
    if not all(FILE_NAME.fullmatch(part) for part in item.path.split("/")):
        findings.append(f"{where}: its name is not {FILE_NAME.pattern}")
    if len(item.content) > MAX_BYTES:
        return [*findings, f"{where}: larger than {MAX_BYTES // 2**20} MiB"]
    try:
        text = item.content.decode()
    except UnicodeDecodeError:
        return [*findings, f"{where}: not UTF-8 text, so it cannot be searched for secrets"]
    return findings + [f"{where}:{leak}" for leak in leaks(text, is_log=item.is_log)]


def mark_all(package: Package) -> None:
    """Mark every file of a rehearsal; a page beside the files that cannot be changed says it of them."""
    marked = {path: item if is_unchangeable(item) else mark(item) for path, item in package.items.items()}
    if any(map(is_unchangeable, marked.values())):
        page = Item(path="results/README.md", content=f"{REHEARSAL}{UNMARKED}\n".encode())
        marked[page.path] = page
    package.items = marked


def is_unchangeable(item: Item) -> bool:
    """True for a file whose bytes others state: a mark would break the chain of a log, or a seal."""
    return Path(item.path).name in SEALED_FILES or (item.is_log and is_chained(item.content))


def mark(item: Item) -> Item:
    """Return a file that says in its first line, or in a field, that it is a rehearsal."""
    text = item.content.decode(errors="replace")
    if item.path.endswith(".json"):  # generated: code holds none
        values = json.loads(text)
        notes = "" if (old := values.get("hw_notes", "none")) == "none" else f"; {old}"
        values |= {"hw_notes": REHEARSAL + notes} if "hw_notes" in values else {"rehearsal": REHEARSAL}
        return replace(item, content=(json.dumps(values, indent=4) + "\n").encode())
    mark = MARKS.get(Path(item.path).suffix, "# {}\n").format(REHEARSAL)
    at = text.index("\n") + 1 if text.startswith("#!") else 0
    return replace(item, content=f"{text[:at]}{mark}{text[at:]}".encode())


def judge(package: Package) -> None:
    """Ask the official checkers about a copy."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory, package.folder)
        write_tree(package.items, folder)
        for verdict in official.judge_tree(folder):
            (package.findings if verdict.refuses else package.notes).append(str(verdict))


# Writing.


def refuse_existing(out: Path) -> None:
    """Raise UserError for a place where no package can be put."""
    if out.name.lower().endswith(OTHER_ARCHIVES) and not out.name.endswith(TAR_ENDINGS):
        raise UserError("not a kind of archive that is written", where=str(out), hint="name it NAME.tar.gz")
    if os.path.lexists(out):
        raise UserError(NO_OVERWRITE, where=str(out))
    if not os.path.isdir(out.parent):
        raise UserError("its folder does not exist", where=str(out))


def write(package: Package, out: Path) -> None:
    """Write `<submitter>/` and the list of its files, `<submitter>.sha256`, to a new folder or archive."""
    lines = "".join(f"{digest}  {path}\n" for path, _, digest in package.listing)
    files = {f"{package.folder}/{path}": item for path, item in package.items.items()}
    manifest = f"{package.folder}.sha256"  # beside the submitter's folder: `sha256sum -c` from there
    files[manifest] = Item(path=manifest, content=lines.encode())
    with (
        explain_os_error("cannot write here", out),
        tempfile.TemporaryDirectory(
            prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True
        ) as folder,
    ):
        finished = Path(folder, "package")
        if out.name.endswith(TAR_ENDINGS):
            with finished.open("xb") as stream:
                write_tar(files, stream)
        else:
            write_tree(files, finished)
        put_in_place(finished, out)


def put_in_place(finished: Path, out: Path) -> None:
    """Move a finished file or folder to `out`, a new name that an empty one reserves first."""
    try:
        if finished.is_dir():
            out.mkdir()
        else:
            out.touch(exist_ok=False)
    except FileExistsError:  # since `refuse_existing` looked
        raise UserError(NO_OVERWRITE, where=str(out)) from None
    with undo_on_failure(out.rmdir if finished.is_dir() else out.unlink):
        os.replace(finished, out)


def write_tree(items: Mapping[str, Item], folder: Path) -> None:
    for path, item in items.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(item.content)
        target.chmod(item.mode)


def write_tar(items: Mapping[str, Item], stream: IO[bytes]) -> None:
    """Write files as a reproducible tar.gz: sorted, without times and owners."""
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path, item in sorted(items.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(item.content), item.mode
            archive.addfile(member, BytesIO(item.content))
