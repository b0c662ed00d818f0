"""Prepared data for the runs of these tests."""

import pytest

from common.commands.data import prepare
from common.repository import benchmarks
from common.training.load import load_config


@pytest.fixture(scope="session")
def prepared_data():
    for name in benchmarks():
        prepare(load_config(name, "baseline", size="mini", settings=[]).config)
