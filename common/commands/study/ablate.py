"""Measure the worth of each method of a configuration: alone, left out, and together with the others.

CONFIGURATION is compared with the one that it extends. Each of its switches (methods, and other keys that
differ) is turned on alone, with what it needs, and left out alone, with what needs it; a two-level factorial
of step times shows which work against each other, with --factorial-seeds also in samples and quality. Step
times come first, side by side in this process; then every state is trained to the end as a cell of a study.
The ledger says what each changes in throughput, samples to the target, quality and minutes, what the share of
its part of a step lets it gain at most (Amdahl), and what all should gain together against what they do. An
effect is shown if p < 5 % after Holm's correction for all switches. The ledger is
results/study/<study>/<...>.ledger.json, where `ttt report` finds it.

Finished runs and step times are kept: the same command goes on where it was interrupted.

examples:
  ttt ablate image_classification optimized --size mini
  ttt ablate language_bert optimized --size mini --step-only
  ttt ablate image_classification optimized --size mini --dry-run
"""

import argparse
from pathlib import Path

from rich.text import Text

from common.arguments import add_shared, share, whole_number
from common.data.preparation import check_data
from common.errors import EXIT_INTERRUPTED, EXIT_OK
from common.evidence.ledger import PATTERN
from common.evidence.text import line_console
from common.files import save_text
from common.repository import relative_path
from common.run import run_sets
from common.study import cells
from common.study.ablation import design
from common.study.ablation import ledger as ledgers
from common.study.ablation.experiment import Experiment
from common.study.ablation.measurements import turns_to_show
from common.study.ablation.switches import Switches

IN_NAME = "CONFIGURATION"

positive, count = whole_number(1, 1000), whole_number(0, 1000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "benchmark")
    parser.add_argument("configuration", help="one of 'ttt list' that extends another")
    cells.add_options(parser, study=f"ablate-{IN_NAME}")
    run_sets.add_fail_fast(parser)
    parser.set_defaults(seeds=2)
    more = "add seeds while a test that may stop at any time can still decide something; default: --seeds"
    parser.add_argument("--max-seeds", type=count, default=0, metavar="N", help=more)
    ends = "runs of CONFIGURATION and of what it extends: their spread gives intervals; at least --seeds"
    parser.add_argument("--end-seeds", type=positive, default=2, metavar="N", help=ends)
    trained = "runs of each state of the factorial; 0: step times only"
    parser.add_argument("--factorial-seeds", type=count, default=0, metavar="N", help=trained)
    states = "at most so many states of the factorial; 0: none"
    parser.add_argument("--max-design", type=count, default=16, metavar="N", help=states)
    parser.add_argument("--step-only", action="store_true", help="time steps only, train nothing")
    enough = "rounds of steps; raised where fewer cannot show an effect: from 13 switches on, to 10 or more"
    parser.add_argument("--turns", type=positive, default=9, metavar="N", help=enough)
    parser.add_argument("--remeasure", action="store_true", help="measure step times again")
    kept = "run nothing: answer from finished runs and kept step times, whatever code and machine made them"
    parser.add_argument("--answers", action="store_true", help=kept)
    quality = "quality to which samples are counted; default: the target"
    parser.add_argument("--target", type=share, metavar="Q", help=quality)


def main(args: argparse.Namespace) -> int:
    return cells.print_report(args, ablate)


def ablate(args: argparse.Namespace) -> tuple[int, Path | None]:
    """Plan, measure, train, calculate, print; returns the exit code, and the path of the ledger."""
    from common.measure.steptime import buildable

    console = line_console()
    switches = Switches(
        args.benchmark, args.configuration, size=args.size, settings=args.set, build=buildable
    )
    with console.status("finding out what can be built"):
        ablation = design.plan(switches, args.max_design)
    console.print(*map(Text, design.describe(ablation)), sep="\n")
    if (needed := turns_to_show(len(switches.switches))) > args.turns:
        console.print(f"{needed} turns instead of {args.turns}: fewer cannot show an effect on throughput")
        args.turns = needed
    args.max_seeds = max(args.max_seeds, args.seeds)
    args.study = args.study.replace(IN_NAME, args.configuration)
    study = cells.from_arguments(args, [])
    experiment = Experiment(ablation=ablation, study=study, args=args, console=console)
    if args.dry_run:
        counts = experiment.num_runs
        runs = "no runs" if args.step_only else f"{sum(counts.values())} runs of {len(counts)} cells"
        console.print(f"{len(ablation.states)} states are timed, {runs} trained")
        experiment.load_steps()
        return EXIT_OK if args.step_only else experiment.run_cells(), None
    trains, code = not (args.step_only or args.answers), EXIT_OK
    if trains:
        check_data(switches.load(switches.all))  # before minutes of step times
    if args.answers:
        figures = experiment.kept_steps()
    else:
        figures = experiment.load_steps() or experiment.measure_steps()
    if trains:
        console.print(experiment.expect_training(figures))
        code = experiment.run_cells()
    if code == EXIT_INTERRUPTED:
        return code, None
    ledger = ledgers.make_ledger(experiment, figures)
    path = study.report.with_suffix(PATTERN.removeprefix("*"))
    save_text(path, ledger.model_dump_json(indent=1) + "\n")
    ledgers.show(ledger)
    console.print(f"-> {relative_path(path)}")
    return code, path
