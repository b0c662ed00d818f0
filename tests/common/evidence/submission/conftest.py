import pytest

from common.evidence.submission import official
from tests.common.evidence.submission.packages import package, prepare


@pytest.fixture
def work(golden, tmp_path, monkeypatch):
    """A working folder with a full run set of resnet."""
    monkeypatch.chdir(prepare(golden, tmp_path, "resnet"))
    return tmp_path


@pytest.fixture
def unjudged(monkeypatch):
    """Leave out the official checkers, which take seconds, where a test is about something else."""
    monkeypatch.setattr(official, "judge_tree", lambda folder: [])


@pytest.fixture(scope="module")
def full(golden, tmp_path_factory):
    """A package of both benchmarks, written by the real thing."""
    root = prepare(golden, tmp_path_factory.mktemp("full"), "resnet", "bert")
    done = package(root / "results", "--out", root / "package")
    assert (done.returncode, done.stderr) == (0, ""), done
    return root / "package", done
