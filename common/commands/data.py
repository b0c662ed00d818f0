"""Fetch, prepare or verify the data of a benchmark, or show their state.

fetch: downloads public files (BERT's text, vocabulary and checkpoint) by a list with the size and MD5 of each
file; a stopped download continues.

prepare: writes the embedded data of size mini: real handwritten digits as JPEG files, and real text as BERT
instances, both from installed packages. For size full, --source is a folder: ImageNet as its two tars, as
train/CLASS/* and validation/CLASS/*, as tars of WebDataset, or as a data set of Hugging Face (parquet or
Arrow files), which may also be named as on its hub; Wikipedia as cleaned text or TFRecords, or a column of
text of any data set of Hugging Face, with vocabulary and checkpoint. All of it is checked and written as
large sequential files; a preparation that was stopped continues.

verify: lists changed, missing and extra files, and the changed records of shards; exit code 1 if there are
any.

status: reads names, sizes and the record that `verify` left, and says what to type next; exit code 1 for
damage.

examples:
  ttt data fetch language_bert --dry-run
  ttt data prepare image_classification --size mini
  ttt data prepare image_classification --size full --source ILSVRC/imagenet-1k
  ttt data prepare language_bert --size full --source DIR --set data.corpus=NAME
  ttt data prepare language_bert --size mini --data /raid/mlperf
  ttt data verify language_bert --size mini
  ttt data status --json
"""

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path

from common import repository
from common.arguments import add_shared
from common.config import schema as configs
from common.data import fetch as downloads
from common.data import preparation
from common.data import status as states
from common.errors import EXIT_FINDINGS, EXIT_OK
from common.training.load import read_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    part = parser.get_default("part")
    if part == "fetch":
        add_shared(parser, "benchmark")
        text = "where to put the files; default: BENCHMARK/source in the folder of --data"
        parser.add_argument("--to", type=Path, metavar="DIR", help=text)
        text = "a server with a copy of MLCommons' lists, NAME.uri and NAME.md5"
        parser.add_argument("--mirror", metavar="URL", help=text)
        parser.add_argument("--dry-run", action="store_true", help="list the files, download none")
        add_shared(parser, "--data")
        return
    if part == "status":
        add_shared(parser, "benchmark", nargs="?")
        text = "the source of size full; default: BENCHMARK/source in the folder of --data"
        parser.add_argument("--source", type=Path, metavar="DIR", help=text)
        add_shared(parser, "--json", "--data")
        return
    add_shared(parser, "benchmark", "--size")
    if part == "prepare":
        parser.add_argument("--source", metavar="DIR", help="a folder, or for images OWNER/NAME on the hub")
    text = "the configuration that reads the data; closed and efficient of BERT have data of their own"
    parser.add_argument("--configuration", default="baseline", metavar="NAME", help=text)
    add_shared(parser, "--set", "--data")


def main(args: argparse.Namespace) -> int:
    if args.part == "fetch":
        return fetch(args)
    if args.part == "status":
        return show_status(args)
    config, _, _ = read_config(args.benchmark, args.configuration, size=args.size, settings=args.set)
    return prepare(config, args.source) if args.part == "prepare" else verify(config)


def verify(config: configs.RunConfig) -> int:
    """Print what was changed, and record what was found for `ttt data status`."""
    digest, misfits, damage, lacking = preparation.read_all(config)
    for problem in misfits + damage:
        print(repository.relative_paths_in(problem))
    states.write_record(config.data_directory, digest, len(damage))
    state = "damaged" if damage else "intact, of other settings" if misfits else "intact"
    if lacking:
        state += f"{',' if damage else ', but'} lacks {', '.join(lacking)}"
    print(f"{config.benchmark} {config.size}: {state}, fingerprint {digest}")
    return EXIT_FINDINGS if misfits + damage + lacking else EXIT_OK


def fetch(args: argparse.Namespace) -> int:
    directory = args.to or states.source_directory(args.benchmark)
    public = states.public_data(args.benchmark)
    files = public.list_files(args.mirror, directory)
    print(downloads.describe(files, directory))
    if not args.dry_run:
        downloads.fetch(files, directory, finish=public.unpack)
        command = f"ttt data prepare {args.benchmark} --size full{repository.data_option()}"
        print(f"next: {command} --source {shlex.quote(repository.relative_path(directory))}")
    return EXIT_OK


def show_status(args: argparse.Namespace) -> int:
    names = [args.benchmark] if args.benchmark else repository.benchmarks()
    report = states.read_report(names, source=args.source)
    print(json.dumps(asdict(report), indent=1) if args.json else report.describe())
    return EXIT_FINDINGS if report.is_damaged else EXIT_OK


def prepare(config: configs.RunConfig, source: str | None = None) -> int:
    """Prepare the data unless they are intact. Raises UserError for a source that size mini does not take."""
    directory = config.data_directory
    if (source is None or config.size == "full") and preparation.is_intact(directory, config):
        print(f"{config.benchmark}: {repository.relative_path(directory)} is prepared and intact")
        return EXIT_OK
    module = repository.benchmark_module(config.benchmark, "data.prepare")
    digest = module.prepare(directory, config, None if source is None else Path(source))
    print(f"{config.benchmark}: {repository.relative_path(directory)} prepared, fingerprint {digest}")
    return EXIT_OK
