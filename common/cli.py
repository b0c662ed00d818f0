"""`ttt` (time to train): finds the command, turns an error into one line and an exit code."""

import argparse
import importlib
import os
import sys
import traceback

from common.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE, UserError, nearest

COMMANDS = {  # verb -> what it does; each is a module in common/commands
    "all": "prepare the data, time every configuration, audit, score and report",
    "run": "time one configuration to its target quality, N times",
    "data": "prepare or verify the data of a benchmark",
    "check": "audit result logs: MLCommons' checkers, then our rules",
    "score": "minutes to target by MLPerf's rule, with their uncertainty",
    "reproduce": "compare with the published results, factor by factor",
    "report": "write one HTML page with scores, plots and findings",
    "package": "assemble results, code and systems as an MLPerf submission, checked",
    "system": "describe this machine in MLPerf's fields, or check descriptions",
    "sweep": "measure trade-off curves: quality against time and cost, budget by budget",
    "bench": "measure the throughput of configurations side by side",
    "inspect": "captured graphs, kernels by class, or start-up of a configuration here",
    "compile": "compile a training step for a GPU that is not here; count what it launches",
    "ablate": "what each method of a configuration is worth, alone and together",
    "doctor": "check this machine before a run",
    "plan": "predict step time, efficiency, minutes and cost on more devices",
    "methods": "list the methods, or print the card of one",
    "profile": "say where a training step goes, and what bounds it",
    "estimate": "minutes and cost to the target, here or elsewhere; scored later",
    "explore": "write one HTML page to explore every run and bench result",
}

DESCRIPTION = "Time to train: MLPerf-style training benchmarks, timed to a target quality."
EXIT_CODES = "exit codes: 0 ok, 1 findings or target not reached, 2 usage, 3 internal error, 130 interrupted"


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of a description and names every default."""


def overview() -> str:
    """Return the text of `ttt --help`."""
    verbs = "\n".join(f"  {verb:11}{purpose}" for verb, purpose in COMMANDS.items())
    return (
        f"usage: ttt COMMAND [options]\n\n{DESCRIPTION}\n\ncommands:\n{verbs}\n\n"
        f"'ttt COMMAND --help' explains a command.\n{EXIT_CODES}"
    )


def dispatch(arguments: list[str]) -> int:
    """Run one command and return its exit code; raises UserError for a person's mistake."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    verb, *rest = arguments
    if verb not in COMMANDS:
        raise UserError(f"unknown command '{verb}'", hint=nearest(verb, COMMANDS))
    command = importlib.import_module(f"common.commands.{verb}")
    parser = argparse.ArgumentParser(
        prog=f"ttt {verb}", description=command.__doc__, formatter_class=Formatter, epilog=EXIT_CODES
    )
    command.add_arguments(parser)
    return int(command.main(parser.parse_args(rest)))


def one_line(error: UserError) -> str:
    """Return the message without line breaks and control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())


def main() -> int:
    """Entry point of `ttt`."""
    try:
        return dispatch(sys.argv[1:])
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `ttt score | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        print("error: internal fault; the lines above belong in a bug report", file=sys.stderr)
        return EXIT_INTERNAL


if __name__ == "__main__":
    sys.exit(main())
