"""Make the run of a log again, and compare the two record by record.

Code, seed, configuration, ranks and threads are those of the log, and so must be the data. The code is that
here where its digest is the log's, else that of the log's commit, unpacked into a temporary folder. On the
same hardware with the same versions the run repeats to the last bit. On other hardware losses and accuracies
must agree within the stated tolerance. Times are shown, not compared.

A folder is a set, whose runs are made again in turn; --draw makes one of a sealed set, which the hash of
its list of runs and a public value chose that came later.

The exit code is 1 if a run differs. It is 2 if one cannot be made again: no data, other data, no commit.

examples:
  ttt replay results/reference-2cpu-mini-optimized/bert/result_0.txt
  ttt replay results/reference-2cpu-mini-optimized/bert --keep again
  ttt replay results/8xH100-optimized/bert --draw beacon:VALUE
"""

import argparse
import json
from pathlib import Path

from common.arguments import add_folders, add_json, whole_number
from common.errors import EXIT_FINDINGS, EXIT_OK
from common.evidence.compare.replayed import as_json
from common.processes import output_to_stderr
from common.study.replay import replay

MAX_THREADS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a result file, or the folder of a set"
    parser.add_argument("results", metavar="RESULT", type=Path, nargs="+", help=text)
    text = (
        "of a sealed set the run that a public value draws, which came after the last line of its runs.jsonl"
    )
    parser.add_argument("--draw", metavar="beacon:VALUE", help=text)
    text = (
        "keep the new results, as DIR/<system>/<resnet|bert>; one that lies there is compared, not made again"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help=text)
    text = "take another number than the run did: within the tolerance"
    parser.add_argument("--threads", type=whole_number(1, MAX_THREADS), metavar="N", help=text)
    add_json(parser)
    add_folders(parser, "data")


def main(args: argparse.Namespace) -> int:
    files = replay.choose(args.results, args.draw)
    if args.json:
        with output_to_stderr():
            replayed = replay.replay_all(files, threads=args.threads, keep=args.keep)
        print(json.dumps({"replays": [as_json(entry) for entry in replayed]}, indent=1, allow_nan=False))
    else:
        replayed = replay.replay_all(files, threads=args.threads, keep=args.keep)
    return EXIT_OK if all(entry.is_accepted for entry in replayed) else EXIT_FINDINGS
