"""Pairs of runs: one run of each of two cells in turn, until the comparison is decided."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

from common.errors import EXIT_OK
from common.evidence.log import Log
from common.machine import system
from common.run import run_sets
from common.study import cells
from common.study.cells import Study

NUM_EVALUATIONS = 20  # of a run: the target is crossed between two of them

Logs = tuple[tuple[Log, ...], tuple[Log, ...]]


def read_pairs(study: Study) -> Logs:
    """Return the finished runs of both cells."""
    one, other = (cells.finished_runs(study.directory(cell)) for cell in study.cells)
    return one, other


def make_pairs(study: Study, args: argparse.Namespace, is_over: Callable[[Logs], bool]) -> int:
    """Make pairs of runs until `is_over` is true of them, or they are all made; returns the exit code.

    The cell that begins alternates. A run that fails ends the comparison, and so does an interruption.
    """
    cells.plan_run_sets(study, args)  # a mistake is told before a folder is made
    with run_sets.lock_folders([study.folder]):
        num_there = min(map(len, read_pairs(study)))
        for number in range(num_there + 1, study.num_seeds + 1):
            planned = cells.plan_run_sets(replace(study, num_seeds=number), args)
            if number > 1 and is_over(read_pairs(study)):
                return EXIT_OK
            config = planned[0].loaded.config
            system.write_description(config, study.folder, system.machine_id(config))
            turns = [run_set for run_set in planned if cells.missing(run_set)]
            turns = turns if number % 2 else turns[::-1]
            if code := run_sets.run_all(turns, sys.argv[1:], fail_fast=True):
                return code
        is_over(read_pairs(study))
    return EXIT_OK
