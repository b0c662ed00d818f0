"""Dropping the page cache: pages that stay in memory are reported."""

import mmap
from pathlib import Path

import pytest

from common.data import page_cache


@pytest.fixture
def folder(tmp_path):
    if page_cache.in_memory(tmp_path):
        pytest.skip("the folder of tests lies in memory")
    for number in range(3):
        (tmp_path / f"{number}.bin").write_bytes(bytes(1_000_000))
    (tmp_path / "empty").touch()
    return tmp_path


def test_files_on_a_disk_are_dropped(folder):
    (folder / "0.bin").read_bytes()
    is_cleared, how = page_cache.drop(folder, whole=False)
    assert is_cleared and how.endswith("of the 4 files of the data set")
    assert not any(page_cache.is_cached(folder / "0.bin") for _ in range(10)), "to look is to read"


def test_a_file_that_another_process_has_mapped_stays_and_is_counted(folder):
    with (folder / "1.bin").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        assert pages[0] == pages[500_000] == 0
        is_cleared, how = page_cache.drop(folder, whole=False)
    assert not is_cleared and how.startswith("1 of 4 files looked at stay in memory")


def test_nothing_in_memory_can_be_dropped():
    if not page_cache.in_memory(memory := Path("/dev/shm")):
        pytest.skip("no tmpfs here")
    is_cleared, how = page_cache.drop(memory, whole=False)
    assert not is_cleared and "in memory" in how
