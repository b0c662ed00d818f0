"""A source of text and the data prepared from it, which several files of tests read."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from language_bert.data import wikipedia
from tests.language_bert.data.test_wikipedia import prepared, write_source


@pytest.fixture(autouse=True)
def in_threads(monkeypatch):
    """Write shards in this process: another one loads for seconds. `full` and commands start real ones."""
    monkeypatch.setattr(wikipedia, "ProcessPoolExecutor", lambda **_: ThreadPoolExecutor(2))


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def full(source, tmp_path_factory):
    """A folder of data prepared from lines of text."""
    return prepared(tmp_path_factory.mktemp("prepared") / "full", source)
