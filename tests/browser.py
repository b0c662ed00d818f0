"""A headless Chromium that a test can query: DevTools' protocol over two pipes, no port, no library."""

import json
import os
import select
import subprocess
import time
from pathlib import Path

OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
OPTIONS += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe"]


class Browser:
    """Use as a context manager. `complaints` are what the page wrote to its console, errors among it."""

    def __init__(self, profile, *, width=1400, height=1000):
        self.profile, self.size = Path(profile), (width, height)
        self.complaints, self.requests, self.events, self.number, self.rest = [], [], [], 0, b""

    def __enter__(self):
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()
        width, height = self.size
        command = ["chromium", *OPTIONS, f"--user-data-dir={self.profile}", f"--window-size={width},{height}"]
        self.process = subprocess.Popen(  # it reads commands from descriptor 3 and answers on 4
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.session = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.out)
        os.close(self.into)

    def __call__(self, method, **parameters):
        """Send one command and return its result; events that arrive meanwhile are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            answer = self._receive(until)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self, until):
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], max(0, until - time.monotonic()))
            data = os.read(self.into, 1 << 20) if ready else b""
            assert data, "the browser does not answer"
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        method, parameters = message.get("method", ""), message.get("params", {})
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(parameters)
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        self.events.append(method)
        return message

    def open(self, path, fragment=""):
        """Load a file and wait until it has loaded."""
        for url in ("about:blank", Path(path).absolute().as_uri() + fragment):
            self.events.clear()
            self("Page.navigate", url=url)
            until = time.monotonic() + 60
            while "Page.loadEventFired" not in self.events:
                self._receive(until)

    def evaluate(self, script):
        """Return the value of an expression, or of its promise."""
        answer = self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def key(self, key):
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, text="\r" * (key == "Enter"))
