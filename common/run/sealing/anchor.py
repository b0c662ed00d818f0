"""The process that lets a time-stamp authority (RFC 3161) stamp what a command writes, while it writes.

It is told by lines on its standard input which logs to watch and which files to stamp, and appends a line to
`anchors.jsonl` beside them for each reply or failure. No run waits for it. SIGTERM and the end of that input
mean that nobody waits for replies any longer. Its launcher is anchoring.py.
"""

import base64
import json
import os
import queue
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from common.data.fetch import NoRedirection
from common.evidence.records import TOKEN, Event, parse_record, printable
from common.evidence.sealed.anchors import ANCHORED_KEYS, ANCHORS, Anchor
from common.evidence.sealed.chain import digest
from common.evidence.sealed.replies import MAX_REPLY_BYTES, read_reply
from common.evidence.sealed.seal import SEAL
from common.files import append_whole, synchronize

POLL_S = 0.2
MAX_WAITING = 16  # requests at a time
NICENESS = 5
RECORD = re.compile(rb'%s .*?"key": "(?:%s)"' % (TOKEN.strip().encode(), "|".join(ANCHORED_KEYS).encode()))
HEADERS = {"Content-Type": "application/timestamp-query", "Accept": "application/timestamp-reply"}


class Request(NamedTuple):
    """Bytes to stamp: their file and the line in it (0: the whole).

    Both times are of the monotonic clock: the bytes were not there at `since_s`, and `asked_s` is when a
    thread was asked to send them.
    """

    path: Path
    line: int
    data: bytes
    since_s: float
    asked_s: float

    def __str__(self) -> str:
        return f"{self.path.name} line {self.line}" if self.line else self.path.name


class Watched:
    """A log that grows; it had no record at `since_s`, and none follows when it `is_over`."""

    def __init__(self, path: Path, since_s: float) -> None:
        self.path, self.since_s = path, since_s
        self.offset, self.line, self.is_over = 0, 0, False

    def poll(self) -> list[Request]:
        """Return the records to stamp of the lines that have become whole. Raises OSError without the log."""
        since_s, self.since_s = self.since_s, time.monotonic()
        if self.path.stat().st_size <= self.offset:
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")  # the launcher cuts off a torn line
        self.offset += len(whole + newline)
        requests = []
        for line in whole.split(b"\n") if newline else ():
            self.line += 1
            if RECORD.search(line):
                event = parse_record(line.decode("ascii", "replace").rpartition(TOKEN)[2], self.line, [])
                if isinstance(event, Event) and event.key in ANCHORED_KEYS:
                    requests.append(Request(self.path, self.line, line + b"\n", since_s, self.since_s))
                    self.is_over = event.key == "run_stop"
        return requests


class Stamper:
    """Sends requests, each in a thread, and writes down their replies and failures.

    A reply may take `limit_s`. Once `is_hurried`, no missing one is waited for.
    """

    def __init__(self, url: str, limit_s: float) -> None:
        self.url, self.limit_s = url, limit_s
        self.is_hurried = False
        self.threads = ThreadPoolExecutor(MAX_WAITING)
        self.pending: dict[Future[tuple[bytes, float]], Request] = {}
        self.num_asked = self.num_stamped = 0
        self.folders: set[Path] = set()
        self.first_failure = ""

    def ask(self, request: Request) -> None:
        """Send a request; its answer is collected later."""
        self.num_asked += 1
        try:
            self.pending[self.threads.submit(self.receive, request)] = request
        except RuntimeError as error:  # no more threads
            self.write(request, failure=self.describe_failure(error))

    def receive(self, request: Request) -> tuple[bytes, float]:
        """Return the reply to a request, and the seconds since its bytes were not there."""
        reply = request_stamp(self.url, request.data, self.limit_s)
        return reply, time.monotonic() - request.since_s

    def collect(self) -> None:
        """Write down the answers that have come, and the requests whose time is up."""
        for future, request in list(self.pending.items()):
            if future.done():
                del self.pending[future]
                if error := future.exception():  # also the panic of a library
                    self.write(request, failure=self.describe_failure(error))
                else:
                    self.write(request, *future.result())
            elif time.monotonic() - request.asked_s > self.limit_s:
                del self.pending[future]
                failure = self.describe_failure(TimeoutError())
                if future.cancel():  # no thread had taken it
                    failure = f"{MAX_WAITING} requests before it have no reply"
                self.write(request, failure=failure)

    def write(self, request: Request, reply: bytes = b"", delay_s: float = 0.0, *, failure: str = "") -> None:
        """Append a line beside the stamped file, whole, and count it. Warns of the first failure."""
        try:
            write_anchor(request, delay_ms=round(delay_s * 1000), reply=reply, failure=failure)
            self.folders.add(request.path.parent)
        except OSError as error:
            failure = failure or f"cannot write {ANCHORS} ({error.strerror})"
        self.num_stamped += not failure
        if failure and not self.first_failure:
            self.first_failure = failure
            say(f"  warning: no time-stamp for {request}: {failure}; the run goes on", sys.stderr)

    def describe_failure(self, error: BaseException) -> str:
        """Say in a line why there is no reply, without the host."""
        if isinstance(error, urllib.error.HTTPError):
            return f"HTTP status {error.code}"
        reason = getattr(error, "reason", "") or error
        if isinstance(reason, TimeoutError):
            return f"no reply within {self.limit_s:.0f} s"
        text = str(reason) or type(error).__name__
        return printable(text.replace(urlsplit(self.url).hostname or "\0", "the authority"), 150)

    def finish(self) -> None:
        """Wait for the last replies, and say how many there are."""
        self.collect()
        while self.pending and not self.is_hurried:
            time.sleep(POLL_S / 4)
            self.collect()
        for request in self.pending.values():
            self.write(request, failure="no reply before the command ended")
        for folder in self.folders:
            with suppress(OSError):
                synchronize(folder / ANCHORS)
                synchronize(folder)
        if self.num_asked:
            say(f"time-stamps: {self.num_stamped} of {self.num_asked} were granted", sys.stdout)


def write_anchor(request: Request, *, delay_ms: int = 0, reply: bytes = b"", failure: str = "") -> None:
    """Append a line beside the file of a request, whole. Raises OSError."""
    anchor = Anchor(
        of=request.path.name,
        line=request.line,
        sha256=digest(request.data),
        delay_ms=delay_ms,
        reply=base64.b64encode(reply).decode(),
        failure=failure,
    )
    line = anchor.model_dump_json(exclude_defaults=True).encode() + b"\n"
    append_whole(request.path.with_name(ANCHORS), line)


def write_failures(files: Iterable[Path], failure: str) -> None:
    """Write a failure for each place in logs and seals that has no line, as far as they can be read."""
    for path in files:
        with suppress(OSError):
            is_seal = path.name == SEAL
            seal = [Request(path, 0, path.read_bytes(), 0.0, 0.0)] if is_seal else []
            anchors = path.with_name(ANCHORS)
            written = anchors.read_bytes() if anchors.exists() else b""
            for request in seal or Watched(path, 0.0).poll():
                if f'"of":"{path.name}","line":{request.line},'.encode() not in written:
                    write_anchor(request, failure=failure)


def request_stamp(url: str, data: bytes, limit_s: float) -> bytes:
    """Return the reply of an authority for the SHA-256 of bytes, which is verified.

    Raises OSError, HTTPException or ValueError.
    """
    from rfc3161_client import HashAlgorithm, TimestampRequestBuilder

    query = TimestampRequestBuilder().data(data).hash_algorithm(HashAlgorithm.SHA256).build()
    request = urllib.request.Request(url, query.as_bytes(), HEADERS)
    opener = urllib.request.build_opener(NoRedirection)  # no other host than the authority gets a request
    with opener.open(request, timeout=limit_s) as response:
        body: bytes = response.read(MAX_REPLY_BYTES + 1)
    reply = read_reply(body)
    if reply.fault:
        raise ValueError(reply.fault)
    if reply.imprint.hex() != digest(data) or reply.nonce != query.nonce:
        raise ValueError("the reply answers another request")
    return body


def say(text: str, stream: Any) -> None:
    with suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


class Stamping:
    """The logs that are watched, the requests for their records, and the orders of the launcher."""

    def __init__(self, url: str, limit_s: float) -> None:
        self.stamper = Stamper(url, limit_s)
        self.watched: list[Watched] = []
        self.orders: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        self.is_over = False

    def read_orders(self) -> None:
        for line in sys.stdin:
            self.orders.put(json.loads(line))
        self.hurry()

    def hurry(self, *_: object) -> None:
        self.is_over = self.stamper.is_hurried = True

    def step(self) -> None:
        """Take an order if there is one, send requests for the records that are new, and collect replies."""
        with suppress(queue.Empty):
            order = self.orders.get(timeout=POLL_S)
            if "watch" in order:
                self.watched.append(Watched(Path(order["watch"]), float(order["since"])))
            elif "stamp" in order:
                path, now_s = Path(order["stamp"]), time.monotonic()
                with suppress(OSError):
                    self.stamper.ask(Request(path, 0, path.read_bytes(), now_s, now_s))
            self.is_over = self.is_over or "end" in order
        for log in list(self.watched):
            try:
                for request in log.poll():
                    self.stamper.ask(request)
                has_ended = log.is_over
            except OSError:  # removed: its clock had not started
                has_ended = True
            if has_ended:
                self.watched.remove(log)
        self.stamper.collect()


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until something handles it
    import rfc3161_client  # noqa: F401 - now, not when the first record waits

    with suppress(OSError):
        os.nice(NICENESS)
    start = json.loads(sys.stdin.readline() or "null")
    if start is None:  # the launcher is gone
        return
    stamping = Stamping(start["url"], float(start["limit_s"]))
    signal.signal(signal.SIGTERM, stamping.hurry)
    threading.Thread(target=stamping.read_orders, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    while not stamping.is_over:
        stamping.step()
    stamping.stamper.finish()
    os._exit(0)  # threads may hang


if __name__ == "__main__":
    main()
