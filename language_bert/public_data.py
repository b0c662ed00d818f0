"""The files of this benchmark that MLCommons' storage offers to everybody, and the state of a folder of them.

They are the vocabulary, the checkpoint of TensorFlow 1 and the cleaned text. Sources, read on GitHub:
retired_benchmarks/bert/README.md of mlcommons/training names the two lists and publishes the sizes and MD5
that are checked here; the MD5 of all other files comes from the lists themselves. No download was tried.
Whether the storage has the text as 500 parts or as the archive of the earlier Google Drive folder
(results_text.tar.gz, with the MD5 of its files in bert_reference_results_text_md5.txt) is not stated there;
the list decides, and both are taken.
"""

import os
import shutil
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from common.data import fetch
from common.data.fetch import Listed, RemoteFile
from common.data.preparation import Progress, check_free_space
from common.data.tables import data_files
from common.errors import UserError, list_some
from common.files import explain_os_error
from language_bert.data import sources
from language_bert.data.sources import (
    CHECKPOINT,
    DATA_SUFFIX,
    INDEX_SUFFIX,
    RECORDS,
    SUFFIXES,
    TABLES,
    TEXT,
    WEIGHTS,
    Files,
)

SERVER = "https://training.mlcommons-storage.org/metadata"
INPUTS, CLEANED_TEXT = "bert-input-files", "bert-preprocessed-wikipedia-dataset"  # names of lists
VOCABULARY, LICENSE = "vocab.txt", "License.txt"
ARCHIVE, ARCHIVE_MD5S = "results_text.tar.gz", "bert_reference_results_text_md5.txt"
FOLDER = "results4"  # of the text; its name in the archive
PUBLISHED_BYTES = {
    VOCABULARY: 231_508,
    CHECKPOINT + INDEX_SUFFIX: 17_371,
    CHECKPOINT + DATA_SUFFIX: 4_034_713_312,
    TEXT: 32_851_144,
    "part-00000-of-00500": 27_150_902,
    "part-00001-of-00500": 27_198_569,
    "part-00002-of-00500": 27_395_616,
    "part-00497-of-00500": 24_775_043,
    "part-00498-of-00500": 24_575_505,
    "part-00499-of-00500": 21_873_644,
}
IS_PUBLIC = True
SETTINGS = ("data.corpus", "data.masked_fraction")  # that a person may choose at preparation, and for a run


def list_files(server: str | None, directory: Path) -> list[RemoteFile]:
    """List what to download to `directory`, by the lists of a server; MLCommons' is the default.

    The archive of the text is left out where the text is there. Raises UserError for a list that lacks a file
    or has another MD5 or size than the published one.
    """
    server = server or SERVER
    listed = fetch.read_list(server, INPUTS)
    names = [VOCABULARY, CHECKPOINT + INDEX_SUFFIX, CHECKPOINT + DATA_SUFFIX]
    names += [LICENSE] * any(file.name == LICENSE for file in listed)
    chosen = [(choose(listed, name, INPUTS), name) for name in names]
    listed = fetch.read_list(server, CLEANED_TEXT)
    texts, present = text_names(), {file.name for file in listed}
    if present >= set(texts):
        chosen += [(choose(listed, name, CLEANED_TEXT), f"{FOLDER}/{name}") for name in texts]
    elif ARCHIVE not in present:
        what = f"lists neither {texts[-1]} and its like nor {ARCHIVE}"
        raise UserError(what, where=f"{server}/{CLEANED_TEXT}.md5")
    elif missing_files(directory, texts):
        archives = [ARCHIVE, *[ARCHIVE_MD5S] * (ARCHIVE_MD5S in present)]
        chosen += [(choose(listed, name, CLEANED_TEXT), name) for name in archives]
    return fetch.ask_sizes(chosen, PUBLISHED_BYTES)


def choose(listed: list[Listed], name: str, where: str) -> Listed:
    return fetch.choose(listed, name, sources.OFFICIAL_MD5.get(name), f"{where}.md5")


def text_names(num_parts: int | None = None) -> list[str]:
    """Name the evaluation set and the parts of a text: as many as MLCommons' has, or another number."""
    return [TEXT, *sources.part_names(num_parts or sources.NUM_PARTS)]


def count_parts(files: Files) -> int:
    """Read the number of parts from their names; without parts, or of mixed names, it is MLCommons'."""
    totals = sources.read_totals(files)
    return totals.pop() if len(totals) == 1 else sources.NUM_PARTS


def missing_files(directory: Path, names: list[str] | None = None) -> list[str]:
    """Name the files that a source of the form of `directory` needs and that are nowhere below it.

    An empty folder counts as MLCommons' text; the names of parts say how many there are. A converted
    checkpoint stands for the data of TensorFlow's.
    """
    files = Files(directory)
    if names is None:
        form, texts = form_of(files), text_names(count_parts(files))
        names = [VOCABULARY] * (form != RECORDS)
        names += [CHECKPOINT + INDEX_SUFFIX, *[CHECKPOINT + DATA_SUFFIX] * (not files[WEIGHTS])]
        names += {TEXT: texts, RECORDS: [RECORDS, *texts[1:]], TABLES: []}[form]
    return [name for name in names if not files[name]]


def form_of(files: Files) -> str:
    """Tell TEXT, RECORDS and TABLES apart by the names of files; an empty source counts as TEXT."""
    if any(map(sources.PART.fullmatch, files)):
        return RECORDS if files[RECORDS] and not files[TEXT] else TEXT
    return TABLES if any(data_files(files.directory, suffix) for suffix in SUFFIXES) else TEXT


def source_settings(directory: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without which this source is refused; `keys` are those of a configuration.

    Tables, and parts in another number, are another text than MLCommons'. Instances in TFRecords are masked
    as for evaluation.
    """
    files = Files(directory)
    form, is_other = form_of(files), count_parts(files) != sources.NUM_PARTS
    needed: dict[str, Any] = {"data.corpus": sources.OTHER} if form == TABLES or is_other else {}
    if form == RECORDS:
        needed["data.masked_fraction"] = keys["data.evaluation_masked_fraction"]
    return {key: value for key, value in needed.items() if keys[key] != value}


def unpack(directory: Path) -> None:
    """Unpack the text from its archive, where that was downloaded; each file is checked and kept whole.

    Raises UserError for a damaged archive, or one that lacks a part.
    """
    archive, folder = directory / ARCHIVE, directory / FOLDER
    if not archive.is_file() or not missing_files(directory, text_names()):
        return
    names, md5s = text_names(), read_md5s(directory / ARCHIVE_MD5S) | sources.OFFICIAL_MD5
    num_bytes = max(PUBLISHED_BYTES[name] for name in PUBLISHED_BYTES if name.startswith("part-"))
    num_bytes *= sources.NUM_PARTS  # a bound: the parts are cut at equal lengths
    with explain_os_error("cannot be written", folder):
        folder.mkdir(exist_ok=True)
        check_free_space(folder, num_bytes, hint="choose another folder with --to DIR")
        progress = Progress(num_items=len(names), num_bytes=num_bytes, items="files")
        try:
            with tarfile.open(archive, "r|gz") as packed:
                for member in packed:
                    name = PurePosixPath(member.name).name
                    if member.isfile() and name in names:
                        write_member(packed, member, folder / name, md5s.get(name))
                        progress.add(1, member.size)
        except (tarfile.TarError, zlib.error, EOFError) as error:
            raise UserError(f"cannot be unpacked ({error})", where=str(archive)) from error
    if missing := missing_files(directory, names):
        raise UserError(f"lacks {list_some(missing)}", where=str(archive))


def read_md5s(path: Path) -> dict[str, str]:
    """Read the MD5 of the files in the archive; none where that list was not downloaded."""
    if not path.is_file():
        return {}
    lines = fetch.parse_md5_lines(path.read_text(encoding="utf-8", errors="replace"), str(path))
    return {PurePosixPath(name).name: md5 for md5, name in lines}


def write_member(packed: tarfile.TarFile, member: tarfile.TarInfo, path: Path, md5: str | None) -> None:
    """Write a file of the archive, under its name when it is whole. Raises UserError for a wrong MD5."""
    content, part = packed.extractfile(member), fetch.part_of(path)
    assert content is not None  # a regular file
    with part.open("wb") as output:
        shutil.copyfileobj(content, output)
    if md5 is None:
        os.replace(part, path)
    else:
        fetch.keep_if_right(part, path, md5, num_bytes=member.size)
