from functools import cache

import pytest

from common.evidence.submission import official
from common.evidence.submission import package as packaging
from common.evidence.submission.leaks import leaks
from tests.common.evidence.submission.packages import package, prepare


@pytest.fixture(scope="session", autouse=True)
def search_once():
    """Search a text for leaks once: every package holds the same code."""

    @cache
    def search(text, is_log):
        return tuple(leaks(text, is_log=is_log))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(packaging, "leaks", search)
        yield


@pytest.fixture
def work(golden, tmp_path, monkeypatch):
    """A working folder with a full run set of resnet."""
    monkeypatch.chdir(prepare(golden, tmp_path, "resnet"))
    return tmp_path


@pytest.fixture
def unjudged(monkeypatch):
    """Leave out the official checkers, which take seconds, in tests of other things."""
    monkeypatch.setattr(official, "judge_tree", lambda folder: [])


@pytest.fixture(scope="module")
def full(golden, tmp_path_factory):
    """A package of both benchmarks, written by `ttt export --to submission`."""
    root = prepare(golden, tmp_path_factory.mktemp("full"), "resnet", "bert")
    done = package(root / "results", "--out", root / "package")
    assert (done.returncode, done.stderr) == (0, ""), done
    return root / "package", done
