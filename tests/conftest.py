"""Every test, and every process that one starts, computes with one thread: two tests run at a time."""

import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
LONG = ("test_simulations", "test_method_steps", "test_gpu_day", "test_cli", "test_fake_gpu", "test_gpu")
LONG += ("test_plain_loop", "test_without_torch")  # files that take a minute or more


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
    """Put the files that take long first, so that two processes end together; on demand is slow, too."""
    first = {item.path for item in items if item.get_closest_marker("slow") or item.path.stem in LONG}
    items.sort(key=lambda item: item.path not in first)
    for item in items:
        if item.get_closest_marker("on_demand"):
            item.add_marker("slow")
