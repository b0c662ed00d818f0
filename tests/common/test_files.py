"""Files that several processes write."""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from common.files import locked, save_text, temporary_folder
from tests.command import run


def test_writers_of_one_file_take_turns(tmp_path):
    path = tmp_path / "folder" / "report.html"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: save_text(path, str(number)), range(40)))
    assert int(path.read_text()) in range(40) and list(path.parent.iterdir()) == [path]


def test_a_lock_leaves_no_empty_folders_of_a_refused_command(tmp_path):
    for names in ([], ["result_0.txt"]):
        with locked(tmp_path / "system/bert/.running", "runs"):
            for name in names:
                (tmp_path / "system/bert" / name).touch()
        assert [path.name for path in tmp_path.rglob("*")] == (["system", "bert", *names] if names else [])


NOWHERE = """
import os, sys
from pathlib import Path
from common import errors, files
os.chdir(sys.argv[1]), os.rmdir(sys.argv[1])
for path in sys.argv[2:]:
    try:
        files.save_text(Path(path), "a")
    except errors.UserError as error:
        print(error)
"""


def test_a_folder_that_takes_no_files_is_named_in_one_line(tmp_path):
    """A working folder that was removed; in Linux's /proc a file cannot be created either."""
    paths = ["x.txt", *(["/proc/x.txt"] if sys.platform == "linux" else [])]
    (tmp_path / "gone").mkdir()
    done = run(sys.executable, "-c", NOWHERE, tmp_path / "gone", *paths, timeout=30)
    assert done.stdout.splitlines() == [f"{path}: cannot write (No such file or directory)" for path in paths]


def test_the_temporary_folder_of_a_killed_process_goes_with_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = "import os; from common import files\nwith files.temporary_folder():\n os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    left = [*tmp_path.iterdir()]
    with temporary_folder() as first, temporary_folder() as second:
        assert len(left) == 1 and {*tmp_path.iterdir()} == {first, second}
    assert [*tmp_path.iterdir()] == []
