"""Every test, and every process that one starts, computes with one thread: two tests run at a time."""

import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch


@pytest.fixture(scope="session")
def prepared_data():
    """Prepare the data of size mini of all benchmarks."""
    from common.commands.data import prepare
    from common.repository import benchmarks
    from common.training.load import load_config

    for name in benchmarks():
        prepare(load_config(name, "baseline", size="mini", settings=[]).config)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Put the files with slow tests first, so that two processes end together; on demand is slow, too."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if item.get_closest_marker("on_demand"):
            item.add_marker("slow")
