"""Commands one after another in one process: loading torch takes longer than most of them."""

import json
import shlex
import subprocess
import sys

from tests.command import run

READERS = {  # commands that need neither torch nor a clone, and what they print
    "list": "language_bert",
    "list methods": "unpad",
    "list methods unpad": "Source.",
    "doctor --describe": '"system_name"',
    "data verify bert --size mini": "intact",
    "reproduce --claims": "MosaicML",
    "estimate --check-published": "predicted too fast",
    "inspect compile --check-published": "wrong by a factor",
}
CODE = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder
hidden, commands = json.loads(sys.argv[1])
class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
from common.cli import main
ended = []
for words in commands:
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["ttt", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    ended.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""


def run_all(commands, *, hidden=(), python=(sys.executable,), **options):
    """Run lines of commands, without "ttt", where some modules are `hidden`; returns how each ended."""
    commands = [shlex.split(line) for line in commands]
    done = run(*python, "-c", CODE, json.dumps([list(hidden), commands]), **options)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    return [subprocess.CompletedProcess(words, *end) for words, end in zip(commands, ended, strict=True)]
