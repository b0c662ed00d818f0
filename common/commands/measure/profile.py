"""Measure the parts of a training step in the real loop, its bottleneck, and what would remove that.

A few steps of each shape (image size, sequence mix) are taken apart into the wait for data, the methods that
change batches, the copy to the device, forward, backward, optimizer, logging, and with several ranks their
communication. In turns with them the same steps run on kept batches, without decoding, without augmentation
and without communication: what that saves is the evidence of the verdict. The figures go to
results/profile/<hardware>/ as JSON.

--delay-data shows what slow storage would do: each batch that is read comes so many milliseconds later
(divided by the readers; a batch that the loader has in memory needs no reading).

examples:
  ttt inspect profile image_classification optimized --size mini
  ttt inspect profile image_classification optimized --size mini --set data.loader=workers --delay-data 250
  ttt inspect profile language_bert optimized --size mini --delay-data 10
  ttt inspect profile language_bert optimized --size mini --nproc 2
  ttt inspect profile image_classification optimized --batch-size 256 --trace trace.json
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.arguments import add_shared, whole_number
from common.config.schema import Loaded
from common.data.preparation import check_data
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.text import line_console
from common.files import check_folder, temporary_folder
from common.machine import system
from common.measure.device_run import load_for_ranks
from common.measure.figures import keep
from common.repository import MODULE, data_folder
from common.run import launch
from common.run.supervision import rank_environments, supervise
from common.training import ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "benchmark", "configuration", "--size", "--set")
    samples = "samples in a step on each rank; default: at size full an eighth of the configuration's, "
    add_shared(parser, "--batch-size", help=f"{samples}at size mini its part of them")
    turns = "rounds of steps of each variant and shape"
    parser.add_argument("--turns", type=whole_number(2, 1000), default=4, metavar="N", help=turns)
    slow = "wait so long for each batch that is read, as slow storage would"
    parser.add_argument("--delay-data", type=float, default=0.0, metavar="MS", help=slow)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace of some steps")
    add_shared(parser, "--nproc", help="ranks that take the steps together, one per GPU; default: 1")
    add_shared(parser, "--json", "--data", "--results")


def main(args: argparse.Namespace) -> int:
    if not 0 <= args.delay_data <= 60_000:
        raise UserError(f"--delay-data {args.delay_data:g}: expected 0 to 60000 milliseconds")
    if args.trace:
        check_folder(args.trace, "--trace")
    rank_info = ranks.read_rank_info()
    if rank_info.world_size == 1 and (args.nproc or 1) > 1:
        loaded = loader(args, args.nproc)()
        launch.choose_ranks(loaded.config, args.nproc)
        check_data(loaded)
        with temporary_folder() as folder:
            folders = ["--data", str(data_folder()), "--results", str(args.results.resolve())]
            trace = ["--trace", str(args.trace.resolve())] if args.trace else []
            words = [*MODULE, "common.cli", *sys.argv[1:], *folders, *trace]  # the ranks start elsewhere
            number, code = supervise(words, rank_environments(args.nproc, folder))
        if code < 0:
            print(f"error: rank {number} {launch.describe_signal(-code)}", file=sys.stderr)
        return EXIT_FINDINGS if code < 0 else code
    figures = measure(args)
    if args.json and rank_info.rank == 0:
        print(json.dumps(figures))
    return EXIT_OK


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Profile with all the ranks that were started; rank 0 prints the tables and keeps the figures."""
    rank_info = ranks.read_rank_info()
    load = loader(args, rank_info.world_size)
    load()  # a wrong setting is refused before torch is loaded
    from common.measure.profiling.profile import profile

    console = line_console(stderr=args.json, quiet=rank_info.rank > 0)
    figures = profile(
        load, rank_info, num_turns=args.turns, delay_ms=args.delay_data, trace=args.trace, console=console
    )
    if rank_info.rank == 0:
        path = keep(figures, args.results / "profile" / system.hardware_name(), args.benchmark)
        console.print(f"-> {path}")
    return figures


def loader(args: argparse.Namespace, num_ranks: int) -> Callable[..., Loaded]:
    return partial(
        load_for_ranks,
        args.benchmark,
        args.configuration,
        size=args.size,
        settings=args.set,
        batch_size=args.batch_size,
        num_ranks=num_ranks,
    )
