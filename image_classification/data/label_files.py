"""Label files beside ImageNet's tars, under the names that their makers gave them, as lists of synsets.

The validation tar holds no classes. One of these files does, looked for in this order in the source, in the
folder `ILSVRC2012_devkit_t12/data` below it, and in the devkit's archive. Its lines follow the sorted file
names, except in Caffe's:

    validation_synsets.txt, imagenet_2012_validation_synset_labels.txt    a synset a line
    val.txt                                       Caffe: a file name and a line number of synsets.txt, from 0
    meta.bin                                      torchvision: the synsets, saved by torch
    ILSVRC2012_validation_ground_truth.txt        the devkit: an ILSVRC id a line

An ILSVRC id is no place among the sorted synsets: meta.mat or map_clsloc.txt says which synset has it.
"""

import io
import pickle
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Literal

from common.errors import UserError, name_error

SYNSET = re.compile(r"n\d{8}")
SYNSETS = "validation_synsets.txt"
CLASS_LISTS = ("synsets.txt", "synset_words.txt", "imagenet_lsvrc_2015_synsets.txt")
DEVKIT = "ILSVRC2012_devkit_t12"
HINT = (
    "one of these says the synset of each validation image: imagenet_2012_validation_synset_labels.txt "
    "(github.com/tensorflow/models, research/slim/datasets), ILSVRC2012_devkit_t12.tar.gz (image-net.org), "
    "val.txt with synsets.txt (Caffe), meta.bin (torchvision)"
)


class LabelFile:
    """A small file of a source; its errors name the file and a `line`, from 1."""

    def __init__(self, where: str, content: bytes) -> None:
        self.where, self.content = where, content
        self.lines = [line.split() for line in content.decode("utf-8", "replace").splitlines()]
        self.lines = [words for words in self.lines if words]

    def error(self, what: str, *, line: int | None = None, hint: str = "") -> UserError:
        return UserError(what, where=self.where + (f":{line}" if line else ""), hint=hint)


@contextmanager
def open_tar(path: Path, mode: Literal["r:", "r:gz"] = "r:") -> Iterator[tarfile.TarFile]:
    """Open a tar, and raise UserError that names it where it is damaged, also inside the block.

    A block must read a tar in mode "r:" to its end: one that was cut between two files lacks its end mark.
    """
    try:
        with tarfile.open(path, mode) as tar:
            yield tar
            if mode == "r:" and path.stat().st_size < tar.offset + tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it ends without an end mark")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"not a whole tar ({error})", where=str(path)) from error


def find_file(directory: Path, name: str) -> LabelFile | None:
    """Read a file from a source, its devkit folder or the devkit's archive; None if none has it."""
    for path in (directory / name, directory / DEVKIT / "data" / name):
        if path.is_file():
            return LabelFile(str(path), path.read_bytes())
    archive = directory / f"{DEVKIT}.tar.gz"
    if archive.is_file():
        with open_tar(archive, "r:gz") as tar, suppress(KeyError):  # the archive lacks it
            if member := tar.extractfile(f"{DEVKIT}/data/{name}"):
                return LabelFile(f"{archive} {name}", member.read())
    return None


def read_classes(directory: Path, num_classes: int) -> list[str]:
    """Return the synsets by class number from a list beside the data; [] without such a list.

    Raises UserError for a list that has another length or something else than synsets.
    """
    for file in filter(None, (find_file(directory, name) for name in CLASS_LISTS)):
        for line, words in enumerate(file.lines, 1):
            if not SYNSET.fullmatch(words[0]):
                raise file.error(f"{words[0][:40]} is no synset (n01440764)", line=line)
        if len(file.lines) != num_classes:
            raise file.error(f"{len(file.lines)} synsets, expected {num_classes}")
        return [words[0] for words in file.lines]
    return []


def validation_synsets(directory: Path, names: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Return the synset of each validation image, in the order of `names`, their sorted file names.

    `classes` are the synsets that Caffe's numbers count. Raises UserError without a label file, and for one
    that lacks images.
    """
    for name, read in READERS.items():
        file = find_file(directory, name)
        if file is None:
            continue
        synsets = read(file, directory, names, classes)
        if len(synsets) != len(names):
            what = f"{len(synsets)} synsets, expected {len(names)}, one for each validation image"
            raise file.error(what, hint=HINT)
        return synsets
    where = str(directory / SYNSETS)
    raise UserError("no such file; the validation tar has no classes", where=where, hint=HINT)


def read_synsets(file: LabelFile, directory: Path, names: Sequence[str], classes: Sequence[str]) -> list[str]:
    return [word for words in file.lines for word in words]


def read_caffe(file: LabelFile, directory: Path, names: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Read lines of a file name and a number: the place of the class in Caffe's list, or among `classes`."""
    by_name, classes = {}, read_classes(directory, len(classes)) or classes
    for line, words in enumerate(file.lines, 1):
        if len(words) != 2 or not words[1].isdecimal():
            raise file.error("expected a file name and the number of its class", line=line)
        if int(words[1]) >= len(classes):
            raise file.error(f"class {words[1]}, expected 0 to {len(classes) - 1}", line=line)
        by_name[PurePosixPath(words[0]).name] = classes[int(words[1])]
    if missing := [name for name in names if name not in by_name]:
        raise file.error(f"says nothing of {missing[0]}, which the validation tar holds")
    return [by_name[name] for name in names]


def read_torchvision(
    file: LabelFile, directory: Path, names: Sequence[str], classes: Sequence[str]
) -> list[str]:
    """Read torchvision's pair of the words of each synset and the list of the validation images' synsets."""
    try:
        import torch  # takes seconds to import, and is needed for this file alone
    except ImportError as error:
        raise file.error("torch alone can read it, and is not installed", hint="pip install torch") from error
    try:
        _, synsets = torch.load(io.BytesIO(file.content), weights_only=True)
        return [str(synset) for synset in synsets]
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, LookupError) as error:
        raise file.error(f"not torchvision's file ({name_error(error, 60)})") from error


def read_devkit(file: LabelFile, directory: Path, names: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Read lines of an ILSVRC id."""
    synsets = ilsvrc_synsets(directory, file)
    for line, words in enumerate(file.lines, 1):
        if len(words) != 1 or not words[0].isdecimal() or int(words[0]) not in synsets:
            raise file.error(f"{' '.join(words)[:40]} is no ILSVRC id of its devkit", line=line)
    return [synsets[int(words[0])] for words in file.lines]


def ilsvrc_synsets(directory: Path, labels: LabelFile) -> dict[int, str]:
    """Return the synset of each ILSVRC id, from meta.mat or map_clsloc.txt of the devkit."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    if file := find_file(directory, "meta.mat"):
        try:
            table = loadmat(io.BytesIO(file.content), squeeze_me=True)["synsets"]
            pairs = zip(table["ILSVRC2012_ID"].tolist(), table["WNID"].tolist(), strict=True)
            return {int(number): str(synset) for number, synset in pairs}
        except (LookupError, ValueError, TypeError, RuntimeError, MatReadError, OSError, zlib.error) as error:
            raise file.error(f"not the devkit's table of synsets ({name_error(error, 60)})") from error
    if file := find_file(directory, "map_clsloc.txt"):
        return {int(words[1]): words[0] for words in file.lines if len(words) > 1 and words[1].isdecimal()}
    hint = f"put meta.mat or map_clsloc.txt of {DEVKIT}/data beside it, or the whole {DEVKIT}.tar.gz"
    raise labels.error("its ILSVRC ids are not the numbers of sorted synsets", hint=hint)


Reader = Callable[[LabelFile, Path, Sequence[str], Sequence[str]], list[str]]
READERS: dict[str, Reader] = {
    SYNSETS: read_synsets,
    "imagenet_2012_validation_synset_labels.txt": read_synsets,
    "val.txt": read_caffe,
    "meta.bin": read_torchvision,
    "ILSVRC2012_validation_ground_truth.txt": read_devkit,
}
