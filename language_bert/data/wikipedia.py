"""The full-size data: every part of a source becomes one shard of training instances, in parallel.

A shard from text holds the first instances that the reference's script makes of that part, as many as its
share of the bytes; the script shuffles them, so they are a uniform draw. A shard from TFRecords holds the
first records, which the script shuffled. A preparation that was interrupted continues with the missing
shards.
"""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.data import preparation, shards
from common.errors import UserError
from common.machine.load import usable_cores
from common.processes import end_with_parent
from language_bert.data.instances import Instance, InstanceSettings, create_instances, evenly_spaced
from language_bert.data.shards import describe, write_shard
from language_bert.data.sources import WEIGHTS, WIKIPEDIA, Rows, Source, document_lines, list_source
from language_bert.data.tfrecord import read_instances
from language_bert.data.wordpiece import Tokenizer, read_documents

MEAN_INSTANCE_BYTES = 700  # 254 tokens and 38 masked ones with positions, of 2 bytes, and 24 of the index
WEIGHTS_BYTES = 4 * 340_000_000  # float32 parameters of BERT-large
OFFICIAL_EVALUATION = {"samples": 10_000, "masked tokens": 428_235, "samples with fewer masked": 6_946}
MAX_REPEATED = 0.01  # of the instances may equal another: very short ones do


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedShard(shards.PlannedShard):
    """A shard of `train` or `evaluation`, with its file in the source and its settings."""

    file: Path
    vocabulary: Path | None  # None: the file holds TFRecords
    vocab_size: int
    num_instances: int
    settings: InstanceSettings
    documents: Rows | None = None  # None: all, and the file is no table

    def describe_source(self) -> list[Any]:
        files = [path for path in (self.file, self.vocabulary) if path is not None]
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return [stats, self.num_instances, asdict(self.settings), *filter(None, [self.documents])]

    def instances(self) -> list[Instance]:
        """Create or read the instances in the reference's order; from TFRecords only as many as needed."""
        if self.vocabulary is None:
            limits = {"vocab_size": self.vocab_size, "max_seq_length": self.settings.max_seq_length}
            needed = self.num_instances if self.part == "train" else None
            return list(itertools.islice(read_instances(self.file, **limits), needed))
        tokenizer = Tokenizer(self.vocabulary)
        documents = read_documents(self.lines(), tokenizer)
        if len(documents) < 2:
            raise UserError(f"{len(documents)} documents, expected 2 or more", where=str(self.file))
        return create_instances(documents, tokenizer.vocabulary, self.settings)

    def lines(self) -> Iterator[str]:
        """Yield a sentence a line, and a blank line between documents."""
        if self.documents is not None:
            yield from document_lines(self.file, self.documents)
        else:
            with self.file.open(encoding="utf-8", errors="ignore", newline="\n") as lines:
                yield from lines

    def write(self) -> int:
        """Write the shard, then its rows; returns the number of instances. Raises UserError for too few."""
        instances = self.instances()
        if len(instances) < self.num_instances:
            what = f"gives {len(instances)} instances, {self.num_instances} are asked"
            raise UserError(what, where=str(self.file), hint=f"lower data.num_{self.part}_samples")
        is_train = self.part == "train"
        chosen = instances[: self.num_instances] if is_train else evenly_spaced(instances, self.num_instances)
        self.save_rows(write_shard(self.path, self.number, chosen))
        return len(chosen)


def prepare_wikipedia(directory: Path, work: Path, config: Any, source: Path) -> str:
    """Write shards, index, starting weights and manifest, and check them; returns the fingerprint."""
    has_checkpoint, is_official = config.model.start == "checkpoint", config.data.corpus == WIKIPEDIA
    print(f"listing {source}", flush=True)
    files = list_source(source, is_official=is_official, has_checkpoint=has_checkpoint)
    check_settings(files, config)
    if files.checkpoint is not None:
        from language_bert.data import tf_checkpoint  # torch, which no process of a shard loads

        tf_checkpoint.read_index(tf_checkpoint.index_of(files.checkpoint))  # before hours of work
    planned = plan(work, files, config)
    missing = shards.clear_unfinished(work, planned, config.prepared_with())
    num_missing = sum(shard.num_instances for shard in missing)
    preparation.check_free_space(work, num_missing * MEAN_INSTANCE_BYTES + has_checkpoint * WEIGHTS_BYTES)
    if missing:
        write_missing(missing, num_missing)
    facts: dict[str, Any] = {"settings": config.prepared_with()}
    for part in ("train", "evaluation"):
        members = [shard for shard in planned if shard.part == part]
        index = shards.write_index(work, members, part)
        facts |= describe(part, index, members[0].settings)
        if part == "train":
            check_repetition(index, [shard.file for shard in members])
    if is_official:
        check_evaluation(config.data.num_evaluation_samples, facts, files.evaluation)
    if files.checkpoint is not None:
        path = work / "data" / WEIGHTS
        tf_checkpoint.convert_checkpoint(files.checkpoint, config, path, weights=files.weights)
    return preparation.finish(directory, work, facts, files.describe())


def check_settings(source: Source, config: Any) -> None:
    """Raise UserError for settings that do not fit the source."""
    if source.vocabulary is not None:
        num_tokens = Tokenizer(source.vocabulary).vocabulary.num_tokens
        if num_tokens != config.model.vocab_size:
            what = f"{num_tokens} tokens, model.vocab_size is {config.model.vocab_size}"
            raise UserError(what, where=str(source.vocabulary))
    elif config.data.masked_fraction != config.data.evaluation_masked_fraction:
        masked = f"{config.data.evaluation_masked_fraction:g}, not at {config.data.masked_fraction:g}"
        what = f"the reference's TFRecords are masked at {masked}"
        hint = "prepare from the text, or --set data.masked_fraction=0.15"
        raise UserError(what, where="data.masked_fraction", hint=hint)


def plan(work: Path, source: Source, config: Any) -> list[PlannedShard]:
    """Plan the shard of the evaluation set, which may refuse early, then one for each part, in order.

    A part gets training samples in proportion to its bytes.
    """
    data = config.data
    ends = np.cumsum([path.stat().st_size for path in source.parts]).tolist()
    if not ends[-1]:
        raise UserError("is empty", where=str(source.parts[0].parent))
    quotas = np.diff([0, *(end * data.num_train_samples // ends[-1] for end in ends)]).tolist()
    settings_of = partial(InstanceSettings, max_seq_length=data.max_seq_length)
    settings = {
        "train": settings_of(masked_fraction=data.masked_fraction, num_duplicates=data.num_duplicates),
        "evaluation": settings_of(masked_fraction=data.evaluation_masked_fraction),
    }

    def shard(part: str, number: int, file: Path, num_instances: int) -> PlannedShard:
        return PlannedShard(
            work=work,
            part=part,
            number=number,
            file=file,
            vocabulary=source.vocabulary,
            vocab_size=config.model.vocab_size,
            num_instances=num_instances,
            settings=settings[part],
            documents=source.rows(file, is_evaluation=part == "evaluation"),
        )

    used = [(path, quota) for path, quota in zip(source.parts, quotas, strict=True) if quota]
    return [
        shard("evaluation", 0, source.evaluation, data.num_evaluation_samples),
        *(shard("train", number, path, quota) for number, (path, quota) in enumerate(used)),
    ]


def write_missing(missing: list[PlannedShard], num_instances: int) -> None:
    """Write shards, one process per usable core. Raises the UserError of the first that fails."""
    num_bytes = sum(shard.file.stat().st_size for shard in missing)
    progress = preparation.Progress(num_items=num_instances, num_bytes=num_bytes, items="instances")
    processes = ProcessPoolExecutor(
        max_workers=min(len(missing), max(1, int(usable_cores()))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=follow_parent,
        initargs=(os.getpid(),),
    )
    with processes as pool:
        pending = {pool.submit(PlannedShard.write, shard): shard for shard in missing}
        try:
            for future in as_completed(pending):
                progress.add(future.result(), pending[future].file.stat().st_size)
        except BrokenProcessPool as error:
            what = "a process that wrote a shard has died, perhaps because memory ran out"
            hint = "run the same command again; finished shards are kept"
            raise UserError(what, where=str(missing[0].work), hint=hint) from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # finished shards are kept
            raise


def follow_parent(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_parent(parent)


def check_repetition(index: np.ndarray, parts: list[Path]) -> None:
    """Raise UserError if shards share instances: with such data training stalled at an accuracy of 0.62."""
    keys = index["crc32"].astype(np.uint64) << 16 | index["num_tokens"]
    _, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[inverse] > 1)
    if len(repeated) <= MAX_REPEATED * len(index):
        return
    again = repeated[repeated != first[inverse[repeated]]][0]
    one, other = (parts[int(index["shard"][number])] for number in (first[inverse[again]], again))
    what = f"{len(repeated) / len(index):.0%} of the instances are there more than once"
    raise UserError(what, where=str(one.parent), hint=f"{one.name} and {other.name} share some")


def check_evaluation(num_samples: int, facts: dict[str, Any], file: Path) -> None:
    """Raise UserError unless the evaluation set has the official figures."""
    counts = {
        "samples": num_samples,
        "masked tokens": facts["num_evaluation_masked_tokens"],
        "samples with fewer masked": facts["num_evaluation_short"],
    }
    for name, expected in OFFICIAL_EVALUATION.items():
        if counts[name] != expected:
            raise UserError(f"{counts[name]:,} {name}, expected {expected:,}", where=str(file))
