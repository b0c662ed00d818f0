"""Files are found below folders while a run makes and removes others there."""

import os
from pathlib import Path

import pytest

from common.evidence.ledger import find_ledgers
from common.evidence.log import read_log
from common.evidence.paths import OTHER_BENCHMARKS, find_logs, find_sets, find_studies
from common.study.points import read_benches


@pytest.fixture
def vanishing(tmp_path, monkeypatch):
    """Return a folder of results in which a checkpoint's draft vanishes just before anyone lists it."""
    names = ("run/bert/result_0.txt", "study/a/bert-mini.ledger.json", "throughput/here/bert_0.json")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text('{"rates": []}')
    draft, scandir = tmp_path / "run" / "bert" / "draft", os.scandir
    draft.mkdir()

    def remove_and_list(path="."):
        if Path(path) == draft:
            draft.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", remove_and_list)
    yield tmp_path
    assert not draft.exists(), "nobody looked into it"


def test_every_other_benchmark_of_mlperf_training_is_known():
    counts = pytest.importorskip("mlperf_logging.benchmark_meta").get_result_file_counts("training")
    assert {*counts} - OTHER_BENCHMARKS == {"resnet", "bert"}


def test_a_path_with_dots_names_the_system_that_it_leads_to(golden, tmp_path, monkeypatch):
    golden.write(tmp_path, [golden.log()])
    (folder,) = tmp_path.glob("*/resnet")
    monkeypatch.chdir(folder)
    dotted = Path("..", folder.name)
    assert [*find_sets([dotted, folder])] == [folder]
    assert read_log(dotted / "result_0.txt").folders == read_log(folder / "result_0.txt").folders


@pytest.mark.parametrize(
    "find",
    [
        lambda folder: list(find_logs(folder)),
        lambda folder: find_studies([folder]),
        lambda folder: find_ledgers([folder]),
        lambda folder: read_benches([folder], print),
    ],
    ids=["logs", "studies", "ledgers", "benches"],
)
def test_a_folder_that_vanishes_meanwhile_is_passed_over(vanishing, find):
    assert len(find(vanishing)) == 1
