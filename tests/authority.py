"""A time-stamp authority (RFC 3161) of OpenSSL's `ts` command; `python -m tests.authority FOLDER` serves.

The path of its URL chooses its behaviour: `/` answers, every other path fails in its own way.
"""

import hashlib
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.command import run, start

CONFIGURATION = """
[tsa]
default_tsa = authority
[authority]
serial = {folder}/serial
signer_digest = sha256
default_policy = 1.2.3.4
digests = sha256
accuracy = secs:0, millisecs:{millisecs}
ess_cert_id_alg = sha256
"""
EXTENSIONS = "basicConstraints=critical,CA:FALSE\nextendedKeyUsage=critical,timeStamping\n"
DELAYS_S = {"slow": 3, "hang": 3600}
REPLIES = {  # in place of an authority's, by the path of the address
    "refuse": (403, b""),
    "redirect": (302, b""),
    "reject": (200, bytes.fromhex("30053003020102")),  # status 2, no token
    "garbage": (200, b"\x30\x82 this is no reply" * 10),
    "flood": (200, bytes(2**20)),
}
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*words, **options):
    done = run("openssl", *words, text=False, **options)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


class Authority:
    """Keys and certificates in a folder: `root` is the certificate that a verifier would trust."""

    def __init__(self, folder, name="Test Authority"):
        self.folder, self.root = folder, folder / "root.pem"
        if not self.root.exists():
            self.make(name)

    def make(self, name):
        self.folder.mkdir(parents=True, exist_ok=True)
        path = {part: self.folder / part for part in ("root.key", "key", "csr", "extensions", "serial")}
        path["extensions"].write_text(EXTENSIONS)
        path["serial"].write_text("01\n")
        (self.folder / "ts.cnf").write_text(CONFIGURATION.format(folder=self.folder, millisecs=5))
        days, root = ("-days", "30"), ("-CA", self.root, "-CAkey", path["root.key"])
        subject = ("-subj", f"/CN={name} Root")
        openssl("req", "-x509", *KEY, "-keyout", path["root.key"], *subject, *days, "-out", self.root)
        openssl("req", *KEY, "-keyout", path["key"], "-subj", f"/CN={name}", "-out", path["csr"])
        extensions = ("-extfile", path["extensions"], "-CAcreateserial")
        signed = ("-out", self.folder / "authority.pem")
        openssl("x509", "-req", "-in", path["csr"], *root, *days, *extensions, *signed)

    def answer(self, query):
        """Return the reply to a query, both DER."""
        asked = self.folder / f"query-{time.monotonic_ns()}"
        asked.write_bytes(query)
        signer = ("-signer", self.folder / "authority.pem", "-inkey", self.folder / "key")
        configuration = ("-config", self.folder / "ts.cnf", "-section", "authority")
        try:
            return openssl("ts", "-reply", *configuration, "-queryfile", asked, *signer)
        finally:
            asked.unlink()

    def stamp(self, data):
        """Return the reply for some bytes."""
        return self.answer(
            openssl("ts", "-query", "-sha256", "-cert", "-digest", hashlib.sha256(data).hexdigest())
        )


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 100  # all requests of a test at once


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        query = self.rfile.read(int(self.headers["Content-Length"]))
        manner = self.path.strip("/")
        time.sleep(DELAYS_S.get(manner, 0))
        status, body = REPLIES.get(manner, (200, None))
        if body is None:
            authority = self.server.authority
            with self.server.one_serial_number:
                body = authority.stamp(b"other bytes") if manner == "other" else authority.answer(query)
        self.send_response(status)
        self.send_header("Content-Type", "application/timestamp-reply")
        self.send_header("Content-Length", str(len(body)))
        if manner == "redirect":
            self.send_header("Location", "/")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def serve(folder):
    """Serve an authority in a process of its own; yields it and its address."""
    authority = Authority(folder)
    process = start(sys.executable, "-m", "tests.authority", folder)
    try:
        yield authority, f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    server = Server(("127.0.0.1", 0), Handler)
    server.one_serial_number = threading.Lock()
    server.authority = Authority(Path(sys.argv[1]))
    print(server.server_port, flush=True)
    server.serve_forever()
