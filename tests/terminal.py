"""`ttt` in a terminal of a given width; `.venv/bin/python -m tests.terminal` writes tests/golden anew."""

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios

from common.repository import ROOT
from tests.command import one_line, ttt_here

GOLDEN = ROOT / "tests/golden"
SETS = [f"results/reference-2cpu-mini-{name}" for name in ("baseline", "optimized")]
SEEN_AT_80 = {  # file in tests/golden -> command
    "help.txt": ["--help"],
    "list.txt": ["list"],
    "score.txt": ["score", *SETS],
    "methods.txt": ["list", "methods"],
}
MISTAKES = """
prepare
verify
audit
test
submit
train
rum
bert
inspect bert optimized
inspect profil bert optimized
run
run brt baseline
run bert fast
run bert baseline+emma
run bert baseline --dryrun
run bert baseline --size small
run bert baseline --runs 0
run bert baseline --nproc many
run bert baseline --size mini --set learning_rate=1
run bert baseline --size mini --set max_duration=7
run resnet baseline --size mini --set methods.unpad={}
data prepare bert --source no/such/folder
check no/such/folder
score README.md
list methods blurpol
""".strip().splitlines()
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def seen(columns, *arguments):
    """Return the exit code of `ttt` and its output to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "common.cli", *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment | {"TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    sent = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        sent += part
    os.close(ours)
    return process.wait(600), sent.decode()


def text_of(sent):
    """Return the text of the lines, without escapes and blanks at their ends."""
    lines = ESCAPE.sub("", sent).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines)


def answers():
    """Return every wrong input and the one line that answers it, with exit code 2."""
    lines = [f"$ ttt {mistake}\n{one_line(ttt_here(*shlex.split(mistake)))}\n" for mistake in MISTAKES]
    return "\n".join(lines)


if __name__ == "__main__":
    for name, arguments in SEEN_AT_80.items():
        code, sent = seen(80, *arguments)
        assert code == 0, sent
        (GOLDEN / name).write_text(text_of(sent))
    (GOLDEN / "mistakes.txt").write_text(answers())
