"""`ttt` (time to train): finds and runs a command, and turns an error into one line and an exit code."""

import argparse
import difflib
import importlib
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from itertools import chain, takewhile
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from common import repository
from common.arguments import Formatter, benchmark_names, settle_folders, spread_settings
from common.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OUTPUT, EXIT_USAGE, UserError, nearest
from common.processes import Output, handle_ending_signals, tolerate_lost_output

GROUPS = {  # verb -> what it does; each is a module in common/commands, or in one of its FOLDERS
    "run": {
        "list": "list benchmarks, sizes and configurations; or the methods",
        "doctor": "check this machine before a run, or describe it",
        "accept": "check this machine, and compare its speed with expected rates",
        "data": "fetch, prepare or verify the data of a benchmark",
        "run": "time a configuration to its target quality, or --all of them",
    },
    "evidence": {
        "check": "audit result logs: MLCommons' checkers, then our rules",
        "score": "minutes to target by MLPerf's rule, with their uncertainty",
        "reproduce": "compare with the published results, factor by factor",
        "report": "write one HTML page of scores, or one to --explore every run",
        "export": "write runs for TensorBoard, MLflow, W&B, CSV; a submission",
    },
    "study": {
        "bench": "measure the throughput of configurations side by side",
        "inspect": "look into a step: profile, graphs, kernels, compile and more",
        "compare": "decide pair by pair which of two configurations is better",
        "ablate": "measure what each method of a configuration is worth",
        "sweep": "measure quality against time and cost, budget by budget",
        "estimate": "predict minutes and cost to the target, here or elsewhere",
    },
}
COMMANDS = {verb: purpose for verbs in GROUPS.values() for verb, purpose in verbs.items()}
FOLDERS = {"bench": "measure."} | dict.fromkeys(("ablate", "compare", "estimate", "sweep"), "study.")


class Part(NamedTuple):
    """Work that a verb does in place of its usual work, with options of its own."""

    module: str  # in common/commands
    purpose: str


PARTS = {  # verb -> the words after it, wherever they stand, that choose a part
    "list": {"methods": Part("methods", "list the methods, or print the card of one")},
    "doctor": {"--describe": Part("system", "describe this machine in MLPerf's fields")},
    "data": {
        "fetch": Part("data", "download the public files"),
        "prepare": Part("data", "write the data that a run reads"),
        "verify": Part("data", "find changed, missing and extra files of prepared data"),
        "status": Part("data", "which data are here, and what to type next"),
    },
    "run": {"--all": Part("all", "prepare, time every configuration, check, score, report")},
    "check": {"--replay": Part("study.replay", "make the run of a log again, and compare")},
    "report": {"--explore": Part("study.explore", "one HTML page to explore every run")},
    "export": {"--to submission": Part("package", "an MLPerf submission, checked")},
    "inspect": {
        "profile": Part("measure.profile", "where a step's time goes, and what bounds it"),
        "graphs": Part("measure.inspect", "captured steps beside the same steps run eagerly"),
        "kernels": Part("measure.inspect", "time on the device by class of kernel"),
        "startup": Part("measure.inspect", "the time of start-up and of an evaluation"),
        "neighbour": Part("measure.inspect", "runs beside a busy process"),
        "compile": Part("measure.compile", "kernels of a step for a GPU that is not here"),
    },
}
NEED_PART = ("data", "inspect")
OLD_NAMES = {  # verb -> what it is called now; they work until the next release
    "all": ("run", "--all", "--size", "mini"),
    "compile": ("inspect", "compile"),
    "explore": ("report", "--explore"),
    "methods": ("list", "methods"),
    "package": ("export", "--to", "submission"),
    "plan": ("estimate", "--scaling"),
    "profile": ("inspect", "profile"),
    "replay": ("check", "--replay"),
    "system": ("doctor", "--describe"),
}
OTHER_WORDS = {  # what to type -> what people type for it
    "list": ("benchmarks", "configs", "configurations", "ls", "show"),
    "doctor": ("preflight", "test"),
    "doctor --describe": ("info",),
    "data fetch": ("download", "fetch"),
    "data prepare": ("prepare",),
    "data status": ("status",),
    "data verify": ("verify",),
    "run": ("evaluate", "fit", "launch", "start", "time", "train"),
    "run --continue": ("continue",),
    "run --resume": ("resume",),
    "run -O1": ("tune",),
    "check": ("audit", "validate"),
    "score": ("accuracy",),
    "report --plot": ("plot",),
    "export --to mlflow": ("mlflow",),
    "export --to tensorboard": ("tensorboard",),
    "export --to wandb": ("wandb",),
    "export --to submission": ("submission", "submit"),
    "bench": ("benchmark",),
    "inspect kernels": ("trace",),
    "estimate": ("cost", "predict"),
}
DESCRIPTION = "Time to train: MLPerf-style training benchmarks, timed to a target quality."
INTERRUPTED = "error: interrupted"
EXIT_CODES = (
    "exit codes: 0 ok, 1 findings or target not reached, 2 usage, 3 internal error, "
    "130 interrupted, 141 output lost"
)


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one line."""

    verb = part = ""

    def parse_args(self, words: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse the words; names an unknown option before its value could be taken for an argument."""
        for word in takewhile("--".__ne__, words):
            name = word.partition("=")[0]
            if name.startswith("--") and not any(known.startswith(name) for known in self.options()):
                self.error(f"unrecognized arguments: {name}")
        return super().parse_args(words)

    def options(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or str(action.metavar or action.dest)
            hint = nearest(str(value), map(str, action.choices))
            raise UserError(f"invalid choice: '{value}'", where=name, hint=hint)

    def error(self, message: str) -> NoReturn:
        """Raise UserError that names the part with this option, or the nearest option."""
        unknown, *_ = [*message.removeprefix("unrecognized arguments: ").split(), ""]
        hint = f"see {self.prog} --help"
        if unknown.startswith("--"):
            others = [part for part in ("", *PARTS.get(self.verb, ())) if part != self.part]
            owners = [part for part in others if unknown in make_parser(self.verb, part)[0].options()]
            known = [*self.options(), *(() if self.part else PARTS.get(self.verb, ()))]
            close = difflib.get_close_matches(unknown, [name for name in known if name != "--help"], n=1)
            if owners:
                hint = f"it is of ttt {self.verb} {owners[0]}".rstrip()
            elif close:
                hint = f"did you mean {close[0]}?"
        elif "--benchmarks" in self.options() and unknown in chain(*benchmark_names().items()):
            hint = f"did you mean --benchmarks {unknown}?"
        raise UserError(message, hint=hint)


def overview() -> str:
    groups = [
        "\n".join([f"{group}:", *(f"  {verb:11}{purpose}" for verb, purpose in verbs.items())])
        for group, verbs in GROUPS.items()
    ]
    more = "'ttt COMMAND --help' explains a command, 'ttt --version' names this version."
    parts = ["usage: ttt COMMAND [options]", DESCRIPTION, *groups, f"{more}\n{textwrap.fill(EXIT_CODES, 79)}"]
    return "\n\n".join(parts)


def find_part(verb: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Find the words that choose a part of a verb; returns the part, '' for none, and the other words.

    A word after an option that takes a value is that value and no part.
    """
    for start in range(len(words)):
        is_value = start > 0 and re.fullmatch(r"-(?!-(?:json|dry-run)$)[^=]+", words[start - 1])
        for part in PARTS.get(verb, {}):
            if is_value and not part.startswith("-"):
                continue
            for form in (part.split(), ["=".join(part.split())]):
                if list(words[start : start + len(form)]) == form:
                    return part, [*words[:start], *words[start + len(form) :]]
    return "", list(words)


def choose_description(text: str, part: str, start: str) -> str:
    """Leave out what is of other parts from the docstring of a module that several parts share.

    A paragraph that begins with `name: ` is of the part of that name.
    """
    if part:
        text = re.sub(rf"^(?!{part}: )[a-z]+: .*?\n\n", "", text, flags=re.MULTILINE | re.DOTALL)
    prose, title, examples = text.partition("examples:\n")
    lines = [
        line for line in examples.splitlines() if line.startswith(start) or not line.startswith("  ttt ")
    ]
    has_one = any(line.startswith(start) for line in lines)
    return prose + title + "\n".join(lines) if has_one else text


def make_parser(verb: str, part: str) -> tuple[Parser, ModuleType | None]:
    """Return the parser of a verb or its part, and their module; None for a verb that needs a part."""
    module = PARTS[verb][part].module if part else f"{FOLDERS.get(verb, '')}{verb}"
    is_whole = part or verb not in NEED_PART
    command = importlib.import_module(f"common.commands.{module}") if is_whole else None
    parts = {} if part else PARTS.get(verb, {})
    epilog = EXIT_CODES
    if parts:
        width = max(map(len, parts))
        listed = [f"  ttt {verb} {name:{width}}  {entry.purpose}" for name, entry in parts.items()]
        title = "also, each with its own --help:" if command else "parts, each with its own --help:"
        epilog = "\n".join([title, *listed, "", EXIT_CODES])
    prog, description = f"ttt {verb} {part}".rstrip(), f"{COMMANDS[verb]}.".capitalize()
    parser = Parser(
        prog=prog,
        usage=None if command else f"ttt {verb} PART ...",
        description=choose_description(command.__doc__ or "", part, f"  {prog}") if command else description,
        formatter_class=Formatter,
        epilog=epilog,
    )
    parser.verb, parser.part = verb, part
    parser.set_defaults(part=part)
    if command:
        command.add_arguments(parser)
    return parser, command


def dispatch(arguments: list[str]) -> int:
    """Run one command and return its exit code; raises UserError for a person's mistake."""
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] == "--version":
        state = repository.code_state()
        print(f"ttt {repository.version()}, commit {state.commit}, code {state.digest}")
        return 0
    verb, *words = arguments
    if verb in OLD_NAMES:
        if sys.stderr.isatty():  # scripts get no note
            print(f"note: ttt {verb} is now: ttt {' '.join(OLD_NAMES[verb])}", file=sys.stderr)
        verb, *options = OLD_NAMES[verb]
        words = [*options, *words]
    if verb not in COMMANDS:
        raise UserError(f"unknown command '{verb}'", hint=suggest(verb))
    part, words = find_part(verb, words)
    parser, command = make_parser(verb, part)
    if command is None:
        parser.parse_known_args(words)  # which answers --help
        raise UserError(f"{verb} needs a part", hint=suggest_part(verb, words))
    args = parser.parse_args(spread_settings(words))
    settle_folders(args)
    return int(command.main(args))


def suggest(word: str) -> str:
    """Suggest what to type for a word that is no verb: by its meaning, or its letters."""
    if word in ("install", "setup"):
        return "see docs/install.md"
    verbs = {name: name for name in (*COMMANDS, "--help", "--version")}
    known = verbs | {old: " ".join(new) for old, new in OLD_NAMES.items()}
    known |= {word: line for line, words in OTHER_WORDS.items() for word in words}
    known |= {name: f"run {name}" for names in benchmark_names().items() for name in names}
    matches = difflib.get_close_matches
    close = matches(word, known, n=1, cutoff=0.8) or matches(word, verbs, n=1)
    return f"did you mean {known[close[0]]}?" if close else f"known: {', '.join(COMMANDS)}"


def suggest_part(verb: str, words: Sequence[str]) -> str:
    parts = PARTS[verb]
    close = [name for word in words for name in difflib.get_close_matches(word, parts, n=1)]
    return f"did you mean {verb} {close[0]}?" if close else f"one of: {', '.join(parts)}"


def complete() -> None:
    """Answer a shell that asks how a line may go on, and end the process; nothing without argcomplete.

    The verb and its part are taken out of the line, so that their own parser can read it.
    """
    try:
        import argcomplete
    except ImportError:
        return
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    program, *words = line.split()
    last = "" if line.endswith(" ") or not words else words.pop()
    verb, *words = (*OLD_NAMES.get(words[0], words[:1]), *words[1:]) if words else ("",)
    if verb in COMMANDS:
        part, words = find_part(verb, words)
        parser, _ = make_parser(verb, part)
        offer_names(parser, [] if part else offer_parts(parser, PARTS.get(verb, {})))
    else:
        parser = Parser()
        parser.add_argument("command", choices=[] if verb else [*COMMANDS])
    line = " ".join([program, *words, last])
    os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    argcomplete.autocomplete(parser, always_complete_options=False)


def offer_parts(parser: Parser, parts: Iterable[str]) -> list[str]:
    """Let a parser complete the options that choose a part; returns the parts that are words."""
    for option, *values in (part.split() for part in parts if part.startswith("-")):
        if action := parser._option_string_actions.get(option):
            action.choices = [*(action.choices or ()), *values]
        elif values:
            parser.add_argument(option, choices=values)
        else:
            parser.add_argument(option, action="store_true")
    return [part for part in parts if not part.startswith("-")]


def offer_names(parser: Parser, parts: Sequence[str]) -> None:
    """Let a parser complete benchmarks and configurations, and the words that choose a part."""

    def offer_benchmarks(**_: Any) -> list[str]:
        return [*parts, *(name for both in benchmark_names().items() for name in both)]

    def offer_configurations(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
        chosen = getattr(parsed_args, "benchmark", None)
        folders = repository.benchmarks() if chosen is None else [chosen]
        return [name for folder in folders for name in repository.configurations(folder)]

    offers: dict[str, Any] = dict.fromkeys(("benchmark", "benchmarks"), offer_benchmarks)
    offers |= dict.fromkeys(("configuration", "configurations", "a", "b"), offer_configurations)
    if parts and all(action.dest != "benchmark" for action in parser._actions):
        parser.add_argument("part", choices=parts)
    for action in parser._actions:
        if action.dest in offers:
            action.completer = offers[action.dest]  # type: ignore[attr-defined]


def one_line(error: UserError) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())


def answer(arguments: list[str]) -> int:
    """Run one command and return its exit code; an error is printed in one line."""
    try:
        return dispatch(arguments)
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    except SystemExit as end:  # argparse has printed the help of a command
        return int(end.code or 0)
    except (KeyboardInterrupt, Exception) as error:
        # A second signal, as `timeout` sends, ends the tidying up after the first one with any error.
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
            print(INTERRUPTED, file=sys.stderr)
            return EXIT_INTERRUPTED
        if missing := repository.explain_machine_fault(error):
            print(f"error: {one_line(missing)}", file=sys.stderr)
            return EXIT_USAGE
        traceback.print_exc()
        print("error: internal fault; the lines above belong in a bug report", file=sys.stderr)
        return EXIT_INTERNAL


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command.

    Not a plain KeyboardInterrupt: after one inside the `exec` of an import Python ends the process by SIGINT,
    although the exception was caught.
    """


def interrupt(number: int, frame: Any) -> NoReturn:
    raise Interrupted


def main() -> int:
    if "_ARGCOMPLETE" in os.environ:
        complete()
    try:
        with handle_ending_signals(interrupt), tolerate_lost_output() as output:
            return finish(answer(sys.argv[1:]), output)
    except Interrupted:  # before `answer` began, or after its end
        print(INTERRUPTED, file=sys.stderr)
        return EXIT_INTERRUPTED


def finish(code: int, output: Output) -> int:
    """Flush the output; returns the exit code, EXIT_OUTPUT for a success whose output was lost."""
    output.flush()
    if output.error is None:
        return code
    if not isinstance(output.error, BrokenPipeError):  # `ttt score | head` is no fault
        what = f"the output cannot be written ({output.error.strerror}); what was to be done is done"
        print(f"error: {what}", file=sys.stderr)
    return code or EXIT_OUTPUT


if __name__ == "__main__":
    sys.exit(main())
