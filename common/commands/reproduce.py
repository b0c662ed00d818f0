"""Compare run sets with the published ones, factor by factor, and recompute the published claims.

A baseline is compared with the published baseline, optimized and mosaic with the published methods, published
logs with the entry of their own runs, or of their submitter, round and system; --against names another set,
or words of its title (--against "dell v3.1 8xH100"). Throughput and samples to target are reproduced when two
one-sided tests place their ratio within the margin, or, on the published accelerators, when they are better;
on others the verdict says so. A set of size mini is a proxy and reproduces nothing.

A full set is also compared with MLCommons' reference convergence points: the epochs or samples that the
closed division's reference needs at its batch size. The open division need not match them; they decide
nothing here.

The exit code is 0 if every set is reproduced, or is the published runs themselves, 1 if any is not: worse,
undecided by so few runs, or a proxy.
--claims reads no logs and exits with 0.

--plot FILE.svg writes one picture instead: samples to target by batch size of the published sets, open and
closed, of full sets below the paths, and of the reference.

--entries prints the entries of reported.yaml for the sets in copies of MLCommons' result repositories: closed
sets on one node of A100, H100 or H200 GPUs, and each set whose own folder is given as a path.

examples:
  ttt reproduce
  ttt reproduce results/8xA100-optimized --margin 0.03
  ttt reproduce results/1xH200-optimized/bert --against dgxa100_ngc22.09_pytorch
  ttt reproduce results/8xH100-closed/resnet --against "dell v3.1 8xH100"
  ttt reproduce --claims
  ttt reproduce --plot samples.svg
  ttt reproduce --entries training_results_v2.0 training_results_v2.1
"""

import argparse
import json

from common.arguments import add_shared, share, svg_file
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.compare.claims import judge
from common.evidence.compare.collect import entry_lines
from common.evidence.compare.lines import claim_json, claim_lines, reproduction_json, reproduction_lines
from common.evidence.compare.reported import Reported, load_reported
from common.evidence.compare.reproduce import MARGIN, Reproduction, choose_published, reproduce
from common.evidence.log import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "paths", "--results")
    text = "a published set of reported.yaml, by its name or words of its title; without it a closed set is "
    text += "compared with the reference points alone"
    parser.add_argument("--against", metavar="NAME", help=text)
    margin = "0.05: a ratio within 5 %% of 1 counts as equal"
    parser.add_argument("--margin", type=share, default=MARGIN, metavar="SHARE", help=margin)
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--claims", action="store_true", help="recompute the published claims, read no logs")
    entries = "print the sets below the paths as entries of reported.yaml"
    other.add_argument("--entries", action="store_true", help=entries)
    plot = "write the plot of samples to target by batch size instead"
    other.add_argument("--plot", type=svg_file, metavar="FILE.svg", help=plot)
    add_shared(parser, "--json")


def main(args: argparse.Namespace) -> int:
    if args.json and (args.entries or args.plot):
        where = "--entries" if args.entries else "--plot"
        raise UserError("prints no JSON", where=where, hint="leave out --json")
    if args.entries:
        print(*entry_lines(args.paths), sep="\n")
        return EXIT_OK
    published = load_reported()
    if args.plot:
        from common.evidence.compare.picture import write_picture  # loads matplotlib

        write_picture(args.plot, published, load(args.paths))
        return EXIT_OK
    comparisons = [] if args.claims else compare_sets(args, published)
    benchmarks = set(published) if args.claims else {entry.score.benchmark for entry in comparisons}
    claims = {name: judge(published[name]) for name in sorted(benchmarks & set(published))}
    if args.json:
        sets = [reproduction_json(entry) for entry in comparisons]
        judged = {name: [claim_json(entry) for entry in entries] for name, entries in claims.items()}
        print(json.dumps({"sets": sets, "claims": judged}, indent=2, allow_nan=False))
    else:
        for entry in comparisons:
            print(*reproduction_lines(entry), sep="\n")
        for name, entries in claims.items():
            print(f"{name}: what the published claims come to, from the published runs (reported.yaml)")
            print(*(line for entry in entries for line in claim_lines(entry)), sep="\n")
    return EXIT_OK if all(entry.is_reproduced for entry in comparisons) else EXIT_FINDINGS


def compare_sets(args: argparse.Namespace, published: dict[str, Reported]) -> list[Reproduction]:
    comparisons = []
    for run_set in load(args.paths):
        facts, theirs = published.get(run_set.lead.benchmark), None
        if facts and args.against:
            theirs = facts.find(args.against)
        elif facts:
            theirs = choose_published(facts, run_set)
        comparisons.append(reproduce(run_set, theirs, args.margin))
    return comparisons
