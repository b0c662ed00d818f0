"""The files of a split, by the words in their paths."""

import errno

import pytest

from common.data.tables import explain_arrow_errors, split_files
from common.errors import UserError

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
    "pre_training_text-train.parquet",
    "pre_training_text-validation.parquet",
    "train_test/train-0.parquet",
    "train_test/train-1.parquet",
)
TRAIN = (*FILES[:3], FILES[10], *FILES[12:])
VALIDATION = (*FILES[3:5], FILES[11])


@pytest.mark.parametrize(
    ("split", "expected"), [("train", TRAIN), ("validation", VALIDATION), ("test", FILES[5:6])]
)
def test_the_last_word_in_its_path_names_the_split_of_a_file(split, expected, tmp_path):
    for name in FILES:
        path = tmp_path / "training" / name  # a word above the data set says nothing
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    directory = tmp_path / "training"
    names = [path.relative_to(directory).as_posix() for path in split_files(directory, split, ".parquet")]
    assert names == list(expected)


def test_a_file_that_may_not_be_read_or_a_full_quota_is_no_damage(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "train.parquet"
    with pytest.raises(UserError, match="parquet: cannot be read"), explain_arrow_errors(path):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(OSError, match="quota"), explain_arrow_errors(path):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
