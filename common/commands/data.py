"""Prepare the data of a benchmark, or verify every byte of what was prepared.

`prepare` writes the embedded data of size mini: real handwritten digits as JPEG files, and real prose as BERT
instances, both from what is installed; no network. `verify` finds a changed, missing or extra file: exit code
1.

examples:
  ttt data prepare image_classification --size mini
  ttt data verify language_bert --size mini
"""

import argparse
import importlib

from common import config as configs
from common import fingerprint
from common.config import ROOT, SIZES
from common.errors import EXIT_FINDINGS, EXIT_OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("action", choices=("prepare", "verify"))
    parser.add_argument("benchmark", help=f"one of: {', '.join(configs.benchmarks())}")
    parser.add_argument("--size", choices=SIZES, default="full", help="mini: embedded data, no network")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key, such as data.directory"
    )


def main(args: argparse.Namespace) -> int:
    """Prepare or verify."""
    config = configs.load(args.benchmark, "baseline", size=args.size, settings=args.set).config
    directory = ROOT / config.data.directory  # type: ignore[attr-defined]
    if args.action == "prepare":
        return prepare(config)
    problems = fingerprint.verify(
        directory,
        config.prepared_with(),
        hint=f"run: ttt data prepare {args.benchmark} --size {args.size}",
    )
    for problem in problems:
        print(problem.replace(f"{ROOT}/", ""))
    manifest = fingerprint.read_manifest(directory, hint="")
    state = "damaged" if problems else "intact"
    print(f"{args.benchmark} {args.size}: {state}, fingerprint {manifest['fingerprint']}")
    return EXIT_FINDINGS if problems else EXIT_OK


def prepare(config: configs.RunConfig) -> int:
    """Prepare the data unless they are there and whole."""
    name: str = config.data.directory  # type: ignore[attr-defined]
    directory = ROOT / name
    is_there = (directory / fingerprint.MANIFEST).is_file()
    if is_there and not fingerprint.verify(directory, config.prepared_with(), hint=""):
        print(f"{config.benchmark}: {name} is prepared and intact")
        return EXIT_OK
    module = importlib.import_module(f"{config.benchmark}.data.prepare")
    digest = module.prepare(directory, config)
    print(f"{config.benchmark}: {name} prepared, fingerprint {digest}")
    return EXIT_OK
