"""The code of a commit, as it is published with results: all files that are needed to repeat the runs."""

import io
import re
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.evidence.log import Log
from common.evidence.records import printable
from common.repository import BESIDE, BUILT, code_state, read_built

ALWAYS = ("common/", *BESIDE)
HIDDEN = (r"^\.ci/", "ci/")  # the official repository checker fails on names that begin with a dot
COMMIT = re.compile(r"([0-9a-f]{7,64}) \((clean|modified)\)(?:, installed as version \S+)?")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/~^-]{0,99}")
Files = dict[str, bytes | None]  # path -> content; None for a link and the like


@dataclass(frozen=True, kw_only=True)
class Item:
    """A file of a package: its path below the submitter's folder, and where it came from ('': generated)."""

    path: str
    content: bytes
    source: str = ""
    is_executable: bool = False
    is_log: bool = False  # written by a run or about a machine, not code

    @property
    def mode(self) -> int:
        return 0o755 if self.is_executable else 0o644


def logged_commit(logs: Iterable[Log]) -> tuple[str, str]:
    """Return the one clean commit that logs name, or '' and why there is none."""
    named = sorted({log.header("commit") for log in logs})
    hint = "--commit says which code is published"
    if len(named) != 1:
        return "", f"the logs name {len(named)} states of the code ({', '.join(named)[:200]}); {hint}"
    match = COMMIT.fullmatch(named[0])
    if match is None:
        return "", f"the logs name no commit; {hint}"
    if match[2] == "modified":
        return "", f"the runs were timed with uncommitted changes to {match[1]}; {hint}"
    return match[1], ""


def resolve(repository: Path, revision: str) -> str:
    """Return the full hash of a commit. Raises UserError when this repository does not hold it."""
    if not REVISION.fullmatch(revision):
        raise UserError(f"'{printable(revision, 64)}' is not a commit", where="--commit")
    output = git(repository, revision, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    return output.decode().strip()


def git(repository: Path, revision: str, *arguments: str) -> bytes:
    command = ["git", "-C", str(repository), "-c", "core.autocrlf=false", *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except OSError as error:
        raise UserError(f"git does not start ({error.strerror}), which holds the code") from error
    except subprocess.CalledProcessError as error:
        answer = error.stderr.decode(errors="replace").strip() or "this repository does not hold it"
        hint = "--commit HEAD publishes the code as it is committed now"
        raise UserError(printable(answer), where=f"commit {revision}", hint=hint) from error


def tracked(repository: Path, commit: str) -> Files:
    contents: Files = {}
    archive = io.BytesIO(git(repository, commit, "archive", "--format=tar", commit))
    with tarfile.open(fileobj=archive) as members:
        for member in members:
            stream = members.extractfile(member) if member.isreg() else None
            if not member.isdir():
                contents[member.name] = stream.read() if stream else None
    return contents


def installed(root: Path, logs: Iterable[Log]) -> tuple[Files, str]:
    """Return the files of an installed wheel as its clone has them; none for runs of other code, and why."""
    here, logged = code_state(root).digest, sorted({log.header("code") for log in logs})
    if logged != [here]:
        what = f"the runs are of code {', '.join(logged) or 'unknown'}, and {here} is installed"
        return {}, f"{what}; package them in a clone"
    files = {name: root / name for name in read_built(root)["files"]}
    files |= {name: root / BUILT / "repository" / name for name in BESIDE}
    return {name: path.read_bytes() for name, path in files.items()}, ""


def code(files: Files, benchmark: str, prefix: str) -> tuple[list[Item], list[str]]:
    """Return the files of one benchmark below `prefix`, and a finding for each that cannot be published."""
    items, findings = [], []
    for path, content in sorted(files.items()):
        if not path.startswith((*ALWAYS, f"{benchmark}/")):
            continue
        if content is None:
            findings.append(f"{printable(path)}: not a regular file; links are not published")
            continue
        target = re.sub(*HIDDEN, path)
        if path.endswith(".sh"):
            content = re.sub(rb"(?<![\w/])\.ci/", b"ci/", content)
        is_script = content.startswith(b"#!")
        items.append(Item(path=f"{prefix}/{target}", content=content, source=path, is_executable=is_script))
    return items, findings
