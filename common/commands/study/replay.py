"""Make the run of a log again, and compare the two logs record by record.

The new run has the code, seed, configuration, ranks and threads of the log; other prepared data than the
log's are refused. If this clone has other code, that of the log's commit is unpacked into a temporary folder.
On the same hardware with the same versions all losses and accuracies repeat to the last bit. On other
hardware they must agree within the tolerance of the benchmark, if one is known. Times are printed only.

Of a folder all runs are made again. --draw makes one run of a sealed set again: VALUE, a public value that
was not known when the set ended, and the hash of its list of runs choose it.

The exit code is 1 if a run differs or nothing can be decided, 2 if a run cannot be made again.

examples:
  ttt check --replay results/reference-2cpu-mini-optimized/bert/result_0.txt
  ttt check --replay results/reference-2cpu-mini-optimized/bert --keep again
  ttt check --replay results/8xH100-optimized/bert --draw beacon:VALUE
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

from common.arguments import add_shared, whole_number
from common.errors import EXIT_FINDINGS, EXIT_OK
from common.evidence.compare.replayed import as_json
from common.processes import output_to_stderr
from common.study.replay import replay

MAX_THREADS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a result file, or the folder of a set"
    parser.add_argument("results", metavar="RESULT", type=Path, nargs="+", help=text)
    text = "replay one run of a sealed set: the one that a public value draws, newer than its runs.jsonl"
    parser.add_argument("--draw", metavar="beacon:VALUE", help=text)
    text = "keep the new results in DIR/<system>/<resnet|bert>; a result that is there is not made again"
    parser.add_argument("--keep", type=Path, metavar="DIR", help=text)
    text = "use N threads instead of the log's number; then the tolerance applies"
    parser.add_argument("--threads", type=whole_number(1, MAX_THREADS), metavar="N", help=text)
    add_shared(parser, "--json", "--data")


def main(args: argparse.Namespace) -> int:
    files = replay.choose(args.results, args.draw)
    with output_to_stderr() if args.json else nullcontext():
        replayed = replay.replay_all(files, threads=args.threads, keep=args.keep)
    if args.json:
        print(json.dumps({"replays": [as_json(entry) for entry in replayed]}, indent=1, allow_nan=False))
    return EXIT_OK if all(entry.is_accepted for entry in replayed) else EXIT_FINDINGS
