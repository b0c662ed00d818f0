"""The public files of BERT, fetched from a server on this machine as a person types it."""

import hashlib
import io
import json
import tarfile

import numpy as np
import pytest

from common.data import fetch
from language_bert import public_data
from language_bert.data import sources
from language_bert.public_data import ARCHIVE, ARCHIVE_MD5S, CLEANED_TEXT, INPUTS
from tests.command import one_line, ttt_here
from tests.language_bert.data.tf_files import write_checkpoint
from tests.storage import serve

INDEX, DATA = (f"model.ckpt-28252{suffix}" for suffix in (".index", ".data-00000-of-00001"))
PREPARE = "ttt data prepare language_bert --size full"
TEXTS = {
    "eval.txt": b"An evaluated sentence.\n",
    **{f"part-{number:05}-of-00003": b"A sentence.\n" * (number + 1) for number in range(3)},
}


def md5(content):
    return hashlib.md5(content).hexdigest()


def pack(texts):
    """Return an archive like MLCommons', with a file that nobody needs and one that leads out of it."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in {"results4/eval.md5": b"x", "../outside": b"x"}.items():
            add(archive, name, content)
        for name, content in texts.items():
            add(archive, f"results4/{name}", content)
    return file.getvalue()


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """MLCommons' two data sets with two checkpoints; the MD5 of one, and of the text, is published."""
    for folder, first in (("tf1", 1.0), ("tf2", 2.0)):
        (tmp_path / folder).mkdir()
        write_checkpoint(tmp_path / folder / "model.ckpt-28252", {"a": first + np.arange(5.0)})
    inputs = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in tmp_path.glob("tf?/*")}
    inputs |= {"vocab.txt": b"[UNK]\nword\n", "License.txt": b"CC", "enwiki.xml.bz2": b"too large"}
    official = {INDEX: inputs[f"tf1/{INDEX}"], DATA: inputs[f"tf1/{DATA}"], "vocab.txt": inputs["vocab.txt"]}
    published = {name: md5(content) for name, content in (official | TEXTS).items()}
    monkeypatch.setattr(sources, "OFFICIAL_MD5", published)
    monkeypatch.setattr(sources, "NUM_PARTS", 3)
    monkeypatch.setattr(public_data, "PUBLISHED_BYTES", {"vocab.txt": 11, "part-00000-of-00003": 12})
    monkeypatch.setattr(fetch, "WAITS_S", (0.0,))
    with serve() as started:
        started.inputs = inputs
        started.publish(INPUTS, inputs, folder="inputs")
        started.publish(CLEANED_TEXT, TEXTS, folder="results")
        yield started


@pytest.fixture
def archived(storage):
    """The same storage with the text as an archive."""
    lines = "".join(f"{md5(content)}  {name}\n" for name, content in TEXTS.items())
    files = {ARCHIVE: pack(TEXTS), ARCHIVE_MD5S: lines.encode(), "results_text.zip": b"too"}
    storage.publish(CLEANED_TEXT, files, folder="processed")
    return storage


def fetch_to(storage, folder, *options):
    return ttt_here("data", "fetch", "language_bert", "--mirror", storage.lists, "--to", folder, *options)


def check_source(folder):
    """Check that preparation takes a folder as the official source, and that it holds nothing unfinished."""
    source = sources.list_source(folder, is_official=True, has_checkpoint=True)
    assert len(source.parts) == 3 and source.checkpoint == folder / "model.ckpt-28252"
    assert (folder / "License.txt").read_bytes() == b"CC"
    names = {path.name for path in folder.rglob("*")}
    assert not [name for name in names if name.endswith(fetch.PART)] and "outside" not in names


def test_a_dry_run_lists_address_size_and_md5_and_downloads_nothing(storage, tmp_path):
    folder = tmp_path / "source"
    done = fetch_to(storage, folder, "--dry-run")
    assert done.returncode == 0 and not folder.exists(), done.stderr
    for name in (DATA, "vocab.txt"):
        content = storage.inputs[name if name == "vocab.txt" else f"tf1/{name}"]
        (line,) = [line for line in done.stdout.splitlines() if line.endswith(name)]
        assert line.startswith(f"{md5(content)} ") and f" {len(content):,} " in line
    assert "enwiki" not in done.stdout and "8 files for" in done.stdout


def test_the_text_as_an_archive_is_unpacked_and_not_downloaded_again(archived, tmp_path):
    folder = tmp_path / "source"
    done = fetch_to(archived, folder)
    assert done.returncode == 0, done.stderr
    check_source(folder)
    (folder / ARCHIVE).unlink()
    done = fetch_to(archived, folder)
    assert done.returncode == 0, done.stderr
    assert archived.ranges(f"/processed/{ARCHIVE}") == [None]


def test_an_archive_whose_part_is_another_keeps_nothing_of_it(archived, tmp_path):
    name = "part-00001-of-00003"
    archived.publish(CLEANED_TEXT, {ARCHIVE: pack(TEXTS | {name: b"B sentence.\n"})}, folder="processed")
    line = one_line(fetch_to(archived, tmp_path / "source"))
    assert f"{name}: 12 bytes with MD5" in line and "it is removed" in line
    assert name not in {path.name.removesuffix(fetch.PART) for path in (tmp_path / "source").rglob("*")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "cannot be unpacked"),
        (pack({"eval.txt": TEXTS["eval.txt"]}), "lacks part-00000-of-00003"),
    ],
)
def test_an_archive_that_is_damaged_or_lacks_a_part_is_named(archived, tmp_path, content, message):
    archived.publish(CLEANED_TEXT, {ARCHIVE: content}, folder="processed")
    line = one_line(fetch_to(archived, tmp_path / "source"))
    assert f"{ARCHIVE}: {message}" in line


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        (INPUTS, {"vocab.txt": b"[UNK]\nother\n"}, "vocab.txt: expected one with MD5"),
        (INPUTS, {"vocab.txt": b"", "again/vocab.txt": b""}, "vocab.txt: expected one with MD5"),
        (CLEANED_TEXT, {"eval.txt": TEXTS["eval.txt"]}, f"nor {ARCHIVE}"),
    ],
)
def test_a_list_with_another_file_than_the_published_one_is_refused(storage, tmp_path, name, files, message):
    storage.publish(name, files, folder="other")
    line = one_line(fetch_to(storage, tmp_path / "source"))
    assert f"{name}.md5: " in line and message in line and not (tmp_path / "source").exists()


def test_imagenet_says_in_a_line_what_a_person_does():
    line = one_line(ttt_here("data", "fetch", "image_classification"))
    for words in ("image-net.org/download-images", "ILSVRC2012_img_val.tar", "--source DIR"):
        assert words in line


def test_the_text_comes_as_files_and_status_says_what_is_left_to_do(storage, tmp_path):
    folder = tmp_path / "source"

    def report():
        done = ttt_here("data", "status", "language_bert", "--source", folder, "--json")
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        commands = {entry["next"] for entry in figures["data"] if entry["size"] == "full"}
        return figures["sources"][0], commands

    source, commands = report()
    assert source["missing"] == ["vocab.txt", INDEX, DATA, *TEXTS]
    assert commands == {f"ttt data fetch language_bert --to {folder}"}
    storage.cuts[f"/inputs/tf1/{DATA}"] = [7, 0, 0, 0]
    one_line(fetch_to(storage, folder))
    source, _ = report()
    assert source["unfinished"] == [DATA] and source["missing"] == [DATA, *TEXTS]
    done = fetch_to(storage, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"next: {PREPARE} --source {folder}\n")
    assert "MB/s" in done.stdout and "min left" in done.stdout
    check_source(folder)
    source, commands = report()
    assert source["missing"] == [] and f"{PREPARE} --source {folder}" in commands


def test_the_next_command_names_the_folder_of_data(storage, tmp_path):
    done = ttt_here("data", "fetch", "language_bert", "--mirror", storage.lists, "--data", tmp_path)
    source = tmp_path / "language_bert" / "source"
    assert done.stdout.endswith(f"next: {PREPARE} --data {tmp_path} --source {source}\n"), done.stderr
