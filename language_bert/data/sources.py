"""Sources of Wikipedia: MLCommons' cleaned text, or the reference's TFRecords. Nothing is unpacked.

A source is a folder with these files at any depth: `part-00000-of-00500` and so on, `eval.txt` (text) or
`eval_10k` (TFRecords), for text `vocab.txt`, and the checkpoint `model.ckpt-28252`. MLCommons has two
checkpoints of this name: one written by TensorFlow 1, which is read here, and one by TensorFlow 2.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from common.data import preparation
from common.errors import UserError

PART = re.compile(r"part-(\d{5})-of-(\d{5})")
TEXT, RECORDS = "eval.txt", "eval_10k"
CHECKPOINT = "model.ckpt-28252"
DATA_SUFFIX, INDEX_SUFFIX = ".data-00000-of-00001", ".index"
WIKIPEDIA = "wikipedia-20200101"  # `data.corpus`; no other value is checked
CHECKPOINT_HINT = "of MLCommons' two checkpoints the one of TensorFlow 1 is read"
NUM_PARTS = 500
OFFICIAL_MD5 = {  # MLPerf Training, retired_benchmarks/bert/README.md
    "vocab.txt": "64800d5d8528ce344256daf115d4965e",
    TEXT: "2a220f790517261547b1b45ed3ada07a",
    "part-00000-of-00500": "a64a7c31eff5cd38ae6d94f7a6229dab",
    "part-00001-of-00500": "549a9ed4f805257245bec936563abfd0",
    "part-00002-of-00500": "1a1366ddfc03aef9d41ce552ee247abf",
    "part-00497-of-00500": "66835aa75d4855f2e678e8f3d73812e9",
    "part-00498-of-00500": "e6d68a7632e9f4aa1a94128cce556dc9",
    "part-00499-of-00500": "b3b087ad24e3770d879a351664cebc5a",
    CHECKPOINT + INDEX_SUFFIX: "f97de3ae180eb8d479555c939d50d048",
    CHECKPOINT + DATA_SUFFIX: "50797acd537880bfb5a7ade80d976129",
}
OTHER_HINT = "this benchmark is defined on one dump; for another text: --set data.corpus=other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of a source; `vocabulary` is None for TFRecords, `checkpoint` where it is not needed."""

    is_text: bool
    parts: list[Path]
    evaluation: Path
    vocabulary: Path | None
    checkpoint: Path | None  # without its suffix


def list_source(directory: Path, *, is_official: bool, has_checkpoint: bool) -> Source:
    """Find the files in `directory`. Raises UserError for a file that is missing or there twice."""
    is_text = any(directory.rglob(TEXT))
    if is_text and any(directory.rglob(RECORDS)):
        raise UserError(f"has both {TEXT} and {RECORDS}", where=str(directory), hint="name the folder of one")
    evaluation = find(directory, TEXT if is_text else RECORDS)
    parts = list_parts(directory)
    if is_official and len(parts) != NUM_PARTS:
        raise UserError(f"{len(parts)} parts, expected {NUM_PARTS}", where=str(directory), hint=OTHER_HINT)
    checkpoint = find_checkpoint(directory) if has_checkpoint else None
    source = Source(
        is_text=is_text,
        parts=parts,
        evaluation=evaluation,
        vocabulary=find(directory, "vocab.txt") if is_text else None,
        checkpoint=None if checkpoint is None else checkpoint.with_suffix(""),
    )
    if is_official:
        check_official(source)
    return source


def find(directory: Path, name: str) -> Path:
    paths = sorted(directory.rglob(name))
    if not paths:
        raise UserError(f"there is no {name}", where=str(directory), hint="see language_bert/README.md")
    if len(paths) > 1:
        raise UserError(f"{name} is there twice: {paths[0]} and {paths[1]}", where=str(directory))
    return paths[0]


def find_checkpoint(directory: Path) -> Path:
    """Find the index of the checkpoint; of several, the one whose MD5 is published for TensorFlow 1."""
    name = CHECKPOINT + INDEX_SUFFIX
    for path in sorted(directory.rglob(name)):
        if preparation.md5_of(path) == OFFICIAL_MD5.get(name):
            return path
    return find(directory, name)


def list_parts(directory: Path) -> list[Path]:
    """Find all parts, in their order."""
    paths = sorted(path for path in directory.rglob("part-*") if PART.fullmatch(path.name))
    numbers = [tuple(map(int, re.findall(r"\d{5}", path.name))) for path in paths]
    totals = {total for _, total in numbers}
    if len(totals) != 1:
        raise UserError(
            f"parts of {len(totals)} sets, expected part-00000-of-{NUM_PARTS:05} and so on",
            where=str(directory),
        )
    parts: dict[int, Path] = {}
    for (number, _), path in zip(numbers, paths, strict=True):
        if number in parts:
            raise UserError(f"{path.name} is there twice: {parts[number]} and {path}", where=str(directory))
        parts[number] = path
    total = totals.pop()
    if missing := sorted(set(range(total)) - parts.keys()):
        what = f"{len(parts)} of {total} parts, part-{missing[0]:05}-of-{total:05} is missing"
        raise UserError(what, where=str(directory))
    return [parts[number] for number in sorted(parts)]


def check_official(source: Source) -> None:
    """Check files against their published MD5. Raises UserError for another dump or a damaged file."""
    files = [source.evaluation, source.vocabulary, *source.parts] if source.is_text else []
    if source.checkpoint is not None:
        files += [source.checkpoint.with_name(CHECKPOINT + end) for end in (INDEX_SUFFIX, DATA_SUFFIX)]
    for path in files:
        if path is not None and (md5 := OFFICIAL_MD5.get(path.name)):
            hint = CHECKPOINT_HINT if path.name.startswith(CHECKPOINT) else OTHER_HINT
            preparation.check_md5(path, md5, hint=hint)
