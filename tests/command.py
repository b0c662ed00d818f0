"""`ttt` as a person types it: in a process of its own, or in this one, 4 s sooner."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

from common.cli import main
from common.repository import ROOT

TTT = Path(sys.executable).with_name("ttt")


def ttt(*arguments, cwd=ROOT):
    """Run a command in a process of its own."""
    return subprocess.run([TTT, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=600)


def ttt_here(*arguments):
    """Run a command in this process, whose working folder it has."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["ttt", *map(str, arguments)]
    with patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as end:  # argparse's own help or refusal
            code = end.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def one_line(done, code=2):
    """Assert that a command failed with this code and one line on stderr, and return the line."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]
