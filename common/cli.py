"""`ttt` (time to train): finds the command, turns an error into one line and an exit code."""

import argparse
import difflib
import importlib
import importlib.metadata
import sys
import textwrap
import traceback
from typing import Any, NoReturn

from common.arguments import spread_settings
from common.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OUTPUT, EXIT_USAGE, UserError, nearest
from common.processes import handle_ending_signals, tolerate_lost_output

COMMANDS = {  # verb -> what it does; each is a module in common/commands, or in one of its FOLDERS
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
    "compare": "decide pair by pair which of two configurations is better",
    "bench": "measure the throughput of configurations side by side",
    "inspect": "captured graphs, kernels by class, or start-up of a configuration here",
    "compile": "compile a training step for a GPU that is not here; count what it launches",
    "ablate": "what each method of a configuration is worth, alone and together",
    "doctor": "check this machine before a run",
    "methods": "list the methods, or print the card of one",
    "profile": "say where a training step goes, and what bounds it",
    "estimate": "minutes and cost to the target, here, on more devices or elsewhere",
    "explore": "write one HTML page to explore every run and bench result",
}

FOLDERS = {
    "measure": ("bench", "compile", "inspect", "profile"),
    "study": ("ablate", "compare", "estimate", "explore", "sweep"),
}
OLD_NAMES = {"plan": ("estimate", "--scaling")}  # until the next release
DESCRIPTION = "Time to train: MLPerf-style training benchmarks, timed to a target quality."
EXIT_CODES = (
    "exit codes: 0 ok, 1 findings or target not reached, 2 usage, 3 internal error, "
    "130 interrupted, 141 output lost"
)


OTHER_WORDS = {  # what people type for a verb -> what to type
    "prepare": "did you mean data prepare?",
    "verify": "did you mean data verify?",
    "audit": "did you mean check?",
    "train": "did you mean run?",
    "list": "'ttt methods' lists methods, 'ttt run --help' benchmarks and configurations",
}


class Formatter(argparse.HelpFormatter):
    """Fills the prose of a description to the terminal, keeps its examples, and names defaults."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = []
        for part in text.split("\n\n"):
            is_prose = not any(line.startswith(" ") for line in part.splitlines())
            parts.append(textwrap.fill(part, width, break_on_hyphens=False) if is_prose else part)
        return "\n\n".join(parts)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if isinstance(default, list):
            default = " ".join(map(str, default))
        if default in (None, "", argparse.SUPPRESS) or isinstance(default, bool) or "default" in text:
            return text
        return f"{text} (default: {str(default).replace('%', '%%')})".lstrip()


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError that names the nearest option."""
        unknown, *_ = [*message.removeprefix("unrecognized arguments: ").split(), ""]
        close = difflib.get_close_matches(unknown, self._option_string_actions, n=1)
        is_option = unknown.startswith("--") and bool(close)
        raise UserError(message, hint=f"did you mean {close[0]}?" if is_option else f"see {self.prog} --help")


def overview() -> str:
    verbs = "\n".join(f"  {verb:11}{purpose}" for verb, purpose in COMMANDS.items())
    return (
        f"usage: ttt COMMAND [options]\n\n{DESCRIPTION}\n\ncommands:\n{verbs}\n\n"
        f"'ttt COMMAND --help' explains a command, 'ttt --version' names this version.\n{EXIT_CODES}"
    )


def command_module(verb: str) -> str:
    folder = next((f"{folder}." for folder, verbs in FOLDERS.items() if verb in verbs), "")
    return f"common.commands.{folder}{verb}"


def dispatch(arguments: list[str]) -> int:
    """Run one command and return its exit code; raises UserError for a person's mistake."""
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] == "--version":
        print(f"ttt {importlib.metadata.version('time-to-train')}")
        return 0
    verb, *rest = arguments
    if verb in OLD_NAMES:
        verb, *options = OLD_NAMES[verb]
        print(f"note: {arguments[0]} is now: ttt {verb} {' '.join(options)}", file=sys.stderr)
        rest = [*options, *rest]
    if verb not in COMMANDS:
        hint = OTHER_WORDS.get(verb) or nearest(verb, COMMANDS)
        raise UserError(f"unknown command '{verb}'", hint=hint)
    command = importlib.import_module(command_module(verb))
    parser = Parser(
        prog=f"ttt {verb}", description=command.__doc__, formatter_class=Formatter, epilog=EXIT_CODES
    )
    command.add_arguments(parser)
    return int(command.main(parser.parse_args(spread_settings(rest))))


def one_line(error: UserError) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())


def answer(arguments: list[str]) -> int:
    """Run one command and return its exit code; what went wrong is told in one line."""
    try:
        return dispatch(arguments)
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        print("error: internal fault; the lines above belong in a bug report", file=sys.stderr)
        return EXIT_INTERNAL


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command.

    A class of its own: after a plain KeyboardInterrupt that came in the `exec` of an import Python ends the
    process by SIGINT, although the exception was caught.
    """


def interrupt(number: int, frame: Any) -> NoReturn:
    raise Interrupted


def main() -> int:
    with handle_ending_signals(interrupt), tolerate_lost_output() as output:
        code = answer(sys.argv[1:])
        output.flush()
        if output.error is None:
            return code
        if not isinstance(output.error, BrokenPipeError):  # `ttt score | head` is no fault
            what = f"the output cannot be written ({output.error.strerror}); what was to be done is done"
            print(f"error: {what}", file=sys.stderr)
        return code or EXIT_OUTPUT


if __name__ == "__main__":
    sys.exit(main())
