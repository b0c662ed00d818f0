"""A source of text and the data prepared from it, which several files of tests read."""

import pytest

from tests.language_bert.data.test_wikipedia import prepared, write_source


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def full(source, tmp_path_factory):
    """A folder of data prepared from lines of text."""
    return prepared(tmp_path_factory.mktemp("prepared") / "full", source)
