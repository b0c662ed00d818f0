"""Other forms of ImageNet: data sets of Hugging Face and WebDataset's tars; what is refused."""

import os
import sys

import pytest

from common.data.manifest import read_manifest
from image_classification.data.images import open_images
from image_classification.data.numbered import original_name
from image_classification.data.sources import find_files
from tests.image_classification.imagenet import (
    SYNSETS,
    all_images,
    content_of,
    needs_room,
    prepared,
    refuses,
    tar_of,
    write_tars,
    write_webdataset,
)

pa = pytest.importorskip("pyarrow", reason="the extra hf reads parquet and Arrow files")
pq = pytest.importorskip("pyarrow.parquet")
PAGE = b"<html>not found</html>"
WORDS = ["tench", "goldfish", "fox"]  # not sorted, as in the hub's ImageNet


def rows_of(images):
    """Return the rows of the hub's ImageNet, whose names have the synset at the end, too."""
    return [
        {
            "image": {"bytes": content, "path": f"{name.partition('.')[0]}_{synset}.JPEG"},
            "label": SYNSETS.index(synset),
        }
        for name, synset, content in images
    ]


def nameless_rows(images):
    return [row | {"image": row["image"] | {"path": None}} for row in rows_of(images)]


def renumbered_rows(images):
    """Number the classes otherwise; the names of the images say which they are."""
    return [row | {"label": (row["label"] + 1) % 3} for row in rows_of(images)]


def table_of(rows):
    kinds = {"bytes": pa.binary(), "path": pa.string()}
    schema = pa.schema({"image": pa.struct(kinds), "label": pa.int64()})
    return pa.Table.from_pylist(rows, schema=schema)


def write_table(path, table, **options):
    """Write a table by its suffix: parquet, or an Arrow stream of small batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=5)
    else:
        with pa.ipc.new_stream(path, table.schema, **options) as writer:
            writer.write_table(table, max_chunksize=5)


def write_tables(source, suffix="parquet", make_rows=rows_of, **options):
    for part, images in all_images().items():
        for number, first in enumerate(range(0, len(images), 10)):
            path = source / "data" / f"{part}-{number:05}.{suffix}"
            write_table(path, table_of(make_rows(images[first : first + 10])), **options)
    return source


def hugging_face(part, words=WORDS, make_rows=rows_of):
    """Make a part with the library that made the hub's copy."""
    datasets = pytest.importorskip("datasets", reason="writes data sets as they are on the hub")
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=words)}
    rows = make_rows(all_images()[part])
    columns = {name: [row[name] for row in rows] for name in features}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def write_hub_parquet(source):
    for part in ("train", "validation"):
        for number in range(2):
            path = source / "data" / f"{part}-{number:05}-of-00002.parquet"
            hugging_face(part).shard(2, number, contiguous=True).to_parquet(path)
    return source


def save_to_disk(source, **options):
    datasets = pytest.importorskip("datasets", reason="writes data sets as they are on the hub")
    parts = {part: hugging_face(part, **options) for part in ("train", "validation")}
    datasets.DatasetDict(parts).save_to_disk(source, num_shards={"train": 3, "validation": 1})
    return source


def write_arrow_files(source):
    """Write Arrow's file format with large offsets, as other tools do."""
    for part, images in all_images().items():
        table = table_of(rows_of(images))
        content = pa.array([row["image"]["bytes"] for row in rows_of(images)], pa.large_binary())
        names = pa.array([row["image"]["path"] for row in rows_of(images)])
        image = pa.StructArray.from_arrays([names, content], ["path", "bytes"])
        table = table.set_column(0, "image", image)
        path = source / part / "0000.arrow"
        path.parent.mkdir()
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return source


FORMS = {
    "tar": write_tars,
    "WebDataset": write_webdataset,
    "parquet": write_hub_parquet,
    "Arrow": save_to_disk,
    "Arrow, files": write_arrow_files,
    "parquet, by pyarrow": write_tables,
    "Arrow, renumbered": lambda source: write_tables(source, "arrow", renumbered_rows),
}


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.mark.filterwarnings("ignore")  # of the library that writes
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_bytes_and_the_fingerprint_of_class_folders(form, source, expected, tmp_path):
    prepared(tmp_path / "full", FORMS[form](source))
    assert content_of(tmp_path / "full") == expected  # with the manifest's fingerprint
    manifest = read_manifest(tmp_path / "full", hint="")
    assert manifest["source"] == {"form": form.partition(",")[0]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "source"]


@pytest.mark.parametrize(
    ("names", "form", "found"),
    [
        (["train/0/a.jpg", "train/.cache/b.parquet"], "class folders", ["train"]),
        (["train/n01440764/a.jpg", "train/n01440764.tar"], "class folders", ["train"]),
        (["train/a.parquet", "train/.cache/b"], "parquet", ["train/a.parquet"]),
        (["train/logs/b.txt", "train/a.arrow"], "Arrow", ["train/a.arrow"]),
        (["train/0000/a.tar", "train/ILSVRC2012_img_train_t3.tar"], "WebDataset", ["train/0000/a.tar"]),
    ],
)
def test_the_form_of_a_folder_that_holds_others_besides(names, form, found, source):
    for path in (source / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert find_files(source, "train") == (form, [source / name for name in found])


@pytest.mark.parametrize(
    "write",
    [
        lambda source: write_webdataset(source, lambda name, number: f"{number:06}"),
        lambda source: write_tables(source, "parquet", nameless_rows),
        lambda source: write_tables(source, "arrow", nameless_rows),
    ],
    ids=["WebDataset", "parquet", "Arrow"],
)
def test_without_names_the_order_of_the_files_and_the_numbers_stand_for_them(write, source, tmp_path):
    directory = tmp_path / "full"
    prepared(directory, write(source))
    assert read_manifest(directory, hint="")["facts"]["classes"] == ["0", "1", "2"]
    stored, given = {}, {}
    for part, rows in all_images().items():
        images = open_images(directory, part, num_samples=len(rows), num_classes=3, hint="")
        stored[part] = [(images.jpeg(sample), int(images.labels[sample])) for sample in range(len(rows))]
        given[part] = [(content, SYNSETS.index(synset)) for _, synset, content in rows]
    assert stored["validation"] == given["validation"]
    assert stored["train"] != given["train"] and sorted(stored["train"]) == sorted(given["train"])


@pytest.mark.parametrize("name", ["synsets.txt", "synset_words.txt"])
def test_a_list_of_synsets_names_the_classes(name, source, tmp_path):
    write_tables(source, "arrow", nameless_rows)
    (source / name).write_text("".join(f"{synset} a fish, fishes\n" for synset in SYNSETS))
    prepared(tmp_path / "full", source)
    assert read_manifest(tmp_path / "full", hint="")["facts"]["classes"] == list(SYNSETS)
    (source / name).write_text("tench\ngoldfish\nfox\n")
    refuses(f"{name}:1: tench is no synset", tmp_path / "other", source)
    (source / name).write_text("n01440764\n")
    refuses(f"{name}: 1 synsets, expected 3", tmp_path / "other", source)


@pytest.mark.filterwarnings("ignore")
def test_sorted_names_of_classes_are_taken_as_those_of_folders_are(source, tmp_path):
    prepared(tmp_path / "full", save_to_disk(source, words=["cat", "dog", "fox"], make_rows=nameless_rows))
    assert read_manifest(tmp_path / "full", hint="")["facts"]["classes"] == ["cat", "dog", "fox"]


@pytest.mark.parametrize(
    ("copy", "name", "synset"),
    [
        ("a/n01440764_10026.jpg", "n01440764_10026.JPEG", "n01440764"),
        ("n01440764_10026_n01440764.JPEG", "n01440764_10026.JPEG", "n01440764"),
        ("ILSVRC2012_val_00000293_n01440764.JPEG", "ILSVRC2012_val_00000293.JPEG", "n01440764"),
        ("ILSVRC2012_val_00000293.jpg", "ILSVRC2012_val_00000293.JPEG", ""),
        ("000293.jpg", "000293.jpg", ""),
    ],
)
def test_names_of_copies_are_those_of_the_original(copy, name, synset):
    assert original_name(copy) == (name, synset)


def test_parquet_files_are_unpacked_once(source, expected, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    def unpacked():
        paths = tmp_path.glob(".full.part/unpacked/*/*")
        return {path.name.partition("-")[0] + path.name[-40:]: path.stat().st_mtime_ns for path in paths}

    write_tables(source)
    states = []
    with monkeypatch.context() as patch:
        patch.setattr("image_classification.data.prepare.shards.write_index", stop)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                prepared(tmp_path / "full", source)
            states.append(unpacked())
        assert len(states[0]) == 4 and states[0] == states[1]
        os.utime(source / "data" / "train-00001.parquet", ns=(1, 1))
        with pytest.raises(KeyboardInterrupt):
            prepared(tmp_path / "full", source)
        assert len(unpacked().items() - states[0].items()) == 1 and len(unpacked()) == 4
    prepared(tmp_path / "full", source)
    assert content_of(tmp_path / "full") == expected and not (tmp_path / ".full.part").exists()


def with_third(**values):
    """Return a function that makes rows and changes the third of each file, label or image."""

    def make_rows(images):
        rows = rows_of(images)
        image = rows[2]["image"] | {name: value for name, value in values.items() if name != "label"}
        third = {"image": image, "label": values.get("label", rows[2]["label"])}
        return [*rows[:2], third, *rows[3:]]

    return make_rows


def of_one_class(images):
    return [row | {"label": 0} for row in nameless_rows(images)]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("make_rows", "key_words", "is_early"),  # whether it is told before parquet files are unpacked
    [
        (with_third(label=3), r"data/train-00000\.\w+ row 2: class 3, expected 0 to 2", True),
        (with_third(label=-1), "class -1, expected 0 to 2", True),
        (with_third(label=None), "class None, expected 0 to 2", True),
        (with_third(bytes=PAGE), r"4 of its images are damaged: .*train-0000.*not an image", False),
        (with_third(bytes=None), r"train-00000.*rows 0 to \d has no bytes", False),
        (with_third(path="n09999999_1.JPEG"), r"class \d is n\d+ elsewhere, and its name says n\d+", False),
        (lambda images: rows_of(images)[1:], "train: 21 images, expected 24", True),
        (of_one_class, "1 classes, expected 3", False),
    ],
)
def test_a_wrong_row_is_one_line(suffix, make_rows, key_words, is_early, source, tmp_path):
    refuses(key_words, tmp_path / "full", write_tables(source, suffix, make_rows))
    assert not (tmp_path / "full").exists()
    if is_early:
        assert not list(tmp_path.glob(".full.part/*"))


def test_the_disk_has_room_for_what_is_unpacked_and_for_what_is_prepared(source, tmp_path, monkeypatch):
    write_tables(source)
    needed = 2 * sum(path.stat().st_size for path in source.rglob("train*.parquet"))
    needs_room(needed, tmp_path / "full", source, monkeypatch)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_wrong_table_is_one_line(suffix, source, tmp_path):
    write_tables(source, suffix)
    path = source / "data" / f"train-00001.{suffix}"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", PAGE):
        path.write_bytes(damaged)
        refuses(rf"train-00001.{suffix}: not a whole {suffix} file", tmp_path / "full", source)
    rows = 10
    for columns, key_words in (
        ({"caption": ["a fish"] * rows, "label": [1] * rows}, "no column of images .* among caption, label"),
        ({"image": [b"a"] * rows, "caption": ["a fish"] * rows}, "no column of integers named label among"),
        ({"img": [b"a"] * rows, "label": [1] * rows}, "columns img and label, .* image and label"),
    ):
        write_table(path, pa.table(columns))
        refuses(rf"train-00001.{suffix}: {key_words}", tmp_path / "full", source)
    path.rename(path.with_name(f"extra.{suffix}"))
    refuses("train: 14 images, expected 24", tmp_path / "full", source)
    for path in source.rglob(f"train*.{suffix}"):
        path.unlink()
    refuses("no tars, parquet or Arrow files of train", tmp_path / "full", source)


def test_compressed_arrow_files_are_refused(source, tmp_path):
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    refuses("columns are compressed", tmp_path / "full", write_tables(source, "arrow", options=options))


@pytest.mark.parametrize(
    ("change", "key_words"),
    [
        (lambda files: files.pop("b.cls"), "sample b has no .cls"),
        (lambda files: files.pop("b.jpg"), "sample b has no image"),
        (lambda files: files.update({"b.cls": b"fox"}), "b.cls: class 'fox' is no number"),
        (lambda files: files.update({"b.cls": b"--5"}), "b.cls: class '--5' is no number"),
        (lambda files: files.update({"b.cls": b"3\n"}), "b.jpg: class 3, expected 0 to 2"),
    ],
)
def test_a_wrong_sample_of_a_webdataset_is_one_line(change, key_words, source, tmp_path):
    write_webdataset(source)
    image = all_images()["train"][0][2]
    files = {"a.jpg": image, "a.cls": b"0", "b.jpg": image, "b.cls": b"1"}
    change(files)
    (source / "train-9.tar").write_bytes(tar_of(files))
    refuses(key_words, tmp_path / "full", source)
    (source / "train-9.tar").write_bytes(tar_of(files)[:700])
    refuses("train-9.tar: not a whole tar", tmp_path / "full", source)


def test_without_pyarrow_a_line_says_what_to_install(source, tmp_path, monkeypatch):
    write_tables(source)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refuses("pyarrow.* is not installed; .*\\[hf\\]", tmp_path / "full", source)
