"""A file server in this process, like MLCommons' storage, that fails on request."""

import hashlib
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch
from urllib.parse import unquote


class Storage:
    """Files by path; `requests` has (method, path, Range) of each request that came.

    By path, `cuts` are the numbers of bytes after which the next bodies end, `codes` the HTTP codes of the
    next answers, `sent` the bytes that replace the content of a file, and `headers` further headers.
    """

    def __init__(self):
        self.files, self.cuts, self.codes, self.sent, self.headers = {}, {}, {}, {}, {}
        self.requests = []
        self.resumes = True
        self.address = ""

    def publish(self, name, files, folder="files"):
        """Put up a data set: its files, and the two lists that name them."""
        self.files[f"/metadata/{name}.uri"] = f"{self.address}/{folder}\n".encode()
        lines = [f"{hashlib.md5(content).hexdigest()}  ./{path}\n" for path, content in files.items()]
        self.files[f"/metadata/{name}.md5"] = "".join(lines).encode()
        self.files |= {f"/{folder}/{path}": content for path, content in files.items()}

    @property
    def lists(self):
        return f"{self.address}/metadata"

    def ranges(self, path):
        """Return the Range of each GET of a path; None where there was none."""
        return [of_bytes for method, asked, of_bytes in self.requests if (method, asked) == ("GET", path)]


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(b"")

    def do_GET(self):
        self.answer(self.server.storage.sent.get(unquote(self.path)))

    def answer(self, body):
        storage, path = self.server.storage, unquote(self.path.partition("?")[0])
        of_bytes = self.headers.get("Range")
        storage.requests.append((self.command, path, of_bytes))
        if codes := storage.codes.get(path):
            self.send_response(codes.pop(0))
            self.send_header("Location", f"{storage.address}/login")
            self.end_headers()
            return
        if path not in storage.files:
            self.send_error(404)
            return
        content = storage.files[path] if self.command == "HEAD" or body is None else body
        start = int(of_bytes.removeprefix("bytes=").removesuffix("-")) if of_bytes and storage.resumes else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        for name, value in storage.headers.get(path, {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            cuts = storage.cuts.get(path)
            self.wfile.write(content[start:][: cuts.pop(0) if cuts else None])

    def log_message(self, *arguments):
        """Print nothing."""


@contextmanager
def serve():
    """Serve a `Storage` on a port of this machine."""
    storage, direct = Storage(), patch.dict(os.environ, {"no_proxy": "127.0.0.1"})
    with direct, ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.storage = storage
        storage.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield storage
        finally:
            server.shutdown()
            thread.join()
