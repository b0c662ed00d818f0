"""Text in columns of data sets of Hugging Face: the instances of the same text in lines, and refusals."""

import shlex
import shutil
from itertools import chain

import pytest

from common.data import status
from common.data.manifest import read_manifest
from common.errors import UserError
from language_bert.data import sources
from language_bert.data.corpus import HELD_OUT_FRACTION
from language_bert.data.shards import Shards
from language_bert.data.sources import Rows, document_lines, find_column, split_rows
from language_bert.data.wordpiece import Tokenizer
from tests.command import ttt_here
from tests.language_bert.data.test_wikipedia import (
    NAMES,
    NUM_PARTS,
    OFFICIAL,
    check_same_instances,
    prepared,
    settings_of,
)

pa = pytest.importorskip("pyarrow", reason="the extra hf reads parquet and Arrow files")
pq = pytest.importorskip("pyarrow.parquet")


def documents_of(source, name):
    return (source / "results4" / name).read_text(encoding="utf-8").removesuffix("\n").split("\n\n")


def table_of(texts, column="text"):
    numbers = list(map(str, range(len(texts))))
    return pa.table({"id": list(range(len(texts))), "title": numbers, column: texts})


def write_parquet(folder, splits):
    (folder / "data").mkdir(parents=True)
    for name, texts in splits.items():
        pq.write_table(table_of(texts), folder / "data" / f"{name}.parquet", row_group_size=7)


def save_to_disk(folder, splits):
    """Save with the library itself: a folder for each split."""
    datasets = pytest.importorskip("datasets", reason="writes data sets as they are on the hub")
    train = [text for name, texts in splits.items() if name.startswith("train") for text in texts]
    parts = {"train": train, "validation": splits["validation-00000-of-00001"]}
    saved = datasets.DatasetDict({name: datasets.Dataset(table_of(texts)) for name, texts in parts.items()})
    saved.save_to_disk(folder, num_shards={"train": NUM_PARTS, "validation": 1})


def copy_of(source, folder, write):
    """Write the parts of a source as the split train, its evaluation set as the split validation."""
    splits = {
        f"train-{number:05}-of-{NUM_PARTS:05}": documents_of(source, name)
        for number, name in enumerate(NAMES)
    }
    write(folder, splits | {"validation-00000-of-00001": documents_of(source, "eval.txt")})
    for path in (*source.glob(f"{sources.CHECKPOINT}*"), source / "vocab.txt"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.filterwarnings("ignore")  # of the library that writes
@pytest.mark.parametrize(("write", "form"), [(write_parquet, "parquet"), (save_to_disk, "arrow")])
def test_the_line_that_status_prints_makes_of_rows_the_instances_of_the_same_text_in_lines(
    write, form, source, full, tmp_path
):
    folder, listed = tmp_path / "full", copy_of(source, tmp_path / "source", write)
    entries = status.read_report(["language_bert"], source=listed).data
    (line,) = [entry.next for entry in entries if entry.size == "full" and "baseline" in entry.configurations]
    small = [setting for setting in settings_of(folder) if not setting.startswith("data.corpus=")]
    done = ttt_here(*shlex.split(line)[1:], "--set", *small)
    assert done.returncode == 0, done.stderr
    check_same_instances(full, folder)
    manifest = read_manifest(folder, hint="")
    assert manifest["source"] == {"form": form, "column": "text"}
    assert manifest["facts"]["settings"]["data.corpus"] == sources.OTHER
    assert read_manifest(full, hint="")["source"] == {"form": "text"}


def test_without_a_second_split_the_last_rows_are_held_out(source, tmp_path):
    texts = [text for name in NAMES for text in documents_of(source, name)]
    folder = tmp_path / "source"
    folder.mkdir()
    pq.write_table(table_of(texts), folder / "0000.parquet")
    shutil.copy(source / "vocab.txt", folder)
    listed = sources.list_source(folder, is_official=False, has_checkpoint=False)
    (path,) = listed.parts
    assert listed.evaluation == path
    train, evaluation = (listed.rows(path, is_evaluation=flag) for flag in (False, True))
    assert (train, evaluation) == split_rows(path, "text")
    assert train.last == evaluation.first == len(texts) - int(len(texts) * HELD_OUT_FRACTION)
    lines = [line for rows in (train, evaluation) for line in document_lines(path, rows)]
    assert lines == [line for text in texts for line in [*text.split("\n"), ""]]
    changes = {"model.start": "random", "data.num_evaluation_samples": 20}
    instances = list(Shards(prepared(tmp_path / "full", folder, **changes), "evaluation"))
    tokenizer = Tokenizer(folder / "vocab.txt")
    held_out = {token for line in document_lines(path, evaluation) for token in tokenizer.ids(line)}
    assert len(instances) == 20 and held_out.issuperset(chain(*(one.masked_ids for one in instances)))


def test_a_paragraph_is_split_at_the_ends_of_sentences(tmp_path):
    pq.write_table(pa.table({"text": ["One. Two  is\nthree! Four", None, ""]}), tmp_path / "a.parquet")
    lines = [*document_lines(tmp_path / "a.parquet", Rows("text"))]
    assert lines == ["One.", "Two is", "three!", "Four", "", "", ""]


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"text": ["a"], "title": ["b"]}, "text"),
        ({"id": [1], "content": ["a"]}, "content"),
        ({"id": [1], "title": ["a"], "content": ["b"]}, "2 columns of strings among id, title, content"),
        ({"id": [1]}, "0 columns of strings among id"),
    ],
)
def test_the_column_of_the_text_is_found_or_asked_for(columns, answer, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    if answer in columns:
        assert find_column(path) == answer
    else:
        with pytest.raises(UserError, match=f"a.parquet: {answer}"):
            find_column(path)


def test_a_data_set_is_refused_in_one_line(source, tmp_path):
    folder = copy_of(source, tmp_path / "source", write_parquet)
    path = folder / "data" / f"train-00001-of-{NUM_PARTS:05}.parquet"
    with pytest.raises(UserError, match="is not MLCommons' text; this benchmark is defined on one dump"):
        prepared(tmp_path / "full", folder, **OFFICIAL)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(UserError, match="train-00001.*: not a whole parquet file"):
        prepared(tmp_path / "full", folder)
    pq.write_table(pa.table({"content": ["a", "b"]}), path)
    with pytest.raises(
        UserError, match="train-00001.*: its text is in column content, that of train-00000.* text"
    ):
        prepared(tmp_path / "full", folder)
    path.write_bytes(whole)
    (folder / "vocab.txt").unlink()
    with pytest.raises(UserError, match=r"there is no vocab\.txt"):
        prepared(tmp_path / "full", folder)
