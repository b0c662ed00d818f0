"""Downloads public files: lists them with size and MD5, resumes, and keeps only files that match.

A file has the suffix `.part` until its size and MD5 are right, so a file without it is whole. MLCommons lists
a data set in two small files on a server: NAME.uri holds the address of a folder, NAME.md5 beside it has a
line for each file there, MD5 and path. Source: mlc-r2-downloader.sh in github.com/mlcommons/r2-downloader.
Its storage redirects to a login, so redirects are refused.
"""

import http.client
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from common.data.preparation import Progress, check_free_space, md5_of
from common.errors import UserError
from common.files import explain_os_error, locked, make_folder, synchronize
from common.repository import relative_path

PART = ".part"
TIMEOUT_S = 60.0  # without a byte
CHUNK_BYTES = 2**20
WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts in a row that bring no byte; the next one is the last
BUSY = (429, 500, 502, 503, 504)  # HTTP codes after which another attempt may succeed
LOGIN = (301, 302, 303, 307, 308, 401, 403)
NETWORK_ERRORS = (OSError, http.client.HTTPException)
PASSING = (TimeoutError, ConnectionResetError, http.client.IncompleteRead)  # as with BUSY
AGENT = "time-to-train"  # some servers refuse the name of Python's library
ADDRESS = re.compile(r"https?://[^\s<>\"]+")
LINE = re.compile(r"([0-9a-f]{32})[ \t]+\*?(?:\./)?(\S.*)")  # of md5sum
MAX_LIST_BYTES = 10 * 2**20
NUM_CONNECTIONS = 8  # at once, which ask for sizes
GO_ON = "run the same command again: it continues where this one stopped"

Received = TypeVar("Received")


class Listed(NamedTuple):
    """A file in a list: its address, its name, and its MD5 in hexadecimal digits."""

    address: str
    name: str
    md5: str


class RemoteFile(NamedTuple):
    """A file to download; `path` is its place below the folder of the download."""

    address: str
    path: str
    md5: str
    num_bytes: int


class Cut(Exception):
    """A connection that ended early, or that a busy server refused; another attempt may continue."""


class NoRedirection(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, see the head of this file."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


class ByteProgress(Progress):
    """Progress in megabytes, of what is still missing."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_items=num_bytes, num_bytes=num_bytes, items="bytes")

    def describe(self, seconds: float) -> str:
        done, total = (f"{count / 1e6:,.1f}" for count in (self.num_bytes, self.total_bytes))
        return f"{done} of {total} MB, {self.rate_and_rest(seconds)}"


def open_address(address: str, *, method: str = "GET", start: int = 0) -> http.client.HTTPResponse:
    """Open an address, from byte `start` on if the server can. Raises OSError and HTTPException."""
    headers = {"User-Agent": AGENT} | ({"Range": f"bytes={start}-"} if start else {})
    request = urllib.request.Request(address, method=method, headers=headers)
    opener = urllib.request.build_opener(NoRedirection)
    response: http.client.HTTPResponse = opener.open(request, timeout=TIMEOUT_S)
    return response


def length_of(response: http.client.HTTPResponse) -> int | None:
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def refusal(error: urllib.error.HTTPError, address: str) -> UserError:
    hint = "the server may want a login: download it by hand" if error.code in LOGIN else ""
    return UserError(f"HTTP {error.code} ({error.reason})", where=address, hint=hint)


@contextmanager
def explain_network_error(address: str, passing: tuple[type[Exception], ...] = PASSING) -> Iterator[None]:
    """Turn a network error in the block into Cut, if it may pass, else into UserError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        if error.code in BUSY:
            raise Cut(f"HTTP {error.code}") from error
        raise refusal(error, address) from error
    except (*NETWORK_ERRORS, ValueError) as error:  # ValueError: no address at all
        reason = getattr(error, "reason", error)
        if isinstance(error, passing) or isinstance(reason, passing):
            raise Cut(str(reason)) from error
        hint = "fetch on a machine with network and copy the folder, or name another server with --mirror"
        raise UserError(f"cannot be reached ({reason})", where=address, hint=hint) from error


def try_again(attempt: Callable[[], Received], address: str, count: Callable[[], int] = int) -> Received:
    """Repeat an attempt until it raises no Cut; returns its result.

    Raises UserError after several attempts in a row in which `count`, the bytes received, did not grow.
    """
    num_failures = 0
    while True:
        before = count()
        try:
            return attempt()
        except Cut as cut:
            num_failures = 0 if count() > before else num_failures + 1
            if num_failures > len(WAITS_S):
                what = f"{num_failures} attempts in a row brought nothing ({cut})"
                raise UserError(what, where=address, hint=GO_ON) from cut
            time.sleep(WAITS_S[max(num_failures - 1, 0)])


def read_text(address: str) -> str:
    return try_again(partial(read_text_once, address), address)


def read_text_once(address: str) -> str:
    with explain_network_error(address), open_address(address) as response:
        content = response.read(MAX_LIST_BYTES)
        length = length_of(response)
    if length is not None and length != len(content):
        raise UserError(f"{len(content)} of {length} bytes came", where=address, hint="try again")
    return content.decode("utf-8", "replace")


def parse_md5_lines(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield MD5 and path of each line that md5sum wrote. Raises UserError for any other line."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            if (match := LINE.fullmatch(line.strip())) is None:
                raise UserError("expected a line of MD5 and path", where=f"{where}:{number}")
            yield match[1], match[2]


def read_list(server: str, name: str) -> list[Listed]:
    """Read the list of a data set on a server. Raises UserError where it is none or cannot be reached."""
    if not ADDRESS.fullmatch(server):
        raise UserError("expected http://... or https://...", where=f"--mirror {server}")
    uri, md5s = (f"{server.rstrip('/')}/{name}.{suffix}" for suffix in ("uri", "md5"))
    folder = urllib.parse.urljoin(uri, read_text(uri).strip())
    if not ADDRESS.fullmatch(folder):
        raise UserError("holds no address of a folder", where=uri)
    return [
        Listed(f"{folder.rstrip('/')}/{urllib.parse.quote(path)}", PurePosixPath(path).name, md5)
        for md5, path in parse_md5_lines(read_text(md5s), md5s)
    ]


def choose(listed: Sequence[Listed], name: str, md5: str | None, where: str) -> Listed:
    """Choose the file of a name, and of an MD5 where one is published.

    Raises UserError for none, and for several that differ.
    """
    named = [file for file in listed if file.name == name]
    chosen = [file for file in named if md5 is None or file.md5 == md5]
    if len({file.md5 for file in chosen}) != 1:
        md5s = ", ".join(file.md5 for file in named) or "none"
        what = f"{name}: expected one with MD5 {md5 or 'of any value'}, the list has {md5s}"
        raise UserError(what, where=where)
    return chosen[0]


def ask_sizes(chosen: Sequence[tuple[Listed, str]], published_bytes: Mapping[str, int]) -> list[RemoteFile]:
    """Ask the server for the size of each file; the texts are their paths below the folder of the download.

    Raises UserError for a size that is not the published one of that name.
    """
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        sizes = list(pool.map(ask_size, [file.address for file, _ in chosen]))
    for (file, _), size in zip(chosen, sizes, strict=True):
        if size != (expected := published_bytes.get(file.name, size)):
            raise UserError(f"{size:,} bytes, expected {expected:,}", where=file.address)
    return [
        RemoteFile(file.address, path, file.md5, size)
        for (file, path), size in zip(chosen, sizes, strict=True)
    ]


def ask_size(address: str) -> int:
    return try_again(partial(ask_size_once, address), address)


def ask_size_once(address: str) -> int:
    with explain_network_error(address), open_address(address, method="HEAD") as response:
        length = length_of(response)
    if length is None:
        raise UserError("the server does not say how large it is", where=address)
    return length


def describe(files: Sequence[RemoteFile], directory: Path) -> str:
    """List MD5, size and address of each file, a line each, and the size of all that are missing."""
    lines = [f"{'MD5':32}  {'bytes':>14}  address"]
    lines += [f"{file.md5}  {file.num_bytes:>14,}  {file.address}" for file in files]
    total, left = sum(file.num_bytes for file in files), sum(bytes_left(file, directory) for file in files)
    sizes = f"{total / 1e6:,.1f} MB, of which {left / 1e6:,.1f} MB are missing"
    return "\n".join([*lines, f"{len(files)} files for {relative_path(directory)}: {sizes}"])


def fetch(files: Sequence[RemoteFile], directory: Path, *, finish: Callable[[Path], None]) -> None:
    """Download what is missing of these files, one after the other, then `finish` the folder.

    Raises UserError for a file that cannot be had, or is not the one that its list describes; a file of that
    name which a person put there is neither trusted nor replaced.
    """
    lock = directory / ".fetch.lock"
    with explain_os_error("cannot be written", directory), locked(lock, f"downloads to {directory}"):
        check_present(files, directory)
        left = sum(bytes_left(file, directory) for file in files)
        check_free_space(directory, left, hint="choose another folder with --to DIR")
        progress = ByteProgress(left)
        for file in files:
            if not (directory / file.path).exists():
                download(file, directory / file.path, progress)
        finish(directory)


def check_present(files: Sequence[RemoteFile], directory: Path) -> None:
    """Raise UserError for a file that is there with another size or MD5."""
    for file in files:
        path = directory / file.path
        with explain_os_error("cannot be read", path):
            is_other = path.exists() and (path.stat().st_size != file.num_bytes or md5_of(path) != file.md5)
        if is_other:
            what = f"exists, but is not the file of {file.address}"
            raise UserError(what, where=str(path), hint="move it away")


def bytes_left(file: RemoteFile, directory: Path) -> int:
    path = directory / file.path
    return 0 if path.exists() else max(file.num_bytes - size_of(part_of(path)), 0)


def part_of(path: Path) -> Path:
    return path.with_name(path.name + PART)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def download(file: RemoteFile, path: Path, progress: ByteProgress) -> None:
    """Download a file, in as many attempts as it needs while each brings bytes, and check it."""
    part = part_of(path)
    make_folder(path.parent)
    part.touch()
    if size_of(part) < file.num_bytes:
        try_again(partial(receive, file, part, progress), file.address, partial(size_of, part))
    keep_if_right(part, path, file.md5, num_bytes=file.num_bytes)


def receive(file: RemoteFile, part: Path, progress: ByteProgress) -> None:
    """Append the rest of a file to `part`, or begin again where the server sends the whole file.

    Raises Cut while bytes are missing, and UserError where another attempt would not help.
    """
    start = size_of(part)
    with explain_network_error(file.address, NETWORK_ERRORS):
        response = open_address(file.address, start=start)
    with response:
        if start and response.status != HTTPStatus.PARTIAL_CONTENT:  # a server that cannot resume
            progress.expect_again(start, start)
            start = 0
        length = length_of(response)
        if length is not None and start + length != file.num_bytes:
            what = f"the server has {start + length:,} bytes now, expected {file.num_bytes:,}"
            raise UserError(what, where=file.address)
        with explain_os_error("cannot be written", part), part.open("ab" if start else "wb") as output:
            while start < file.num_bytes and (content := read_chunk(response, file.address)):
                output.write(content)
                start += len(content)
                progress.add(len(content), len(content))
    if start < file.num_bytes:
        raise Cut(f"the connection ended at byte {start:,} of {file.num_bytes:,}")


def read_chunk(response: http.client.HTTPResponse, address: str) -> bytes:
    with explain_network_error(address, NETWORK_ERRORS):
        return response.read(CHUNK_BYTES)


def keep_if_right(part: Path, path: Path, md5: str, *, num_bytes: int) -> None:
    """Give a finished file its name. Removes a wrong one, and raises UserError."""
    size, digest = part.stat().st_size, md5_of(part)
    if (size, digest) != (num_bytes, md5):
        part.unlink()
        what = f"{size:,} bytes with MD5 {digest}, expected {num_bytes:,} with {md5}; it is removed"
        raise UserError(what, where=str(path), hint="run the same command again; the other files are kept")
    synchronize(part)
    os.replace(part, path)
    synchronize(path.parent)
