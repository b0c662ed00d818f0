"""Prepare the data: the embedded digits of size `mini`, or ImageNet as shards for size `full`.

Files are written to a folder beside the wanted one, which appears whole or not at all. A preparation of
ImageNet that was stopped continues: a shard is finished when there is a file with its rows of the index. The
name of that file holds a digest of the images of the shard, so that a change of the source is noticed.
"""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.data import hub, preparation, shards
from common.errors import UserError
from image_classification.data.ahead import begin_ahead
from image_classification.data.images import PARTS, Record, read_image
from image_classification.data.shards import EncodedImage, split_by_bytes, write_shard
from image_classification.data.sources import check_md5, describe_source, list_source

SHARD_BYTES = 256 * 2**20
NUM_NAMED = 5  # of the images that cannot be decoded


def prepare(
    directory: Path, config: Any, source: Path | None = None, *, shard_bytes: int = SHARD_BYTES
) -> str:
    """Prepare the data in `directory`, unless they are there and whole; returns the fingerprint.

    Size `full` needs a `source`, see sources.py: a folder, or the name of a data set on Hugging Face's hub.
    What is prepared appears whole or not at all; a damaged folder is replaced. Raises UserError for a folder
    that holds something else, a source that is incomplete or has images that cannot be decoded, and a disk
    without room.
    """
    if source is not None and config.size == "full":
        source = hub.find_source(source)
    return preparation.prepare(
        directory,
        config,
        source,
        embedded=prepare_digits,
        full=partial(prepare_imagenet, shard_bytes=shard_bytes),
        name="ImageNet",
        needs="its two tars, class folders, tars of WebDataset, or a data set of Hugging Face",
    )


def prepare_digits(directory: Path, work: Path, config: Any) -> str:
    """Write the embedded data set in the wanted folder; returns its fingerprint."""
    from image_classification.data.digits import write_digits  # scikit-learn takes a second to import

    shutil.rmtree(work, ignore_errors=True)
    settings = write_digits(work / "data")
    for key, value in settings_of(config).items():
        if settings.get(key) != value:
            what = f"{value}, and the embedded data of size mini have {settings.get(key, 'no such setting')}"
            raise UserError(what, where=key, hint="leave it out")
    return preparation.finish(directory, work, {"settings": settings})


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedShard(shards.PlannedShard):
    """A shard of images, in their order."""

    records: list[Record]
    labels: dict[str, int]
    encoded_px: int | None = None

    def describe_source(self) -> list[tuple[object, ...]]:
        """Return the records with their labels, and the size at which they are encoded again."""
        size = [self.encoded_px] if self.encoded_px else []
        return [(*record, self.labels[record.synset], *size) for record in self.records]

    @property
    def num_bytes(self) -> int:
        """The bytes of its images as they came."""
        return sum(record.num_bytes for record in self.records)

    def is_finished(self) -> bool:
        """Return whether an earlier preparation wrote it, whole, from these images."""
        if not super().is_finished():
            return False
        last = np.load(self.rows, allow_pickle=False)[-1]
        return self.path.stat().st_size == int(last["offset"]) + int(last["length"])


def prepare_imagenet(directory: Path, work: Path, config: Any, source: Path, shard_bytes: int) -> str:
    """Write the images of `source` as shards; returns the fingerprint."""
    expected = {
        "train": config.data.num_train_samples,
        "validation": config.data.num_evaluation_samples,
    }
    print(f"listing {source}", flush=True)
    listed = list_source(source, work, expected=expected, num_classes=config.model.num_classes)
    labels = {synset: number for number, synset in enumerate(listed.classes)}
    sizes = {"train": config.data.encoded_px}  # evaluation images stay as they came
    planned = [
        PlannedShard(
            work=work,
            part=part,
            number=number,
            records=records[members],
            labels=labels,
            encoded_px=sizes.get(part),
        )
        for part, records in listed.parts.items()
        for number, members in enumerate(split_by_bytes([one.num_bytes for one in records], shard_bytes))
    ]
    missing = shards.clear_unfinished(work, planned, config.prepared_with())
    preparation.check_free_space(work, sum(shard.num_bytes for shard in missing))
    begun = {shard.part for shard in planned if shard not in missing}  # their tar was checked then
    check_md5(source, {part: number for part, number in expected.items() if part not in begun})
    write_missing(missing, source)
    print(f"writing the index and the manifest of {len(planned)} shards", flush=True)
    for part in PARTS:
        shards.write_index(work, planned, part)
    facts = {"settings": settings_of(config), "classes": listed.classes}
    return preparation.finish(directory, work, facts, describe_source(source, listed, expected))


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings for the manifest; one without a value, `encoded_px`, is left out."""
    return {key: value for key, value in config.prepared_with().items() if value is not None}


def write_missing(missing: list[PlannedShard], source: Path) -> None:
    """Write shards and their rows of the index; every image is decoded on the way.

    Raises UserError after the last when images cannot be decoded. Shards without such images are kept.
    """
    faults: list[str] = []
    progress = preparation.Progress(
        num_items=sum(len(shard.records) for shard in missing),
        num_bytes=sum(shard.num_bytes for shard in missing),
        items="images",
    )
    with ThreadPoolExecutor(thread_name_prefix="images") as pool:
        for shard in missing:
            num_faults = len(faults)
            images = encoded_images(shard, pool, faults, progress)
            rows = write_shard(shard.path, shard.number, images)
            if len(faults) == num_faults:
                shard.save_rows(rows)
    if faults:
        more = "; ..." if len(faults) > NUM_NAMED else ""
        raise UserError(
            f"{len(faults)} of its images are damaged: {'; '.join(faults[:NUM_NAMED])}{more}",
            where=str(source),
            hint="replace them and run the same command again; finished shards are kept",
        )


def encoded_images(
    shard: PlannedShard, pool: ThreadPoolExecutor, faults: list[str], progress: preparation.Progress
) -> Iterator[EncodedImage]:
    """Yield the images of a shard in order; those that cannot be decoded are added to `faults` instead."""
    begun = (pool.submit(read_image, record, shard.encoded_px) for record in shard.records)
    pending = begin_ahead(begun, 4 * (os.cpu_count() or 1))
    for record, reading in zip(shard.records, pending, strict=True):
        try:
            content, height, width = reading.result()
        except UserError as error:
            faults.append(str(error))
        else:
            yield EncodedImage(content, shard.labels[record.synset], height, width)
        progress.add(1, record.num_bytes)
