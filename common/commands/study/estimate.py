"""Estimate minutes and cost to the target, here or on other hardware, with an interval; score it later.

Rates come from the newest profile of this configuration in results/profile/<hardware>/, else from the newest
`ttt bench` in results/throughput/<hardware>/, else a profile is measured now. Samples to the target come from
the logs in results/ of the same recipe (seeds give the spread), else from the published runs. Evaluation and
start-up count. Every estimate is kept below results/estimates/; --score compares each with the runs that came
after it, --reprice prices them anew.

--scaling prints step time, efficiency, minutes and cost of 1, 2, 4 ... devices instead, from the throughput
of one (--bench, --measured); two batches that differ by a factor of two show the part of a step that is
fixed. Nothing is started or kept. --check-published predicts published results of many machines from their
submitters' smallest ones, with errors.

examples:
  ttt estimate language_bert optimized --size mini --price own=0.04
  ttt estimate image_classification mosaic --hardware 8xA100 --measured 3039@256 --devices 8 --inside nvlink3
  ttt estimate --score
  ttt estimate --reprice --prices my_prices.yaml
  ttt estimate language_bert baseline --scaling --devices 128 --measured 70@56 --network 8xhdr --price 2
  ttt estimate language_bert optimized --size mini --scaling --devices 4 --bench FIGURES.json --network 100
  ttt estimate --check-published
"""

import argparse
import json
from pathlib import Path
from typing import Any

from common.arguments import add_shared, list_benchmarks, whole_number
from common.config.names import split_name
from common.errors import EXIT_OK, UserError
from common.evidence.text import line_console
from common.measure import figures
from common.measure.scaling import FORMULA
from common.repository import ROOT
from common.study.predict import devices, published, records
from common.study.prices import PRICES, choose_prices, load_prices
from common.training.load import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "benchmark", nargs="?")
    add_shared(parser, "configuration", nargs="?")
    add_shared(parser, "--size", "--set")
    parser.add_argument("--hardware", metavar="NAME", help="read figures of this folder, measure nothing")
    many: dict[str, Any] = {"action": "append", "default": []}
    text = "figures of `ttt bench`, or a row of systems/gpu_day.sh"
    parser.add_argument("--bench", type=Path, metavar="FILE", help=text, **many)
    parser.add_argument("--measured", metavar="SAMPLES_PER_S@BATCH", help="the rate of one device", **many)
    parser.add_argument("--measure", action="store_true", help="profile now, even where figures are kept")
    samples = "to the target; default: as measured, else as published"
    parser.add_argument("--samples", type=whole_number(1, 10**12), metavar="N", help=samples)
    devices.add_options(parser)
    dated = "dated prices; default: common/study/prices.yaml"
    parser.add_argument("--prices", type=Path, default=PRICES, metavar="FILE", help=dated)
    price = "a row of them, own=DOLLARS for an hour of your own machine, or DOLLARS for an hour of a device"
    rows = "default: every row; --scaling takes one, default: none"
    parser.add_argument("--price", metavar="NAME", help=f"{price}; {rows}", **many)
    parser.add_argument("--scaling", action="store_true", help="predict 1, 2, 4 ... devices")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--score", action="store_true", help="compare earlier estimates with later runs")
    other.add_argument("--reprice", action="store_true", help="price earlier estimates anew")
    checked = "compare predictions with published results"
    other.add_argument("--check-published", action="store_true", help=checked)
    add_shared(parser, "--json", "--data", "--results")


def main(args: argparse.Namespace) -> int:
    prices = choose_prices(load_prices(args.prices), args.price)
    if args.configuration is not None:
        args.configuration, changes = split_name(args.benchmark, args.configuration, size=args.size)
        args.set = [*changes, *args.set]
    if args.check_published:
        checks = published.check_published(ROOT)
        print(published.as_json(checks) if args.json else "\n".join(published.describe(checks)))
    elif args.score:
        lines, scores = records.score(args.results, records.read_records(args.results))
        print(json.dumps(scores) if args.json else "\n".join(lines))
    elif args.reprice:
        lines, priced = records.reprice(records.read_records(args.results), prices)
        print(json.dumps(priced) if args.json else "\n".join(lines))
    elif args.configuration is None:
        hint = f"ttt estimate BENCHMARK CONFIGURATION, of {list_benchmarks()}"
        lacking = "no configuration was" if args.benchmark else "no benchmark and configuration were"
        raise UserError(f"{lacking} given", hint=hint)
    elif args.scaling:
        if len(args.price) > 1:
            raise UserError("--scaling takes one price", where="--price", hint="leave the others out")
        rows, assumptions = devices.predict_scaling(args, prices[0] if args.price else None)
        if args.json:
            print(json.dumps({"rows": rows, "formula": FORMULA, "assumptions": assumptions}))
        else:
            print(*devices.describe(rows, assumptions), sep="\n")
    else:
        config = load_config(args.benchmark, args.configuration, size=args.size, settings=args.set).config
        record = records.make_record(args, config)
        folder = args.results / records.ESTIMATES / record["system"]
        path = figures.keep(record, folder, args.benchmark)
        console = line_console(stderr=args.json)
        costs = records.describe_costs(record, prices)
        console.print(*records.describe(record), *costs, f"-> {path}", sep="\n")
        if args.json:
            print(json.dumps(record | {"costs": records.list_costs(record, prices)}))
    return EXIT_OK
