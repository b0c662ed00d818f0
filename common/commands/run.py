"""Time one configuration of a benchmark from run_start to its target quality, N times.

Each run is one process and one result file, results/<system>/<resnet|bert>/result_N.txt, which is never
overwritten. A run that does not reach its target ends `aborted`, is kept, and makes the exit code 1; the set
goes on with the next run, and says at the end what is missing. common/run/README.md lists what faults do.

With `--set checkpoint_every=100ba` (batches; `ep`, `sp`: epochs, samples) a run keeps a checkpoint beside its
result until it reaches its target. The same command with `--resume RESULT` goes on from there, in a new
result whose clock has run since the first start. It is for research: no score counts it unless told to.

-O1 tries, before the runs, speed-ups that leave the mathematics alone, and keeps each only when it is faster
on this machine beyond noise and its numbers agree; -O2 also tries those that change training. The choice is a
YAML file beside the results, which a later run of the same command uses again.

A set is sealed before its first run; with --seal and --seed-from its seeds come from a later public value.

examples:
  ttt run language_bert optimized --size mini --runs 3
  ttt run image_classification baseline --size mini --set optimizer.learning_rate=0.1
  ttt run language_bert optimized-fused_qkv --size mini
  ttt run image_classification optimized --size full --dry-run
  ttt run language_bert baseline --size mini -O1 --dry-run
  ttt run language_bert optimized --size mini --runs official --continue
  ttt run language_bert optimized --size mini --seal "drand quicknet, round N"
  ttt run language_bert optimized --size mini --data /raid/mlperf --results /lustre/runs/results
  ttt run language_bert baseline --size mini --set checkpoint_every=1ep --resume results/.../result_0.txt
"""

import argparse
import sys
from functools import partial

from common.arguments import add_shared, seed
from common.config.division import check_seed
from common.config.names import split_name
from common.data.preparation import check_data
from common.errors import EXIT_OK
from common.machine import system
from common.run import launch, resume, run_sets
from common.run.sealing import seal
from common.study.tuning import tune_command
from common.training import batch_check, ranks
from common.training.load import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "benchmark", "configuration", "--size")
    add_shared(parser, "--runs", default="1")
    first = "seed of the first run, the next ones count up; default: random; not for closed configurations"
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=seed, metavar="N", help=first)
    seal.add_options(seeds)
    add_shared(parser, "--set", help="change a key, such as optimizer.learning_rate")
    add_shared(parser, "--nproc")
    run_sets.add_options(parser)
    resume.add_options(parser)
    tune_command.add_options(parser)
    add_shared(parser, "--data", "--results", "--systems")
    plan = "print the merged configuration and the plan, then stop; with -O1, -O2: search, print the choice"
    parser.add_argument("--dry-run", action="store_true", help=plan)


def main(args: argparse.Namespace) -> int:
    """Run the set; returns the first exit code that was not 0."""
    args.configuration, changes = split_name(args.benchmark, args.configuration, size=args.size)
    args.set = [*changes, *args.set]
    loaded = load_config(args.benchmark, args.configuration, size=args.size, settings=args.set)
    check_seed(loaded.config, args.seed)
    tuned_from = ""
    if tune_command.wants_tuning(args):
        if args.dry_run:
            return tune_command.tune_here(args, loaded)
        path = tune_command.choose_file(args, loaded)
        tuned_from = "" if args.write_config else loaded.source
        loaded = load_config(args.benchmark, str(path), size=args.size, settings=args.set)
    if args.dry_run:
        from common.measure.dry_run import describe_run

        num_ranks = args.nproc or launch.choose_ranks(loaded.config, None)
        launch.check_batch_share(loaded.config, num_ranks)
        print(describe_run(batch_check.mark_unverified(loaded, num_ranks), num_ranks))
        return EXIT_OK
    loaded, num_ranks = launch.verify_recipe(loaded, args.nproc)
    plan = partial(
        launch.plan_run_set,
        loaded,
        results=args.results.resolve(),
        runs=args.runs,
        seed=args.seed,
        num_ranks=num_ranks,
        tuned_from=tuned_from,
    )
    if ranks.read_rank_info().rank:
        starts_none = args.seal or (args.continues and run_sets.is_complete(plan()))
        return EXIT_OK if starts_none else launch.take_part(args.hung_after)
    for change in batch_check.unverified(loaded):
        print(change)
    run_set = plan()
    check_data(loaded)
    resume.check_options(args, run_set)
    if args.seal:
        return seal.seal_for_beacon(run_sets.apply_options(run_set, args), args.seal)
    if args.seed_from:
        run_set = seal.derive_run_set(run_set, args.seed_from, continues=args.continues)
    with run_sets.lock_folders([run_set.directory] if args.index is None else []):
        run_set = run_sets.apply_options(run_set, args, args.seed)
        if args.resume is not None:
            run_set = resume.resume_run_set(run_set, args.resume, seed=args.seed)
        system.write_description(loaded.config, args.systems.resolve(), run_set.system)
        return run_sets.run_all([run_set], sys.argv[1:], fail_fast=args.fail_fast, index=args.index)
