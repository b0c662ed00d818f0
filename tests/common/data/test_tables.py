"""The files of a split, by the words in their paths."""

import pytest

from common.data.tables import split_files

FILES = (
    "data/train-00000-of-00294.parquet",
    "default/train/0000.parquet",
    "imagenet-1k-training-00001.parquet",
    "data/val-00000-of-00014.parquet",
    "data/validation-00000.parquet",
    "data/test-00000.parquet",
    "data/trainer.parquet",  # another word
    "train/cache-0123456789abcdef.parquet",  # computed from the data set
    ".cache/huggingface/train-00000.parquet",
    "train/state.json",
)


@pytest.mark.parametrize(
    ("split", "expected"), [("train", FILES[:3]), ("validation", FILES[3:5]), ("test", FILES[5:6])]
)
def test_words_in_its_path_name_the_split_of_a_file(split, expected, tmp_path):
    for name in FILES:
        path = tmp_path / "training" / name  # a word above the data set says nothing
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    directory = tmp_path / "training"
    names = [path.relative_to(directory).as_posix() for path in split_files(directory, split, ".parquet")]
    assert names == list(expected)
