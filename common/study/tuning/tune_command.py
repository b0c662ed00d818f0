"""`ttt run -O0`, `-O1` and `-O2`: tune in a new process, keep the configuration as a file, run that."""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from common.arguments import whole_number
from common.config.merge import extend
from common.config.schema import Loaded
from common.data.preparation import check_data
from common.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from common.files import save_text
from common.machine import system
from common.repository import MODULE, WORKSPACE, mlperf_name, relative_path
from common.run import launch
from common.run.set_folder import find_changes, name_variant
from common.training import ranks

MAX_SECONDS = 86400


def add_options(parser: argparse.ArgumentParser) -> None:
    levels = "choose speed-ups for this machine first; 0: none, 1: the same mathematics, 2: any"
    parser.add_argument("-O", dest="level", type=int, choices=(0, 1, 2), help=levels)
    seconds, limit = whole_number(1, MAX_SECONDS), "how long -O1 and -O2 may search"
    parser.add_argument("--tune-seconds", type=seconds, default=300, metavar="S", help=limit)
    file = "file for the chosen configuration, NAME.yaml; default: beside the results"
    parser.add_argument("--write-config", type=Path, metavar="PATH", help=file)


def wants_tuning(args: argparse.Namespace) -> bool:
    """Return whether to tune. Raises UserError for options that do not fit together."""
    if args.write_config is not None and not args.level:
        raise UserError("--write-config needs something to write", hint="add -O1 or -O2")
    if args.write_config is not None and args.write_config.suffix != ".yaml":
        raise UserError("expected NAME.yaml", where="--write-config")
    if args.write_config is not None and args.write_config.exists():
        raise UserError("exists; it is not overwritten", where=str(args.write_config))
    if args.level == 0:
        print("-O0: nothing is tried, nothing is changed")
    if args.level and ranks.read_rank_info().world_size > 1:
        hint = "tune with -O1 --dry-run --write-config PATH in one process, then run PATH"
        raise UserError("-O tunes before ranks are started", hint=hint)
    return bool(args.level)


def choose_file(args: argparse.Namespace, loaded: Loaded) -> Path:
    """Return the file to run: the one that was chosen before, or a new one that another process writes."""
    path: Path = args.write_config or default_path(args, loaded)
    if path.exists():
        if not path.read_text(errors="replace").startswith(f"{describe_command(args, loaded)}\n"):
            hint = "remove it to choose anew"
            raise UserError("was chosen for other settings or ranks", where=relative_path(path), hint=hint)
        name = relative_path(path)
        print(f"-O{args.level}: as chosen before, {name}; remove it to choose anew", flush=True)
        return path
    check_data(loaded)
    source = str(Path(loaded.source).resolve()) if loaded.source.endswith(".yaml") else loaded.source
    command = run_command(args, args.benchmark, source)
    command += ["--tune-seconds", str(args.tune_seconds), "--write-config", str(path.resolve()), "--dry-run"]
    for name in ("seed", "nproc"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name}", str(value)]
    program = [sys.executable, *MODULE, "common.cli"]
    code = subprocess.run(program + command, cwd=WORKSPACE, check=False).returncode
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code != EXIT_OK:
        raise UserError(f"tuning ended with code {code}", hint="-O0 runs the configuration as it is")
    return path


def run_command(args: argparse.Namespace, benchmark: str, configuration: str) -> list[str]:
    settings = [part for setting in args.set for part in ("--set", setting)]
    return ["run", benchmark, configuration, "--size", args.size, f"-O{args.level}", *settings]


def describe_command(args: argparse.Namespace, loaded: Loaded) -> str:
    config, num_ranks = loaded.config, launch.choose_ranks(loaded.config, args.nproc)
    command = ["ttt", *run_command(args, config.benchmark, config.configuration)]
    command += ["--nproc", str(num_ranks)] if num_ranks > 1 else []
    return "# Found by: " + " ".join(shlex.join(command).split())  # a setting may have line breaks


def default_path(args: argparse.Namespace, loaded: Loaded) -> Path:
    """Name the file beside the results of this configuration, --set, ranks and threads."""
    config = loaded.config.replaced(configuration=f"{loaded.config.configuration}-O{args.level}")
    num_ranks = launch.choose_ranks(loaded.config, args.nproc)
    folder = name_variant(system.system_id(config), *find_changes(loaded, num_ranks, loaded.source))
    return Path(args.results.resolve(), folder, mlperf_name(config.benchmark), f"{config.configuration}.yaml")


def tune_here(args: argparse.Namespace, loaded: Loaded) -> int:
    """Tune in this process, print the outcome of each change, and write the file of --write-config."""
    from common.study.tuning import tune, tune_runs

    check_data(loaded)
    num_ranks = launch.choose_ranks(loaded.config, args.nproc)
    tuner = tune_runs.Tuner(loaded=loaded, settings=tuple(args.set), seed=args.seed or 0, num_ranks=num_ranks)
    config = loaded.config
    print(f"{config.benchmark} {config.configuration} {config.size}, -O{args.level}:", flush=True)

    def report(tried: tune.Tried) -> None:
        print(f"  {tried.change.name}: {tried.outcome}, {tried.why}", flush=True)

    search = tune.Search(tuner, seconds=args.tune_seconds, report=report)
    search.run(tune_runs.candidates(tuner, args.level))
    seen = tune.write_table(search)
    if all(tried.change.is_exact for tried in search.tried if tried.outcome == tune.KEPT):
        losses = tuner.losses(()), tuner.losses(search.state)
        seen += "\n" + tune_runs.compare_losses(*losses, config.precision)
    else:
        seen += "\ntraining was changed: its losses are its own"
    comment = [describe_command(args, loaded), *(f"# {line}".rstrip() for line in seen.splitlines())]
    text = extend(loaded.source, [*args.set, *search.state], "\n".join(comment))
    print(text, flush=True)
    if args.write_config is not None:
        save_text(args.write_config, text)
        print(f"-> {args.write_config}")
    return EXIT_OK
