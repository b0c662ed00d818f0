"""Run `ttt` as a person types it: in a process of its own, or in this one, which takes 4 s less."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from common.cli import main
from common.repository import ROOT

TTT = Path(sys.executable).with_name("ttt")


def run(*command, **options):
    """Run a program in the repository to its end, and keep what it prints."""
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600, **options}
    return subprocess.run([*map(str, command)], check=False, **options)


def start(*command, **options):
    """Start a program in the repository; its output goes to pipes."""
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([*map(str, command)], **options)


def run_ranks(num_ranks, module, *arguments):
    """Run a module of the tests on ranks that torchrun starts; it must not fail. Return what it prints."""
    launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    launcher += [f"--nproc-per-node={num_ranks}", "-m"]
    done = run(sys.executable, "-m", *launcher, module, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ttt(*arguments, cwd=ROOT):
    """Run a command in a process of its own."""
    return run(TTT, *arguments, cwd=cwd)


def ttt_here(*arguments):
    """Run a command in this process, in its working folder; the environment is restored afterwards."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["ttt", *map(str, arguments)]
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with patch.object(sys, "argv", argv), patch.dict(os.environ), streams[0], streams[1]:
        try:
            code = main()
        except SystemExit as end:  # argparse's own help or refusal
            code = end.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def run_interpreted(code):
    """Run Python code in which Triton interprets kernels on the CPU; it must not fail."""
    pytest.importorskip("triton")
    done = run(sys.executable, "-c", code, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr


def one_line(done, code=2):
    """Assert that a command failed with this code and one line on stderr, and return the line."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


def assert_golden(name, text):
    """Compare text with a file in tests/golden; with GOLDEN=write in the environment it is written anew."""
    path = ROOT / "tests/golden" / name
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()
