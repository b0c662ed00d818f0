"""Write one HTML page to explore every run and bench result: filters, curves, trade-offs, prices.

The page is one file that needs no network. It lays quality-against-time and quality-against-cost curves over
each other, draws the Pareto front, answers which recipe is the cheapest at the same quality and the best at
the same cost, re-prices runs by $/h, and lists every run with its log and what `ttt check` finds in it.
Published sets and predictions for other hardware stand beside the runs, marked. What is chosen stands in the
page's address, so a view can be shared.

examples:
  ttt report --explore
  ttt report --explore results --out explore.html
  ttt report --explore results/study/sweep results/throughput
"""

import argparse
from functools import partial
from pathlib import Path

from rich.progress import Progress

from common.arguments import add_shared, repository_path
from common.errors import EXIT_OK
from common.evidence.audit import Audited, audit_paths
from common.evidence.paths import find_logs, find_studies
from common.evidence.records import counted, printable
from common.evidence.report import EXPLORER, page_path
from common.evidence.text import line_console
from common.files import save_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "paths", "--results", "--systems")
    page_name = "the page, NAME.html, or a folder for explore.html; default: report/ of the repository"
    add_shared(parser, "--out", help=page_name, default=repository_path("report"), metavar="PATH")
    dated = "dated prices in place of common/study/prices.yaml"
    parser.add_argument("--prices", type=Path, metavar="FILE", help=dated)


def main(args: argparse.Namespace) -> int:
    from common.study import explore, points
    from common.study.prices import PRICES, load_prices

    file, prices = page_path(args.out, EXPLORER), load_prices(args.prices or PRICES)
    console = line_console(stderr=True)
    rates = points.read_benches(args.paths, console.print)
    paths = args.paths + find_studies(args.paths)
    audited: list[Audited] = []
    if not rates or any(True for path in paths for _ in find_logs(path)):
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            advance = partial(progress.update, progress.add_task("reading logs", total=None), advance=1)
            audited = audit_paths(paths, lambda _, total: advance(total=total), systems=args.systems)
    run_sets = [entry.run_set for entry in audited]
    others = points.published_points() + points.predicted_points(args.paths, rates, run_sets, console.print)
    page = explore.render(explore.page_data(audited, rates, prices, file.parent, others))
    save_text(file, page)
    num_runs = sum(len(entry.run_set.logs) for entry in audited)
    size = file.stat().st_size / 1e6
    predicted = sum(point.kind == "predicted" for point in others)
    print(
        f"wrote {printable(str(file))}: {counted(num_runs, 'run')}, {counted(len(rates), 'bench result')}, "
        f"{counted(predicted, 'prediction')}, {size:.1f} MB"
    )
    return EXIT_OK
