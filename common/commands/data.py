"""Prepare the data of a benchmark, or verify every byte of what was prepared.

`prepare` writes the embedded data of size mini: real handwritten digits as JPEG files, and real prose as BERT
instances, both from what is installed; no network. For size full, --source is a folder: ImageNet as its two
tars, as train/CLASS/* and validation/CLASS/*, as tars of WebDataset, or as a data set of Hugging Face
(parquet or Arrow files), which may also be named as on its hub; Wikipedia as cleaned text or TFRecords, or a
column of text of any data set of Hugging Face, with vocabulary and checkpoint. All of it is checked and
written as large sequential files; a preparation that was stopped goes on where it was. `verify` finds a
changed, missing or extra file, and in a shard the changed records: exit code 1.

examples:
  ttt data prepare image_classification --size mini
  ttt data prepare image_classification --size full --source DIR
  ttt data prepare image_classification --size full --source ILSVRC/imagenet-1k
  ttt data prepare language_bert --size full --source DIR
  ttt data prepare language_bert --size full --source DIR --set data.corpus=NAME
  ttt data prepare language_bert --size full --source DIR --configuration efficient
  ttt data verify language_bert --size mini
"""

import argparse
import importlib
from functools import partial
from pathlib import Path

from common import repository
from common.arguments import add_benchmark, add_settings, add_size
from common.config import schema as configs
from common.data import manifest as manifests
from common.data import preparation, shards
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.repository import ROOT
from common.training.load import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("prepare", "verify"))
    add_benchmark(parser)
    add_size(parser)
    parser.add_argument("--source", metavar="DIR", help="a folder, or for images OWNER/NAME on the hub")
    parser.add_argument(
        "--configuration",
        default="baseline",
        metavar="NAME",
        help="whose data, where they are not all the same",
    )
    add_settings(parser, "change a key, such as data.directory")


def main(args: argparse.Namespace) -> int:
    config = load_config(args.benchmark, args.configuration, size=args.size, settings=args.set).config
    directory = ROOT / config.data.directory  # type: ignore[attr-defined]
    if args.action == "prepare":
        return prepare(config, args.source)
    if args.source is not None:
        raise UserError("only `prepare` takes a source", where=f"--source {args.source}")
    problems = preparation.verify(
        directory,
        config,
        hint=config.prepared_hint,
        explain=partial(changed_records, args.benchmark),
    )
    for problem in problems:
        print(repository.relative_paths_in(problem))
    manifest = manifests.read_manifest(directory, hint="")
    state = "damaged" if problems else "intact"
    print(f"{args.benchmark} {args.size}: {state}, fingerprint {manifest['fingerprint']}")
    return EXIT_FINDINGS if problems else EXIT_OK


def changed_records(benchmark: str, path: Path) -> str:
    """Name the records of a shard that differ from its index; '' for other files, or a damaged index."""
    part, _, number = path.stem.rpartition("-")
    if path.suffix != ".shard" or not number.isdigit():
        return ""
    opened = importlib.import_module(f"{benchmark}.data.shards").Shards
    try:
        return shards.changed_records(opened(path.parent, part), int(number))
    except UserError:
        return ""  # the index or another shard is damaged, too, and named by itself


def prepare(config: configs.RunConfig, source: str | None = None) -> int:
    """Prepare the data unless they are there and whole. Raises UserError where no source is taken."""
    name: str = config.data.directory  # type: ignore[attr-defined]
    directory = ROOT / name
    if preparation.is_intact(directory, config):
        print(f"{config.benchmark}: {repository.relative_path(directory)} is prepared and intact")
        return EXIT_OK
    module = importlib.import_module(f"{config.benchmark}.data.prepare")
    digest = module.prepare(directory, config, None if source is None else Path(source))
    print(f"{config.benchmark}: {repository.relative_path(directory)} prepared, fingerprint {digest}")
    return EXIT_OK
