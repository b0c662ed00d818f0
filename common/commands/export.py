"""Write runs into TensorBoard, MLflow, Weights & Biases or CSV files, from their logs alone.

A run is exported after its end or while it goes on, by a separate process that only reads its log, so no
export time is inside its clock. The export has loss, quality and samples per second against samples and
wall-clock time, the status, minutes to the target, the merged configuration and the provenance. A run is
identified by set, number and start: exported twice, it is still one run.

Nothing leaves this machine: MLflow gets a SQLite database, W&B runs offline (`wandb sync` sends the runs).
--out http://HOST:PORT names a server of MLflow, which then gets the runs. csv needs no library; the extra
`track` installs those of the other trackers.

examples:
  ttt export --to csv
  ttt export results/8xA100-optimized --to tensorboard --out runs
  ttt export results/8xA100-optimized --to mlflow --follow
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from common.arguments import add_shared, repository_path
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.trackers.csv_files import CsvFiles
from common.evidence.trackers.export import export_runs
from common.evidence.trackers.mlflow import MlflowStore
from common.evidence.trackers.store import Store
from common.evidence.trackers.tensorboard import TensorBoardFiles
from common.evidence.trackers.wandb import WandbRuns

STORES: dict[str, type[Store]] = {
    "csv": CsvFiles,
    "mlflow": MlflowStore,
    "tensorboard": TensorBoardFiles,
    "wandb": WandbRuns,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "paths", "--results")
    parser.add_argument("--to", required=True, choices=STORES, help="the tracker that shows the runs")
    out = "the folder to write to; default: export/TRACKER of the repository"
    add_shared(parser, "--out", help=out, type=str, metavar="DIR")
    follow = "go on while runs write their logs, until all have ended or Ctrl-C"
    parser.add_argument("--follow", action="store_true", help=follow)


def main(args: argparse.Namespace) -> int:
    store = open_store(args.to, args.out)
    num_runs = export_runs(args.paths, store, follows=args.follow, report=partial(print, flush=True))
    if not num_runs:
        print("no run was exported", file=sys.stderr)
        return EXIT_FINDINGS
    is_server = str(store).startswith(("http://", "https://"))
    print(f"to see them: {store if is_server else store.view.format(out=store)}")
    return EXIT_OK


def open_store(tracker: str, out: str | None) -> Store:
    """Open the store of a tracker; a folder, or an address of MLflow."""
    folder = repository_path("export") / tracker
    if out is None or "://" not in out:
        return STORES[tracker](Path(out) if out else folder)
    if tracker != "mlflow":
        raise UserError(f"{tracker} is exported into a folder", where=f"--out {out}")
    return MlflowStore(folder, uri=out)
